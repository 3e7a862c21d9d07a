"""What heads keep on a GPU for the backward pass, by the engine that computes them.

Counted by what the engines save and allocate; not measured on a GPU yet. Lists that depend on shapes alone are there
once for all layers, and are not counted.
"""

from types import ModuleType
from typing import NamedTuple

import torch

from rtx.analysis.engines import Computed, distances_of, shares_keys
from rtx.attention.clusters import Random
from rtx.attention.engine import by_triton, choose, dense, flash, flex, windows
from rtx.attention.engine.blocks import MAX_SCORES_GPU
from rtx.attention.engine.by_triton import LISTS
from rtx.attention.engine.lists import KernelLists, kernel_lists
from rtx.attention.lsh import Lsh
from rtx.attention.pattern import Pattern
from rtx.attention.probed import Probed
from rtx.attention.reads import RangeReads
from rtx.attention.routing import Routing
from rtx.attention.top_keys import TopKeys
from rtx.settings.schema import Config

INDEX, SHORT_INDEX = 8, 4
"""Bytes of a row number, and of one in the lists of our kernels."""
SUM = 4
"""Bytes of a log-sum and of a list's share."""
WIDE = 4
"""Bytes of a number of float32, to which narrower ones are widened."""


class Kept(NamedTuple):
    """What one head keeps of one sequence, in bytes, or where units of a head are counted, for each unit."""

    vectors: float
    """Queries, keys, values and outputs, each of which gets a gradient."""
    others: float
    """Row numbers, masks, sums and factors."""
    again: float
    """What a piece of the scores that are worked out again holds, for all heads together."""
    projection: bool = False
    """Whether something keeps the product that makes queries, keys and values of all heads."""
    freed: float = 0.0
    """Vectors that are let go as fast as their gradients come."""
    inside: float = 0.0
    """Vectors that are views of that product."""
    passing: float = 0.0
    """What the backward pass of this head holds beside gradients until it is through."""


def kept_by_engine(
    one: Computed, pattern: Pattern, config: Config, narrow: int, first: bool
) -> Kept | None:
    """Return what a part keeps, vectors for each unit of a head; None for an engine that a CPU has as well.

    Args:
        narrow: bytes of a number of queries, keys and values.
        first: of the parts, which share queries, keys and values.
    """
    engine = engine_of(one)
    if engine in (dense, flash):
        return whole(one, pattern, config, narrow)
    if engine is by_triton:
        return packed(one, pattern, config, narrow, first)
    if engine is windows:
        return tiled(one, config, narrow)
    if engine is flex:
        return gathered(one, pattern, narrow)
    return None


def engine_of(one: Computed) -> ModuleType:
    """Return the engine; where hardware.attention leaves none, the one of backend="torch"."""
    return one.engine or choose(one.problem, "torch")


def views(pattern: Pattern, config: Config) -> int:
    """Return how many of queries, keys and values are views of the product that makes them."""
    model, routing = config.model, config.routing
    is_turned = model.positions == "rotary" and (routing.rotary or not isinstance(pattern, TopKeys))
    if is_turned or isinstance(pattern, Routing | Random):
        return 1
    if isinstance(pattern, Lsh):  # its keys are scaled queries
        return 2
    return 2 if model.positions == "xl" else 3  # its queries get a bias


def whole(one: Computed, pattern: Pattern, config: Config, narrow: int) -> Kept:
    """torch's kernels for whole sequences: they keep queries, keys, values, outputs and log-sums.

    Their backward pass adds the queries' gradients up in float32.
    """
    rows, N = one.problem.part.length, config.data.length
    size = config.model.hidden // config.model.heads
    return Kept(
        vectors=(3 * rows + N) * narrow,
        others=SUM * N,
        again=0,
        projection=True,
        inside=views(pattern, config) * rows * narrow,
        passing=SUM * N * (size + 1),
    )


def packed(one: Computed, pattern: Pattern, config: Config, narrow: int, first: bool) -> Kept:
    """Our kernels: queries, keys, values, outputs and log-sums by member, or by row where they join lists, and lists.

    Outputs by row go on, and are kept by who reads them. Gradients are first there by member, unless members are
    rows, and with them products by distance of every row and weights by distance of every member.
    """
    part, joined = one.problem.part, one.problem.by_member
    assert isinstance(part, RangeReads)
    in_order = part.window is not None and part.window.memory == 0
    P, M, rows = len(part.start_P), len(part.key.row_M), part.length
    size = config.model.hidden // config.model.heads
    inputs = (2 if shares_keys(pattern) else 3) * rows * narrow * first
    saved = rows if joined else P  # outputs and log-sums
    outputs = saved * narrow
    if narrow < WIDE:
        outputs += WIDE * rows * first * joined  # outputs of several parts are added up in float32
        inputs += (
            WIDE * rows * first * isinstance(pattern, Lsh)
        )  # queries, of which keys are made, are widened
    others = SUM * saved + lists_bytes(part, pattern, rows)
    # Where there are several parts, every row has a number and a share in each.
    others += (INDEX + SUM) * rows if joined else SUM * rows * (not in_order)
    return Kept(
        vectors=inputs + outputs,
        others=others,
        again=0,
        projection=True,
        freed=max(0, outputs - rows * narrow),
        inside=views(pattern, config) * rows * narrow * first,
        passing=(P + 2 * M) * size * narrow * (not in_order)
        + SUM * P
        + tables_bytes(one, config, narrow),
    )


def tables_bytes(one: Computed, config: Config, narrow: int) -> float:
    """Return the bytes of products by distance `[R, T]` and of their gradients and weights by member `[P, T]`."""
    part, relative = one.problem.part, one.problem.terms.relative
    if relative is None:
        return 0
    assert isinstance(part, RangeReads)
    kinds = 1 if relative.values_MD is None else 2
    return kinds * (part.length + len(part.start_P)) * distances_of(config) * narrow


def lists_bytes(part: RangeReads, pattern: Pattern, rows: int) -> int:
    """Return the bytes of the lists that our kernels keep of every forward pass."""
    if part.derived is not None and isinstance(pattern, Routing | Probed) and LISTS in part.derived:
        lists = part.derived[LISTS]
    elif part.derived is None:
        lists = kernel_lists(part, rows)
    else:
        return 0
    tensors = tensors_of(lists)
    return sum(x.numel() * x.element_size() for x in tensors)


def tensors_of(lists: KernelLists) -> list[torch.Tensor]:
    """Return the tensors of lists, those that are there under two names once."""
    found = [*lists[:6], *lists.query_members, *lists.key_members, *(lists.hidden or ())]
    return list({id(x): x for x in found}.values())


def tiled(one: Computed, config: Config, narrow: int) -> Kept:
    """Tiles by torch's operations: gathered queries, keys and values, masks, and outputs by member in float32.

    Scores are worked out again.
    """
    part, model = one.problem.part, config.model
    assert isinstance(part, RangeReads)
    query_GQ, key_GK = windows.tiles(part)
    P, queries, keys = len(part.start_P), query_GQ.numel(), key_GK.numel()
    slots = queries * key_GK.shape[1]
    wide = max(WIDE, narrow)
    vectors = (queries + 2 * keys) * narrow + P * wide
    others = INDEX * (queries + keys + P) + slots + 2 * SUM * P
    scores = min(MAX_SCORES_GPU, model.heads * slots)
    rows = scores // max(1, key_GK.shape[1])
    share_freed = max(0.0, 1 - MAX_SCORES_GPU / max(1, model.heads * slots))
    return Kept(
        vectors=vectors,
        others=others,
        again=wide * (6.0 * scores + 3.0 * rows * distances_of(config)),
        freed=max(0, queries + 2 * keys - 3 * part.length) * narrow * share_freed,
    )


def gathered(one: Computed, pattern: Pattern, narrow: int) -> Kept:
    """FlexAttention: queries, keys, values and outputs by member, log-sums and row numbers."""
    part = one.problem.part
    assert isinstance(part, RangeReads)
    P, M = len(part.start_P), len(part.key.row_M)
    has_keys = not (shares_keys(pattern) and part.key is part.query)
    vectors = (2 * P + (1 + has_keys) * M) * narrow
    return Kept(vectors, others=INDEX * (P + M) + 2 * SUM * P, again=0)
