"""Who started this process, and which of a run's processes it is.

Other processes, and launchers, say so in environment variables. No torch.
"""

import os
from typing import NamedTuple

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
    """Return how this process was started, by the variables that launchers set."""
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" in variables:
        world = int(variables["WORLD_SIZE"])
        nodes = world // int(variables["LOCAL_WORLD_SIZE"])
        return Launch("torchrun", int(variables["RANK"]), world, nodes)
    is_step = "SLURM_STEP_ID" in variables and "SLURM_PROCID" in variables
    tasks = int(variables.get("SLURM_NTASKS", 1))
    if is_step and tasks > 1:
        nodes = int(variables.get("SLURM_NNODES", 1))
        return Launch("srun", int(variables["SLURM_PROCID"]), tasks, nodes)
    rank = int(variables["LOCAL_RANK"]) if started_by_another() else 0
    return Launch("rtx", rank, 1, 1)


def started_by_another() -> bool:
    """Whether the first process of a run has started this one."""
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    return not is_first_here and os.environ.get(PARENT_VARIABLE) == str(os.getppid())
