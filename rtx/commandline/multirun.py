"""`rtx train -m`: a sweep, one process per cell.

Hydra lays the cells out and its launcher runs them; what it runs is a subprocess `rtx train <the cell's overrides>`.
So a crash, a kill or memory left behind in one cell touches no other, and the processes of a distributed cell start
that cell alone (under Hydra's own multirun they would start the sweep again). Every cell is composed and checked before
the first one starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.override_parser.types import Quote, QuotedString

from rtx.commandline.axes import lay_out_cells
from rtx.commandline.overrides import Checked, check_overrides
from rtx.compose import CONFIG_NAME, compose_checked, config_hash, hydra_session
from rtx.config import Config, DataConfig
from rtx.errors import RunFailed, UserError
from rtx.training.metrics import utc_now
from rtx.training.status import read_status

RUN_VARIABLE = "RTX_RUN"
"""Tells a process of a sweep the folder of its run, as an absolute path."""

STOPPING: dict[int, int] = {
    signal.SIGINT: 130,
    signal.SIGTERM: 143,
    signal.SIGHUP: 143,
    signal.SIGUSR1: 143,
    signal.SIGUSR2: 143,
}
"""Signals that end a sweep, and its exit code then."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its place in the order, its overrides, its folder, and its configuration."""

    number: int
    overrides: tuple[str, ...]
    folder: Path
    config: Config

    @property
    def data(self) -> DataConfig:
        """What it is trained on."""
        return self.config.data

    def title(self, keys: Sequence[str]) -> str:
        """Return the overrides of the given keys, as a user would write them."""
        return written(self.overrides, keys)


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: the exit code of its process, or None where it was not started."""

    number: int
    code: int | None
    word: str


def sweep(word: str, arguments: Sequence[str]) -> int:
    """Run `rtx <word>` for every combination of the listed values; failures do not stop the others.

    Returns:
        0 if every cell is done, 1 if not, 130 or 143 after a signal (which the current cell gets too, and obeys first).

    Raises:
        UserError: an override or a cell is wrong, or two cells are the same run; nothing has been started.
    """
    if "LOCAL_RANK" in os.environ:
        raise UserError("a sweep starts the processes of each cell itself; run it without torchrun")
    checked = check_overrides(arguments, sweep=True)
    laid_out, swept = lay_out(checked)
    print(f"{len(laid_out)} cell{'s' * (len(laid_out) > 1)}, each a run of its own", flush=True)
    with forwarded_signals() as child:
        outcomes = launch(word, checked, laid_out, child, swept, [word, "-m", *arguments])
    print(table(laid_out, outcomes, swept), flush=True)
    if child.stopped_by:
        return STOPPING[child.stopped_by]
    return 0 if all(outcome.code == 0 for outcome in outcomes) else 1


def written(overrides: Sequence[str], keys: Sequence[str]) -> str:
    """Return those of a cell's overrides that are for the given keys, as a user would write them."""
    shown = [override.replace("'", "") for override in overrides if override.partition("=")[0] in keys]
    return " ".join(shown) or "nothing swept"


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
    from rtx.training.runs import outputs_root

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
    child: Child,
    swept: Sequence[str],
    command: Sequence[str],
) -> list[Outcome]:
    """Let Hydra's launcher run every cell; returns how each ended.

    Hydra's sweeper knows grids alone, so it is left out.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext, RunMode

    def task(_: Any) -> Outcome:
        cell = laid_out[HydraConfig.get().job.num]
        return run_cell(word, cell, f"cell {cell.number} of {len(laid_out)}: {cell.title(swept)}", child)

    folder = QuotedString(str(laid_out[0].folder.parent), Quote.single).with_quotes()
    own = ["hydra.mode=MULTIRUN", f"hydra.sweep.dir={folder}", "hydra.sweep.subdir='.'"]
    to_launcher = [str(override) for override in checked if override.key.startswith(("hydra.", "hydra/"))]
    with hydra_session() as hydra:
        config = hydra.compose_config(CONFIG_NAME, [*to_launcher, *own], run_mode=RunMode.MULTIRUN)
        context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
        launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
        record_sweep(laid_out, swept, command)
        jobs: list[Any] = []
        size = config.hydra.sweeper.max_batch_size or len(laid_out)
        while len(jobs) < len(laid_out):
            batch = [list(cell.overrides) for cell in laid_out[len(jobs) : len(jobs) + size]]
            jobs += launcher.launch(batch, initial_job_idx=len(jobs))
    return [job.return_value for job in jobs]


def record_sweep(laid_out: Sequence[Cell], swept: Sequence[str], command: Sequence[str]) -> None:
    """Append to sweeps.jsonl, beside the cells, the command and what each cell is; a report reads it.

    Raises:
        UserError: the folder of the sweep cannot be written.
    """
    for root in dict.fromkeys(cell.folder.parent for cell in laid_out):
        mine = {cell.folder.name: cell.title(swept) for cell in laid_out if cell.folder.parent == root}
        row = {"time": utc_now(), "command": shlex.join(["rtx", *command]), "folder": os.getcwd(), "cells": mine}
        try:
            root.mkdir(parents=True, exist_ok=True)
            with open(root / "sweeps.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write to {root}: {error.strerror}; set RTX_OUTPUTS to a folder that you can write"
            ) from None


def run_cell(word: str, cell: Cell, title: str, child: Child) -> Outcome:
    """Run one cell to its end, unless it is done already or the sweep is being stopped."""
    if child.stopped_by:
        return Outcome(cell.number, None, "not started")
    if (read_status(cell.folder) or {}).get("state") == "done":
        if data_changed(cell):
            advice = "move it away, or give the sweep another name=, to run the cell anew"
            print(f"\n{title}\n{cell.folder} was done with other data than are there now; {advice}", flush=True)
            return Outcome(cell.number, 2, "other data")
        print(f"\n{title}\nwas done before: {cell.folder}", flush=True)
        return Outcome(cell.number, 0, "done before")
    print(f"\n{title}", flush=True)
    begun = any((cell.folder / "checkpoints").glob("*.ckpt"))
    command = ["resume", str(cell.folder)] if begun else [word, *cell.overrides]
    code = child.run([sys.executable, "-m", "rtx", *command], {RUN_VARIABLE: str(cell.folder)})
    return Outcome(cell.number, code, ending(code, (read_status(cell.folder) or {}).get("state")))


def data_changed(cell: Cell) -> bool:
    """Tell whether the data of a finished cell are no longer those it was trained on; False where nobody can tell."""
    from rtx.data.catalog import data_root, open_data

    try:
        before = json.loads((cell.folder / "environment.json").read_text())["data"]["fingerprint"]
        return open_data(cell.data, data_root()).fingerprint != before
    except (OSError, ValueError, KeyError, TypeError, UserError, RunFailed):
        return False


def ending(code: int, state: str | None) -> str:
    """Return one word for how a cell ended: what its status.json says, unless its exit code knows better."""
    if code == 0:
        return "done"
    if code == 128 + signal.SIGKILL:
        return "killed"
    return state if state in ("failed", "interrupted", "preempted") else "failed"


class Child:
    """The process of the current cell, to which the sweep's signals are passed on.

    It leads a process group of its own, so that a signal reaches it (and the other ranks it may have started) once,
    whether it comes from the keyboard, from a scheduler or from `kill`.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped_by: int = 0

    def run(self, command: Sequence[str], variables: dict[str, str]) -> int:
        """Run a command with these environment variables; returns its exit code, 128 + N where signal N killed it."""
        self.process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, process_group=0
        )
        code = self.process.wait()
        self.process = None
        return code if code >= 0 else 128 - code

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: end the sweep after the current cell, which gets the same signal."""
        self.stopped_by = self.stopped_by or number
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


@contextlib.contextmanager
def forwarded_signals() -> Iterator[Child]:
    """Pass the signals that stop a sweep on to its current cell; those ignored from outside (nohup) stay ignored."""
    child = Child()
    former = {number: signal.getsignal(number) for number in STOPPING}
    try:
        for number, handler in former.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, child.stop)
        yield child
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def table(laid_out: Sequence[Cell], outcomes: Sequence[Outcome], swept: list[str]) -> str:
    """Return the lines that close a sweep: each cell, how it ended, its bits per unit where known, its folder."""
    by_number = {outcome.number: outcome for outcome in outcomes}
    rows = [("cell", "overrides", "state", "exit", "bits", "run")]
    for cell in laid_out:
        outcome = by_number.get(cell.number, Outcome(cell.number, None, "not started"))
        bits = ((read_status(cell.folder) or {}).get("final") or {}).get("bits")
        rows.append(
            (
                str(cell.number),
                cell.title(swept),
                outcome.word,
                "" if outcome.code is None else str(outcome.code),
                "" if bits is None else f"{bits:.4f}",
                os.path.relpath(cell.folder),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n" + "\n".join(lines)
