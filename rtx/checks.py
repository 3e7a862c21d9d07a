"""Whether the values of a configuration fit together; every check says what to change."""

from __future__ import annotations

import dataclasses
import math

from rtx.config import CLUSTERED, SPREAD, Config, DataConfig, axis_sizes, base_patterns, clusters, hash_buckets
from rtx.errors import UserError
from rtx.sets import HELD_OUT, IMAGE_SETS, TWO_WAYS, USUAL_VOCABULARY, image_side


def resolve(config: Config) -> Config:
    """Return a checked copy with routing.clusters frozen, and model.hash_buckets where base=lsh reads it.

    Raises:
        UserError: two values do not fit together; the message has a line for each.
    """
    problems = fit_problems(config)
    if problems:
        raise UserError("\n".join(problems))
    routing = dataclasses.replace(config.routing, clusters=clusters(config))
    buckets = hash_buckets(config) if "lsh" in base_patterns(config.model) else config.model.hash_buckets
    model = dataclasses.replace(config.model, hash_buckets=buckets)
    return dataclasses.replace(config, routing=routing, model=model)


def check_data(config: Config) -> DataConfig:
    """Return the data of a configuration, checked without regard to the model.

    Raises:
        UserError: as `resolve`.
    """
    fits = [*source_checks(config), *image_checks(config), *recall_checks(config)]
    problems = [problem for fit, problem in fits if not fit]
    if problems:
        raise UserError("\n".join(problems))
    return config.data


def fit_problems(config: Config) -> list[str]:
    """Return a line for each pair of values that do not fit together."""
    checks = [
        *model_checks(config),
        *sparse_checks(config),
        *routing_checks(config),
        *training_checks(config),
        *source_checks(config),
        *image_checks(config),
        *recall_checks(config),
    ]
    return [problem for fits, problem in checks if not fits]


def model_checks(config: Config) -> list[tuple[bool, str]]:
    """The model's sizes against each other and against the sequence: whether each holds, and what to say if not."""
    data, model, routing = config.data, config.model, config.routing
    patterns = base_patterns(model)
    plain = {model.heads} if routing.layers < model.layers else set()
    plain |= {model.heads - routing.heads} if routing.layers else set()
    return [
        (
            model.hidden % model.heads == 0,
            f"model.hidden={model.hidden} must be a multiple of model.heads={model.heads}",
        ),
        (
            model.positions != "rotary" or (model.hidden // model.heads) % 2 == 0,
            f"model.positions=rotary needs an even head size, not hidden/heads = {model.hidden // model.heads}",
        ),
        (
            all(heads % len(patterns) == 0 for heads in plain),
            f"model.base={model.base} needs a multiple of {len(patterns)} heads that do not route in every layer, "
            f"not {' and '.join(map(str, sorted(plain)))}",
        ),
        (
            (model.hash_buckets or 2) % 2 == 0,
            f"model.hash_buckets={model.hash_buckets} must be even: a rotation and its opposite give two buckets",
        ),
        (
            set(patterns) <= {"full", "strided", "fixed"} or model.window <= data.length,
            f"model.window={model.window} must be at most data.length={data.length}",
        ),
    ]


def sparse_checks(config: Config) -> list[tuple[bool, str]]:
    """The Sparse Transformer's strides, blocks and axes against the sequence, as `model_checks`."""
    data, model = config.data, config.model
    patterns = base_patterns(model)
    return [
        (
            not {"strided", "fixed"} & set(patterns) or model.stride <= data.length,
            f"model.stride={model.stride} must be at most data.length={data.length}",
        ),
        (
            "fixed" not in patterns or model.summary <= model.stride,
            f"model.summary={model.summary} must be at most model.stride={model.stride}, the block of base=fixed",
        ),
        (
            model.positions != "axial" or math.prod(axis_sizes(model)) == data.length,
            f"model.positions=axial needs model.axes with the product data.length={data.length}, such as 32x32x3 for "
            f"3072, not model.axes={model.axes}",
        ),
    ]


def routing_checks(config: Config) -> list[tuple[bool, str]]:
    """The routing heads against the model and the sequence, as `model_checks`."""
    data, model, routing = config.data, config.model, config.routing
    routes = routing.heads > 0 and routing.layers > 0
    return [
        (routing.heads <= model.heads, f"routing.heads={routing.heads} must be at most model.heads={model.heads}"),
        (
            routing.layers <= model.layers,
            f"routing.layers={routing.layers} must be at most model.layers={model.layers}",
        ),
        (
            not routes or routing.window <= data.length,
            f"routing.window={routing.window} must be at most data.length={data.length}",
        ),
        (
            not routes or clusters(config) <= data.length,
            f"routing.clusters={clusters(config)} must be at most data.length={data.length}",
        ),
        (
            not routes or routing.keys != "projected" or routing.selection in ("causal", "topk", "nearest"),
            f"routing.keys=projected needs routing.selection=causal, topk or nearest, not {routing.selection}",
        ),
        (
            not routes or routing.keys == "separate" or routing.selection in CLUSTERED,
            f"routing.selection={routing.selection} needs routing.keys=separate, not routing.keys={routing.keys}; "
            f"routing={routing.selection} sets both",
        ),
        (
            not routes or routing.keys != "shared" or (routing.key_shift == 0 and routing.key_conv == 1),
            f"routing.key_shift={routing.key_shift} and routing.key_conv={routing.key_conv} are for keys of their own "
            "(routing.keys=separate or projected), not for routing.keys=shared",
        ),
        (
            not routes or not routing.selection.startswith("blocks") or routing.block <= routing.window,
            f"routing.block={routing.block} must be at most routing.window={routing.window}",
        ),
        (
            not routes or not routing.compressed or routing.selection == "blocks",
            f"routing.compressed=true is for routing.selection=blocks, not for {routing.selection}",
        ),
    ]


def training_checks(config: Config) -> list[tuple[bool, str]]:
    """Devices, batches and schedule against each other, as `model_checks`."""
    hardware, trainer, optimizer = config.hardware, config.trainer, config.optimizer
    devices = (hardware.devices or 1) * hardware.nodes
    micro = trainer.micro_batch_size or max(1, trainer.batch_size // devices)
    return [
        (
            hardware.precision != "tf32" or hardware.name != "cpu",
            "hardware.precision=tf32 needs a GPU; a CPU takes fp32, bf16 or fp64",
        ),
        *attention_checks(config),
        (
            hardware.nodes == 1 or hardware.name in SPREAD,
            f"hardware.nodes={hardware.nodes} needs hardware=ddp or fsdp, not hardware={hardware.name}",
        ),
        (
            (hardware.devices or 1) == 1 or hardware.name in SPREAD,
            f"hardware.devices={hardware.devices} needs hardware=ddp or fsdp, not hardware={hardware.name}",
        ),
        (
            not hardware.compile or hardware.name != "fsdp",
            "hardware.compile=true is not for hardware=fsdp, which gathers weights between blocks; use hardware=ddp",
        ),
        (
            trainer.batch_size % (micro * devices) == 0,
            f"trainer.batch_size={trainer.batch_size} must be a multiple of trainer.micro_batch_size={micro} "
            f"times {devices} device(s)",
        ),
        (
            optimizer.schedule != "rsqrt" or optimizer.warmup > 0,
            "optimizer.schedule=rsqrt needs optimizer.warmup of at least 1",
        ),
    ]


def attention_checks(config: Config) -> list[tuple[bool, str]]:
    """What an attention asked for by name cannot do, as `model_checks`."""
    hardware, model = config.hardware, config.model
    wish = hardware.attention
    plain = model.attention_dropout == 0 and model.positions != "shaw" and "adaptive_span" not in base_patterns(model)
    return [
        (
            wish not in ("native", "flex") or plain,
            f"hardware.attention={wish} has no model.attention_dropout, model.positions=shaw or base=adaptive_span; "
            "hardware.attention=auto takes torch for them",
        ),
        (
            wish != "native" or (hardware.precision == "fp32" and hardware.name in ("auto", "cpu", "ddp")),
            "hardware.attention=native is for hardware.precision=fp32 on a CPU (hardware=cpu)",
        ),
        (
            wish != "flex" or hardware.name != "cpu",
            "hardware.attention=flex is for a GPU: on a CPU FlexAttention has no backward pass",
        ),
    ]


def source_checks(config: Config) -> list[tuple[bool, str]]:
    """Files and names, and the windows of an evaluation, as `model_checks`."""
    data, name = config.data, config.name
    return [
        (
            config.trainer.val_stride is None or config.trainer.val_stride <= data.length,
            f"trainer.val_stride={config.trainer.val_stride} must be at most data.length={data.length}",
        ),
        (data.name != "text" or data.path is not None, "data=text needs data.path=<file, folder or glob>"),
        (
            data.name != "stdlib" or data.path is None,
            f"data.path={data.path} is not read by data=stdlib; use data=text data.path={data.path}",
        ),
        (
            name not in ("", ".", "..") and "/" not in name and name.isprintable() and len(name.encode()) <= 200,
            f"name={name[:40]!r} must be a folder's name, of at most 200 bytes",
        ),
    ]


def image_checks(config: Config) -> list[tuple[bool, str]]:
    """What image sets ask of sequences, windows and units, and what is theirs alone, as `model_checks`."""
    data, stride = config.data, config.trainer.val_stride
    checks = [
        (
            data.newlines == "keep" or data.name == "enwik8",
            f"data.newlines={data.newlines} is for data=enwik8 alone, not for data={data.name}",
        ),
        (
            data.tokenizer == "bytes" or data.name not in (*IMAGE_SETS, "recall"),
            f"data.tokenizer={data.tokenizer} is for text; data={data.name} takes data.tokenizer=bytes",
        ),
        (
            data.size is None or data.name in IMAGE_SETS,
            f"data.size={data.size} is for images ({', '.join(IMAGE_SETS)}), not for data={data.name}",
        ),
        *idle_checks(data),
    ]
    if data.name not in IMAGE_SETS:
        return checks
    side = image_side(data)
    return [
        *checks,
        (data.name != "images" or data.path is not None, "data=images needs data.path=<folder with images>"),
        (
            stride in (None, data.length),
            f"trainer.val_stride={stride} has no place in data={data.name}, whose images are scored whole",
        ),
        (
            side is None or data.length == 3 * side**2,
            f"data.length={data.length} must be {3 * (side or 0) ** 2} = {side} x {side} x 3: an image is one sequence",
        ),
        (
            side is not None or data.length % 3 == 0,
            f"data.length={data.length} must be height x width x 3: an image is one sequence",
        ),
    ]


def idle_checks(data: DataConfig) -> list[tuple[bool, str]]:
    """Settings that a set does not read, as `model_checks`: nobody is to think that they did something."""
    usual = DataConfig()
    subwords = data.tokenizer == "sentencepiece"
    vocabularies = (usual.vocabulary, USUAL_VOCABULARY.get(data.name, usual.vocabulary))
    return [
        (
            data.fetch == usual.fetch or data.name in (*TWO_WAYS, "enwik8"),
            f"data.fetch={data.fetch} is for {' and '.join(TWO_WAYS)}, not for data={data.name}",
        ),
        (
            data.held_out == usual.held_out or data.name in HELD_OUT,
            f"data.held_out={data.held_out} is for {' and '.join(HELD_OUT)}, not for data={data.name}",
        ),
        (
            subwords or data.vocabulary in vocabularies,
            f"data.vocabulary={data.vocabulary} is for data.tokenizer=sentencepiece, not for {data.tokenizer}",
        ),
        (
            subwords or data.tokenizer_sample == usual.tokenizer_sample,
            f"data.tokenizer_sample={data.tokenizer_sample} is for data.tokenizer=sentencepiece, not for "
            f"{data.tokenizer}",
        ),
    ]


def recall_checks(config: Config) -> list[tuple[bool, str]]:
    """What data=recall makes its sequences by, as `model_checks`."""
    data = config.data
    if data.name != "recall":
        return []
    return [
        (
            config.trainer.val_stride in (None, data.length),
            f"trainer.val_stride={config.trainer.val_stride} has no place in data=recall: sequences are scored whole",
        ),
        (
            data.pairs <= data.keys,
            f"data.pairs={data.pairs} must be at most data.keys={data.keys}: the keys of a sequence differ",
        ),
        (
            4 * data.pairs <= data.length,
            f"data.pairs={data.pairs} pairs and their questions take {4 * data.pairs} units, more than "
            f"data.length={data.length}",
        ),
        (
            data.path is None,
            f"data.path={data.path} is not read by data=recall, which is made on the fly",
        ),
    ]
