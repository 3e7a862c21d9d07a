"""The C library's heap under a run on a CPU: large tensors come and go with every step, and always the same ones."""

from __future__ import annotations

import ctypes
import functools
import os
import resource

from rtx.training.memory import physical_memory

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""glibc's numbers for mallopt."""

HUGE_PAGES = 14
"""Linux's number for madvise: MADV_HUGEPAGE."""

HUGE_PAGE = 2**21
SHARE = 0.75
"""Part of the machine's memory whose addresses the heap takes; Linux refuses to promise more than there is."""


@functools.cache
def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed, and Linux to back it by huge pages; once in a process, before its tensors.

    Given back to the system, each page of them is faulted in and zeroed anew, about a tenth of a step's time; in huge
    pages 512 at a time. Torch can ask for huge pages as well (THP_MEM_ALLOC_ENABLE=1), but aligns each tensor to one,
    and a freed place then fits no tensor of its own size: a third more memory was seen. THP_MEM_ALLOC_ENABLE=0 says no
    to both.
    """
    try:
        library = ctypes.CDLL(None)
        library.mallopt(MMAP_MAX, 0)
        library.mallopt(TRIM_THRESHOLD, -1)
    except (AttributeError, OSError):  # another C library
        return
    if os.environ.get("THP_MEM_ALLOC_ENABLE") != "0" and not limited():
        reserve(library, int(SHARE * physical_memory()))


def limited() -> bool:
    """Tell whether the process may take a limited number of addresses, of which the heap must leave some."""
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in kinds)


def reserve(library: ctypes.CDLL, size: int) -> None:
    """Let the heap grow by `size` bytes of addresses that are backed by huge pages when they are first written to."""
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if (first := library.malloc(size)) is None:  # a system that promises no more than it has free
        return
    begin = -(-first // HUGE_PAGE) * HUGE_PAGE
    library.madvise(begin, (first + size - begin) // HUGE_PAGE * HUGE_PAGE, HUGE_PAGES)
    library.free(first)
