"""The base class of patterns with clusters, and their KV cache.

A cluster is a set of positions. A query reads keys of the clusters that it is a member of: of each
of them the last W up to its position. Routing heads (routing.py), hashing (lsh.py) and random heads
(random_members.py) differ in how positions become members.

Example: W = 2, and a cluster with the members 1, 4, 5 and 8. The query at 5 reads the keys at 4 and
5, and the query at 8 those at 5 and 8. A position in two clusters gets the mean of two outputs.

This file has the rule (`last_members`), the batch form (`ClusterPattern.reads`) and the stream
(`ClusterCache`), for any way to choose members.

Shapes: B sequences or streams, H heads, C clusters, N positions, D head size, W attention window,
S slots of a cluster, L = B * H * C lists (the clusters of all heads), M members of the lists of one
head or of all, J some lists or members, Q queries of a head at one position (cache.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rtx.attention.arguments import check_choice, check_positive
from rtx.attention.cache import (
    Cache,
    as_heads,
    attend_step,
    mask_without_self,
    rotated_queries,
)
from rtx.attention.engine import MERGES, with_sink
from rtx.attention.engine.combine import Partial, combine
from rtx.attention.engine.softmax import RelativeTables, soft_attend
from rtx.attention.grouped import expanded
from rtx.attention.members import normalise_twice
from rtx.attention.pairs import pairs_within
from rtx.attention.pattern import Pattern, Prepared
from rtx.attention.precision import wide_type
from rtx.attention.reads import (
    MemberLists,
    QueriesKeys,
    RangeReads,
    Reads,
    members_around,
    members_read,
    within_documents,
)

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
    return is_member_N.nonzero()[:, 0].tolist()


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


class ClusterCache(Cache):
    """The keys and values of the last S members of each cluster.

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
        v_BHND: Tensor,
        parts: list[Reads] | None = None,
    ) -> None:
        """Store the last S members of each list; the next key takes the slot of the oldest."""
        v_BHND = self.for_heads(v_BHND)
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

    def for_heads(self, v_BHND: Tensor) -> Tensor:
        """Return values for each head that chooses its clusters."""
        if self.pattern.chooses_together:
            return v_BHND
        return expanded(v_BHND, self.pattern.queries_of_key_head)

    def decode(self, qk: QueriesKeys, v_BH1D: Tensor, position: int) -> Tensor:
        v_BH1D = self.for_heads(v_BH1D)
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
        out_BHQD = self.attend_and_merge(q_BHQD, list_J, position)
        return as_heads(out_BHQD.to(v_BH1D.dtype))

    def attend_and_merge(self, q_BHQD: Tensor, list_J: Tensor, position: int) -> Tensor:
        """Return the outputs of the newest position, merged over J lists, `[B, H, Q, D]`."""
        partial = self.attend_lists(q_BHQD, list_J, position)
        partials = [partial]
        sink_HQ = self.sinks()
        if sink_HQ is not None and self.pattern.merge == "lse":
            partials.append(sinks_alone(sink_HQ, partial, len(q_BHQD)))
        shape_BHQ = q_BHQD.shape[:3]
        out_RD = combine(partials, rows=shape_BHQ.numel())
        return out_RD.view(*shape_BHQ, -1)

    def sinks(self) -> Tensor | None:
        """Return the sink of each query of the newest position, `[H, Q]`; None: there are none."""
        sink_IH = self.pattern.sinks()
        if sink_IH is None:
            return None
        return sink_IH.T

    def attend_lists(self, q_BHQD: Tensor, list_J: Tensor, position: int) -> Partial:
        """Return the outputs of the newest position in each of J lists, which `combine` merges.

        With merge="mean" each output is that of a softmax with the sink, if there is one. The
        log-sums are then set to zero, so that all lists of a row have equal weight. With "lse"
        outputs and log-sums are without the sink, which the caller adds once for each row.

        Args:
            q_BHQD: the queries of the position; those of one head read the same keys.
        """
        _, H, Q, _ = q_BHQD.shape
        # The heads of all streams are numbered b * H + h.
        stream_head_J = list_J // self.clusters
        head_J = stream_head_J % H
        q_JQD = q_BHQD.flatten(0, 1)[stream_head_J]
        out_JQD, log_sum_JQ = self.softmaxes(q_JQD, list_J, head_J, position)
        query_Q = torch.arange(Q, device=list_J.device)
        row_JQ = stream_head_J[:, None] * Q + query_Q
        partial = Partial(
            row_JQ.flatten(),
            out_JQD.flatten(0, 1),
            log_sum_JQ.flatten(),
        )
        if self.pattern.merge == "lse":
            return partial
        sink_HQ = self.sinks()
        if sink_HQ is not None:
            sink_JQ = sink_HQ[head_J]
            return with_sink(partial, sink_JQ.flatten())
        return partial._replace(log_sum_S=torch.zeros_like(partial.log_sum_S))

    def softmaxes(
        self,
        q_JQD: Tensor,
        list_J: Tensor,
        head_J: Tensor,
        position: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of queries over the slots of their lists, `[J, Q, D]`, and log-sums.

        The log-sums `[J, Q]` do not count sinks. If nothing needs them, they are zero.

        Args:
            list_J, head_J: the list of each item, and its head, 0 to H - 1.
        """
        assert self.key_LSD is not None
        J, Q, D = q_JQD.shape
        position_JS = self.position_LS[list_J]
        k_JSD = self.key_LSD[list_J]
        v_JSD = self.value_LSD[list_J]
        mask_JS = self.slots_read(position_JS, list_J, position)
        mask_J1S = mask_JS[:, None]
        terms = self.pattern.terms(D, self.relative)
        needs_log_sums = self.pattern.merge == "lse" or terms.sink_IH is not None
        if needs_log_sums or terms.by_distance:
            distance_JS = position - position_JS
            distance_JQS = distance_JS[:, None].expand(-1, Q, -1)
            return soft_attend(q_JQD, k_JSD, v_JSD, mask_J1S, distance_JQS, head_J, terms)
        # Each list is a head of a batch of J.
        out_J1QD = attend_step(
            q_JQD[:, None],
            k_JSD[:, None],
            v_JSD[:, None],
            mask_J1S[:, None],
            None,
            terms,
        )
        no_log_sum_JQ = q_JQD.new_zeros(J, Q, dtype=wide_type(q_JQD.dtype))
        return out_J1QD[:, 0], no_log_sum_JQ

    def slots_read(self, position_JS: Tensor, list_J: Tensor, position: int) -> Tensor:
        """Return the mask of the slots that the query at `position` reads in J lists, `[J, S]`.

        Args:
            position_JS: the position of the key in each slot; -1: the slot is empty.
        """
        is_filled_JS = position_JS >= 0
        if self.pattern.attend_self:
            return is_filled_JS
        return mask_without_self(is_filled_JS, position_JS == position)


def sinks_alone(sink_HQ: Tensor, partial: Partial, streams: int) -> Partial:
    """Return the sinks as outputs of one more list of each row: the output 0, the log-sum the sink.

    Args:
        sink_HQ: the sink of each query of the newest position.
        partial: outputs of lists, whose head size and types the result has.
    """
    sink_R = sink_HQ.repeat(streams, 1).flatten()
    rows = len(sink_R)
    row_R = torch.arange(rows, device=sink_R.device)
    value_size = partial.out_SD.shape[1]
    no_value_RD = partial.out_SD.new_zeros(rows, value_size)
    return Partial(row_R, no_value_RD, sink_R.to(partial.log_sum_S.dtype))
