"""Membership: which positions belong to which cluster, and how the choice looks when only the prefix may be read.

Shapes: B sequences, H heads, C clusters, N positions, W attention window. Scores are dot products of a centroid with a
normalised query. Nothing here is differentiated; neither are the papers' top-k sets.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rtx.attention.products import wide_products


@torch.no_grad()
def centroid_scores(centroid_HCD: Tensor, x_BHND: Tensor) -> Tensor:
    """Return the dot products `[B, H, C, N]` of centroids with normalised vectors, float32 or wider."""
    x_BHND = x_BHND.to(torch.promote_types(x_BHND.dtype, torch.float32))
    with torch.autocast(x_BHND.device.type, enabled=False), wide_products(x_BHND):
        return centroid_HCD.to(x_BHND.dtype) @ x_BHND.transpose(-1, -2)


def topk_members(score_BHCN: Tensor, window: int) -> Tensor:
    """Return the mask of each centroid's `window` best positions (Algorithm 1, line 13); of equals the earlier wins.

    The choice reads the whole sequence, so it sees the future of every position.
    """
    if window >= score_BHCN.shape[-1]:
        return torch.ones_like(score_BHCN, dtype=torch.bool)
    worst_BHC1 = score_BHCN.topk(window, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    member_BHCN = score_BHCN >= worst_BHC1
    if bool((member_BHCN.sum(-1) > window).any()):
        better_BHCN = score_BHCN > worst_BHC1
        tied_BHCN = member_BHCN & ~better_BHCN
        places_BHC1 = window - better_BHCN.sum(-1, keepdim=True)
        member_BHCN = better_BHCN | (tied_BHCN & (tied_BHCN.cumsum(-1) <= places_BHC1))
    return member_BHCN


def threshold_members(score_BHCN: Tensor, threshold_HC: Tensor) -> Tensor:
    """Return the mask of positions that a centroid scores at or above its threshold: decided by each position alone."""
    return score_BHCN >= threshold_HC[None, :, :, None]


def nearest_clusters(score_BHCN: Tensor) -> Tensor:
    """Return the number `[B, H, N]` of the centroid that scores each position highest; of equals the first wins."""
    if score_BHCN.device.type != "cpu":
        return score_BHCN.argmax(2)
    # One cluster after the other reads memory in order; argmax over a dimension in the middle takes 3 times as long.
    best_BHN = score_BHCN[:, :, 0]
    nearest_BHN = torch.zeros_like(best_BHN, dtype=torch.int64)
    for c in range(1, score_BHCN.shape[2]):
        nearest_BHN.masked_fill_(score_BHCN[:, :, c] > best_BHN, c)
        best_BHN = torch.maximum(best_BHN, score_BHCN[:, :, c])
    return nearest_BHN


def nearest_members(score_BHCN: Tensor) -> Tensor:
    """Return the mask that gives each position to the centroid that scores it highest; of equals the first wins."""
    member_BHCN = torch.zeros_like(score_BHCN, dtype=torch.bool)
    return member_BHCN.scatter_(2, nearest_clusters(score_BHCN)[:, :, None], True)


def random_members(heads: int, clusters: int, length: int, window: int, seed: int) -> Tensor:
    """Return the mask `[H, C, N]` of `window` random positions for each cluster, a function of the arguments alone."""
    generator = torch.Generator().manual_seed(seed)
    draw_1HCN = torch.rand(1, heads, clusters, length, generator=generator, device="cpu")
    return topk_members(draw_1HCN, window)[0]


def window_scores(score_BHCN: Tensor, window: int, length: int, mask_BN: Tensor | None = None) -> Tensor:
    """Return the score `[B, H, C]` that a threshold must have to keep `window` of `length` positions.

    Of a sequence with n positions (n real ones under `mask_BN`) it is the ceil(window * n / length)-th best; 0 for a
    sequence of padding alone, or of no positions.
    """
    if not score_BHCN.shape[-1]:
        return score_BHCN.new_zeros(score_BHCN.shape[:3])
    if mask_BN is None:
        rank = window_rank(score_BHCN.shape[-1], window, length)
        return score_BHCN.topk(rank, dim=-1, sorted=False).values.amin(-1)
    real_B = mask_BN.sum(-1).tolist()
    rank_B = torch.tensor([window_rank(n, window, length) for n in real_B], device=score_BHCN.device)
    score_BHCN = score_BHCN.masked_fill(~mask_BN[:, None, None], float("-inf"))
    best_BHCR = score_BHCN.topk(int(rank_B.max()) if real_B else 1, dim=-1).values
    rank_BHC1 = (rank_B - 1)[:, None, None, None].expand(*best_BHCR.shape[:3], 1)
    return best_BHCR.gather(-1, rank_BHC1)[..., 0].masked_fill(~mask_BN.any(-1)[:, None, None], 0.0)


def window_rank(n: int, window: int, length: int) -> int:
    """Return the rank of the score that keeps `window` of `length` positions among n."""
    return min(n, math.ceil(window * n / length)) if n else 1


def last_members(member_BHCN: Tensor, window: int) -> tuple[Tensor, ...]:
    """Return the last `window` members of each cluster: sequences, heads, clusters, positions, and slots 0, 1, …"""
    later_BHCN = member_BHCN.sum(-1, keepdim=True) - member_BHCN.cumsum(-1)
    kept_BHCN = member_BHCN & (later_BHCN < window)
    where = kept_BHCN.nonzero(as_tuple=True)
    return *where, (kept_BHCN.cumsum(-1) - 1)[where]


class BestOfPrefix:
    """Streaming top-w: the best `window` scores of each cluster so far, and the position behind each.

    `shape` is that of the clusters, `[B, H, C]` or `[L]`. Equal scores: the earlier position wins.
    """

    def __init__(self, shape: tuple[int, ...], window: int, like: Tensor) -> None:
        self.score_W = like.new_full((*shape, window), float("-inf"))
        # An empty slot counts as the latest of all positions, so that empty slots are filled first.
        empty_W = torch.arange(window, device=like.device) + (1 << 40)
        self.position_W = empty_W.expand(self.score_W.shape).clone()

    def fill(self, score_BHCN: Tensor, member_BHCN: Tensor) -> None:
        """Begin with the best of positions 0 to N - 1, in order of position; `member_BHCN` says which they are."""
        b_M, h_M, c_M, n_M, slot_M = last_members(member_BHCN, self.score_W.shape[-1])
        self.score_W[b_M, h_M, c_M, slot_M] = score_BHCN[b_M, h_M, c_M, n_M]
        self.position_W[b_M, h_M, c_M, slot_M] = n_M

    def offer(self, score: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Offer one position to every cluster; return who takes it, the slot it gets (or would get), and its holder."""
        worst = self.score_W.amin(-1, keepdim=True)
        tied_W = self.score_W == worst
        slot = torch.where(tied_W, self.position_W, -1).argmax(-1, keepdim=True)
        joins = score[..., None] > worst
        self.score_W.scatter_(-1, slot, torch.where(joins, score[..., None], worst))
        held = self.position_W.gather(-1, slot)
        self.position_W.scatter_(-1, slot, torch.where(joins, position, held))
        return joins[..., 0], slot[..., 0], held[..., 0]


def prefix_members(score_LN: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Return, for streaming top-w of L clusters, who joins on arrival `[L, N]` and until when each stays `[L, N]`.

    Position j is read by i >= j where j joined on arrival and `leaves[j] > i`; a position that is never pushed out
    leaves at N. This is the top-w set of every prefix, found in one pass.
    """
    L, N = score_LN.shape
    best = BestOfPrefix((L,), window, score_LN)
    joins_LN = torch.zeros(L, N, dtype=torch.bool, device=score_LN.device)
    # The last column takes the departures from slots that were empty.
    leaves_LN = torch.full((L, N + 1), N, device=score_LN.device)
    for i in range(N):
        joins_L, _, held_L = best.offer(score_LN[:, i], i)
        joins_LN[:, i] = joins_L
        leaves_LN.scatter_(-1, torch.where(joins_L, held_L.clamp(max=N), N)[:, None], i)
    return joins_LN, leaves_LN[:, :N]
