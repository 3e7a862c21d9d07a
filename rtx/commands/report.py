"""`rtx report RUN ... [output=folder]`: what runs allow to conclude, with tables and plots."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rtx.cli.request import Request
from rtx.colour import BOLD, painted
from rtx.disk import ITSELF
from rtx.errors import RunFailed, UserError, plural, printable
from rtx.paths import expand_path
from rtx.processes import garbage_collection_paused
from rtx.report.contents import Report, build
from rtx.report.formats import write
from rtx.report.paper import paper_tables
from rtx.report.paper_views import list_of_tables, printed_view
from rtx.report.run_records import Cell, collect
from rtx.runs.folder import last_active, outputs_root, refuse_unreadable, run_folders, shown
from rtx.runs.pretrained_record import pretrained_files
from rtx.runs.study import is_study, steps_files
from rtx.tables import aligned, table_text
from rtx.terminal import terminal_width
from rtx.training.uploads import add_to_wandb

LONGEST_NAME = 100
"""Letters of the names of further runs in the name of a report's folder."""


def main(request: Request) -> int:
    """Write and print the report of runs; without runs, print the paper's tables."""
    width = terminal_width()
    runs = list(request.runs)
    output = request.options.output
    if not runs:
        if output:
            raise UserError(f"output={output}: which runs? usage: {request.command.usage()}")
        print("\n".join(overview(width)))
        return 0
    for run in runs:
        check_has_records(run)
    title = f"rtx report: {', '.join(map(shown, runs))}"
    # The collector would scan the records, hundreds for each run, again and again.
    with garbage_collection_paused():
        report = build(collect(runs), title)
    folder, name = default_place(runs)
    if output:
        folder = expand_path(output, "output")
        name = ITSELF
    try:
        files = write(report, folder, name)
    except OSError as error:
        reason = f"{error.strerror}; output=<folder> names another"
        raise RunFailed(f"cannot write to {folder / name}: {reason}") from error
    print("\n".join([*report_lines(report, width), "", *map(shown, files)]))
    send_to_wandb(runs, files)
    return 0


def check_has_records(place: Path) -> None:
    """Raise UserError unless a path has runs, timed steps or an analysis of a pretrained model."""
    if is_study(place) or run_folders(place) or steps_files(place) or pretrained_files(place):
        return
    if not place.is_dir():
        raise UserError(f"{place}: no such folder")
    refuse_unreadable(place)
    hint = "(rtx report alone prints the paper's tables)"
    raise UserError(f"{place}: holds no run; a run has a config.yaml {hint}")


def default_place(runs: Sequence[Path]) -> tuple[Path, str]:
    """Return where a report is that names no folder: the folder of its first run, a name below it.

    A report of several runs has the names of the others in its own.
    """
    first = runs[0]
    root = first.with_suffix("") if is_study(first) else first
    others = "".join(f"-{run.absolute().name}" for run in runs[1:])
    return root, f"report{others[:LONGEST_NAME]}"


def report_lines(report: Report, width: int) -> list[str]:
    """Return a report for a terminal of `width` columns."""
    if report.answer:
        (headline,) = wrapped([report.headline], width)
        lines = [painted(headline, BOLD), *wrapped(report.lines, width)]
        ranking = replace(report.answer, lines=[])
        lines += ["", table_text(ranking, width, intervals=True), ""]
        lines += wrapped([report.noise, *report.answer.lines], width)
    else:
        lines = wrapped([report.opening], width)
    for table in report.tables:
        if table.shown(brief=True):
            lines += ["", table_text(table, width)]
    lines += [printable(f"note: {problem}") for problem in report.problems]
    return lines


def wrapped(texts: Sequence[str], width: int) -> list[str]:
    """Return texts as lines of at most `width` characters."""
    return [printable(textwrap.fill(text, width)) for text in texts]


def send_to_wandb(runs: Sequence[Path], files: Sequence[Path]) -> None:
    """Add the files of a report to runs that were logged to Weights & Biases."""
    for run in runs:
        add_to_wandb(run, "report", {}, files)


@dataclass(frozen=True)
class RunsFolder:
    """A folder in outputs/ with runs; `latest`: when one of them was last active."""

    path: Path
    latest: str
    runs: int
    scored: int


def overview(width: int) -> list[str]:
    """Return what a report could be made of: folders with runs, then the paper's tables."""
    root = outputs_root()
    folders = sorted(root.glob("*"))
    cells = collect(folders).cells
    return [*folder_lines(root, folders, cells), *paper_lines(cells, width)]


def folder_lines(root: Path, folders: Sequence[Path], cells: Sequence[Cell]) -> list[str]:
    """Return a command for each folder with runs, the last active first."""
    with_runs = []
    for folder in folders:
        inside = [cell for cell in cells if folder in (cell.folder, *cell.folder.parents)]
        if inside:
            latest = max(last_active(cell.folder) for cell in inside)
            scored = sum(bool(cell.final or cell.scores) for cell in inside)
            with_runs.append(RunsFolder(folder, latest, len(inside), scored))
    if not with_runs:
        return [f"No runs in {shown(root)} yet; rtx train makes one.", ""]
    with_runs.sort(key=lambda one: one.latest, reverse=True)
    rows = []
    for one in with_runs:
        counts = f"{plural(one.runs, 'run')}, {one.scored} with a score"
        rows.append([f"rtx report {shown(one.path)}", counts])
    return [f"Runs in {shown(root)}:", "", *(f"    {line}" for line in aligned(rows)), ""]


def paper_lines(cells: Sequence[Cell], width: int) -> list[str]:
    """Return the paper's tables, and how many of their rows have been run."""
    lines = ["The paper's tables:", ""]
    for entry, table in zip(list_of_tables(cells).rows, paper_tables(), strict=True):
        lines += textwrap.wrap(f"{entry['table']}  {entry['about']}: {entry['run']}", width)
        lines += [f"    {command}" for command in table.commands]
        lines += [table_text(printed_view(table), width), ""]
    return lines
