"""Lines of a run that stay above its bar, and the words for times and memory."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

from tqdm import tqdm

clock = tqdm.format_interval
"""Returns seconds as 03:21, 1:03:21 or 49:03:21."""


def say(line: str) -> None:
    """Print a line that stays, above a bar if there is one. That nobody reads any more is no reason to end a run."""
    try:
        tqdm.write(line)
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def peak_memory() -> int:
    """Return the most memory used so far in bytes: of the GPU if there is one in use, else of this process."""
    import torch  # takes seconds, and clock times are told without it

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
