"""Select the members of clusters with Triton kernels, in static shapes.

This module has the same functions as `static_selection.py`, whose docstring has the words and an
example. The CPU launches kernels and never waits for the GPU. Everything is a custom operator with
static shapes, so that `torch.compile` puts a whole training step into one graph, and a CUDA graph
can replay it.

Shapes: B sequences, H heads, X = B * H, C clusters of a head, N positions, D head size, W attention
window, L = B * H * C lists, L1 = L + 1, R = B * H * N rows (row = (b * H + h) * N + n), R1 = R + 1,
S slots of members in order of rows, M slots of members in order of lists, K scores. T tiles of
`TALLY_TILE` positions.
"""

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.engine.lists import KernelLists, row_members
from rtx.attention.engine.rounding import power_of_two, whole_pieces
from rtx.attention.engine.static_selection import (
    Entries,
    Members,
    Ranges,
    Selected,
    best_places_with,
    bounds,
    entries_of_nearest,
    list_type,
    number_of_lists,
    selected_with,
    shared_lists,
    sorted_lists,
    top_members_with,
)
from rtx.attention.reads import MemberLists
from rtx.attention.typed_torch import custom_op

TILE = 64
"""Positions that a program of `score_kernel` works on."""
TALLY_TILE = 256
"""Positions that a program of `tally_kernel` works on."""
EMIT_TILE = 128
"""Positions that a program of `emit_kernel` works on."""
RANGE_TILE = 256
"""Slots that a program of `range_kernel` works on."""
PIECE = 512
"""Positions that a program of `product_kernel` works on."""


@functools.cache
def kernels() -> ModuleType:
    """Return the module of the kernels for members, which needs Triton."""
    from rtx.attention.engine import selection_kernels

    return selection_kernels


@functools.cache
def top_kernels() -> ModuleType:
    """Return the module of the kernels for the best scores, which needs Triton."""
    from rtx.attention.engine import top_kernels

    return top_kernels


@functools.cache
def precision(device: torch.device) -> str:
    """Return how the kernels multiply float32, for `tl.dot`.

    "tf32x3" adds three products of TF32 numbers, which comes within the rounding of float32. It
    needs an NVIDIA GPU of compute capability 8.0. "ieee" multiplies float32 itself.
    """
    if device.type != "cuda" or torch.version.hip:
        return "ieee"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "ieee"
    return "tf32x3"


# Members by thresholds.


def by_thresholds(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor | None,
    margin_HC: Tensor,
    *,
    window: int,
    attend_self: bool,
    capacity: int,
) -> Selected:
    """Return what `static_selection.by_thresholds` does, of float32."""
    lists = number_of_lists(centroid_HCD, x_BHND)
    window = min(window, x_BHND.shape[2])
    if threshold_HC is None:
        list_R = nearest_lists(centroid_HCD, x_BHND, margin_HC)
        entries = entries_of_nearest(list_R, lists, capacity)
    else:
        tensors = entries_by_thresholds(
            centroid_HCD.detach(),
            x_BHND.detach(),
            threshold_HC.detach(),
            margin_HC.detach(),
            capacity,
        )
        entries = Entries._make(tensors)
    return selected_with(ranged_members, entries, lists, window, attend_self)


def nearest_clusters(centroid_HCD: Tensor, x_BHND: Tensor, margin_HC: Tensor) -> Tensor:
    """Return what `static_selection.nearest_clusters` does, of float32."""
    return nearest_by_kernel(
        centroid_HCD.detach(), x_BHND.detach(), margin_HC.detach(), as_lists=False
    )


def nearest_lists(centroid_HCD: Tensor, x_BHND: Tensor, margin_HC: Tensor) -> Tensor:
    """Return what `static_selection.nearest_lists` does, of float32."""
    list_BHN = nearest_by_kernel(
        centroid_HCD.detach(), x_BHND.detach(), margin_HC.detach(), as_lists=True
    )
    return list_BHN.flatten()


def nearest_members(centroid_HCD: Tensor, x_BHND: Tensor, margin_HC: Tensor) -> MemberLists:
    """Return what `static_selection.nearest_members` does, of float32."""
    list_R = nearest_lists(centroid_HCD, x_BHND, margin_HC)
    _, row_M, bound_L1 = sorted_lists(list_R, number_of_lists(centroid_HCD, x_BHND))
    return MemberLists(row_M, bound_L1.diff())


@custom_op("rtx::nearest_clusters")
def nearest_by_kernel(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    margin_HC: Tensor,
    as_lists: bool,
) -> Tensor:
    """Return the cluster with the highest score of each position, `[B, H, N]`, int32.

    Args:
        as_lists: return the numbers of lists instead, of `list_type`.
    """
    return launch_score(centroid_HCD, x_BHND, None, margin_HC, as_lists).highest_BHN


@nearest_by_kernel.register_fake
def _(centroid_HCD: Tensor, x_BHND: Tensor, margin_HC: Tensor, as_lists: bool) -> Tensor:
    dtype = torch.int32
    if as_lists:
        dtype = list_type(number_of_lists(centroid_HCD, x_BHND))
    return x_BHND.new_empty(x_BHND.shape[:3], dtype=dtype)


@custom_op("rtx::entries_by_thresholds")
def entries_by_thresholds(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor,
    margin_HC: Tensor,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the `Entries`, by the kernels in the order that `selection_kernels.py` describes."""
    C = centroid_HCD.shape[1]
    if not x_BHND.numel():
        return empty_entries(centroid_HCD, x_BHND, threshold_HC, margin_HC, capacity)
    scored = launch_score(centroid_HCD, x_BHND, threshold_HC, margin_HC)
    tallied = launch_tally(scored, C)
    last_R = tallied.times_R.cumsum(0)
    row_S, list_S, first_R1 = launch_emit(scored, tallied.times_R, last_R, C, capacity)
    count_L = tallied.count_XTC.sum(1).flatten()
    lost = (last_R[-1:] - capacity).clamp(min=0)
    return row_S, list_S, first_R1, count_L, lost


@entries_by_thresholds.register_fake
def empty_entries(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor,
    margin_HC: Tensor,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the result of `entries_by_thresholds` without positions: all slots are empty.

    It has the shapes and types of any result.
    """
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    L = B * H * C
    row_S = x_BHND.new_zeros(capacity, dtype=torch.int32)
    list_S = x_BHND.new_full((capacity,), L, dtype=list_type(L))
    first_R1 = row_S.new_zeros(B * H * N + 1)
    count_L = x_BHND.new_zeros(L, dtype=torch.int64)
    return row_S, list_S, first_R1, count_L, count_L.new_zeros(1)


class Scored(NamedTuple):
    """What `score_kernel` writes; without thresholds `bits` is empty."""

    bits: Tensor
    highest_BHN: Tensor


def launch_score(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor | None,
    margin_HC: Tensor,
    as_lists: bool = False,
) -> Scored:
    """Score all positions; return what `score_kernel` writes.

    Args:
        as_lists: whether `highest_BHN` has the numbers of lists, not of clusters.
    """
    assert x_BHND.dtype == torch.float32, "the kernels compute in float32"
    module = kernels()
    B, H, N, D = x_BHND.shape
    C = centroid_HCD.shape[1]
    margin_HC = margin_HC.contiguous()
    words = 0
    # Without thresholds the kernel does not read them, but needs a pointer.
    thresholds = margin_HC
    if threshold_HC is not None:
        words = whole_pieces(C, int(module.CLUSTERS.value))
        thresholds = threshold_HC.contiguous()
    number_type = torch.int32
    group_stride = 0
    if as_lists:
        number_type = list_type(B * H * C)
        group_stride = C
    scored = Scored(
        bits=x_BHND.new_empty(B * H, words, N, dtype=torch.int32),
        highest_BHN=x_BHND.new_empty(B, H, N, dtype=number_type),
    )
    exactness = precision(x_BHND.device)
    if x_BHND.numel():
        module.score_kernel[(B * H, whole_pieces(N, TILE))](
            x=x_BHND.contiguous(),
            centroid=centroid_HCD.contiguous(),
            threshold=thresholds,
            margin=margin_HC,
            bits=scored.bits,
            highest=scored.highest_BHN,
            N=N,
            H=H,
            C=C,
            group_stride=group_stride,
            D=D,
            CHUNK=chunk_of(D, exactness),
            BN=TILE,
            PRECISION=exactness,
            THRESHOLDS=threshold_HC is not None,
            num_warps=4,
            num_stages=1,
        )
    return scored


def chunk_of(size: int, exactness: str) -> int:
    """Return how many of the D numbers of vectors `score_kernel` multiplies at a time.

    `tl.dot` needs 16 at least. The limits keep what a program holds near the size of its registers.
    """
    most = 32 if exactness == "ieee" else 64
    return min(most, max(16, power_of_two(size)))


class Tallied(NamedTuple):
    """What `tally_kernel` counts."""

    times_R: Tensor
    """How many members each row has."""
    count_XTC: Tensor
    """How many members each cluster has in each tile of `TALLY_TILE` positions."""


def launch_tally(scored: Scored, C: int) -> Tallied:
    """Count members."""
    B, H, N = scored.highest_BHN.shape
    tiles = whole_pieces(N, TALLY_TILE)
    tallied = Tallied(
        times_R=scored.bits.new_empty(B * H * N),
        count_XTC=scored.bits.new_empty(B * H, tiles, C),
    )
    kernels().tally_kernel[(B * H, tiles)](
        bits=scored.bits,
        highest=scored.highest_BHN,
        times=tallied.times_R,
        count=tallied.count_XTC,
        N=N,
        C=C,
        BN=TALLY_TILE,
        num_warps=4,
    )
    return tallied


def launch_emit(
    scored: Scored,
    times_R: Tensor,
    last_R: Tensor,
    C: int,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `row_S`, `list_S` and `first_R1` of `Entries`.

    Args:
        last_R: the running sums of `times_R`, each with its own number included, int64.
    """
    B, H, N = scored.highest_BHN.shape
    L = B * H * C
    row_S = scored.bits.new_empty(capacity)
    list_S = scored.bits.new_full((capacity,), L, dtype=list_type(L))
    first_R1 = scored.bits.new_empty(B * H * N + 1)
    kernels().emit_kernel[(B * H, whole_pieces(N, EMIT_TILE))](
        bits=scored.bits,
        highest=scored.highest_BHN,
        times=times_R,
        last=last_R,
        row_S=row_S,
        list_S=list_S,
        first_R1=first_R1,
        capacity=capacity,
        N=N,
        C=C,
        BN=EMIT_TILE,
        num_warps=4,
    )
    return row_S, list_S, first_R1


def ranged_members(
    list_M: Tensor,
    slot_M: Tensor,
    row_S: Tensor,
    bound_L1: Tensor,
    window: int,
    attend_self: bool,
) -> Members:
    """Return what `static_selection.ranged_members` does."""
    return Members(*ranges_by_kernel(list_M, slot_M, row_S, bound_L1, window, attend_self))


@custom_op("rtx::ranged_members")
def ranges_by_kernel(
    list_M: Tensor,
    slot_M: Tensor,
    row_S: Tensor,
    bound_L1: Tensor,
    window: int,
    attend_self: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the `Members`."""
    members = empty_members(list_M, slot_M, row_S, bound_L1, window, attend_self)
    capacity = len(list_M)
    if capacity:
        programs = whole_pieces(capacity, RANGE_TILE)
        kernels().range_kernel[(programs,)](
            list_M=list_M,
            slot_M=slot_M,
            row_S=row_S,
            bound_L1=bound_L1,
            **members._asdict(),
            capacity=capacity,
            window=window,
            L=len(bound_L1) - 1,
            BM=RANGE_TILE,
            SELF=attend_self,
            num_warps=4,
        )
    return members


@ranges_by_kernel.register_fake
def empty_members(
    list_M: Tensor,
    slot_M: Tensor,
    row_S: Tensor,
    bound_L1: Tensor,
    window: int,
    attend_self: bool,
) -> Members:
    """Return tensors of the shapes and types of `Members`."""
    return Members(*(torch.empty_like(list_M, dtype=torch.int32) for _ in Members._fields))


def top_lists(position_XCW: Tensor, length: int, window: int, attend_self: bool) -> KernelLists:
    """Return what `static_selection.top_lists` does, of int32."""
    row_M, *ranges = top_ranges(position_XCW, length, window, attend_self)
    count_1 = row_M.new_full((1,), len(row_M))
    rows = position_XCW.shape[:-2].numel() * length
    return shared_lists(row_M, Ranges._make(ranges), row_members(row_M, rows), count_1)


@custom_op("rtx::top_ranges")
def top_ranges(
    position_XCW: Tensor,
    length: int,
    window: int,
    attend_self: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the rows of members and their `Ranges`."""
    assert position_XCW.dtype == torch.int32, "the kernel counts in int32"
    result = empty_top_ranges(position_XCW, length, window, attend_self)
    row_M, *ranges = result
    capacity = position_XCW.numel()
    C, W = position_XCW.shape[-2:]
    if capacity:
        programs = whole_pieces(capacity, RANGE_TILE)
        kernels().top_range_kernel[(programs,)](
            position=position_XCW.contiguous(),
            row_M=row_M,
            **Ranges._make(ranges)._asdict(),
            N=length,
            C=C,
            W=W,
            capacity=capacity,
            window=min(window, W),
            BM=RANGE_TILE,
            SELF=attend_self,
            num_warps=4,
        )
    return result


@top_ranges.register_fake
def empty_top_ranges(
    position_XCW: Tensor,
    length: int,
    window: int,
    attend_self: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return tensors of the shapes and types of the result of `top_ranges`."""
    row_M = position_XCW.new_empty(position_XCW.numel())
    start_M = torch.empty_like(row_M)
    stop_M = torch.empty_like(row_M)
    low_M = torch.empty_like(row_M)
    high_M = torch.empty_like(row_M)
    return row_M, start_M, stop_M, low_M, high_M


def score_moments(centroid_HCD: Tensor, x_BHND: Tensor) -> Tensor:
    """Return what `static_selection.score_moments` does, of float32."""
    return moments_by_kernels(centroid_HCD.detach(), x_BHND.detach())


@custom_op("rtx::score_moments")
def moments_by_kernels(centroid_HCD: Tensor, x_BHND: Tensor) -> Tensor:
    """Return the sums `[2, B, H, C]` of scores and of their squares, float64."""
    assert x_BHND.dtype == torch.float32, "the kernels compute in float32"
    B, H, N, D = x_BHND.shape
    C = centroid_HCD.shape[1]
    moment_2BHC = no_moments(centroid_HCD, x_BHND)
    if not x_BHND.numel():
        return moment_2BHC
    x_BHND = x_BHND.contiguous()
    pieces = whole_pieces(N, PIECE)
    width = min(64, max(16, power_of_two(D)))
    blocks = whole_pieces(D, width) ** 2
    part_XTDD = x_BHND.new_empty(B * H, pieces, D + 1, D)
    kernels().product_kernel[(B * H, pieces, blocks)](
        x=x_BHND,
        part=part_XTDD,
        N=N,
        D=D,
        PIECE=PIECE,
        BN=32,
        BD=width,
        PRECISION=precision(x_BHND.device),
        num_warps=4,
        num_stages=1,
    )
    kernels().moment_kernel[(B * H * C,)](
        x=x_BHND,
        part=part_XTDD.sum(1, dtype=torch.float64),
        centroid=centroid_HCD.contiguous(),
        moment=moment_2BHC,
        N=N,
        H=H,
        C=C,
        D=D,
        BD=power_of_two(D),
        ROWS=16,
        num_warps=4,
    )
    return moment_2BHC


@moments_by_kernels.register_fake
def no_moments(centroid_HCD: Tensor, x_BHND: Tensor) -> Tensor:
    """Return the moments without positions."""
    B, H, _, _ = x_BHND.shape
    return x_BHND.new_zeros(2, B, H, centroid_HCD.shape[1], dtype=torch.float64)


# The best scores.

MAX_SCORES = 1 << 26
"""The most scores that are in memory at once, see `static_selection.MAX_SCORES`."""
SAMPLE = 4096
"""Scores of a row that are its sample; the candidates for the best are found by it."""
MIN_SAMPLED = 8192
"""Rows this long are sampled: torch.topk reads a row some 18 times, our kernels twice."""
MAX_CANDIDATES = 4096
"""The most candidates of a row: a program holds all of them in registers."""
MARK_TILE = 128
"""Words, of 32 scores each, that a program of `mark_kernel` writes."""


def top_members(score_XCN: Tensor, margin_XC: Tensor, window: int) -> Tensor:
    """Return what `static_selection.top_members` does, of float32."""
    N = score_XCN.shape[-1]
    if not is_sampled(N, window):
        return top_members_with(earliest, score_XCN.detach(), margin_XC, window)
    margin_X = margin_XC.detach().expand(score_XCN.shape[:-1]).reshape(-1)
    place_XW = top_by_sample(score_XCN.detach().reshape(-1, N), margin_X, window)
    return place_XW.view(*score_XCN.shape[:-1], window)


def is_sampled(length: int, window: int) -> bool:
    """Return whether the best of rows are found by samples, else by torch.topk."""
    _, capacity = sampled(length, window)
    return window < length and length >= MIN_SAMPLED and capacity <= MAX_CANDIDATES


def sampled(length: int, window: int) -> tuple[int, int]:
    """Return the rank of the sample's score that candidates reach, and the slots for candidates.

    Of every `step` scores one is in the sample. So about rank * step scores of the row reach the
    sample's score of that rank. window + 1 must, nearly always: if not, the row is searched again.
    The number that does is random, with a deviation of about sqrt(rank) in the sample, so that the
    rank is six deviations higher, and a constant for small ranks. There are slots for twice the
    expected number of candidates, or up to four times, as it is a power of two.

    Example: for length 65,536 and window 256 the step is 16. The rank is 17 + 6 * 4 + 8 = 49, about
    784 candidates are expected, and there are 2,048 slots.
    """
    step = max(1, whole_pieces(length, SAMPLE))
    rank = whole_pieces(window + 1, step)
    if step > 1:
        rank += 6 * math.isqrt(rank) + 8
    return rank, power_of_two(2 * rank * step)


def top_by_kernels(score_XN: Tensor, margin_X: Tensor, window: int) -> Tensor:
    """Return the places `[X, W]` of the best of each row, ascending, int32; NaN is the worst."""
    assert score_XN.dtype == margin_X.dtype == torch.float32, "the kernels compute in float32"
    X, N = score_XN.shape
    rank, capacity = sampled(N, window)
    score_XN = score_XN.contiguous()
    place_XW = score_XN.new_empty(X, window, dtype=torch.int32)
    if not X:
        return place_XW
    candidates = launch_candidates(score_XN, rank, capacity)
    top_kernels().top_kernel[(X,)](
        score=score_XN,
        place=candidates.place_XK,
        floor=candidates.floor_X,
        count=candidates.count_X,
        margin=margin_X.contiguous(),
        taken=place_XW,
        N=N,
        W=window,
        CAPACITY=capacity,
        BN=2048,
        num_warps=8,
        num_stages=1,
    )
    return place_XW


class Candidates(NamedTuple):
    """The scores of each row among which the best are, see `top_kernels.py`."""

    place_XK: Tensor
    """Their places, ascending; as many as there are slots."""
    floor_X: Tensor
    """The score that they reach."""
    count_X: Tensor
    """Their number."""


def launch_candidates(score_XN: Tensor, rank: int, capacity: int) -> Candidates:
    """Return the candidates of each row. Args: see `sampled`."""
    X, N = score_XN.shape
    words = whole_pieces(N, 32)
    mark = score_XN.new_empty(X, words, dtype=torch.int32)
    candidates = Candidates(
        place_XK=mark.new_empty(X, capacity),
        floor_X=score_XN.new_empty(X),
        count_X=mark.new_empty(X),
    )
    module = top_kernels()
    module.floor_kernel[(X,)](
        score=score_XN, floor=candidates.floor_X, N=N, rank=rank, SAMPLE=SAMPLE, num_warps=8
    )
    module.mark_kernel[(X, whole_pieces(words, MARK_TILE))](
        score=score_XN, floor=candidates.floor_X, mark=mark, N=N, BW=MARK_TILE, num_warps=4
    )
    module.list_kernel[(X,)](
        mark=mark,
        place=candidates.place_XK,
        count=candidates.count_X,
        N=N,
        CAPACITY=capacity,
        BW=min(2048, power_of_two(words)),
        num_warps=4,
    )
    return candidates


top_by_sample = custom_op("rtx::top_by_sample")(top_by_kernels)


@top_by_sample.register_fake
def _(score_XN: Tensor, margin_X: Tensor, window: int) -> Tensor:
    return score_XN.new_empty(len(score_XN), window, dtype=torch.int32)


def best_places(score: Tensor, count: int, margin: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what `static_selection.best_places` does, of float32."""
    return best_places_with(earliest, score.detach(), count, margin)


def earliest_by_kernel(
    score_XN: Tensor,
    best_XK: Tensor,
    edge_X2: Tensor,
    margin_X1: Tensor,
) -> Tensor:
    """Return what `static_selection.earliest` does, of float32."""
    assert score_XN.dtype == margin_X1.dtype == torch.float32, "the kernels compute in float32"
    X, N = score_XN.shape
    K = best_XK.shape[1]
    place_XK = score_XN.new_empty(X, K - 1, dtype=torch.int32)
    if X:
        top_kernels().earliest_kernel[(X,)](
            score=score_XN.contiguous(),
            best=best_XK.contiguous(),
            edge=edge_X2.contiguous(),
            margin=margin_X1.contiguous(),
            taken=place_XK,
            N=N,
            K=K,
            BN=1024,
            num_warps=4,
        )
    return place_XK


earliest = custom_op("rtx::earliest")(earliest_by_kernel)


@earliest.register_fake
def _(score_XN: Tensor, best_XK: Tensor, edge_X2: Tensor, margin_X1: Tensor) -> Tensor:
    return score_XN.new_empty(len(score_XN), best_XK.shape[1] - 1, dtype=torch.int32)


# The sums of lists.

PARTS_OF_SUM = 16
"""Parts of a list that programs of `sum_kernel` add up."""


def sums_by_kernel(x_RD: Tensor, row_M: Tensor, count_L: Tensor) -> Tensor:
    """Return what `static_selection.list_sums` does, of float32 and int32 rows."""
    assert x_RD.dtype == torch.float32, "the kernels compute in float32"
    L = len(count_L)
    D = x_RD.shape[1]
    if not L or not len(row_M):
        return x_RD.new_zeros(L, D, dtype=torch.float64)
    part_LSD = x_RD.new_empty(L, PARTS_OF_SUM, D, dtype=torch.float64)
    chunk = min(128, max(16, power_of_two(D)))
    kernels().sum_kernel[(L, whole_pieces(D, chunk), PARTS_OF_SUM)](
        x=x_RD.contiguous(),
        row_M=row_M.contiguous(),
        bound_L1=bounds(count_L, len(row_M)).int(),
        part=part_LSD,
        D=D,
        CHUNK=chunk,
        BM=32,
        num_warps=4,
    )
    return part_LSD.sum(1)


list_sums = custom_op("rtx::list_sums")(sums_by_kernel)


@list_sums.register_fake
def _(x_RD: Tensor, row_M: Tensor, count_L: Tensor) -> Tensor:
    return x_RD.new_empty(len(count_L), x_RD.shape[1], dtype=torch.float64)
