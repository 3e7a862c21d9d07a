"""`rtx train -m`: every cell of a sweep in a process of its own, one after the other or several side by side.

So a crash, a kill or memory left behind in one cell touches no other, and the processes of a distributed cell start
that cell alone (under Hydra's own multirun they would start the sweep again).
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rtx.data.catalog import check_source, data_root
from rtx.errors import UserError, collect, refuse
from rtx.options import LAUNCHED, SweepOptions, check_overrides, read_words
from rtx.sweep.cells import NO_CODE, Cell, Outcome, ended_before, ending, environment, has_score, lay_out
from rtx.training.hardware import cores
from rtx.training.memory import system_kills
from rtx.training.progress import say
from rtx.training.run_folder import busy, read_status, seems_running, shown, unwritable, utc_now
from rtx.training.signals import EXIT_CODES, SWEEP_VARIABLE
from rtx.wording import plural, printable

OUTPUT = "output.log"
"""What a cell prints; in its folder."""


def sweep(arguments: Sequence[str]) -> int:
    """Run `rtx train` for every combination of the listed values, when all have been checked.

    Returns 0 if every cell is done, 1 if not, 130 or 143 after a signal (which the cells that run get, and obey first).
    """
    words = read_words("train -m", arguments)
    checked = check_overrides(words.overrides, sweep=True)
    cells, _ = lay_out(checked)
    last = {entry.key: str(entry) for entry in checked}
    jobs = [word for key, word in last.items() if key == "hardware" or key.startswith("hydra.")]
    if LAUNCHED[0] in (hardware := last.get("hardware", "=").partition("=")[2].split(",")):
        if len(hardware) > 1:
            raise UserError(f"{last['hardware']}: jobs are made of all cells or of none; give one value")
        from rtx.sweep.jobs import SlurmLauncher  # needs submitit, which is an extra

        launcher = SlurmLauncher(cells, words.options, jobs)
    else:
        refuse(f"{word}: has no effect without hardware={LAUNCHED[0]}" for word in jobs if word.startswith("hydra."))
        launcher = Launcher(cells, words.options)
    needed = {str(cell.config.data): cell.config.data for cell in cells if not has_score(read_status(cell.folder))}
    collect(lambda data: check_source(data, data_root(), lambda line: None), needed.values())
    roots = record_sweep(cells, arguments)
    say(f"{plural(len(cells), 'cell')}, each a run of its own; to watch: rtx sweep {' '.join(roots)}")
    outcomes = launcher.launch()
    if not launcher.stopped_by:
        from rtx.report.contents import save_plots  # takes a third of a second, and only a sweep that ends draws

        say(save_plots(dict.fromkeys(cell.folder.parent for cell in cells)))
    say(closing_table(cells, outcomes))
    if launcher.stopped_by:
        return EXIT_CODES[signal.Signals(launcher.stopped_by)]
    return 0 if all(outcome.word.startswith("done") for outcome in outcomes) else 1


def record_sweep(cells: Sequence[Cell], arguments: Sequence[str]) -> list[str]:
    """Append to sweeps.jsonl, beside the cells, the command and what each cell is; returns the folders of the sweep."""
    row = {"time": utc_now(), "command": shlex.join(["rtx", "train", "-m", *arguments])}
    roots = list(dict.fromkeys(cell.folder.parent for cell in cells))
    for root in roots:
        mine = {cell.folder.name: cell.title for cell in cells if cell.folder.parent == root}
        try:
            root.mkdir(parents=True, exist_ok=True)
            with open(root / "sweeps.jsonl", "a") as file:
                file.write(json.dumps({**row, "cells": mine}) + "\n")
        except OSError as error:
            raise UserError(unwritable(root, error)) from error
    return [shown(root) for root in roots]


def closing_table(cells: Sequence[Cell], outcomes: Sequence[Outcome]) -> str:
    """Return the lines that close a sweep: each cell, how it ended, its bits, its folder, the reason."""
    rows = [("cell", "overrides", "state", "exit", "bits", "run", "reason")]
    for cell, outcome in zip(cells, outcomes, strict=True):
        final = (read_status(cell.folder) or {}).get("final") if outcome.word.startswith("done") else None
        code, bits = "" if outcome.code == NO_CODE else str(outcome.code), f"{final['bits']:.4f}" if final else ""
        place = os.path.relpath(cell.folder)
        rows.append((str(cell.number), cell.title, outcome.word, code, bits, place, outcome.reason))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n" + "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def share(cell: Cell, place: int = 0, places: int = 1) -> dict[str, str]:
    """Return the variables that give a cell its part of the machine: of the threads, and of several GPUs one.

    A cell that goes on keeps the threads it began with, on which its bits depend. What the user has set stays:
    hardware.threads, OMP_NUM_THREADS, and hardware=ddp, whose processes share the GPUs.
    """
    hardware, variables = cell.config.hardware, {}
    threads = environment(cell).get("threads")
    if threads is None and places > 1:
        threads = max(1, cores() // (places * (hardware.devices or 1)))
    if threads and hardware.threads is None and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(threads)
    here = ",".join(str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*")))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", here).split(",")
    if places > 1 and len(gpus) > 1 and hardware.name in ("auto", "gpu"):
        variables["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    return variables


def start(words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process of a cell, in a group of its own: what the keyboard sends is passed on to it, once."""
    # The current folder is the user's: an rtx.py there is not to be run for ours, by what a cell starts either.
    safe = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", SWEEP_VARIABLE: str(os.getpid())}
    with open(folder / OUTPUT, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "rtx", "train", *words],
            env={**os.environ, **safe, **variables, "RTX_RUN": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


class Launcher:
    """Runs the cells of a sweep as processes of this machine."""

    def __init__(self, cells: Sequence[Cell], options: SweepOptions, at_once: int = 1) -> None:
        self.cells, self.retry = cells, options.retry
        self.places = min(options.parallel or at_once, len(cells))
        self.quiet = self.places > 1  # what cells print is not shown
        self.waiting, self.outcomes = collections.deque(cells), []
        self.running: set[Any] = set()
        self.told: set[int] = set()  # of which cells it was said that they are in use
        self.stopped_by = 0  # the first signal

    def launch(self) -> list[Outcome]:
        """Run the cells; returns how each ended, in their order."""
        asyncio.run(self.fill_places())
        return sorted(self.outcomes, key=lambda outcome: outcome.number)

    async def fill_places(self) -> None:
        """Run all cells; signals are passed on to them, but those ignored from outside (nohup) stay ignored."""
        for number in EXIT_CODES:
            if signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self.stop, number)
        await asyncio.gather(*map(self.fill, range(self.places)))

    def stop(self, number: int) -> None:
        """Begin no cell any more, and let those that run obey the signal; at a second Ctrl-C they leave at once."""
        self.stopped_by = self.stopped_by or number
        for process in self.running:
            process.send_signal(number)

    async def fill(self, place: int) -> None:
        """Run cells in one of the places until none waits; one that is in use goes to the end of the line."""
        while self.waiting:
            cell = self.waiting.popleft()
            try:
                outcome = await self.run(cell, place)
            except (UserError, OSError) as error:  # a full disk must not end the other cells
                outcome = Outcome(cell.number, 2, "failed", str(error))
            if outcome is None:
                self.waiting.append(cell)
                await asyncio.sleep(1.0)
            else:
                self.tell(cell, f"{outcome.word}: {outcome.reason}".removesuffix(": "))
                self.outcomes.append(outcome)

    async def run(self, cell: Cell, place: int) -> Outcome | None:
        """Run a cell to its end, where it has not come to one; None: another process works on it, ask again."""
        if self.stopped_by:
            return Outcome(cell.number, NO_CODE, "not started")
        if self.in_use(cell):
            return None
        if outcome := ended_before(cell, self.retry):
            return outcome
        self.tell(cell, "begins")
        before, kills, code, said = read_status(cell.folder), system_kills(), None, ""
        cell.folder.mkdir(parents=True, exist_ok=True)
        with open(cell.folder / OUTPUT, "ab+") as output:  # at its end
            process = self.begin(cell, place)
            self.running.add(process)
            while code is None:
                await asyncio.sleep(0.05)
                code = process.poll()
                new = printable(output.read().decode(errors="replace"))
                said = (said + new)[-4096:]
                if new and not self.quiet:
                    say(new.removesuffix("\n"))
        self.running.discard(process)
        if code == 2 and self.in_use(cell):  # by one that was begun at the same time
            return None
        return ending(cell, code if code >= 0 else 128 - code, said, before, system_kills() > kills, self.stopped_by)

    def begin(self, cell: Cell, place: int) -> Any:
        """Start a cell; returns what can be polled for its exit code, and sent signals, as a process can."""
        return start(cell.overrides, cell.folder, share(cell, place, self.places))

    def in_use(self, cell: Cell) -> bool:
        """Tell whether another process works on a cell, and say so once."""
        status = read_status(cell.folder)
        used = status is not None and seems_running(status)
        if used and cell.number not in self.told:
            self.told.add(cell.number)
            self.tell(cell, f"{busy(cell.folder, status).partition(';')[0]}; the others go first")
        return used

    def tell(self, cell: Cell, line: str) -> None:
        """Print a line on a cell."""
        say(f"cell {cell.number} of {len(self.cells)}: {cell.title}: {line}")
