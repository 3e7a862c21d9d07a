"""`rtx train -m`: every cell of a sweep in a process of its own.

So a crash, a kill or memory left behind in one cell touches no other, and the processes of a distributed cell start
that cell alone (under Hydra's own multirun they would start the sweep again).
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import copy
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import OmegaConf

from rtx.commandline.overrides import Override, check_overrides
from rtx.compose import composed, user_errors
from rtx.config import Config
from rtx.data.catalog import check_source, data_root
from rtx.errors import UserError, collect
from rtx.options import LAUNCHED, SweepOptions, read_words
from rtx.sweep.cells import Cell, Outcome, ended_before, ending, environment, has_score, lay_out
from rtx.training.launchers import cores
from rtx.training.memory import system_kills
from rtx.training.run_folder import boot_id, busy, read_status, seems_running, utc_now
from rtx.training.signals import SWEEP_VARIABLE
from rtx.wording import plural, printable

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


def sweep(arguments: Sequence[str]) -> int:
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
    cells, _ = lay_out(checked)
    launcher = make_launcher(checked, cells, words.options)
    needed = {str(cell.config.data): cell.config.data for cell in cells if not has_score(read_status(cell.folder))}
    collect(lambda data: check_source(data, data_root(), lambda line: None), needed.values())
    roots = record_sweep(cells, arguments)
    show(f"{plural(len(cells), 'cell')}, each a run of its own\n")
    if launcher.quiet:
        watch = "".join(f"  rtx sweep {shlex.quote(os.path.relpath(root))}\n" for root in roots)
        show(f"each cell prints into {OUTPUT} in its folder; to watch:\n{watch}")
    with forwarded_signals(launcher):
        outcomes = launcher.launch()
    print(closing_table(cells, outcomes), flush=True)
    if launcher.stopped_by:
        return STOPPING[launcher.stopped_by]
    return 0 if all(outcome.word.startswith("done") for outcome in outcomes) else 1


def make_launcher(checked: Sequence[Override], cells: Sequence[Cell], options: SweepOptions) -> Launcher:
    """Return what runs the cells: processes of this machine, or jobs as hydra.launcher says."""
    hardware = {entry.key: entry for entry in checked}.get("hardware") or Override("hardware", ("auto",))
    own = [str(entry) for entry in checked if entry.key.startswith("hydra.")]
    if not {*hardware.values} & {*LAUNCHED}:
        if own:
            raise UserError(f"{own[0]}: has no effect without hardware={LAUNCHED[0]}")
        return Launcher(cells, options)
    option, *more = hardware.values
    if more:
        raise UserError(f"{hardware}: jobs are made of all cells or of none; give one value")
    from rtx.sweep.jobs import LAUNCHERS  # needs submitit, which is an extra

    node = copy.deepcopy(composed((str(hardware), *own)))
    node.name = cells[0].config.name
    with user_errors():
        parameters: Any = OmegaConf.to_container(node.hydra.launcher, resolve=True)
    del parameters["_target_"]
    return LAUNCHERS[option](cells, options, **parameters)


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
        """Run `rtx train <words>` in the folder of a run, what it prints in a file there, and shown if asked for;
        return its exit code (128 + N after signal N) and its last lines.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # The current folder is the user's: an rtx.py there is not to be run for ours, by what a cell starts either.
        safe = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", SWEEP_VARIABLE: str(os.getpid())}
        decoder, text, code = codecs.getincrementaldecoder("utf-8")("replace"), "", None
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
            while code is None:
                time.sleep(0.05)
                code = process.poll()
                new = printable(decoder.decode(read.read()))
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


class Launcher(Processes):
    """Runs every cell in a process on this machine, one after the other or several side by side, each in a thread.

    The main thread only waits, so that its signal handler can take the lock.
    """

    def __init__(self, cells: Sequence[Cell], options: SweepOptions, at_once: int = 1) -> None:
        super().__init__()
        self.cells, self.options = cells, options
        self.places = min(options.parallel or at_once, len(cells))
        self.quiet = self.places > 1
        """Whether what cells print is not shown."""
        self.told: set[int] = set()
        """Numbers of the cells that another process worked on."""

    def launch(self) -> list[Outcome]:
        """Run the cells; returns how each ended, in their order."""
        waiting, outcomes = collections.deque(self.cells), []
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
                outcome = self.run(cell, place)
            except (UserError, OSError) as error:  # a full disk must not end the other cells
                outcome = Outcome(cell.number, 2, "failed", str(error))
            if outcome:
                outcomes.append(outcome)
            else:
                waiting.append(cell)
                self.stopping.wait(LOOK_SECONDS)

    def run(self, cell: Cell, place: int) -> Outcome | None:
        """Run a cell to its end, where it has not come to one; None: another process works on it, ask again."""
        if self.stopped_by:
            return Outcome(cell.number, None, "not started")
        if self.in_use(cell):
            return None
        outcome = ended_before(cell, self.options.retry)
        if outcome is None:
            self.say(cell, "begins")
            before, kills = read_status(cell.folder), system_kills()
            code, lines, out_of_memory = self.attempt(cell, place)
            if code == 2 and self.in_use(cell):  # by one that was begun at the same time
                return None
            outcome = ending(cell, code, lines, out_of_memory or system_kills() > kills, before, self.stopped_by)
        self.say(cell, f"{outcome.word}: {outcome.reason}" if outcome.reason else outcome.word)
        return outcome

    def in_use(self, cell: Cell) -> bool:
        """Tell whether another process works on a cell, and say so once."""
        status = read_status(cell.folder)
        used = status is not None and seems_running(cell.folder, status)
        if used and cell.number not in self.told:
            self.told.add(cell.number)
            self.say(cell, f"{busy(cell.folder, status).partition(';')[0]}; the others go first, then it is waited for")
        return used

    def say(self, cell: Cell, line: str) -> None:
        """Print a line on a cell."""
        show("\n" * (not self.quiet) + f"cell {cell.number} of {len(self.cells)}: {cell.title}: {line}\n")

    def attempt(self, cell: Cell, place: int) -> tuple[int | None, list[str], bool]:
        """Run the process of a cell to its end; as `process`, and whether it is known to have wanted memory."""
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
def forwarded_signals(launcher: Launcher) -> Iterator[None]:
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
        variables["OMP_NUM_THREADS"] = str(max(1, cores() // (places * (config.hardware.devices or 1))))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    here = [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
    gpus = here if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    if places > 1 and len(gpus) > 1 and config.hardware.name in ("auto", "gpu"):
        variables["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    return variables


def recorded_threads(cell: Cell) -> dict[str, str]:
    """Return the variable that gives a cell which goes on the threads it began with: its bits depend on them.

    Those who set the threads themselves know what they do.
    """
    threads = environment(cell).get("threads")
    chosen = cell.config.hardware.threads is not None or "OMP_NUM_THREADS" in os.environ
    return {"OMP_NUM_THREADS": str(threads)} if isinstance(threads, int) and threads > 0 and not chosen else {}


def record_sweep(cells: Sequence[Cell], arguments: Sequence[str]) -> list[Path]:
    """Append to sweeps.jsonl, beside the cells, for reports and `rtx sweep`, the command and what each cell is."""
    command = {"command": shlex.join(["rtx", "train", "-m", *arguments]), "folder": os.getcwd()}
    process = {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": boot_id()}
    roots = list(dict.fromkeys(cell.folder.parent for cell in cells))
    for root in roots:
        mine = {cell.folder.name: cell.title for cell in cells if cell.folder.parent == root}
        row = json.dumps({"time": utc_now(), **command, **process, "cells": mine})
        try:
            root.mkdir(parents=True, exist_ok=True)
            with open(root / "sweeps.jsonl", "a+b") as file:
                # A row that a full disk has cut short must not swallow this one.
                torn = file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
                file.write(b"\n" * bool(torn) + row.encode() + b"\n")
        except OSError as error:
            advice = "set RTX_OUTPUTS to a folder that you can write"
            raise UserError(f"cannot write to {root}: {error.strerror}; {advice}") from None
    return roots


def closing_table(cells: Sequence[Cell], outcomes: Sequence[Outcome]) -> str:
    """Return the lines that close a sweep: each cell, how it ended and why, its bits where known, its folder."""
    rows, reasons = [("cell", "overrides", "state", "exit", "bits", "run")], [""]
    for cell, outcome in zip(cells, outcomes, strict=True):
        final = (read_status(cell.folder) or {}).get("final") or {}
        code = "" if outcome.code is None else str(outcome.code)
        bits = f"{final['bits']:.4f}" if outcome.word.startswith("done") and "bits" in final else ""
        rows.append((str(cell.number), cell.title, outcome.word, code, bits, os.path.relpath(cell.folder)))
        reasons.append(outcome.reason)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    indent, width = " " * (widths[0] + 2), max(60, shutil.get_terminal_size().columns)
    lines = [""]
    for row, reason in zip(rows, reasons, strict=True):
        lines.append("  ".join(text.ljust(wide) for text, wide in zip(row, widths, strict=True)).rstrip())
        lines += textwrap.wrap(reason, width, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)
