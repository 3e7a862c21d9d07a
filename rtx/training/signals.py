"""What the signals mean to a run: save at the end of the step and leave with the code that schedulers expect.

SIGINT (Ctrl-C): save, exit 130; a second one: at once, 130. SIGTERM, SIGUSR1, SIGUSR2 (preemption) and SIGHUP (a lost
terminal): save, exit 143; a second SIGTERM, some seconds later: at once, 143. Before the first step, and after the
last, there is nothing to save and the first signal ends the work where it is.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

INTERRUPTED, PREEMPTED = 130, 143
EXIT_CODES = {
    signal.SIGINT: INTERRUPTED,
    **dict.fromkeys((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP), PREEMPTED),
}

PATIENCE_SECONDS = 1.0
"""Time that the main thread is given to react to a signal while no step is under way."""

AGAIN_SECONDS = 3.0
"""From this time on after a SIGTERM the next one counts as a second: schedulers send the first to many at once."""

PARENT_VARIABLE = "RTX_PARENT"
"""Environment variable that holds the number of the first process, for those that it starts."""

SWEEP_VARIABLE = "RTX_SWEEP"
"""Environment variable that tells the cell of a sweep the number of the process that started it."""


class Stopped(BaseException):
    """The run ends because of a signal. Like KeyboardInterrupt, no `except Exception` swallows it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        """Exit code of the command."""

    @property
    def state(self) -> str:
        """The word for status.json."""
        return state_after(self.code)


def state_after(code: int) -> str:
    """Return the word for status.json of a run that a signal ended with this exit code."""
    return "interrupted" if code == INTERRUPTED else "preempted"


class Signals:
    """The signal handlers of a run, as a context that puts the former handlers back.

    While `holding` is false a signal raises `Stopped` where the process is; while it is true the signal is only noted
    in `requested`, for the loop to read at the end of its step. Python runs handlers between two of its own
    instructions, and waiting for another process of the run is a single one; so a thread that the system wakes at once
    ends the process where the main thread does not come round to it.
    """

    def __init__(self) -> None:
        self.requested, self.name = 0, "a signal"
        """Exit code and name of the first signal; of one that only another process of the run got, none is known."""
        self.holding = False
        """Whether there is a step to finish first."""
        self.at_once: Callable[[int], object] = lambda code: None
        """Called with the exit code before the process ends at once."""
        self.acknowledge: Callable[[str], object] = lambda line: None
        """Called with a line to show as soon as there is a SIGINT that waits for the end of a step."""
        self.former: dict[signal.Signals, Any] = {}
        self.seen = threading.Event()
        """Set when the main thread has come round to a signal."""

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self.former = {number: signal.getsignal(number) for number in EXIT_CODES}
            self.install()
            self.waker, self.wakened = socket.socketpair()
            self.waker.setblocking(False)
            self.former_fd = signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self.watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.former:
            signal.set_wakeup_fd(self.former_fd)
            self.waker.close()
        for number, handler in self.former.items():
            signal.signal(number, handler)
        # Or the thread would keep the run and its data a while.
        self.at_once, self.acknowledge = lambda code: None, lambda line: None

    def install(self) -> None:
        """Set our handlers (again: Lightning sets its own for SIGTERM when a fit begins)."""
        for number in self.former:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the signal, or raise `Stopped` where nothing is held."""
        self.seen.set()
        if not self.requested:
            self.requested, self.name = EXIT_CODES[signal.Signals(number)], signal.Signals(number).name
        if not self.holding:
            self.release()

    def release(self) -> None:
        """From here on a signal ends the work where it is.

        Raises:
            Stopped: one has come already.
        """
        self.holding = False
        if self.requested:
            raise Stopped(self.requested, f"stopped by {self.name} while no step was under way")

    def end(self) -> None:
        """The work is done: a signal that came too late is forgotten, and one from here on is no failure."""
        self.holding, self.requested, self.at_once = False, 0, lambda code: os._exit(0)

    def watch(self) -> None:
        """Acknowledge a first SIGINT; end the process at a second, or if the main thread, free to, does not react.

        A step may take minutes, or wait for ever for a loader process or a rank that is stopped: the second counts.
        """
        first: dict[int, float] = {}
        while received := self.wakened.recv(1):
            number, now = received[0], time.monotonic()
            if number not in EXIT_CODES:
                continue
            patience = {signal.SIGINT: 0.0, signal.SIGTERM: AGAIN_SECONDS}.get(signal.Signals(number))
            again = patience is not None and number in first and now - first[number] >= patience
            first.setdefault(number, now)
            if not again and self.holding and number == signal.SIGINT:
                self.acknowledge("finishing this step; Ctrl-C again stops at once")
            if again or (not self.holding and not self.seen.wait(PATIENCE_SECONDS)):
                self.leave(EXIT_CODES[signal.Signals(number)])
        self.wakened.close()

    def leave(self, code: int) -> None:
        """End the process now."""
        try:
            self.at_once(code)
        finally:
            os._exit(code)


def ignore_signals() -> None:
    """Leave them all to the first process: for those that it starts, which a Ctrl-C or a scheduler reaches too."""
    for number in EXIT_CODES:
        signal.signal(number, signal.SIG_IGN)


def announce_parent() -> None:
    """Tell the processes that this one will start who it is; see `go_with_parent`."""
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def started_by_another() -> bool:
    """Whether the first process of a run has started this one."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and os.environ.get(PARENT_VARIABLE) == str(os.getppid())


def go_with_parent() -> None:
    """End this process within a second of the end of its parent, who announced itself, even while it waits."""
    when_orphaned(int(os.environ[PARENT_VARIABLE]), lambda: os._exit(1))


def stop_with_sweep() -> None:
    """As the cell of a sweep, stop as after SIGTERM within a second of the sweep's end, however that came.

    Call it while the signals of the run are handled. The processes that this one starts are told nothing of a sweep.
    """
    if sweep := os.environ.pop(SWEEP_VARIABLE, ""):
        when_orphaned(int(sweep), lambda: os.kill(os.getpid(), signal.SIGTERM))


def when_orphaned(parent: int, act: Callable[[], object]) -> None:
    """Act, in a thread, when this process has another parent than `parent`."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        act()

    threading.Thread(target=watch, name="parent", daemon=True).start()
