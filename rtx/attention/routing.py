"""Routing heads: a position reads (attends to) positions that are in the same clusters.

Each head has C clusters, with one centroid each. The *score* of a vector in a cluster is its dot
product with the centroid. The *nearest* cluster of a vector is the one that scores it highest; of
centroids of equal norm its centroid is also the closest one. Scores decide which positions are
members of a cluster. In each of its clusters a position reads the last W members up to itself
(`ClusterPattern`). Three classes have different rules of membership:

    TopK         the W positions of the whole sequence that score highest (Algorithm 1 of the paper)
    Thresholds   all positions whose score reaches the threshold of the cluster
    Nearest      all positions that score higher in this cluster than in any other

Sides. A *side* is a set of vectors that are assigned to clusters. With `keys="separate"` there are
two sides, `QUERIES` and `KEYS`: the query and the key of a position have separate scores, and may
be members of different clusters. Otherwise there is one side, and the query and the key of a
position are members of the same clusters. Every side has scores, thresholds and lists of members.

The batch form processes whole sequences at once. It has two implementations. On a CPU, the lengths
of lists depend on the scores (`select_dynamic`). On a GPU, all shapes are static (`select_static`),
so that in training the CPU does not wait for the GPU. Static lists have room for a fixed number of
members (room.py).

Names from other files that this one uses:

    ClusterPattern     the base class: a query reads the last W members of a cluster (clusters.py)
    Centroids          the centroids and thresholds, and the statistics that move them
    choose_members     selects members by the scores of whole sequences (members.py)
    PrefixTopK         the W best of the positions so far; `arrivals` applies it to whole sequences
    MemberLists        packed lists of members; `members_read` returns which member reads which
                       (reads.py has a picture)
    best, highest      the best of some scores; scores within a margin are equal, and of equal ones
                       the first is taken (ties.py)
    selection_functions, Selected, separate_lists, LISTS
                       the same selection in static shapes: functions and results for GPUs

Statistics. `reads` has no side effects. The forward pass calls `observe`. In training, `observe`
also gathers the statistics that move the centroids after the step (centroids.py).

Shapes: B sequences, H heads, C clusters, N positions, D head size, W attention window, L = B * H *
C lists, M members and P query members of all lists together, X = B * H or a part of it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx.attention.arguments import check_number
from rtx.attention.cache import Cache
from rtx.attention.centroid_update import to_sphere
from rtx.attention.centroids import Centroids, gathering, is_rate
from rtx.attention.clusters import ClusterCache, ClusterPattern, Joins
from rtx.attention.engine.by_triton import LISTS
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.engine.static_selection import Selected, memberships, separate_lists
from rtx.attention.members import (
    Arrivals,
    PrefixTopK,
    arrivals,
    choose_members,
    products,
    sums_of_lists,
)
from rtx.attention.precision import no_autocast
from rtx.attention.reads import (
    Holes,
    MemberLists,
    QueriesKeys,
    RangeReads,
    Reads,
    members_read,
    pack,
)
from rtx.attention.static import is_static, selection_functions
from rtx.attention.ties import best, centroid_margin, highest, highest_clusters


class SideMembers(NamedTuple):
    """The members of all clusters on one side."""

    lists: MemberLists
    """The members of each cluster, except those for which there was no room."""
    count_L: Tensor
    """The number of members of each cluster, including those for which there was no room."""
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

    takes_both_sides = True

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
        """For telemetry: the lists of each side, and B * H * N, both of the last training batch;
        None: there was none."""

    def clustered(self, qk: QueriesKeys) -> list[Tensor]:
        """Return the vectors that are assigned to clusters, `[B, H, N, D]` for each side."""
        q_BHND = qk.q_BHND
        k_BHND = qk.k_BHND
        if qk.counts is not None:
            # Cross-attention: `takes_other_keys` has made sure that there are two sides.
            query_count, key_count = qk.counts
            return [q_BHND[:, :, :query_count], k_BHND[:, :, :key_count]]
        if self.centroids.keys == "separate":
            return [q_BHND, k_BHND]
        if self.centroids.projection_HDD is None:
            return [q_BHND]
        projection_HDD = self.centroids.projection_HDD.to(q_BHND.dtype)
        with no_autocast(q_BHND):
            projected_BHND = (q_BHND + k_BHND) @ projection_HDD.transpose(-1, -2)
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
        for side, score_CN in enumerate(self.scores_of_head(qk, head)):
            margin_C = self.margins(score_CN)[head]
            member_CN = self.members_by_rule(score_CN, margin_C, side, head)
            members.append(member_CN)
        query_CN = members[0]
        key_CN = members[-1]
        return self.read_by_rule(query_CN, key_CN)

    def scores_of_head(self, qk: QueriesKeys, head: int) -> list[Tensor]:
        """Return the scores of the first sequence in one head, `[C, N]` for each side."""
        centroid_CD = self.centroids.centroid_HCD[head]
        scores = []
        for x_BHND in self.clustered(qk):
            x_ND = x_BHND[0, head]
            score_CN = centroid_CD.to(x_ND.dtype) @ x_ND.T
            scores.append(score_CN)
        return scores

    @abstractmethod
    def members_by_rule(self, score_CN: Tensor, margin_C: Tensor, side: int, head: int) -> Tensor:
        """Return for each cluster of a head which positions are members, `[C, N]`, bool."""

    # The batch form.

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        members = self.select(self.clustered(qk), is_dynamic=self.needs_dynamic(qk))
        return [self.reads_of(members, qk)]

    @torch.no_grad()
    def select(
        self,
        vectors: list[Tensor],
        with_nearest: bool = False,
        is_dynamic: bool = False,
    ) -> list[SideMembers]:
        """Return the members of each side.

        Args:
            vectors: the vectors of each side, `[B, H, N, D]`.
            with_nearest: compute `SideMembers.nearest` from the same scores (dynamic shapes only).
            is_dynamic: in lists whose lengths depend on the scores, on a GPU, too.
        """
        members = []
        for side, x_BHND in enumerate(vectors):
            if is_static(x_BHND, self.backend) and not is_dynamic:
                selected = self.select_static(x_BHND, side)
                members.append(side_members(selected))
            else:
                members.append(self.select_dynamic(x_BHND, side, with_nearest))
        return members

    def needs_dynamic(self, qk: QueriesKeys) -> bool:
        """Return whether selection in static shapes cannot make the ranges.

        It makes neither ranges within documents nor ranges on both sides of a query.
        """
        return qk.documents is not None or not self.causal

    @abstractmethod
    def select_dynamic(self, x_BHND: Tensor, side: int, with_nearest: bool) -> SideMembers:
        """Return the members of one side, in lists whose lengths depend on the scores."""

    @abstractmethod
    def select_static(self, x_BHND: Tensor, side: int) -> Selected:
        """Return the members of one side in static shapes."""

    def reads_of(self, members: list[SideMembers], qk: QueriesKeys) -> RangeReads:
        """Return which members read which, as packed lists.

        Args:
            members: of each side.
        """
        length = qk.q_BHND.shape[2]
        # With one side, `queries` and `keys` are the same object.
        queries = members[0]
        keys = members[-1]
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
        return self.read_of_lists(queries, keys, qk)

    @torch.no_grad()
    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        lists = []
        for side, x_BHND in enumerate(self.clustered(qk)):
            members = self.select_dynamic(x_BHND, side, with_nearest=False)
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
            for side, x_BHND in enumerate(vectors):
                self.add_statistics(members[side], x_BHND, side)
            lists = [members_of_side.lists for members_of_side in members]
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

    def add_statistics(self, members: SideMembers, x_BHND: Tensor, side: int) -> None:
        """Add the statistics of one side to those of the centroids.

        Members for which a list had no room are counted, but their vectors are not summed.
        """
        summed = members.lists
        if self.follows_nearest:
            summed = members.nearest
            if summed is None:
                summed = self.nearest_members(x_BHND)
        self.centroids.observe(
            side,
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
    ) -> SideMembers:
        """Return the members of one side, in lists whose lengths depend on the scores.

        Args:
            threshold_HC: the lowest score of a member in each cluster; None: the members of a
                cluster are the W positions with the highest scores.
            with_nearest: also compute `SideMembers.nearest`.
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
        return SideMembers(lists, lists.count_L, nearest, selection.moment_2BHC)

    def static_members(self, x_BHND: Tensor, threshold_HC: Tensor | None, room: int) -> Selected:
        """Return the members of one side in static shapes.

        Args:
            threshold_HC: the lowest score of a member in each cluster; None: a position is a member
                of its highest-scoring cluster alone.
            room: the number of members for which the lists have room.
        """
        functions = selection_functions(x_BHND, self.backend)
        return functions.by_thresholds(
            self.centroids.centroid_HCD,
            x_BHND,
            threshold_HC=threshold_HC,
            margin_HC=self.margins(x_BHND),
            window=self.window,
            attend_self=self.attend_self,
            capacity=room,
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
        head_H1 = torch.arange(H, device=x_BHND.device)[:, None]
        centroid_HCD = to_sphere(self.centroids.centroid_HCD)
        centroid_HCD = centroid_HCD.to(x_BHND.dtype)
        nearest_BHND = centroid_HCD[head_H1, nearest_BHN]
        return (x_BHND - nearest_BHND).square().mean()

    # Costs.

    def pairs_of_head(self, length: int) -> float:
        C = self.centroids.centroid_HCD.shape[1]
        return C * self.pairs_of_cluster(min(self.window, length))

    def choice_operations(self, length: int, size: int) -> float:
        """Return the operations of all scores, and of the projection if there is one."""
        C = self.centroids.centroid_HCD.shape[1]
        products_of_position = {"shared": C, "separate": 2 * C, "projected": C + size}
        return 2.0 * size * length * products_of_position[self.centroids.keys]


def with_rows_of(lists: MemberLists, length: int, new_length: int) -> MemberLists:
    """Return the same members with the rows of heads of `new_length` positions.

    Args:
        length: the number of positions of a head by which rows are numbered in `lists`.
    """
    head_M = lists.row_M // max(1, length)
    row_M = lists.row_M + head_M * (new_length - length)
    return MemberLists(row_M, lists.count_L)


def side_members(selected: Selected) -> SideMembers:
    """Convert members that were selected in static shapes."""
    lists = MemberLists(
        row_M=selected.row_M,
        count_L=selected.bound_L1.diff(),
    )
    return SideMembers(lists, selected.count_L, selected=selected)


def best_of_prefixes(score_CN: Tensor, margin_C: Tensor, window: int) -> Tensor:
    """Return the members of each cluster in each prefix, `[C, N, N]`, bool.

    Element `[c, i, j]` is true if position j is a member of cluster c among the positions 0 to i.
    This is the rule of `PrefixTopK`, position by position. A full cluster takes a new position if
    its score exceeds the lowest score of the members by more than the margin. Among the members
    within the margin of that lowest score, the new position replaces the latest one.
    """
    C, N = score_CN.shape
    member_CNN = torch.zeros(C, N, N, dtype=torch.bool, device=score_CN.device)
    for c, score_N in enumerate(score_CN.tolist()):
        margin = float(margin_C[c])
        members: list[int] = []
        for i, score in enumerate(score_N):
            if len(members) == window:
                worst = min(score_N[j] for j in members)
                bar = worst + margin
                if score > bar:
                    replaceable = [j for j in members if score_N[j] <= bar]
                    members.remove(max(replaceable))
            if len(members) < window:
                members.append(i)
            member_CNN[c, i, members] = True
    return member_CNN


ARRIVALS = "arrivals"
"""The key of the `Arrivals` of each side in `RangeReads.derived`, for the cache of a stream."""


class TopK(Routing):
    """Algorithm 1: the members of a cluster are the W best positions of the whole sequence.

    The best positions are those with the highest scores. **This sees the future**: later positions
    decide which past positions are members. In streams, and with `streaming`, position i joins a
    cluster if it is among the W best of the positions 0 to i, and then reads these W positions.

    The lines of Algorithm 1 (Roy et al. 2021, section 4.1):

         4  if left to right mask then        `causal`
         5    K <- Q                          `keys="shared"`
         7  Q <- LayerNorm(Q)                 `ClusterPattern.prepare`
         8  K <- LayerNorm(K)
         9  Q_prod <- mu Q^T                  the scores, `products`
        10  if not left to right mask then    `causal=False`
        11    K_prod <- mu K^T                `keys="separate"`
        12  w <- n / k                        W, the window of the centroids
        13  Q_idx <- top-k(Q_prod, w)         `select_dynamic`, `select_static`
        14  Q_idx <- sort(Q_idx)              members are in order of position
        15  K_idx <- Q_idx                    one list for queries and keys
        16  if not left to right mask then    `causal=False`
        17    K_idx <- top-k(K_prod, w)       `keys="separate"`: lists of keys
        18    K_idx <- sort(K_idx)
        19  Q', K', V' <- gather(...)         `reads_of` returns which members read which;
        22  A <- Q' K'^T                      `Pattern.attend` does lines 19 to 26
        23  if left to right mask then        `causal`
        24    A <- ltr(A)
        25  A <- softmax(A)
        26  V' <- einsum(A, V')
        27  X <- scatter(K_idx, V')           outputs of several clusters: `merge`
        28  Q_m <- one-hot(arg max(Q_prod))   `Centroids` with `update="sum"`
        31  mu <- decay mu + ...

    The mask compares positions in the sequence, not places in a list. With `keys="separate"` and
    `causal`, key members are selected by K_prod, as in lines 16 to 18, and the same mask applies.
    With `causal=False` and `keys="separate"` a query reads all W keys of its clusters, and there
    may be another number of keys than of queries.
    """

    strictly_causal = False

    @property
    def takes_other_keys(self) -> bool:  # type: ignore[override]
        """Whether queries and keys have separate memberships."""
        return self.centroids.keys == "separate"

    # The rule.

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        if not streaming:
            return super().rule(qk, head, streaming)
        members = []
        for score_CN in self.scores_of_head(qk, head):
            margin_C = self.margins(score_CN)[head]
            member_CNN = best_of_prefixes(score_CN, margin_C, self.window)
            members.append(member_CNN)
        query_CNN = members[0]
        key_CNN = members[-1]
        joins_CN = query_CNN.diagonal(dim1=1, dim2=2)
        return key_CNN & joins_CN[:, :, None]

    def members_by_rule(self, score_CN: Tensor, margin_C: Tensor, side: int, head: int) -> Tensor:
        member_CN = torch.zeros_like(score_CN, dtype=torch.bool)
        for c, score_N in enumerate(score_CN.tolist()):
            margin = float(margin_C[c])
            margin_N = [margin for _ in score_N]
            members = best(score_N, margin_N, self.window)
            member_CN[c, members] = True
        return member_CN

    # The batch form.

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        if streaming:
            return [self.prefix_reads(qk)]
        return super().reads(qk, streaming)

    def select_dynamic(self, x_BHND: Tensor, side: int, with_nearest: bool) -> SideMembers:
        return self.dynamic_members(x_BHND, None, with_nearest)

    def select_static(self, x_BHND: Tensor, side: int) -> Selected:
        B, H, N, _ = x_BHND.shape
        C = self.centroids.centroid_HCD.shape[1]
        L = B * H * C
        W = min(self.window, N)
        device = x_BHND.device
        functions = selection_functions(x_BHND, self.backend)
        position_XCW = self.best_positions(x_BHND)
        lists = functions.top_lists(position_XCW, N, W, self.attend_self)
        return Selected(
            row_M=lists.query_row_P,
            count_L=torch.full((L,), W, device=device),
            lists=lists,
            bound_L1=torch.arange(L + 1, device=device) * W,
            lost=torch.zeros(1, dtype=torch.int64, device=device),
        )

    def best_positions(self, x_BHND: Tensor) -> Tensor:
        """Return the W best positions of each cluster, or all if there are fewer, `[X, C, W]`.

        Heads are processed in pieces that have at most `MAX_SCORES` scores, or in single heads.
        """
        B, _, N, _ = x_BHND.shape
        W = min(self.window, N)
        centroid_HCD = self.centroids.centroid_HCD
        functions = selection_functions(x_BHND, self.backend)
        scores_per_head = max(1, centroid_HCD.shape[1] * N)
        heads_per_piece = max(1, functions.MAX_SCORES // scores_per_head)
        pieces = zip(
            centroid_HCD.repeat(B, 1, 1).split(heads_per_piece),
            x_BHND.flatten(0, 1).split(heads_per_piece),
            self.margins(x_BHND).repeat(B, 1).split(heads_per_piece),
            strict=True,
        )
        positions = []
        for centroid_XCD, x_XND, margin_XC in pieces:
            score_XCN = products(centroid_XCD, x_XND)
            position_XCW = functions.top_members(score_XCN, margin_XC, W)
            positions.append(position_XCW)
        return torch.cat(positions)

    def prefix_reads(self, qk: QueriesKeys) -> RangeReads:
        """Return which queries read which keys if position i selects the W best of 0 to i.

        A list contains every position that was a member in some prefix. Holes exclude the members
        that were replaced up to a query's position. With W = 1 a new member has no other member to
        read, so it reads itself.
        """
        N = qk.q_BHND.shape[2]
        sides = self.arrivals_of_sides(qk)
        queries = sides[0]
        keys = sides[-1]
        attend_self = self.attend_self or self.window == 1
        reads = members_read(queries.lists, keys.lists, N, N, attend_self)
        position_1P = reads.query.row_M[None] % max(1, N)
        # A query does not read key member m if leaves_M[m] is at most the position of the query.
        holes = Holes(
            value_IM=keys.leaves_M[None],
            low_IP=torch.zeros_like(position_1P),
            high_IP=position_1P + 1,
        )
        return reads._replace(holes=holes, derived={ARRIVALS: sides})

    def arrivals_of_sides(self, qk: QueriesKeys) -> list[Arrivals]:
        """Return the members in every prefix, for each side."""
        centroid_HCD = self.centroids.centroid_HCD
        sides = []
        for x_BHND in self.clustered(qk):
            sides.append(arrivals(centroid_HCD, x_BHND, self.window))
        return sides

    # The stream.

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return TopKCache(self, self.window, relative)

    def lists_to_cache(
        self,
        qk: QueriesKeys,
        parts: list[Reads] | None,
        cache: TopKCache,
    ) -> MemberLists:
        N = qk.q_BHND.shape[2]
        C = self.centroids.centroid_HCD.shape[1]
        if parts is None:
            parts = self.reads(qk, streaming=True)
        (part,) = parts
        assert isinstance(part, RangeReads) and part.derived is not None
        sides = part.derived[ARRIVALS]
        cache.best = [side.best for side in sides]
        best_keys = cache.best[-1]
        return best_keys.members(C, N)

    def clusters_of_next(self, qk: QueriesKeys, position: int, cache: TopKCache) -> Joins:
        centroid_HCD = self.centroids.centroid_HCD
        scores = []
        for x_BH1D in self.clustered(qk):
            score_BHC1 = products(centroid_HCD, x_BH1D)
            scores.append(score_BHC1[..., 0])
        if cache.best is None:
            margin_HC = self.margins(scores[0])
            margin_L = margin_HC.expand_as(scores[0]).flatten()
            cache.best = [PrefixTopK(margin_L, self.window) for _ in scores]
        return cache.offer(scores, position)


class TopKCache(ClusterCache):
    """The keys and values of the W best positions so far of each cluster."""

    best: list[PrefixTopK] | None = None
    """The W best positions of each side, with their scores. A key has the same slot in the cache as
    among the W best of the keys. None: the stream is empty."""

    def offer(self, scores: list[Tensor], position: int) -> Joins:
        """Offer a position to all clusters, and return which clusters its query and its key join.

        Args:
            scores: the scores of the position, `[B, H, C]` for each side.
        """
        assert self.best is not None
        offers = []
        for best_of_side, score_BHC in zip(self.best, scores, strict=True):
            score_L = score_BHC.flatten()
            position_L = torch.full_like(score_L, position, dtype=torch.int64)
            offers.append(best_of_side.offer(score_L, position_L))
        query = offers[0]
        key = offers[-1]
        shape = scores[0].shape
        return Joins(
            query_BHC=query.joins_L.view(shape),
            key_BHC=key.joins_L.view(shape),
            slot_BHC=key.slot_L.view(shape),
        )


ROOM = 4
"""The first `room_factor`: lists have room for this many times the expected number of members."""


class Thresholds(Routing):
    """A position joins all clusters whose threshold its score reaches. The paper has no such rule.

    A position that reaches no threshold joins the cluster whose threshold it misses by least, so
    each position is a member of some cluster. Only the position's own scores decide, so selection
    is strictly causal. After a step, the threshold of a cluster rises if the cluster has too many
    members, and falls if it has too few, see `Centroids`. Expert Threshold routing (arXiv
    2603.11535) is similar, for feed-forward experts.

    On a GPU, lists have room for a fixed number of members, see room.py.
    """

    may_lose_members = True
    bounds_documents = True

    def __init__(self, centroids: Centroids, **options: Any) -> None:
        super().__init__(centroids, **options)
        self.room_factor = ROOM
        none_lost = torch.zeros(1, dtype=torch.int64)
        self.register_buffer("lost_members", none_lost, persistent=False)
        self.lost_members: Tensor

    # The rule.

    def members_by_rule(self, score_CN: Tensor, margin_C: Tensor, side: int, head: int) -> Tensor:
        member_CN = torch.zeros_like(score_CN, dtype=torch.bool)
        threshold_C = self.centroids.thresholds()[side][head]
        above_CN = score_CN - threshold_C[:, None]
        margins = margin_C.tolist()
        for i, above_C in enumerate(above_CN.T.tolist()):
            reached = [c for c, above in enumerate(above_C) if above >= -margins[c]]
            if not reached:
                reached = [highest(above_C, margins)]
            member_CN[reached, i] = True
        return member_CN

    # The batch form.

    def select_dynamic(self, x_BHND: Tensor, side: int, with_nearest: bool) -> SideMembers:
        threshold_HC = self.centroids.thresholds()[side]
        return self.dynamic_members(x_BHND, threshold_HC, with_nearest)

    def select_static(self, x_BHND: Tensor, side: int) -> Selected:
        """See `Routing.select_static`. In training, members without room are left out.

        In evaluation the CPU reads the number of members without room. If it is not 0, the
        selection is repeated with room for all.
        """
        threshold_HC = self.centroids.thresholds()[side].to(x_BHND.dtype)
        room = self.room(x_BHND)
        selected = self.static_members(x_BHND, threshold_HC, room)
        if self.training:
            return selected
        lost = int(selected.lost)
        if not lost:
            return selected
        return self.static_members(x_BHND, threshold_HC, room + lost)

    def room(self, x_BHND: Tensor) -> int:
        """Return the room of the lists: `room_factor` times the expected number of members."""
        B, H, N, _ = x_BHND.shape
        C = self.centroids.centroid_HCD.shape[1]
        share = min(1.0, self.window / self.centroids.length)
        members_of_cluster = math.ceil(share * N)
        # Each position joins at least one cluster.
        expected = max(N, C * members_of_cluster)
        room_of_head = min(self.room_factor * expected, C * N)
        return B * H * room_of_head

    def add_statistics(self, members: SideMembers, x_BHND: Tensor, side: int) -> None:
        if members.selected is not None:
            self.lost_members.add_(members.selected.lost)
            functions = selection_functions(x_BHND, self.backend)
            moment_2BHC = functions.score_moments(self.centroids.centroid_HCD, x_BHND)
            members = members._replace(moment_2BHC=moment_2BHC)
        super().add_statistics(members, x_BHND, side)

    # The stream.

    def clusters_of_next(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> Joins:
        joins = []
        for side, x_BH1D in enumerate(self.clustered(qk)):
            score_BHC1 = products(self.centroids.centroid_HCD, x_BH1D)
            threshold_HC = self.centroids.thresholds()[side]
            margin_HC = self.margins(score_BHC1)
            member_BHC1 = memberships(score_BHC1, threshold_HC, margin_HC)
            joins.append(member_BHC1[..., 0])
        return Joins(query_BHC=joins[0], key_BHC=joins[-1])


class Nearest(Routing):
    """A position joins its highest-scoring cluster alone. This is a baseline, strictly causal."""

    bounds_documents = True

    # The rule.

    def members_by_rule(self, score_CN: Tensor, margin_C: Tensor, side: int, head: int) -> Tensor:
        member_CN = torch.zeros_like(score_CN, dtype=torch.bool)
        margins = margin_C.tolist()
        for i, score_C in enumerate(score_CN.T.tolist()):
            cluster = highest(score_C, margins)
            member_CN[cluster, i] = True
        return member_CN

    # The batch form.

    def select_dynamic(self, x_BHND: Tensor, side: int, with_nearest: bool) -> SideMembers:
        cluster_BHN = self.nearest_clusters(x_BHND)
        lists = self.pack_clusters(cluster_BHN)
        return SideMembers(lists, lists.count_L)

    def select_static(self, x_BHND: Tensor, side: int) -> Selected:
        rows = x_BHND.shape[:3].numel()
        return self.static_members(x_BHND, None, room=rows)

    @property
    def follows_nearest(self) -> bool:
        """False: the members of a cluster already are its nearest positions."""
        return False

    def pairs_of_head(self, length: int) -> float:
        C = self.centroids.centroid_HCD.shape[1]
        return C * self.pairs_of_cluster(length / C)

    # The stream.

    def clusters_of_next(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> Joins:
        joins = []
        for x_BH1D in self.clustered(qk):
            score_BHC1 = products(self.centroids.centroid_HCD, x_BH1D)
            margin_HC = self.margins(score_BHC1)
            cluster_BH1 = highest_clusters(score_BHC1, margin_HC)
            member_BHC = torch.zeros_like(score_BHC1[..., 0], dtype=torch.bool)
            member_BHC.scatter_(-1, cluster_BH1, True)
            joins.append(member_BHC)
        return Joins(query_BHC=joins[0], key_BHC=joins[-1])


ROUTING_CLASSES: dict[str, type[Routing]] = {
    "topk": TopK,
    "causal": Thresholds,
    "nearest": Nearest,
}
"""The classes of routing heads, by the value of `routing.selection`."""
