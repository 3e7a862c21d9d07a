"""Where a run computes: the configuration's wishes against the machine, and against whoever started the process.

torch, whose import takes seconds, is imported where it is used: who started a process is asked for before.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from dataclasses import dataclass

from rtx.config import SPREAD, Config, HardwareConfig, precision_on
from rtx.errors import UserError
from rtx.training.signals import started_by_another

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
    import torch

    wish, gpus = config.hardware, torch.cuda.device_count()
    use_gpu, distributed = gpus > 0 and wish.name != "cpu", wish.name in SPREAD
    if wish.name == "gpu" and not use_gpu:
        raise UserError("hardware=gpu, but torch finds no GPU on this machine; use hardware=cpu or hardware=auto")
    if wish.precision == "tf32" and not use_gpu:
        raise UserError("hardware.precision=tf32 needs a GPU and there is none; a CPU takes fp32, bf16 or fp64")
    devices, nodes = processes(wish, gpus)
    if distributed and use_gpu and devices > gpus:
        raise UserError(f"hardware.devices={devices}, but this machine has {gpus} GPU(s)")
    micro, accumulate = micro_batches(config, devices * nodes)
    return Hardware(
        accelerator="gpu" if use_gpu else "cpu",
        precision=precision_on(wish, use_gpu),
        devices=devices,
        nodes=nodes,
        rank=process_rank(),
        distributed=distributed,
        sharded=wish.name == "fsdp",
        launcher=started_by()[0],
        micro_batch_size=micro,
        accumulate=accumulate,
    )


def processes(wish: HardwareConfig, gpus: int) -> tuple[int, int]:
    """Return the processes on each machine, and the machines: as a launcher has started them, else as configured."""
    (launcher, _, world, nodes), distributed = started_by(), wish.name in SPREAD
    if launcher == "rtx":
        if wish.nodes > 1:
            raise UserError(f"hardware.nodes={wish.nodes}: start the run on all machines by torchrun or srun")
        return (wish.devices or gpus or 1) if distributed else 1, 1
    nodes = wish.nodes if wish.nodes > 1 else nodes if distributed else 1
    devices = (wish.devices or world // nodes) if distributed else 1
    if world != devices * nodes:
        raise UserError(
            f"{launcher} started {world} processes, but hardware={wish.name} asks for {devices} on {nodes} machine(s); "
            f"{'make them agree' if distributed else 'set hardware=ddp or hardware=fsdp'}"
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


def started_by() -> tuple[str, int, int, int]:
    """Return who started this process (torchrun, srun, else rtx), its number, of how many, and on how many machines.

    srun counts where it runs several tasks; a single task, or an interactive shell inside an allocation, is our own.
    """
    known = os.environ
    if "TORCHELASTIC_RUN_ID" in known:
        world = int(known["WORLD_SIZE"])
        return "torchrun", int(known["RANK"]), world, world // int(known["LOCAL_WORLD_SIZE"])
    if {"SLURM_STEP_ID", "SLURM_PROCID"} <= known.keys() and int(known.get("SLURM_NTASKS", 1)) > 1:
        return "srun", int(known["SLURM_PROCID"]), int(known["SLURM_NTASKS"]), int(known.get("SLURM_NNODES", 1))
    return "rtx", int(known["LOCAL_RANK"]) if started_by_another() else 0, 1, 1


def process_rank() -> int:
    return started_by()[1]


def cores() -> int:
    """Return the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare_torch(config: Config, hardware: Hardware) -> None:
    """Set threads, matrix arithmetic and determinism before any tensor is made; `UserError` without a compiler."""
    import torch

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
    if wish.compile and hardware.accelerator == "cpu" and not has_compiler():
        raise UserError("hardware.compile=true needs a C++ compiler (g++, clang++ or CXX); there is none on the PATH")


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed: to fault it in and zero it anew is a tenth of a step's time on a CPU."""
    with contextlib.suppress(AttributeError, OSError):  # another C library is left as it is
        library = ctypes.CDLL(None)
        library.mallopt(MMAP_MAX, 0)
        library.mallopt(TRIM_THRESHOLD, -1)


def has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++"))
