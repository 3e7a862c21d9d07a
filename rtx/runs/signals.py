"""The signal handlers of a run: save at the end of the step, and exit as schedulers expect.

The exit code is 130 after SIGINT, and 143 after SIGTERM, SIGUSR1, SIGUSR2 (preemption) and SIGHUP
(a lost terminal). A second SIGINT or SIGTERM ends the process at once.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from rtx.processes import PARENT_VARIABLE, SWEEP_VARIABLE, started_by_another

INTERRUPTED = 130
PREEMPTED = 143
EXIT_CODES: dict[int, int] = dict.fromkeys(
    (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP), PREEMPTED
)
EXIT_CODES[signal.SIGINT] = INTERRUPTED
AGAIN_SECONDS: dict[int, float] = {signal.SIGINT: 0.0, signal.SIGTERM: 3.0}
"""Seconds after a signal from which the same signal again counts as a second one.

Schedulers send several copies of a first SIGTERM at nearly the same time. Other signals have no
second one.
"""


class Stopped(BaseException):
    """The run ends because of a signal.

    Like KeyboardInterrupt it is no `Exception`, so that no `except Exception` catches it.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def state_after(code: int) -> str:
    """Return the state of a run whose process ended with an exit code."""
    return {INTERRUPTED: "interrupted", PREEMPTED: "preempted"}.get(code, "failed")


def do_nothing(code: int) -> None:
    """Ignore a second signal: the value of `Signals.at_once` outside a run."""


class Signals:
    """The signal handlers of a run, as a context that restores the former handlers.

    While `holding` is true a signal is noted, and obeyed at the end of the step (by the callback
    `StopOnSignal`). Otherwise its handler raises `Stopped`.

    A thread obeys a second signal: Python runs no handler within one long instruction, such as a
    wait for another process. In the process of a Python caller (`in_a_call`), which must not be
    ended, the handler of a second signal raises `Stopped` instead.
    """

    def __init__(self, in_a_call: bool = False) -> None:
        self.holding = False
        self.requested = 0
        """The exit code of the first signal; 0 before one came."""
        self.name = "a signal"
        """The name of the first signal; one that another process got has no name here."""
        self.in_a_call = in_a_call
        self.first: dict[int, float] = {}
        """When each signal came first, by `time.monotonic`."""
        self.at_once: Callable[[int], object] = do_nothing
        """Called with the exit code before a second signal ends the process."""
        self.former: dict[int, Any] = {}
        """The handlers before the context, by signal."""

    def __enter__(self) -> Signals:
        if started_by_another():
            # The first process of the run obeys signals; this one ends when that one ends.
            ignore_signals()
            when_orphaned(os.environ[PARENT_VARIABLE], lambda: os._exit(1))
        elif threading.current_thread() is threading.main_thread():
            when_orphaned(
                os.environ.pop(SWEEP_VARIABLE, ""), lambda: os.kill(os.getpid(), signal.SIGTERM)
            )
            handlers = {number: signal.getsignal(number) for number in EXIT_CODES}
            # None is a handler of C code, which Python cannot restore.
            self.former = {
                number: handler for number, handler in handlers.items() if handler is not None
            }
            self.hold(False)
            self.waker, self.wakened = socket.socketpair()
            self.waker.setblocking(False)
            self.former_waker = signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self.watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)
        if self.former:
            signal.set_wakeup_fd(self.former_waker)
            self.waker.close()
        # Otherwise the thread would hold a reference to the run and its data.
        self.at_once = do_nothing

    def hold(self, holding: bool = True) -> None:
        """Set our handlers, and note signals until the end of the step from here on.

        To be called again after Lightning has set its own handler for SIGTERM.
        """
        for number in self.former:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.handle)
        self.holding = holding

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note a signal while `holding`, else raise `Stopped`."""
        if self.in_a_call and self.requested and self.is_second(number):
            raise Stopped(self.requested, f"stopped at once by {self.name}")
        self.first.setdefault(number, time.monotonic())
        if not self.requested:
            self.requested = EXIT_CODES[number]
            self.name = signal.Signals(number).name
        if not self.holding:
            self.release()

    def is_second(self, number: int) -> bool:
        """Return whether a signal that comes now is a second one; see `AGAIN_SECONDS`."""
        since = time.monotonic() - self.first.get(number, math.inf)
        return since >= AGAIN_SECONDS.get(number, math.inf)

    def release(self) -> None:
        """Let signals raise `Stopped` from here on.

        Raises `Stopped` at once if a signal has come already.
        """
        self.holding = False
        if self.requested:
            raise Stopped(self.requested, f"stopped by {self.name} while no step was under way")

    def end(self) -> None:
        """Note that the run is done.

        A signal that was noted is forgotten. A second signal from here on exits with 0.
        """
        self.holding = False
        self.requested = 0
        self.at_once = lambda code: os._exit(0)

    def watch(self) -> None:
        """Acknowledge a first SIGINT, and end the process at a second signal, even within a step.

        This runs in a thread. The process of a Python caller is not ended: there `handle` obeys the
        second signal.
        """
        first: dict[int, float] = {}
        while received := self.wakened.recv(1):
            number = received[0]
            now = time.monotonic()
            again = now - first.get(number, math.inf) >= AGAIN_SECONDS.get(number, math.inf)
            if again and not self.in_a_call:
                try:
                    self.at_once(EXIT_CODES[number])
                finally:
                    os._exit(EXIT_CODES[number])
            if number == signal.SIGINT and self.holding and not again:
                # It imports tqdm, for which `rtx --help` must not wait.
                from rtx.progress import say

                say("finishing this step; Ctrl-C again stops at once")
            first.setdefault(number, now)
        self.wakened.close()


def ignore_signals(number: int = 0) -> None:
    """Ignore the signals of a run in this process: its first process obeys them.

    A terminal sends Ctrl-C to all processes.

    Args:
        number: not read; a DataLoader passes the number of its worker.
    """
    for signal_number in EXIT_CODES:
        signal.signal(signal_number, signal.SIG_IGN)


def when_orphaned(parent: str, act: Callable[[], object]) -> None:
    """Call `act` in a thread within a second after the parent process has ended.

    Args:
        parent: the id of the parent process; empty: `act` is never called.
    """

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1.0)
        act()

    if parent:
        threading.Thread(target=watch, name="parent", daemon=True).start()
