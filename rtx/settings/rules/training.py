"""What fits together in training: devices, batches, schedule, kernels, validation, names."""

from collections.abc import Iterator

from rtx.settings.data_sets import MADE, SETS
from rtx.settings.requirements import gpu_needs
from rtx.settings.rules.rule import at_most, rule
from rtx.settings.schema import SPREAD, Config


def has_distances(config: Config) -> bool:
    """Whether the logits of some heads depend on distances."""
    is_by_position = config.model.positions in ("shaw", "xl")
    return is_by_position or "adaptive_span" in config.model.base.split("+")


@rule("hardware.devices", "hardware.nodes", "hardware.name")
def several_devices(config: Config) -> Iterator[str]:
    """Several devices need a way to share the work."""
    hardware = config.hardware
    devices = (hardware.devices or 1) * hardware.nodes
    if devices > 1 and hardware.name not in SPREAD:
        needed = f"hardware=ddp or fsdp, not hardware={hardware.name}"
        yield f"hardware.devices and nodes above 1 need {needed}"


@rule("hardware.compile", "optimizer.name", "hardware.name")
def whole_weights(config: Config) -> Iterator[str]:
    """What needs whole weights is not for fsdp."""
    if config.hardware.name != "fsdp":
        return
    if config.hardware.compile is True:
        reason = "which gathers weights between blocks; use hardware=ddp"
        yield f"hardware.compile=true is not for hardware=fsdp, {reason}"
    if config.optimizer.name == "adafactor":
        reason = "which has parts of matrices; take ddp, or optimizer=adam"
        yield f"optimizer=adafactor is not for hardware=fsdp, {reason}"


@rule("trainer.batch_size", "trainer.micro_batch_size", "hardware.devices", "hardware.nodes")
def whole_micro_batches(config: Config) -> Iterator[str]:
    """A batch is a whole number of micro-batches on each device."""
    trainer = config.trainer
    devices = (config.hardware.devices or 1) * config.hardware.nodes
    micro = 1 if trainer.micro_batch_size == "auto" else int(trainer.micro_batch_size)
    if trainer.batch_size % (micro * devices):
        needed = f"a multiple of micro-batch {micro} x {devices} device(s)"
        yield f"trainer.batch_size={trainer.batch_size} must be {needed}"


@rule("optimizer.schedule", "optimizer.warmup")
def warmup_of_schedule(config: Config) -> Iterator[str]:
    """The rate of schedule=rsqrt is infinite at step 0."""
    if config.optimizer.schedule == "rsqrt" and not config.optimizer.warmup:
        yield "optimizer.schedule=rsqrt needs optimizer.warmup of at least 1"


@rule("hardware.attention", "model.attention_dropout", "model.positions", "model.base")
def attention_of_pattern(config: Config) -> Iterator[str]:
    """Some kernels have no dropout and no terms of distances."""
    kernels = config.hardware.attention
    is_special = config.model.attention_dropout > 0 or has_distances(config)
    if kernels in ("native", "flex") and is_special:
        special = "model.attention_dropout, positions=shaw or xl, base=adaptive_span"
        yield f"{special} need hardware.attention=auto or torch"
    if kernels == "triton" and "adaptive_span" in config.model.base.split("+"):
        yield "model.base=adaptive_span needs hardware.attention=auto or torch"


@rule("hardware.attention", "hardware.precision", "model.hidden", "model.heads")
def attention_by_triton(config: Config) -> Iterator[str]:
    """Our GPU kernels are for some sizes of heads."""
    if config.hardware.attention != "triton":
        return
    if not 16 <= config.model.hidden // config.model.heads <= 128:
        sizes = "heads of the sizes 16 to 128 (model.hidden / model.heads)"
        yield f"hardware.attention=triton is for {sizes}"
    if config.hardware.precision == "fp64":
        yield "hardware.attention=triton has no hardware.precision=fp64"


@rule("hardware.attention", "hardware.precision", "hardware.name")
def native_attention(config: Config) -> Iterator[str]:
    """The C++ kernels are for fp32 on a CPU."""
    hardware = config.hardware
    is_fp32 = hardware.precision in ("auto", "fp32")
    may_be_cpu = hardware.name in ("auto", "cpu", "ddp")
    if hardware.attention == "native" and not (is_fp32 and may_be_cpu):
        yield "hardware.attention=native is for hardware.precision=fp32 on a CPU (hardware=cpu)"


@rule("hardware.name", "hardware.precision", "hardware.graphs", "hardware.loss")
def options_of_gpu(config: Config) -> Iterator[str]:
    """Options that only a GPU can serve are not for hardware=cpu."""
    if config.hardware.name == "cpu":
        yield from gpu_needs(config.hardware)


@rule("hardware.graphs", "hardware.name", "model.memory")
def graphs_of_one_gpu(config: Config) -> Iterator[str]:
    """The passes of a step are recorded on one GPU, with tensors of fixed shapes."""
    hardware = config.hardware
    if hardware.graphs is True and (hardware.name in SPREAD or config.model.memory):
        yield "hardware.graphs=true is not for hardware=ddp or fsdp, nor for model.memory"


@rule("data.documents", "hardware.compile", "hardware.graphs")
def passes_of_documents(config: Config) -> Iterator[str]:
    """What a pass with documents reads depends on the batch."""
    if not config.data.documents:
        return
    for key, value in (("compile", config.hardware.compile), ("graphs", config.hardware.graphs)):
        if value is True:
            reason = "whose lists differ from batch to batch; take auto or false"
            yield f"hardware.{key}=true is not for data.documents=true, {reason}"


@rule("hardware.loss", "hardware.name", "hardware.precision", "model.embedding", "data.name")
def fused_loss(config: Config) -> Iterator[str]:
    """Liger-Kernel computes a loss over all tokens by one whole output matrix."""
    hardware = config.hardware
    if hardware.loss != "liger":
        return
    if config.model.embedding == "adaptive":
        reason = "whose softmax has bands; take torch"
        yield f"hardware.loss=liger is not for model.embedding=adaptive, {reason}"
    if config.data.name in MADE:
        reason = "where answers alone count; take torch"
        yield f"hardware.loss=liger is not for data={config.data.name}, {reason}"
    if hardware.name == "fsdp" or hardware.precision == "fp64":
        others = "hardware=fsdp or hardware.precision=fp64"
        yield f"hardware.loss=liger is not for {others}; take torch"


@rule("trainer.val_stride", "data.length", "data.name", "model.memory")
def validation_stride(config: Config) -> Iterator[str]:
    """Windows of a validation leave no gap; images and recall tasks are scored whole."""
    data = config.data
    stride = config.trainer.val_stride
    if not config.model.memory:
        yield from at_most(config, "trainer.val_stride", "data.length")
    is_whole = SETS[data.name].image or data.name in MADE
    if is_whole and stride not in (None, data.length):
        reason = "whose sequences are scored whole"
        yield f"trainer.val_stride={stride} has no place in data={data.name}, {reason}"


@rule("name")
def name_of_folder(config: Config) -> Iterator[str]:
    """The name of a run is that of a folder."""
    name = config.name
    is_special = name in ("", ".", "..") or "/" in name
    if is_special or not name.isprintable() or len(name.encode()) > 200:
        yield f"name={name[:40]!r} must be a folder's name, of at most 200 bytes"
