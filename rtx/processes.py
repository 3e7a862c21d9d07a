"""Who started this process, which of a run's processes it is, and pauses of its garbage collection.

Other processes, and launchers, say the first two in environment variables. No torch.
"""

import contextlib
import gc
import os
from collections.abc import Generator
from typing import NamedTuple

from rtx.errors import UserError, shorten

PARENT_VARIABLE = "RTX_PARENT"
"""Process id of a run's first process, set for the other processes of that run."""
SWEEP_VARIABLE = "RTX_SWEEP"
"""Process id of the process that started a run: a sweep, or a caller from Python.

The run stops when that process ends.
"""


class Launch(NamedTuple):
    """How this process was started."""

    launcher: str
    """torchrun, srun or, without either, rtx."""
    rank: int
    """The number of this process among all processes of the run."""
    world: int
    """The number of processes that the launcher has started; 1 for rtx."""
    nodes: int
    """The number of machines that the launcher has started them on; 1 for rtx."""


def launch() -> Launch:
    """Return how this process was started, by the variables that launchers set.

    UserError for variables of a launcher that are incomplete or no numbers.
    """
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" in variables:
        world = number_in("WORLD_SIZE")
        nodes = world // max(1, number_in("LOCAL_WORLD_SIZE"))
        return Launch("torchrun", number_in("RANK"), world, nodes)
    if "SLURM_STEP_ID" in variables and "SLURM_PROCID" in variables:
        tasks = number_in("SLURM_NTASKS", "1")
        if tasks > 1:
            nodes = number_in("SLURM_NNODES", "1")
            return Launch("srun", number_in("SLURM_PROCID"), tasks, nodes)
    rank = number_in("LOCAL_RANK") if started_by_another() else 0
    return Launch("rtx", rank, 1, 1)


def number_in(variable: str, default: str = "") -> int:
    """Return the number in a variable of a launcher; `UserError` where it holds none."""
    text = os.environ.get(variable, default)
    if not (text.isascii() and text.isdecimal()):
        problem = "is no number, as torchrun and srun set it"
        raise UserError(f"{variable}={shorten(text)}: {problem}; unset what is left over of them")
    return int(text)


def check_launch() -> None:
    """Raise `UserError` for variables that say wrongly who has started this process."""
    launch()
    parent = os.environ.get(SWEEP_VARIABLE, "")
    if parent in ("", str(os.getppid())) or started_by_another():
        return
    problem = "no process of this number has started this one"
    raise UserError(f"{SWEEP_VARIABLE}={shorten(parent)}: {problem}; unset {SWEEP_VARIABLE}")


def started_by_another() -> bool:
    """Whether the first process of a run has started this one."""
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    return not is_first_here and os.environ.get(PARENT_VARIABLE) == str(os.getppid())


@contextlib.contextmanager
def garbage_collection_paused() -> Generator[None]:
    """Return a context in which Python searches for no reference cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
