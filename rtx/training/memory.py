"""Running out of memory: how it is told from other failures, in the run itself and when the system ends the run."""

from __future__ import annotations

import errno
from pathlib import Path

OUT_OF_MEMORY = "out of memory"
"""How the reason of a run that had too little begins."""

SIGNS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "alloc_failed",
    "not enough memory",
    "bad_alloc",
)
"""What torch, CUDA and their libraries say then, in small letters; not all of them have an error of its own for it."""

NO_THREAD = "can't start new thread"
"""What Python says where the system has no memory, or no number, for another thread; it does not say which."""


def out_of_memory(error: BaseException) -> str:
    """Return the reason for a run that ended for want of memory, or an empty string where the error is another."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if isinstance(error, RuntimeError):
        known = known or any(sign in str(error).lower() for sign in (*SIGNS, NO_THREAD))
    elif isinstance(error, OSError):
        known = error.errno == errno.ENOMEM
    if not known:
        return ""
    said = " ".join(str(error).split()) or type(error).__name__
    kind = f"{OUT_OF_MEMORY} or threads" if NO_THREAD in said else OUT_OF_MEMORY
    return f"{kind}: {said if len(said) <= 200 else said[:197] + '...'}"


def system_kills() -> int:
    """Return how many processes the system has killed for want of memory since it started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
