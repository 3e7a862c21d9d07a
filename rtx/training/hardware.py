"""Where a run computes: the configuration's wishes against the machine, and against whoever started the process."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import shutil
from dataclasses import dataclass

import torch

from rtx.config import SPREAD, Config, HardwareConfig, precision_on
from rtx.errors import UserError
from rtx.training.launchers import cores, number, process_rank, started_by

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""glibc's numbers for mallopt."""


@dataclass(frozen=True)
class Hardware:
    """What `hardware` means on this machine, for this process: the facts of environment.json."""

    accelerator: str  # cpu or gpu
    precision: str  # fp32, bf16, tf32 or fp64
    devices: int  # processes on this machine
    nodes: int  # machines
    rank: int  # this process among all
    distributed: bool  # gradients are averaged over processes (hardware=ddp or fsdp, also with one device)
    sharded: bool  # parameters and optimizer state are shared out among the processes (hardware=fsdp)
    launcher: str  # who starts the processes: rtx, torchrun or srun
    micro_batch_size: int  # sequences of a forward pass
    accumulate: int  # forward passes of an optimizer step on each device

    @property
    def world(self) -> int:
        return self.devices * self.nodes


def resolve_hardware(config: Config) -> Hardware:
    """Decide where to compute; `UserError` where machine or launcher do not have what the configuration asks for."""
    wish, gpus = config.hardware, torch.cuda.device_count()
    if wish.name == "gpu" and gpus == 0:
        raise UserError("hardware=gpu, but torch finds no GPU on this machine; use hardware=cpu or hardware=auto")
    use_gpu, distributed = gpus > 0 and wish.name != "cpu", wish.name in SPREAD
    if wish.precision == "tf32" and not use_gpu:
        raise UserError("hardware.precision=tf32 needs a GPU and there is none; a CPU takes fp32, bf16 or fp64")
    devices, nodes = processes(wish, gpus)
    if distributed and use_gpu and devices > gpus:
        raise UserError(f"hardware.devices={devices}, but this machine has {gpus} GPU(s)")
    if distributed and "MASTER_PORT" in os.environ:
        number("MASTER_PORT", 1, 65535)
    micro, accumulate = micro_batches(config, devices * nodes)
    return Hardware(
        accelerator="gpu" if use_gpu else "cpu",
        precision=precision_on(wish, use_gpu),
        devices=devices,
        nodes=nodes,
        rank=process_rank(devices),
        distributed=distributed,
        sharded=wish.name == "fsdp",
        launcher=started_by()[0],
        micro_batch_size=micro,
        accumulate=accumulate,
    )


def processes(wish: HardwareConfig, gpus: int) -> tuple[int, int]:
    """Return the processes on each machine, and the machines: as a launcher has started them, else as configured."""
    launcher, world, here = started_by()
    distributed, devices, nodes = wish.name in SPREAD, 1, wish.nodes
    if launcher == "rtx":
        if nodes > 1:
            raise UserError(f"hardware.nodes={nodes}: start the run on all machines by torchrun or srun")
        return (wish.devices or gpus or 1) if distributed else 1, 1
    if distributed:
        devices = wish.devices or here
        nodes = nodes if nodes > 1 else max(1, world // devices)
    if world != devices * nodes:
        hint = "make them agree" if distributed else "set hardware=ddp or hardware=fsdp"
        raise UserError(
            f"{launcher} started {world} processes, but hardware={wish.name} asks for {devices} on {nodes} machine(s); "
            f"{hint}"
        )
    return devices, nodes


def micro_batches(config: Config, world: int) -> tuple[int, int]:
    """Return the sequences of a forward pass, and the forward passes of a step on each of `world` devices.

    Where trainer.micro_batch_size is still auto, it is all that a device has of the batch.
    """
    batch, asked = config.trainer.batch_size, config.trainer.micro_batch_size
    micro = asked if isinstance(asked, int) else max(1, batch // world)
    if batch % (micro * world):
        raise UserError(
            f"trainer.batch_size={batch} must be a multiple of trainer.micro_batch_size={micro} times {world} device(s)"
        )
    return micro, batch // (micro * world)


def with_micro_batches(hardware: Hardware, config: Config) -> Hardware:
    micro, accumulate = micro_batches(config, hardware.world)
    return dataclasses.replace(hardware, micro_batch_size=micro, accumulate=accumulate)


def prepare_torch(config: Config, hardware: Hardware) -> None:
    """Set threads, matrix arithmetic and determinism before any tensor is made; `UserError` without a compiler."""
    wish, threads = config.hardware, config.hardware.threads
    if not threads and hardware.distributed and hardware.launcher == "rtx" and "OMP_NUM_THREADS" not in os.environ:
        # Lightning would take the same number, but only as the fit begins: after the run has recorded its threads.
        threads = max(1, cores() // hardware.devices)
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # for the processes that rtx starts; and Lightning sets no other
        torch.set_num_threads(threads)
    if hardware.accelerator == "cpu":
        keep_freed_memory()
    torch.set_float32_matmul_precision("high" if hardware.precision == "tf32" else "highest")
    if wish.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if wish.compile and hardware.accelerator == "cpu" and not has_compiler():
        raise UserError(
            "hardware.compile=true needs a C++ compiler (g++ or clang++, or CXX); there is none on the PATH"
        )


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed instead of giving it back, to be faulted in and zeroed anew in every step.

    That is about a tenth of a step's time on a CPU. Another C library is left as it is.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(MMAP_MAX, 0)
        library.mallopt(TRIM_THRESHOLD, -1)


def has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++"))
