"""Routing heads with thresholds: a position joins all clusters whose threshold its score reaches.

Example: the thresholds of the clusters 0 to 2 are 4, 6 and 5. A position with the scores 4.5, 2 and
7 joins the clusters 0 and 2. A position with the scores 1, 5.5 and 3 reaches no threshold, so it
joins cluster 1, whose threshold it misses by least.

clusters.py has the base class and the cache of a stream, and centroids.py how thresholds move.

Shapes: B sequences, H heads, C clusters, N positions, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rtx.attention.centroids import Centroids
from rtx.attention.clusters import ClusterCache, Joins, Routing, both_roles
from rtx.attention.engine.static_selection import Selected, memberships
from rtx.attention.members import ClusterMembers, choose_members, products
from rtx.attention.reads import QueriesKeys
from rtx.attention.static import selection_functions
from rtx.attention.ties import highest
from rtx.attention.typed_torch import tolist

CAPACITY_FACTOR = 4
"""The first `capacity_factor`, see capacity.py."""


class Thresholds(Routing):
    """A position joins all clusters whose threshold its score reaches. The paper has no such rule.

    A position that reaches no threshold joins the cluster whose threshold it misses by least, so
    each position is a member of some cluster. Only the position's own scores decide, so selection
    is strictly causal. After a step, the threshold of a cluster rises if the cluster has too many
    members, and falls if it has too few, see `Centroids`. Expert Threshold routing (arXiv
    2603.11535) is similar, for feed-forward experts.

    On a GPU, lists have a fixed capacity, see capacity.py.
    """

    may_lose_members = True
    bounds_documents = True

    def __init__(self, centroids: Centroids, **options: Any) -> None:
        super().__init__(centroids, **options)
        self.capacity_factor = CAPACITY_FACTOR
        none_lost = torch.zeros(1, dtype=torch.int64)
        self.register_buffer("lost_members", none_lost, persistent=False)
        self.lost_members: Tensor

    # The rule.

    def members_by_rule(self, score_CN: Tensor, margin_C: Tensor, role: int, head: int) -> Tensor:
        member_CN = torch.zeros_like(score_CN, dtype=torch.bool)
        threshold_HC = self.centroids.thresholds()[role]
        threshold_C = threshold_HC[head]
        above_CN = score_CN - threshold_C[:, None]
        above_NC = tolist(above_CN.T)
        margins = tolist(margin_C)
        for i, above_C in enumerate(above_NC):
            reached: list[int] = []
            for c, above in enumerate(above_C):
                if above >= -margins[c]:
                    reached.append(c)
            if not reached:
                reached = [highest(above_C, margins)]
            member_CN[reached, i] = True
        return member_CN

    # The batch form.

    def select_dynamic(self, x_BHND: Tensor, role: int, with_nearest: bool) -> ClusterMembers:
        threshold_HC = self.centroids.thresholds()[role]
        return choose_members(
            self.centroids.centroid_HCD,
            x_BHND,
            threshold_HC,
            window=self.window,
            nearest=with_nearest,
            backend=self.backend,
        )

    def select_static(self, x_BHND: Tensor, role: int) -> Selected:
        """See `Routing.select_static`. In training, members beyond the capacity are left out.

        In evaluation the CPU reads how many these are. If it is not 0, the selection is repeated
        with a capacity for all.
        """
        threshold_HC = self.centroids.thresholds()[role]
        threshold_HC = threshold_HC.to(x_BHND.dtype)
        capacity = self.capacity(x_BHND)
        selected = self.static_members(x_BHND, threshold_HC, capacity)
        if self.training:
            return selected
        lost = int(selected.lost)
        if not lost:
            return selected
        return self.static_members(x_BHND, threshold_HC, capacity + lost)

    def static_members(self, x_BHND: Tensor, threshold_HC: Tensor, capacity: int) -> Selected:
        """Return the members of one role in static shapes.

        Args:
            threshold_HC: the lowest score of a member in each cluster.
            capacity: the largest number of members of all lists together.
        """
        functions = selection_functions(x_BHND, self.backend)
        return functions.by_thresholds(
            self.centroids.centroid_HCD,
            x_BHND,
            threshold_HC=threshold_HC,
            margin_HC=self.margins(x_BHND),
            window=self.window,
            attend_self=self.attend_self,
            capacity=capacity,
        )

    def capacity(self, x_BHND: Tensor) -> int:
        """Return the capacity of the lists: `capacity_factor` times the expected members."""
        B, H, N, _ = x_BHND.shape
        C = self.centroids.centroid_HCD.shape[1]
        share = min(1.0, self.window / self.centroids.length)
        members_of_cluster = math.ceil(share * N)
        # Each position joins at least one cluster.
        expected = max(N, C * members_of_cluster)
        capacity_of_head = self.capacity_factor * expected
        capacity_of_head = min(capacity_of_head, C * N)
        return B * H * capacity_of_head

    def add_statistics(self, members: ClusterMembers, x_BHND: Tensor, role: int) -> None:
        if members.selected is not None:
            self.lost_members.add_(members.selected.lost)
            functions = selection_functions(x_BHND, self.backend)
            moment_2BHC = functions.score_moments(self.centroids.centroid_HCD, x_BHND)
            members = members._replace(moment_2BHC=moment_2BHC)
        super().add_statistics(members, x_BHND, role)

    # The stream.

    def clusters_of_next(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> Joins:
        joins: list[Tensor] = []
        vectors = self.clustered(qk)
        for role, x_BH1D in enumerate(vectors):
            score_BHC1 = products(self.centroids.centroid_HCD, x_BH1D)
            threshold_HC = self.centroids.thresholds()[role]
            margin_HC = self.margins(score_BHC1)
            member_BHC1 = memberships(score_BHC1, threshold_HC, margin_HC)
            joins.append(member_BHC1[..., 0])
        query_BHC, key_BHC = both_roles(joins)
        return Joins(query_BHC, key_BHC)
