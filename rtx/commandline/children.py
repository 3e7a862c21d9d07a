"""The processes of a sweep's cells, and the signals that reach them."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from rtx.training.signals import SWEEP_VARIABLE

STOPPING: dict[int, int] = {
    signal.SIGINT: 130,
    signal.SIGTERM: 143,
    signal.SIGHUP: 143,
    signal.SIGUSR1: 143,
    signal.SIGUSR2: 143,
}
"""Signals that end a sweep, and its exit code then."""

PATIENCE_SECONDS = 2.0
"""Time for the last words of a cell that has ended, which what it started may keep from ending, too."""

KEPT_LINES = 40
"""Of what a cell wrote to stderr: enough to find why it failed."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its number, its exit code (128 + N after signal N), its last lines on stderr."""

    pid: int
    code: int
    lines: list[str]


class Children:
    """The processes of the cells that run now, to which the sweep's signals are passed on.

    Each leads a process group of its own, so that a signal reaches it (and the other ranks it may have started) once,
    whether it comes from the keyboard, from a scheduler or from `kill`. Cells are run by threads; the main thread only
    waits, so that its signal handler can take the lock.
    """

    def __init__(self) -> None:
        self.processes: set[subprocess.Popen[bytes]] = set()
        self.guard = threading.RLock()  # a second signal may come while the first is handled
        self.stopped_by = 0
        """The first signal that came, or 0."""
        self.stopping = threading.Event()
        self.interrupts = 0
        self.on_signal: Callable[[int], object] = lambda number: None
        """Called with each signal: what else there is to tell."""

    def run(self, command: Sequence[str], variables: Mapping[str, str], output: Path | None) -> Ended:
        """Run a command to its end.

        Args:
            command: with its arguments.
            variables: of its environment, beside those of this process.
            output: a file that gets, at its end, what the command writes; None: it goes where ours does.

        Returns:
            How it ended.
        """
        environment = {**os.environ, **variables, SWEEP_VARIABLE: str(os.getpid())}
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(output, "ab")) if output else None
            with self.guard:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.PIPE,
                    process_group=0,
                )
                self.processes.add(process)
                if self.stopped_by:  # a signal came while it was being started
                    self.send(process, self.stopped_by)
            lines = Copy(process.stderr, file or getattr(sys.stderr, "buffer", None))
            code = process.wait()
            lines.join(PATIENCE_SECONDS)
        with self.guard:
            self.processes.discard(process)
        return Ended(process.pid, code if code >= 0 else 128 - code, lines.kept())

    def stop(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: no cell is begun any more, and those that run get the same signal, and obey it first.

        A second Ctrl-C makes them leave at once, as it does alone; a third one kills them.
        """
        self.stopped_by = self.stopped_by or number
        self.stopping.set()
        self.interrupts += number == signal.SIGINT
        with self.guard:
            for process in self.processes:
                self.send(process, signal.SIGKILL if self.interrupts > 2 else number)
        self.on_signal(number)

    @staticmethod
    def send(process: subprocess.Popen[bytes], number: int) -> None:
        """Send a signal to a cell; a terminal that goes away (SIGHUP) means the same to it as SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM if number == signal.SIGHUP else number)


class Copy(threading.Thread):
    """Copies what a process writes, line by line, and keeps the last lines."""

    def __init__(self, source: IO[bytes] | None, target: IO[bytes] | None) -> None:
        super().__init__(name="copy", daemon=True)
        assert source is not None
        self.source, self.target = source, target
        self.lines: collections.deque[bytes] = collections.deque(maxlen=KEPT_LINES)
        self.start()

    def run(self) -> None:
        """Copy until the process, and all that it started, have closed the pipe."""
        with self.source:
            for line in self.source:
                self.lines.append(line)
                if self.target is not None:
                    with contextlib.suppress(OSError, ValueError):  # nobody reads any more: no reason to end the cell
                        self.target.write(line)
                        self.target.flush()

    def kept(self) -> list[str]:
        """Return the last lines."""
        return [line.decode("utf-8", "replace").strip() for line in list(self.lines)]


@contextlib.contextmanager
def forwarded_signals(numbers: Sequence[int] = tuple(STOPPING)) -> Iterator[Children]:
    """Pass the signals that stop a sweep on to its cells; those ignored from outside (nohup) stay ignored."""
    children = Children()
    former = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, handler in former.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, children.stop)
        yield children
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
