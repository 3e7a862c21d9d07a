"""Membership: which positions belong to which cluster, and how the choice looks when only the prefix may be read.

Shapes: B sequences, H heads, G heads of all sequences, C clusters, N positions, W attention window, L lists, M members
of all lists together. Scores are dot products of a centroid with a normalised query. Nothing here is differentiated;
neither are the papers' top-k sets. Memory: who holds all scores of a long sequence is `choice.py`'s matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from rtx.attention.lists import Members, last_members, padded
from rtx.attention.products import wide_products

MAX_DRAWS = 1 << 23
"""Random numbers held at once, but for those of one cluster."""


@torch.no_grad()
def centroid_scores(centroid_HCD: Tensor, x_BHND: Tensor) -> Tensor:
    """Return the dot products `[B, H, C, N]` of centroids with normalised vectors, float32 or wider."""
    x_BHND = x_BHND.to(torch.promote_types(x_BHND.dtype, torch.float32))
    with torch.autocast(x_BHND.device.type, enabled=False), wide_products(x_BHND):
        return centroid_HCD.to(x_BHND.dtype) @ x_BHND.transpose(-1, -2)


def tie_margin(centroid_HCD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how far apart scores `[H, C]` of one and the same unit may come out of products of different shapes.

    Streams take scores that are closer for equal: a unit that returns must not push itself out by its rounding. That of
    the queries, which come out of products themselves, is in it.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return 64 * torch.finfo(wide).eps * math.sqrt(centroid_HCD.shape[-1]) * centroid_HCD.to(wide).norm(dim=-1)


def topk_members(score_GCN: Tensor, window: int, margin_GC: Tensor | None = None) -> Tensor:
    """Return the mask of each centroid's `window` best positions (Algorithm 1, line 13); of equals the earlier wins.

    The choice reads the whole sequence, so it sees the future of every position. Scores within the margin of the
    `window`-th best count as equal to it. NaN is worse than every score.
    """
    if window >= score_GCN.shape[-1]:
        return torch.ones_like(score_GCN, dtype=torch.bool)
    worst_GC1 = score_GCN.topk(window, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    margin_GC1 = 0 if margin_GC is None else margin_GC[..., None]
    member_GCN = score_GCN >= worst_GC1 - margin_GC1
    if bool((member_GCN.sum(-1) != window).any()):
        if bool(worst_GC1.isnan().any()):  # torch ranks NaN highest, and nothing compares with it: last instead
            return topk_members(score_GCN.masked_fill(score_GCN.isnan(), float("-inf")), window, margin_GC)
        better_GCN = score_GCN > worst_GC1 + margin_GC1
        tied_GCN = member_GCN & ~better_GCN
        places_GC1 = window - better_GCN.sum(-1, keepdim=True)
        member_GCN = better_GCN | (tied_GCN & (tied_GCN.cumsum(-1) <= places_GC1))
    return member_GCN


def threshold_members(score_GCN: Tensor, threshold_GC: Tensor) -> Tensor:
    """Return the mask of positions that a centroid scores at or above its threshold: decided by each position alone."""
    return score_GCN >= threshold_GC[..., None]


class Nearest:
    """The centroid that scores each position highest, of those whose scores were offered; of equals the first wins."""

    def __init__(self, like_GND: Tensor) -> None:
        G, N, _ = like_GND.shape
        self.number_GN = torch.zeros(G, N, dtype=torch.int64, device=like_GND.device)
        dtype = torch.promote_types(like_GND.dtype, torch.float32)
        self.best_GN = like_GND.new_full((G, N), float("-inf"), dtype=dtype)

    def offer(self, score_GCN: Tensor, heads: slice, first: int) -> None:
        """Take in the scores that some heads' centroids give, from number `first` on, in the order of numbers."""
        number_GN, best_GN = self.number_GN[heads], self.best_GN[heads]
        if score_GCN.device.type != "cpu":
            higher_GN, which_GN = score_GCN.max(1)
            number_GN.copy_(torch.where(higher_GN > best_GN, which_GN + first, number_GN))
            torch.maximum(best_GN, higher_GN, out=best_GN)
            return
        # One cluster after the other reads memory in order: argmax over a dimension in the middle takes thrice as long.
        for c in range(score_GCN.shape[1]):
            number_GN.masked_fill_(score_GCN[:, c] > best_GN, first + c)
            torch.maximum(best_GN, score_GCN[:, c], out=best_GN)


def nearest_clusters(score_GCN: Tensor) -> Tensor:
    """Return the number `[G, N]` of the centroid that scores each position highest; of equals the first wins."""
    nearest = Nearest(score_GCN.mT)
    nearest.offer(score_GCN, slice(None), 0)
    return nearest.number_GN


def random_positions(heads: int, clusters: int, length: int, window: int, seed: int) -> Tensor:
    """Return `window` random positions for each cluster, ascending, `[H, C, W]`: a function of the arguments alone.

    A window over `length` is `length`.
    """
    generator = torch.Generator().manual_seed(seed)
    lists = heads * clusters
    step = max(1, MAX_DRAWS // length)
    # Draws follow one another, however many are made at once.
    parts = [
        topk_members(torch.rand(1, min(step, lists - first), length, generator=generator, device="cpu"), window)
        .nonzero(as_tuple=True)[2]
        .view(-1, min(window, length))
        for first in range(0, lists, step)
    ]
    empty_LW = torch.zeros(0, min(window, length), dtype=torch.int64, device="cpu")
    return torch.cat([empty_LW, *parts]).view(heads, clusters, min(window, length))


def window_scores(score_GCN: Tensor, window: int, length: int, real_GN: Tensor | None = None) -> Tensor:
    """Return the score `[G, C]` that a threshold must have to keep `window` of `length` positions.

    Of a sequence with n positions (n real ones under `real_GN`) it is the ceil(window * n / length)-th best; 0 for a
    sequence of padding alone, or of no positions.
    """
    if not score_GCN.shape[-1]:
        return score_GCN.new_zeros(score_GCN.shape[:2])
    if real_GN is None:
        rank = window_rank(score_GCN.shape[-1], window, length)
        return score_GCN.topk(rank, dim=-1, sorted=False).values.amin(-1)
    rank_G = torch.tensor([window_rank(n, window, length) for n in real_GN.sum(-1).tolist()], device=score_GCN.device)
    score_GCN = score_GCN.masked_fill(~real_GN[:, None], float("-inf"))
    best_GCR = score_GCN.topk(int(rank_G.max()) if len(rank_G) else 1, dim=-1).values
    rank_GC1 = (rank_G - 1)[:, None, None].expand(*best_GCR.shape[:2], 1)
    return best_GCR.gather(-1, rank_GC1)[..., 0].masked_fill(~real_GN.any(-1)[:, None], 0.0)


def window_rank(n: int, window: int, length: int) -> int:
    """Return the rank of the score that keeps `window` of `length` positions among n."""
    return min(n, math.ceil(window * n / length)) if n else 1


class BestOfPrefix:
    """Streaming top-w: the best `window` scores of each cluster so far, and the position behind each.

    `shape` is that of the clusters, `[B, H, C]` or `[L]`, which `margin` broadcasts to. Equal scores, and those no more
    than the margin apart: the earlier position wins.
    """

    def __init__(self, shape: tuple[int, ...], window: int, like: Tensor, margin: Tensor | float = 0.0) -> None:
        self.margin = torch.as_tensor(margin, dtype=like.dtype, device=like.device)[..., None]
        self.score_W = like.new_full((*shape, window), float("-inf"))
        # An empty slot counts as the latest of all positions, so that empty slots are filled first.
        empty_W = torch.arange(window, device=like.device) + (1 << 40)
        self.position_W = empty_W.expand(self.score_W.shape).clone()
        self.raise_bar()

    def raise_bar(self) -> None:
        """Set the score that a newcomer must exceed, `[*shape, 1]`; it never falls."""
        self.bar = self.score_W.amin(-1, keepdim=True) + self.margin

    def fill(self, score_M: Tensor, members: Members) -> None:
        """Begin with the best of positions 0 to N - 1 and their scores, in order of position."""
        W = self.score_W.shape[-1]
        kept_J, list_J, slot_J = last_members(members, W)
        self.score_W.view(-1, W)[list_J, slot_J] = score_M[kept_J]
        self.position_W.view(-1, W)[list_J, slot_J] = members.position_M()[kept_J]
        self.raise_bar()

    def offer(self, score: Tensor, position: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Offer one position to every cluster; return who takes it, and there its slot and who held it."""
        joins = score[..., None] > self.bar
        if not joins.any():  # the usual case late in a stream
            nowhere = torch.zeros_like(joins[..., 0], dtype=torch.int64)
            return joins[..., 0], nowhere, nowhere
        slot = torch.where(self.score_W <= self.bar, self.position_W, -1).argmax(-1, keepdim=True)
        self.score_W.scatter_(-1, slot, torch.where(joins, score[..., None], self.score_W.gather(-1, slot)))
        held = self.position_W.gather(-1, slot)
        newcomer = position if isinstance(position, int) else position[..., None]
        self.position_W.scatter_(-1, slot, torch.where(joins, newcomer, held))
        self.raise_bar()
        return joins[..., 0], slot[..., 0], held[..., 0]


def newcomers(best: BestOfPrefix, score_LT: Tensor, start: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Offer a block of positions; return who joined: lists, positions, and who held the slots before.

    Who fails to pass what was the bar before the block never joins: only the others are offered, each list its own.
    """
    list_M, at_M = (score_LT > best.bar).nonzero(as_tuple=True)
    slots, real_LK = padded(torch.bincount(list_M, minlength=len(score_LT)))
    joined = []
    for number_L, real_L in zip(slots.unbind(1), real_LK.unbind(1), strict=True):
        at_L = at_M[number_L]
        score_L = score_LT.gather(1, at_L[:, None])[:, 0].masked_fill(~real_L, float("-inf"))
        joins_L, _, held_L = best.offer(score_L, at_L + start)
        joined.append((joins_L.nonzero()[:, 0], at_L[joins_L] + start, held_L[joins_L]))
    return joined


def prefix_members(
    chunks: Iterable[Tensor], window: int, margin: Tensor | float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for streaming top-w of L clusters, who joins on arrival, and until when each of them stays.

    Position j of a list is read by i >= j where j joined on arrival and `leaves` of it is greater than i; who is never
    pushed out leaves at N. This is the top-w set of every prefix, found in one pass.

    Args:
        chunks: scores `[L, T]` of T further positions each.
        margin: see `BestOfPrefix`.

    Returns:
        The members' lists, their positions, and when they leave, `[M]` each, ordered by list and position.
    """
    best, start, joined = None, 0, []
    for chunk_LT in chunks:
        best = BestOfPrefix(chunk_LT.shape[:1], window, chunk_LT, margin) if best is None else best
        end = start + chunk_LT.shape[1]
        while start < end:
            # A block of a quarter of the prefix: of N(0, 1) scores about a quarter of W positions may still join.
            block_LT = chunk_LT[:, start - end :][:, : max(window, start // 4)]
            joined += newcomers(best, block_LT, start)
            start += block_LT.shape[1]
    if not joined:
        none_M = torch.zeros(0, dtype=torch.int64, device=None if best is None else best.score_W.device)
        return none_M, none_M, none_M
    list_M, position_M, held_M = (torch.cat(parts) for parts in zip(*joined, strict=True))
    number_M, order_M = (list_M * start + position_M).sort()
    leaves_M = torch.full_like(number_M, start)
    pushed_M = held_M < start  # an empty slot counts as later than all
    out_J = torch.searchsorted(number_M, (list_M * start + held_M)[pushed_M])
    leaves_M[out_J] = position_M[pushed_M]
    return list_M[order_M], position_M[order_M], leaves_M
