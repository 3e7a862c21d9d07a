"""How much memory training steps take: what one device holds at its fullest moment; and which micro-batch it holds.

Sizes are in bytes. Counted is what `rtx/model` and `rtx.attention.engine` keep for the backward pass, tensor by tensor,
and what they work with; not what an allocator loses in holes, nor the program itself. `benchmarks/footprint.py` sets it
beside real runs on CPUs, `benchmarks/gpu.py` beside steps on a GPU, where figures follow the engines there
(gpu_memory.py). Letters: h values of the residual stream of a position, F of the feed-forward layer; N positions.
"""

import itertools
import math
from typing import NamedTuple

import torch

from rtx.analysis.cost import Cost, cost
from rtx.analysis.engines import computed, parts_of
from rtx.analysis.gpu_memory import INDEX, SHORT_INDEX, Kept, kept_by_engine
from rtx.attention.blocks import Blocks
from rtx.attention.clusters import Random
from rtx.attention.engine import native
from rtx.attention.engine.blocks import MAX_MASK, MAX_SCORES_CPU, MAX_SCORES_GPU, cut
from rtx.attention.indexer import Indexer
from rtx.attention.lsh import Lsh
from rtx.attention.pattern import Pattern
from rtx.attention.reads import IndexReads, Reads
from rtx.attention.routing import ROOM, Routing
from rtx.attention.top_keys import TopKeys
from rtx.model.heads import make_pattern
from rtx.model.likelihood import most_logits
from rtx.settings.derived import (
    ROUTED,
    clusters,
    embedding_width,
    layer_patterns,
    memory_slots,
    sizes_of,
)
from rtx.settings.devices import precision_on
from rtx.settings.schema import Config, with_values

FILLED, FILLED_CPU = 0.85, 0.4
"""Part of a GPU's or a machine's memory that a run is planned to fill: the rest is for what the plan does not count (a
GPU's context; the program, and holes in the heap, by which a CPU's process takes up to 2.3 times the plan)."""


WORKSPACES = 2 * 2**25
"""What cuBLAS keeps on a GPU: 32 MiB for the thread of the forward and for that of the backward pass, as an H100 has
shown."""


def on_gpu(config: Config) -> bool:
    """Tell whether a run would compute on a GPU: where it is asked for, or left open and one is here."""
    return config.hardware.name == "gpu" or (
        config.hardware.name != "cpu" and torch.cuda.device_count() > 0
    )


def widths_of(config: Config) -> tuple[int, int]:
    """Return the bytes of a value: of weights, gradients and the residual stream, and of what matrix products read."""
    precision = precision_on(config.hardware, on_gpu(config))
    wide = {"fp64": 8, "bf16-true": 2}.get(precision, 4)
    return wide, 2 if precision == "bf16" else wide


def devices(config: Config) -> int:
    """Return how many devices share a step."""
    return (config.hardware.devices or 1) * config.hardware.nodes


def footprint(config: Config, total: Cost, micro_batch: int, vocabulary: int) -> dict[str, float]:
    """Return the parts of the peak, in bytes on each device; their sum is the peak."""
    (wide, narrow), adafactor = widths_of(config), config.optimizer.name == "adafactor"
    shares = devices(config) if config.hardware.name == "fsdp" else 1
    own, outside, M = (
        total.parameters / shares,
        total.embedding_parameters,
        memory_slots(config.model),
    )
    # Shared out, the embedding and output matrices stay whole from the forward to the end of the backward pass, one
    # block is whole at a time, and so are their gradients before they are shared out.
    gathered = (
        wide * (outside + (total.parameters - outside) / config.model.layers) if shares > 1 else 0.0
    )
    gradients, activations, working = max(
        moments(config, wide * own, gathered, micro_batch, vocabulary), key=sum
    )
    memories = config.trainer.batch_size / devices(config) + micro_batch
    return {
        # Autocast holds on to the weights that it has narrowed.
        "weights": (wide + (narrow if narrow < wide else 0)) * own,
        "gradients": gradients,
        # Adam keeps two moments; Adafactor a row and a column for each matrix.
        "optimizer": (0.02 if adafactor else 2) * wide * own,
        "activations": activations,
        "temporary": working,
        **({"libraries": WORKSPACES} if on_gpu(config) else {}),
        # What every layer of every stream keeps of earlier segments, and of a micro-batch what replaces it.
        **(
            {"memory": wide * config.model.hidden * config.model.layers * M * memories} if M else {}
        ),
    }


def moments(
    config: Config, gradients: float, gathered: float, micro_batch: int, vocabulary: int
) -> list[tuple[float, float, float]]:
    """Return gradients, activations and working memory of the moments of a step of which one is the fullest.

    Activations grow to the end of the forward pass, gradients (there before it if micro-batches have gone before) to
    the end of the backward pass; they are freed behind the optimizer's step.
    """
    wide, model, rows = widths_of(config)[0], config.model, micro_batch * config.data.length
    blocks = [block(config, layer, micro_batch) for layer in range(model.layers)]
    again = max(kept for kept, _ in blocks) * rows if model.recompute is True else 0.0
    work = max(work for _, work in blocks) * rows
    earlier = gradients if config.trainer.batch_size > micro_batch * devices(config) else 0.0
    ends = sizes_of(model.cutoffs) if model.embedding == "adaptive" else ()
    logits, pieces = logits_bytes(
        config, rows, max(ends[0], vocabulary // 4) if ends else vocabulary
    )
    kept = saved(config, micro_batch)
    sizes = [stop - start for start, stop in itertools.pairwise([0, *ends, vocabulary])]
    width = embedding_width(model)
    output = wide * sum(size * width // model.band_factor**band for band, size in enumerate(sizes))
    # Where the output matrix's gradient adds up over pieces of the rows: the sum, a piece's, a copy in its layout.
    summed = output * min(3, pieces)
    return [
        (earlier, kept, gathered + 2 * logits),
        (earlier, kept, 2 * gathered + 3 * logits + summed),
        (earlier, kept, 2 * gathered + again + output + work),
        (gradients, blocks[0][0] * rows, 2 * gathered + work),
        # Adafactor works with one more copy of the largest weight.
        (gradients, 0.0, output if config.optimizer.name == "adafactor" else 0.0),
    ]


def saved(config: Config, micro_batch: int) -> float:
    """Return the bytes that a forward pass of training leaves for the backward pass, but for the logits."""
    model, (wide, narrow), rows = config.model, widths_of(config), micro_batch * config.data.length
    if model.recompute is True:  # a block keeps its input alone
        inside = float(wide * model.hidden * model.layers)
    else:
        inside = sum(block(config, layer, micro_batch)[0] for layer in range(model.layers))
    inside += members_bytes(config)
    # The ids; the last norm's input, and what the output matrix reads; a dropout's factors on the embedding.
    ends = INDEX + wide * model.hidden * ((model.norm == "pre") + (model.dropout > 0))
    return rows * (inside + ends + narrow * embedding_width(model))


def members_bytes(config: Config) -> float:
    """Return the bytes a position of the members that telemetry counts, those of queries and of keys."""
    routing, N = config.routing, config.data.length
    if routing.selection not in ("topk", "causal", "nearest"):
        return 0.0
    members = N if routing.selection == "nearest" else clusters(config) * min(routing.window, N)
    each = INDEX
    if on_gpu(config):
        if config.model.recompute is not True:
            return 0.0  # they are the kernels' lists, which are counted
        each = SHORT_INDEX
        if routing.selection == "causal":
            members = min(ROOM * max(N, members), N * clusters(config))
    return (
        each
        * routing.heads
        * routing.layers
        * members
        / N
        * (1 + (routing.keys in ("separate", "tied")))
    )


def logits_bytes(config: Config, rows: int, vocabulary: int) -> tuple[float, int]:
    """Return the bytes of one copy of the logits that are held at once, and in how many pieces they are worked out.

    One copy is kept, or of several pieces none; two are there when they are made, three when their gradient is.
    """
    most = most_logits(on_gpu(config))
    pieces = math.ceil(rows / max(1, most // vocabulary))
    return float(max(4, widths_of(config)[0])) * (
        rows * vocabulary if pieces == 1 else most
    ), pieces


def block(config: Config, layer: int, micro_batch: int) -> tuple[float, float]:
    """Return what a block keeps for the backward pass, and the most that this then holds on top, per position."""
    model, (wide, narrow) = config.model, widths_of(config)
    h, F = model.hidden, model.ffn_hidden
    dropped = narrow * h if model.dropout else 0
    attention, gradients = attention_bytes(config, layer, micro_batch)
    # GELU keeps what it reads, ReLU what it gives; the product behind keeps what it reads. GEGLU reads both halves of
    # one tensor, and its product keeps a factor more. Dropout keeps its factors and, behind ReLU, its result.
    factor = {"gelu": 2, "relu": 1, "geglu": 4}[model.ffn]
    factor += (2 if model.ffn == "relu" else 1) if model.ffn_dropout else 0
    # Each branch has one wide value of the stream and one that its first product reads. In parts, the hidden units are
    # worked out again in the backward pass, and nothing of them is kept.
    pieces, hidden = model.ffn_parts, narrow * F * factor
    feed_forward = (hidden if pieces == 1 else 0) + (wide + narrow) * h + dropped
    rest = (wide + 2 * narrow) * h + dropped  # the stream, the attention's norm, its joined heads
    # Of a memory: beside the stream, what the norm and the product behind it read, and the queries that are not asked.
    rest += memory_slots(model) / config.data.length * (wide + 2 * narrow) * h
    # Backward, the gradients of the stream and of the branch are there, and of the hidden units two or three copies
    # while the product's own input is freed; later, the feed-forward branch is gone, and every vector that the heads
    # keep gets a gradient.
    hidden_work = (wide + narrow) * h + narrow * F * {"gelu": 1, "relu": 2, "geglu": 2}[
        model.ffn
    ] / pieces
    hidden_work += hidden / pieces if pieces > 1 else 0
    attention_work = (wide + 2 * narrow) * h + gradients - feed_forward
    return attention + feed_forward + rest, max(hidden_work, attention_work, 0.0)


_kept: dict[str, Kept] = {}


def attention_bytes(config: Config, layer: int, micro_batch: int) -> tuple[float, float]:
    """Return what the heads of a block keep, and what they hold on top in the backward pass, per position."""
    N, groups, each = config.data.length, layer_patterns(config, layer), []
    for name, count in groups.items():
        key = repr((name, config.model, config.routing, N, config.hardware, on_gpu(config)))
        if key not in _kept:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                _kept[key] = kept(make_pattern(name, 1, config, layer).eval(), config)
        each.append((count, _kept[key]))
    work = sum(count * (head.vectors - head.freed) for count, head in each) / N
    total = sum(count * (head.vectors - head.inside + head.others) for count, head in each) / N
    if any(head.projection for _, head in each):
        own_keys = {"lsh": False, ROUTED: config.routing.keys in ("separate", "projected")}
        columns = sum(count * (2 + own_keys.get(name, True)) for name, count in groups.items())
        total += columns * widths_of(config)[1] * config.model.hidden // config.model.heads
    work += max(count * head.passing for count, head in each) / N
    return total, work + max(head.again for _, head in each) / (N * micro_batch)


def kept(pattern: Pattern, config: Config) -> Kept:
    """Count what a pattern of one head keeps, from what it reads of random vectors; nothing is attended."""
    model, N, (_, narrow) = config.model, config.data.length, widths_of(config)
    size, normalises = model.hidden // model.heads, isinstance(pattern, Routing | Random)
    parts = parts_of(pattern, config, on_gpu(config))
    if on_gpu(config):
        found = kept_on_gpu(pattern, parts, config)
    else:
        joined = len(parts) > 1 or pattern.merge == "lse"
        found = [kept_of(part, pattern, config, joined, first=part is parts[0]) for part in parts]
    vectors, others = sum(one.vectors for one in found), sum(one.others for one in found)
    compressed = isinstance(pattern, Blocks) and config.routing.compressed
    if isinstance(
        pattern, TopKeys
    ):  # what a convolution of keys reads and gives; both branches and what gates them
        vectors += N * narrow * (2 * (config.routing.key_conv > 1) + 4 * compressed)
    if isinstance(pattern, Indexer):  # what it makes of queries and of keys
        vectors += N * narrow * 2 * pattern.query_HDE.shape[-1] / size
    # Our kernel reads what the projection gave in any type; torch's norm reads a wide copy of narrow vectors.
    copies = (
        normalises and narrow < 4 and not (on_gpu(config) and config.hardware.attention != "torch")
    )
    if copies:
        vectors += 4 * N * (1 + pattern.has_keys)
    projection = (normalises and not copies) or compressed or isinstance(pattern, Lsh | Indexer)
    all_kept = Kept(
        vectors=vectors * size,
        others=others,
        again=max(one.again for one in found),
        projection=projection or any(one.projection for one in found),
        freed=sum(one.freed for one in found) * size,
        inside=sum(one.inside for one in found) * size,
        passing=max(one.passing for one in found),
    )
    if (
        isinstance(pattern, Indexer) and pattern.dense
    ):  # and behind these steps by an index, where that keeps more
        pattern.set_steps(pattern.warmup)
        later = kept(pattern, config)
        most = max(all_kept, later, key=lambda one: one.vectors + one.others)
        return most._replace(again=max(all_kept.again, later.again))
    return all_kept


def kept_on_gpu(pattern: Pattern, parts: list[Reads], config: Config) -> list[Kept]:
    """Count what the parts of what a head reads keep on a GPU, vectors in values."""
    narrow, joined = widths_of(config)[1], len(parts) > 1 or pattern.merge == "lse"
    found = []
    for one in computed(pattern, parts, config):
        first = one.problem.part is parts[0]
        counted = kept_by_engine(one, pattern, config, narrow, first)
        if counted is None:
            counted = kept_of(one.problem.part, pattern, config, joined, first)
        found.append(counted)
    return found


def kept_of(part: Reads, pattern: Pattern, config: Config, joined: bool, first: bool) -> Kept:
    """Count what a part of what a head reads keeps, vectors in values; see `rtx.attention.engine.attend`.

    `first`: of the parts, which share queries, keys and values.
    """
    model, N, (wide, narrow), gpu = (
        config.model,
        config.data.length,
        widths_of(config),
        on_gpu(config),
    )
    shaw, wish = model.positions in ("shaw", "xl"), config.hardware.attention
    by_distance = shaw or pattern.terms(model.hidden // model.heads, None).by_distance
    native_wished = native.wanted(wish, N)
    plain = not by_distance and model.attention_dropout == 0 and not gpu
    natively = native_wished and plain and precision_on(config.hardware, gpu=False) == "fp32"
    most = MAX_SCORES_GPU if gpu else MAX_SCORES_CPU
    distances = {"shaw": model.max_distance, "xl": N + memory_slots(model)}.get(model.positions, 0)
    # A number for each key; scores of all keys are worked out some at a time, and again, but for few, which are kept.
    if isinstance(part, IndexReads):
        every = config.trainer.batch_size * config.routing.heads * N * N
        scores = min(most, every)
        again = 0 if natively else wide * (6.0 * scores + 3.0 * scores / N * distances)
        each = (
            wide + 3 + (INDEX + wide + 2) * by_distance + (wide + 2) * (model.attention_dropout > 0)
        )
        kept = each * N * N if every <= MAX_SCORES_CPU and not natively else 0
        return Kept(3 * N * narrow, INDEX * part.index_RK.numel() + kept, again)
    if natively:  # keys that are the normalised queries are there once; lists; a sum and a factor for each query
        of_keys, own_keys = (
            len(part.key.row_M),
            pattern.has_keys or not isinstance(pattern, Routing | Random),
        )
        lists = (3 * INDEX + 8) * len(part.start_P) + INDEX * (
            0 if part.query is part.key else of_keys
        )
        hidden = sum(x.numel() for x in part.holes or ())
        # Joined, outputs stand by member, beside their shares.
        vectors = (2 + own_keys) * N * first + 2 * len(part.start_P) * joined
        return Kept(vectors * narrow, lists + INDEX * hidden, 0)
    softly = by_distance or joined or (model.attention_dropout > 0 and not gpu)
    if not (blocks := cut(part, triangles=not softly)):  # nobody reads
        return Kept(0, 0, 0)
    queries, keys = sum(b.query_GQ.numel() for b in blocks), sum(b.key_GK.numel() for b in blocks)
    # A mask that serves all blocks of a form is small; the others are kept, by torch as numbers that it adds.
    masks = sum(b.mask.numel() for b in blocks if b.mask is not None and b.mask.dim() == 3)
    # The sum over lists keeps what it adds, and where it adds that; gathers keep their row numbers.
    vectors = (queries + 2 * keys) * narrow + queries * (wide if softly else 2 * narrow)
    others = (INDEX + wide) * queries + (
        INDEX * (queries + 2 * keys) if queries != N or keys != N else 0
    )
    # What is gathered goes piece by piece as its gradients come.
    every = model.heads * sum(b.query_GQ.numel() * b.key_GK.shape[1] for b in blocks)
    piece = MAX_MASK if masks and not softly else most
    freed = max(0, queries + 2 * keys - 3 * N) * narrow * max(0.0, 1 - piece / every)
    if not softly:
        return Kept(vectors, others + narrow * masks + 4 * queries, 0, freed=freed)
    # Worked out again; row numbers, for distances.
    scores = min(most, N * (N + memory_slots(model)))
    rows = min(scores // min(b.key_GK.shape[1] for b in blocks), queries * model.heads)
    again = wide * (6.0 * scores + 3.0 * rows * distances)
    return Kept(vectors, others + INDEX * (queries + keys) + masks, again, freed=freed)


class Fit(NamedTuple):
    """Values of the two keys, and the bytes at the fullest moment of a step on one device."""

    micro_batch_size: int
    recompute: bool
    peak: float
    fits: bool


def choose_micro_batch(config: Config, vocabulary: int, device_bytes: float, world: int = 1) -> Fit:
    """Return the largest micro-batch that fits one of `world` devices; where none does, the smallest, recomputed.

    Of trainer.micro_batch_size and model.recompute only what is `auto` is chosen; both change a step's result by
    rounding alone. A small micro-batch costs little time, recomputation about a third, so it comes last.
    """
    config = with_values(config, {"hardware.devices": world, "hardware.nodes": 1})
    room = (FILLED if on_gpu(config) else FILLED_CPU) * device_bytes
    total, choices = cost(config, vocabulary), []
    for recompute in (
        (False, True) if config.model.recompute == "auto" else (config.model.recompute is True,)
    ):
        for size in micro_batch_sizes(config, world):
            peak = sum(
                footprint(with_choice(config, size, recompute), total, size, vocabulary).values()
            )
            choices.append(Fit(size, recompute, peak, peak <= room))
            if peak <= room:
                return choices[-1]
    return choices[-1]


def micro_batch_sizes(config: Config, world: int) -> list[int]:
    """Return the micro-batches that a device's share of the batch can be cut into, the largest first."""
    if isinstance(size := config.trainer.micro_batch_size, int):
        return [size]
    share = config.trainer.batch_size // world
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    return sorted({*small, *(share // size for size in small)}, reverse=True)


def with_choice(config: Config, micro_batch_size: int, recompute: bool) -> Config:
    """Return a configuration with these values of the two keys."""
    return with_values(
        config, {"trainer.micro_batch_size": micro_batch_size, "model.recompute": recompute}
    )


def fit_to_device(
    config: Config, vocabulary: int, device_bytes: float, world: int = 1
) -> tuple[Config, str]:
    """Return a configuration with what `choose_micro_batch` chooses, and a line on that, or on what does not fit."""
    size, recompute, peak, fits = choose_micro_batch(config, vocabulary, device_bytes, world)
    is_free = "auto" in (config.trainer.micro_batch_size, config.model.recompute)
    precision = f"hardware.precision={precision_on(config.hardware, on_gpu(config))}"
    what = f"{precision} trainer.micro_batch_size={size} model.recompute={str(recompute).lower()}"
    used = f"about {peak / 2**30:.1f} of {device_bytes / 2**30:.1f} GiB, by rtx plan"
    line = f"auto: {what}: {used}" if is_free and fits else ""
    if not fits:
        less = "optimizer=adafactor, model.ffn_parts=16, hardware=fsdp or a smaller data.length"
        line = f"warning: may not fit: {what} takes {used}, which leaves too little; less is needed with {less}"
    return with_choice(config, size, recompute), line


def with_less_memory(config: Config, asked: Config) -> Config | None:
    """Return the configuration of the same steps to go on with when memory has run out, or None where there is none.

    The micro-batch is halved, to the next size that divides the batch; one of a single sequence gets recomputed blocks.
    `asked` is the configuration as it was composed, for one device: only what is `auto` there may change.
    """
    now, recompute = config.trainer.micro_batch_size, config.model.recompute is True
    assert isinstance(now, int)
    if smaller := [size for size in micro_batch_sizes(asked, 1) if size <= now // 2]:
        return with_choice(config, smaller[0], recompute)
    return (
        with_choice(config, now, True)
        if asked.model.recompute == "auto" and not recompute
        else None
    )
