"""Who started this process, which of a run's it is, and its cores: told without torch, whose import takes seconds."""

from __future__ import annotations

import os


def started_by() -> tuple[str, int, int]:
    """Return who started this process, and how many processes it started in all and on this machine.

    srun counts where it runs several tasks; a single task, or an interactive shell inside an allocation, is our own.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun", int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    if tasks > 1 and "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:
        return "srun", tasks, tasks // int(os.environ.get("SLURM_NNODES", "1"))
    return "lightning", 1, 1


def process_rank(launcher: str, devices: int) -> int:
    """Return the number of this process among all, known before any process group is."""
    if launcher == "torchrun":
        return int(os.environ["RANK"])
    if launcher == "srun":
        return int(os.environ["SLURM_PROCID"])
    return int(os.environ.get("NODE_RANK", "0")) * devices + int(os.environ.get("LOCAL_RANK", "0"))


def is_first() -> bool:
    """Whether this is the first process of its run, the one that writes and speaks."""
    return process_rank(started_by()[0], 1) == 0


def cores() -> int:
    """Return the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
