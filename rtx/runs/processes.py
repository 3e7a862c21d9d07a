"""The process of a run: who started it, its cores, and how it ends without memory. No torch."""

import contextlib
import errno
import os
from pathlib import Path

from rtx.errors import shorten
from rtx.runs.signals import started_by_another

OUT_OF_MEMORY = "out of memory"
"""The first words of the reason of a run that had too little memory."""
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
"""Messages of Python, torch, CUDA and their libraries then, in lower case."""


def started_by() -> tuple[str, int, int, int]:
    """Return the launcher (torchrun, srun, else rtx), this process' rank, processes and machines."""
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" in variables:
        world = int(variables["WORLD_SIZE"])
        machines = world // int(variables["LOCAL_WORLD_SIZE"])
        return "torchrun", int(variables["RANK"]), world, machines
    in_slurm_step = {"SLURM_STEP_ID", "SLURM_PROCID"} <= variables.keys()
    tasks = int(variables.get("SLURM_NTASKS", 1))
    if in_slurm_step and tasks > 1:
        machines = int(variables.get("SLURM_NNODES", 1))
        return "srun", int(variables["SLURM_PROCID"]), tasks, machines
    rank = int(variables["LOCAL_RANK"]) if started_by_another() else 0
    return "rtx", rank, 1, 1


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def out_of_memory(error: BaseException) -> str:
    """Return the reason of a run that ended for want of memory; empty for another error."""
    if not is_out_of_memory(error):
        return ""
    message = str(error).strip().removeprefix(f"{OUT_OF_MEMORY}: ")
    return f"{OUT_OF_MEMORY}: {shorten(message, 200) or type(error).__name__}"


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that there is too little memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # Not all libraries have an error class for it.
    if not isinstance(error, RuntimeError | ImportError):
        return False
    message = str(error).lower()
    return any(sign in message for sign in SIGNS)


def system_kills() -> int:
    """Return how many processes the system has killed for want of memory since it started.

    0 where the system does not count them.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
