"""`rtx report RUN ... [overrides]`: tables beside the paper's, plots and one page, from the records of runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rtx.commandline.help import terminal_width
from rtx.compose import compose
from rtx.config import LoggerConfig
from rtx.disk import replace_file
from rtx.errors import RunFailed, UserError
from rtx.options import read_words, usage
from rtx.report.cells import collect
from rtx.report.cells import run_folders as run_dirs
from rtx.report.equal_time import equal_time_views
from rtx.report.formats import as_json, comma_separated, csv_row, markdown
from rtx.report.latex import latex
from rtx.report.page import html
from rtx.report.report import Report, build
from rtx.report.steps import add_steps, read_records, recorded
from rtx.report.terminal import tables_list, terminal
from rtx.training.run_folder import outputs_root, shown

FORMATS = {
    "report.md": markdown,
    "report.csv": comma_separated,
    "report.json": as_json,
    "report.tex": latex,
    "report.html": html,
}


def main(arguments: list[str]) -> int:
    """Run `rtx report RUN ... [overrides]`; without a run, list the paper's tables and what of them is in outputs/.

    Returns:
        0, or 2 where one of several folders holds no run: the rest is written all the same.

    Raises:
        UserError: no folder holds a run, or a wrong option.
        RunFailed: the report cannot be written.
    """
    words = read_words("report", arguments)
    folders, wish = words.runs, words.options.output
    logger = compose(["logger=jsonl", *words.overrides]).logger  # W&B is left alone unless it is asked for
    if not folders:
        return list_tables(wish)
    found = collect(folder for folder in folders if run_dirs(folder) or not recorded(folder))
    timed = read_records(folders, found)
    if not found.cells and not timed:
        raise UserError("\n".join([*found.empty, *found.problems]))
    report = build(found, title_of(folders))
    add_steps(report, timed)
    report.views += equal_time_views(found.cells, timed)
    output = Path(wish).expanduser() if wish else (found.first or folders[0]) / "report"
    write(report, output)
    for problem in report.problems:
        print(f"note: {problem}")
    for view in report.views:
        print(f"\n{terminal(view, terminal_width())}")
    print("", *(shown(output / name) for name in FORMATS), sep="\n")
    track(report, logger, output)
    for line in found.empty:
        print(f"rtx: {line}", file=sys.stderr)
    return 2 if found.empty else 0


def list_tables(output: str | None) -> int:
    """Print the paper's tables, and how much of each the runs below outputs/ cover.

    Raises:
        UserError: an output is named, but no run.
    """
    if output:
        raise UserError(f"output={output}: which runs? usage: {usage('report')}")
    root = outputs_root()
    found = collect(sorted(path for path in root.glob("*") if path.is_dir())) if root.is_dir() else collect([])
    report = build(found, "")
    add_steps(report, read_records([root], found))
    assert report.tables is not None
    print(tables_list(report.tables, terminal_width()))
    return 0


def title_of(folders: Sequence[Path]) -> str:
    """Return the title of a report."""
    return "rtx report: " + ", ".join(shown(folder) for folder in folders)


def write(report: Report, output: Path) -> None:
    """Write the report in every format, each file whole or not at all.

    Raises:
        RunFailed: the folder cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, form in FORMATS.items():
            content = form(report).encode("utf-8", "replace")
            replace_file(output / name, lambda file, content=content: file.write(content), durable=False)
    except OSError as error:
        raise RunFailed(f"cannot write to {output}: {error.strerror}; output=<folder> names another") from error


def track(report: Report, config: LoggerConfig, output: Path) -> None:
    """Log each table of scores to W&B, where that is asked for."""
    if config.name == "jsonl":
        return
    from rtx.training.loggers import wandb_logger

    facts = {"title": report.title, "commands": report.commands}
    logger = wandb_logger(config, output, facts, f"report-{output.parent.name}", job_type="report")
    if logger is None:
        return
    for number, view in enumerate(report.views, 1):
        rows = [csv_row(view, row) for row in view.rows]
        keys = list(dict.fromkeys(key for row in rows for key in row))
        gaps = [[None if row.get(key) == "" else row.get(key) for key in keys] for row in rows]
        logger.log_rows(f"table_{number}", keys, gaps)
    if logger.run is not None and not logger.run.url:
        print(f"W&B: tables in {shown(output / 'wandb')} (upload them with: wandb sync)")
    logger.finish(exit_code=0)
