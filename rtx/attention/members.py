"""Which positions belong to which cluster, and how the choice looks when only the prefix may be read.

Scores are dot products of a centroid with a normalised vector, in float32 or wider; nothing here is differentiated. A
head's scores, 4 N^2 / W bytes at C = N / W clusters, are held at once.

Shapes: B sequences, H heads, X = B * H of them or some of those, C clusters, N positions, D head size, W attention
window, L = B * H * C lists, M members of all lists together, T positions of a piece.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.autocast import no_autocast
from rtx.attention.engine import native, norm
from rtx.attention.pieces import MAX_SCORES
from rtx.attention.reads import MemberLists
from rtx.attention.static import is_static
from rtx.attention.ties import best_places, centroid_margin, highest_clusters


def normalise(x_BHND: Tensor) -> Tensor:
    """Return LayerNorm(x) without scale or bias, at least in float32 (Algorithm 1, line 7)."""
    x_BHND = x_BHND.to(torch.promote_types(x_BHND.dtype, torch.float32))
    one_D = x_BHND.new_ones(x_BHND.shape[-1:])  # a scale of 1 takes torch's vectorised loop, twice as fast on a CPU
    return F.layer_norm(x_BHND, one_D.shape, one_D, eps=norm.EPSILON)


def normalise_twice(x_BHND: Tensor, backend: str) -> tuple[Tensor, Tensor | None]:
    """Return `normalise(x)`, and the same in the type of `x` where our kernels make both in one pass, else None.

    Our kernels do on a GPU, and on a CPU with `backend="triton"`.
    """
    if backend == "torch" or not is_static(x_BHND, backend) or not norm.can_normalise(x_BHND):
        return normalise(x_BHND), None
    wide_BHND, narrow_BHND = norm.normalise(x_BHND)
    return wide_BHND, None if x_BHND.dtype == wide_BHND.dtype else narrow_BHND


def products(query: Tensor, key: Tensor) -> Tensor:
    """Return the dot products of rows, float32 or wider also under autocast: narrow ones are equal far too often."""
    wide = torch.promote_types(key.dtype, torch.float32)
    with no_autocast(key):
        return query.to(wide) @ key.to(wide).transpose(-1, -2)


def centroid_scores(centroid_HCD: Tensor, x_BHND: Tensor) -> Tensor:
    """Return the dot products `[B, H, C, N]` of centroids with normalised vectors, float32 or wider."""
    return products(centroid_HCD, x_BHND)


def by_scores(
    centroid_HCD: Tensor, x_BHND: Tensor, threshold_HC: Tensor | None, *, window: int, nearest: bool
) -> native.Selected:
    """Return what `native.select` does, by torch's kernels, some heads at a time."""
    (B, H, N, _), C = x_BHND.shape, centroid_HCD.shape[1]
    threshold_XC = None if threshold_HC is None else threshold_HC.repeat(B, 1)
    margin_XC = centroid_margin(centroid_HCD, x_BHND.dtype).repeat(B, 1)
    every = centroid_HCD.repeat(B, 1, 1), x_BHND.flatten(0, 1), threshold_XC, margin_XC
    piece = max(1, MAX_SCORES // max(1, C * N))
    rows, near, sums = [], [], []
    for first in range(0, max(1, B * H), piece):
        centroid, x, threshold, margin = (None if one is None else one[first : first + piece] for one in every)
        assert centroid is not None and x is not None and margin is not None
        score_XCN = centroid_scores(centroid, x)
        if window:
            rows.append(members(score_XCN, threshold, margin, window) + first * C * N)
        if nearest:
            near.append(highest_clusters(score_XCN, margin))
        if threshold is not None:
            sums.append(moments(score_XCN))
    score_M = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64, device=x_BHND.device)
    list_M = score_M // max(1, N)
    count_L = torch.bincount(list_M, minlength=B * H * C)
    row_M = list_M // C * N + score_M % max(1, N)
    moment_2BHC = torch.cat(sums, dim=1).view(2, B, H, C) if sums else None
    return row_M, count_L, torch.cat(near).view(B, H, N) if near else None, moment_2BHC


def moments(score_XCN: Tensor) -> Tensor:
    """Return the sums of scores and of their squares, `[2, X, C]`.

    In float64: the deviation of scores that hardly differ is lost in a float32 sum of squares.
    """
    wide_XCN = score_XCN.double()
    sum_XC = wide_XCN.sum(-1)
    return torch.stack([sum_XC, wide_XCN.square().sum(-1)])


def members(score_XCN: Tensor, threshold_XC: Tensor | None, margin_XC: Tensor, window: int) -> Tensor:
    """Return the numbers of the scores that make their positions members, list after list."""
    if threshold_XC is not None:
        return joins(score_XCN, threshold_XC, margin_XC).flatten().nonzero().flatten()
    X, C, N = score_XCN.shape
    # NaN is worse than every score.
    sound_XCN = score_XCN.nan_to_num(-math.inf, math.inf, -math.inf)
    best_XCW = best_places(sound_XCN, window, lambda _: margin_XC[..., None]).sort(dim=-1).values
    return (best_XCW + torch.arange(X * C, device=score_XCN.device).view(X, C, 1) * N).flatten()


def joins(score_XCN: Tensor, threshold_XC: Tensor | None, margin_XC: Tensor) -> Tensor:
    """Return the memberships by thresholds, `[X, C, N]` (X: any dimensions), each decided by its position alone.

    Selections "causal" and, without thresholds, "nearest": no position is left out, and thresholds that follow counts
    share them out.
    """
    if threshold_XC is None:
        joins_XCN = torch.zeros_like(score_XCN, dtype=torch.bool)
        above_XCN = score_XCN
    else:
        above_XCN = score_XCN - threshold_XC[..., None]
        joins_XCN = above_XCN >= -margin_XC[..., None]
    return joins_XCN.scatter_(-2, highest_clusters(above_XCN, margin_XC)[..., None, :], True)


class PrefixTopK:
    """Streaming top-w: the best `window` scores of each cluster so far, and the position behind each.

    Of scores no more than `margin` (broadcast to `shape`) apart the earlier position wins.
    """

    def __init__(self, shape: tuple[int, ...], window: int, like: Tensor, margin: Tensor | float = 0.0) -> None:
        self.margin = torch.as_tensor(margin, dtype=like.dtype, device=like.device)[..., None]
        self.score_W = like.new_full((*shape, window), -math.inf)
        # An empty slot counts as later than all positions, so that empty slots are filled first, in order.
        empty_W = (1 << 40) - torch.arange(window, device=like.device)
        self.position_W = empty_W.expand(self.score_W.shape).clone()

    def bar(self) -> Tensor:
        """Return the score that a newcomer must exceed, `[*shape, 1]`; it never falls."""
        return self.score_W.amin(-1, keepdim=True) + self.margin

    def offer(self, score: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Offer one position to every cluster; return who takes it, and there its slot and who held it."""
        bar = self.bar()
        joins = score[..., None] > bar
        slot = torch.where(self.score_W <= bar, self.position_W, -1).argmax(-1, keepdim=True)
        self.score_W.scatter_(-1, slot, torch.where(joins, score[..., None], self.score_W.gather(-1, slot)))
        held = self.position_W.gather(-1, slot)
        self.position_W.scatter_(-1, slot, torch.where(joins, position[..., None], held))
        return joins[..., 0], slot[..., 0], held[..., 0]


class Arrivals(NamedTuple):
    """Who is among the best W of its own prefix, at which position it no longer is (N: never), and the best of all."""

    lists: MemberLists
    leaves_M: Tensor
    best: PrefixTopK


@torch.no_grad()
def arrivals(centroid_HCD: Tensor, x_BHND: Tensor, window: int) -> Arrivals:
    """Return the top-w sets of every prefix: who joins each cluster on arrival, and until when it stays.

    Position i reads j <= i where j joined on arrival and leaves behind i.
    """
    (B, H, N, _), C = x_BHND.shape, centroid_HCD.shape[1]
    margin_L = centroid_margin(centroid_HCD, x_BHND.dtype).repeat(B, 1, 1).flatten()
    wide = x_BHND.new_zeros(0, dtype=torch.promote_types(x_BHND.dtype, torch.float32))
    best = PrefixTopK((B * H * C,), window, wide, margin_L)
    none_M = torch.zeros(0, dtype=torch.int64, device=x_BHND.device)
    joined, first = [(none_M, none_M, none_M)], 0
    while first < N:
        # At most a quarter of the prefix: of scores that are normal about W / 4 positions of it may still join.
        end = min(N, first + min(max(1, MAX_SCORES // max(1, B * H * C)), max(window, first // 4)))
        score_BHCT = centroid_scores(centroid_HCD, x_BHND[:, :, first:end])
        joined += newcomers(best, score_BHCT.flatten(0, 2), first)
        first = end
    list_M, position_M, held_M = (torch.cat(parts) for parts in zip(*joined, strict=True))
    number_M, order_M = (list_M * N + position_M).sort()
    leaves_M = torch.full_like(number_M, N)
    pushed_M = held_M < N  # an empty slot counts as later than all
    leaves_M[torch.searchsorted(number_M, (list_M * N + held_M)[pushed_M])] = position_M[pushed_M]
    lists = MemberLists(list_M[order_M] // C * N + position_M[order_M], torch.bincount(list_M, minlength=B * H * C))
    return Arrivals(lists, leaves_M, best)


def newcomers(best: PrefixTopK, score_LT: Tensor, first: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Offer a piece of positions; return who joined: lists, positions, and who held the slots before.

    Who fails to pass what was the bar before the piece never joins: only the others are offered, each list its own.
    """
    list_M, at_M = (score_LT > best.bar()).nonzero(as_tuple=True)
    count_L = torch.bincount(list_M, minlength=len(score_LT))
    first_L = count_L.cumsum(0) - count_L
    joined = []
    for turn in range(int(count_L.max()) if len(count_L) else 0):
        real_L = turn < count_L
        at_L = at_M[(first_L + turn).clamp(max=len(at_M) - 1)]
        score_L = score_LT.gather(1, at_L[:, None])[:, 0].masked_fill(~real_L, -math.inf)
        joins_L, _, held_L = best.offer(score_L, at_L + first)
        joined.append((joins_L.nonzero()[:, 0], at_L[joins_L] + first, held_L[joins_L]))
    return joined
