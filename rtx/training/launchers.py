"""Who started this process, which of a run's it is, and its cores: told without torch, whose import takes seconds."""

from __future__ import annotations

import os

from rtx.errors import UserError
from rtx.training.signals import started_by_another


def started_by() -> tuple[str, int, int]:
    """Return who started this process, and how many processes it started in all and on this machine.

    srun counts where it runs several tasks; a single task, or an interactive shell inside an allocation, is our own.

    Raises:
        UserError: a variable is no number.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun", number("WORLD_SIZE", 1), number("LOCAL_WORLD_SIZE", 1)
    tasks = number("SLURM_NTASKS", 1, default="1")
    if tasks > 1 and "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:
        return "srun", tasks, tasks // number("SLURM_NNODES", 1, default="1")
    return "lightning", 1, 1


def process_rank(launcher: str, devices: int, nodes: int) -> int:
    """Return the number of this process among all, known before any process group is.

    Raises:
        UserError: a variable is no number, or not one of a process that the run has.
    """
    if launcher == "torchrun":
        return number("RANK", 0, number("WORLD_SIZE", 1) - 1)
    if launcher == "srun":
        return number("SLURM_PROCID", 0, number("SLURM_NTASKS", 1) - 1)
    node = number("NODE_RANK", 0, nodes - 1, "0", f"hardware.nodes={nodes} (set that to run on more machines)")
    if started_by_another():
        return node * devices + number("LOCAL_RANK", 0)
    local = os.environ.get("LOCAL_RANK")
    if local not in (None, "0") or (local and devices > 1):  # where Lightning finds one it starts no other processes
        raise UserError(
            f"LOCAL_RANK={local}: rtx sets it for processes that it starts itself, and this one is not; unset it"
        )
    return node * devices


def is_first(nodes: int) -> bool:
    """Whether this is the first process of its run, the one that writes and speaks.

    Raises:
        UserError: as `process_rank`.
    """
    return process_rank(started_by()[0], 1, nodes) == 0


def number(name: str, least: int, most: int | None = None, default: str = "", reason: str = "") -> int:
    """Return an environment variable that holds a whole number; unset or empty, it is the default.

    Raises:
        UserError: names the variable, its value and what is allowed, with the reason.
    """
    value = os.environ.get(name) or default
    if value.isdecimal() and least <= int(value) and (most is None or int(value) <= most):
        return int(value)
    allowed = f"{least} or more" if most is None else f"{least}" if least == most else f"{least} to {most}"
    raise UserError(f"{name}={value}: must be {allowed}{reason and f', by {reason}'}; unset it if it is a leftover")


def cores() -> int:
    """Return the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
