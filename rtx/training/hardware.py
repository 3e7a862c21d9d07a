"""The options of the group `hardware` resolved for this machine, and the set-up of torch.

torch is imported inside functions, so that readers of `Hardware` alone do not wait for it.
"""

import contextlib
import ctypes
import importlib.util
import os
import shutil
from dataclasses import dataclass

from rtx.errors import UserError
from rtx.machine import cores, memory_bytes
from rtx.processes import Launch, launch
from rtx.settings.requirements import precision_on, refuse_without_gpu
from rtx.settings.schema import SPREAD, Config, HardwareConfig, ModelConfig

# torch then asks the driver whether there is a GPU, and does not initialise CUDA, which processes
# that are forked later could not use. Lightning sets the variable, too.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

NO_LIGER = (
    "hardware.loss=liger needs Liger-Kernel: pip install 'rtx[liger]'; take hardware.loss=torch"
)
GPU_WORKERS = 2
"""Processes that prepare batches for a GPU, where hardware.workers is auto."""
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
"""Options of glibc's mallopt, from its malloc.h."""


@dataclass(frozen=True)
class Hardware:
    """The group `hardware` as resolved for this process; environment.json records it."""

    accelerator: str
    """cpu or gpu."""
    precision: str
    """fp32, bf16, bf16-true, tf32 or fp64."""
    compile: bool
    """Whether torch.compile is to compile the model."""
    graphs: bool
    """Whether the passes are to be recorded as CUDA graphs."""
    devices: int
    """Processes on this machine."""
    nodes: int
    """Machines."""
    rank: int
    """The number of this process among all processes."""
    distributed: bool
    """Whether gradients are averaged over processes: hardware=ddp or fsdp, also on one device."""
    sharded: bool
    """Whether the processes share out parameters and optimizer state (hardware=fsdp)."""
    launcher: str
    """What starts the processes: rtx, torchrun or srun."""
    micro_batch_size: int
    """Sequences of a forward pass."""
    accumulate: int
    """Forward passes of an optimizer step on each device."""
    workers: int
    """Processes that prepare batches for each device."""

    @property
    def world(self) -> int:
        return self.devices * self.nodes

    @property
    def on_gpu(self) -> bool:
        return self.accelerator == "gpu"

    @property
    def torch_device(self) -> str:
        """The device's name in torch."""
        return "cuda" if self.on_gpu else "cpu"


def resolve_hardware(config: Config) -> Hardware:
    """Return the hardware of a run on this machine, without `auto`.

    Raises `UserError` where the machine or the launcher does not fit the configuration.
    """
    import torch

    hardware = config.hardware
    gpus = torch.cuda.device_count()
    use_gpu = gpus > 0 and hardware.name != "cpu"
    if not use_gpu:
        refuse_without_gpu(hardware)
    if hardware.loss == "liger" and importlib.util.find_spec("liger_kernel") is None:
        raise UserError(NO_LIGER)
    started = launch()
    nodes = machines(hardware, started)
    devices = devices_of_each(hardware, started, nodes, gpus)
    if use_gpu and devices > gpus:
        raise UserError(f"hardware.devices={devices}, but this machine has {gpus} GPU(s)")
    micro_batch = micro_batch_size(config, devices * nodes)
    return Hardware(
        accelerator="gpu" if use_gpu else "cpu",
        precision=precision_on(hardware, use_gpu),
        compile=compiles(config, use_gpu),
        graphs=records(config, use_gpu),
        devices=devices,
        nodes=nodes,
        rank=started.rank,
        distributed=hardware.name in SPREAD,
        sharded=hardware.name == "fsdp",
        launcher=started.launcher,
        micro_batch_size=micro_batch,
        accumulate=config.trainer.batch_size // (micro_batch * devices * nodes),
        workers=loader_workers(hardware, use_gpu),
    )


def machines(hardware: HardwareConfig, started: Launch) -> int:
    """Return the number of machines; `UserError` for several without a launcher."""
    if hardware.nodes > 1 and started.launcher == "rtx":
        starts = "start the run on all machines by torchrun or srun"
        raise UserError(f"hardware.nodes={hardware.nodes}: {starts}")
    if hardware.name in SPREAD and hardware.nodes == 1:
        return started.nodes
    return hardware.nodes


def devices_of_each(hardware: HardwareConfig, started: Launch, nodes: int, gpus: int) -> int:
    """Return the devices on each machine; `UserError` where the launcher started another number."""
    if hardware.name not in SPREAD:
        devices = 1
    elif hardware.devices:
        devices = hardware.devices
    elif started.launcher == "rtx":
        devices = max(1, gpus)
    else:
        devices = started.world // nodes
    if started.launcher != "rtx" and started.world != devices * nodes:
        asks = f"hardware={hardware.name} asks for {devices} on {nodes} machine(s)"
        agree = "make them agree, by hardware=ddp or fsdp"
        raise UserError(
            f"{started.launcher} started {started.world} processes, but {asks}; {agree}"
        )
    return devices


def micro_batch_size(config: Config, world: int) -> int:
    """Return the sequences of a forward pass; for `auto` a device's whole share of the batch."""
    batch = config.trainer.batch_size
    chosen = config.trainer.micro_batch_size
    size = chosen if isinstance(chosen, int) else max(1, batch // world)
    if batch % (size * world):
        multiple = f"a multiple of trainer.micro_batch_size={size} times {world} device(s)"
        raise UserError(f"trainer.batch_size={batch} must be {multiple}")
    return size


def loader_workers(hardware: HardwareConfig, gpu: bool) -> int:
    """Return how many processes prepare batches for a device."""
    if hardware.workers != "auto":
        return int(hardware.workers)
    return GPU_WORKERS if gpu else 0


def compiles(config: Config, gpu: bool) -> bool:
    """Return hardware.compile, where auto is true on a GPU that has a compiler."""
    hardware = config.hardware
    if hardware.compile != "auto":
        return bool(hardware.compile)
    if has_lists_of_batch(config):
        return False
    return gpu and hardware.name != "fsdp" and has_gpu_compiler()


def records(config: Config, gpu: bool) -> bool:
    """Return hardware.graphs, where auto is true on one GPU."""
    if config.hardware.graphs != "auto":
        return bool(config.hardware.graphs)
    return gpu and config.hardware.name not in SPREAD and not has_lists_of_batch(config)


def has_lists_of_batch(config: Config) -> bool:
    """Return whether the shapes of a pass depend on its batch: on its memory or its documents."""
    return config.model.memory > 0 or config.data.documents


def prepare_torch(config: Config, hardware: Hardware) -> None:
    """Set threads, matrix arithmetic and determinism; to be called before any tensor is made.

    Raises `UserError` where there is no compiler for hardware.compile=true, or no kernel for
    hardware.attention=native.
    """
    import torch

    set_threads(config.hardware, hardware)
    if not hardware.on_gpu:
        keep_freed_memory(of_any_size=not computes_softmax_itself(config.model))
    torch.set_float32_matmul_precision("high" if hardware.precision == "tf32" else "highest")
    if config.hardware.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if config.hardware.compile is True:
        refuse_without_compiler(hardware)
    if config.hardware.attention == "native" and not hardware.on_gpu:
        refuse_without_kernel()


def set_threads(config: HardwareConfig, hardware: Hardware) -> None:
    """Set the CPU threads of this process, and of those that it starts."""
    import torch

    threads = config.threads
    shares_cores = hardware.distributed and hardware.launcher == "rtx"
    if not threads and shares_cores and "OMP_NUM_THREADS" not in os.environ:
        # Lightning would set the same number later, after environment.json has been written.
        threads = max(1, cores() // hardware.devices)
    if threads:
        # Processes that rtx starts inherit it, and Lightning then sets no other number.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)


def refuse_without_compiler(hardware: Hardware) -> None:
    """Raise `UserError` where there is no compiler for the device."""
    if hardware.on_gpu and not has_gpu_compiler():
        needs = "Triton and a C compiler (gcc, clang or CC) for a GPU"
        raise UserError(f"hardware.compile=true needs {needs}")
    if not hardware.on_gpu and not has_compiler():
        needs = "a C++ compiler (g++, clang++ or CXX); there is none on the PATH"
        raise UserError(f"hardware.compile=true needs {needs}")


def refuse_without_kernel() -> None:
    """Raise `UserError` where the attention kernel for CPUs can neither be loaded nor compiled."""
    from rtx.attention.engine import compiler

    reason = compiler.problem()
    if reason:
        raise UserError(f"hardware.attention=native: {reason}; take hardware.attention=auto")


def has_gpu_compiler() -> bool:
    """Return whether Triton is installed, and the C compiler that it calls."""
    # No public function says whether torch can use Triton.
    from torch.utils._triton import has_triton

    from rtx.attention.engine.packed_attention import HAS_COMPILER

    return has_triton() and HAS_COMPILER


def has_compiler() -> bool:
    """Return whether there is a C++ compiler."""
    names = (os.environ.get("CXX") or "g++", "g++", "clang++")
    return any(shutil.which(name) for name in names)


def computes_softmax_itself(model: ModelConfig) -> bool:
    """Return whether attention on a CPU uses our own softmax instead of torch's."""
    by_distance = model.positions in ("shaw", "xl") or "adaptive_span" in model.base
    return by_distance or model.attention_dropout > 0


def keep_freed_memory(of_any_size: bool = True) -> None:
    """Make glibc keep freed memory: mapping it again takes a tenth of a step's time on a CPU.

    Args:
        of_any_size: keep blocks of any size; False: return blocks above 33 MiB to the system (with
            glibc before 2.35, above 32 MiB). That is for our own softmax: it frees large blocks of
            many sizes, which would leave gaps in the heap that fit no other block.
    """
    # Another C library is left as it is.
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        if of_any_size:
            library.mallopt(M_MMAP_MAX, 0)
        else:
            # glibc's default.
            library.mallopt(M_MMAP_MAX, 65536)
            if not library.mallopt(M_MMAP_THRESHOLD, 33 << 20):
                library.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(M_TRIM_THRESHOLD, -1)


def device_memory(config: Config, processes: int = 0) -> int | None:
    """Return the bytes of memory that each process of a run may fill on this machine.

    None: the run is for a GPU, and there is none.
    """
    import torch

    if config.hardware.name != "cpu" and torch.cuda.device_count():
        return torch.cuda.get_device_properties(0).total_memory
    if config.hardware.name == "gpu":
        return None
    return memory_bytes() // (processes or config.hardware.devices or 1)
