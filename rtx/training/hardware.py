"""Where a run computes: what is wished against the machine, its memory, and who started the process. No torch yet."""

import contextlib
import ctypes
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rtx.errors import UserError
from rtx.runs.processes import cores, started_by
from rtx.settings.schema import SPREAD, Config, HardwareConfig

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
NO_GPU = "hardware=gpu, but torch finds no GPU on this machine; use hardware=cpu or hardware=auto"
NO_TF32 = "hardware.precision=tf32 needs a GPU and there is none; a CPU takes fp32, bf16, bf16-true or fp64"
NO_GRAPHS = "hardware.graphs=true needs a GPU and there is none; take hardware.graphs=false"
NO_LIGER = "hardware.loss=liger needs {0}; take hardware.loss=torch"
GPU_WORKERS = 2
"""Processes that prepare batches for a GPU, where hardware.workers is auto."""


@dataclass(frozen=True)
class Hardware:
    """What `hardware` means on this machine, for this process: the facts of environment.json."""

    accelerator: str  # cpu or gpu
    precision: str  # fp32, bf16, bf16-true, tf32 or fp64
    compile: bool  # whether torch.compile is to compile the model
    graphs: bool  # whether the passes are to be recorded as CUDA graphs
    devices: int  # processes on this machine
    nodes: int  # machines
    rank: int  # this process among all
    distributed: (
        bool  # gradients are averaged over processes (hardware=ddp or fsdp, also with one device)
    )
    sharded: (
        bool  # parameters and optimizer state are shared out among the processes (hardware=fsdp)
    )
    launcher: str  # who starts the processes: rtx, torchrun or srun
    micro_batch_size: int  # sequences of a forward pass
    accumulate: int  # forward passes of an optimizer step on each device
    workers: int  # processes that prepare batches for each device

    @property
    def world(self) -> int:
        return self.devices * self.nodes


def resolve_hardware(config: Config) -> Hardware:
    """Decide where to compute; `UserError` where machine or launcher do not have what the configuration asks for."""
    import torch

    wish, gpus, batch = config.hardware, torch.cuda.device_count(), config.trainer.batch_size
    use_gpu = gpus > 0 and wish.name != "cpu"
    if wish.name == "gpu" and not use_gpu:
        raise UserError(NO_GPU)
    if wish.precision == "tf32" and not use_gpu:
        raise UserError(NO_TF32)
    if wish.graphs is True and not use_gpu:
        raise UserError(NO_GRAPHS)
    if wish.loss == "liger":
        refuse_liger(use_gpu)
    launcher, rank, devices, nodes = processes(wish, gpus)
    if use_gpu and devices > gpus:
        raise UserError(f"hardware.devices={devices}, but this machine has {gpus} GPU(s)")
    asked, world = config.trainer.micro_batch_size, devices * nodes
    micro = (
        asked if isinstance(asked, int) else max(1, batch // world)
    )  # auto: all that a device has of the batch
    if batch % (micro * world):
        multiple = f"a multiple of trainer.micro_batch_size={micro} times {world} device(s)"
        raise UserError(f"trainer.batch_size={batch} must be {multiple}")
    return Hardware(
        accelerator="gpu" if use_gpu else "cpu",
        precision=precision_on(wish, use_gpu),
        compile=compiles(config, use_gpu),
        graphs=records(config, use_gpu),
        devices=devices,
        nodes=nodes,
        rank=rank,
        distributed=wish.name in SPREAD,
        sharded=wish.name == "fsdp",
        launcher=launcher,
        micro_batch_size=micro,
        accumulate=batch // (micro * world),
        workers=GPU_WORKERS * use_gpu if wish.workers == "auto" else int(wish.workers),
    )


def compiles(config: Config, gpu: bool) -> bool:
    """Tell whether a run compiles its model: hardware.compile, where auto is yes on a GPU that can."""
    wish = config.hardware
    if wish.compile != "auto":
        return bool(wish.compile)
    return gpu and wish.name != "fsdp" and not config.model.memory and has_gpu_compiler()


def records(config: Config, gpu: bool) -> bool:
    """Tell whether a run records its passes as CUDA graphs: hardware.graphs, where auto is yes on one GPU."""
    if config.hardware.graphs != "auto":
        return bool(config.hardware.graphs)
    return gpu and config.hardware.name not in SPREAD and not config.model.memory


def refuse_liger(gpu: bool) -> None:
    """Raise `UserError` where Liger-Kernel cannot work out the loss."""
    if not gpu:
        raise UserError(NO_LIGER.format("a GPU and there is none"))
    if importlib.util.find_spec("liger_kernel") is None:
        raise UserError(NO_LIGER.format("Liger-Kernel: pip install 'rtx[liger]'"))


def refuse_without_gpu(wish: HardwareConfig) -> None:
    """Raise `UserError` for a GPU that is asked for where torch cannot find one; it loads no torch itself."""
    if wish.name == "gpu" and has_no_driver():
        raise UserError(NO_GPU)
    if wish.precision == "tf32" and has_no_driver():
        raise UserError(NO_TF32)


def has_no_driver() -> bool:
    """Tell whether this machine has no driver of a GPU for sure; whether a driver has a GPU, torch must say."""
    if sys.platform != "linux":
        return False
    if Path("/dev/kfd").exists():  # AMD's
        return False
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return False
    return True


def precision_on(wish: HardwareConfig, gpu: bool) -> str:
    """Return the arithmetic on a device: hardware.precision, where auto is bf16 on a GPU and fp32 on a CPU."""
    return wish.precision if wish.precision != "auto" else ("bf16" if gpu else "fp32")


def processes(wish: HardwareConfig, gpus: int) -> tuple[str, int, int, int]:
    """Return who started this process, its number, the processes on each machine, and the machines."""
    (launcher, rank, world, machines), nodes, devices = started_by(), wish.nodes, 1
    if launcher == "rtx" and wish.nodes > 1:
        raise UserError(
            f"hardware.nodes={wish.nodes}: start the run on all machines by torchrun or srun"
        )
    if wish.name in SPREAD:
        nodes = nodes if nodes > 1 else machines
        devices = wish.devices or ((gpus or 1) if launcher == "rtx" else world // nodes)
    if launcher != "rtx" and world != devices * nodes:
        asks = f"hardware={wish.name} asks for {devices} on {nodes} machine(s)"
        raise UserError(
            f"{launcher} started {world} processes, but {asks}; make them agree, by hardware=ddp or fsdp"
        )
    return launcher, rank, devices, nodes


def prepare_torch(config: Config, hardware: Hardware) -> None:
    """Set threads, matrix arithmetic and determinism before any tensor is made; `UserError` without a compiler."""
    import torch

    wish, threads, model = config.hardware, config.hardware.threads, config.model
    if (
        not threads
        and hardware.distributed
        and hardware.launcher == "rtx"
        and "OMP_NUM_THREADS" not in os.environ
    ):
        # Lightning would take the same number, but only as the fit begins: after the run has recorded its threads.
        threads = max(1, cores() // hardware.devices)
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(
            threads
        )  # for the processes that rtx starts; and Lightning sets no other
        torch.set_num_threads(threads)
    if hardware.accelerator == "cpu":
        own_softmax = (
            model.positions in ("shaw", "xl")
            or model.attention_dropout > 0
            or "adaptive_span" in model.base
        )
        keep_freed_memory(of_any_size=not own_softmax)
    torch.set_float32_matmul_precision("high" if hardware.precision == "tf32" else "highest")
    if wish.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if wish.compile is True and hardware.accelerator == "cpu" and not has_compiler():
        raise UserError(
            "hardware.compile=true needs a C++ compiler (g++, clang++ or CXX); there is none on the PATH"
        )
    if wish.compile is True and hardware.accelerator == "gpu" and not has_gpu_compiler():
        raise UserError(
            "hardware.compile=true needs Triton and a C compiler (gcc, clang or CC) for a GPU"
        )


def has_gpu_compiler() -> bool:
    """Tell whether Triton is here, and the C compiler by which it builds what starts its kernels."""
    from torch.utils._triton import (
        has_triton,
    )  # no public function tells whether torch can use Triton

    from rtx.attention.engine.packed_attention import HAS_COMPILER

    return has_triton() and HAS_COMPILER


def has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++"))


def keep_freed_memory(of_any_size: bool = True) -> None:
    """Tell glibc to keep what is freed: to fault it in and zero it anew is a tenth of a step's time on a CPU.

    Our own softmax has large blocks of many sizes: kept, they would leave gaps that no other fits. There, not
    `of_any_size`, those above 33 MiB are given back (32 MiB before glibc 2.35).
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library is left as it is
        library = ctypes.CDLL(None)
        library.mallopt(-4, 0 if of_any_size else 65536)  # M_MMAP_MAX, and its default
        if not of_any_size and not library.mallopt(-3, 33 << 20):  # M_MMAP_THRESHOLD
            library.mallopt(-3, 32 << 20)
        library.mallopt(-1, -1)  # M_TRIM_THRESHOLD


def device_memory(config: Config, processes: int = 0) -> int | None:
    """Return the bytes of memory that each process of a run may fill here; None: it is for a GPU that is not there."""
    import torch

    if config.hardware.name != "cpu" and torch.cuda.device_count():
        return torch.cuda.get_device_properties(0).total_memory
    if config.hardware.name == "gpu":
        return None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no container, or none with a limit: "max"
        memory = min(memory, int(CONTAINER_LIMIT.read_text()))
    return memory // (processes or config.hardware.devices or 1)
