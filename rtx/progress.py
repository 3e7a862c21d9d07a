"""Messages and progress of a command: tqdm's bar on a terminal or in a notebook, else plain lines.

Messages go through the logger `rtx`: `logging.getLogger("rtx").setLevel(logging.WARNING)` silences
all but warnings. Of several processes of a run the first alone prints them. What a command was run
for, such as a table, is printed and no message.
"""

import contextlib
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator

from tqdm import TqdmWarning

from rtx.errors import printable
from rtx.processes import launch

# A notebook without ipywidgets gets a plain bar; tqdm would warn of that.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

QUIET_SECONDS = 3.0
"""Seconds before a bar appears."""
PLAIN_SECONDS = 15.0
"""Seconds between two lines where there is no terminal."""
clock = tqdm.format_interval
"""Writes seconds as 03:21, 1:03:21 or 49:03:21."""


class Printer(logging.Handler):
    """Prints messages on stdout, above a bar if there is one.

    If stdout cannot be written to, later lines go to os.devnull: the run goes on.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(printable(record.getMessage()))
            sys.stdout.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                # by path: the system's null device
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_first_rank(record: logging.LogRecord) -> bool:
    """Whether this process is the first of its run: a filter of messages."""
    return launch().rank == 0


LOGGER = logging.getLogger("rtx")
if not LOGGER.handlers:
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    LOGGER.addFilter(is_first_rank)
    LOGGER.addHandler(Printer())


def say(line: str) -> None:
    """Log a line that says what happens."""
    LOGGER.info("%s", line)


def warn(line: str) -> None:
    """Log a line on something that is not as the user may expect."""
    LOGGER.warning("%s", line)


class WholeLines:
    """Joins pieces of the output of a process into whole lines."""

    def __init__(self) -> None:
        self.begun = b""

    def add(self, piece: bytes) -> str:
        """Return the lines that end in a piece, with their newlines; "" where none ends.

        The rest waits for the next piece.
        """
        whole, newline, self.begun = (self.begun + piece).rpartition(b"\n")
        return (whole + newline).decode(errors="replace")

    def end(self) -> str:
        """Return the last line, which has no newline, after the last piece."""
        last = self.begun.decode(errors="replace")
        self.begun = b""
        return last


def peak_memory() -> int:
    """Return the peak memory in bytes: of the GPU if one is in use, else of this process."""
    # It takes seconds; other functions here do not need it.
    import torch

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux KiB.
    if sys.platform != "darwin":
        resident *= 1024
    # 0 where no GPU is in use.
    return torch.cuda.max_memory_allocated() or resident


@contextlib.contextmanager
def progress_bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows progress on stderr: `show(done, total)`, counted in `unit`.

    `unit` is a plural, such as windows.
    """
    began = time.monotonic()
    shown = began
    terminal = sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(
        unit=f" {unit}", delay=QUIET_SECONDS, leave=False, file=sys.stderr, disable=not terminal
    ) as bar:

        def show(done: int, total: int) -> None:
            nonlocal shown
            bar.total = total
            bar.update(done - bar.n)
            if not terminal and time.monotonic() - shown > PLAIN_SECONDS:
                shown = time.monotonic()
                line = tqdm.format_meter(
                    done, total, shown - began, ncols=79, ascii=True, unit=f" {unit}"
                )
                print(line, file=sys.stderr, flush=True)

        yield show
