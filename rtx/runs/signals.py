"""What the signals mean to a run: save at the end of the step, and exit as schedulers expect: 130 after SIGINT, 143
after SIGTERM, SIGUSR1, SIGUSR2 (preemption) and SIGHUP (a lost terminal); at once upon a second SIGINT or SIGTERM.
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

from rtx.variables import PARENT_VARIABLE, SWEEP_VARIABLE, started_by_another

INTERRUPTED, PREEMPTED = 130, 143
EXIT_CODES: dict[int, int] = dict.fromkeys(
    (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP), PREEMPTED
)
EXIT_CODES[signal.SIGINT] = INTERRUPTED
AGAIN_SECONDS: dict[int, float] = {signal.SIGINT: 0.0, signal.SIGTERM: 3.0}
"""From this time on after a signal the next one counts as a second: schedulers send the first to many at once."""


class Stopped(BaseException):
    """The run ends because of a signal. Like KeyboardInterrupt, no `except Exception` swallows it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def state_after(code: int) -> str:
    return {INTERRUPTED: "interrupted", PREEMPTED: "preempted"}.get(code, "failed")


class Signals:
    """The signal handlers of a run, as a context that puts the former handlers back.

    While `holding` is false a signal raises `Stopped` where the process is, else it is noted for the end of the step. A
    thread obeys a second one: within one instruction, such as a wait for another process, Python runs no handler. In a
    process that is the caller's (`in_a_call`) a second one raises `Stopped`, too, as soon as Python runs the handler.
    """

    def __init__(self, in_a_call: bool = False) -> None:
        self.holding, self.requested, self.name = (
            False,
            0,
            "a signal",
        )  # name: of another process's, none is known
        self.in_a_call = in_a_call
        self.first: dict[int, float] = {}  # when each signal came first
        self.at_once: Callable[[int], object] = lambda code: (
            None
        )  # called before the process ends at once
        self.former: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if (
            started_by_another()
        ):  # the first process of the run has the signals, and this one goes when it goes
            ignore_signals()
            when_orphaned(os.environ[PARENT_VARIABLE], lambda: os._exit(1))
        elif threading.current_thread() is threading.main_thread():
            when_orphaned(
                os.environ.pop(SWEEP_VARIABLE, ""), lambda: os.kill(os.getpid(), signal.SIGTERM)
            )
            handlers = {number: signal.getsignal(number) for number in EXIT_CODES}
            # None: of code that is not Python's, which Python cannot put back.
            self.former = {number: each for number, each in handlers.items() if each is not None}
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
        self.at_once = lambda code: None  # or the thread would keep the run and its data a while

    def hold(self, holding: bool = True) -> None:
        """From here on a signal waits for the end of the step. (Lightning has set a handler for SIGTERM by now.)"""
        for number in self.former:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.handle)
        self.holding = holding

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the signal, or raise `Stopped` where nothing is held."""
        if self.in_a_call and self.requested and self.is_second(number):
            raise Stopped(self.requested, f"stopped at once by {self.name}")
        self.first.setdefault(number, time.monotonic())
        if not self.requested:
            self.requested, self.name = EXIT_CODES[number], signal.Signals(number).name
        if not self.holding:
            self.release()

    def is_second(self, number: int) -> bool:
        """Tell whether a signal that comes now is one more, and not one of those that are sent together."""
        since = time.monotonic() - self.first.get(number, math.inf)
        return since >= AGAIN_SECONDS.get(number, math.inf)

    def release(self) -> None:
        """From here on a signal ends the work where it is; raises `Stopped` where one has come already."""
        self.holding = False
        if self.requested:
            raise Stopped(self.requested, f"stopped by {self.name} while no step was under way")

    def end(self) -> None:
        """The work is done: a signal that came too late is forgotten, and one from here on is no failure."""
        self.holding, self.requested, self.at_once = False, 0, lambda code: os._exit(0)

    def watch(self) -> None:
        """Acknowledge a first SIGINT, and end the process at a second signal, however long a step still takes.

        The process of a caller is not ended: there `handle` obeys the second one.
        """
        first: dict[int, float] = {}
        while received := self.wakened.recv(1):
            number, now = received[0], time.monotonic()
            again = now - first.get(number, math.inf) >= AGAIN_SECONDS.get(number, math.inf)
            if again and not self.in_a_call:
                try:
                    self.at_once(EXIT_CODES[number])
                finally:
                    os._exit(EXIT_CODES[number])
            if number == signal.SIGINT and self.holding and not again:
                from rtx.progress import say  # tqdm, which `rtx --help` does not wait for

                say("finishing this step; Ctrl-C again stops at once")
            first.setdefault(number, now)
        self.wakened.close()


def ignore_signals(number: int = 0) -> None:
    """Leave them all to the first process: for those that it starts (by number), which a Ctrl-C reaches, too."""
    for code in EXIT_CODES:
        signal.signal(code, signal.SIG_IGN)


def when_orphaned(parent: str, act: Callable[[], object]) -> None:
    """Act, in a thread, within a second of the end of the parent process (its number; empty: never)."""

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1.0)
        act()

    if parent:
        threading.Thread(target=watch, name="parent", daemon=True).start()
