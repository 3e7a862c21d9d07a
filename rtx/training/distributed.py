"""Several processes of one run: who starts them, what they tell each other, and how parameters are shared out."""

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
from rtx.runs.processes import launch
from rtx.settings.identity import short_hash
from rtx.sharded import sharded_as, whole
from rtx.training.hardware import Hardware
from rtx.variables import PARENT_VARIABLE, started_by_another

PATIENCE_SECONDS = (
    10.0  # that the main thread is given to notice by itself that another process is gone
)


class Ranks:
    """What the processes tell each other besides gradients; over CPU memory, so that nobody waits for a GPU."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.group: Any = None
        self.connected = False  # from then on they fail together, and the first one says why

    def connect(self) -> None:
        """Open the channel, once the process group exists; all ranks call it."""
        if self.world > 1 and not self.connected and dist.get_backend() != "gloo":
            self.group = dist.new_group(backend="gloo")
        self.connected = True

    def largest(self, *values: int) -> list[int]:
        return torch.tensor(self.gather(values)).amax(dim=0).tolist()

    def total(self, *values: float) -> list[float]:
        return torch.tensor(self.gather(values), dtype=torch.float64).sum(dim=0).tolist()

    def gather(self, own: Any) -> list[Any]:
        everyone: list[Any] = [own] * self.world
        if self.world > 1:
            dist.all_gather_object(everyone, own, group=self.group)
        return everyone

    def compare(self, own: Mapping[str, Any]) -> None:
        """Compare what the processes begin with; `UserError` on all of them alike, where it differs."""
        if len({*self.gather(short_hash(own))}) > 1:
            how = "start them all with the same words, on the same data, and on a run folder that all of them see"
            raise UserError(f"the processes of the run do not begin alike: {how}")


def lost_process(error: Exception) -> str:
    """Return which process of the run has gone, if an error means that, else an empty string."""
    if "DataLoader worker" in str(error):
        return f"a loader process is gone: {str(error).splitlines()[0]}"
    signs = (
        "gloo",
        "Connection closed by peer",
        "Connection reset by peer",
        "NCCL",
        "ProcessGroup",
    )
    if isinstance(error, dist.DistError) or (
        dist.is_initialized() and any(s in str(error) for s in signs)
    ):
        return "another process of the run is gone"
    return ""


class StartedRanks(LightningEnvironment):
    """Processes that `start_ranks` has started: Lightning starts none, and reads no other launcher's leftovers."""

    creates_processes_externally = True  # type: ignore[assignment]

    def local_rank(self) -> int:
        return launch().rank

    def node_rank(self) -> int:
        return 0


def cluster_environment(hardware: Hardware) -> ClusterEnvironment:
    """Return Lightning's view of who started the processes; never its guess, which reads more of the system."""
    if hardware.launcher == "torchrun":
        return TorchElasticEnvironment()
    if hardware.launcher == "srun":
        # Lightning insists on the tasks of each machine, which srun tells of only where they were asked for.
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(hardware.devices))
        return SLURMEnvironment(auto_requeue=False)
    return StartedRanks()


def start_ranks(
    hardware: Hardware, folder: Path, lost: Callable[[str], object]
) -> list[subprocess.Popen[bytes]]:
    """Start the other processes of this machine with the words of this one, where nobody else does, and watch them."""
    # Lightning's own launcher ends the first process by SIGKILL when another is gone: nothing could be said or written.
    if hardware.launcher != "rtx" or hardware.devices == 1 or started_by_another():
        return []
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
    shared = {**os.environ, "RTX_RUN": str(folder), PARENT_VARIABLE: str(os.getpid())}
    command = [sys.executable, "-P", "-m", "rtx", *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env={**shared, "LOCAL_RANK": str(rank)})
        for rank in range(1, hardware.devices)
    ]
    threading.Thread(target=watch_ranks, args=(ranks, lost), name="children", daemon=True).start()
    return ranks


def watch_ranks(children: list[subprocess.Popen[bytes]], lost: Callable[[str], object]) -> None:
    """Call `lost` with how a process ended that should not have: later, for the main thread may know more by itself."""
    while not (ended := [(child.pid, code) for child in children if (code := child.poll())]):
        if all(child.returncode == 0 for child in children):
            return
        time.sleep(0.5)
    time.sleep(PATIENCE_SECONDS)
    number, code = ended[0]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    lost(f"process {number} of the run {how}")


def strategy(hardware: Hardware) -> Strategy | str:
    if not hardware.distributed:
        return "auto"
    # Centroids, the only buffers that change, are kept equal by after_step.
    return Shared(hardware.world) if hardware.sharded else DDPStrategy(broadcast_buffers=False)


def shard(model: nn.Module, mesh: Any) -> None:
    """Share out the parameters of a model among the processes of `mesh`, in place; buffers stay whole."""
    from torch.distributed.fsdp import fully_shard

    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(
        model, mesh=mesh, reshard_after_forward=False
    )  # the loss reads the output matrix after `forward`
    if mesh.device_type == "cpu":  # gloo adds, and has no mean
        for module in (*blocks, model):
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined, operator]


class Shared(ModelParallelStrategy):
    """hardware=fsdp: parameters, gradients and optimizer state are shared out (`shard`), but not in checkpoints."""

    lightning_restore_optimizer = True  # type: ignore[assignment]  # by `load_optimizer_state_dict`

    def __init__(self, world: int) -> None:
        super().__init__(
            data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=False
        )

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.gathered(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = optimizer.state_dict()
        return {
            **state,
            "state": {number: self.gathered(values) for number, values in state["state"].items()},
        }

    def gathered(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Gather tensors one after the other; only the first process keeps them, in CPU memory."""
        kept = {}
        for name, value in values.items():
            everything = whole(value)
            if self.is_global_zero:
                kept[name] = value if everything is value else everything.cpu()
        return kept

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own, stored = self.lightning_module.state_dict(), checkpoint["state_dict"]
        parts = {
            name: sharded_as(value, own[name]) if name in own else value
            for name, value in stored.items()
        }
        self.lightning_module.load_state_dict(parts, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Let each process take its part of the state that all have read."""
        (optimizer,), (state,) = self.optimizers, checkpoint["optimizer_states"]
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        for number, values in state["state"].items():
            like = parameters[number]
            values |= {
                name: sharded_as(value, like)
                for name, value in values.items()
                if value.shape == like.shape
            }
        optimizer.load_state_dict(state)
