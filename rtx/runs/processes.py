"""Who started this process, and which of a run's processes it is. No torch."""

import os
from typing import NamedTuple

from rtx.variables import started_by_another


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
