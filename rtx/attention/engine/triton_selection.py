"""Which positions belong to which cluster, by Triton's kernels, without a wait for the GPU.

The operators have static shapes, so that torch.compile takes a whole step as one graph, and CUDA
graphs replay it. `static_selection.py` has the same functions by torch's kernels.

Shapes: B sequences, H heads, X = B * H, C clusters of a head, N positions, D head size, W attention
window, L = B * H * C lists, R = B * H * N rows (row = (b * H + h) * N + n), T tiles of positions, M
room for members.
"""

import functools
import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from rtx.attention.engine.lists import RowMembers
from rtx.attention.engine.static_selection import (
    Selected,
    best_places_by,
    bounds,
    shared_lists,
    top_members_by,
)

TILE = 64
"""Positions that a program scores."""
MEMBER_TILE = 32
"""Positions whose members a program counts or writes: with more, registers spill."""


@functools.cache
def kernels() -> ModuleType:
    """Return the kernels' module, which needs Triton."""
    from rtx.attention.engine import selection_kernels

    return selection_kernels


@functools.cache
def precision(device: torch.device) -> str:
    """Return how the kernels multiply float32: three products of TF32 come within its rounding."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return "ieee"
    return "tf32x3"


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
    found = select_members(
        centroid_HCD.detach(),
        x_BHND.detach(),
        None if threshold_HC is None else threshold_HC.detach(),
        margin_HC.detach(),
        window,
        attend_self,
        room,
        nearest,
    )
    row_M, count_L, start_M, stop_M, low_M, high_M, first_R1, member_M, count, lost, near_BHN, moment_2BHC = found
    ranges = start_M, stop_M, low_M, high_M
    lists = shared_lists(row_M, ranges, RowMembers(first_R1, member_M), count)
    return Selected(
        row_M,
        count_L,
        lists,
        lost,
        near_BHN if nearest else None,
        None if threshold_HC is None else moment_2BHC,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what `Selected` consists of: rows, counts, start, stop, low, high, members of rows, ...

    Of the last two, the nearest clusters and the moments, what is not wanted is empty.
    """
    if not x_BHND.numel():
        return nobody(centroid_HCD, x_BHND, threshold_HC is not None, room, nearest)
    has_thresholds = threshold_HC is not None
    wants_nearest = nearest and has_thresholds
    bits, highest_BHN, near_BHN, moment_2LT = scored(centroid_HCD, x_BHND, threshold_HC, margin_HC, wants_nearest)
    count_LT = tallied(bits, highest_BHN, centroid_HCD.shape[1], has_thresholds)
    last_S = count_LT.flatten().cumsum(0)
    members = written(bits, highest_BHN, count_LT, last_S, room, window, attend_self, has_thresholds)
    row_M, start_M, stop_M, low_M, high_M, rank_M, times_R = members
    ranges = start_M, stop_M, low_M, high_M
    first_R1, member_M, count, lost = ordered(row_M, ranges, rank_M, times_R, last_S[-1:])
    if nearest and not has_thresholds:
        near_BHN = highest_BHN
    moment_2BHC = joined_moments(moment_2LT, centroid_HCD, x_BHND)
    return (
        row_M,
        count_LT.sum(-1),
        start_M,
        stop_M,
        low_M,
        high_M,
        first_R1,
        member_M,
        count,
        lost,
        near_BHN,
        moment_2BHC,
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
) -> tuple[Tensor, ...]:
    return nobody(centroid_HCD, x_BHND, threshold_HC is not None, room, nearest)


def nobody(
    centroid_HCD: Tensor, x_BHND: Tensor, has_thresholds: bool, room: int, nearest: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what `select_members` does where no cluster has members."""
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    row_M = x_BHND.new_zeros(room, dtype=torch.int32)
    start_M, stop_M, low_M, high_M = (torch.full_like(row_M, room) for _ in range(4))
    member_M = torch.arange(room, dtype=torch.int32, device=row_M.device)
    count_L = x_BHND.new_zeros(B * H * C, dtype=torch.int64)
    first_R1 = row_M.new_zeros(B * H * N + 1)
    count = row_M.new_zeros(1)
    lost = count_L.new_zeros(1)
    near_BHN = row_M.new_zeros((B, H, N) if nearest else (0,))
    moment_2BHC = x_BHND.new_zeros((2, B, H, C) if has_thresholds else (0,), dtype=torch.float64)
    return row_M, count_L, start_M, stop_M, low_M, high_M, first_R1, member_M, count, lost, near_BHN, moment_2BHC


def chunk_of(size: int, exactness: str) -> int:
    """Return how many numbers of vectors are multiplied at once: more do not fit in registers."""
    return min(32 if exactness == "ieee" else 64, max(16, 1 << (size - 1).bit_length()))


def scored(
    centroid_HCD: Tensor, x_BHND: Tensor, threshold_HC: Tensor | None, margin_HC: Tensor, nearest: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `score_kernel` writes; what is not wanted is empty."""
    module = kernels()
    B, H, N, D = x_BHND.shape
    C = centroid_HCD.shape[1]
    tiles = -(-N // TILE)
    exactness = precision(x_BHND.device)
    clusters = int(module.CLUSTERS.value)
    has_thresholds = threshold_HC is not None
    x_BHND = x_BHND.contiguous()
    centroid_HCD = centroid_HCD.contiguous()
    margin_HC = margin_HC.contiguous()
    threshold_HC = margin_HC if threshold_HC is None else threshold_HC.contiguous()
    words = -(-C // clusters) if has_thresholds else 0
    bits = x_BHND.new_empty(B * H, words, N, dtype=torch.int32)
    highest_BHN = x_BHND.new_empty(B, H, N, dtype=torch.int32)
    near_BHN = x_BHND.new_empty((B, H, N) if nearest else (0,), dtype=torch.int32)
    moment_2LT = x_BHND.new_empty(2, B * H * C, tiles if has_thresholds else 0)
    module.score_kernel[(B * H, tiles)](
        x_BHND, centroid_HCD, threshold_HC, margin_HC, bits, highest_BHN, near_BHN, moment_2LT, N, H, C,
        D=D, CHUNK=chunk_of(D, exactness), BN=TILE, PRECISION=exactness,
        THRESHOLDS=has_thresholds, NEAREST=nearest, num_warps=4, num_stages=1,
    )  # fmt: skip
    return bits, highest_BHN, near_BHN, moment_2LT


def tallied(bits: Tensor, highest_BHN: Tensor, clusters: int, has_thresholds: bool) -> Tensor:
    """Return how many members each list has in each tile, `[L, T]`."""
    B, H, N = highest_BHN.shape
    tiles = -(-N // MEMBER_TILE)
    count_LT = bits.new_empty(B * H * clusters, tiles)
    sizes = {"BN": MEMBER_TILE, "THRESHOLDS": has_thresholds, "num_warps": 4}
    kernels().tally_kernel[(B * H, tiles)](bits, highest_BHN, count_LT, N, clusters, **sizes)
    return count_LT


def written(
    bits: Tensor,
    highest_BHN: Tensor,
    count_LT: Tensor,
    last_S: Tensor,
    room: int,
    window: int,
    attend_self: bool,
    has_thresholds: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return rows, start, stop, low, high and ranks of members, and how many members each row has.

    `last_S` are the sums of the counts up to each. What is behind the last member is not written.
    """
    B, H, N = highest_BHN.shape
    L, tiles = count_LT.shape
    row_M, start_M, stop_M, low_M, high_M, rank_M = (bits.new_empty(room) for _ in range(6))
    times_R = bits.new_empty(B * H * N)
    members = row_M, start_M, stop_M, low_M, high_M, rank_M, times_R
    sizes = {"BN": MEMBER_TILE, "THRESHOLDS": has_thresholds, "SELF": attend_self, "num_warps": 4}
    kernels().write_kernel[(B * H, tiles)](
        bits, highest_BHN, count_LT, last_S, *members, room, min(window, N), N, L // (B * H), **sizes
    )
    return members


def ordered(
    row_M: Tensor, ranges: tuple[Tensor, ...], rank_M: Tensor, times_R: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `RowMembers`, how many members are real, and how many are lost; fill the room behind the last."""
    room = len(row_M)
    first_R1 = times_R.new_zeros(len(times_R) + 1)
    torch.cumsum(times_R, 0, dtype=torch.int32, out=first_R1[1:])
    member_M = torch.empty_like(row_M)
    count = row_M.new_empty(1)
    lost = total.new_empty(1)
    tensors = row_M, *ranges, rank_M, first_R1, total, member_M, count, lost
    kernels().order_kernel[(max(1, -(-room // 256)),)](*tensors, room, BM=256, num_warps=4)
    return first_R1, member_M, count, lost


def joined_moments(moment_2LT: Tensor, centroid_HCD: Tensor, x_BHND: Tensor) -> Tensor:
    """Return the sums `[2, B, H, C]` of scores and of their squares, by the moments of tiles, if there are any."""
    _, L, tiles = moment_2LT.shape
    if not tiles:
        return moment_2LT.new_empty(0, dtype=torch.float64)
    B, H, N, _ = x_BHND.shape
    moment_2BHC = moment_2LT.new_empty(2, B, H, centroid_HCD.shape[1], dtype=torch.float64)
    kernels().moment_kernel[(L,)](moment_2LT, moment_2BHC, N, L, tiles, TILE=TILE, BT=128, num_warps=4)
    return moment_2BHC


SAMPLE = 4096
"""Scores of a row in a sample by which candidates for the best are found."""
MIN_SAMPLED = 8192
"""Positions from which the best are found by a sample: `torch.topk` reads the scores some 18 times, a sample twice."""
MAX_CANDIDATES = 4096
"""The most candidates of a row: those are held in registers at once."""


def top_members(score_XCN: Tensor, margin_XC: Tensor, window: int) -> Tensor:
    """Return what `static_selection.top_members` does, of float32."""
    N = score_XCN.shape[-1]
    _, room = sampled(N, window)
    if window >= N or N < MIN_SAMPLED or room > MAX_CANDIDATES:
        return top_members_by(best_places, score_XCN, margin_XC, window)
    margin_X = margin_XC.detach().expand(score_XCN.shape[:-1]).reshape(-1)
    return top_by_sample(score_XCN.detach().reshape(-1, N), margin_X, window).view(*score_XCN.shape[:-1], window)


def sampled(length: int, window: int) -> tuple[int, int]:
    """Return the rank in a sample that the `window` best are sure to reach, nearly, and room for what reaches it."""
    step = max(1, -(-length // SAMPLE))
    rank = -(-(window + 1) // step)
    if step > 1:  # the rank is random: six deviations more
        rank += 6 * math.isqrt(rank) + 8
    return rank, 1 << (2 * rank * step - 1).bit_length()


def top_by_kernels(score_XN: Tensor, margin_X: Tensor, window: int) -> Tensor:
    """Return the places `[X, W]` of the best of each row, ascending, int32; NaN is worse than every score."""
    assert score_XN.dtype == margin_X.dtype == torch.float32, "the kernels compute in float32"
    X, N = score_XN.shape
    rank, room = sampled(N, window)
    score_XN = score_XN.contiguous()
    at_XK = score_XN.new_empty(X, room, dtype=torch.int32)
    value_XK = score_XN.new_empty(X, room)
    floor_X = score_XN.new_empty(X)
    reached_2X = at_XK.new_empty(2, X)
    taken_XW = at_XK.new_empty(X, window)
    if X:
        candidates = score_XN, at_XK, value_XK, floor_X, reached_2X
        sizes = {"ROOM": room, "BN": 2048, "num_warps": 8, "num_stages": 1}
        kernels().candidate_kernel[(X,)](*candidates, N, rank, SAMPLE=SAMPLE, **sizes)
        kernels().top_kernel[(X,)](*candidates, margin_X.contiguous(), taken_XW, N, window, **sizes)
    return taken_XW


top_by_sample = torch.library.custom_op("rtx::top_by_sample", top_by_kernels, mutates_args=())


@top_by_sample.register_fake
def _(score_XN: Tensor, margin_X: Tensor, window: int) -> Tensor:
    return score_XN.new_empty(len(score_XN), window, dtype=torch.int32)


def best_places(score: Tensor, count: int, margin: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what `static_selection.best_places` does, of float32."""
    return best_places_by(earliest, score.detach(), count, margin)


def earliest_by_kernel(score_XN: Tensor, value_XK: Tensor, worst_X2: Tensor, margin_X1: Tensor) -> Tensor:
    """Return what `static_selection.earliest` does, of float32."""
    assert score_XN.dtype == margin_X1.dtype == torch.float32, "the kernels compute in float32"
    X, N = score_XN.shape
    K = value_XK.shape[1]
    taken_XK = score_XN.new_empty(X, K - 1, dtype=torch.int32)
    if X:
        tensors = (x.contiguous() for x in (score_XN, value_XK, worst_X2, margin_X1))
        kernels().earliest_kernel[(X,)](*tensors, taken_XK, N, K, BN=1024, num_warps=4)
    return taken_XK


earliest = torch.library.custom_op("rtx::earliest", earliest_by_kernel, mutates_args=())


@earliest.register_fake
def _(score_XN: Tensor, value_XK: Tensor, worst_X2: Tensor, margin_X1: Tensor) -> Tensor:
    return score_XN.new_empty(len(score_XN), value_XK.shape[1] - 1, dtype=torch.int32)


def sums_by_kernel(x_RD: Tensor, row_M: Tensor, count_L: Tensor) -> Tensor:
    """Return what `static_selection.list_sums` does, of float32 and int32 rows."""
    assert x_RD.dtype == torch.float32, "the kernels compute in float32"
    L = len(count_L)
    D = x_RD.shape[1]
    chunk = min(128, max(16, 1 << (D - 1).bit_length()))
    total_LD = x_RD.new_zeros(L, D, dtype=torch.float64)
    if L and len(row_M):
        bound_L1 = bounds(count_L, len(row_M)).int()
        arguments = x_RD.contiguous(), row_M.contiguous(), bound_L1, total_LD
        kernels().sum_kernel[(L, -(-D // chunk))](*arguments, D=D, CHUNK=chunk, BM=32, num_warps=4)
    return total_LD


list_sums = torch.library.custom_op("rtx::list_sums", sums_by_kernel, mutates_args=())


@list_sums.register_fake
def _(x_RD: Tensor, row_M: Tensor, count_L: Tensor) -> Tensor:
    return x_RD.new_empty(len(count_L), x_RD.shape[1], dtype=torch.float64)
