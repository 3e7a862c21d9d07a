"""One pass over the scores of centroids, block after block, that takes from each what memberships and statistics need.

All scores together are N / W times as many as a head has positions. A block holds no more than `MAX_SCORES_CPU` (or
those of one cluster), so that memory grows with N at a fixed W. What a pass finds does not depend on the blocks.

Shapes: B sequences, H heads, C clusters, N positions, D head size, G heads of all sequences (B * H, or those of a
block), M members of all lists together.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.lists import Members
from rtx.attention.selection import Nearest, centroid_scores, threshold_members, topk_members, window_scores

MAX_SCORES_CPU, MAX_SCORES_GPU = 1 << 23, 1 << 27
"""Scores held at once. On a CPU N = 16,384 with W = 256 and 8 heads is one block."""


class Rule(NamedTuple):
    """How members are chosen; see `rtx.attention.routing`."""

    selection: str
    window: int
    threshold_HC: Tensor | None = None
    """Read by "causal" alone."""
    margin_HC: Tensor | None = None
    """Read by "topk" alone; see `tie_margin`."""


class Wish(NamedTuple):
    """What a pass is asked for."""

    rule: Rule | None = None
    """Members by this rule."""
    scores: bool = False
    """The scores of the members (not with the rule "nearest")."""
    nearest: bool = False
    window_of: tuple[int, int] | None = None
    """Window scores for W of N positions."""


class Found(NamedTuple):
    """What a pass found of what it was asked for."""

    members: Members | None = None
    score_M: Tensor | None = None
    nearest_BHN: Tensor | None = None
    """The centroid that scores each position highest; of equals the first, and at padding 0."""
    window_score_BHC: Tensor | None = None
    """See `window_scores`."""


class Pass:
    """What the blocks have given so far."""

    def __init__(self, wish: Wish, centroid_HCD: Tensor, x_BHND: Tensor, mask_BN: Tensor | None) -> None:
        B, H, N, D = x_BHND.shape
        shape = (B, *centroid_HCD.shape)
        self.wish = wish
        self.x_GND = x_BHND.reshape(B * H, N, D)
        self.centroid_GCD = centroid_HCD.expand(shape).reshape(-1, *shape[2:])
        self.real_GN = None if mask_BN is None else mask_BN.repeat_interleave(H, 0)
        selection, _, threshold_HC, margin_HC = wish.rule or Rule("", 0)
        self.by_nearest = selection == "nearest"
        self.threshold_GC = self.margin_GC = None
        if selection == "causal":
            assert threshold_HC is not None
            self.threshold_GC = threshold_HC.repeat(B, 1)
        elif margin_HC is not None:
            self.margin_GC = margin_HC.repeat(B, 1)
        self.nearest = Nearest(self.x_GND) if wish.nearest or self.by_nearest else None
        self.rows: list[Tensor] = []
        self.counts: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.window_scores: list[Tensor] = []

    def take(self, heads: slice, clusters: slice) -> None:
        """Work out the scores of some clusters of some heads, and keep what is wished of them."""
        rule, real_GN = self.wish.rule, None if self.real_GN is None else self.real_GN[heads]
        score_GCN = centroid_scores(self.centroid_GCD[heads, clusters], self.x_GND[heads])
        if real_GN is not None:
            score_GCN.masked_fill_(~real_GN[:, None], float("-inf"))
        if self.nearest is not None:
            self.nearest.offer(score_GCN, heads, clusters.start)
        if self.wish.window_of is not None:
            self.window_scores.append(window_scores(score_GCN, *self.wish.window_of, real_GN).flatten())
        if rule is None or self.by_nearest:
            return
        if self.threshold_GC is None:
            margin_GC = None if self.margin_GC is None else self.margin_GC[heads, clusters]
            member_GCN = topk_members(score_GCN, rule.window, margin_GC)
        else:
            member_GCN = threshold_members(score_GCN, self.threshold_GC[heads, clusters])
        if real_GN is not None:
            member_GCN &= real_GN[:, None]
        _, C, N = member_GCN.shape
        list_M, position_M = member_GCN.flatten(0, 1).nonzero(as_tuple=True)
        self.rows.append((list_M // C + heads.start) * N + position_M)
        self.counts.append(member_GCN.sum(-1).flatten())
        if self.wish.scores:
            self.scores.append(score_GCN.flatten(0, 1)[list_M, position_M])

    def members(self) -> Members | None:
        """Return the lists of all clusters."""
        G, N, _ = self.x_GND.shape
        if self.by_nearest and self.nearest is not None:
            return lists_of_nearest(self.nearest.number_GN, self.centroid_GCD.shape[1], self.real_GN)
        return Members(join(self.rows), join(self.counts), N, G * N) if self.rows else None


@torch.no_grad()
def read_scores(
    centroid_HCD: Tensor, x_BHND: Tensor, mask_BN: Tensor | None, wish: Wish, backend: str = "torch"
) -> Found:
    """Return what the scores of normalised vectors give; padding (false in the mask) belongs nowhere.

    Nothing is differentiated; neither are the papers' top-k sets. With backend="triton" members by thresholds come from
    a kernel that never writes scores; a score on a threshold may round to its other side there.
    """
    if backend == "triton" and wish.rule is not None and wish.rule.selection == "causal":
        return by_kernel(centroid_HCD, x_BHND, mask_BN, wish)
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    told = Pass(wish, centroid_HCD, x_BHND, mask_BN)
    for heads, clusters in cuts(B * H, C, N, MAX_SCORES_CPU if x_BHND.device.type == "cpu" else MAX_SCORES_GPU):
        told.take(heads, clusters)
    return Found(
        told.members(),
        join(told.scores) if told.scores else None,
        told.nearest.number_GN.view(B, H, N) if told.nearest is not None else None,
        join(told.window_scores).view(B, H, C) if told.window_scores else None,
    )


def by_kernel(centroid_HCD: Tensor, x_BHND: Tensor, mask_BN: Tensor | None, wish: Wish) -> Found:
    """Return what `read_scores` does, members by thresholds and nearest centroids by the Triton kernel."""
    assert wish.rule is not None and not wish.scores
    kernel = importlib.import_module("rtx.attention.triton_select")
    members, nearest_BHN = kernel.select_by_threshold(x_BHND, centroid_HCD, wish.rule.threshold_HC, mask_BN)
    window_score_BHC = None
    if wish.window_of is not None:
        window_score_BHC = read_scores(centroid_HCD, x_BHND, mask_BN, Wish(window_of=wish.window_of)).window_score_BHC
    return Found(members, None, nearest_BHN, window_score_BHC)


def cuts(heads: int, clusters: int, length: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield the blocks in the order of the lists: some heads with all clusters, or some clusters of one head."""
    step = max(1, most // max(1, clusters * length))
    parts = -(-clusters // max(1, most // max(1, length)))
    width = -(-clusters // parts)
    for head in range(0, max(1, heads), step):
        for cluster in range(0, clusters, width):
            yield slice(head, min(head + step, heads)), slice(cluster, min(cluster + width, clusters))


def join(parts: list[Tensor]) -> Tensor:
    """Return the parts one behind the other, without a copy where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def lists_of_nearest(nearest_GN: Tensor, clusters: int, real_GN: Tensor | None) -> Members:
    """Return the lists of clusters that each have the real positions that are nearest to them."""
    G, N = nearest_GN.shape
    head_G1 = torch.arange(G, device=nearest_GN.device)[:, None]
    list_M = (nearest_GN + head_G1 * clusters).flatten()
    row_M = (nearest_GN.argsort(dim=-1, stable=True) + head_G1 * N).flatten()
    if real_GN is not None:
        list_M, row_M = list_M[real_GN.flatten()], row_M[real_GN.flatten()[row_M]]
    return Members(row_M, torch.bincount(list_M, minlength=G * clusters), N, G * N)
