"""Plug-ins for Hydra: the sweeper and the launchers of `rtx train -m`.

- hydra/sweeper=rtx_grid: every combination of the listed values, all checked before one runs
- hydra/launcher=rtx_processes: a process a cell on this machine
- hydra/launcher=rtx_slurm: a job of Slurm a cell, as hardware=slurm chooses

Hydra imports this file whenever it starts, so that it imports little itself. It runs the file
before the module is in `sys.modules`, where `dataclass` would look annotations up: they are no
texts here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from rtx.sweeps.sweep import Sweep

Jobs = Sequence[Sequence[str]]


def sweep_of(task_function: TaskFunction) -> "Sweep":
    """Return the sweep that `rtx train -m` hands to Hydra as its task."""
    from rtx.sweeps.sweep import Sweep

    if not isinstance(task_function, Sweep):
        raise RuntimeError("the plug-ins of rtx sweep its own runs alone: rtx train -m")
    return task_function


class GridSweeper(Sweeper):
    """Every combination of the listed values, of each chosen experiment apart, in one launch."""

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = params

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        from hydra.core.plugins import Plugins

        self.sweep_of_runs = sweep_of(task_function)
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context, task_function, config
        )

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Launch all combinations; the sweep has read `arguments`, those of the command."""
        assert self.launcher is not None
        return self.launcher.launch(self.sweep_of_runs.grid(), initial_job_idx=0)


class ProcessLauncher(Launcher):
    """A process of this machine for every cell."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.sweep_of_runs = sweep_of(task_function)

    def launch(self, job_overrides: Jobs, initial_job_idx: int) -> Sequence[JobReturn]:
        return self.sweep_of_runs.launch(job_overrides, initial_job_idx)


class SlurmLauncher(ProcessLauncher):
    """A job of Slurm for every cell."""

    def __init__(self, **parameters: Any) -> None:
        self.parameters = {
            name: OmegaConf.to_container(value, resolve=True)
            if OmegaConf.is_config(value)
            else value
            for name, value in parameters.items()
        }

    def launch(self, job_overrides: Jobs, initial_job_idx: int) -> Sequence[JobReturn]:
        return self.sweep_of_runs.launch(job_overrides, initial_job_idx, slurm=self.parameters)


@dataclass
class GridConfig:
    _target_: str = "hydra_plugins.rtx_sweeps.GridSweeper"
    params: dict[str, str] | None = None


@dataclass
class ProcessConfig:
    _target_: str = "hydra_plugins.rtx_sweeps.ProcessLauncher"


@dataclass
class SlurmConfig:
    """What a job asks for, in the words of submitit; unset: the default of the cluster."""

    _target_: str = "hydra_plugins.rtx_sweeps.SlurmLauncher"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    comment: str | None = None
    gres: str | None = None
    timeout_min: int = 1440
    signal_delay_s: int = 120
    max_num_timeout: int = 20
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 8
    cpus_per_gpu: int | None = None
    gpus_per_node: int | None = 1
    gpus_per_task: int | None = None
    mem_gb: float | None = 32
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    name: str | None = None
    stderr_to_stdout: bool = True
    array_parallelism: int = 256
    setup: list[str] | None = None
    additional_parameters: dict[str, Any] = field(default_factory=dict)


CONFIGS = {
    ("hydra/sweeper", "rtx_grid"): GridConfig,
    ("hydra/launcher", "rtx_processes"): ProcessConfig,
    ("hydra/launcher", "rtx_slurm"): SlurmConfig,
}
for (group, name), node in CONFIGS.items():
    ConfigStore.instance().store(group=group, name=name, node=node, provider="rtx")
