"""How much memory training steps take, counted from the configuration: what one device holds at its fullest moment.

Sizes are in bytes. Counted is what `rtx/model` and `rtx.attention.engine` keep for the backward pass, tensor by tensor,
and what they work with; not what an allocator loses in holes, nor the program itself. `benchmarks/footprint.py` sets it
beside real runs.

Letters: h values of the residual stream of a position, F of the feed-forward layer; N positions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from rtx.analysis.cost import Cost
from rtx.attention import native
from rtx.attention.choices import Blocks, Choice, Indexer
from rtx.attention.engine import MAX_GATHERED, MAX_SCORES_CPU, MAX_SCORES_GPU, MIN_NATIVE, cut
from rtx.attention.lsh import Lsh
from rtx.attention.packed import Indexed, Part
from rtx.attention.pattern import Pattern
from rtx.attention.patterns import Random
from rtx.attention.routing import Routing
from rtx.config import Config, precision_on
from rtx.model.layer_heads import ROUTED, layer_patterns, make_pattern
from rtx.model.likelihood import MAX_LOGITS

INDEX = 8
"""Bytes of a row number."""


def on_gpu(config: Config) -> bool:
    """Tell whether a run would compute on a GPU: where it is asked for, or left open and one is here."""
    return config.hardware.name == "gpu" or (config.hardware.name != "cpu" and torch.cuda.device_count() > 0)


def widths_of(config: Config) -> tuple[int, int]:
    """Return the bytes of a value: of weights, gradients and the residual stream, and of what matrix products read."""
    precision = precision_on(config.hardware, on_gpu(config))
    wide = 8 if precision == "fp64" else 4
    return wide, 2 if precision == "bf16" else wide


def devices(config: Config) -> int:
    """Return how many devices share a step."""
    return (config.hardware.devices or 1) * config.hardware.nodes


def footprint(config: Config, total: Cost, micro_batch: int, vocabulary: int) -> dict[str, float]:
    """Return the parts of the peak, in bytes on each device; their sum is the peak."""
    (wide, narrow), adafactor = widths_of(config), config.optimizer.name == "adafactor"
    shares = devices(config) if config.hardware.name == "fsdp" else 1
    own, outside = total.parameters / shares, total.embedding_parameters
    # Shared out, the embedding and output matrices stay whole from the forward to the end of the backward pass, one
    # block is whole at a time, and so are their gradients before they are shared out.
    gathered = wide * (outside + (total.parameters - outside) / config.model.layers) if shares > 1 else 0.0
    gradients, activations, working = max(moments(config, wide * own, gathered, micro_batch, vocabulary), key=sum)
    return {
        # Autocast holds on to the weights that it has narrowed.
        "weights": (wide + (narrow if narrow < wide else 0)) * own,
        "gradients": gradients,
        # Adam keeps two moments; Adafactor a row and a column for each matrix.
        "optimizer": (0.02 if adafactor else 2) * wide * own,
        "activations": activations,
        "working": working,
    }


def moments(
    config: Config, gradients: float, gathered: float, micro_batch: int, vocabulary: int
) -> list[tuple[float, float, float]]:
    """Return the gradients, activations and working memory of the moments of a step of which one is the fullest.

    At the end of the forward pass, and in the backward pass of the topmost parts, nearly all activations are there; the
    gradients are not, unless micro-batches have gone before. At the end of the backward pass it is the other way round.
    In the optimizer's step no activations are. The gradients are freed behind it.
    """
    (wide, _), model, rows = widths_of(config), config.model, micro_batch * config.data.length
    blocks = [block(config, layer, micro_batch) for layer in range(model.layers)]
    again = max(kept for kept, _ in blocks) * rows if model.recompute is True else 0.0
    work = max(work for _, work in blocks) * rows
    earlier = gradients if config.trainer.batch_size > micro_batch * devices(config) else 0.0
    logits, pieces = logits_bytes(config, rows, vocabulary)
    kept = saved(config, micro_batch, vocabulary) - (logits if pieces == 1 else 0.0)
    output = wide * vocabulary * (model.embedding or model.hidden)
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


def saved(config: Config, micro_batch: int, vocabulary: int) -> float:
    """Return the bytes that a forward pass of training leaves for the backward pass."""
    model, (wide, narrow), rows = config.model, widths_of(config), micro_batch * config.data.length
    if model.recompute is True:  # a block keeps its input alone
        inside = float(wide * model.hidden * model.layers)
    else:
        inside = sum(block(config, layer, micro_batch)[0] for layer in range(model.layers))
    # The ids; the last norm's input, and what the output matrix reads; a dropout's factors on the embedding.
    ends = INDEX + wide * model.hidden * ((model.norm == "pre") + (model.dropout > 0))
    ends += narrow * (model.embedding or model.hidden)
    logits, pieces = logits_bytes(config, rows, vocabulary)
    return rows * (inside + ends) + (logits if pieces == 1 else 0.0)


def logits_bytes(config: Config, rows: int, vocabulary: int) -> tuple[float, int]:
    """Return the bytes of one copy of the logits that are held at once, and in how many pieces they are worked out.

    One copy is kept (logarithms of the likelihoods); two are there when they are made, three when their gradient is. In
    more than one piece nothing is kept, and each is worked out again.
    """
    pieces = math.ceil(rows / max(1, MAX_LOGITS // vocabulary))
    return float(widths_of(config)[0]) * (rows * vocabulary if pieces == 1 else MAX_LOGITS), pieces


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
    # Norm before or after: each branch has one wide value of the stream and one that its first product reads.
    # In parts, each is worked out again in the backward pass, and nothing of it is kept.
    pieces, hidden = model.ffn_parts, narrow * F * factor
    feed_forward = (hidden if pieces == 1 else 0) + (wide + narrow) * h + dropped
    rest = (wide + 2 * narrow) * h + dropped  # the stream, the attention's norm, its joined heads
    # Backward, the gradients of the stream and of the branch are there, and of the hidden units two or three copies
    # while the product's own input is freed; later, the feed-forward branch is gone, and every vector that the heads
    # keep gets a gradient.
    hidden_work = (wide + narrow) * h + narrow * F * {"gelu": 1, "relu": 2, "geglu": 2}[model.ffn] / pieces
    hidden_work += hidden / pieces if pieces > 1 else 0
    attention_work = (wide + 2 * narrow) * h + gradients - feed_forward
    return attention + feed_forward + rest, max(hidden_work, attention_work, 0.0)


class Kept(NamedTuple):
    """What one head keeps of one sequence."""

    vectors: float
    """Queries, keys, values and outputs, each of which gets a gradient."""
    others: float
    """Row numbers, masks, sums and factors."""
    once: float
    """What telemetry looks at, of the first sequence alone."""
    again: float
    """What a piece of the scores that are worked out again holds, for all heads together."""
    projection: bool
    """Whether something keeps the product that makes queries, keys and values of all heads."""


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
    work = sum(count * head.vectors for count, head in each) / N
    total = work + sum(count * (head.others + head.once / micro_batch) for count, head in each) / N
    if any(head.projection for _, head in each):
        own_keys = {"lsh": False, ROUTED: config.routing.keys != "shared"}
        columns = sum(count * (2 + own_keys.get(name, True)) for name, count in groups.items())
        total += columns * widths_of(config)[1] * config.model.hidden // config.model.heads
    return total, work + max(head.again for _, head in each) / (N * micro_batch)


def kept(pattern: Pattern, config: Config) -> Kept:
    """Count what a pattern of one head keeps, from what it reads of random vectors; nothing is attended."""
    model, routing, N, (wide, narrow) = config.model, config.routing, config.data.length, widths_of(config)
    size, gpu = model.hidden // model.heads, on_gpu(config)
    if isinstance(pattern, Choice):
        parts: list[Part] = [Indexed(torch.arange(N), torch.zeros(N, pattern.most_keys(N), dtype=torch.int8), N)]
    else:
        q_11ND, k_11ND = torch.randn(2, 1, 1, N, size)
        parts = pattern.reads(pattern.inputs(q_11ND, k_11ND if pattern.has_keys else None, None), None, False)
    shaw = model.positions == "shaw"
    by_distance = shaw or pattern.terms(size, None).by_distance
    softly = by_distance or len(parts) > 1 or (model.attention_dropout > 0 and not gpu)
    natively = not by_distance and model.attention_dropout == 0 and runs_natively(config)
    normalises = isinstance(pattern, Routing | Random)
    vectors = others = once = again = 0.0
    for part in parts:
        if isinstance(part, Indexed):  # a number for each key; keys are gathered some at a time, and again
            vectors += 3 * N * narrow
            others += INDEX * part.index_PK.numel()
            again = 0 if natively else 4.0 * wide * MAX_GATHERED
            continue
        members, of_keys = len(part.start_P), 0 if part.query is part.key else len(part.key.row_M)
        if isinstance(pattern, Routing):
            once += 2 * wide * size * N + INDEX * (3 * members + of_keys)
        if natively:  # keys that are the normalised queries are there once; lists; a sum and a factor for each query
            vectors += (2 + (pattern.has_keys or not normalises)) * N * narrow
            others += (3 * INDEX + 8) * members + INDEX * of_keys
            continue
        blocks = cut(part, triangles=not softly)
        queries, keys = sum(b.query_GQ.numel() for b in blocks), sum(b.key_GK.numel() for b in blocks)
        # A mask that serves all blocks of a form is small; the others are kept, by torch as numbers that it adds.
        masks = sum(b.mask.numel() for b in blocks if b.mask is not None and b.mask.dim() == 3)
        # The sum over lists keeps what it adds, and where it adds that; gathers keep their row numbers.
        vectors += (queries + 2 * keys) * narrow + queries * (wide if softly else 2 * narrow)
        others += (INDEX + wide) * queries + (INDEX * (queries + 2 * keys) if queries != N or keys != N else 0)
        if softly:  # row numbers, for distances; scores are worked out again
            others += INDEX * (queries + keys) + masks
            scores = min(MAX_SCORES_GPU if gpu else MAX_SCORES_CPU, N * N)
            rows = min(scores // min(b.key_GK.shape[1] for b in blocks), queries * model.heads)
            again = wide * (6.0 * scores + 3.0 * shaw * rows * model.max_distance)
        else:
            others += narrow * masks + 4 * queries
    compressed = isinstance(pattern, Blocks) and routing.compressed
    if isinstance(pattern, Choice):  # what a convolution of keys reads and gives; both branches and what gates them
        vectors += N * narrow * (2 * (routing.key_conv > 1) + 4 * compressed)
    if normalises and narrow < 4:  # the norm reads a wide copy
        vectors += 4 * N * (1 + pattern.has_keys)
    projection = (normalises and narrow >= 4) or compressed or isinstance(pattern, Lsh | Indexer)
    return Kept(vectors * size, others, once, again, projection)


def runs_natively(config: Config) -> bool:
    """Tell whether the compiled kernel is taken where it can be, as `rtx.attention.engine.attend_part` decides."""
    wish, long = config.hardware, config.data.length >= MIN_NATIVE
    if on_gpu(config) or precision_on(wish, gpu=False) != "fp32":
        return False
    return wish.attention == "native" or (wish.attention == "auto" and long and native.available())
