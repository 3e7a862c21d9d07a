"""Patterns with clusters: their base class, what all routing heads share, and their KV cache.

A cluster is a set of positions, its *members*. A query reads keys of the clusters that it is a
member of: of each of them the last W members up to its position (`ClusterPattern`). A position in
several clusters gets the mean of its outputs; one that is in no cluster reads nothing.

Example: W = 2, and a cluster with the members 1, 4, 5 and 8. The query at 5 reads the keys at 4 and
5, and the query at 8 those at 5 and 8. On tensors the members are one list of rows (a row is a
position of one head of one sequence), and each query reads a range of it, of at most W members:

    row_M      1 4 5 8      the rows of the members
    start_P    0 0 1 2      of each of these as a query, the first member that it reads
    stop_P     1 2 3 4      the member after the last that it reads

In a stream each cluster has W slots (`ClusterCache`). A new member takes the slot of the oldest,
unless the pattern chooses another slot.

*Routing heads* (`Routing`) have a centroid for each cluster. The *score* of a vector in a cluster
is its dot product with the centroid. Who is a member follows from the scores:

    TopK         the W positions of the whole sequence that score highest (routing_topk.py)
    Thresholds   all positions whose score reaches the threshold of the cluster
                 (routing_thresholds.py)
    Nearest      all positions that score higher in this cluster than in any other
                 (routing_nearest.py)

Hashing (lsh.py) and random heads (random_members.py) have clusters without centroids.

Roles. With `keys="separate"` the query and the key of a position have separate scores, and may be
members of different clusters: a position has two *roles*, `QUERIES` (0) and `KEYS` (1). Otherwise
there is one role, and the query and the key of a position are members of the same clusters. Lists
with one item for each role have two items or one; `both_roles` unpacks them.

Names from other files that this one uses:

    Pattern            the base class: its forward pass calls `observe` and attends over what is
                       read; its `stream` calls `start` (pattern.py)
    members_read       makes the ranges of the example from lists of members; `within_documents`
                       ends them where documents end, `members_around` has later members, too
    normalise_twice    LayerNorm without scale or bias, in float32 and in the type of the inputs
    Centroids          the centroids and thresholds, and the statistics that move them
    ClusterMembers     the members of all clusters: lists; and `selected`, if shapes are static as
                       on a GPU (`is_static`), where lists have a fixed capacity (capacity.py)
    nearest_clusters   the cluster that scores each position highest; `nearest_members`: its lists
    sums_of_lists      the sum of the vectors of the members of each list
    attend_lists       attention of the newest position over slots, merged over its clusters

Shapes: B sequences or streams, H heads, C clusters, N positions, D head size, W attention window,
S slots of a cluster, L = B * H * C lists (the clusters of all heads), M members and P query members
of all lists, J some lists or members, Q queries of a head at one position (`Cache`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rtx.attention.arguments import check_choice, check_number, check_positive
from rtx.attention.centroids import Centroids, gathering, is_rate, to_sphere
from rtx.attention.engine import MERGES
from rtx.attention.engine.by_triton import LISTS
from rtx.attention.engine.newest import ListSlots, attend_lists
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.engine.static_selection import Selected, separate_lists
from rtx.attention.grouped import as_heads, expanded, rotated_queries
from rtx.attention.members import (
    ClusterMembers,
    as_cluster_members,
    nearest_clusters,
    nearest_members,
    normalise_twice,
    sums_of_lists,
    with_rows_of,
)
from rtx.attention.pairs import pairs_within
from rtx.attention.pattern import Cache, Pattern, Prepared
from rtx.attention.precision import no_autocast
from rtx.attention.reads import (
    MemberLists,
    QueriesKeys,
    RangeReads,
    Reads,
    mask_without_self,
    members_around,
    members_read,
    within_documents,
)
from rtx.attention.static import is_static
from rtx.attention.ties import centroid_margin
from rtx.attention.typed_torch import tolist

Item = TypeVar("Item")


def both_roles(items: Sequence[Item]) -> tuple[Item, Item]:
    """Return the item of the queries and that of the keys; a single item serves as both.

    For example, members: if queries and keys are members of the same clusters, there is one item.
    """
    if len(items) == 1:
        (both,) = items
        return both, both
    queries, keys = items
    return queries, keys


def last_members(query_CN: Tensor, key_CN: Tensor, window: int) -> Tensor:
    """Return the mask `[C, N, N]`: a query reads the last `window` keys of each of its clusters.

    Args:
        query_CN: whether the query at each position is a member of each cluster.
        key_CN: whether the key at each position is a member of each cluster.
    """
    C, N = query_CN.shape
    mask_CNN = torch.zeros(C, N, N, dtype=torch.bool, device=query_CN.device)
    for c in range(C):
        keys = members_of(key_CN[c])
        for i in members_of(query_CN[c]):
            past = [j for j in keys if j <= i]
            last = past[-window:]
            mask_CNN[c, i, last] = True
    return mask_CNN


def members_near(query_CN: Tensor, key_CN: Tensor, window: int) -> Tensor:
    """Return the mask `[C, Q, K]`: a query reads the `window` keys of its clusters `around` it.

    Args:
        query_CN: whether each of Q queries is a member of each cluster.
        key_CN: whether each of K keys is a member of each cluster.
    """
    C, Q = query_CN.shape
    K = key_CN.shape[1]
    mask_CQK = torch.zeros(C, Q, K, dtype=torch.bool, device=query_CN.device)
    for c in range(C):
        keys = members_of(key_CN[c])
        for i in members_of(query_CN[c]):
            mask_CQK[c, i, around(keys, i, window)] = True
    return mask_CQK


def around(positions: list[int], i: int, count: int) -> list[int]:
    """Return the `count` positions around i, or all if there are fewer.

    Half of them are before i. If there are fewer there, there are more of the later ones, and the
    other way round.

    Args:
        positions: ascending.
    """
    before = len([j for j in positions if j < i])
    start = max(0, before - count // 2)
    last_start = max(0, len(positions) - count)
    start = min(start, last_start)
    return positions[start : start + count]


def members_of(is_member_N: Tensor) -> list[int]:
    """Return the positions of the members of one cluster, ascending."""
    return tolist(is_member_N.nonzero()[:, 0])


class Joins(NamedTuple):
    """The clusters that the next query and the next key of each stream join, `[B, H, C]`, bool."""

    query_BHC: Tensor
    key_BHC: Tensor
    """The same object as `query_BHC` if they join the same clusters."""
    slot_BHC: Tensor | None = None
    """The cache slot that the key takes in each cluster; None: the slot of the oldest key."""


class ClusterPattern(Pattern):
    """Heads with clusters, in each of which a position reads the last W members up to itself.

    With causal=False it reads the W members around it, half of them before it. If a cluster has at
    most W members, it reads all of them.

    Queries and keys are normalised by LayerNorm without scale or bias, unless a subclass overrides
    `prepare`.

    Args:
        has_keys: whether there are keys; otherwise queries serve as keys.
        window: W.
        attend_self: False: a position reads itself only if it reads nothing else. None: False if
            queries serve as keys, as the nearest vector to a query is then its own key.
        merge: "mean": a position in several clusters gets the mean of their outputs (the paper's
            released code divides by their number + 0.01). "lse": one softmax over the keys of all.
    """

    normalises = True

    def __init__(
        self,
        *,
        has_keys: bool,
        window: int,
        attend_self: bool | None = None,
        merge: str = "mean",
        **options: Any,
    ) -> None:
        if attend_self is None:
            attend_self = has_keys
        super().__init__(attend_self=attend_self, **options)
        check_positive(window=window)
        check_choice("merge", merge, MERGES)
        self.has_keys = has_keys
        self.window = window
        self.merge = merge

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        wide_q_BHND, narrow_q_BHND = normalise_twice(q_BHND, self.backend)
        wide_k_BHND = wide_q_BHND
        narrow_k_BHND = narrow_q_BHND
        if k_BHND is not None:
            wide_k_BHND, narrow_k_BHND = normalise_twice(k_BHND, self.backend)
        return Prepared(
            q_BHND=wide_q_BHND,
            k_BHND=wide_k_BHND,
            narrow_q_BHND=narrow_q_BHND,
            narrow_k_BHND=narrow_k_BHND,
        )

    @abstractmethod
    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        """Return the members of all clusters.

        If queries and keys have separate memberships, the result has two items: the members as
        queries, and the members as keys. Otherwise it has one.
        """

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        queries, keys = both_roles(self.lists(qk))
        return [self.ranges_of_lists(queries, keys, qk)]

    def ranges_of_lists(
        self,
        queries: MemberLists,
        keys: MemberLists,
        qk: QueriesKeys,
    ) -> RangeReads:
        """Return which members read which, as packed lists."""
        N = qk.q_BHND.shape[2]
        if not self.causal:
            return members_around(queries, keys, N, self.window, self.attend_self)
        part = members_read(queries, keys, N, self.window, self.attend_self)
        if qk.documents is None:
            return part
        heads = qk.q_BHND.shape[1]
        start_R = qk.documents.start_rows(heads)
        return within_documents(part, start_R)

    def read_by_rule(self, query_CN: Tensor, key_CN: Tensor) -> Tensor:
        """Return the mask of what members read, `[C, N, N]`, bool."""
        if not self.causal:
            return members_near(query_CN, key_CN, self.window)
        return last_members(query_CN, key_CN, self.window)

    def pairs_of_cluster(self, members: float) -> float:
        """Return the number of pairs that are read in a cluster with this number of members."""
        return pairs_within(members, self.window, self.causal)

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return ClusterCache(self, self.window, relative)

    def lists_to_cache(
        self,
        qk: QueriesKeys,
        parts: list[Reads] | None,
        cache: ClusterCache,
    ) -> MemberLists:
        """Return the keys of all clusters after a prompt; the cache keeps the last of each.

        Args:
            parts: see `Cache.prefill`. A subclass may take the keys from these.
            cache: the empty cache, in which a subclass may store more.
        """
        _, keys = both_roles(self.lists(qk))
        return keys

    @abstractmethod
    def clusters_of_next(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> Joins:
        """Return which clusters the query and the key at the next position of each stream join."""


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
        members: list[Tensor] = []
        for role, score_CN in enumerate(self.scores_of_head(qk, head)):
            margin_C = self.margins(score_CN)[head]
            member_CN = self.members_by_rule(score_CN, margin_C, role, head)
            members.append(member_CN)
        query_CN, key_CN = both_roles(members)
        return self.read_by_rule(query_CN, key_CN)

    def scores_of_head(self, qk: QueriesKeys, head: int) -> list[Tensor]:
        """Return the scores of the first sequence in one head, `[C, N]` for each role."""
        centroid_CD = self.centroids.centroid_HCD[head]
        scores: list[Tensor] = []
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
        members: list[ClusterMembers] = []
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
        lists: list[MemberLists] = []
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
                centroid_HCD = self.centroids.centroid_HCD
                summed = nearest_members(centroid_HCD, x_BHND, self.backend)
        self.centroids.observe(
            role,
            x_BHND,
            member_count_L=members.count_L,
            sum_LD=sums_of_lists(x_BHND, summed, self.backend),
            count_L=summed.count_L,
            moment_2BHC=members.moment_2BHC,
        )

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
            nearest_BHN = nearest_clusters(self.centroids.centroid_HCD, x_BHND, self.backend)
        H = x_BHND.shape[1]
        head_H = torch.arange(H, device=x_BHND.device)
        centroid_HCD = to_sphere(self.centroids.centroid_HCD)
        centroid_HCD = centroid_HCD.to(x_BHND.dtype)
        head_H1 = head_H[:, None]
        nearest_BHND = centroid_HCD[head_H1, nearest_BHN]
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


class ClusterCache(Cache):
    """The keys and values of S members of each cluster: the last ones, or chosen by a subclass.

    Args:
        pattern: its `clusters_of_next` decides which clusters a position joins, and may choose the
            slots.
        slots: S.
        relative: tables by distance.
    """

    clusters: int
    value_LSD: Tensor
    position_LS: Tensor
    """The position in each slot; -1: none."""
    joined_L: Tensor
    """The number of keys that have joined each list."""

    def __init__(
        self,
        pattern: ClusterPattern,
        slots: int,
        relative: RelativeTables | None = None,
    ) -> None:
        self.pattern = pattern
        self.slots = slots
        self.relative = relative
        self.key_LSD: Tensor | None = None
        """None: nothing has been read."""

    def allocate(self, k_BHND: Tensor, v_BHND: Tensor, clusters: int) -> None:
        """Make empty slots for all streams, on the device and of the types of keys and values."""
        B, H, _, D = k_BHND.shape
        value_size = v_BHND.shape[-1]
        lists = B * H * clusters
        slots = self.slots
        device = k_BHND.device
        self.clusters = clusters
        self.key_LSD = k_BHND.new_zeros(lists, slots, D)
        self.value_LSD = v_BHND.new_zeros(lists, slots, value_size)
        self.position_LS = torch.full((lists, slots), -1, device=device)
        self.joined_L = torch.zeros(lists, dtype=torch.int64, device=device)

    def prefill(
        self,
        qk: QueriesKeys,
        v_BGND: Tensor,
        parts: list[Reads] | None = None,
    ) -> None:
        """Store the last S members of each list; the next key takes the slot of the oldest."""
        v_BHND = self.for_heads(v_BGND)
        B, H, N, _ = v_BHND.shape
        if not B * H * N:
            return
        lists = self.pattern.lists_to_cache(qk, parts, self)
        k_BHND = qk.rotated_k_BHND.to(v_BHND.dtype)
        clusters = len(lists.count_L) // (B * H)
        self.allocate(k_BHND, v_BHND, clusters)
        list_M = lists.list_M()
        number_M = torch.arange(len(list_M), device=list_M.device)
        rank_M = number_M - lists.first_L()[list_M]
        # The number of members of the list from this one on.
        from_here_M = lists.count_L[list_M] - rank_M
        remains_M = from_here_M <= self.slots
        row_J = lists.row_M[remains_M]
        slot_J = rank_M[remains_M] % self.slots
        slots = (list_M[remains_M], slot_J)
        self.write(slots, k_BHND, v_BHND, row_J, row_J % N)
        self.joined_L = lists.count_L.clone()

    def put(
        self,
        qk: QueriesKeys,
        v_BH1D: Tensor,
        joins_BHC: Tensor,
        slot_BHC: Tensor | None,
        position: int,
    ) -> None:
        """Store the key and value of a position in the clusters that the key joins."""
        k_BH1D = qk.rotated_k_BHND.to(v_BH1D.dtype)
        if self.key_LSD is None:
            self.allocate(k_BH1D, v_BH1D, joins_BHC.shape[-1])
        list_J = joins_BHC.flatten().nonzero()[:, 0]
        if slot_BHC is None:
            slot_J = self.joined_L[list_J] % self.slots
        else:
            slot_J = slot_BHC.flatten()[list_J]
        row_J = list_J // self.clusters
        position_J = torch.full_like(row_J, position)
        self.write((list_J, slot_J), k_BH1D, v_BH1D, row_J, position_J)
        self.joined_L[list_J] += 1

    def write(
        self,
        slots: tuple[Tensor, Tensor],
        k_BHND: Tensor,
        v_BHND: Tensor,
        row_J: Tensor,
        position_J: Tensor,
    ) -> None:
        """Write the keys and values of J of the B * H * N rows into slots.

        Args:
            slots: the list of each row, and its slot there.
            position_J: the positions of the rows.
        """
        assert self.key_LSD is not None
        self.key_LSD[slots] = k_BHND.flatten(0, 2)[row_J]
        self.value_LSD[slots] = v_BHND.flatten(0, 2)[row_J]
        self.position_LS[slots] = position_J

    def for_heads(self, v_BGND: Tensor) -> Tensor:
        """Return values for each head that chooses its clusters."""
        if self.pattern.chooses_together:
            return v_BGND
        return expanded(v_BGND, self.pattern.queries_of_key_head)

    def decode(self, qk: QueriesKeys, v_BG1D: Tensor, position: int) -> Tensor:
        v_BH1D = self.for_heads(v_BG1D)
        q_BHQD = rotated_queries(qk).to(v_BH1D.dtype)
        joins = self.pattern.clusters_of_next(qk, position, self)
        self.put(qk, v_BH1D, joins.key_BHC, joins.slot_BHC, position)
        is_read_L = joins.query_BHC.flatten()
        if joins.query_BHC is not joins.key_BHC:
            # A query with separate memberships may join a list that has no key yet.
            is_read_L = is_read_L & (self.joined_L > 0)
        list_J = is_read_L.nonzero()[:, 0]
        if not len(list_J):
            value_size = v_BH1D.shape[-1]
            return as_heads(v_BH1D.new_zeros(*q_BHQD.shape[:3], value_size))
        slots = self.slots_of(list_J, position)
        terms = self.pattern.terms(q_BHQD.shape[-1], self.relative)
        out_BHQD = attend_lists(q_BHQD, slots, terms, self.pattern.merge)
        return as_heads(out_BHQD.to(v_BH1D.dtype))

    def slots_of(self, list_J: Tensor, position: int) -> ListSlots:
        """Return the slots of J lists that the query at `position` reads."""
        assert self.key_LSD is not None
        position_JS = self.position_LS[list_J]
        return ListSlots(
            stream_head_J=list_J // self.clusters,
            key_JSD=self.key_LSD[list_J],
            value_JSD=self.value_LSD[list_J],
            mask_JS=self.slots_read(position_JS, list_J, position),
            distance_JS=position - position_JS,
        )

    def slots_read(self, position_JS: Tensor, list_J: Tensor, position: int) -> Tensor:
        """Return which slots of J lists the query at `position` reads, `[J, S]`.

        Args:
            position_JS: the position of the key in each slot; -1: the slot is empty.
        """
        is_filled_JS = position_JS >= 0
        if self.pattern.attend_self:
            return is_filled_JS
        return mask_without_self(is_filled_JS, position_JS == position)
