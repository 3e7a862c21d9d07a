"""The C library's heap under a run on a CPU: large tensors come and go with every step, and always the same ones."""

from __future__ import annotations

import contextlib
import ctypes

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""glibc's numbers for mallopt."""


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed instead of giving it back, to be faulted in and zeroed anew in every step.

    That is about a tenth of a step's time. Another C library is left as it is.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(MMAP_MAX, 0)
        library.mallopt(TRIM_THRESHOLD, -1)
