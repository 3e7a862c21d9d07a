"""Where a run computes: the configuration's wishes against the machine, and against whoever started the process."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rtx.compiler import has_compiler
from rtx.config import SPREAD, Config
from rtx.errors import UserError
from rtx.training.heap import keep_freed_memory
from rtx.training.launchers import cores, number, process_rank, started_by


@dataclass(frozen=True)
class Hardware:
    """What `hardware` means on this machine, for this process."""

    accelerator: str
    """cpu or gpu."""
    devices: int
    """Processes on this machine."""
    nodes: int
    """Machines."""
    rank: int
    """This process among all."""
    distributed: bool
    """Whether gradients are averaged over processes (hardware=ddp or fsdp, also with one device)."""
    sharded: bool
    """Whether parameters and optimizer state are shared out among the processes (hardware=fsdp)."""
    launcher: str
    """Who starts the processes: lightning, torchrun or srun."""
    micro_batch_size: int
    """Sequences of a forward pass."""
    accumulate: int
    """Forward passes of an optimizer step on each device."""

    @property
    def world(self) -> int:
        """Processes on all machines."""
        return self.devices * self.nodes

    def describe(self) -> dict[str, Any]:
        """Return the facts for environment.json."""
        return asdict(self)


def resolve_hardware(config: Config) -> Hardware:
    """Decide where to compute.

    Raises:
        UserError: the machine, or the launcher, does not have what the configuration asks for.
    """
    wish = config.hardware
    gpus = torch.cuda.device_count()
    if wish.name == "gpu" and gpus == 0:
        raise UserError("hardware=gpu, but torch finds no GPU on this machine; use hardware=cpu or hardware=auto")
    use_gpu = gpus > 0 and wish.name != "cpu"
    if wish.precision == "tf32" and not use_gpu:
        raise UserError("hardware.precision=tf32 needs a GPU and there is none; a CPU takes fp32, bf16 or fp64")
    launcher, started_world, started_devices = started_by()
    distributed = wish.name in SPREAD
    devices, nodes = 1, wish.nodes
    if distributed:
        devices = wish.devices or (started_devices if launcher != "lightning" else gpus) or 1
        if launcher != "lightning" and wish.nodes == 1:
            nodes = max(1, started_world // devices)
        if use_gpu and devices > gpus:
            raise UserError(f"hardware.devices={devices}, but this machine has {gpus} GPU(s)")
    if launcher != "lightning" and started_world != devices * nodes:
        hint = "set hardware=ddp or hardware=fsdp" if not distributed else "make them agree"
        raise UserError(
            f"{launcher} started {started_world} processes, but hardware={wish.name} asks for {devices} on "
            f"{nodes} machine(s); {hint}"
        )
    if launcher == "lightning" and nodes > 1:
        check_meeting_point(nodes)
    if distributed and "MASTER_PORT" in os.environ:
        number("MASTER_PORT", 1, 65535)
    micro, accumulate = micro_batches(config, devices * nodes)
    rank = process_rank(launcher, devices, nodes)
    accelerator, sharded = "gpu" if use_gpu else "cpu", wish.name == "fsdp"
    return Hardware(accelerator, devices, nodes, rank, distributed, sharded, launcher, micro, accumulate)


def check_meeting_point(nodes: int) -> None:
    """Check that processes which nobody starts on all machines together know where to meet, and who is who.

    Raises:
        UserError: names the variables that are missing.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"hardware.nodes={nodes} without torchrun or srun: the same command on each machine needs MASTER_ADDR and "
            f"MASTER_PORT (of the first one) and NODE_RANK (0 to {nodes - 1}); not set: {', '.join(missing)}"
        )


def micro_batches(config: Config, world: int) -> tuple[int, int]:
    """Return the sequences of a forward pass, and the forward passes of a step on each of `world` devices.

    Raises:
        UserError: the global batch cannot be cut that way.
    """
    batch = config.trainer.batch_size
    micro = config.trainer.micro_batch_size or max(1, batch // world)
    if batch % (micro * world):
        raise UserError(
            f"trainer.batch_size={batch} must be a multiple of trainer.micro_batch_size={micro} times {world} device(s)"
        )
    return micro, batch // (micro * world)


def prepare_torch(config: Config, hardware: Hardware) -> None:
    """Set threads, matrix arithmetic and determinism, before any tensor is made.

    Raises:
        UserError: hardware.compile without a compiler.
    """
    wish = config.hardware
    if threads := wish.threads or share_of_threads(hardware):
        os.environ["OMP_NUM_THREADS"] = str(threads)  # for the processes that Lightning starts; and it sets no other
        torch.set_num_threads(threads)
    if hardware.accelerator == "cpu":
        keep_freed_memory()
    torch.set_float32_matmul_precision("high" if wish.precision == "tf32" else "highest")
    if wish.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if wish.compile and hardware.accelerator == "cpu" and not has_compiler():
        raise UserError(
            "hardware.compile=true needs a C++ compiler (g++ or clang++, or CXX); there is none on the PATH"
        )


def share_of_threads(hardware: Hardware) -> int | None:
    """Return the threads of each process that we start on this machine; None: torch's own choice, or OMP_NUM_THREADS.

    Lightning would take the same number, but only as the fit begins: after the run has recorded its threads.
    """
    if not hardware.distributed or hardware.launcher != "lightning" or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, cores() // hardware.devices)
