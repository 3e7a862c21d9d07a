"""`rtx bench steps`: the training steps of a table's rows, timed in turn on this machine, beside the paper's."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtx.commandline.multirun import Cell, lay_out
from rtx.commandline.overrides import check_overrides
from rtx.compose import config_hash, to_dict
from rtx.config import SPREAD
from rtx.errors import RunFailed, UserError
from rtx.options import LAUNCHED, BenchOptions, read_words, what_to_do
from rtx.report.steps import DRAWN, MADE, WHAT, read_record, record_path, views
from rtx.report.terminal import terminal
from rtx.report.views import View
from rtx.training.files import write_json
from rtx.training.runs import environment, outputs_root, shown, unwritable
from rtx.training.signals import Stopped
from rtx.wording import plural

if TYPE_CHECKING:
    from rtx.training.stepping import Work
    from rtx.training.turns import Timing

WIDTH = 80
"""Columns of what is printed."""


def main(arguments: list[str]) -> int:
    """Run `rtx bench steps [overrides]`; lists of values, and what an experiment lays out, are rows, as in a sweep.

    Returns:
        0 if every row was timed, 1 if some failed.

    Raises:
        UserError: an override or a row is wrong, or the machine has not what it asks for; nothing has been started.
        RunFailed: no row could be timed, or the record cannot be written.
        KeyboardInterrupt, Stopped: a signal came; what was measured by then is printed, and kept.
    """
    words = read_words("bench steps", what_to_do("bench", arguments)[1])
    bench = words.options
    rows = without_seeds(lay_out_rows(words.overrides))
    work = [work_of(row) for row in rows]  # torch takes seconds: only now is it imported
    make_room(rows)
    from rtx.training.turns import Timing

    timings = [Timing() for _ in rows]
    try:
        measure_rows(rows, work, timings, bench)
    except (KeyboardInterrupt, Stopped):
        finish(rows, timings, arguments, bench, whole=False)
        raise
    finish(rows, timings, arguments, bench, whole=True)
    if not any(timing.turns for timing in timings):
        raise RunFailed("no row could be timed")
    return 1 if any(timing.reason for timing in timings) else 0


def lay_out_rows(overrides: Sequence[str]) -> list[Cell]:
    """Return the rows that the overrides lay out, composed and checked.

    Raises:
        UserError: one of them is wrong, or asks for more than one device.
    """
    if "LOCAL_RANK" in os.environ:
        raise UserError("rtx bench starts the process of each row itself; run it without torchrun")
    checked = check_overrides(overrides, sweep=True)
    if launcher := [str(entry) for entry in checked if entry.key.startswith(("hydra.", "hydra/"))]:
        raise UserError(f"{launcher[0]}: has no effect; rtx bench takes its rows in turn, on this machine")
    if jobs := [str(entry) for entry in checked if entry.key == "hardware" and set(entry.values) & set(LAUNCHED)]:
        raise UserError(f"{jobs[0]}: makes jobs of the cells of a sweep; rtx bench takes its rows in turn, here")
    rows, _ = lay_out(checked)
    if spread := [row for row in rows if row.config.hardware.name in SPREAD]:
        name = spread[0].config.hardware.name
        raise UserError(f"hardware={name}: rtx bench times a row on one device; hardware takes auto, cpu or gpu")
    return rows


def without_seeds(rows: Sequence[Cell]) -> list[Cell]:
    """Return the first of the rows that differ by their seed alone, and say so: a step of theirs takes as long."""
    unlike: dict[str, Cell] = {}
    for row in rows:
        unlike.setdefault(config_hash(dataclasses.replace(row.config, seed=0)), row)
    if len(unlike) < len(rows):
        print(f"of {plural(len(rows), 'cell')} those that differ by their seed alone are one row")
    return list(unlike.values())


def work_of(row: Cell) -> Work:
    """Return what the process of a row needs to know: the configuration, and what its data would tell it.

    Raises:
        UserError: words of a text whose store is not prepared, or hardware that is not there.
    """
    from rtx.commands.plan import vocabulary
    from rtx.data.recall import RecallStore
    from rtx.training.hardware import resolve_hardware
    from rtx.training.stepping import Work

    resolve_hardware(row.config)
    if row.data.name == "recall":
        store = RecallStore(row.data)
        return Work(row.config, store.vocabulary, store.answers, store.sequence)
    return Work(row.config, vocabulary(row.data))


def make_room(rows: Sequence[Cell]) -> None:
    """Make the folders of the records, before hours are spent on what could not be kept.

    Raises:
        UserError: a folder cannot be written.
    """
    for name in dict.fromkeys(row.config.name for row in rows):
        folder = outputs_root() / name / "bench"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(unwritable(folder, error)) from None


def measure_rows(rows: Sequence[Cell], work: Sequence[Work], timings: Sequence[Timing], bench: BenchOptions) -> None:
    """Time the rows behind a progress line; `timings` holds what is known at any moment."""
    from rtx.training.progress import Progress, clock
    from rtx.training.turns import measure

    print(f"{plural(len(rows), 'row')}, {plural(bench.turns, 'turn')} of {plural(bench.per_turn, 'step')}", flush=True)
    line, began, visits = Progress(sys.stderr), time.monotonic(), 0

    def show(turn: int, row: int) -> None:
        nonlocal visits
        able = [not timing.reason for timing in timings]
        left = sum(able[row - 1 :]) + sum(able) * (bench.turns - turn)
        pace = (time.monotonic() - began) / visits if visits else 0.0
        about = f" | about {clock(pace * left)} left" if visits else ""
        line.show(f"turn {turn}/{bench.turns} | row {row}/{len(rows)}{about}")
        visits += 1

    try:
        measure(work, bench, timings, show)
    finally:
        line.clear()


def finish(
    rows: Sequence[Cell], timings: Sequence[Timing], arguments: Sequence[str], bench: BenchOptions, whole: bool
) -> None:
    """Print the tables, and keep a record for each name of the rows.

    What a signal cut short never replaces a record.

    Raises:
        RunFailed: a record cannot be written.
    """
    if not whole and not any(timing.turns for timing in timings):
        print("no row had been timed yet")
        return
    for name in dict.fromkeys(row.config.name for row in rows):
        mine = [(row, timing) for row, timing in zip(rows, timings, strict=True) if row.config.name == name]
        record = record_of(mine, arguments, bench)
        for view in views(read_record(record)):
            print("\n" + printed(view))
        if not any(timing.turns for _, timing in mine):
            continue
        path = record_path(outputs_root() / name, [row.folder.name for row, _ in mine], record["device"])
        if not whole and path.exists():
            print(f"\n{shown(path)} stays as it was")
            continue
        keep(path, record)


def record_of(rows: Sequence[tuple[Cell, Timing]], arguments: Sequence[str], bench: BenchOptions) -> dict[str, Any]:
    """Return what is kept: settings, machine, versions, and each row with its configuration and all its times."""
    turns = [turn for _, timing in rows for turn in timing.turns]
    gpus = {turn.device for turn in turns} - {"CPU"}
    threads = {turn.threads for turn in turns}
    device = ", ".join(sorted(gpus)) or f"CPU, {' or '.join(plural(number, 'thread') for number in sorted(threads))}"
    facts = {
        "what": WHAT,
        "command": shlex.join(["rtx", "bench", *arguments]),
        "bench": dataclasses.asdict(bench),
        "ids": MADE if all(row.data.name == "recall" for row, _ in rows) else DRAWN,
        "device": device,
        "threads": max(threads, default=None),
    }
    return {**environment(facts), "rows": [row_of(row, timing) for row, timing in rows]}


def row_of(row: Cell, timing: Timing) -> dict[str, Any]:
    """Return what is kept of a row."""
    last = timing.turns[-1] if timing.turns else None
    milliseconds = timing.milliseconds
    return {
        "hash": row.folder.name,
        "overrides": list(row.overrides),
        "ms": milliseconds,
        "ms_turns": [turn.milliseconds for turn in timing.turns],
        "steps_per_second": 1e3 / milliseconds if milliseconds else None,
        "peak_bytes": last.peak_bytes if last else None,
        "parameters": last.parameters if last else None,
        "reason": timing.reason or None,
        "config": to_dict(row.config),
    }


def printed(view: View) -> str:
    """Return a table for the terminal."""
    return terminal(view, WIDTH)


def keep(path: Path, record: dict[str, Any]) -> None:
    """Write a record and say where.

    Raises:
        RunFailed: it cannot be written.
    """
    try:
        write_json(path, record)
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error
    print(f"\n{shown(path)}\nin a report: rtx report {shown(path.parent.parent)}")
