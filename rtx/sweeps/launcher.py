"""Runs the cells of a sweep, each in a process of its own, so that a crash of one touches no other.

A cell is a process of this machine, or whatever `Starter` returns, such as a job of Slurm.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rtx.disk import make_folder, open_inside
from rtx.errors import UserError, printable
from rtx.machine import cores, system_kills
from rtx.processes import SWEEP_VARIABLE
from rtx.progress import WholeLines, say
from rtx.runs.signals import EXIT_CODES
from rtx.runs.status import read_status
from rtx.sweeps.cells import Cell
from rtx.sweeps.outcomes import NO_CODE, Exit, Outcome, outcome_after, outcome_before

OUTPUT = "output.log"
"""The file in the folder of a cell to which it prints."""
POLL_SECONDS = 0.05
REMEMBERED = 4096
"""Characters of a cell's output from which the reason of its end is taken."""


class Process(Protocol):
    """What runs a cell: a process, or a job that behaves like one."""

    def poll(self) -> int | None:
        """Return the exit code, None while it runs; -N after signal N."""

    def send_signal(self, number: int, /) -> None:
        """Pass a signal on."""


Starter = Callable[[Cell], Process]


def share(cell: Cell, place: int, places: int) -> dict[str, str]:
    """Return variables that give one of several cells its threads and a GPU, unless they are set.

    Args:
        place: the number of the cell among those that run at once, from 0.
        places: how many run at once.
    """
    hardware = cell.config.hardware
    variables = {}
    if hardware.threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = cores() // (places * (hardware.devices or 1))
        variables["OMP_NUM_THREADS"] = str(max(1, threads))
    gpus = visible_gpus()
    if len(gpus) > 1 and hardware.name in ("auto", "gpu"):
        variables["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    return variables


def visible_gpus() -> list[str]:
    """Return the GPUs that a process may use: by CUDA_VISIBLE_DEVICES, else all of this machine."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return named.split(",")
    count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return [str(number) for number in range(count)]


def start(
    words: Sequence[str], folder: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the process of a cell.

    It has its own process group: Ctrl-C reaches it only through `Launcher.stop`.
    """
    environment = {**os.environ, **variables}
    # The current folder is the user's: an rtx.py there must not be imported in place of ours.
    environment["PYTHONSAFEPATH"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    environment[SWEEP_VARIABLE] = str(os.getpid())
    environment["RTX_RUN"] = str(folder)
    with open_inside(folder, OUTPUT, "a") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "rtx", "train", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


@dataclass
class Launcher:
    """Runs cells, at most `at_once` side by side."""

    cells: Sequence[Cell]
    retry: bool
    """Whether cells that failed before run again."""
    at_once: int
    total: int | None = None
    """How many cells the whole sweep has, where that is known."""
    starter: Starter | None = None
    """Starts a cell; None: as a process here."""
    stopped_by: int = 0
    """The first signal."""
    running: set[Process] = field(default_factory=set)

    async def launch(self) -> list[Outcome]:
        """Run the cells, and return how each ended, in their order.

        Signals are passed on to them; one that nohup has set to be ignored stays ignored.
        """
        for number in EXIT_CODES:
            if signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self.stop, number)
        places: asyncio.Queue[int] = asyncio.Queue()
        for place in range(self.at_once):
            places.put_nowait(place)
        return await asyncio.gather(*(self.run(cell, places) for cell in self.cells))

    def stop(self, number: int) -> None:
        """Start no further cell, and pass a signal on to those that run.

        A second Ctrl-C ends them at once.
        """
        self.stopped_by = self.stopped_by or number
        for process in self.running:
            process.send_signal(number)

    async def run(self, cell: Cell, places: asyncio.Queue[int]) -> Outcome:
        """Wait for a place, and run a cell to its end if it needs a run."""
        place = await places.get()
        of_total = f" of {self.total}" if self.total else ""
        name = f"cell {cell.number}{of_total}: {cell.title}"
        try:
            outcome = self.outcome_without_run(cell)
            if outcome is None:
                say(f"{name}: begins")
                outcome = await self.attempt(cell, place)
        except (UserError, OSError) as error:
            # A full disk must not end the other cells.
            outcome = Outcome(2, "failed", str(error))
        parts = [name, outcome.word, outcome.reason]
        say(": ".join(part for part in parts if part))
        places.put_nowait(place)
        return outcome

    def outcome_without_run(self, cell: Cell) -> Outcome | None:
        """Return the outcome of a cell that is not to be run, else None."""
        if self.stopped_by:
            return Outcome(NO_CODE, "not started")
        return outcome_before(cell, self.retry)

    def begin(self, cell: Cell, place: int) -> Process:
        """Start a cell."""
        if self.starter:
            return self.starter(cell)
        variables = share(cell, place, self.at_once) if self.at_once > 1 else {}
        return start(cell.overrides, cell.folder, variables)

    async def attempt(self, cell: Cell, place: int) -> Outcome:
        """Start a cell, print its output if it runs alone, and return how it ended."""
        status = read_status(cell.folder)
        kills = system_kills()
        make_folder(cell.folder)
        lines = WholeLines()
        printed = ""
        code = None
        # Opened for appending, so that reading begins at the end of earlier output.
        with open_inside(cell.folder, OUTPUT, "a+") as output:
            process = self.begin(cell, place)
            self.running.add(process)
            while code is None:
                await asyncio.sleep(POLL_SECONDS)
                code = process.poll()
                new = lines.add(output.read())
                if code is not None:
                    new += lines.end()
                printed = (printed + printable(new))[-REMEMBERED:]
                if new and self.at_once == 1:
                    say(new.removesuffix("\n"))
        self.running.discard(process)
        exit_code = code if code >= 0 else 128 - code
        short = system_kills() > kills
        return outcome_after(cell, Exit(exit_code, printed, status, short, self.stopped_by))
