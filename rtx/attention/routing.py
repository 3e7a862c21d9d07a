"""Routing heads: a position reads (attends to) positions that are in the same clusters.

Each head has C clusters, with one centroid each. The *score* of a vector in a cluster is its dot
product with the centroid. Scores decide which positions are members of a cluster. In each of its
clusters a position reads the last W members up to itself (`ClusterPattern`). This file has what all
routing heads share. Three classes have different rules of membership, each in a file:

    TopK         the W positions of the whole sequence that score highest (routing_topk.py:
                 Algorithm 1 of the paper)
    Thresholds   all positions whose score reaches the threshold of the cluster
                 (routing_thresholds.py)
    Nearest      all positions that score higher in this cluster than in any other
                 (routing_nearest.py)

Roles. With `keys="separate"` the query and the key of a position have separate scores, and may be
members of different clusters: a position has two *roles*, `QUERIES` (0) and `KEYS` (1). Each role
has scores, thresholds and lists of members. Otherwise there is one role, and the query and the key
of a position are members of the same clusters. Lists with one item for each role have two items or
one; `both_roles` unpacks them.

The batch form processes whole sequences at once. It has two implementations. On a CPU, the lengths
of lists depend on the scores (`select_dynamic`). On a GPU, all shapes are static (`select_static`),
so that in training the CPU does not wait for the GPU. Static lists have a fixed capacity
(capacity.py). What calls what:

    reads
        clustered                   the vectors of each role
        select                      the members of each role, `ClusterMembers`, by one of
            select_dynamic              of the subclass: `dynamic_members`, `pack_clusters`
            select_static               of the subclass: `static_members`, or its own kernel
        reads_of                    which members read which
            dynamic_reads               the ranges of dynamic lists; static ones have theirs already

Names from other files that this one uses:

    ClusterPattern     the base class: a query reads the last W members of a cluster (clusters.py)
    Centroids          the centroids and thresholds, and the statistics that move them
    choose_members     selects members by the scores of whole sequences (members.py)
    MemberLists        packed lists of members (reads.py has a picture)
    selection_functions, Selected, separate_lists, LISTS
                       the same selection in static shapes: functions and results for GPUs

Statistics. `reads` changes nothing. The forward pass calls `observe`. In training, `observe`
also gathers the statistics that move the centroids after the step (centroids.py).

Shapes: B sequences, H heads, C clusters, N positions, D head size, W attention window, L = B * H *
C lists, M members and P query members of all lists together, X = B * H or a part of it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx.attention.arguments import check_number
from rtx.attention.centroid_update import to_sphere
from rtx.attention.centroids import Centroids, gathering, is_rate
from rtx.attention.clusters import ClusterPattern, both_roles
from rtx.attention.engine.by_triton import LISTS
from rtx.attention.engine.static_selection import Selected, separate_lists
from rtx.attention.members import choose_members, sums_of_lists
from rtx.attention.precision import no_autocast
from rtx.attention.reads import MemberLists, QueriesKeys, RangeReads, Reads, pack
from rtx.attention.static import is_static, selection_functions
from rtx.attention.ties import centroid_margin


class ClusterMembers(NamedTuple):
    """The members of all clusters in one role."""

    lists: MemberLists
    """The members of each cluster, without those that exceed the capacity of the lists."""
    count_L: Tensor
    """The number of members of each cluster, with those that exceed the capacity."""
    nearest: MemberLists | None = None
    """Lists in which each position is a member of its highest-scoring cluster alone; None: not
    computed."""
    moment_2BHC: Tensor | None = None
    """For each cluster the sum of the scores of all positions, and the sum of the squared scores;
    None: not computed."""
    selected: Selected | None = None
    """The same members in static shapes; None: they were not selected in static shapes."""


class Routing(ClusterPattern):
    """H routing heads. Subclasses decide who is a member of a cluster.

    With causal=False (the encoder of the paper) outputs depend on the whole sequence, whatever the
    subclass.

    `ClusterPattern` documents the other options. The window is that of the centroids.

    Args:
        centroids: the centroids of these heads. Their option `keys` decides which vectors are
            assigned to clusters.
            "shared": queries, which serve as keys (Algorithm 1 with its left-to-right mask).
            "separate": queries and keys, with separate memberships (section 4.1).
            "projected": W_R (q + k) of each position, not normalised again. The query and the key
            of a position have the same memberships (the paper's first versions, of ICLR and arXiv).
        commitment: the weight of the commitment loss, the mean squared distance between vectors and
            their nearest centroids. Both released codes of the paper have this loss, with weight
            1e-4; Roy et al. 2021 does not mention it.
    """

    may_be_bidirectional = True

    def __init__(self, centroids: Centroids, *, commitment: float = 0.0, **options: Any) -> None:
        has_keys = centroids.keys != "shared"
        super().__init__(has_keys=has_keys, window=centroids.window, **options)
        check_number("commitment", commitment, "finite and at least 0", is_rate)
        H, _, D = centroids.centroid_HCD.shape
        self.heads = H
        self.size = D
        self.centroids = centroids
        self.commitment = commitment
        self.last_members: tuple[list[MemberLists], int] | None = None
        """For telemetry: the lists of each role, and B * H * N, both of the last training batch;
        None: there was none."""

    def clustered(self, qk: QueriesKeys) -> list[Tensor]:
        """Return the vectors that are assigned to clusters, `[B, H, N, D]` for each role."""
        q_BHND = qk.q_BHND
        k_BHND = qk.k_BHND
        if qk.counts is not None:
            # Cross-attention: `takes_other_keys` has made sure that there are two roles.
            query_count, key_count = qk.counts
            real_q_BHND = q_BHND[:, :, :query_count]
            real_k_BHND = k_BHND[:, :, :key_count]
            return [real_q_BHND, real_k_BHND]
        if self.centroids.keys == "separate":
            return [q_BHND, k_BHND]
        if self.centroids.projection_HDD is None:
            return [q_BHND]
        projection_HDD = self.centroids.projection_HDD.to(q_BHND.dtype)
        with no_autocast(q_BHND):
            sum_BHND = q_BHND + k_BHND
            projected_BHND = sum_BHND @ projection_HDD.mT
        return [projected_BHND]

    def margins(self, x: Tensor) -> Tensor:
        """Return the margin within which scores count as equal, for each cluster, `[H, C]`.

        Args:
            x: the vectors or the scores. The margin depends on their dtype.
        """
        return centroid_margin(self.centroids.centroid_HCD, x.dtype)

    # The rule.

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        members = []
        for role, score_CN in enumerate(self.scores_of_head(qk, head)):
            margin_C = self.margins(score_CN)[head]
            member_CN = self.members_by_rule(score_CN, margin_C, role, head)
            members.append(member_CN)
        query_CN, key_CN = both_roles(members)
        return self.read_by_rule(query_CN, key_CN)

    def scores_of_head(self, qk: QueriesKeys, head: int) -> list[Tensor]:
        """Return the scores of the first sequence in one head, `[C, N]` for each role."""
        centroid_CD = self.centroids.centroid_HCD[head]
        scores = []
        for x_BHND in self.clustered(qk):
            x_ND = x_BHND[0, head]
            score_CN = centroid_CD.to(x_ND.dtype) @ x_ND.T
            scores.append(score_CN)
        return scores

    @abstractmethod
    def members_by_rule(self, score_CN: Tensor, margin_C: Tensor, role: int, head: int) -> Tensor:
        """Return for each cluster of a head which positions are members, `[C, N]`, bool."""

    # The batch form.

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        vectors = self.clustered(qk)
        members = self.select(vectors, is_dynamic=self.needs_dynamic(qk))
        return [self.reads_of(members, qk)]

    @torch.no_grad()
    def select(
        self,
        vectors: list[Tensor],
        with_nearest: bool = False,
        is_dynamic: bool = False,
    ) -> list[ClusterMembers]:
        """Return the members of each role.

        Args:
            vectors: the vectors of each role, `[B, H, N, D]`.
            with_nearest: compute `ClusterMembers.nearest`, too (dynamic shapes only).
            is_dynamic: select by `select_dynamic` on a GPU, too.
        """
        members = []
        for role, x_BHND in enumerate(vectors):
            if is_static(x_BHND, self.backend) and not is_dynamic:
                selected = self.select_static(x_BHND, role)
                members.append(as_cluster_members(selected))
            else:
                members.append(self.select_dynamic(x_BHND, role, with_nearest))
        return members

    def needs_dynamic(self, qk: QueriesKeys) -> bool:
        """Return whether lists must be dynamic, on a GPU, too.

        Static ones have neither ranges within documents nor ranges of later keys.
        """
        return qk.documents is not None or not self.causal

    @abstractmethod
    def select_dynamic(self, x_BHND: Tensor, role: int, with_nearest: bool) -> ClusterMembers:
        """Return the members of one role, in lists whose lengths depend on the scores."""

    @abstractmethod
    def select_static(self, x_BHND: Tensor, role: int) -> Selected:
        """Return the members of one role in static shapes."""

    def reads_of(self, members: list[ClusterMembers], qk: QueriesKeys) -> RangeReads:
        """Return which members read which, as packed lists.

        Args:
            members: of each role.
        """
        length = qk.q_BHND.shape[2]
        queries, keys = both_roles(members)
        if queries.selected is None or keys.selected is None:
            return self.dynamic_reads(queries.lists, keys.lists, qk)
        lists = queries.selected.lists
        if keys is not queries:
            lists = separate_lists(
                queries.selected,
                keys.selected,
                length,
                self.window,
                self.attend_self,
            )
        return RangeReads(
            query=queries.lists,
            key=keys.lists,
            start_P=lists.start_P,
            stop_P=lists.stop_P,
            length=length,
            most=min(self.window, length),
            derived={LISTS: lists},
        )

    def dynamic_reads(self, queries: MemberLists, keys: MemberLists, qk: QueriesKeys) -> RangeReads:
        """Return which members read which, from lists whose lengths depend on the scores."""
        if qk.counts is not None:
            # Rows of these lists count the real queries or keys; those of `qk` count zeros, too.
            query_count, key_count = qk.counts
            length = qk.q_BHND.shape[2]
            queries = with_rows_of(queries, query_count, length)
            keys = with_rows_of(keys, key_count, length)
        return self.ranges_of_lists(queries, keys, qk)

    @torch.no_grad()
    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        lists = []
        for role, x_BHND in enumerate(self.clustered(qk)):
            members = self.select_dynamic(x_BHND, role, with_nearest=False)
            lists.append(members.lists)
        return lists

    # Statistics.

    @torch.no_grad()
    def observe(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        self.seed(qk)
        # Statistics describe members that are selected from whole sequences. If selection is not
        # strictly causal, a streaming pass selects members from prefixes instead.
        selects_from_prefixes = streaming and not self.strictly_causal
        if selects_from_prefixes or not self.training or gathering.is_paused:
            return self.reads(qk, streaming)
        vectors = self.clustered(qk)
        members = self.select(vectors, self.follows_nearest, self.needs_dynamic(qk))
        rows = vectors[0].shape[:3].numel()
        if rows:
            for role, x_BHND in enumerate(vectors):
                self.add_statistics(members[role], x_BHND, role)
            lists = [members_of_role.lists for members_of_role in members]
            self.last_members = (lists, rows)
        return [self.reads_of(members, qk)]

    def seed(self, qk: QueriesKeys) -> None:
        """Initialise the centroids with vectors of this batch, if `seed_with_next` is set."""
        centroids = self.centroids
        if centroids.seed_with_next and centroids.training:
            vectors = [x_BHND.detach() for x_BHND in self.clustered(qk)]
            centroids.seed_from(vectors)

    @property
    def follows_nearest(self) -> bool:
        """Whether centroids are updated with their nearest positions, not with their members."""
        return self.centroids.update_rule != "members"

    def add_statistics(self, members: ClusterMembers, x_BHND: Tensor, role: int) -> None:
        """Add the statistics of one role to those of the centroids.

        Members that exceed the capacity of lists are counted, but their vectors are not summed.
        """
        summed = members.lists
        if self.follows_nearest:
            summed = members.nearest
            if summed is None:
                summed = self.nearest_members(x_BHND)
        self.centroids.observe(
            role,
            x_BHND,
            member_count_L=members.count_L,
            sum_LD=sums_of_lists(x_BHND, summed, self.backend),
            count_L=summed.count_L,
            moment_2BHC=members.moment_2BHC,
        )

    # How the subclasses select.

    def dynamic_members(
        self,
        x_BHND: Tensor,
        threshold_HC: Tensor | None,
        with_nearest: bool,
    ) -> ClusterMembers:
        """Return the members of one role, in lists whose lengths depend on the scores.

        Args:
            threshold_HC: the lowest score of a member in each cluster; None: the members of a
                cluster are the W positions with the highest scores.
            with_nearest: also compute `ClusterMembers.nearest`.
        """
        selection = choose_members(
            self.centroids.centroid_HCD,
            x_BHND,
            threshold_HC,
            window=self.window,
            nearest=with_nearest,
            backend=self.backend,
        )
        nearest = None
        if selection.nearest_BHN is not None:
            nearest = self.pack_clusters(selection.nearest_BHN)
        lists = MemberLists(selection.row_M, selection.count_L)
        return ClusterMembers(lists, lists.count_L, nearest, selection.moment_2BHC)

    def static_members(
        self, x_BHND: Tensor, threshold_HC: Tensor | None, capacity: int
    ) -> Selected:
        """Return the members of one role in static shapes.

        Args:
            threshold_HC: the lowest score of a member in each cluster; None: a position is a member
                of its highest-scoring cluster alone.
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

    def nearest_members(self, x_BHND: Tensor) -> MemberLists:
        """Return lists in which each position is a member of its highest-scoring cluster alone."""
        if not is_static(x_BHND, self.backend):
            cluster_BHN = self.nearest_clusters(x_BHND)
            return self.pack_clusters(cluster_BHN)
        functions = selection_functions(x_BHND, self.backend)
        margin_HC = self.margins(x_BHND)
        return functions.nearest_members(self.centroids.centroid_HCD, x_BHND, margin_HC)

    def pack_clusters(self, cluster_BHN: Tensor) -> MemberLists:
        """Return lists in which each position is a member of one cluster, `cluster_BHN`."""
        C = self.centroids.centroid_HCD.shape[1]
        return pack(cluster_BHN, C, complete=True)

    def nearest_clusters(self, x_BHND: Tensor) -> Tensor:
        """Return the highest-scoring cluster of each position, `[B, H, N]`."""
        centroid_HCD = self.centroids.centroid_HCD
        if is_static(x_BHND, self.backend):
            functions = selection_functions(x_BHND, self.backend)
            margin_HC = self.margins(x_BHND)
            cluster_BHN = functions.nearest_clusters(centroid_HCD, x_BHND, margin_HC)
            return cluster_BHN.long()
        selection = choose_members(
            centroid_HCD,
            x_BHND,
            None,
            window=0,
            nearest=True,
            backend=self.backend,
        )
        assert selection.nearest_BHN is not None
        return selection.nearest_BHN

    # The loss.

    def loss(self, qk: QueriesKeys, parts: list[Reads]) -> Tensor:
        """Return the weighted commitment loss in training, otherwise zero."""
        has_loss = self.training and self.commitment > 0
        if not has_loss or not qk.q_BHND.numel():
            return super().loss(qk, parts)
        distances = [self.distance(x_BHND) for x_BHND in self.clustered(qk)]
        mean = torch.stack(distances).mean()
        return self.commitment * mean

    def distance(self, x_BHND: Tensor) -> Tensor:
        """Return the mean of (x - nearest centroid)^2, with centroids scaled to norm sqrt(D)."""
        with torch.no_grad():
            nearest_BHN = self.nearest_clusters(x_BHND)
        H = x_BHND.shape[1]
        head_H = torch.arange(H, device=x_BHND.device)
        centroid_HCD = to_sphere(self.centroids.centroid_HCD)
        centroid_HCD = centroid_HCD.to(x_BHND.dtype)
        nearest_BHND = centroid_HCD[head_H[:, None], nearest_BHN]
        difference_BHND = x_BHND - nearest_BHND
        return difference_BHND.square().mean()

    # Costs.

    def pairs_of_head(self, length: int) -> float:
        C = self.centroids.centroid_HCD.shape[1]
        members = min(self.window, length)
        return C * self.pairs_of_cluster(members)

    def choice_operations(self, length: int, size: int) -> float:
        """Return the operations of all scores, and of the projection if there is one."""
        C = self.centroids.centroid_HCD.shape[1]
        products_of_position = {
            "shared": C,
            "separate": 2 * C,
            "projected": C + size,
        }
        products_of_head = length * products_of_position[self.centroids.keys]
        return 2.0 * size * products_of_head


def with_rows_of(lists: MemberLists, length: int, new_length: int) -> MemberLists:
    """Return the same members with the rows of heads of `new_length` positions.

    Args:
        length: the number of positions of a head by which rows are numbered in `lists`.
    """
    head_M = lists.row_M // max(1, length)
    row_M = lists.row_M + head_M * (new_length - length)
    return MemberLists(row_M, lists.count_L)


def as_cluster_members(selected: Selected) -> ClusterMembers:
    """Return members that were selected in static shapes as `ClusterMembers`."""
    lists = MemberLists(
        row_M=selected.row_M,
        count_L=selected.bound_L1.diff(),
    )
    return ClusterMembers(lists, selected.count_L, selected=selected)
