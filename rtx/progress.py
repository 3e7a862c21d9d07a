"""What a command says while it works: lines, tqdm's bar on a terminal or in a notebook, plain lines elsewhere."""

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator

from tqdm.auto import tqdm

from rtx.errors import printable

QUIET_SECONDS, PLAIN_SECONDS = 3.0, 15.0  # until there is a bar; between two lines where there is no terminal
clock = tqdm.format_interval  # seconds as 03:21, 1:03:21 or 49:03:21


def say(line: str) -> None:
    """Print a line that stays, above a bar if there is one. That nobody reads any more is no reason to end a run."""
    try:
        tqdm.write(printable(line))
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def peak_memory() -> int:
    """Return the most memory used so far in bytes: of the GPU if there is one in use, else of this process."""
    import torch  # takes seconds, and clock times are told without it

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return torch.cuda.max_memory_allocated() or resident  # 0 where no GPU is in use


@contextlib.contextmanager
def progress_bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yield what is called with how many (of `unit`, in the plural) are done and how many there are; on stderr."""
    began = shown = time.monotonic()
    terminal = sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(unit=f" {unit}", delay=QUIET_SECONDS, leave=False, file=sys.stderr, disable=not terminal) as bar:

        def show(done: int, total: int) -> None:
            nonlocal shown
            bar.total = total
            bar.update(done - bar.n)
            if not terminal and time.monotonic() - shown > PLAIN_SECONDS:
                shown = time.monotonic()
                line = tqdm.format_meter(done, total, shown - began, ncols=79, ascii=True, unit=f" {unit}")
                print(line, file=sys.stderr, flush=True)

        yield show
