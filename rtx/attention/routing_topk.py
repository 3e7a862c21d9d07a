"""Algorithm 1 of the Routing Transformer (Roy et al. 2021): clusters of the W best positions.

A score is the dot product of a centroid with a normalised vector. The members of a cluster are the
W positions of the sequence with the highest scores. A stream does not have the whole sequence: it
selects the members of every *prefix*, the positions 0 to i, position by position.

Example of prefixes: one cluster, W = 2, and the scores 5, 3, 4 and 2 at the positions 0 to 3. The
members of the prefixes are {0}, {0, 1}, {0, 2} and {0, 2}: position 2 replaces position 1, and
position 3 does not become a member.

Equal scores. Rounding makes equal scores differ a little, so scores within a *margin* of each other
count as equal, and of equal ones the earlier position is taken. The margin of a cluster is 64 units
in the last place of the product of the norms of its centroid and of a normalised vector.

This file has the rule (`TopK.members_by_rule`; `best_of_prefixes` for streams), the batch form, and
the stream (`PrefixTopK`, `TopKCache`). clusters.py has the base classes, and centroids.py says how
centroids move. Names from other files that this one uses:

    Routing            the base class: its `rule` and `reads` call the methods of `TopK`, and
                       members read members up to their positions (clusters.py)
    ClusterCache       the keys and values of the members of clusters (clusters.py)
    products           dot products, in float32 or wider
    best               the W best of some scores. Let s be the W-th highest score. First all scores
                       above s + margin, then those from s - margin to s + margin in order of
                       position, until there are W. NaN is the lowest score (ties.py)
    choose_members     the same on tensors: the scores, and the W best of each cluster, as lists in
                       order of position
    members_read       which member reads which, as ranges of lists: of the keys of its list the
                       last `window` ones up to its position; W of them, that is all, here
    MemberLists        lists of rows: `row_M` has the members of one list after another, and
                       `count_L` their number in each. Row b * H * N + h * N + n is position n
    Holes              keys within a range that are not read: those whose number is in the query's
                       interval
    selection_functions, Selected
                       the selection in static shapes: functions and results for GPUs

Shapes: B sequences, H heads, C clusters, N positions, D head size, W attention window, L = B * H *
C lists, M members of all lists together, J of some, P query members, X = B * H or a part of it, Q
positions of a piece.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.clusters import ClusterCache, Joins, Routing, both_roles
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.engine.static_selection import Selected
from rtx.attention.members import ClusterMembers, choose_members, products
from rtx.attention.pattern import Cache
from rtx.attention.pieces import piece_size
from rtx.attention.reads import (
    Holes,
    MemberLists,
    QueriesKeys,
    RangeReads,
    Reads,
    members_read,
    positions,
)
from rtx.attention.static import selection_functions
from rtx.attention.ties import best
from rtx.attention.typed_torch import tolist

EMPTY = 1 << 40
"""The position of the empty slot 0; slot s has `EMPTY` - s. All positions are lower."""


def best_of_prefixes(score_CN: Tensor, margin_C: Tensor, window: int) -> Tensor:
    """Return the members of each cluster in each prefix, `[C, N, N]`, bool.

    Element `[c, i, j]` is true if position j is a member of cluster c among the positions 0 to i.
    This is the rule of `PrefixTopK`, position by position. A full cluster takes a new position if
    its score exceeds the lowest score of the members by more than the margin. Among the members
    within the margin of that lowest score, the new position replaces the latest one.
    """
    C, N = score_CN.shape
    member_CNN = torch.zeros(C, N, N, dtype=torch.bool, device=score_CN.device)
    margins = tolist(margin_C)
    for c, score_N in enumerate(tolist(score_CN)):
        members: list[int] = []
        for i in range(N):
            members = members_with_next(members, i, score_N, margins[c], window)
            member_CNN[c, i, members] = True
    return member_CNN


def members_with_next(
    members: list[int],
    i: int,
    score_N: list[float],
    margin: float,
    window: int,
) -> list[int]:
    """Return the members of a cluster in the prefix 0 to i, from those in the prefix before it."""
    if len(members) < window:
        return [*members, i]
    worst = min(score_N[j] for j in members)
    bar = worst + margin
    exceeds_bar = score_N[i] > bar
    if not exceeds_bar:
        return members
    replaced = max(j for j in members if score_N[j] <= bar)
    remaining = [j for j in members if j != replaced]
    return [*remaining, i]


class TopK(Routing):
    """Algorithm 1: the members of a cluster are the W best positions of the whole sequence.

    The best positions are those with the highest scores. **This sees the future**: later positions
    decide which past positions are members. In streams, and with `streaming`, position i joins a
    cluster if it is among the W best of the positions 0 to i, and then reads these W positions.

    The lines of Algorithm 1 (Roy et al. 2021, section 4.1). Its one switch is two here: `causal` is
    the mask, and `keys` decides on lines 5, 11, 17 and 18.

         1  Q, K, V                            the arguments of `Pattern.forward`
         2  mu                                 `Centroids.centroid_HCD`
         3  lambda                             `Centroids.decay`
         4  if left to right mask then         `causal`
         5    K <- Q                           `Routing.has_keys` is false with `keys="shared"`
         7  Q <- LayerNorm(Q)                  `ClusterPattern.prepare`
         8  K <- LayerNorm(K)                  the same
         9  Q_prod <- mu Q^T                   `Routing.scores_of_head`; on tensors `choose_members`
        10  if not left to right mask then     `causal=False`
        11    K_prod <- mu K^T                 `keys="separate"`
        12  w <- n / k                         W, the window of the centroids
        13  Q_idx <- top-k(Q_prod, w)          `members_by_rule`; on tensors `select_dynamic`, or
                                               `select_static` on a GPU
        14  Q_idx <- sort(Q_idx)               lists are in order of position
        15  K_idx <- Q_idx                     `both_roles`: one list for queries and keys
        16  if not left to right mask then     `causal=False`
        17    K_idx <- top-k(K_prod, w)        `keys="separate"`: lists of keys
        18    K_idx <- sort(K_idx)
        19  Q', K', V' <- gather(...)  (to 21) `Routing.reads_of`: which members read which
        22  A <- Q' K'^T                       `Pattern.attend_parts`, as 25 and 26
        23  if left to right mask then         `causal`
        24    A <- ltr(A)                      `ClusterPattern.ranges_of_lists`: a range ends at the
                                               position of the query
        25  A <- softmax(A)                    `Pattern.attend_parts`
        26  V' <- einsum(A, V')                the same
        27  X <- scatter(K_idx, V')            outputs of several clusters: `merge`
        28  Q_m <- one-hot(arg max(Q_prod))    `Routing.add_statistics`: nearest positions,
                                               or members with `update="members"`
        29  K_m <- one-hot(arg max(K_prod))    the same for keys
        31  mu <- lambda mu + ...              `Centroids` with `update="sum"`: `moved_by_sums`

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
        members: list[Tensor] = []
        for score_CN in self.scores_of_head(qk, head):
            margin_C = self.margins(score_CN)[head]
            member_CNN = best_of_prefixes(score_CN, margin_C, self.window)
            members.append(member_CNN)
        query_CNN, key_CNN = both_roles(members)
        joins_CN = query_CNN.diagonal(dim1=1, dim2=2)
        return key_CNN & joins_CN[:, :, None]

    def members_by_rule(self, score_CN: Tensor, margin_C: Tensor, role: int, head: int) -> Tensor:
        member_CN = torch.zeros_like(score_CN, dtype=torch.bool)
        margins = tolist(margin_C)
        for c, score_N in enumerate(tolist(score_CN)):
            margin_N = [margins[c] for _ in score_N]
            members = best(score_N, margin_N, self.window)
            member_CN[c, members] = True
        return member_CN

    # The batch form.

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        if streaming:
            return [self.prefix_reads(qk)]
        return super().reads(qk, streaming)

    def select_dynamic(self, x_BHND: Tensor, role: int, with_nearest: bool) -> ClusterMembers:
        return choose_members(
            self.centroids.centroid_HCD,
            x_BHND,
            None,
            window=self.window,
            nearest=with_nearest,
            backend=self.backend,
        )

    def select_static(self, x_BHND: Tensor, role: int) -> Selected:
        B, H, N, _ = x_BHND.shape
        C = self.centroids.centroid_HCD.shape[1]
        L = B * H * C
        W = min(self.window, N)
        device = x_BHND.device
        position_XCW = self.best_positions(x_BHND)
        functions = selection_functions(x_BHND, self.backend)
        lists = functions.top_lists(position_XCW, N, W, self.attend_self)
        number_L1 = torch.arange(L + 1, device=device)
        return Selected(
            row_M=lists.query_row_P,
            count_L=torch.full((L,), W, device=device),
            lists=lists,
            bound_L1=number_L1 * W,
            lost=torch.zeros(1, dtype=torch.int64, device=device),
        )

    def best_positions(self, x_BHND: Tensor) -> Tensor:
        """Return the W best positions of each cluster, or all if there are fewer, `[X, C, W]`.

        Heads are processed in pieces that have at most `MAX_SCORES` scores, or in single heads.
        """
        B, _, N, _ = x_BHND.shape
        C = self.centroids.centroid_HCD.shape[1]
        W = min(self.window, N)
        functions = selection_functions(x_BHND, self.backend)
        scores_of_head = max(1, C * N)
        heads_of_piece = max(1, functions.MAX_SCORES // scores_of_head)
        centroid_XCD = self.centroids.centroid_HCD.repeat(B, 1, 1)
        margin_XC = self.margins(x_BHND).repeat(B, 1)
        x_XND = x_BHND.flatten(0, 1)
        pieces = zip(
            torch.split(centroid_XCD, heads_of_piece),
            torch.split(x_XND, heads_of_piece),
            torch.split(margin_XC, heads_of_piece),
            strict=True,
        )
        best_of_pieces: list[Tensor] = []
        for some_centroid_XCD, some_x_XND, some_margin_XC in pieces:
            score_XCN = products(some_centroid_XCD, some_x_XND)
            position_XCW = functions.top_members(score_XCN, some_margin_XC, W)
            best_of_pieces.append(position_XCW)
        return torch.cat(best_of_pieces)

    def prefix_reads(self, qk: QueriesKeys) -> RangeReads:
        """Return which queries read which keys if position i selects the W best of 0 to i.

        A list contains every position that was a member in some prefix. Holes exclude the members
        that were replaced at the query's position or earlier. With W = 1 a new member has no other
        member to read, so it reads itself.
        """
        N = qk.q_BHND.shape[2]
        arrived = [self.arrivals(x_BHND) for x_BHND in self.clustered(qk)]
        queries, keys = both_roles(arrived)
        attend_self = self.attend_self or self.window == 1
        part = members_read(queries.lists, keys.lists, N, N, attend_self)
        position_P = positions(queries.lists, N)
        position_1P = position_P[None]
        # A key member has been replaced if it leaves at the position of the query or before.
        holes = Holes(
            value_iM=keys.leaves_M[None],
            low_iP=torch.zeros_like(position_1P),
            high_iP=position_1P + 1,
        )
        return part._replace(holes=holes, derived={ARRIVALS: arrived})

    @torch.no_grad()
    def arrivals(self, x_BHND: Tensor) -> Arrivals:
        """Return the arrivals of one role, from its vectors.

        Position i reads the members j <= i that have not left at i or before.
        """
        B, H, N, _ = x_BHND.shape
        centroid_HCD = self.centroids.centroid_HCD
        C = centroid_HCD.shape[1]
        margin_L = self.margins_of_lists(x_BHND)
        prefix_top_k = PrefixTopK(margin_L, self.window)
        none_J = torch.zeros(0, dtype=torch.int64, device=x_BHND.device)
        joined = [Newcomers(none_J, none_J, none_J)]
        most = piece_size(B * H * C)
        first = 0
        while first < N:
            # A piece is a quarter as long as the prefix before it, or W if that is more. If scores
            # are independent, about W / 4 of its positions exceed the bar before the piece, so that
            # `offer_positions` has few to offer.
            count = max(self.window, first // 4)
            count = min(count, most)
            stop = min(N, first + count)
            x_BHQD = x_BHND[:, :, first:stop]
            score_BHCQ = products(centroid_HCD, x_BHQD)
            score_LQ = score_BHCQ.flatten(0, 2)
            joined += offer_positions(prefix_top_k, score_LQ, first)
            first = stop
        lists, leaves_M = arrival_lists(joined, B * H, C, N)
        return Arrivals(lists, leaves_M, prefix_top_k)

    def margins_of_lists(self, x: Tensor) -> Tensor:
        """Return the margin of each list, `[L]`; see `margins`.

        Args:
            x: the vectors or the scores of B sequences.
        """
        sequences = len(x)
        margin_XC = self.margins(x).repeat(sequences, 1)
        return margin_XC.flatten()

    # The stream.

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return TopKCache(self, self.window, relative)

    def lists_to_cache(
        self,
        qk: QueriesKeys,
        parts: list[Reads] | None,
        cache: ClusterCache,
    ) -> MemberLists:
        assert isinstance(cache, TopKCache)
        N = qk.q_BHND.shape[2]
        C = self.centroids.centroid_HCD.shape[1]
        if parts is None:
            parts = self.reads(qk, streaming=True)
        (part,) = parts
        assert isinstance(part, RangeReads) and part.derived is not None
        arrived = part.derived[ARRIVALS]
        cache.best = [arrivals.best for arrivals in arrived]
        _, best_keys = both_roles(cache.best)
        return best_keys.members(C, N)

    def clusters_of_next(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> Joins:
        assert isinstance(cache, TopKCache)
        centroid_HCD = self.centroids.centroid_HCD
        scores: list[Tensor] = []
        for x_BH1D in self.clustered(qk):
            score_BHC1 = products(centroid_HCD, x_BH1D)
            scores.append(score_BHC1[..., 0])
        if cache.best is None:
            margin_L = self.margins_of_lists(scores[0])
            cache.best = [PrefixTopK(margin_L, self.window) for _ in scores]
        return cache.offer(scores, position)


class Offer(NamedTuple):
    """The result of offering one position to each list."""

    joins_L: Tensor
    """Whether the position becomes a member of the list."""
    slot_L: Tensor
    """The slot that it gets in the list."""
    replaced_L: Tensor
    """The position that it replaces; `EMPTY` or near to it: none."""


class PrefixTopK:
    """The best W scores of each list so far, and their positions.

    A full list takes a new position if its score exceeds the lowest score of the list by more than
    the margin. Of the members within the margin of the lowest score, it replaces the latest.

    Args:
        margin_L: the margin of each list, in the type of scores.
        window: W.
    """

    def __init__(self, margin_L: Tensor, window: int) -> None:
        lists = len(margin_L)
        shape_LW = (lists, window)
        self.margin_L1 = margin_L[:, None]
        self.score_LW = margin_L.new_full(shape_LW, -math.inf)
        # Empty slots have the score -inf and positions later than all others, slot 0 the latest.
        # So they are replaced first, in the order of their numbers.
        slot_W = torch.arange(window, device=margin_L.device)
        position_W = EMPTY - slot_W
        self.position_LW = position_W.expand(shape_LW).clone()

    def bar(self) -> Tensor:
        """Return the score that a new member has to exceed, `[L, 1]`; it never decreases."""
        worst_L1 = self.score_LW.amin(-1, keepdim=True)
        return worst_L1 + self.margin_L1

    def offer(self, score_L: Tensor, position_L: Tensor) -> Offer:
        """Offer one position to each list: it becomes a member if its score is high enough."""
        score_L1 = score_L[:, None]
        position_L1 = position_L[:, None]
        bar_L1 = self.bar()
        joins_L1 = score_L1 > bar_L1
        is_replaceable_LW = self.score_LW <= bar_L1
        replaceable_LW = torch.where(is_replaceable_LW, self.position_LW, -1)
        slot_L1 = replaceable_LW.argmax(-1, keepdim=True)
        old_score_L1 = self.score_LW.gather(-1, slot_L1)
        old_position_L1 = self.position_LW.gather(-1, slot_L1)
        new_score_L1 = torch.where(joins_L1, score_L1, old_score_L1)
        new_position_L1 = torch.where(joins_L1, position_L1, old_position_L1)
        self.score_LW.scatter_(-1, slot_L1, new_score_L1)
        self.position_LW.scatter_(-1, slot_L1, new_position_L1)
        return Offer(
            joins_L=joins_L1[:, 0],
            slot_L=slot_L1[:, 0],
            replaced_L=old_position_L1[:, 0],
        )

    def newcomers(self, score_L: Tensor, position_L: Tensor) -> Newcomers:
        """Offer one position to each list, and return the new members."""
        offer = self.offer(score_L, position_L)
        joins_L = offer.joins_L
        return Newcomers(
            list_J=joins_L.nonzero()[:, 0],
            position_J=position_L[joins_L],
            replaced_J=offer.replaced_L[joins_L],
        )

    def members(self, clusters: int, length: int) -> MemberLists:
        """Return the members of each list, in order of slots.

        Args:
            clusters, length: C and N, by which rows are numbered.
        """
        is_filled_LW = self.position_LW < length
        list_M, slot_M = is_filled_LW.nonzero(as_tuple=True)
        head_M = list_M // clusters
        row_M = head_M * length + self.position_LW[list_M, slot_M]
        return MemberLists(row_M, is_filled_LW.sum(-1))


ARRIVALS = "arrivals"
"""The key of the `Arrivals` of each role in `RangeReads.derived`, for the cache of a stream."""


class Arrivals(NamedTuple):
    """Every position i that is among the best W of 0 to i, with the position at which it leaves."""

    lists: MemberLists
    """These positions, in a list for each cluster."""
    leaves_M: Tensor
    """The position at which each member is replaced; N: never."""
    best: PrefixTopK
    """The best W of the whole sequence."""


class Newcomers(NamedTuple):
    """Some new members, each in one list."""

    list_J: Tensor
    position_J: Tensor
    replaced_J: Tensor
    """The position of the member that each one replaces; `EMPTY` or near to it: none."""


def arrival_lists(
    joined: list[Newcomers],
    heads: int,
    clusters: int,
    length: int,
) -> tuple[MemberLists, Tensor]:
    """Return the lists of all new members, and the position at which each is replaced (N: never).

    Args:
        heads, clusters, length: X, C and N.
    """
    list_J = torch.cat([some.list_J for some in joined])
    position_J = torch.cat([some.position_J for some in joined])
    replaced_J = torch.cat([some.replaced_J for some in joined])
    # Numbers list * N + position ascend from list to list, and with the positions within a list.
    first_number_J = list_J * length
    number_M, order_M = (first_number_J + position_J).sort()
    has_replaced_J = replaced_J < length
    replaced_number_J = first_number_J + replaced_J
    replaced_member_J = torch.searchsorted(number_M, replaced_number_J[has_replaced_J])
    leaves_M = torch.full_like(number_M, length)
    leaves_M[replaced_member_J] = position_J[has_replaced_J]
    head_J = list_J // clusters
    row_J = head_J * length + position_J
    count_L = torch.bincount(list_J, minlength=heads * clusters)
    return MemberLists(row_J[order_M], count_L), leaves_M


def offer_positions(prefix_top_k: PrefixTopK, score_LQ: Tensor, first: int) -> list[Newcomers]:
    """Offer a piece of positions, which starts at `first`, to all lists; return the new members.

    The bar never decreases. So only scores above the bar before the piece are candidates. In each
    turn, every list gets an offer of its next candidate.
    """
    may_join_LQ = score_LQ > prefix_top_k.bar()
    count_L = may_join_LQ.sum(-1)
    turns = 0
    if len(count_L):
        turns = int(count_L.max())
    first_L = count_L.cumsum(0) - count_L
    # The candidates of all lists, list after list.
    candidate_J = may_join_LQ.nonzero()[:, 1]
    last = len(candidate_J) - 1
    joined: list[Newcomers] = []
    for turn in range(turns):
        # A list without further candidates is offered some position with the score -inf.
        number_L = first_L + turn
        candidate_L = candidate_J[number_L.clamp(max=last)]
        score_L1 = score_LQ.gather(1, candidate_L[:, None])
        is_over_L = turn >= count_L
        score_L = score_L1[:, 0].masked_fill(is_over_L, -math.inf)
        joined.append(prefix_top_k.newcomers(score_L, candidate_L + first))
    return joined


class TopKCache(ClusterCache):
    """The keys and values of the W best positions so far of each cluster."""

    best: list[PrefixTopK] | None = None
    """The W best positions of each role, with their scores. A key has the same slot in the cache as
    among the W best of the keys. None: the stream is empty."""

    def offer(self, scores: list[Tensor], position: int) -> Joins:
        """Offer a position to all clusters, and return which clusters its query and its key join.

        Args:
            scores: the scores of the position, `[B, H, C]` for each role.
        """
        assert self.best is not None
        offers: list[Offer] = []
        for best_of_role, score_BHC in zip(self.best, scores, strict=True):
            score_L = score_BHC.flatten()
            position_L = torch.full_like(score_L, position, dtype=torch.int64)
            offers.append(best_of_role.offer(score_L, position_L))
        query, key = both_roles(offers)
        shape = scores[0].shape
        return Joins(
            query_BHC=query.joins_L.view(shape),
            key_BHC=key.joins_L.view(shape),
            slot_BHC=key.slot_L.view(shape),
        )
