"""What the signals mean to a run: save at the end of the step and leave with the code that schedulers expect.

SIGINT (Ctrl-C): save, exit 130; a second one: at once, 130. SIGTERM, SIGUSR1, SIGUSR2 (preemption): save, exit 143.
Before the first step, and after the last, there is nothing to save and the first signal ends the work where it is.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

INTERRUPTED = 130
PREEMPTED = 143
EXIT_CODES = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: PREEMPTED,
    signal.SIGUSR1: PREEMPTED,
    signal.SIGUSR2: PREEMPTED,
}


class Stopped(BaseException):
    """The run ends because of a signal. Like KeyboardInterrupt, no `except Exception` swallows it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        """Exit code of the command."""

    @property
    def state(self) -> str:
        """The word for status.json."""
        return "interrupted" if self.code == INTERRUPTED else "preempted"


class Signals:
    """The signal handlers of a run, as a context that puts the former handlers back.

    While `holding` is false a signal raises `Stopped` where the process is; while it is true the signal is only noted
    in `requested`, for the loop to read at the end of its step.
    """

    def __init__(self) -> None:
        self.requested = 0
        """Exit code asked for by a signal, or 0."""
        self.holding = False
        """Whether there is a step to finish first."""
        self.at_once: Callable[[], None] = lambda: None
        """Called before a second SIGINT ends the process."""
        self.interrupts = 0
        self.former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self.former = {number: signal.getsignal(number) for number in EXIT_CODES}
            self.install()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Set our handlers (again: Lightning sets its own for SIGTERM when a fit begins)."""
        for number in self.former:
            signal.signal(number, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the signal, or raise `Stopped` where nothing is held."""
        self.requested = self.requested or EXIT_CODES[signal.Signals(number)]
        self.interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self.interrupts > 1:
            self.at_once()
            os._exit(INTERRUPTED)
        if not self.holding:
            raise Stopped(self.requested, f"{signal.Signals(number).name} while no step was under way")


def ignore_signals() -> None:
    """Leave all of them to the training process: for loader processes, which a Ctrl-C or a scheduler reaches too."""
    for number in EXIT_CODES:
        signal.signal(number, signal.SIG_IGN)
