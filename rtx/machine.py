"""What this machine has: processor cores, memory, a GPU's driver; and how it runs out of memory.

Nothing here imports torch.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path

from rtx.errors import shorten

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
OUT_OF_MEMORY = "out of memory"
"""Begins the reason of a run that ended for want of memory."""
SIGNS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "alloc_failed",
    "bad_alloc",
    "could not create a primitive",
    "failed to map segment",
    "can't start new thread",
)
"""Messages of Python, torch, CUDA and their libraries for want of memory, in lower case."""
NO_SOURCE = "could not get source code"
"""The message of Python's `inspect`, which torch calls, for a module that cannot be read; its
OSError has no errno."""


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the bytes of memory that this machine, or the container around this process, has."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # There may be no container, or one without a limit, whose file says "max".
    with contextlib.suppress(OSError, ValueError):
        # by path: a file of the kernel
        memory = min(memory, int(CONTAINER_LIMIT.read_text()))
    return memory


def lacks_gpu_driver() -> bool:
    """Return whether this machine surely has no driver of a GPU.

    Whether a driver has a GPU, torch alone can say.
    """
    if sys.platform != "linux":
        return False
    if Path("/dev/kfd").exists():  # AMD's driver
        return False
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return False
    return True


def out_of_memory(error: BaseException) -> str:
    """Return the reason of an error that means too little memory, or "" for any other error."""
    if not means_too_little_memory(error):
        return ""
    reason = str(error).strip().removeprefix(f"{OUT_OF_MEMORY}: ")
    return f"{OUT_OF_MEMORY}: {shorten(reason, 200) or type(error).__name__}"


def is_of_system(error: OSError) -> bool:
    """Return whether a line reports an error: it has an errno, or is `NO_SOURCE`."""
    return error.errno is not None or str(error) == NO_SOURCE


def system_reason(error: OSError) -> str:
    """Return what the operating system has refused, for a message."""
    if str(error) == NO_SOURCE:
        return f"the source of an imported module cannot be read ({error})"
    if isinstance(error, BlockingIOError) and error.filename is None:
        # fork failed.
        return f"another process cannot be started (see ulimit -u): {error.strerror}"
    if error.filename is None:
        return f"the system reports: {error.strerror}"
    return f"{shorten(os.fsdecode(error.filename))}: {error.strerror}"


def means_too_little_memory(error: BaseException) -> bool:
    """Return whether an error of Python, torch or the system means too little memory."""
    # By its name, since torch is not imported here.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, RuntimeError | ImportError):
        return names_lack_of_memory(str(error))
    return isinstance(error, OSError) and error.errno == errno.ENOMEM


def memory_is_exhausted() -> bool:
    """Return whether the system refuses this process another 16 MiB."""
    try:
        mmap.mmap(-1, 16 << 20).close()
    except (OSError, MemoryError):
        return True
    return False


def names_lack_of_memory(message: str) -> bool:
    """Return whether the message of an error says that there is too little memory."""
    message = message.lower()
    return any(sign in message for sign in SIGNS)


def system_kills() -> int:
    """Return how many processes the system has killed for want of memory since it started.

    0 where the system does not say.
    """
    with contextlib.suppress(OSError):
        # by path: a file of the kernel
        lines = Path("/proc/vmstat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0
