"""Trains in a separate process, so that a caller from Python survives however it ends. No torch.

Where a run of several processes loses one, it ends all others: they would wait for it forever.
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
from rtx.processes import SWEEP_VARIABLE
from rtx.progress import WholeLines, say
from rtx.runs.folder import shown
from rtx.runs.signals import EXIT_CODES
from rtx.runs.status import read_status

POLL_SECONDS = 0.1
LEAVING_SECONDS = 60.0
"""Seconds that a run may take to save after SIGTERM, before SIGKILL."""
ERROR = "rtx: "
"""Begins the lines of an error on stderr."""


def train_apart(overrides: Sequence[str], folder: Path) -> None:
    """Run `rtx train` in `folder`, print its output, and pass signals on to it.

    Raises `UserError` where it refuses the overrides, `RunFailed` where the run fails, loses a
    process, or is stopped.
    """
    sys.stdout.flush()
    with started(overrides, folder) as process, passing_on_signals(process):
        errors = forward(process)
    code = process.returncode
    if code == 0:
        return
    if code in EXIT_CODES.values():
        raise RunFailed(stopped(folder))
    message = "\n".join(dict.fromkeys(errors)) or reason_of_failure(code, folder)
    if code == 2:
        raise UserError(message)
    raise RunFailed(message)


def stopped(folder: Path) -> str:
    """Return the message of a run that a signal has stopped."""
    return f"{folder}: stopped before its end; continue with: rtx resume {shown(folder)}"


@contextlib.contextmanager
def started(overrides: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process, and stop it at the end of the block if it still runs."""
    variables = {"RTX_RUN": str(folder), "PYTHONUNBUFFERED": "1", SWEEP_VARIABLE: str(os.getpid())}
    # A notebook's stdout has no file descriptor.
    stdout = None if sys.stdout is sys.__stdout__ else subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "rtx", "train", *overrides],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
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
    """Pass signals on to a process in this block; then restore the former handlers."""
    former = {}

    def pass_on(number: int, frame: object) -> None:
        process.send_signal(number)

    if threading.current_thread() is threading.main_thread():
        for number in EXIT_CODES:
            handler = signal.getsignal(number)
            # Ignored signals stay ignored. None is a handler of C code: Python cannot restore it.
            if handler not in (None, signal.SIG_IGN):
                former[number] = handler
    try:
        for number in former:
            signal.signal(number, pass_on)
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def forward(process: subprocess.Popen[bytes]) -> list[str]:
    """Print the output of a process until its end; return its errors, which are not printed."""
    errors: list[str] = []

    def split_errors(lines: str) -> None:
        for line in lines.splitlines():
            if line.startswith(ERROR):
                errors.append(line.removeprefix(ERROR))
            else:
                # If stderr is closed, the run still goes on.
                with contextlib.suppress(OSError):
                    print(printable(line), file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:
        ready = stack.enter_context(selectors.DefaultSelector())
        for pipe, use in ((process.stdout, tell), (process.stderr, split_errors)):
            if pipe is not None:
                ready.register(pipe, selectors.EVENT_READ, (WholeLines(), use))
        while process.poll() is None:
            read_once(ready, POLL_SECONDS)
        # Read its last output.
        while read_once(ready, 0.0):
            pass
        for key in list(ready.get_map().values()):
            lines, use = key.data
            use(lines.end())
    return errors


def read_once(ready: selectors.BaseSelector, seconds: float) -> bool:
    """Wait for output, or its end, on any pipe, and read it once; return whether there was any."""
    events = ready.select(seconds)
    for key, _ in events:
        lines, use = key.data
        pipe: IO[bytes] = key.fileobj  # type: ignore[assignment]
        piece = os.read(pipe.fileno(), 65536)
        if piece:
            use(lines.add(piece))
        else:
            use(lines.end())
            ready.unregister(pipe)
    return bool(events)


def tell(lines: str) -> None:
    """Print whole lines."""
    if lines:
        say(lines.removesuffix("\n"))


def reason_of_failure(code: int, folder: Path) -> str:
    """Return why a run failed that printed no reason on stderr."""
    status = read_status(folder)
    if status and status.state == "failed" and status.reason:
        return status.reason
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return f"the first process of the run {how}; continue with: rtx resume {shown(folder)}"
