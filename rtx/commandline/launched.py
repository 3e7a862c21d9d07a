"""The cells of a sweep as jobs of another launcher of Hydra's: submitit's, on this machine or as jobs of Slurm.

A cell is a job of its own, so that the end of one job is told of its cell alone (a launcher that is given several jobs
raises the first error, and the rest is lost). What a job runs is the cell's process, as everywhere, and it reports its
outcome. Signals reach the jobs by way of a file beside the cells, which all machines of a cluster see.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rtx.commandline.cells import (
    Cell,
    InUse,
    Order,
    Outcome,
    ended_before,
    record_failure,
    refuse_in_use,
    run_cell,
    speaker,
)
from rtx.commandline.children import STOPPING, Children, forwarded_signals
from rtx.commandline.pool import run_cells
from rtx.errors import UserError
from rtx.training.memory import OUT_OF_MEMORY
from rtx.training.run_folder import read_status

LOOK_SECONDS = 0.5
"""Time between two looks at the file that tells the jobs of signals."""

GRACE_SECONDS = 5.0
"""After a second Ctrl-C: time for the jobs that run to leave. Those that wait in a queue are not waited for."""

KILL_SECONDS = 30.0
"""Time beyond its KillWait that Slurm, having sent SIGTERM, is given to kill a job."""

KEYBOARD = {signal.SIGINT, signal.SIGHUP}
"""Signals that a terminal sends to all that it runs, a job on this machine among them."""


@dataclass(frozen=True)
class Task:
    """What a job runs; it is pickled, and called in the job with the configuration that Hydra composed there."""

    order: Order
    cells: tuple[Cell, ...]
    signals: Path
    """The file with the signals that the sweep got, a number each line; missing where there was none."""

    def __call__(self, config: Any) -> Outcome:
        """Run the cell of this job's number to its end; returns how it ended, or that it is in use."""
        from hydra.core.hydra_config import HydraConfig

        cell = self.cells[HydraConfig.get().job.num]
        ending = threading.Event()
        with (
            forwarded_signals((signal.SIGTERM,)) as children,
            own_signals(children, ending),
            ThreadPoolExecutor(1) as pool,
        ):
            told = Told(self.signals, children)
            try:
                outcome = pool.submit(self.run, cell, children).result()
                if ending.is_set() and not outcome.done:
                    # An outcome would end the cell for the sweep, though the job may come back.
                    from rtx.commandline.slurm import kill_wait

                    told.something.wait(kill_wait() + KILL_SECONDS)
            finally:
                told.over.set()
        return outcome

    def run(self, cell: Cell, children: Children) -> Outcome:
        """Run the cell; signals are for the main thread."""
        try:
            return run_cell(self.order, cell, children, {})
        except InUse as use:
            return Outcome(cell.number, None, "in use", str(use))


@contextlib.contextmanager
def own_signals(children: Children, ending: threading.Event) -> Any:
    """In a job: leave the keyboard's signals to the sweep, and let the cell save before the job ends.

    submitit takes SIGUSR2, which comes before the job's time is up, for itself: it submits the job again and exits.
    SIGTERM is Slurm's word that it will kill the job, be it cancelled or put back into the queue: that sets `ending`.
    """
    former = signal.getsignal(signal.SIGUSR2)

    def save_last(number: int, frame: Any) -> None:
        if os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
            ending.set()
        children.stop(number)

    def save_first(number: int, frame: Any) -> None:
        children.stop(number)
        while children.processes:
            time.sleep(0.05)
        if callable(former):
            former(number, frame)

    for number in KEYBOARD:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the cell would inherit
    signal.signal(signal.SIGTERM, save_last)
    signal.signal(signal.SIGUSR2, save_first)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, KEYBOARD)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, former)


class Told(threading.Thread):
    """In a job: passes on to the cell what the sweep writes into its file of signals."""

    def __init__(self, path: Path, children: Children) -> None:
        super().__init__(name="told", daemon=True)
        self.path, self.children = path, children
        self.over, self.something = threading.Event(), threading.Event()
        self.heard = 0
        self.hear()  # a job that waited in the queue may come when all is over
        self.start()

    def run(self) -> None:
        """Look again and again."""
        while not self.over.wait(LOOK_SECONDS):
            self.hear()

    def hear(self) -> None:
        """Pass on what is new."""
        numbers = numbers_in(self.path)
        for number in numbers[self.heard :]:
            self.children.stop(number)
            self.something.set()
        self.heard = len(numbers)


def numbers_in(path: Path) -> list[int]:
    """Return the signals of a file, as far as its lines are whole."""
    try:
        return [int(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    except (OSError, ValueError):
        return []


class Signals:
    """In the sweep: the file that tells the jobs of its signals."""

    def __init__(self, root: Path) -> None:
        self.path = root / f".signals-{os.getpid()}-{time.time_ns():x}"
        self.interrupts = 0
        self.leaving = threading.Timer(GRACE_SECONDS, self.leave)
        self.leaving.daemon = True

    def tell(self, number: int) -> None:
        """Handle a signal: pass it on; the second Ctrl-C leaves soon, whatever still waits in a queue."""
        with contextlib.suppress(OSError), open(self.path, "a") as file:
            file.write(f"{int(number)}\n")
        self.interrupts += number == signal.SIGINT
        if self.interrupts == 1:
            print("the jobs are told to save and end; Ctrl-C again leaves without those that still wait", flush=True)
        if self.interrupts == 2:
            self.leaving.start()

    def leave(self) -> None:
        """End the sweep; the file stays for the jobs that are still to begin, which then end at once."""
        print("rtx: left; jobs that still wait end as soon as they begin (scancel removes them)", file=sys.stderr)
        os._exit(STOPPING[signal.SIGINT])


def run_jobs(
    order: Order, cells: Sequence[Cell], places: int, launcher_for: Callable[[Task], Any], children: Children
) -> list[Outcome]:
    """Run every cell as a job of a launcher; returns how each ended.

    Args:
        order: what is asked of all cells.
        cells: all of them.
        places: jobs at once.
        launcher_for: returns a launcher of Hydra's that runs the task.
        children: of the sweep, which has none of its own, but gets the signals.
    """
    signals = Signals(cells[0].folder.parent)
    children.on_signal = signals.tell
    task = Task(replace(order, side_by_side=True), tuple(cells), signals.path)
    launchers = [launcher_for(task) for _ in range(places)]

    def work(cell: Cell, place: int) -> Outcome:
        if children.stopped_by:
            return Outcome(cell.number, None, "not started")
        refuse_in_use(cell.folder)
        say = speaker(task.order, cell)
        if outcome := ended_before(cell, order.retry):
            say(f"{outcome.word}: {outcome.reason or cell.folder}")
            return outcome
        say("is a job")
        outcome = run_job(launchers[place], cell)
        if outcome.word == "in use":
            raise InUse(outcome.reason)
        say(outcome.word + (f": {outcome.reason}" if outcome.reason else ""))
        return outcome

    try:
        return run_cells(cells, places, work, children)
    finally:
        children.on_signal = lambda number: None
        signals.leaving.cancel()
        signals.path.unlink(missing_ok=True)


def run_job(launcher: Any, cell: Cell) -> Outcome:
    """Run one cell as a job, from a thread; what it starts on this machine is spared the keyboard's signals."""
    signal.pthread_sigmask(signal.SIG_BLOCK, KEYBOARD)
    try:
        (job,) = launcher.launch([list(cell.overrides)], initial_job_idx=cell.number - 1)
        return job.return_value
    except Exception as error:  # of the job, by whatever name its launcher calls it
        return lost(cell, error)


def lost(cell: Cell, error: Exception) -> Outcome:
    """Return how a cell ended whose job brought no outcome: as its records say, else as its job failed."""
    until = time.monotonic() + 60
    with contextlib.suppress(UserError):
        while time.monotonic() < until:
            try:
                refuse_in_use(cell.folder)
                break
            except InUse:  # it saves: its job is gone
                time.sleep(LOOK_SECONDS)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = f"its job ended: {lines[-1] if lines else type(error).__name__}"
    status = read_status(cell.folder) or {}
    if status.get("state") == "done":
        return Outcome(cell.number, 0, "done")
    if "OUT_OF_MEMORY" in str(error):
        why = f"{OUT_OF_MEMORY}: {why}"
    elif status.get("state") in ("interrupted", "preempted"):
        return Outcome(cell.number, None, status["state"], why)
    elif status.get("state") == "running":
        return Outcome(cell.number, None, "killed", why)
    if status.get("state") == "failed":
        return Outcome(cell.number, None, "failed", str(status.get("reason")))
    record_failure(cell, why)
    return Outcome(cell.number, None, "failed", why)
