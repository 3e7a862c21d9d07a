"""What a command says while it works: lines, tqdm's bar on a terminal or in a notebook, plain lines elsewhere."""

import contextlib
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator

from tqdm import TqdmWarning

from rtx.errors import printable

with (
    warnings.catch_warnings()
):  # a notebook without ipywidgets has a plain bar, and needs no advice on that
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

QUIET_SECONDS, PLAIN_SECONDS = (
    3.0,
    15.0,
)  # until there is a bar; between two lines where there is no terminal
clock = tqdm.format_interval  # seconds as 03:21, 1:03:21 or 49:03:21


def say(line: str) -> None:
    """Print a line that stays, above a bar if there is one. That nobody reads any more is no reason to end a run."""
    try:
        tqdm.write(printable(line))
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class WholeLines:
    """Joins pieces of what a process prints to whole lines: a line that has not ended waits for its end."""

    def __init__(self) -> None:
        self.begun = b""

    def add(self, piece: bytes) -> str:
        """Return the lines that are whole by now, with the newline of each; empty where none is."""
        whole, newline, self.begun = (self.begun + piece).rpartition(b"\n")
        return (whole + newline).decode(errors="replace")

    def end(self) -> str:
        """Return what has no newline, once nothing more comes."""
        last = self.begun.decode(errors="replace")
        self.begun = b""
        return last


def peak_memory() -> int:
    """Return the most memory used so far in bytes: of the GPU if there is one in use, else of this process."""
    import torch  # takes seconds, and clock times are told without it

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return torch.cuda.max_memory_allocated() or resident  # 0 where no GPU is in use


@contextlib.contextmanager
def progress_bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yield what is called with how many (of `unit`, in the plural) are done and how many there are; on stderr."""
    began = shown = time.monotonic()
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
