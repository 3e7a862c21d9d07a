"""What attention heads keep for the backward pass, in bytes: counted from what a pattern reads of random vectors.

`rtx.attention.engine` says what is kept; here its blocks are cut for one head and one sequence, without attending.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rtx.attention import native
from rtx.attention.choices import Blocks, Choice, Indexer
from rtx.attention.engine import MAX_GATHERED, MAX_SCORES_CPU, MAX_SCORES_GPU, MIN_NATIVE, cut
from rtx.attention.lsh import Lsh
from rtx.attention.packed import Indexed, Part
from rtx.attention.pattern import Pattern
from rtx.attention.patterns import Random
from rtx.attention.routing import Routing
from rtx.config import Config, precision_on
from rtx.model.patterns import ROUTED, layer_patterns, make_pattern

INDEX = 8
"""Bytes of a row number."""


class Widths(NamedTuple):
    """Bytes of a value."""

    wide: int
    """Of weights, gradients and the residual stream."""
    narrow: int
    """Of what matrix products read and write: half of it under bf16."""


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


def on_gpu(config: Config) -> bool:
    """Tell whether a run would compute on a GPU: where it is asked for, or left open and one is here."""
    return config.hardware.name == "gpu" or (config.hardware.name != "cpu" and torch.cuda.device_count() > 0)


def widths_of(config: Config) -> Widths:
    """Return the bytes of values."""
    precision = precision_on(config.hardware, on_gpu(config))
    wide = 8 if precision == "fp64" else 4
    return Widths(wide, 2 if precision == "bf16" else wide)


def attention_bytes(config: Config, layer: int, micro_batch: int) -> tuple[float, float]:
    """Return what the heads of a block keep, and what they hold on top in the backward pass, per position."""
    N, groups, heads = config.data.length, layer_patterns(config, layer), {}
    for name in groups:
        key = repr((name, config.model, config.routing, N, config.hardware, on_gpu(config)))
        if key not in _kept:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                _kept[key] = kept(make_pattern(name, 1, config, layer).eval(), config)
        heads[name] = _kept[key]
    each = [(count, heads[name]) for name, count in groups.items()]
    work = sum(count * head.vectors for count, head in each) / N
    total = work + sum(count * (head.others + head.once / micro_batch) for count, head in each) / N
    if any(head.projection for _, head in each):
        own_keys = {"lsh": False, ROUTED: config.routing.keys != "shared"}
        columns = sum(count * (2 + own_keys.get(name, True)) for name, count in groups.items())
        total += columns * widths_of(config).narrow * config.model.hidden // config.model.heads
    return total, work + max(head.again for _, head in each) / (N * micro_batch)


_kept: dict[str, Kept] = {}


def kept(pattern: Pattern, config: Config) -> Kept:
    """Return what a pattern of one head keeps."""
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
