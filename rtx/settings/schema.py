"""The keys of a training run, their types, ranges and docstrings: a dataclass for each group. No torch, no Hydra.

Values live in `conf/`, what fits with what in `rtx/settings/rules.py`, what other commands read
in `rtx/cli/options.py`.
"""

import functools
import inspect
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rtx.data.sets import SETS, DataSet
from rtx.errors import shorten
from rtx.settings.fields import Field, fields_of, key_of, one_of, ranged
from rtx.settings.presets import option_words

SECTIONS = ("data", "routing", "optimizer", "hardware", "logger", "model", "trainer")
"""The dataclasses of a configuration, by their keys."""
UNSET_GROUPS = ("experiment", "heads")
"""Groups of which no option is chosen by default."""
GROUPS = (*SECTIONS[:-1], *UNSET_GROUPS)
"""Hydra groups in the order of composition; a later one wins."""

BASES: dict[str, Any] = dict.fromkeys(
    (
        *("local", "full", "recurrent", "lsh", "adaptive_span"),
        *("strided", "fixed", "fixed_block", "fixed_summary"),
    )
)
"""The patterns of model.base, by their names. `rtx.model.heads` makes those with None; the others are
extensions', each with the function that makes it, or the dotted path of one (docs/extending.md).
"""

SELECTIONS: dict[str, Any] = dict.fromkeys(
    (
        *("causal", "topk", "nearest", "random"),
        *("exact", "blocks", "blocks_random", "indexer", "probed"),
    )
)
"""The patterns of routing.selection, as `BASES`."""
REGISTERED: dict[str, str] = {}
"""Names that were added to BASES, SELECTIONS and SETS, each with the installed package that it is from, if any."""
OURS = frozenset({*BASES, *SELECTIONS, *SETS})
"""Names that no extension can have."""
KINDS_OF_HEADS = ("routed", "routing", "sparse", "random_blocks", "compressive", "adaptive_input")
"""What a model and a report call heads besides the names of patterns: no pattern of an extension can be one of them."""

SPARSE = ("strided", "fixed", "fixed_block", "fixed_summary")  # the Sparse Transformer's patterns
CLUSTERED = (
    "causal",
    "topk",
    "nearest",
    "random",
)  # selections by clusters; the others choose keys for each query
CHOSEN = (
    "exact",
    "probed",
    "indexer",
    "blocks",
    "blocks_random",
)  # selections of keys for each query
CENTROIDS = ("causal", "topk", "nearest", "probed")  # selections by centroids that k-means moves
ROUTING_SIZES = (
    "heads",
    "layers",
    "window",
    "candidates",
    "clusters",
    "block",
)  # keys of routing that are no rules
SPREAD = ("ddp", "fsdp")  # values of hardware.name that run one process per device
NAMELIKE = (
    *("name", "model.name", "optimizer.steps", "hardware.workers", "data.verify", "data.processes"),
    *("trainer.micro_batch_size", "model.recompute", "trainer.final_windows", "hardware.products"),
    *("hardware.graphs", "hardware.loss", "trainer.profile"),
)
OUTSIDE = ("logger.", "trainer.checkpoint_", "trainer.keep_")
"""Keys, and what keys begin with (keep_: in older runs), that tell no cells apart: they change rounding at the most."""

YOUNGER = (
    *(("data.distance", 0), ("data.gaps", "uniform"), ("extensions", None)),
    *(
        ("model.memory", 0),
        ("model.same_length", False),
        ("model.clamp", None),
        ("model.tie_biases", True),
    ),
    *(("model.compressed", 0), ("model.compression", "conv"), ("model.compression_rate", 2)),
    *(
        ("model.cutoffs", None),
        ("model.band_factor", 4),
        ("routing.rotary", True),
        ("model.attend_self", True),
    ),
    *(
        ("routing.key_loss", 0.0),
        ("routing.merge", "mean"),
        ("routing.candidates", None),
        ("routing.qk_norm", False),
    ),
)
"""Keys that recorded cells lack, with the values that say what they did: then they tell no cells apart, either."""


@dataclass
class DataConfig:
    """What is learned: text or images on disk in sequences of `length` units, or recall tasks made on the fly."""

    name: str = key_of(SETS)
    """Data set: Python's library, the Linux kernel's C files, your own text or images, a benchmark, a recall task."""
    path: str | None = None
    """File, folder or glob to read (data=text, images, hub), owner/name on the hub (data=hub), or a local copy."""
    column: str = "text"
    """Column whose rows are the documents (data=hub)."""
    subset: str | None = None
    """Configuration of a data set that has several (data=hub)."""
    revision: str | None = None
    """Commit or tag of the hub (data=hub); unset: the newest; the commit taken stands in the run's record."""
    length: int = ranged(1024, low=2, high=2**30)
    """Sequence length N in units; an image is one sequence, so image sets fix it to height x width x 3."""
    fetch: str = one_of("hub", "archive")
    """Where a set that has both comes from: its Hugging Face hub files, or the archive its authors published."""
    tokenizer: str = one_of("bytes", "words", "sentencepiece")
    """Units of text: bytes, words between blanks with <eos> for every newline, or subwords learned from split train."""
    vocabulary: int = ranged(32_768, low=300, high=1_000_000)
    """Subwords to train (tokenizer=sentencepiece)."""
    tokenizer_sample: int = ranged(100_000_000, low=1_000)
    """Bytes of the training split that subwords are trained on, taken evenly from it (tokenizer=sentencepiece)."""
    newlines: str = one_of("keep", "drop")
    """Newline bytes of data=enwik8: all 100,000,000 bytes, or dropped as the Transformer-XL reader does."""
    size: int | None = ranged(None, low=1, high=1024)
    """Scale images to this height and width; a result on them is marked as such."""
    held_out: int = ranged(5_000, low=0)
    """Training images kept back as split valid (image sets); 0: the published test images serve as valid, too."""
    verify: str = one_of("once", "always", "never")
    """When a store's bytes are compared with their checksums: once on this machine, at every opening, or never."""
    processes: int | None = ranged(None, low=1, high=256)
    """Processes that prepare a store; unset: one for each core. The store is the same for any number."""
    pairs: int = ranged(8, low=1, high=10_000)
    """Key-value pairs of a sequence, all asked again: with mqar, copy and induction so many, a half or a quarter."""
    keys: int = ranged(16, low=1, high=10_000)
    """Different keys, of which each sequence draws its own (recall tasks)."""
    values: int = ranged(16, low=2, high=10_000)
    """Different values; chance is one over their number (recall tasks)."""
    fillers: int = ranged(16, low=1, high=10_000)
    """Different units that the filler between pairs and questions is drawn from (recall tasks)."""
    sequences: int = ranged(256, low=1)
    """Sequences of each held-out split (recall tasks)."""
    distance: int = ranged(0, low=0)
    """Units between a pair and its question at the least, all pairs being at the start but of data=induction."""
    gaps: str = one_of("uniform", "power")
    """Places of questions behind that: drawn evenly, or by a power law of their distance as Zoology's (mqar, copy)."""


@dataclass
class RoutingConfig:
    """The content-based heads: how many, where, and how a position chooses its cluster."""

    selection: str = key_of(SELECTIONS)
    """What a head reads: a cluster (causal, nearest, random; topk, Algorithm 1: sees the future), or chosen keys."""
    keys: str = one_of("shared", "separate", "tied", "projected")
    """Keys: the queries; others, chosen apart (separate); such by W_Q (tied); clustered by W_R (q + k) (projected)."""
    heads: int = ranged(4, low=0)
    """Routing heads in each routing layer; the other heads use the base pattern."""
    layers: int = ranged(2, low=0)
    """Routing layers, counted from the top of the model."""
    window: int = ranged(256, low=1)
    """Attention window W: keys per query and cluster at the most."""
    candidates: int | None = ranged(None, low=1)
    """Keys for which a query probes clusters, to read the W best; unset: W, all of them read (selection=probed)."""
    clusters: int | None = ranged(None, low=1)
    """Clusters C of each routing head; unset: ceil(N / W)."""
    logit_scale: str = one_of("sqrt_d", "none", "unit")
    """Logits divided by sqrt(D), not at all (as Algorithm 1 prints it), or by D (unit vectors, as its comment has)."""
    qk_norm: bool = False
    """Normalise queries and keys before all else, as heads of clusters do (exact, probed, indexer, blocks)."""
    attend_self: bool | None = None
    """Whether a position may always read itself; false: only where nothing else; unset: not where queries are keys."""
    merge: str = one_of("mean", "lse")
    """In several clusters: mean of outputs (as the released code) or one softmax over all keys (lse)."""
    update: str = one_of("members", "nearest", "sum")
    """Centroid step: mean of members (ours), of the nearest (near the code's), sum (Algorithm 1)."""
    decay: float = ranged(0.999, low=0.0, high=1.0)
    """Share of a centroid that survives one optimizer step."""
    threshold_rate: float = ranged(0.1, low=0.0, high=10.0)
    """Deviations of the scores by which a threshold moves for each W of members too many (selection=causal)."""
    init: str = one_of("random", "data")
    """Centroids start as random directions, or as queries of the first training sequence."""
    commitment: float = ranged(0.0, low=0.0)
    """Weight of the loss that pulls queries to their centroid (both released codes: 1e-4; the paper: none)."""
    block: int = ranged(16, low=1)
    """Positions of a block (selection=blocks and blocks_random)."""
    compressed: bool = False
    """Attend over the means of blocks, too, joined by gates: gradients train the choice (selection=blocks)."""
    warmup: int = ranged(0, low=0)
    """Optimizer steps for which heads of selection=indexer read everything."""
    key_shift: int = ranged(0, low=0)
    """Positions by which keys of their own look back: 1 lets a head match "the unit before was A"."""
    key_conv: int = ranged(1, low=1, high=64)
    """Keys that a causal convolution adds to keys of their own; 1: none."""
    rotary: bool = True
    """Whether model.positions=rotary turns routing heads, too; false: they attend by content alone, at any distance."""
    key_loss: float = ranged(0.0, low=0.0)
    """Weight of the loss that pulls the matrices of queries and keys of their own together (the paper's first)."""


@dataclass
class ModelConfig:
    """The decoder: its size, blocks and position terms."""

    name: str = "custom"
    """Name of the preset, for records only."""
    layers: int = ranged(4, low=1, high=10_000)
    """Decoder blocks."""
    heads: int = ranged(8, low=1, high=2**20)
    """Attention heads in each block."""
    hidden: int = ranged(256, low=1, high=2**20)
    """Width of the residual stream; a head has hidden / heads units."""
    base: str = key_of(BASES, joined=True)
    """Pattern of all heads that do not route; local+full shares them out evenly, local+local+lsh two to one."""
    window: int = ranged(256, low=1)
    """Keys that a local head sees, its own position included."""
    attend_self: bool = True
    """Whether heads that choose by position may always read their own; false: only where they see nothing else."""
    stride: int = ranged(128, low=1)
    """Stride of strided heads, block of fixed heads (Sparse Transformer)."""
    summary: int = ranged(8, low=1)
    """Columns of every earlier block that a fixed head reads (Sparse Transformer)."""
    memory: int = ranged(0, low=0, high=2**30)
    """Positions of earlier segments that base=recurrent, which trains on streams, reads, too (Transformer-XL)."""
    compressed: int = ranged(0, low=0, high=2**30)
    """Compressed positions that base=recurrent reads before its memory, too (Compressive Transformer)."""
    compression: str = one_of("conv", "mean", "max")
    """What makes one compressed position of several: a convolution that learns, their mean, or their maximum."""
    compression_rate: int = ranged(2, low=1, high=1024)
    """Positions that make one compressed position."""
    same_length: bool = False
    """Whether every position of base=recurrent reads as many keys, model.memory with its own."""
    positions: str = one_of("rotary", "shaw", "xl", "learned", "axial", "none")
    """Position terms: rotary angles, Shaw's tables, Transformer-XL's sinusoids, a learned table, one an axis, none."""
    clamp: int | None = ranged(None, low=1)
    """Largest distance that positions=xl tells apart; unset: any."""
    tie_biases: bool = True
    """Whether all layers share the biases u and v of positions=xl, as Transformer-XL's PyTorch code has it."""
    axes: str | None = None
    """Sizes of the axes of positions=axial, slowest first, such as 32x32x3; their product is data.length."""
    max_distance: int = ranged(256, low=1, high=2**30)
    """Largest distance that positions=shaw tells apart."""
    norm: str = one_of("pre", "post")
    """LayerNorm before each sub-layer, or after its residual sum."""
    ffn: str = one_of("gelu", "relu", "geglu")
    """Activation of the feed-forward layer; geglu gates with a third matrix."""
    ffn_hidden: int = ranged(1024, low=1, high=2**20)
    """Hidden width of the feed-forward layer."""
    dropout: float = ranged(0.0, low=0.0, high=0.95)
    """Dropout on the embedding and on what each sub-layer adds to the residual stream."""
    attention_dropout: float = ranged(0.0, low=0.0, high=0.95)
    """Dropout on attention weights."""
    ffn_dropout: float = ranged(0.0, low=0.0, high=0.95)
    """Dropout on the feed-forward layer's hidden units (the papers' ReLU dropout)."""
    embedding: int | str | None = ranged(None, low=1, high=2**20, words=("adaptive",))
    """Width of token embeddings where it differs from hidden; adaptive: bands, narrower for rarer words."""
    cutoffs: str | None = None
    """Ids before which the bands of embedding=adaptive end but the last, such as 20000x60000 (tokenizer=words)."""
    band_factor: int = ranged(4, low=1, high=2**20)
    """How many times each band of embedding=adaptive is narrower than the one before."""
    tie_embeddings: bool = False
    """Use the embedding table as the output matrix (adaptive: tables and matrices of all bands)."""
    lsh: str = one_of("causal", "reformer")
    """What base=lsh reads: a bucket's last window (causal), or sorted chunks, which see the future (as published)."""
    hash_rounds: int = ranged(1, low=1, high=1_000)
    """Hash rounds of base=lsh; a head reads what they show together."""
    hash_buckets: int | None = ranged(None, low=2, high=2**30)
    """Buckets of each round of base=lsh, an even number; unset: about 2 N / model.window."""
    span_ramp: int = ranged(32, low=1)
    """Positions over which a span of base=adaptive_span fades out."""
    span_cost: float = ranged(0.0, low=0.0)
    """Weight of each layer's mean span in the loss (base=adaptive_span; released code: 5e-7)."""
    init: str = one_of("fan_in", "depth_scaled")
    """Weights at the start: by fan-in, or as in the Sparse Transformer, smaller, for models of many layers."""
    recompute: bool | str = "auto"
    """Recompute each block in the backward pass instead of keeping its activations; auto: where memory asks for it."""
    ffn_parts: int = ranged(1, low=1, high=4096)
    """Parts of the rows that the feed-forward layer takes in turn, and again in the backward pass; 1: all at once."""


@dataclass
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = one_of("adam", "adamw", "adafactor")
    """Optimizer: adam (the paper's), adamw (decoupled weight decay), adafactor (the paper's for PG-19)."""
    lr: float = ranged(2e-4, above=0.0)
    """Peak learning rate."""
    beta1: float = ranged(0.9, low=0.0, high=0.9999)
    """Decay of the first moment (adam, adamw)."""
    beta2: float = ranged(0.98, low=0.0, high=0.99999)
    """Decay of the second moment (adam, adamw)."""
    weight_decay: float = ranged(0.0, low=0.0)
    """Weight decay of linear layers and of an output matrix of its own; biases, norms and tables have none."""
    schedule: str = one_of("rsqrt", "cosine", "constant")
    """After the warm-up: peak * sqrt(warmup / step), a cosine to a tenth of the peak at trainer.steps, or flat."""
    warmup: int = ranged(4000, low=0)
    """Steps of linear warm-up."""
    steps: int = ranged(200_000, low=1)
    """Steps that this optimizer's preset is made for; trainer.steps follows it unless set."""


@dataclass
class HardwareConfig:
    """Where and with what arithmetic the run computes."""

    name: str = one_of("auto", "cpu", "gpu", "ddp", "fsdp")
    """auto: a GPU if there is one; ddp: a process per device; fsdp: weights and optimizer shared out, too."""
    devices: int | None = ranged(None, low=1)
    """Processes on each machine; unset: one, or with ddp and fsdp those that a launcher started, else all GPUs."""
    nodes: int = ranged(1, low=1)
    """Machines that share the run."""
    precision: str = one_of("auto", "fp32", "bf16", "bf16-true", "tf32", "fp64")
    """Arithmetic: bf16 (mixed), bf16-true (weights, too), fp32, tf32 (GPU), fp64; auto: bf16 on a GPU, else fp32."""
    attention: str = one_of("auto", "torch", "native", "triton", "flex")
    """torch's, C++ built here (native; fp32, CPU), our GPU kernels (triton), FlexAttention (flex); auto: fastest."""
    products: str = one_of("onednn", "torch")
    """Large products with weights in fp32 on a CPU: oneDNN's, or torch's own (MKL: may be faster on Intel)."""
    compile: bool | str = "auto"
    """Compile the model with torch.compile; auto: on a GPU where Triton and a C compiler are, not on a CPU."""
    graphs: bool | str = "auto"
    """Record the passes of a step as CUDA graphs, whose kernels a CPU starts at once; auto: on one GPU, if possible."""
    loss: str = one_of("auto", "torch", "liger")
    """Training loss: torch's, or Liger-Kernel's (GPU; needs rtx[liger]); auto: torch's, until the other is measured."""
    deterministic: bool = False
    """Use only deterministic GPU kernels, so that the same seed gives the same bits."""
    threads: int | None = ranged(None, low=1, high=1024)
    """CPU threads of each process; unset: torch's own choice, or its share of the cores. Bits depend on it."""
    workers: int | str = ranged("auto", low=0, high=256)
    """Processes that prepare batches ahead; 0: in the training process; auto: 2 on a GPU, 0 on a CPU."""


@dataclass
class LoggerConfig:
    """Where metrics go besides metrics.jsonl."""

    name: str = one_of("auto", "online", "offline", "jsonl", "csv", "tensorboard")
    """Weights & Biases: auto (online with a key, else offline), online, offline; csv, tensorboard; jsonl: nowhere."""
    project: str = "rtx"
    """Weights & Biases project."""
    entity: str | None = None
    """Weights & Biases team or user; unset: your default."""
    group: str | None = None
    """Weights & Biases group; unset: the name of the sweep, for its runs."""


@dataclass
class TrainerConfig:
    """The training loop, counted in optimizer steps."""

    steps: int = ranged(200_000, low=1)
    """Optimizer steps to train; unset: optimizer.steps."""
    max_minutes: float | None = ranged(None, above=0.0)
    """Stop, and save, after this many minutes of training if the steps are not done by then."""
    batch_size: int = ranged(8, low=1, high=2**20)
    """Sequences per optimizer step, over all devices and micro-batches."""
    micro_batch_size: int | str = ranged("auto", low=1)
    """Sequences per device and forward pass; auto: as many as the device holds, by the count of rtx plan."""
    clip: float = ranged(1.0, low=0.0)
    """Largest norm of the whole gradient; 0: no clipping."""
    val_every: int = ranged(250, low=1)
    """Steps between validations; the last step is always validated."""
    val_windows: int | None = ranged(64, low=1)
    """Windows scored in a validation during training (the same ones every time); unset: the whole split."""
    val_stride: int | None = ranged(None, low=1)
    """Units by which the windows of a validation advance; unset: N. Smaller gives every unit more context."""
    final_windows: int | str | None = ranged("auto", low=1)
    """Windows of the closing score; auto: all, or a sample in a tenth of the training time (or 30 s); null: all."""
    checkpoint_every: int = ranged(250, low=1)
    """Steps between checkpoints; one is also written at the end and on a signal."""
    log_every: int = ranged(10, low=1)
    """Steps between rows in metrics.jsonl."""
    profile: int | None = ranged(None, low=1, high=1000)
    """Steps to record with torch.profiler, behind the first few, in the run's trace.json.gz (for Perfetto)."""


@dataclass
class Config:
    """A whole run."""

    data: DataConfig = field(default_factory=DataConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    extensions: str | None = None
    """Python file, or several with : between, that registers patterns or data sets: its code runs, a run keeps it."""
    seed: int = ranged(0, low=0, high=2**32 - 1)
    """Seed of weights, batches, dropout, random heads, and of the windows that rtx eval limit= draws."""
    name: str = "rtx"
    """Folder of the run below outputs/, and its name in Weights & Biases."""


def all_fields() -> dict[str, Field]:
    """Every key of a run's configuration."""
    add_installed()
    return fields_of(Config)


@functools.cache
def add_installed() -> None:
    """Add the patterns and data sets of installed packages, by the names of their entry points; none is imported."""
    from importlib import metadata  # takes longer than all else that `rtx --help` imports

    tables: dict[str, dict[str, Any]] = {
        "rtx.patterns": BASES,
        "rtx.selections": SELECTIONS,
        "rtx.data": SETS,
    }
    for group, table in tables.items():
        for point in metadata.entry_points(group=group):
            package = point.dist.name if point.dist else ""
            problem = name_problem(point.name, pattern=table is not SETS)
            if not problem and point.name in table:
                problem = f"{point.name!r} is of the package {REGISTERED[point.name]}"
            if problem:
                print(f"rtx: {package} is without {group} {point.name}: {problem}", file=sys.stderr)
                continue
            found = point.value.replace(":", ".")
            table[point.name] = (
                found if table is not SETS else DataSet(found, defaults={"name": point.name})
            )
            REGISTERED[point.name] = package


def name_problem(name: str, *, pattern: bool) -> str:
    """Return why an extension cannot give a name to a pattern, or to a data set, or "" where it can."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        return f"{shorten(name)!r} must be of small letters, digits and _, a letter first"
    if name in OURS:
        return f"{name!r} is one of rtx's own"
    if name == "null":
        return "'null' unsets a key"
    if pattern and name in KINDS_OF_HEADS:
        return f"{name!r} is what rtx calls heads of another kind"
    return ""


def maker_problem(make: Any) -> str:
    """Return why something cannot make the heads of an extension's pattern, or "" where it may."""
    if not callable(make):
        return f"{shorten(repr(make))} is no function"
    try:
        inspect.signature(make).bind(heads=1, config=None, layer=0)
    except TypeError as error:
        name = getattr(make, "__name__", repr(make))
        called = f"{shorten(name)} is called with heads, config and layer"
        return f"{called}: {error}{how_to_register(make)}"
    except ValueError:  # Python knows no signature of some functions
        return ""
    return ""


def how_to_register(make: Any) -> str:
    """Return how to register a class that takes arguments of its own; "" for a function."""
    if not isinstance(make, type):
        return ""
    return f"; register a function that makes it: lambda heads, config, layer: {make.__name__}(...)"


@functools.cache
def settings() -> dict[str, Field]:
    """The groups, whose values are the files of `conf/<group>/`, and every key."""
    doc = "a file of conf/{0}/".format
    keys, own = all_fields(), {"data": [name for name in SETS if name in REGISTERED]}
    known = {key: (*option_words(key), *own.get(key, ())) for key in GROUPS}
    groups = {
        key: Field(key, str, key in UNSET_GROUPS, False, None, doc(key), known[key])
        for key in GROUPS
    }
    return groups | keys


def memory_slots(model: ModelConfig) -> int:
    """Positions before its segment that a layer reads: memory and compressed memory."""
    return model.memory + model.compressed


def embedding_width(model: ModelConfig) -> int:
    """Width of what the first block is given before it is widened, and the output reads."""
    return model.embedding if isinstance(model.embedding, int) else model.hidden


def sizes_of(text: str | None) -> tuple[int, ...]:
    """The numbers of model.axes, slowest first, or model.cutoffs; none where these are not joined by x."""
    parts = (text or "").split("x")
    return (
        tuple(map(int, parts)) if all(part.isdecimal() and len(part) < 10 for part in parts) else ()
    )


def hash_buckets(config: Config) -> int:
    """Buckets of a hash round: model.hash_buckets, or where unset the even number nearest to 2 N / model.window."""
    return config.model.hash_buckets or max(2, 2 * round(config.data.length / config.model.window))


def reads_self(routing: RoutingConfig) -> bool:
    """Whether routing heads always read their own position: routing.attend_self; unset: if its key is not the query."""
    own_keys = routing.keys in ("separate", "projected") or routing.key_shift > 0
    return own_keys if routing.attend_self is None else routing.attend_self


def clusters(config: Config) -> int:
    """Clusters C of a routing head: routing.clusters, or ceil(N / W) where unset."""
    return config.routing.clusters or math.ceil(config.data.length / config.routing.window)


ROUTED = "routed"
"""The group of the heads that `routing` describes; the others are called by their pattern."""


def layer_patterns(config: Config, layer: int) -> dict[str, int]:
    """Return the groups of a layer's heads in order, and how many heads each has: base patterns, then `routed`.

    Layer 0 is the lowest; routing layers are the topmost ones.
    """
    routed = config.routing.heads if layer >= config.model.layers - config.routing.layers else 0
    patterns = config.model.base.split("+")
    share = (config.model.heads - routed) // len(patterns)
    groups = {name: share * patterns.count(name) for name in patterns} if share else {}
    return groups | ({ROUTED: routed} if routed else {})


def full_group(config: Config, layer: int) -> tuple[int, int]:
    """Return the number of the group of a layer that reads all of its prefix, and how many heads that has (0: none).

    These are full heads, or routing heads with keys of their own and one cluster that is as wide as the sequence.
    """
    groups, routing = layer_patterns(config, layer), config.routing
    one = (
        routing.selection == "nearest"
        and clusters(config) == 1
        and routing.window >= config.data.length
    )
    name = ROUTED if one and routing.keys != "shared" and ROUTED in groups else "full"
    return [*groups, name].index(name), groups.get(name, 0)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries as one with dotted keys."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inside = isinstance(value, Mapping) and name in SECTIONS
        found |= {f"{name}.{key}": each for key, each in value.items()} if inside else {name: value}
    return found


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a configuration with other values at some dotted keys."""
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        changed = (
            {section: replace(getattr(config, section), **{name: value})}
            if section
            else {key: value}
        )
        config = replace(config, **changed)
    return config
