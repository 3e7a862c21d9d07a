"""Whether the values of a configuration fit together; every line says what to change."""

import importlib.util
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict as to_dict
from dataclasses import replace
from operator import attrgetter
from typing import Any

from rtx.data.sets import HELD_OUT, IMAGE_SETS, MADE, NAMES, SETS, TWO_WAYS, image_side
from rtx.errors import UserError, nearest, refuse, shorten, written
from rtx.settings.schema import (
    BASES,
    CENTROIDS,
    CHOSEN,
    CLUSTERED,
    SELECTIONS,
    SPARSE,
    SPREAD,
    Config,
    all_fields,
    clusters,
    flat,
    hash_buckets,
    reads_self,
    sizes_of,
)

TEXTS = tuple(name for name in NAMES if name not in (*IMAGE_SETS, *MADE))
READ_WITH = (
    ("data.name", MADE, "data.pairs data.keys data.values data.fillers data.sequences"),
    ("data.name", MADE[1:], "data.distance"),
    ("data.name", ("mqar", "copy"), "data.gaps"),
    ("data.name", tuple(name for name in NAMES if name not in ("stdlib", *MADE)), "data.path"),
    ("data.name", ("hub",), "data.column data.subset data.revision"),
    ("data.name", TEXTS, "data.tokenizer"),
    ("data.name", ("enwik8",), "data.newlines"),
    ("data.name", tuple(IMAGE_SETS), "data.size"),
    ("data.name", (*TWO_WAYS, "enwik8"), "data.fetch"),
    ("data.name", HELD_OUT, "data.held_out"),
    ("data.tokenizer", ("sentencepiece",), "data.vocabulary data.tokenizer_sample"),
    ("routing.selection", (*CLUSTERED, "probed"), "routing.clusters"),
    ("routing.selection", CLUSTERED, "routing.merge"),
    ("routing.selection", CENTROIDS, "routing.decay"),
    ("routing.selection", CLUSTERED[:3], "routing.update routing.init routing.commitment"),
    ("routing.selection", CHOSEN, "routing.qk_norm"),
    ("routing.selection", ("probed",), "routing.candidates"),
    ("routing.selection", ("causal",), "routing.threshold_rate"),
    ("routing.selection", ("blocks", "blocks_random"), "routing.block"),
    ("routing.selection", ("blocks",), "routing.compressed"),
    ("routing.selection", ("indexer",), "routing.warmup"),
    ("model.base", ("lsh",), "model.lsh model.hash_rounds model.hash_buckets"),
    ("model.base", ("adaptive_span",), "model.span_ramp model.span_cost"),
    ("model.base", ("recurrent",), "model.memory model.same_length model.compressed"),
    ("model.base", ("recurrent",), "model.compression model.compression_rate"),
    ("model.positions", ("xl",), "model.clamp model.tie_biases"),
    ("model.positions", ("shaw",), "model.max_distance"),
    ("model.positions", ("rotary",), "routing.rotary"),
    ("model.base", SPARSE, "model.stride"),
    ("model.base", ("fixed", "fixed_summary"), "model.summary"),
    ("model.base", ("full", "local", "recurrent", *SPARSE), "model.attend_self"),
    ("model.positions", ("axial",), "model.axes"),
    ("model.embedding", ("adaptive",), "model.cutoffs model.band_factor"),
    ("optimizer.name", ("adam", "adamw"), "optimizer.beta1 optimizer.beta2"),
    ("logger.name", ("auto", "online", "offline"), "logger.project logger.entity logger.group"),
)
"""A key, its values, or parts of them, and the keys that are read with these alone.

model.window is not among them: whatever the heads, a score of a text counts a repeat as far by it.
"""
COUNTS = ("routing.heads", "routing.layers")
"""Where one of them is 0, no head routes."""
SWITCHED_OFF = tuple(f"{count}=0" for count in COUNTS)
BUILT_IN = {"data.name": NAMES, "model.base": tuple(BASES), "routing.selection": tuple(SELECTIONS)}
"""The values of the keys to which an extension may add others."""
WANDB_MODES = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
"""What WANDB_MODE may be (W&B's own words but shared, for several processes that write one run), and what it means."""


def resolve(config: Config, keys: Iterable[str] = ()) -> Config:
    """Return a copy in which what was left to other keys is frozen; `UserError`: what fits not, idle `keys`."""
    own = {"clusters": clusters(config), "attend_self": reads_self(config.routing)}
    routing, model = replace(config.routing, **own), config.model
    if "lsh" in model.base.split("+"):
        model = replace(model, hash_buckets=hash_buckets(config))
    config = replace(config, routing=routing, model=model)
    of_model = too_large, model_problems, adaptive_problems, recurrent_problems
    parts = (*of_model, training_problems, gpu_problems, data_problems)
    refuse(
        [*(line for problems in parts for line in problems(config)), *idle(config, keys).values()]
    )
    return config


def check_logger(config: Config) -> None:
    """Raise `UserError` for a logger that needs an extra, or a wrong WANDB_MODE: of a run that is to begin or go on."""
    if config.logger.name == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise UserError("logger=tensorboard needs TensorBoard: pip install 'rtx[tensorboard]'")
    if config.logger.name in ("auto", "online", "offline"):
        wandb_mode()


def wandb_mode() -> str:
    """Return what WANDB_MODE asks for, "" where it is not set; `UserError` for a value that W&B would not take."""
    if (word := os.environ.get("WANDB_MODE")) is None:
        return ""
    if word not in WANDB_MODES:
        near = nearest(word, WANDB_MODES)
        raise UserError(
            f"WANDB_MODE={shorten(repr(word))}: must be one of {', '.join(WANDB_MODES)}{near}"
        )
    return WANDB_MODES[word]


def idle(config: Config, keys: Iterable[str]) -> dict[str, str]:
    """Return an error line for each of `keys` that is not null and that the run does not read.

    Where routing.heads or routing.layers is 0, the other keys of routing are left alone: they get no line.
    """
    values = flat(to_dict(config))
    was_set = {*keys}
    lines = {}
    for key, reason in unread(values).items():
        if key in was_set and values[key] is not None and reason not in SWITCHED_OFF:
            lines[key] = f"{key}={shorten(written(values[key]))} has no effect with {reason}"
    return lines


def unread(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that a run does not read, each with the reason: `routing.layers=0`, `model.base=full; ...`.

    `values` are those of a configuration by their dotted keys; of an older run some may be missing.
    """
    reasons = {}
    for other, readers, keys in READ_WITH:
        if other in values and not reads(other, str(values[other]), readers):
            reason = f"{other}={written(values[other])}; it is for {', '.join(readers)}"
            reasons |= dict.fromkeys(keys.split(), reason)
    zero = [count for count in COUNTS if values.get(count) == 0]
    for count in zero:  # a run reads the counts that are 0, and no other key of routing
        others = [key for key in all_fields() if key.startswith("routing.") and key not in zero]
        reasons |= dict.fromkeys(others, f"{count}=0")
    return {key: reason for key, reason in reasons.items() if key in values}


def reads(key: str, value: str, readers: Collection[str]) -> bool:
    """Return whether a value, or one of its parts joined by +, is one of `readers`.

    What a pattern or data set of an extension reads is not known: a part that an extension added counts as a reader.
    """
    parts = value.split("+")
    built_in = BUILT_IN.get(key, parts)
    return any(part in readers or part not in built_in for part in parts)


def default_where_unread(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of values by dotted keys, with each key that the run does not read set to its default.

    Where no head routes, both counts become 0. Two configurations that are then equal describe the same run.
    """
    known = all_fields()
    found = {**values, **{key: known[key].default for key in unread(values)}}
    if any(found.get(count) == 0 for count in COUNTS):
        found |= {count: 0 for count in COUNTS if count in found}
    return found


def too_large(config: Config) -> Iterator[str]:
    """Yield which sizes are larger than others allow."""
    routing, patterns = config.routing, set(config.model.base.split("+"))
    routes, sparse = bool(routing.heads and routing.layers), bool(patterns & {*SPARSE})
    limits = (
        ("routing.heads", "model.heads", routes),
        ("routing.layers", "model.layers", routes),
        ("routing.window", "data.length", routes),
        ("routing.clusters", "data.length", routes),
        ("routing.candidates", "data.length", routes),
        (
            "routing.block",
            "routing.window",
            routes and routing.selection in ("blocks", "blocks_random"),
        ),
        ("model.window", "data.length", not patterns <= {"full", "recurrent", *SPARSE}),
        ("model.stride", "data.length", sparse),
        ("model.summary", "model.stride", bool(patterns & {"fixed", "fixed_summary"})),
        ("trainer.val_stride", "data.length", not config.model.memory),
        ("data.pairs", "data.keys", config.data.name in MADE and config.data.name != "copy"),
    )
    for key, limit, applies in limits:
        value, most = attrgetter(key, limit)(config)
        if applies and value is not None and value > most:
            yield f"{key}={value} must be at most {limit}={most}"


def model_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the model's sizes, and with the keys of its routing heads."""
    length, model, routing = config.data.length, config.model, config.routing
    patterns, size = model.base.split("+"), model.hidden // model.heads
    plain = {model.heads} if routing.layers < model.layers else set()
    plain |= {model.heads - routing.heads} if routing.layers else set()
    if model.hidden % model.heads:
        yield f"model.hidden={model.hidden} must be a multiple of model.heads={model.heads}"
    if model.positions == "rotary" and size % 2:
        yield f"model.positions=rotary needs an even head size, not hidden/heads = {size}"
    if any(heads % len(patterns) for heads in plain):
        yield f"model.base={model.base} needs in every layer a multiple of {len(patterns)} heads that do not route"
    if (model.hash_buckets or 2) % 2:
        yield f"model.hash_buckets={model.hash_buckets} must be even: a rotation and its opposite give two buckets"
    if model.positions == "axial" and math.prod(sizes_of(model.axes)) != length:
        yield f"model.axes={model.axes} must have the product data.length={length}, such as 32x32x3 for 3072"
    chosen, keys = routing.selection, routing.keys
    if not (routing.heads and routing.layers):
        return
    if (
        chosen == "probed"
        and routing.candidates is not None
        and routing.candidates < routing.window
    ):
        yield f"routing.candidates={routing.candidates} must be at least routing.window={routing.window}"
    if keys == "projected" and chosen not in CLUSTERED[:3]:
        yield f"routing.keys=projected needs routing.selection=causal, topk or nearest, not {chosen}"
    if keys in ("shared", "projected") and chosen not in CLUSTERED:
        yield f"routing.selection={chosen} needs routing.keys=separate or tied, not {keys}; routing={chosen} sets both"
    if keys == "shared" and (routing.key_shift, routing.key_conv) != (0, 1):
        yield "routing.keys=shared, where queries stand for keys, needs routing.key_shift=0 and routing.key_conv=1"
    if keys in ("shared", "tied") and routing.key_loss:
        yield f"routing.key_loss is for routing.keys=separate or projected, not for {keys}, whose W_K is W_Q"


def adaptive_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the bands of embedding=adaptive; which of them the vocabulary covers, the data say."""
    model, ends, factor = config.model, sizes_of(config.model.cutoffs), config.model.band_factor
    if model.embedding != "adaptive":
        return
    if not ends or list(ends) != sorted({*ends} - {0}):
        yield f"model.cutoffs={written(model.cutoffs)} must be ascending numbers joined by x, such as 20000x60000"
    if model.hidden < (least := factor ** len(ends)):
        yield f"model.hidden={model.hidden} must be at least model.band_factor={factor}^{len(ends)} = {least}"
    if (name := config.data.name) in MADE:
        yield f"model.embedding=adaptive has no place in data={name}, whose units are all as frequent; take null"
    if model.init == "depth_scaled":
        yield "model.init=depth_scaled is not for model.embedding=adaptive; take model.init=fan_in"


def recurrent_problems(config: Config) -> Iterator[str]:
    """Yield what does not go with segments, a memory of earlier ones, and the positions of Transformer-XL."""
    model, routing, data, hardware = config.model, config.routing, config.data, config.hardware
    recurrent, patterns = model.base == "recurrent", model.base.split("+")
    if model.positions == "xl" and not recurrent:
        yield f"model.positions=xl is for model.base=recurrent, not {model.base}"
    if "recurrent" in patterns and not recurrent:
        yield f"model.base={model.base}: recurrent heads take no others beside them"
    if recurrent and routing.heads and routing.layers:
        yield f"routing.heads={routing.heads} has no place beside model.base=recurrent; take routing=none"
    if recurrent and model.positions in ("learned", "axial"):
        yield f"model.positions={model.positions} has no place in model.base=recurrent; take xl, rotary, shaw or none"
    if recurrent and model.same_length and not model.memory:
        yield "model.same_length=true needs model.memory of at least 1: so many keys every position reads"
    if recurrent and model.memory and data.name not in TEXTS:
        yield f"model.memory={model.memory} needs a text that goes on: data={data.name} has sequences of its own"
    if recurrent and model.memory and hardware.compile is True:
        yield f"hardware.compile=true is not for model.memory={model.memory}, which grows over the first steps"
    if model.positions == "xl" and model.tie_biases and hardware.name == "fsdp":
        yield "model.tie_biases=true is not for hardware=fsdp, which shares out each block by itself; take false"
    if not (recurrent and model.compressed):
        return
    if not model.memory or model.same_length:
        yield f"model.compressed={model.compressed} needs model.memory of at least 1, and model.same_length=false"
    for key, value in (("data.length", data.length), ("model.memory", model.memory)):
        if value % (rate := model.compression_rate):
            yield f"{key}={value} must be a multiple of model.compression_rate={rate}"
    if hardware.name == "fsdp":
        yield "model.compressed is not for hardware=fsdp, which gathers weights in blocks alone; take hardware=ddp"


def training_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with devices, batches, schedule and the attention asked for by name."""
    hardware, trainer, optimizer, model = (
        config.hardware,
        config.trainer,
        config.optimizer,
        config.model,
    )
    devices = (hardware.devices or 1) * hardware.nodes
    micro = 1 if trainer.micro_batch_size == "auto" else int(trainer.micro_batch_size)
    if hardware.precision == "tf32" and hardware.name == "cpu":
        yield "hardware.precision=tf32 needs a GPU; a CPU takes fp32, bf16, bf16-true or fp64"
    if devices > 1 and hardware.name not in SPREAD:
        yield f"hardware.devices and nodes above 1 need hardware=ddp or fsdp, not hardware={hardware.name}"
    if hardware.compile is True and hardware.name == "fsdp":
        yield "hardware.compile=true is not for hardware=fsdp, which gathers weights between blocks; use hardware=ddp"
    if optimizer.name == "adafactor" and hardware.name == "fsdp":
        yield "optimizer=adafactor is not for hardware=fsdp, which has parts of matrices; take ddp, or optimizer=adam"
    if trainer.batch_size % (micro * devices):
        yield f"trainer.batch_size={trainer.batch_size} must be a multiple of micro-batch {micro} x {devices} device(s)"
    if optimizer.schedule == "rsqrt" and not optimizer.warmup:
        yield "optimizer.schedule=rsqrt needs optimizer.warmup of at least 1"
    by_distance = model.positions in ("shaw", "xl") or "adaptive_span" in model.base.split("+")
    if hardware.attention in ("native", "flex") and (model.attention_dropout or by_distance):
        yield "model.attention_dropout, positions=shaw or xl, base=adaptive_span need hardware.attention=auto or torch"
    if hardware.attention == "triton" and "adaptive_span" in model.base.split("+"):
        yield "model.base=adaptive_span needs hardware.attention=auto or torch"
    if hardware.attention == "triton" and not 16 <= model.hidden // model.heads <= 128:
        yield "hardware.attention=triton is for heads of 16 to 128 units (model.hidden / model.heads)"
    if hardware.attention == "triton" and hardware.precision == "fp64":
        yield "hardware.attention=triton has no hardware.precision=fp64"
    on_cpu = hardware.precision in ("auto", "fp32") and hardware.name in ("auto", "cpu", "ddp")
    if hardware.attention == "native" and not on_cpu:
        yield "hardware.attention=native is for hardware.precision=fp32 on a CPU (hardware=cpu)"


def gpu_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with options that only a GPU has."""
    hardware, model, data = config.hardware, config.model, config.data
    if hardware.name == "cpu" and hardware.graphs is True:
        yield "hardware.graphs=true needs a GPU, not hardware=cpu"
    if hardware.name == "cpu" and hardware.loss == "liger":
        yield "hardware.loss=liger needs a GPU, not hardware=cpu"
    if hardware.graphs is True and (hardware.name in SPREAD or model.memory):
        yield "hardware.graphs=true is not for hardware=ddp or fsdp, nor for model.memory"
    if hardware.loss != "liger":
        return
    if model.embedding == "adaptive":
        yield "hardware.loss=liger is not for model.embedding=adaptive, whose softmax has bands; take torch"
    if data.name in MADE:
        yield f"hardware.loss=liger is not for data={data.name}, where answers alone count; take torch"
    if hardware.name == "fsdp" or hardware.precision == "fp64":
        yield "hardware.loss=liger is not for hardware=fsdp or hardware.precision=fp64; take torch"


def data_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the run's name, and with files, windows and sequences of the data."""
    data, name, stride = config.data, config.name, config.trainer.val_stride
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > 200:
        yield f"name={name[:40]!r} must be a folder's name, of at most 200 bytes"
    wanted = {
        "text": "file, folder or glob",
        "images": "folder with images",
        "hub": "owner/name, or a folder",
    }
    if data.name in wanted and data.path is None:
        yield f"data={data.name} needs data.path=<{wanted[data.name]}>"
    if stride not in (None, data.length) and (SETS[data.name].image or data.name in MADE):
        yield f"trainer.val_stride={stride} has no place in data={data.name}, whose sequences are scored whole"
    if SETS[data.name].image:
        side = image_side(data)
        whole = f"{3 * side**2} = {side} x {side} x 3" if side else "height x width x 3"
        if data.length % 3 or (side and data.length != 3 * side**2):
            yield f"data.length={data.length} must be {whole}: an image is one sequence"
    needed = {"copy": 2 * data.pairs + 2, "induction": 8 * data.pairs}.get(
        data.name, 4 * data.pairs
    )
    if data.name in MADE and (least := needed + data.distance) > data.length:
        want = f"and data.distance={data.distance} need" if data.distance else "needs"
        yield f"data.pairs={data.pairs} {want} data.length of at least {least}, not {data.length}"
