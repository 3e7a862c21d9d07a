"""A run in a process of its own, for a caller from Python: however that process ends, the caller's goes on. No torch.

A run of several processes ends all of them where one is lost, since those that wait for it cannot be woken otherwise.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from rtx.errors import RunFailed, UserError, printable
from rtx.progress import WholeLines, say
from rtx.training.run_folder import read_status, shown
from rtx.training.signals import EXIT_CODES, SWEEP_VARIABLE

POLL_SECONDS = 0.1
LEAVING_SECONDS = 60.0  # that a run is given to save, where the caller leaves it
ERROR = "rtx: "  # begins the lines of an error on stderr


def train_apart(overrides: Sequence[str], folder: Path) -> None:
    """Run `rtx train` with `overrides` in `folder`, print what it prints, and pass signals on to it.

    `UserError` where it refuses the overrides, `RunFailed` where the run fails, loses a process, or is stopped.
    """
    sys.stdout.flush()
    with passing_on_signals() as receivers, started(overrides, folder) as process:
        receivers.append(process)
        errors = forward(process)
    code = process.returncode
    if code == 0:
        return
    if code in EXIT_CODES.values():
        raise RunFailed(stopped(folder))
    said = "\n".join(dict.fromkeys(errors)) or how_it_ended(code, folder)
    raise UserError(said) if code == 2 else RunFailed(said)


def stopped(folder: Path) -> str:
    return f"{folder}: stopped before its end; continue with: rtx resume {shown(folder)}"


@contextlib.contextmanager
def started(overrides: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process; one that is left behind by an error is stopped."""
    own = {"RTX_RUN": str(folder), "PYTHONUNBUFFERED": "1", SWEEP_VARIABLE: str(os.getpid())}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "rtx", "train", *overrides],
        env={**os.environ, **own},
        stdin=subprocess.DEVNULL,
        stdout=None if sys.stdout is sys.__stdout__ else subprocess.PIPE,  # a notebook's is no file
        stderr=subprocess.PIPE,
        process_group=0,  # what the keyboard sends is passed on, once
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LEAVING_SECONDS)
            process.kill()
            process.wait()
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()


@contextlib.contextmanager
def passing_on_signals() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Pass signals on to the processes in the list that is yielded; afterwards the former handlers are back."""
    receivers: list[subprocess.Popen[bytes]] = []
    former = {}

    def pass_on(number: int, frame: object) -> None:
        for process in receivers:
            process.send_signal(number)

    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in EXIT_CODES}
        # None: of code that is not Python's, which Python cannot put back.
        former = {number: each for number, each in handlers.items() if each not in (None, signal.SIG_IGN)}
    try:
        for number in former:
            signal.signal(number, pass_on)
        yield receivers
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def forward(process: subprocess.Popen[bytes]) -> list[str]:
    """Print what a process prints, line by line, until it has ended; return its errors, which are not printed."""
    errors: list[str] = []

    def sort(lines: str) -> None:
        for line in lines.splitlines():
            if line.startswith(ERROR):
                errors.append(line.removeprefix(ERROR))
            else:
                with contextlib.suppress(OSError):  # that nobody reads is no reason to end a run
                    print(printable(line), file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:
        ready = stack.enter_context(selectors.DefaultSelector())
        for pipe, use in ((process.stdout, tell), (process.stderr, sort)):
            if pipe is not None:
                ready.register(pipe, selectors.EVENT_READ, (WholeLines(), use))
        while True:
            has_ended = process.poll() is not None
            if not take_what_is_there(ready, 0.0 if has_ended else POLL_SECONDS) and has_ended:
                break
        for key in list(ready.get_map().values()):
            lines, use = key.data
            use(lines.end())
    return errors


def take_what_is_there(ready: selectors.BaseSelector, seconds: float) -> bool:
    """Read each pipe that has something, or has come to its end, within some seconds; tell whether any had."""
    found = ready.select(seconds)
    for key, _ in found:
        lines, use = key.data
        pipe: IO[bytes] = key.fileobj  # type: ignore[assignment]
        if piece := os.read(pipe.fileno(), 65536):
            use(lines.add(piece))
        else:
            use(lines.end())
            ready.unregister(pipe)
    return bool(found)


def tell(lines: str) -> None:
    if lines:
        say(lines.removesuffix("\n"))


def how_it_ended(code: int, folder: Path) -> str:
    """Return why a run failed that printed no reason on stderr."""
    status = read_status(folder) or {}
    if status.get("state") == "failed" and status.get("reason"):
        return status["reason"]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return f"the first process of the run {how}; continue with: rtx resume {shown(folder)}"
