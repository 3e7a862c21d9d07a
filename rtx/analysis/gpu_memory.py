"""What heads save on a GPU for the backward pass, by the engine that computes them.

It is counted from what the engines save and allocate; it was not measured on a GPU yet. Lists that
depend on shapes alone exist once for all layers, and are not counted.

Shapes: R rows, P query members and M key members of all lists together, G tiles, Q query slots and
K key slots of a tile, T distances that tables tell apart.
"""

from types import ModuleType
from typing import NamedTuple

import torch

from rtx.analysis.engines import Computed, distances_of, shares_keys
from rtx.attention import Random
from rtx.attention.clusters import Routing
from rtx.attention.engine import by_triton, choose, dense, flash, flex, windows
from rtx.attention.engine.blocks import MAX_SCORES_GPU
from rtx.attention.engine.by_triton import LISTS
from rtx.attention.engine.lists import KernelLists, kernel_lists
from rtx.attention.lsh import Lsh
from rtx.attention.pattern import Pattern
from rtx.attention.probed import Probed
from rtx.attention.reads import RangeReads
from rtx.attention.top_keys import TopKeys
from rtx.model.heads import head_size
from rtx.settings.schema import Config

INDEX = 8
"""Bytes of a row number."""
SHORT_INDEX = 4
"""Bytes of a row number in the lists of our kernels."""
SUM = 4
"""Bytes of a log-sum, and of the share of a list."""
WIDE = 4
"""Bytes of float32, to which narrower numbers are widened."""
SCORE_COPIES = 6.0
"""Copies of the scores of a piece that its backward pass holds."""
DISTANCE_COPIES = 3.0
"""Copies of products by distance, of each row, that the backward pass of a piece holds."""


class Saved(NamedTuple):
    """What one head saves of one sequence, in bytes.

    Functions that say so count vectors by column of a head: times D they are bytes.
    """

    vectors: float
    """Queries, keys, values and outputs, each of which gets a gradient."""
    others: float
    """Row numbers, masks, sums and dropout's factors."""
    recomputed: float = 0.0
    """What a piece of scores that are computed again holds, for all heads together."""
    projection: bool = False
    """Whether the product that makes queries, keys and values of all heads is saved."""
    freed: float = 0.0
    """Vectors that are freed as fast as their gradients come."""
    views: float = 0.0
    """Vectors that are views of that product."""
    transient: float = 0.0
    """What the backward pass of this head holds besides gradients until it ends."""
    pairs: int = 0
    """Pairs of an index, N * N, whose scores are saved if all heads of a pass have few."""
    scores: float = 0.0
    """Bytes of these scores, if they are saved."""
    score_recomputed: float = 0.0
    """Bytes of each score of a piece that is computed again."""


class Part(NamedTuple):
    """A part of what the heads of a pattern read on a GPU, and how many bytes numbers have."""

    computed: Computed
    pattern: Pattern
    config: Config
    narrow: int
    """Bytes of a number of queries, keys and values."""
    is_first: bool
    """Whether this is the first of the parts, which share queries, keys and values."""

    @property
    def rows(self) -> int:
        """R."""
        return self.computed.problem.part.length

    @property
    def ranges(self) -> RangeReads:
        """What the part reads, by ranges of lists."""
        part = self.computed.problem.part
        assert isinstance(part, RangeReads)
        return part

    @property
    def query_members(self) -> int:
        """P."""
        return len(self.ranges.start_P)

    @property
    def key_members(self) -> int:
        """M."""
        return len(self.ranges.key.row_M)


def saved_by_engine(part: Part) -> Saved | None:
    """Return what a part saves, vectors by column; None for an engine that a CPU has as well."""
    engine = engine_of(part.computed)
    if engine in (dense, flash):
        return saved_by_whole_sequences(part)
    if engine is by_triton:
        return saved_by_our_kernels(part)
    if engine is windows:
        return saved_by_tiles(part)
    if engine is flex:
        return saved_by_flex(part)
    return None


def engine_of(computed: Computed) -> ModuleType:
    """Return the engine; if hardware.attention leaves none, the one of backend="torch"."""
    return computed.engine or choose(computed.problem, "torch")


def view_count(pattern: Pattern, config: Config) -> int:
    """Return how many of queries, keys and values are views of the product that makes them."""
    model = config.model
    is_selection = isinstance(pattern, TopKeys)
    rotates = model.positions == "rotary" and (config.routing.rotary or not is_selection)
    if rotates or isinstance(pattern, Routing | Random):
        return 1
    if isinstance(pattern, Lsh):
        # Its keys are scaled queries.
        return 2
    if model.positions == "xl":
        # Its queries get a bias.
        return 2
    return 3


def saved_by_whole_sequences(part: Part) -> Saved:
    """Return what torch's kernels save: queries, keys, values, outputs and log-sums.

    Their backward pass adds up the gradients of the queries in float32.
    """
    N = part.config.data.length
    return Saved(
        vectors=(3 * part.rows + N) * part.narrow,
        others=SUM * N,
        projection=True,
        views=view_count(part.pattern, part.config) * part.rows * part.narrow,
        transient=SUM * N * (head_size(part.config) + 1),
    )


def saved_by_our_kernels(part: Part) -> Saved:
    """Return what our kernels save: queries, keys, values, outputs, log-sums and lists.

    Outputs and log-sums are by member, or by row if outputs of several lists are combined. Those by
    row are the results, which their reader saves.
    """
    outputs = outputs_of_our_kernels(part)
    views = 0
    if part.is_first:
        views = view_count(part.pattern, part.config) * part.rows * part.narrow
    return Saved(
        vectors=inputs_of_our_kernels(part) + outputs,
        others=lists_and_sums_of_our_kernels(part),
        projection=True,
        freed=max(0, outputs - part.rows * part.narrow),
        views=views,
        transient=gradients_of_our_kernels(part),
    )


def inputs_of_our_kernels(part: Part) -> int:
    """Return the bytes of queries, keys and values, by column; the first part has them."""
    if not part.is_first:
        return 0
    tensors = 3
    if shares_keys(part.pattern):
        tensors = 2
    inputs = tensors * part.rows * part.narrow
    if part.narrow < WIDE and isinstance(part.pattern, Lsh):
        # Queries, of which keys are made, are widened.
        inputs += WIDE * part.rows
    return inputs


def outputs_of_our_kernels(part: Part) -> int:
    """Return the bytes of outputs, by column."""
    if not part.computed.problem.by_member:
        return part.query_members * part.narrow
    outputs = part.rows * part.narrow
    if part.narrow < WIDE and part.is_first:
        # Outputs of several parts are added up in float32.
        outputs += WIDE * part.rows
    return outputs


def lists_and_sums_of_our_kernels(part: Part) -> int:
    """Return the bytes of lists, of log-sums, and of the shares of lists."""
    lists = lists_bytes(part.ranges, part.pattern, part.rows)
    if part.computed.problem.by_member:
        # Every row has a number and a share in each of several parts.
        return lists + (SUM + INDEX + SUM) * part.rows
    others = lists + SUM * part.query_members
    if not members_are_rows(part.ranges):
        others += SUM * part.rows
    return others


def gradients_of_our_kernels(part: Part) -> float:
    """Return the bytes that the backward pass holds until it ends.

    Gradients are by member first, unless members are rows. Tables have products by distance of
    every row, and weights by distance of every member.
    """
    transient = SUM * part.query_members + tables_bytes(part)
    if not members_are_rows(part.ranges):
        members = part.query_members + 2 * part.key_members
        transient += members * head_size(part.config) * part.narrow
    return transient


def members_are_rows(ranges: RangeReads) -> bool:
    """Return whether every row is one member, in the order of rows."""
    return ranges.window is not None and ranges.window.memory == 0


def tables_bytes(part: Part) -> float:
    """Return the bytes of products by distance `[R, T]`, and of weights by distance `[P, T]`."""
    relative = part.computed.problem.terms.relative
    if relative is None:
        return 0
    tables = 2
    if relative.values_MD is None:
        tables = 1
    rows_and_members = part.rows + part.query_members
    return tables * rows_and_members * distances_of(part.config) * part.narrow


def lists_bytes(ranges: RangeReads, pattern: Pattern, rows: int) -> int:
    """Return the bytes of the lists that our kernels save of every forward pass."""
    if ranges.derived is None:
        lists = kernel_lists(ranges, rows)
    elif isinstance(pattern, Routing | Probed) and LISTS in ranges.derived:
        lists = ranges.derived[LISTS]
    else:
        return 0
    return sum(x.numel() * x.element_size() for x in tensors_of(lists))


def tensors_of(lists: KernelLists) -> list[torch.Tensor]:
    """Return the tensors of lists, each once."""
    tensors = [*lists[:6], *lists.query_members, *lists.key_members]
    if lists.holes is not None:
        tensors += lists.holes
    return list({id(tensor): tensor for tensor in tensors}.values())


def saved_by_tiles(part: Part) -> Saved:
    """Return what tiles by torch's operations save; scores are computed again.

    They save gathered queries, keys and values, masks, and outputs by member in float32.
    """
    query_GQ, key_GK = windows.tiles_of(part.ranges)
    queries = query_GQ.numel()
    keys = key_GK.numel()
    keys_of_a_tile = key_GK.shape[1]
    pairs = queries * keys_of_a_tile
    wide = max(WIDE, part.narrow)
    gathered = queries + 2 * keys
    P = part.query_members
    pairs_of_all_heads = part.config.model.heads * pairs
    scores = min(MAX_SCORES_GPU, pairs_of_all_heads)
    score_rows = scores // max(1, keys_of_a_tile)
    by_distance = DISTANCE_COPIES * score_rows * distances_of(part.config)
    share_freed = max(0.0, 1 - MAX_SCORES_GPU / max(1, pairs_of_all_heads))
    return Saved(
        vectors=gathered * part.narrow + P * wide,
        others=INDEX * (queries + keys + P) + pairs + 2 * SUM * P,
        recomputed=wide * (SCORE_COPIES * scores + by_distance),
        freed=max(0, gathered - 3 * part.rows) * part.narrow * share_freed,
    )


def saved_by_flex(part: Part) -> Saved:
    """Return what FlexAttention saves: inputs and outputs by member, log-sums, row numbers."""
    P = part.query_members
    M = part.key_members
    is_one_tensor = shares_keys(part.pattern) and part.ranges.key is part.ranges.query
    key_tensors = 2
    if is_one_tensor:
        key_tensors = 1
    return Saved(
        vectors=(2 * P + key_tensors * M) * part.narrow,
        others=INDEX * (P + M) + 2 * SUM * P,
    )
