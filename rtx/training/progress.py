"""Lines of a run that stay above its bar, and the words for times and memory."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

from tqdm import tqdm


def say(line: str) -> None:
    """Print a line that stays, above a bar if there is one. That nobody reads any more is no reason to end a run."""
    try:
        tqdm.write(line)
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def clock(seconds: float) -> str:
    """Return seconds as 3:21, 1:03:21 or 2d 1:03:21."""
    days, rest = divmod(round(max(0.0, seconds)), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, second = divmod(rest, 60)
    short = f"{hours}:{minutes:02}:{second:02}" if days or hours else f"{minutes}:{second:02}"
    return f"{days}d {short}" if days else short


def peak_memory() -> int:
    """Return the most memory used so far in bytes: of the GPU if there is one in use, else of this process."""
    import torch  # takes seconds, and clock times are told without it

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
