"""Trains in a separate process, so that a caller from Python survives however that process ends. No torch.

Where a run of several processes loses one, it ends all the others: they would wait for the lost one forever.
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
from rtx.runs.folder import shown
from rtx.runs.signals import EXIT_CODES
from rtx.runs.status import read_status
from rtx.variables import SWEEP_VARIABLE

POLL_SECONDS = 0.1
LEAVING_SECONDS = 60.0  # that a run may take to save after the caller has left it
ERROR = "rtx: "  # begins the lines of an error on stderr


def train_apart(overrides: Sequence[str], folder: Path) -> None:
    """Run `rtx train` with `overrides` in `folder`, print what it prints, and pass signals on to it.

    `UserError` where it refuses the overrides, `RunFailed` where the run fails, loses a process, or is stopped.
    """
    sys.stdout.flush()
    with started(overrides, folder) as process, passing_on_signals(process):
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
        stdout=None
        if sys.stdout is sys.__stdout__
        else subprocess.PIPE,  # a notebook's has no file descriptor
        stderr=subprocess.PIPE,
        process_group=0,  # so that Ctrl-C reaches the run once, by `passing_on_signals`
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
def passing_on_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals on to a process; afterwards the former handlers are back."""
    former = {}

    def pass_on(number: int, frame: object) -> None:
        process.send_signal(number)

    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in EXIT_CODES}
        # Ignored signals stay ignored. None is a handler not installed from Python, which could not be put back.
        former = {
            number: handler
            for number, handler in handlers.items()
            if handler not in (None, signal.SIG_IGN)
        }
    try:
        for number in former:
            signal.signal(number, pass_on)
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def forward(process: subprocess.Popen[bytes]) -> list[str]:
    """Print what a process prints, line by line, until it has ended; return its errors, which are not printed."""
    errors: list[str] = []

    def split_errors(lines: str) -> None:
        for line in lines.splitlines():
            if line.startswith(ERROR):
                errors.append(line.removeprefix(ERROR))
            else:
                with contextlib.suppress(OSError):  # if stderr is closed, the run still goes on
                    print(printable(line), file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:
        ready = stack.enter_context(selectors.DefaultSelector())
        for pipe, use in ((process.stdout, tell), (process.stderr, split_errors)):
            if pipe is not None:
                ready.register(pipe, selectors.EVENT_READ, (WholeLines(), use))
        while process.poll() is None:
            take_what_is_there(ready, POLL_SECONDS)
        while take_what_is_there(ready, 0.0):  # what it printed last
            pass
        for key in list(ready.get_map().values()):
            lines, use = key.data
            use(lines.end())
    return errors


def take_what_is_there(ready: selectors.BaseSelector, seconds: float) -> bool:
    """Wait for output, or its end, on any pipe, and read it once; return whether there was any."""
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
    status = read_status(folder)
    if status and status.state == "failed" and status.reason:
        return status.reason
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return f"the first process of the run {how}; continue with: rtx resume {shown(folder)}"
