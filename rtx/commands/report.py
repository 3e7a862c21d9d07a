"""`rtx report RUN ... [output=folder]`: tables of runs beside the paper's, plots, and a page."""

import textwrap
from dataclasses import replace
from pathlib import Path

from rtx.cli.request import Request
from rtx.errors import RunFailed, UserError, plural, printable
from rtx.report.contents import build, list_of_tables, printed_view, write
from rtx.report.paper import paper_tables
from rtx.report.run_records import collect
from rtx.report.tables import aligned, terminal
from rtx.runs.folder import last_active, outputs_root, run_folders, shown
from rtx.runs.study import is_study, steps_files
from rtx.terminal import terminal_width


def main(request: Request) -> int:
    """Write and print the report of runs.

    Without a run, print the paper's tables and what of them is in outputs/.
    """
    width = terminal_width()
    runs = list(request.runs)
    output = request.options.output
    if output and not runs:
        raise UserError(f"output={output}: which runs? usage: {request.command.usage()}")
    for folder in runs:
        if not is_study(folder) and not run_folders(folder) and not steps_files(folder):
            why = "no such folder"
            if folder.is_dir():
                why = (
                    "holds no run; a run has a config.yaml "
                    "(rtx report alone prints the paper's tables)"
                )
            raise UserError(f"{folder}: {why}")
    if not runs:
        print("\n".join(offered(width)))
        return 0
    found = collect(runs)
    report = build(found, "rtx report: " + ", ".join(map(shown, runs)))
    # A report of one run has no name of others.
    others = "-".join(["", *(run.absolute().name for run in runs[1:])])[:100]
    output = Path(output or beside(runs[0]) / f"report{others}").expanduser()
    try:
        files = write(report, output)
    except OSError as error:
        raise RunFailed(
            f"cannot write to {output}: {error.strerror}; output=<folder> names another"
        ) from error
    if report.answer:
        print(
            *(printable(textwrap.fill(line, width)) for line in [report.headline, *report.lines]),
            "",
            sep="\n",
        )
        print(terminal(replace(report.answer, lines=[]), width, strip=True), "", sep="\n")
        print(
            *(
                printable(textwrap.fill(line, width))
                for line in [report.noise, *report.answer.lines]
            ),
            sep="\n",
        )
    else:
        print(printable(textwrap.fill(report.opening, width)))
    for table in (table for table in report.tables if table.shown(brief=True)):
        print(f"\n{terminal(table, width)}")
    print(
        *(printable(f"note: {problem}") for problem in report.problems),
        "",
        *map(shown, files),
        sep="\n",
    )
    for folder in (run for run in runs if [*run.glob("wandb.json"), *run.glob("*/wandb.json")]):
        from rtx.training.loggers import (
            add_to_wandb,
        )  # imports Lightning, which most reports need not

        add_to_wandb(folder, "report", {}, files)
    return 0


def beside(place: Path) -> Path:
    """Return the folder for the report of a folder, or of a study file."""
    return place.with_suffix("") if is_study(place) else place


def offered(width: int) -> list[str]:
    """Return lines on what a report could be of: folders with runs, then the paper's tables."""
    root = outputs_root()
    folders = sorted(root.glob("*"))
    found = collect(folders)
    rows = []
    for folder in folders:
        mine = [cell for cell in found.cells if folder in (cell.folder, *cell.folder.parents)]
        if mine:
            scored = sum(bool(cell.final or cell.scores) for cell in mine)
            latest = max(last_active(cell.folder) for cell in mine)
            rows.append(
                (
                    latest,
                    f"rtx report {shown(folder)}",
                    f"{plural(len(mine), 'run')}, {scored} with a score",
                )
            )
    rows.sort(reverse=True)  # the newest first
    lines = [
        f"Runs in {shown(root)}:"
        if rows
        else f"No runs in {shown(root)} yet; rtx train makes one.",
        "",
    ]
    lines += [f"    {line}" for line in aligned([row[1:] for row in rows])] if rows else []
    lines += ["", "The paper's tables:", ""] if rows else ["The paper's tables:", ""]
    for row, table in zip(list_of_tables(found.cells).rows, paper_tables(), strict=True):
        lines += textwrap.wrap(f"{row['table']}  {row['about']}: {row['run']}", width)
        lines += [f"    {command}" for command in table.commands]
        lines += [terminal(printed_view(table), width), ""]
    return lines
