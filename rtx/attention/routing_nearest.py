"""Routing heads in which a position joins one cluster: the *nearest*, which scores it highest.

Of centroids of equal norm it is also the one with the closest centroid.

clusters.py has the base class and the cache of a stream.

Shapes: B sequences, H heads, C clusters, N positions, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtx.attention.clusters import ClusterCache, Joins, Routing, both_roles
from rtx.attention.engine.static_selection import Selected
from rtx.attention.members import ClusterMembers, nearest_members, products
from rtx.attention.reads import QueriesKeys
from rtx.attention.static import selection_functions
from rtx.attention.ties import highest, highest_clusters
from rtx.attention.typed_torch import tolist


class Nearest(Routing):
    """A position joins its highest-scoring cluster alone. This is a baseline, strictly causal."""

    bounds_documents = True

    # The rule.

    def members_by_rule(self, score_CN: Tensor, margin_C: Tensor, role: int, head: int) -> Tensor:
        member_CN = torch.zeros_like(score_CN, dtype=torch.bool)
        margins = tolist(margin_C)
        score_NC = tolist(score_CN.T)
        for i, score_C in enumerate(score_NC):
            cluster = highest(score_C, margins)
            member_CN[cluster, i] = True
        return member_CN

    # The batch form.

    def select_dynamic(self, x_BHND: Tensor, role: int, with_nearest: bool) -> ClusterMembers:
        lists = nearest_members(self.centroids.centroid_HCD, x_BHND, self.backend)
        return ClusterMembers(lists, lists.count_L)

    def select_static(self, x_BHND: Tensor, role: int) -> Selected:
        rows = x_BHND.shape[:3].numel()
        functions = selection_functions(x_BHND, self.backend)
        return functions.by_thresholds(
            self.centroids.centroid_HCD,
            x_BHND,
            threshold_HC=None,
            margin_HC=self.margins(x_BHND),
            window=self.window,
            attend_self=self.attend_self,
            capacity=rows,
        )

    @property
    def follows_nearest(self) -> bool:
        """False: the members of a cluster already are its nearest positions."""
        return False

    def pairs_of_head(self, length: int) -> float:
        C = self.centroids.centroid_HCD.shape[1]
        members = length / C
        return C * self.pairs_of_cluster(members)

    # The stream.

    def clusters_of_next(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> Joins:
        joins: list[Tensor] = []
        for x_BH1D in self.clustered(qk):
            score_BHC1 = products(self.centroids.centroid_HCD, x_BH1D)
            margin_HC = self.margins(score_BHC1)
            cluster_BH1 = highest_clusters(score_BHC1, margin_HC)
            score_BHC = score_BHC1[..., 0]
            member_BHC = torch.zeros_like(score_BHC, dtype=torch.bool)
            member_BHC.scatter_(-1, cluster_BH1, True)
            joins.append(member_BHC)
        query_BHC, key_BHC = both_roles(joins)
        return Joins(query_BHC, key_BHC)
