"""`rtx report RUN ... [overrides]`: a page on what runs allow to say, tables beside the paper's, plots."""

from __future__ import annotations

import sys
from pathlib import Path

from rtx.commandline.help import terminal_width
from rtx.compose import compose
from rtx.config import LoggerConfig
from rtx.errors import RunFailed, UserError
from rtx.options import read_words, usage
from rtx.report.contents import Report, build, list_of_tables
from rtx.report.run_records import collect, run_folders
from rtx.report.steps import read_records, recorded
from rtx.report.terminal import tables_list, terminal
from rtx.report.write import all_tables, write
from rtx.training.run_folder import outputs_root, shown


def main(arguments: list[str]) -> int:
    """Run `rtx report RUN ... [overrides]`; without a run, list the paper's tables and what of them is in outputs/.

    Returns:
        0, or 2 where one of several folders holds no run: the rest is written all the same.

    Raises:
        UserError: no folder holds a run, or a wrong option.
        RunFailed: the report cannot be written.
    """
    words = read_words("report", arguments)
    folders, wish, width = words.runs, words.options.output, terminal_width()
    logger = compose(["logger=jsonl", *words.overrides]).logger  # W&B is left alone unless it is asked for
    if not folders and wish:
        raise UserError(f"output={wish}: which runs? usage: {usage('report')}")
    if not folders:
        found = collect(sorted(path for path in outputs_root().glob("*") if path.is_dir()))
        print(tables_list(list_of_tables(found.cells, read_records([outputs_root()], found)), width))
        return 0
    found = collect(folder for folder in folders if run_folders(folder) or not recorded(folder))
    records = read_records(folders, found)
    if not found.cells and not records:
        raise UserError("\n".join([*found.empty, *found.problems]))
    report = build(found, "rtx report: " + ", ".join(map(shown, folders)), records)
    output = Path(wish).expanduser() if wish else (found.first or folders[0]) / "report"
    try:
        files = write(report, output)
    except OSError as error:
        raise RunFailed(f"cannot write to {output}: {error.strerror}; output=<folder> names another") from error
    say(report, width)
    print("", *map(shown, files), sep="\n")
    track(report, logger, output)
    for line in found.empty:
        print(f"rtx: {line}", file=sys.stderr)
    return 2 if found.empty else 0


def say(report: Report, width: int) -> None:
    """Print the answer first, then the other tables and what else is to be known."""
    from rich.console import Console

    if report.answer:
        print(terminal(report.answer, width, strip=True))
    if report.headline:
        Console(width=width, highlight=False, markup=False, soft_wrap=False).print(report.headline, style="bold")
    for table in (table for table in report.tables if table.shown(brief=True)):
        print(f"\n{terminal(table, width)}")
    for problem in report.problems:
        print(f"note: {problem}")


def track(report: Report, config: LoggerConfig, output: Path) -> None:
    """Log each table to W&B, where that is asked for."""
    if config.name == "jsonl":
        return
    from rtx.training.loggers import wandb_logger

    facts = {"title": report.title, "commands": report.commands}
    logger = wandb_logger(config, output, facts, f"report-{output.parent.name}", job_type="report")
    if logger is None:
        return
    for number, table in enumerate(all_tables(report), 1):
        frame = table.frame().astype(object)
        logger.log_rows(f"table_{number}", list(frame.columns), frame.where(frame.notna(), None).to_numpy().tolist())
    if logger.run is not None and not logger.run.url:
        print(f"W&B: tables in {shown(output / 'wandb')} (upload them with: wandb sync)")
    logger.finish(exit_code=0)
