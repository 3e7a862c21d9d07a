"""Streaming through routing heads: what a stream keeps of each cluster, and who joins it.

Shapes: B streams, H routing heads, C clusters, N positions, D head size, W attention window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from rtx.attention.heads import HeadState, Rotate, RotateFrom
from rtx.attention.selection import BestOfPrefix, centroid_scores, nearest_clusters, tie_margin
from rtx.attention.state import ClusterState
from rtx.attention.weights import Distances

if TYPE_CHECKING:
    from rtx.attention.routing import RoutingHeads


class RoutingState(HeadState):
    """Streaming routing heads: for each cluster its last W members (causal, nearest) or best W of the prefix (topk).

    Members are keys; where these have memberships of their own, topk also keeps the scores of the prefix's best W
    queries, which say whether the next query joins.
    """

    def __init__(self, heads: RoutingHeads, relative: Distances | None) -> None:
        self.heads = heads
        window = heads.centroids.window
        self.clusters = ClusterState(window, heads.scale, heads.attend_self, relative, heads.slot_distance)
        self.best: dict[str, BestOfPrefix] = {}

    def fill(self, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor, rotate: RotateFrom | None = None) -> None:
        """See `HeadState`."""
        content = self.heads.read(q_BHND, k_BHND)
        found, of_keys = self.heads.choose(content, None, prompt=True)
        members = found.members if of_keys is None else of_keys.members
        assert members is not None
        for what, one in (("queries", found), ("keys", of_keys)):
            if one is not None and one.members is not None and one.score_M is not None:
                self.best[what] = self.nothing_yet(len(v_BHND), one.score_M)
                self.best[what].fill(one.score_M, one.members)
        self.clusters.fill(content.logits(rotate, v_BHND.dtype)[1], v_BHND, members)

    def step(
        self, q_BHD: Tensor, k_BHD: Tensor | None, v_BHD: Tensor, position: int, rotate: Rotate | None = None
    ) -> Tensor:
        """Take in the next position of each stream and return its output `[B, H, D]`."""
        content = self.heads.read(q_BHD[:, :, None], None if k_BHD is None else k_BHD[:, :, None])
        query_BH1D, key_BH1D = content.logits(rotate, v_BHD.dtype)
        threshold_HC, key_threshold_HC = self.heads.thresholds()
        joins_BHC, slot_BHC = self.join("queries", content.routed_BHND, threshold_HC, position)
        query_joins_BHC = None
        if content.routed_keys_BHND is not None:
            query_joins_BHC = joins_BHC
            joins_BHC, slot_BHC = self.join("keys", content.routed_keys_BHND, key_threshold_HC, position)
        query_BHD, key_BHD = query_BH1D[:, :, 0], key_BH1D[:, :, 0]
        return self.clusters.step(query_BHD, key_BHD, v_BHD, joins_BHC, position, slot_BHC, query_joins_BHC)

    def join(
        self, what: str, x_BH1D: Tensor, threshold_HC: Tensor | None, position: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return which clusters a position joins, and with topk the slot it takes there."""
        store = self.heads.centroids
        score_BHC = centroid_scores(store.centroid_HCD, x_BH1D)[..., 0]
        if threshold_HC is not None:
            return score_BHC >= threshold_HC, None
        if self.heads.selection == "nearest":
            number_BH = nearest_clusters(score_BHC.flatten(0, 1)[..., None]).view(score_BHC.shape[:2])
            return F.one_hot(number_BH, score_BHC.shape[-1]).bool(), None
        if what not in self.best:
            self.best[what] = self.nothing_yet(len(score_BHC), score_BHC)
        joins_BHC, slot_BHC, _ = self.best[what].offer(score_BHC, position)
        return joins_BHC, slot_BHC

    def nothing_yet(self, batch: int, like: Tensor) -> BestOfPrefix:
        """Return the best of no positions, for streaming top-w."""
        store = self.heads.centroids
        margin_HC = tie_margin(store.centroid_HCD, like.dtype)
        return BestOfPrefix((batch, *margin_HC.shape), store.window, like, margin_HC)
