"""Several processes of one run: how they start, what they exchange, how they share weights."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import (
    LightningEnvironment,
    find_free_network_port,
)
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.optim import Optimizer

from rtx.errors import UserError
from rtx.model.block import Block
from rtx.processes import PARENT_VARIABLE, launch, started_by_another
from rtx.settings.identity import short_hash
from rtx.sharded import sharded_as, whole
from rtx.training.hardware import Hardware

PATIENCE_SECONDS = 10.0
"""Seconds that the main thread gets to report the end of another process by its own error."""
LOST_SIGNS = (
    "gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL",
    "ProcessGroup",
)
"""Parts of error messages that mean that another process has ended."""


class Ranks:
    """The ranks of a run: what they exchange besides gradients.

    They exchange it by gloo, from CPU memory: no process waits for its GPU.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.group: Any = None
        self.connected = False
        """Whether all processes have started; from then on rank 0 alone reports errors."""

    def connect(self) -> None:
        """Make a gloo group beside the process group, unless that is gloo; all ranks call this."""
        if self.world > 1 and not self.connected and dist.get_backend() != "gloo":
            self.group = dist.new_group(backend="gloo")
        self.connected = True

    def largest(self, *values: int) -> list[int]:
        """Return the largest of each value over all ranks."""
        return torch.tensor(self.gather(values)).amax(dim=0).tolist()

    def total(self, *values: float) -> list[float]:
        """Return the sum of each value over all ranks."""
        return torch.tensor(self.gather(values), dtype=torch.float64).sum(dim=0).tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def compare(self, values: Mapping[str, Any]) -> None:
        """Raise `UserError` on all ranks alike where their values differ."""
        if len({*self.gather(short_hash(values))}) > 1:
            raise UserError(
                "the processes of the run have different settings, data or folders: start them all"
                " with the same words, on the same data, and on a run folder that all of them see"
            )


def lost_process(error: Exception) -> str:
    """Return a message if an error means that another process has ended, else ""."""
    message = str(error)
    if "DataLoader worker" in message:
        return f"a loader process is gone: {message.splitlines()[0]}"
    is_sign = dist.is_initialized() and any(sign in message for sign in LOST_SIGNS)
    if isinstance(error, dist.DistError) or is_sign:
        return "another process of the run is gone"
    return ""


class StartedRanks(LightningEnvironment):
    """Tells Lightning that `start_ranks` starts the processes, so that it starts none.

    Variables of other launchers are not read.
    """

    creates_processes_externally = True  # type: ignore[assignment]

    def local_rank(self) -> int:
        return launch().rank

    def node_rank(self) -> int:
        return 0


def cluster_environment(hardware: Hardware) -> ClusterEnvironment:
    """Return Lightning's environment for the launcher; its own guess may read stale variables."""
    if hardware.launcher == "torchrun":
        return TorchElasticEnvironment()
    if hardware.launcher == "srun":
        # Lightning requires this variable, which srun does not always set.
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(hardware.devices))
        return SLURMEnvironment(auto_requeue=False)
    return StartedRanks()


def start_ranks(
    hardware: Hardware, folder: Path, lost: Callable[[str], object]
) -> list[subprocess.Popen[bytes]]:
    """Start the ranks from 1 on, on this machine, and watch them; none under torchrun or srun.

    They get the command line of this process. Lightning's own launcher would send this process
    SIGKILL when another one ends: then it could write neither status nor message.

    Args:
        lost: called in a thread with how a process has failed.
    """
    if hardware.launcher != "rtx" or hardware.devices == 1 or started_by_another():
        return []
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
    shared = {**os.environ, "RTX_RUN": str(folder), PARENT_VARIABLE: str(os.getpid())}
    command = [sys.executable, "-P", "-m", "rtx", *sys.argv[1:]]
    ranks = []
    for rank in range(1, hardware.devices):
        ranks.append(subprocess.Popen(command, env={**shared, "LOCAL_RANK": str(rank)}))
    threading.Thread(target=watch_ranks, args=(ranks, lost), name="children", daemon=True).start()
    return ranks


def watch_ranks(ranks: list[subprocess.Popen[bytes]], lost: Callable[[str], object]) -> None:
    """Call `lost` `PATIENCE_SECONDS` after a process has failed; return if none does."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = [process for process, code in zip(ranks, codes, strict=True) if code]
        if failed:
            break
        if all(code == 0 for code in codes):
            return
        time.sleep(0.5)
    time.sleep(PATIENCE_SECONDS)
    lost(f"process {failed[0].pid} of the run {how_it_ended(failed[0].returncode)}")


def how_it_ended(code: int) -> str:
    """Return what a return code says, such as "was killed by SIGKILL"."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with {code}"


def strategy(hardware: Hardware) -> Strategy | str:
    """Return how Lightning distributes training."""
    if not hardware.distributed:
        return "auto"
    if hardware.sharded:
        return Sharded(hardware.world)
    # Centroids, the only buffers that change, are kept equal by after_step.
    return DDPStrategy(broadcast_buffers=False)


def shard(model: nn.Module, mesh: Any) -> None:
    """Shard the weights of a model over the processes of a mesh, in place; buffers stay whole."""
    from torch.distributed.fsdp import fully_shard

    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        fully_shard(block, mesh=mesh)
    # These weights stay gathered: the loss reads the output matrix after `forward`.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    # The backend on a CPU, gloo, has no mean: gradients are summed, and then divided.
    if mesh.device_type == "cpu":
        for module in (*blocks, model):
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined, operator]


class Sharded(ModelParallelStrategy):
    """hardware=fsdp: weights, gradients and optimizer state are sharded, checkpoints are whole."""

    def __init__(self, world: int) -> None:
        super().__init__(
            data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=False
        )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.gathered(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer with whole tensors."""
        state = optimizer.state_dict()
        moments = {number: self.gathered(values) for number, values in state["state"].items()}
        return {**state, "state": moments}

    def gathered(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Gather tensors one by one; rank 0 alone gets them, in CPU memory. All ranks call this."""
        on_cpu = {}
        for name, value in values.items():
            tensor = whole(value)
            if self.is_global_zero:
                # A value that is not sharded stays where it is.
                on_cpu[name] = value if tensor is value else tensor.cpu()
        return on_cpu

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this process's shard of each tensor; every process has read the whole checkpoint."""
        assert self.lightning_module is not None
        tensors = dict(checkpoint["state_dict"])
        for name, like in self.lightning_module.state_dict().items():
            if name in tensors:
                tensors[name] = sharded_as(tensors[name], like)
        self.lightning_module.load_state_dict(tensors, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this process's shards of the optimizer's state, as `load_model_state_dict` does."""
        (optimizer,) = self.optimizers
        (state,) = checkpoint["optimizer_states"]
        weights: list[nn.Parameter] = []
        for group in optimizer.param_groups:
            weights += group["params"]
        for number, values in state["state"].items():
            like = weights[number]
            for name, value in values.items():
                # Moments have the shape of their weight, and are sharded alike; counts are not.
                if value.shape == like.shape:
                    values[name] = sharded_as(value, like)
        optimizer.load_state_dict(state)
