"""Who started this process, which of a run's it is, and its cores: told without torch, whose import takes seconds."""

from __future__ import annotations

import os

from rtx.errors import UserError
from rtx.training.signals import started_by_another


def started_by() -> tuple[str, int, int]:
    """Return who started this process, and how many processes it started in all and on this machine.

    srun counts where it runs several tasks; a single task, or an interactive shell inside an allocation, is our own.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun", number("WORLD_SIZE", 1), number("LOCAL_WORLD_SIZE", 1)
    tasks = number("SLURM_NTASKS", 1, default="1")
    if tasks > 1 and "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:
        return "srun", tasks, tasks // number("SLURM_NNODES", 1, default="1")
    return "rtx", 1, 1


def process_rank(devices: int = 1) -> int:
    """Return the number of this process among all, known before any process group is.

    `devices`: processes that rtx starts on this machine, where no launcher has.
    """
    launcher, world, _ = started_by()
    if launcher != "rtx":
        return number("RANK" if launcher == "torchrun" else "SLURM_PROCID", 0, world - 1)
    if started_by_another():
        return number("LOCAL_RANK", 0)
    number("NODE_RANK", 0, 0, "0")  # Lightning would count this process from there
    local = os.environ.get("LOCAL_RANK")
    if local not in (None, "0") or (local and devices > 1):  # a leftover, which Lightning would read
        raise UserError(
            f"LOCAL_RANK={local}: rtx sets it for processes that it starts itself, and this one is not; unset it"
        )
    return 0


def number(name: str, least: int, most: int | None = None, default: str = "") -> int:
    """Return an environment variable that holds a whole number, else raise `UserError`; unset it is the default."""
    value = os.environ.get(name) or default
    if value.isdecimal() and least <= int(value) and (most is None or int(value) <= most):
        return int(value)
    allowed = f"{least} or more" if most is None else f"{least}" if least == most else f"{least} to {most}"
    raise UserError(f"{name}={value}: must be {allowed}; unset it if it is a leftover")


def cores() -> int:
    """Return the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
