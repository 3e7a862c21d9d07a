"""Select the members of clusters with Triton kernels, in static shapes.

This module has the same functions as `static_selection.py`, whose docstring has the words and an
example. The CPU launches kernels and never waits for the GPU. Everything is a custom operator with
static shapes, so that `torch.compile` puts a whole training step into one graph, and a CUDA graph
can replay it.

Shapes: B sequences, H heads, X = B * H, C clusters of a head, N positions, D head size, W attention
window, L = B * H * C lists, L1 = L + 1, R = B * H * N rows (row = (b * H + h) * N + n), R1 = R + 1,
M slots of members, K scores. T tiles of positions: of `TILE` positions for scores and their
moments, of `MEMBER_TILE` for members. LT = L * T.
"""

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.engine.lists import RowMembers
from rtx.attention.engine.rounding import power_of_two, whole_pieces
from rtx.attention.engine.static_selection import (
    Ranges,
    Selected,
    best_places_with,
    bounds,
    shared_lists,
    top_members_with,
)

TILE = 64
"""Positions that a program of `score_kernel` works on."""
MEMBER_TILE = 32
"""Positions that a program of `tally_kernel` or `write_kernel` works on; more spill registers."""
ORDER_TILE = 256
"""Slots that a program of `order_kernel` works on."""


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


class Members(NamedTuple):
    """What the operator `select_members` returns; see `Selected` and `Ranges`."""

    row_M: Tensor
    count_L: Tensor
    start_M: Tensor
    stop_M: Tensor
    low_M: Tensor
    high_M: Tensor
    first_R1: Tensor
    """With `member_M` the `RowMembers`."""
    member_M: Tensor
    count: Tensor
    """The number of filled slots, int32 `[1]`."""
    lost: Tensor
    nearest_BHN: Tensor
    """Empty unless requested."""
    moment_2BHC: Tensor
    """Empty without thresholds."""


MembersTuple = tuple[
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
]
"""The type of `Members` for torch.library, which has no named tuples."""


def by_thresholds(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor | None,
    margin_HC: Tensor,
    *,
    window: int,
    attend_self: bool,
    room: int,
    nearest: bool = False,
) -> Selected:
    """Return what `static_selection.by_thresholds` does, of float32."""
    assert x_BHND.dtype == torch.float32, "the kernels compute in float32"
    outputs = select_members(
        centroid_HCD.detach(),
        x_BHND.detach(),
        None if threshold_HC is None else threshold_HC.detach(),
        margin_HC.detach(),
        window,
        attend_self,
        room,
        nearest,
    )
    members = Members(*outputs)
    ranges = Ranges(members.start_M, members.stop_M, members.low_M, members.high_M)
    by_row = RowMembers(members.first_R1, members.member_M)
    return Selected(
        row_M=members.row_M,
        count_L=members.count_L,
        lists=shared_lists(members.row_M, ranges, by_row, members.count),
        lost=members.lost,
        nearest_BHN=members.nearest_BHN if nearest else None,
        moment_2BHC=None if threshold_HC is None else members.moment_2BHC,
    )


def members_by_kernels(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor | None,
    margin_HC: Tensor,
    window: int,
    attend_self: bool,
    room: int,
    nearest: bool,
) -> MembersTuple:
    """Return the `Members`, by the kernels in the order that `selection_kernels.py` describes."""
    has_thresholds = threshold_HC is not None
    if not x_BHND.numel():
        return no_members(centroid_HCD, x_BHND, has_thresholds, room, nearest)
    C = centroid_HCD.shape[1]
    # Without thresholds the nearest cluster is the highest one, which is written in any case.
    wants_nearest = nearest and has_thresholds
    scored = launch_score(centroid_HCD, x_BHND, threshold_HC, margin_HC, wants_nearest)
    count_LT = launch_tally(scored, C, has_thresholds)
    last_LT = count_LT.flatten().cumsum(0)
    written = launch_write(scored, count_LT, last_LT, room, window, attend_self, has_thresholds)
    ordered = launch_order(written, last_LT[-1:])
    return Members(
        row_M=written.row_M,
        count_L=count_LT.sum(-1),
        start_M=written.start_M,
        stop_M=written.stop_M,
        low_M=written.low_M,
        high_M=written.high_M,
        first_R1=ordered.first_R1,
        member_M=ordered.member_M,
        count=ordered.count,
        lost=ordered.lost,
        nearest_BHN=scored.highest_BHN if nearest and not has_thresholds else scored.nearest_BHN,
        moment_2BHC=launch_moments(scored.moment_2LT, x_BHND, C),
    )


select_members = torch.library.custom_op("rtx::select_members", members_by_kernels, mutates_args=())


@select_members.register_fake
def _(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor | None,
    margin_HC: Tensor,
    window: int,
    attend_self: bool,
    room: int,
    nearest: bool,
) -> MembersTuple:
    return no_members(centroid_HCD, x_BHND, threshold_HC is not None, room, nearest)


def no_members(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    has_thresholds: bool,
    room: int,
    nearest: bool,
) -> Members:
    """Return the result of `select_members` without positions: all slots are empty.

    It has the shapes and types of any result, so that it serves as the operator's fake as well.
    """
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    row_M = x_BHND.new_zeros(room, dtype=torch.int32)
    count_L = x_BHND.new_zeros(B * H * C, dtype=torch.int64)
    nearest_shape = (B, H, N) if nearest else (0,)
    moment_shape = (2, B, H, C) if has_thresholds else (0,)
    return Members(
        row_M=row_M,
        count_L=count_L,
        start_M=torch.full_like(row_M, room),
        stop_M=torch.full_like(row_M, room),
        low_M=torch.full_like(row_M, room),
        high_M=torch.full_like(row_M, room),
        first_R1=row_M.new_zeros(B * H * N + 1),
        member_M=torch.arange(room, dtype=torch.int32, device=row_M.device),
        count=row_M.new_zeros(1),
        lost=count_L.new_zeros(1),
        nearest_BHN=row_M.new_zeros(nearest_shape),
        moment_2BHC=x_BHND.new_zeros(moment_shape, dtype=torch.float64),
    )


class Scored(NamedTuple):
    """What `score_kernel` writes; `nearest_BHN` and `moment_2LT` may be empty."""

    bits: Tensor
    highest_BHN: Tensor
    nearest_BHN: Tensor
    moment_2LT: Tensor


def launch_score(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor | None,
    margin_HC: Tensor,
    nearest: bool,
) -> Scored:
    """Score all positions; return what `score_kernel` writes."""
    module = kernels()
    B, H, N, D = x_BHND.shape
    C = centroid_HCD.shape[1]
    tiles = whole_pieces(N, TILE)
    has_thresholds = threshold_HC is not None
    words = whole_pieces(C, int(module.CLUSTERS.value)) if has_thresholds else 0
    bits = x_BHND.new_empty(B * H, words, N, dtype=torch.int32)
    highest_BHN = x_BHND.new_empty(B, H, N, dtype=torch.int32)
    nearest_BHN = x_BHND.new_empty((B, H, N) if nearest else (0,), dtype=torch.int32)
    moment_2LT = x_BHND.new_empty(2, B * H * C, tiles if has_thresholds else 0)
    margin_HC = margin_HC.contiguous()
    # Without thresholds the kernel does not read them, but needs a pointer.
    threshold_HC = margin_HC if threshold_HC is None else threshold_HC.contiguous()
    exactness = precision(x_BHND.device)
    module.score_kernel[(B * H, tiles)](
        x_BHND.contiguous(), centroid_HCD.contiguous(), threshold_HC, margin_HC,
        bits, highest_BHN, nearest_BHN, moment_2LT, N, H, C,
        D=D, CHUNK=chunk_of(D, exactness), BN=TILE, PRECISION=exactness,
        THRESHOLDS=has_thresholds, NEAREST=nearest, num_warps=4, num_stages=1,
    )  # fmt: skip
    return Scored(bits, highest_BHN, nearest_BHN, moment_2LT)


def chunk_of(size: int, exactness: str) -> int:
    """Return how many of the D numbers of vectors `score_kernel` multiplies at a time.

    `tl.dot` needs 16 at least. The limits keep what a program holds near the size of its registers.
    """
    most = 32 if exactness == "ieee" else 64
    return min(most, max(16, power_of_two(size)))


def launch_tally(scored: Scored, C: int, has_thresholds: bool) -> Tensor:
    """Return how many members each list has in each tile of `MEMBER_TILE` positions, `[L, T]`."""
    B, H, N = scored.highest_BHN.shape
    tiles = whole_pieces(N, MEMBER_TILE)
    count_LT = scored.bits.new_empty(B * H * C, tiles)
    kernels().tally_kernel[(B * H, tiles)](
        scored.bits, scored.highest_BHN, count_LT, N, C,
        BN=MEMBER_TILE, THRESHOLDS=has_thresholds, num_warps=4,
    )  # fmt: skip
    return count_LT


class Written(NamedTuple):
    """What `write_kernel` writes; empty slots are not written."""

    row_M: Tensor
    start_M: Tensor
    stop_M: Tensor
    low_M: Tensor
    high_M: Tensor
    rank_M: Tensor
    """How many members with the same row are in lists before."""
    times_R: Tensor
    """How many members each row has."""


def launch_write(
    scored: Scored,
    count_LT: Tensor,
    last_LT: Tensor,
    room: int,
    window: int,
    attend_self: bool,
    has_thresholds: bool,
) -> Written:
    """Write all members to their slots.

    Args:
        count_LT: the result of `launch_tally`.
        last_LT: its running sums, flattened, each with its own count included.
    """
    B, H, N = scored.highest_BHN.shape
    L, tiles = count_LT.shape
    new_empty = scored.bits.new_empty
    written = Written(
        row_M=new_empty(room),
        start_M=new_empty(room),
        stop_M=new_empty(room),
        low_M=new_empty(room),
        high_M=new_empty(room),
        rank_M=new_empty(room),
        times_R=new_empty(B * H * N),
    )
    C = L // (B * H)
    kernels().write_kernel[(B * H, tiles)](
        scored.bits, scored.highest_BHN, count_LT, last_LT, *written, room, min(window, N), N, C,
        BN=MEMBER_TILE, THRESHOLDS=has_thresholds, SELF=attend_self, num_warps=4,
    )  # fmt: skip
    return written


class Ordered(NamedTuple):
    """What `order_kernel` writes, and what it sorts by."""

    first_R1: Tensor
    """Where the members of each row begin in `member_M`."""
    member_M: Tensor
    count: Tensor
    lost: Tensor


def launch_order(written: Written, total: Tensor) -> Ordered:
    """Sort the members by row; fill the empty slots of `written` in place.

    Args:
        total: the number of members, int64 `[1]`; it may exceed the room.
    """
    room = len(written.row_M)
    first_R1 = written.times_R.new_zeros(len(written.times_R) + 1)
    torch.cumsum(written.times_R, 0, dtype=torch.int32, out=first_R1[1:])
    ordered = Ordered(
        first_R1=first_R1,
        member_M=torch.empty_like(written.row_M),
        count=written.row_M.new_empty(1),
        lost=total.new_empty(1),
    )
    # One program at least: it writes the counts, also without any slot.
    programs = max(1, whole_pieces(room, ORDER_TILE))
    kernels().order_kernel[(programs,)](
        written.row_M, written.start_M, written.stop_M, written.low_M, written.high_M,
        written.rank_M, first_R1, total, ordered.member_M, ordered.count, ordered.lost, room,
        BM=ORDER_TILE, num_warps=4,
    )  # fmt: skip
    return ordered


def launch_moments(moment_2LT: Tensor, x_BHND: Tensor, C: int) -> Tensor:
    """Return the sums `[2, B, H, C]` of scores and of their squares; empty without `moment_2LT`.

    Args:
        moment_2LT: the moments of tiles of `TILE` positions.
    """
    _, L, tiles = moment_2LT.shape
    if not tiles:
        return moment_2LT.new_empty(0, dtype=torch.float64)
    B, H, N, _ = x_BHND.shape
    moment_2BHC = moment_2LT.new_empty(2, B, H, C, dtype=torch.float64)
    sizes = {"TILE": TILE, "BT": 128, "num_warps": 4}
    kernels().moment_kernel[(L,)](moment_2LT, moment_2BHC, N, L, tiles, **sizes)
    return moment_2BHC


# The best scores.

SAMPLE = 4096
"""Scores of a row that are its sample; the candidates for the best are found by it."""
MIN_SAMPLED = 8192
"""Rows this long are sampled: torch.topk reads a row some 18 times, our kernels twice."""
MAX_CANDIDATES = 4096
"""The most candidates of a row: a program holds all of them in registers."""


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
    _, room = sampled(length, window)
    return window < length and length >= MIN_SAMPLED and room <= MAX_CANDIDATES


def sampled(length: int, window: int) -> tuple[int, int]:
    """Return the rank of the sample's score that candidates reach, and the room for candidates.

    Of every `step` scores one is in the sample. So about rank * step scores of the row reach the
    sample's score of that rank. window + 1 must, nearly always: if not, the row is searched again.
    The number that does is random, with a deviation of about sqrt(rank) in the sample, so that the
    rank is six deviations higher, and a constant for small ranks. There is room for twice the
    expected number of candidates, or up to four times, as it is a power of two.

    Example: for length 65,536 and window 256 the step is 16. The rank is 17 + 6 * 4 + 8 = 49, about
    784 candidates are expected, and there is room for 2,048.
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
    rank, room = sampled(N, window)
    score_XN = score_XN.contiguous()
    place_XW = score_XN.new_empty(X, window, dtype=torch.int32)
    if not X:
        return place_XW
    # The candidates of each row; `candidate_kernel` describes them.
    at_XK = place_XW.new_empty(X, room)
    value_XK = score_XN.new_empty(X, room)
    floor_X = score_XN.new_empty(X)
    reached_2X = place_XW.new_empty(2, X)
    top_kernels().candidate_kernel[(X,)](
        score_XN, at_XK, value_XK, floor_X, reached_2X, N, rank,
        ROOM=room, SAMPLE=SAMPLE, BN=2048, num_warps=8, num_stages=1,
    )  # fmt: skip
    top_kernels().top_kernel[(X,)](
        score_XN, at_XK, value_XK, floor_X, reached_2X, margin_X.contiguous(), place_XW, N, window,
        ROOM=room, BN=2048, num_warps=8, num_stages=1,
    )  # fmt: skip
    return place_XW


top_by_sample = torch.library.custom_op("rtx::top_by_sample", top_by_kernels, mutates_args=())


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
            score_XN.contiguous(), best_XK.contiguous(), edge_X2.contiguous(),
            margin_X1.contiguous(), place_XK, N, K, BN=1024, num_warps=4,
        )  # fmt: skip
    return place_XK


earliest = torch.library.custom_op("rtx::earliest", earliest_by_kernel, mutates_args=())


@earliest.register_fake
def _(score_XN: Tensor, best_XK: Tensor, edge_X2: Tensor, margin_X1: Tensor) -> Tensor:
    return score_XN.new_empty(len(score_XN), best_XK.shape[1] - 1, dtype=torch.int32)


# The sums of lists.


def sums_by_kernel(x_RD: Tensor, row_M: Tensor, count_L: Tensor) -> Tensor:
    """Return what `static_selection.list_sums` does, of float32 and int32 rows."""
    assert x_RD.dtype == torch.float32, "the kernels compute in float32"
    L = len(count_L)
    D = x_RD.shape[1]
    total_LD = x_RD.new_zeros(L, D, dtype=torch.float64)
    if L and len(row_M):
        chunk = min(128, max(16, power_of_two(D)))
        bound_L1 = bounds(count_L, len(row_M)).int()
        kernels().sum_kernel[(L, whole_pieces(D, chunk))](
            x_RD.contiguous(), row_M.contiguous(), bound_L1, total_LD,
            D=D, CHUNK=chunk, BM=32, num_warps=4,
        )  # fmt: skip
    return total_LD


list_sums = torch.library.custom_op("rtx::list_sums", sums_by_kernel, mutates_args=())


@list_sums.register_fake
def _(x_RD: Tensor, row_M: Tensor, count_L: Tensor) -> Tensor:
    return x_RD.new_empty(len(count_L), x_RD.shape[1], dtype=torch.float64)
