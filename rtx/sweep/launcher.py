"""`rtx train -m`: every cell of a sweep in a process of its own.

So a crash, a kill or memory left behind in one cell touches no other, and the processes of a distributed cell start
that cell alone (under Hydra's own multirun they would start the sweep again).
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

import hydra
from omegaconf import OmegaConf

from rtx.commandline.overrides import Checked, check_overrides
from rtx.compose import CONFIG_NAME, for_hydra, hydra_session
from rtx.config import Config
from rtx.errors import UserError
from rtx.options import LAUNCHED, SweepOptions, read_words
from rtx.report.text import TextStream
from rtx.sweep.cells import (
    Cell,
    InUse,
    Outcome,
    check_sources,
    ended_before,
    ending,
    lay_out,
    recorded_threads,
    refuse_in_use,
)
from rtx.training.launchers import cores
from rtx.training.memory import system_kills
from rtx.training.run_folder import boot_id, read_status, utc_now
from rtx.training.signals import SWEEP_VARIABLE
from rtx.wording import plural

OUTPUT = "output.log"
"""What a cell prints; in its folder."""

STOPPING: dict[int, int] = {
    signal.SIGINT: 130,
    **dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2), 143),
}
"""Signals that end a sweep, and its exit code then."""

LOOK_SECONDS = 1.0
"""Time between two looks at a cell that another process works on."""

LAST_WORDS = 4096
"""Characters of what a cell printed: enough to find why it failed."""


@dataclass(frozen=True)
class Sweep:
    """The cells of a command, the keys by which they differ, and what is asked of all of them."""

    cells: Sequence[Cell]
    swept: Sequence[str]
    options: SweepOptions


def sweep(word: str, arguments: Sequence[str]) -> int:
    """Run `rtx train` for every combination of the listed values; failures do not stop the others.

    Returns:
        0 if every cell is done, 1 if not, 130 or 143 after a signal (which the cells that run get, and obey first).

    Raises:
        UserError: an override, a cell or its data is wrong, or two cells are the same run; nothing has been started.
    """
    if "LOCAL_RANK" in os.environ:
        raise UserError("a sweep starts the processes of each cell itself; run it without torchrun")
    words = read_words("train -m", arguments)
    checked = check_overrides(words.overrides, sweep=True)
    for entry in checked:
        if entry.key == "hardware" and len(entry.values) > 1 and set(entry.values) & set(LAUNCHED):
            raise UserError(f"{entry}: jobs are made of all cells or of none; give one value")
    cells, swept = lay_out(checked)
    check_sources(cells)
    print(f"{plural(len(cells), 'cell')}, each a run of its own", flush=True)
    outcomes, stopped_by = launch(Sweep(cells, swept, words.options), checked, [word, "-m", *arguments])
    print(closing_table(cells, outcomes, swept), flush=True)
    if stopped_by:
        return STOPPING[stopped_by]
    return 0 if all(outcome.done for outcome in outcomes) else 1


def launch(asked: Sweep, checked: Sequence[Checked], command: Sequence[str]) -> tuple[list[Outcome], int]:
    """Run every cell; returns how each ended, and the signal that stopped the sweep, or 0."""
    own = [str(entry) for entry in checked if entry.key.startswith(("hydra.", "hydra/"))]
    launcher = make_launcher(asked, [*asked.cells[0].overrides, *own])
    record_sweep(asked, command)
    if launcher.quiet:
        roots = dict.fromkeys(shlex.quote(os.path.relpath(cell.folder.parent)) for cell in asked.cells)
        print(f"each cell prints into {OUTPUT} in its folder; to watch:", flush=True)
        print("\n".join(f"  rtx sweep {root}" for root in roots), flush=True)
    with forwarded_signals(launcher):
        return launcher.launch(), launcher.stopped_by


def make_launcher(asked: Sweep, overrides: Sequence[str]) -> ProcessLauncher:
    """Return the launcher of the cells that `hydra/launcher` names, with the parameters that hydra.launcher has for it.

    Raises:
        UserError: hydra.launcher.* has no such key, or a value that a launcher of ours does not take.
    """
    with hydra_session():
        config = hydra.compose(CONFIG_NAME, for_hydra(overrides), return_hydra_config=True)
        chosen = config.hydra.runtime.choices["hydra/launcher"]
        parameters = cast(dict[str, Any], OmegaConf.to_container(config.hydra.launcher, resolve=True))
    known: dict[str, Callable[..., ProcessLauncher]] = {"basic": ProcessLauncher}
    if chosen != "basic":
        from rtx.sweep.jobs import LAUNCHERS  # needs submitit, which is an extra

        known |= LAUNCHERS
    if chosen not in known:
        raise UserError(f"hydra/launcher={chosen}: a sweep takes {', '.join(known)}")
    return known[chosen](asked, **{key: value for key, value in parameters.items() if key != "_target_"})


class Processes:
    """The processes of cells, to which signals are passed on.

    Each leads a process group of its own, so that a signal reaches it (and the other ranks it may have started) once,
    whether it comes from the keyboard, from a scheduler or from `kill`.
    """

    def __init__(self) -> None:
        self.processes: set[subprocess.Popen[bytes]] = set()
        self.guard = threading.RLock()  # a second signal may come while the first is handled
        self.stopping = threading.Event()
        self.stopped_by = 0
        """The first signal that came, or 0."""
        self.interrupts = 0

    def process(
        self, words: Sequence[str], variables: Mapping[str, str], folder: Path, shown: bool
    ) -> tuple[int, list[str]]:
        """Run `rtx train <words>` in the folder of a run, what it prints in a file there, and shown if asked for.

        Returns:
            Its exit code (128 + N after signal N) and its last lines.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # The current folder is the user's: an rtx.py there is not to be run for ours, by what a cell starts either.
        safe = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", SWEEP_VARIABLE: str(os.getpid())}
        stream, text = TextStream(), ""
        with open(folder / OUTPUT, "ab") as written, open(folder / OUTPUT, "rb") as read:
            read.seek(0, os.SEEK_END)
            with self.guard:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "rtx", "train", *words],
                    env={**os.environ, **safe, **variables, "RTX_RUN": str(folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=written,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
                self.processes.add(process)
                if self.stopped_by:  # a signal came while it was being started
                    send(process, self.stopped_by)
            code = None
            while code is None:
                time.sleep(0.05)
                code = process.poll()
                new = stream.feed(read.read())
                text = (text + new)[-LAST_WORDS:]
                if shown:
                    show(new)
        with self.guard:
            self.processes.discard(process)
        return code if code >= 0 else 128 - code, text.splitlines()

    def stop(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: no cell is begun any more, and those that run get the same signal, and obey it first.

        A second Ctrl-C makes them leave at once, as it does alone; a third one kills them.
        """
        self.stopped_by = self.stopped_by or number
        self.stopping.set()
        self.interrupts += number == signal.SIGINT
        with self.guard:
            for process in self.processes:
                send(process, signal.SIGKILL if self.interrupts > 2 else number)


class ProcessLauncher(Processes):
    """Runs every cell in a process on this machine, one after the other or several side by side, each in a thread.

    The main thread only waits, so that its signal handler can take the lock.
    """

    def __init__(self, asked: Sweep) -> None:
        super().__init__()
        self.asked = asked
        self.places = min(asked.options.parallel or self.at_once(), len(asked.cells))
        self.quiet = self.places > 1
        """Whether what cells print is not shown."""
        self.told: set[int] = set()
        """Numbers of the cells that another process worked on."""

    def at_once(self) -> int:
        """Return how many cells run side by side where nobody says."""
        return 1

    def launch(self) -> list[Outcome]:
        """Run the cells; returns how each ended, in their order."""
        waiting, outcomes = collections.deque(self.asked.cells), []
        with ThreadPoolExecutor(self.places) as pool:
            for done in [pool.submit(self.work, place, waiting, outcomes) for place in range(self.places)]:
                done.result()
        return sorted(outcomes, key=lambda outcome: outcome.number)

    def work(self, place: int, waiting: collections.deque[Cell], outcomes: list[Outcome]) -> None:
        """Run cells until none waits, in one of the places; one that is in use goes to the end of the line."""
        while True:
            try:
                cell = waiting.popleft()
            except IndexError:
                return
            try:
                outcomes.append(self.run(cell, place))
            except InUse as use:
                waiting.append(cell)
                if cell.number not in self.told:
                    self.told.add(cell.number)
                    show(f"\ncell {cell.number}: {use}; the others go first, then it is waited for\n")
                self.stopping.wait(LOOK_SECONDS)
            except (UserError, OSError) as error:  # a full disk must not end the other cells
                outcomes.append(Outcome(cell.number, 2, "failed", str(error)))

    def run(self, cell: Cell, place: int) -> Outcome:
        """Run a cell to its end, unless it has come to one already or the sweep is being stopped.

        Raises:
            InUse: another process works on it.
        """
        if self.stopped_by:
            return Outcome(cell.number, None, "not started")
        refuse_in_use(cell.folder)
        outcome = ended_before(cell, self.asked.options.retry)
        if outcome is None:
            self.say(cell, "begins")
            before, kills = read_status(cell.folder), system_kills()
            code, lines, out_of_memory = self.attempt(cell, place)
            if code == 2:
                refuse_in_use(cell.folder)  # by one that was begun at the same time
            outcome = ending(cell, code, lines, out_of_memory or system_kills() > kills, before, self.stopped_by)
        self.say(cell, f"{outcome.word}: {outcome.reason}" if outcome.reason else outcome.word)
        return outcome

    def say(self, cell: Cell, line: str) -> None:
        """Print a line on a cell."""
        title = f"cell {cell.number} of {len(self.asked.cells)}: {cell.title(self.asked.swept)}"
        show("\n" * (not self.quiet) + f"{title}: {line}\n")

    def attempt(self, cell: Cell, place: int) -> tuple[int | None, list[str], bool]:
        """Run the process of a cell to its end.

        Returns:
            Its exit code (128 + N after signal N), its last lines, whether it is known to have wanted memory.
        """
        variables = {**share(cell.config, place, self.places), **recorded_threads(cell)}
        return *self.process(cell.overrides, variables, cell.folder, shown=not self.quiet), False


def show(text: str) -> None:
    """Print text in one piece, for other threads may print, too; that nobody reads any more must not end a cell."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(text)
        sys.stdout.flush()


def send(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a cell; a terminal that goes away (SIGHUP) means the same to it as SIGTERM."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM if number == signal.SIGHUP else number)


@contextlib.contextmanager
def forwarded_signals(launcher: ProcessLauncher) -> Iterator[None]:
    """Pass the signals that stop a sweep on to its cells; those ignored from outside (nohup) stay ignored."""
    former = {number: signal.getsignal(number) for number in STOPPING}
    try:
        for number, handler in former.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, launcher.stop)
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def share(config: Config, place: int, places: int) -> dict[str, str]:
    """Return the variables that give a cell its part of the machine: of the threads, and of the GPUs where several are.

    What the user has set stays: hardware.threads, OMP_NUM_THREADS, and hardware=ddp, whose processes share the GPUs.
    """
    variables: dict[str, str] = {}
    if places > 1 and config.hardware.threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = cores() // (places * (config.hardware.devices or 1))
        variables["OMP_NUM_THREADS"] = str(max(1, threads))
    devices = gpus() if places > 1 and config.hardware.name in ("auto", "gpu") else []
    if len(devices) > 1:
        variables["CUDA_VISIBLE_DEVICES"] = devices[place % len(devices)]
    return variables


def gpus() -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


def record_sweep(asked: Sweep, command: Sequence[str]) -> None:
    """Append to sweeps.jsonl, beside the cells, the command and what each cell is; reports and `rtx sweep` read it.

    Raises:
        UserError: the folder of the sweep cannot be written.
    """
    words = {"command": shlex.join(["rtx", *command]), "folder": os.getcwd()}
    process = {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": boot_id()}
    for root in dict.fromkeys(cell.folder.parent for cell in asked.cells):
        mine = {cell.folder.name: cell.title(asked.swept) for cell in asked.cells if cell.folder.parent == root}
        row = json.dumps({"time": utc_now(), **words, **process, "cells": mine})
        try:
            root.mkdir(parents=True, exist_ok=True)
            with open(root / "sweeps.jsonl", "a+b") as file:
                # A row that a full disk has cut short must not swallow this one.
                torn = file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
                file.write(b"\n" * bool(torn) + row.encode() + b"\n")
        except OSError as error:
            advice = "set RTX_OUTPUTS to a folder that you can write"
            raise UserError(f"cannot write to {root}: {error.strerror}; {advice}") from None


def closing_table(cells: Sequence[Cell], outcomes: Sequence[Outcome], swept: Sequence[str]) -> str:
    """Return the lines that close a sweep: each cell, how it ended and why, its bits where known, its folder."""
    rows, reasons = [("cell", "overrides", "state", "exit", "bits", "run")], [""]
    for cell, outcome in zip(cells, outcomes, strict=True):
        final = (read_status(cell.folder) or {}).get("final") or {}
        code = "" if outcome.code is None else str(outcome.code)
        bits = f"{final['bits']:.4f}" if outcome.done and "bits" in final else ""
        rows.append((str(cell.number), cell.title(swept), outcome.word, code, bits, os.path.relpath(cell.folder)))
        reasons.append(outcome.reason)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    indent, width = " " * (widths[0] + 2), max(60, shutil.get_terminal_size().columns)
    lines = [""]
    for row, reason in zip(rows, reasons, strict=True):
        lines.append("  ".join(text.ljust(wide) for text, wide in zip(row, widths, strict=True)).rstrip())
        lines += textwrap.wrap(reason, width, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)
