"""How much memory there is, and running out of it: how that is told from other failures."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from rtx.config import Config

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Where Linux says how much a container may use."""
OUT_OF_MEMORY = "out of memory"
"""How the reason of a run that had too little begins."""
NO_THREAD = "can't start new thread"
"""What Python says where the system has no memory, or no number, for another thread; it does not say which."""
SIGNS = (
    *("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "alloc_failed"),
    *("bad_alloc", "could not create a primitive", "failed to map segment", NO_THREAD),
)
"""What torch, CUDA and their libraries say then, in small letters; not all of them have an error of its own for it."""


def out_of_memory(error: BaseException) -> str:
    """Return the reason for a run that ended for want of memory, or an empty string where the error is another."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if isinstance(error, RuntimeError | ImportError):
        known = known or any(sign in str(error).lower() for sign in SIGNS)
    if not known and not (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return ""
    said = " ".join(str(error).split()).removeprefix(f"{OUT_OF_MEMORY}: ") or type(error).__name__
    kind = f"{OUT_OF_MEMORY} or threads" if NO_THREAD in said else OUT_OF_MEMORY
    return f"{kind}: {said if len(said) <= 200 else said[:197] + '...'}"


def system_kills() -> int:
    """Return how many processes the system has killed for want of memory since it started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def device_memory(config: Config, processes: int = 0) -> int | None:
    """Return the bytes of memory that a process of a run on this machine may fill: its GPU's, or its share of the
    machine's (`processes`: of the run on it; 0: as configured); None where the run is for a GPU and there is none.
    """
    import torch  # after a mistake in the configuration has been told

    if config.hardware.name != "cpu" and torch.cuda.device_count():
        return torch.cuda.get_device_properties(0).total_memory
    if config.hardware.name == "gpu":
        return None
    return physical_memory() // (processes or config.hardware.devices or 1)


def physical_memory() -> int:
    """Return the bytes of memory that this machine has, or that its container may use."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(installed, int(CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or none with a limit: "max"
        return installed
