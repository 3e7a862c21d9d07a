"""`rtx train -m`: a sweep, one process per cell.

Hydra composes the cells; what runs is a subprocess `rtx train <the cell's overrides>` each, here or as a job of one of
Hydra's launchers. So a crash, a kill or memory left behind in one cell touches no other, and the processes of a
distributed cell start that cell alone (under Hydra's own multirun they would start the sweep again). Every cell is
composed and checked before the first one starts.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.override_parser.types import Quote, QuotedString

from rtx.commandline.axes import lay_out_cells
from rtx.commandline.cells import Cell, Order, Outcome, run_cell, written
from rtx.commandline.children import STOPPING, Children, forwarded_signals
from rtx.commandline.launched import Task, run_jobs
from rtx.commandline.overrides import Checked, check_overrides
from rtx.commandline.pool import run_cells, share
from rtx.compose import CONFIG_NAME, compose_checked, config_hash, for_hydra, hydra_session
from rtx.config import Config
from rtx.errors import UserError
from rtx.options import LAUNCHED, SweepOptions, read_words
from rtx.training.run_folder import boot_id, read_status, utc_now

BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
"""Hydra's own launcher: its cells run on this machine, without its help."""

SLURM = "SlurmLauncher"
"""How the name of submitit's launcher for Slurm ends."""


def sweep(word: str, arguments: Sequence[str]) -> int:
    """Run `rtx <word>` for every combination of the listed values; failures do not stop the others.

    Returns:
        0 if every cell is done, 1 if not, 130 or 143 after a signal (which the cells that run get, and obey first).

    Raises:
        UserError: an override or a cell is wrong, or two cells are the same run; nothing has been started.
    """
    if "LOCAL_RANK" in os.environ:
        raise UserError("a sweep starts the processes of each cell itself; run it without torchrun")
    words = read_words("train -m", arguments)
    checked = check_overrides(words.overrides, sweep=True)
    refuse_several_launchers(checked)
    laid_out, swept = lay_out(checked)
    print(f"{len(laid_out)} cell{'s' * (len(laid_out) > 1)}, each a run of its own", flush=True)
    with forwarded_signals() as children:
        outcomes = launch(word, checked, laid_out, children, swept, [word, "-m", *arguments], words.options)
    print(table(laid_out, outcomes, swept), flush=True)
    if children.stopped_by:
        return STOPPING[children.stopped_by]
    return 0 if all(outcome.done for outcome in outcomes) else 1


def refuse_several_launchers(checked: Sequence[Checked]) -> None:
    """Refuse hardware=slurm as one of several values: one launcher runs all cells.

    Raises:
        UserError: names the values.
    """
    for entry in checked:
        if entry.key == "hardware" and len(entry.values) > 1 and (jobs := set(entry.values) & set(LAUNCHED)):
            raise UserError(
                f"{entry}: {' and '.join(sorted(jobs))} makes jobs of all cells, or of none; give one value"
            )


def lay_out(checked: Sequence[Checked]) -> tuple[list[Cell], list[str]]:
    """Compose and check every cell; returns them with the keys by which they differ.

    Raises:
        UserError: with a line for each problem and the first cell that has it, or for cells that are the same run.
    """
    every, swept = lay_out_cells(checked)
    problems: dict[str, str] = {}
    configs: list[tuple[list[str], Config]] = []
    for number, overrides in enumerate(every, 1):
        try:
            configs.append((overrides, compose_checked(overrides)))
        except UserError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, f"cell {number} ({written(overrides, swept)}): {line}")
    if problems:
        raise UserError("\n".join(problems.values()))
    return in_folders(configs, swept), swept


def in_folders(configs: list[tuple[list[str], Config]], swept: Sequence[str]) -> list[Cell]:
    """Give every cell its folder, below the folder of all runs: the same whenever the same cell is run again.

    Raises:
        UserError: two cells are the same run.
    """
    from rtx.training.run_folder import outputs_root

    laid_out: dict[Path, Cell] = {}
    for number, (overrides, config) in enumerate(configs, 1):
        folder = outputs_root() / config.name / config_hash(config)
        if folder in laid_out:
            same = f"cells {laid_out[folder].number} and {number} are the same run"
            raise UserError(f"{same} ({written(overrides, swept)}); list values that change the result")
        laid_out[folder] = Cell(number, tuple(overrides), folder, config)
    return list(laid_out.values())


def launch(
    word: str,
    checked: Sequence[Checked],
    laid_out: list[Cell],
    children: Children,
    swept: Sequence[str],
    command: Sequence[str],
    asked: SweepOptions,
) -> list[Outcome]:
    """Run every cell, on this machine or by one of Hydra's launchers; returns how each ended.

    Hydra's sweeper knows grids alone, so it is left out.
    """
    folder = QuotedString(str(laid_out[0].folder.parent), Quote.single).with_quotes()
    own = ["hydra.mode=MULTIRUN", f"hydra.sweep.dir={folder}", "hydra.sweep.subdir='.'"]
    to_launcher = [str(override) for override in checked if override.key.startswith(("hydra.", "hydra/"))]
    with hydra_session() as hydra:
        config = compose_launcher(hydra, [*laid_out[0].overrides, *to_launcher, *own])
        launcher = str(config.hydra.launcher._target_)
        at_once = len(laid_out) if launcher.endswith(SLURM) else 1
        places = min(asked.parallel or at_once, len(laid_out))
        order = Order(word, len(laid_out), tuple(swept), asked.retry, places > 1)
        record_sweep(laid_out, swept, command)
        if places > 1 or launcher != BASIC:
            roots = " ".join(dict.fromkeys(shlex.quote(os.path.relpath(cell.folder.parent)) for cell in laid_out))
            print(f"each cell prints into output.log in its folder; to watch: rtx sweep {roots}", flush=True)
        if launcher == BASIC:
            return run_cells(laid_out, places, by_process(order, children, places), children)
        if launcher.endswith(SLURM):
            from rtx.commandline.slurm import watch_jobs  # needs submitit, which is an extra

            watch_jobs()
        return run_jobs(order, laid_out, places, by_launcher(hydra, config), children)


def by_process(order: Order, children: Children, places: int) -> Callable[[Cell, int], Outcome]:
    """Return what runs a cell in one of the places on this machine."""
    return lambda cell, place: run_cell(order, cell, children, share(cell.config, place, places))


def compose_launcher(hydra: Any, overrides: Sequence[str]) -> Any:
    """Return Hydra's configuration with the launcher.

    Raises:
        UserError: one that gives a cell several tasks, each of which would run it, or Slurm's where there is none.
    """
    from hydra.types import RunMode

    config = hydra.compose_config(CONFIG_NAME, for_hydra(overrides), run_mode=RunMode.MULTIRUN)
    if str(config.hydra.launcher._target_).endswith(SLURM) and shutil.which("srun") is None:
        raise UserError(
            "this machine is no part of a Slurm cluster: there is no srun; hardware=auto runs the cells here"
        )
    for key in ("nodes", "tasks_per_node"):
        if (value := config.hydra.launcher.get(key, 1)) != 1:
            advice = "a cell is one task, which starts the processes of hardware=ddp itself"
            raise UserError(f"hydra.launcher.{key}={value}: must be 1; {advice}")
    return config


def by_launcher(hydra: Any, config: Any) -> Callable[[Task], Any]:
    """Return what makes a launcher of Hydra's for a task."""
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext

    def make(task: Task) -> Any:
        context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
        return Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)

    return make


def record_sweep(laid_out: Sequence[Cell], swept: Sequence[str], command: Sequence[str]) -> None:
    """Append to sweeps.jsonl, beside the cells, the command and what each cell is; reports and `rtx sweep` read it.

    Where the same command meant other cells before, because conf/ or rtx has changed since, that is said.

    Raises:
        UserError: the folder of the sweep cannot be written.
    """
    process = {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": boot_id()}
    for root in dict.fromkeys(cell.folder.parent for cell in laid_out):
        mine = {cell.folder.name: cell.title(swept) for cell in laid_out if cell.folder.parent == root}
        words = {"command": shlex.join(["rtx", *command]), "folder": os.getcwd()}
        try:
            root.mkdir(parents=True, exist_ok=True)
            before = last_row(root / "sweeps.jsonl", words)
            with open(root / "sweeps.jsonl", "a") as file:
                # A line break in front: a row that a full disk has cut short must not swallow this one.
                file.write(
                    "\n" * torn(root / "sweeps.jsonl")
                    + json.dumps({"time": utc_now(), **words, **process, "cells": mine})
                    + "\n"
                )
        except OSError as error:
            raise UserError(
                f"cannot write to {root}: {error.strerror}; set RTX_OUTPUTS to a folder that you can write"
            ) from None
        if before and (gone := before["cells"].keys() - mine.keys()):
            print(
                f"note: on {before['time'][:10]} this command meant {len(gone)} other cell{'s' * (len(gone) > 1)}: "
                f"conf/ or rtx has changed since; their runs stay in {os.path.relpath(root)}",
                flush=True,
            )


def torn(path: Path) -> bool:
    """Tell whether the last row of a file is without its end."""
    with open(path, "rb") as file:
        return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"


def last_row(path: Path, words: dict[str, str]) -> dict[str, Any] | None:
    """Return the last row of a sweeps.jsonl with this command in this folder, or None; broken rows are passed over."""
    found = None
    for line in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and all(row.get(key) == value for key, value in words.items()):
            found = row if isinstance(row.get("cells"), dict) and isinstance(row.get("time"), str) else found
    return found


def table(laid_out: Sequence[Cell], outcomes: Sequence[Outcome], swept: list[str]) -> str:
    """Return the lines that close a sweep: each cell, how it ended and why, its bits where known, its folder."""
    by_number = {outcome.number: outcome for outcome in outcomes}
    rows, reasons = [("cell", "overrides", "state", "exit", "bits", "run")], [""]
    for cell in laid_out:
        outcome = by_number.get(cell.number, Outcome(cell.number, None, "not started"))
        final = (read_status(cell.folder) or {}).get("final") or {}
        code = "" if outcome.code is None else str(outcome.code)
        bits = f"{final['bits']:.4f}" if outcome.done and isinstance(final.get("bits"), int | float) else ""
        folder = os.path.relpath(cell.folder)
        rows.append((str(cell.number), cell.title(swept), outcome.word, code, bits, folder))
        reasons.append(outcome.reason)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row, reason in zip(rows, reasons, strict=True):
        lines.append("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        indent = " " * (widths[0] + 2)
        width = max(60, shutil.get_terminal_size().columns)
        lines += textwrap.wrap(reason, width, initial_indent=indent, subsequent_indent=indent)
    return "\n" + "\n".join(lines)
