"""The keys of a training run, a dataclass for each group. No torch, no Hydra.

A key is a field with a docstring. The field says its type (`Literal`: a closed list), its range,
the effect of another value (`changes`, see `rtx/settings/effects.py`; unset: RESULTS), for which
values of other keys a run reads it (`read_with`), and since which version it exists. Help, checks,
hashes, resume, reports and the editor's schema follow from that (docs/extending.md, "How to add a
key").
Presets of values are in `conf/`, the rules of what fits together in `rtx/settings/rules/`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from rtx.errors import UserError
from rtx.paths import refuse_non_utf8
from rtx.settings.data_sets import (
    HELD_OUT,
    IMAGE_SETS,
    LONG_CONTEXT,
    MADE,
    NAMES,
    RECALL,
    SETS,
    TWO_WAYS,
)
from rtx.settings.effects import (
    CONTINUATION,
    COST,
    LOCATION,
    NOTHING,
    REPETITION,
    ROUNDING,
    SCHEDULE,
)
from rtx.settings.fields import (
    LARGEST,
    LENGTH,
    POSITIONS,
    STEPS,
    WINDOWS,
    Field,
    Since,
    fields_of,
    key,
    unknown,
)
from rtx.settings.names import BASES, REGISTERED, SELECTIONS, add_installed
from rtx.settings.presets import CACHES, option_words

SECTIONS = ("data", "routing", "optimizer", "hardware", "logger", "model", "trainer")
"""The dataclasses of a configuration, by their keys."""
UNSET_GROUPS = ("experiment", "heads", "trainer")
"""Groups of which no option is chosen by default."""
GROUPS = (*SECTIONS[:-1], *UNSET_GROUPS)
"""Hydra groups in the order of composition; a later one wins."""

TEXTS = tuple(name for name in NAMES if name not in (*IMAGE_SETS, *MADE))
"""Data sets of text."""
FILES = tuple(name for name in NAMES if name not in ("stdlib", *MADE))
"""Data sets of files that data.path may name."""

SPARSE = ("strided", "fixed", "fixed_block", "fixed_summary")
"""The patterns of the Sparse Transformer."""
CLUSTERED = ("causal", "topk", "nearest", "random")
"""Selections by clusters."""
BY_CENTROIDS = ("causal", "topk", "nearest")
"""Selections by clusters of queries and keys around centroids."""
CHOSEN = ("exact", "probed", "indexer", "blocks", "blocks_random")
"""Selections of keys for each query."""
CENTROIDS = (*BY_CENTROIDS, "probed")
"""Selections by centroids that k-means moves."""
ROUTING_SIZES = ("heads", "layers", "window", "candidates", "clusters", "block")
"""Keys of routing that are sizes, not rules."""
GATED = ("geglu", "swiglu")
"""Values of model.ffn with a third matrix."""
SPREAD = ("ddp", "fsdp")
"""Values of hardware.name with one process per device."""

# Values of `read_with`: another key, and its values (or parts, joined by +) that read the key.
IF_HUB = {"data.name": ("hub",)}
IF_MADE = {"data.name": tuple(MADE)}
IF_PAIRS = {"data.name": (*RECALL, "needles", "tracking")}
IF_SUBWORDS = {"data.tokenizer": ("sentencepiece",)}
IF_CENTROIDS = {"routing.selection": BY_CENTROIDS}
IF_RECURRENT = {"model.base": ("recurrent",)}
IF_LSH = {"model.base": ("lsh",)}
IF_SPAN = {"model.base": ("adaptive_span",)}
IF_XL = {"model.positions": ("xl",)}
IF_BANDS = {"model.embedding": ("adaptive",)}
IF_ADAM = {"optimizer.name": ("adam", "adamw", "muon")}
IF_WANDB = {"logger.wandb": ("true",)}


@dataclass
class DataConfig:
    """The data: text or images on disk in sequences of `length` tokens, or made on the fly."""

    name: str = key("stdlib", names=SETS)
    """Data set: Python's library, the Linux kernel's C files, your own text or images, a benchmark,
    a task made on the fly."""
    path: str | None = key(None, changes=LOCATION, read_with={"data.name": FILES})
    """File, folder or glob to read (data=text, images, hub), owner/name on the hub (data=hub), or a
    local copy."""
    column: str = key("text", read_with=IF_HUB)
    """Column whose rows are the documents (data=hub)."""
    subset: str | None = key(None, read_with=IF_HUB)
    """Configuration of a data set that has several (data=hub)."""
    revision: str | None = key(None, read_with=IF_HUB)
    """Commit or tag of the hub (data=hub); unset: the newest; the run's record has the commit that
    was read."""
    length: int = key(1024, low=2, high=LENGTH)
    """Sequence length N in tokens; an image is one sequence, so image sets fix it to height x width
    x 3."""
    documents: bool = key(False, read_with={"data.name": TEXTS}, since=Since("0.5.0", False))
    """Whether attention, shifted keys and positions keep to the document of a position; false:
    sequences are read whole."""
    fetch: Literal["hub", "archive"] = key("hub", read_with={"data.name": (*TWO_WAYS, "enwik8")})
    """Where a set that has both comes from: its Hugging Face hub files, or the archive its authors
    published."""
    tokenizer: Literal["bytes", "words", "sentencepiece", "pretrained"] = key(
        "bytes", read_with={"data.name": TEXTS}
    )
    """Tokens of text: bytes, words between blanks with <eos> for every newline, subwords learned
    from split train, or those of a model that exists."""
    tokenizer_path: str | None = key(
        None,
        changes=LOCATION,
        read_with={"data.tokenizer": ("pretrained",)},
        since=Since("0.5.0", None),
    )
    """A tokenizer.json of byte-level subwords, or the folder of a model that has one
    (tokenizer=pretrained)."""
    vocabulary: int = key(32_768, low=300, high=1_000_000, read_with=IF_SUBWORDS)
    """Subwords to train (tokenizer=sentencepiece)."""
    tokenizer_sample: int = key(100_000_000, low=1_000, high=2**40, read_with=IF_SUBWORDS)
    """Bytes of the training split that subwords are trained on, taken evenly from it
    (tokenizer=sentencepiece)."""
    newlines: Literal["keep", "drop"] = key("keep", read_with={"data.name": ("enwik8",)})
    """Newline bytes of data=enwik8: all 100,000,000 bytes, or dropped as the Transformer-XL reader
    does."""
    size: int | None = key(None, low=1, high=1024, read_with={"data.name": tuple(IMAGE_SETS)})
    """Scale images to this height and width; a result on them is marked as such."""
    held_out: int = key(5_000, low=0, high=2**30, read_with={"data.name": HELD_OUT})
    """Training images held out as split valid (image sets); 0: the published test images serve as
    valid, too."""
    verify: Literal["once", "always", "never"] = key("once", changes=NOTHING)
    """When a store's bytes are compared with their checksums: once on this machine, at every
    opening, or never."""
    processes: int | None = key(None, low=1, high=256, changes=NOTHING)
    """Processes that prepare a store; unset: one for each core. The store is the same for any
    number."""
    pairs: int = key(8, low=1, high=10_000, read_with=IF_PAIRS)
    """Key-value pairs of a sequence, with distractors; in mqar, copy and induction this number,
    half or a quarter of it."""
    keys: int = key(16, low=1, high=10_000, read_with=IF_PAIRS)
    """Different keys, of which each sequence draws some (recall tasks, needles; variables of
    tracking)."""
    values: int = key(16, low=2, high=10_000, read_with=IF_MADE)
    """Different values; chance is one over their number (sets made on the fly)."""
    fillers: int = key(16, low=1, high=10_000, read_with=IF_MADE)
    """Different tokens that the filler is drawn from (sets made on the fly)."""
    sequences: int = key(256, low=1, high=2**20, read_with=IF_MADE)
    """Sequences of each held-out split (sets made on the fly)."""
    distance: int = key(
        0,
        low=0,
        high=POSITIONS,
        read_with={"data.name": ("mqar", "copy", "induction", "masked", *LONG_CONTEXT)},
        since=Since("0.2.0", 0),
    )
    """Smallest distance in tokens between a pair and its question; all pairs come first but in
    data=induction."""
    queries: int = key(
        1,
        low=1,
        high=10_000,
        read_with={"data.name": LONG_CONTEXT},
        since=Since("0.4.0", 1),
    )
    """Questions at the end: keys (needles), chains (tracking); or the most frequent values
    (counting)."""
    needle_values: int = key(
        1,
        low=1,
        high=10_000,
        read_with={"data.name": ("needles",)},
        since=Since("0.4.0", 1),
    )
    """Values of each key, each in a pair of its own (data=needles)."""
    hops: int = key(
        2,
        low=1,
        high=10_000,
        read_with={"data.name": ("tracking",)},
        since=Since("0.4.0", 2),
    )
    """Assignments of a chain; a question is 1 to this many away from its value (data=tracking)."""
    gaps: Literal["uniform", "power"] = key(
        "uniform", read_with={"data.name": ("mqar", "copy")}, since=Since("0.2.0", "uniform")
    )
    """Positions of questions after that: drawn evenly, or by a power law of their distance as
    Zoology's (mqar, copy)."""


@dataclass
class RoutingConfig:
    """The content-based heads: how many, where, and how a position chooses its cluster."""

    selection: str = key("causal", names=SELECTIONS)
    """What a head reads: a cluster (causal, nearest, random; topk, Algorithm 1: sees the future),
    or chosen keys."""
    keys: Literal["shared", "separate", "tied", "projected"] = "shared"
    """Keys: the queries; others, chosen apart (separate); such by W_Q (tied); clustered by W_R (q +
    k) (projected)."""
    heads: int = key(4, low=0, high=2**20)
    """Routing heads in each routing layer; the other heads use the base pattern."""
    layers: int = key(2, low=0, high=1024)
    """Routing layers, counted from the top of the model."""
    window: int = key(256, low=1, high=POSITIONS)
    """Attention window W: keys per query and cluster at the most."""
    candidates: int | None = key(
        None,
        low=1,
        high=POSITIONS,
        read_with={"routing.selection": ("probed",)},
        since=Since("0.4.0", None),
    )
    """Keys for which a query probes clusters, to read the W best; unset: W, all of them read
    (selection=probed)."""
    clusters: int | None = key(
        None, low=1, high=POSITIONS, read_with={"routing.selection": (*CLUSTERED, "probed")}
    )
    """Clusters C of each routing head; unset: ceil(N / W)."""
    logit_scale: Literal["sqrt_d", "none", "unit"] = "sqrt_d"
    """Logits divided by sqrt(D), not at all (as Algorithm 1 prints it), or by D (unit vectors, as
    its comment has)."""
    qk_norm: bool = key(False, read_with={"routing.selection": CHOSEN}, since=Since("0.4.0", False))
    """Normalise queries and keys as heads of clusters do, by LayerNorm without a scale (exact,
    probed, indexer, blocks)."""
    group: Literal["shared", "own"] = key("shared", since=Since("0.4.0", "shared"))
    """With model.kv_heads: query heads that share keys choose together by their mean query
    (shared), or each by itself (own)."""
    attend_self: bool | None = None
    """Whether a position may always read itself; false: only where there is no other key; unset:
    not where queries are keys."""
    merge: Literal["mean", "lse"] = key(
        "mean", read_with={"routing.selection": CLUSTERED}, since=Since("0.2.2", "mean")
    )
    """In several clusters: mean of outputs (as the released code) or one softmax over all keys
    (lse)."""
    update: Literal["members", "nearest", "sum"] = key("members", read_with=IF_CENTROIDS)
    """Centroid step: mean of members (ours), of the nearest (near the code's), sum (Algorithm
    1)."""
    decay: float = key(0.999, low=0.0, high=1.0, read_with={"routing.selection": CENTROIDS})
    """Share of a centroid that survives one optimizer step."""
    threshold_rate: float = key(
        0.1, low=0.0, high=10.0, read_with={"routing.selection": ("causal",)}
    )
    """Deviations of the scores by which a threshold moves for each W of members too many
    (selection=causal)."""
    init: Literal["random", "data"] = key("random", read_with=IF_CENTROIDS)
    """Centroids start as random directions, or as queries of the first training sequence."""
    commitment: float = key(0.0, low=0.0, high=LARGEST, read_with=IF_CENTROIDS)
    """Weight of the loss that pulls queries to their centroid (both released codes: 1e-4; the
    paper: none)."""
    block: int = key(
        16, low=1, high=POSITIONS, read_with={"routing.selection": ("blocks", "blocks_random")}
    )
    """Positions of a block (selection=blocks and blocks_random)."""
    compressed: bool = key(False, read_with={"routing.selection": ("blocks",)})
    """Attend over the means of blocks, too, joined by gates: gradients train the choice
    (selection=blocks)."""
    warmup: int = key(0, low=0, high=STEPS, read_with={"routing.selection": ("indexer",)})
    """Optimizer steps for which heads of selection=indexer read everything."""
    key_shift: int = key(0, low=0, high=POSITIONS)
    """Positions by which keys apart from queries look back: 1 lets a head match "the token before
    was A"."""
    key_conv: int = key(1, low=1, high=64)
    """Keys that a causal convolution adds to keys apart from queries; 1: none."""
    rotary: bool = key(True, read_with={"model.positions": ("rotary",)}, since=Since("0.2.0", True))
    """Whether model.positions=rotary turns routing heads, too; false: they attend by content alone,
    at any distance."""
    key_loss: float = key(0.0, low=0.0, high=LARGEST, since=Since("0.2.0", 0.0))
    """Weight of the loss that pulls the separate matrices of queries and keys together (the paper's
    first)."""


@dataclass
class ModelConfig:
    """The decoder: its size, blocks and position terms."""

    name: str = key("custom", changes=NOTHING)
    """Name of the preset, for records only."""
    start: str | None = key(None, since=Since("0.5.0", None))
    """Folder of a Llama-type model (config.json, *.safetensors) to start from; it sets the keys
    that its weights need."""
    layers: int = key(4, low=1, high=1024)
    """Decoder blocks."""
    heads: int = key(8, low=1, high=2**20)
    """Attention heads in each block."""
    kv_heads: int | None = key(None, low=1, high=2**20, since=Since("0.4.0", None))
    """Heads of keys and values in each block, each shared by heads / kv_heads query heads (grouped
    queries); unset: as many as heads."""
    hidden: int = key(256, low=1, high=2**16)
    """Width of the residual stream; a head has the size hidden / heads."""
    causal: bool = key(True, since=Since("0.5.0", True))
    """Whether a position reads earlier ones alone; false: both sides, an encoder that predicts
    hidden units (data=masked)."""
    base: str = key("local", names=BASES, joined=True)
    """Pattern of all heads that do not route; local+full shares them out evenly, local+local+lsh
    two to one."""
    # Read whatever the heads: the score of a text counts a repeat as far by it.
    window: int = key(256, low=1, high=POSITIONS)
    """Keys that a local head sees, its own position included."""
    attend_self: bool = key(
        True,
        read_with={"model.base": ("full", "local", "recurrent", *SPARSE)},
        since=Since("0.2.0", True),
    )
    """Whether heads that choose by position may always read their own; false: only where there is
    no other key."""
    stride: int = key(128, low=1, high=POSITIONS, read_with={"model.base": SPARSE})
    """Stride of strided heads, block of fixed heads (Sparse Transformer)."""
    summary: int = key(
        8, low=1, high=POSITIONS, read_with={"model.base": ("fixed", "fixed_summary")}
    )
    """Columns of every earlier block that a fixed head reads (Sparse Transformer)."""
    memory: int = key(
        0,
        low=0,
        high=POSITIONS,
        read_with=IF_RECURRENT,
        since=Since("0.2.0", 0),
    )
    """Positions of earlier segments that base=recurrent, which trains on streams, reads, too
    (Transformer-XL)."""
    compressed: int = key(
        0,
        low=0,
        high=POSITIONS,
        read_with=IF_RECURRENT,
        since=Since("0.2.0", 0),
    )
    """Compressed positions that base=recurrent reads before its memory, too (Compressive
    Transformer)."""
    compression: Literal["conv", "mean", "max"] = key(
        "conv", read_with=IF_RECURRENT, since=Since("0.2.0", "conv")
    )
    """What makes one compressed position of several: a convolution that learns, their mean, or
    their maximum."""
    compression_rate: int = key(
        2,
        low=1,
        high=1024,
        read_with=IF_RECURRENT,
        since=Since("0.2.0", 2),
    )
    """Positions that make one compressed position."""
    same_length: bool = key(False, read_with=IF_RECURRENT, since=Since("0.2.0", False))
    """Whether every position of base=recurrent reads equally many keys, model.memory with its
    own."""
    positions: Literal["rotary", "shaw", "xl", "learned", "axial", "none"] = "rotary"
    """Position terms: rotary angles, Shaw's tables, Transformer-XL's sinusoids, a learned table,
    one an axis, none."""
    rotary_base: float = key(
        10_000.0,
        above=1.0,
        high=LARGEST,
        read_with={"model.positions": ("rotary",)},
        since=Since("0.4.0", 10_000.0),
    )
    """Base of rotary angles: the slowest pair of columns turns by about one radian in as many
    positions."""
    clamp: int | None = key(
        None, low=1, high=POSITIONS, read_with=IF_XL, since=Since("0.2.0", None)
    )
    """Largest distance that positions=xl tells apart; unset: any."""
    tie_biases: bool = key(True, read_with=IF_XL, since=Since("0.2.0", True))
    """Whether all layers share the biases u and v of positions=xl, as Transformer-XL's PyTorch code
    has it."""
    axes: str | None = key(None, read_with={"model.positions": ("axial",)})
    """Sizes of the axes of positions=axial, slowest first, such as 32x32x3; their product is
    data.length."""
    max_distance: int = key(256, low=1, high=POSITIONS, read_with={"model.positions": ("shaw",)})
    """Largest distance that positions=shaw tells apart."""
    norm: Literal["pre", "post"] = "pre"
    """Norm before each sub-layer, or after its residual sum."""
    norm_kind: Literal["layernorm", "rmsnorm"] = key("layernorm", since=Since("0.4.0", "layernorm"))
    """Kind of all norms of the blocks: LayerNorm, or RMSNorm, which has no mean and no bias."""
    norm_eps: float = key(1e-5, above=0.0, high=1.0, since=Since("0.4.0", 1e-5))
    """Number that these norms add to the mean square before its root."""
    qk_norm: bool = key(False, since=Since("0.4.0", False))
    """Normalise queries and keys by norms that learn a scale, in all heads but those that Algorithm
    1 or routing.qk_norm normalises."""
    sinks: bool = key(False, since=Since("0.4.0", False))
    """Give every head a learned logit without a value, so that its softmaxes may attend to
    nothing."""
    ffn: Literal["gelu", "relu", "geglu", "swiglu"] = "gelu"
    """Activation of the feed-forward layer; geglu and swiglu gate with a third matrix, without
    biases."""
    ffn_hidden: int = key(1024, low=1, high=2**20)
    """Hidden width of the feed-forward layer."""
    dropout: float = key(0.0, low=0.0, high=0.95)
    """Dropout on the embedding and on what each sub-layer adds to the residual stream."""
    attention_dropout: float = key(0.0, low=0.0, high=0.95)
    """Dropout on attention weights."""
    ffn_dropout: float = key(0.0, low=0.0, high=0.95)
    """Dropout on the feed-forward layer's hidden activations (the papers' ReLU dropout)."""
    embedding: int | Literal["adaptive"] | None = key(None, low=1, high=2**20)
    """Width of token embeddings where it differs from hidden; adaptive: bands, narrower for rarer
    words."""
    cutoffs: str | None = key(None, read_with=IF_BANDS, since=Since("0.2.0", None))
    """Ids before which the bands of embedding=adaptive end but the last, such as 20000x60000
    (tokenizer=words)."""
    band_factor: int = key(
        4,
        low=1,
        high=2**20,
        read_with=IF_BANDS,
        since=Since("0.2.0", 4),
    )
    """How many times each band of embedding=adaptive is narrower than the one before."""
    tie_embeddings: bool = False
    """Use the embedding table as the output matrix (adaptive: tables and matrices of all bands)."""
    lsh: Literal["causal", "reformer"] = key("causal", read_with=IF_LSH)
    """What base=lsh reads: a bucket's last window (causal), or sorted chunks, which see the future
    (as published)."""
    hash_rounds: int = key(1, low=1, high=1_000, read_with=IF_LSH)
    """Hash rounds of base=lsh; a head reads the keys of all of them."""
    hash_buckets: int | None = key(None, low=2, high=2**20, read_with=IF_LSH)
    """Buckets of each round of base=lsh, an even number; unset: about 2 N / model.window."""
    span_ramp: int = key(32, low=1, high=POSITIONS, read_with=IF_SPAN)
    """Positions over which a span of base=adaptive_span fades out."""
    span_cost: float = key(0.0, low=0.0, high=LARGEST, read_with=IF_SPAN)
    """Weight of each layer's mean span in the loss (base=adaptive_span; released code: 5e-7)."""
    init: Literal["fan_in", "depth_scaled"] = "fan_in"
    """Weights at the start: by fan-in, or as in the Sparse Transformer, smaller, for models of many
    layers."""
    # No new cell: `auto` is decided by this machine's memory, and again when memory runs out.
    recompute: bool | Literal["auto"] = key("auto", changes=COST)
    """Recompute each block in the backward pass instead of storing its activations; auto: where
    memory requires it."""
    # A report has one row for all values, as for recompute. Two values are two cells of a sweep,
    # unlike those of recompute: no run chooses this value itself, and people list several to
    # compare memory and time.
    ffn_parts: int = key(1, low=1, high=4096, changes=ROUNDING)
    """Parts of the rows that the feed-forward layer takes in turn, and again in the backward pass;
    1: all at once."""


@dataclass
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    name: Literal["adam", "adamw", "adafactor", "muon"] = "adam"
    """Optimizer: adam (the paper's), adamw (decoupled weight decay), adafactor (the paper's for
    PG-19), muon (with adamw)."""
    lr: float = key(2e-4, above=0.0, high=LARGEST)
    """Peak learning rate."""
    beta1: float = key(0.9, low=0.0, high=0.9999, read_with=IF_ADAM)
    """Decay of the first moment (adam, adamw, and muon for what adamw updates)."""
    beta2: float = key(0.98, low=0.0, high=0.99999, read_with=IF_ADAM)
    """Decay of the second moment (adam, adamw, and muon for what adamw updates)."""
    momentum: float = key(
        0.95,
        low=0.0,
        high=0.9999,
        read_with={"optimizer.name": ("muon",)},
        since=Since("0.4.0", 0.95),
    )
    """Momentum of the matrices that muon updates."""
    weight_decay: float = key(0.0, low=0.0, high=LARGEST)
    """Weight decay of linear layers and of an untied output matrix; biases, norms and tables have
    none."""
    schedule: Literal["rsqrt", "cosine", "constant"] = "rsqrt"
    """After the warm-up: peak * sqrt(warmup / step), a cosine to a tenth of the peak at
    trainer.steps, or flat."""
    warmup: int = key(4000, low=0, high=STEPS)
    """Steps of linear warm-up."""
    # trainer.steps, which follows it, is the number that a run trains.
    steps: int = key(200_000, low=1, high=STEPS, changes=NOTHING)
    """Steps that this optimizer's preset is made for; trainer.steps follows it unless set."""


@dataclass
class HardwareConfig:
    """Where and with what arithmetic the run computes."""

    name: Literal["auto", "cpu", "gpu", "ddp", "fsdp"] = key(
        "auto", changes=ROUNDING, one_device=True
    )
    """auto: a GPU if there is one; ddp: a process per device; fsdp: weights and optimizer shared
    out, too."""
    devices: int | None = key(None, low=1, high=1024, changes=ROUNDING)
    """Processes on each machine; unset: one, or with ddp and fsdp those that a launcher started,
    else all GPUs."""
    nodes: int = key(1, low=1, high=2**16, changes=ROUNDING)
    """Machines that share the run."""
    # More than rounding: bf16-true trains another model than fp32. A resume may still change it,
    # for a run that goes on elsewhere, and says so.
    precision: Literal["auto", "fp32", "bf16", "bf16-true", "tf32", "fp64"] = key(
        "auto", changes=CONTINUATION, one_device=True
    )
    """Arithmetic: bf16 (mixed), bf16-true (weights, too), fp32, tf32 (GPU), fp64; auto: bf16 on a
    GPU, else fp32."""
    # One row of a report, as with `products`, `graphs` and `loss`: all compute the same formula.
    attention: Literal["auto", "torch", "native", "triton", "flex"] = key("auto", changes=ROUNDING)
    """torch's, C++ built here (native; fp32, CPU), our GPU kernels (triton), FlexAttention (flex);
    auto: fastest."""
    products: Literal["onednn", "torch"] = key(
        "onednn", changes=ROUNDING, since=Since("0.2.1", "onednn")
    )
    """Large products with weights in fp32 on a CPU: oneDNN's, or torch's own (MKL: may be faster on
    Intel)."""
    compile: bool | Literal["auto"] = key("auto", changes=ROUNDING)
    """Compile the model with torch.compile; auto: on a GPU where Triton and a C compiler are, not
    on a CPU."""
    graphs: bool | Literal["auto"] = key("auto", changes=ROUNDING, since=Since("0.4.0", "auto"))
    """Record the passes of a step as CUDA graphs, whose kernels a CPU starts at once; auto: on one
    GPU, if possible."""
    loss: Literal["auto", "torch", "liger"] = key(
        "auto", changes=ROUNDING, since=Since("0.4.0", "auto")
    )
    """Training loss: torch's, or Liger-Kernel's (GPU; needs rtx[liger]); auto: torch's, until the
    other is measured."""
    deterministic: bool = key(False, changes=ROUNDING, one_device=True)
    """Use only deterministic GPU kernels, so that the same seed gives the same bits."""
    threads: int | None = key(None, low=1, high=1024, changes=ROUNDING, one_device=True)
    """CPU threads of each process; unset: torch's own choice, or its share of the cores. Bits
    depend on it."""
    workers: int | Literal["auto"] = key("auto", low=0, high=256, changes=NOTHING)
    """Processes that prepare batches ahead; 0: in the training process; auto: 2 on a GPU, 0 on a
    CPU."""


@dataclass
class LoggerConfig:
    """Where metrics go besides metrics.jsonl; `logger=[csv,wandb]` chooses several."""

    wandb: bool = key(False, changes=NOTHING)
    """Write to Weights & Biases."""
    csv: bool = key(False, changes=NOTHING)
    """Write tables, csv/version_N/metrics.csv in the run folder."""
    tensorboard: bool = key(False, changes=NOTHING)
    """Write TensorBoard events, tensorboard/ in the run folder."""
    mode: Literal["auto", "online", "offline"] = key("auto", changes=NOTHING, read_with=IF_WANDB)
    """Weights & Biases online, or offline to be uploaded later; auto: online with a key, else
    offline."""
    project: str = key("rtx", changes=NOTHING, read_with=IF_WANDB)
    """Weights & Biases project."""
    entity: str | None = key(None, changes=NOTHING, read_with=IF_WANDB)
    """Weights & Biases team or user; unset: your default."""
    group: str | None = key(None, changes=NOTHING, read_with=IF_WANDB)
    """Weights & Biases group; unset: the name of the sweep, for its runs."""


@dataclass
class TrainerConfig:
    """The training loop, counted in optimizer steps."""

    steps: int = key(200_000, low=1, high=STEPS, changes=CONTINUATION)
    """Optimizer steps to train; unset: optimizer.steps."""
    max_minutes: float | None = key(None, above=0.0, high=1e9, changes=CONTINUATION)
    """Stop, and save, after this many minutes of training if the steps are not done by then."""
    batch_size: int = key(8, low=1, high=2**20)
    """Sequences per optimizer step, over all devices and micro-batches."""
    # No new cell: `auto` is decided by this machine's memory, and again when memory runs out.
    micro_batch_size: int | Literal["auto"] = key("auto", low=1, high=2**20, changes=COST)
    """Sequences per device and forward pass; auto: as many as the device holds, by the count of rtx
    plan."""
    clip: float = key(1.0, low=0.0, high=LARGEST)
    """Largest norm of the whole gradient; 0: no clipping."""
    val_every: int = key(250, low=1, high=STEPS, changes=SCHEDULE)
    """Steps between validations; the last step is always validated."""
    val_windows: int | None = key(64, low=1, high=WINDOWS, changes=SCHEDULE)
    """Windows scored in a validation during training (the same ones every time); unset: the whole
    split."""
    # One row of a report, as with `val_windows`: a score says its protocol, stride and windows
    # included, and a table has scores of one protocol.
    val_stride: int | None = key(None, low=1, high=POSITIONS, changes=SCHEDULE)
    """Tokens by which the windows of a validation advance; unset: N. Smaller gives every token more
    context."""
    # No new cell: the score says how many windows it is of, and `auto` goes by the time.
    final_windows: int | Literal["auto"] | None = key("auto", low=1, high=WINDOWS, changes=COST)
    """Windows of the closing score; auto: all, or a sample in a tenth of the training time (or 30
    s); null: all."""
    checkpoint_every: int = key(250, low=1, high=STEPS, changes=COST)
    """Steps between checkpoints; one is also written at the end and on a signal."""
    # A new cell, for the curve in metrics.jsonl is a result of a cell.
    log_every: int = key(10, low=1, high=STEPS, changes=SCHEDULE)
    """Steps between rows in metrics.jsonl."""
    profile: int | None = key(None, low=1, high=1000, changes=NOTHING)
    """Steps to record with torch.profiler, after the first few, in the run's trace.json.gz (for
    Perfetto)."""
    overfit_batches: int | None = key(None, low=1, high=STEPS, since=Since("0.4.0", None))
    """Train on the batches of this many first steps alone, again and again; unset: on all."""


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
    extensions: str | None = key(None, since=Since("0.2.0", None))
    """Python file or installed module, or several with : between, whose code registers patterns or
    data sets; a run records its sha256."""
    seed: int = key(0, low=0, high=2**32 - 1, changes=REPETITION)
    """Seed of weights, batches, dropout, random heads, and of the windows that rtx eval limit=
    draws."""
    name: str = key("rtx", changes=NOTHING)
    """Folder of the run below outputs/, and its name in Weights & Biases."""


def all_fields() -> dict[str, Field]:
    """Every key of a run's configuration."""
    add_installed()
    return fields_of(Config)


@functools.cache
def settings() -> dict[str, Field]:
    """The groups, whose values are the files of `conf/<group>/`, and every key."""
    keys = all_fields()
    groups: dict[str, Field] = {}
    for group in GROUPS:
        names = option_words(group)
        if group == "data":
            names += tuple(name for name in SETS if name in REGISTERED)
        groups[group] = Field(
            group,
            str,
            default=None,
            doc=f"a file of conf/{group}/",
            optional=group in UNSET_GROUPS,
            values=names,
            extensible=group == "data",
        )
    return groups | keys


CACHES.append(settings.cache_clear)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries as one with dotted keys."""
    dotted: dict[str, Any] = {}
    for name, value in values.items():
        if name in SECTIONS and isinstance(value, Mapping):
            section = cast(Mapping[str, Any], value)
            dotted |= {f"{name}.{inner}": inner_value for inner, inner_value in section.items()}
        else:
            dotted[name] = value
    return dotted


def to_dict(config: Config) -> dict[str, Any]:
    """Return the values of a configuration as nested dictionaries."""
    return dataclasses.asdict(config)


def to_config(values: Mapping[str, Any]) -> Config:
    """Return the configuration of nested or dotted values, each of the right type and range.

    A missing key gets its `since` value: the record is older than the key. One without a `since`
    value gets its default.
    """
    fields = all_fields()
    dotted = {name: field.since.value for name, field in fields.items() if field.since}
    for name, value in flat(values).items():
        if name not in fields:
            raise UserError(unknown(str(name), [*SECTIONS, *fields]))
        if isinstance(value, (dict, list)):
            raise UserError(f"{name} must be one value")
        refuse_non_utf8(name, str(value))
        dotted[name] = fields[name].read(value)
    return with_values(Config(), dotted)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a configuration with other values at some dotted keys.

    A value may be a section as a whole; those of its keys are set on top of it.
    """
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        by_section.setdefault(section, {})[key] = value
    config = replace(config, **by_section.pop("", {}))
    # Each section is copied once, not once for each of its keys.
    changed = {
        section: replace(getattr(config, section), **keys) for section, keys in by_section.items()
    }
    return replace(config, **changed)
