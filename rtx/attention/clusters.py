"""The base class of patterns with clusters, their KV cache, and the pattern with random clusters.

A cluster is a set of positions. A query reads keys of the clusters that it is a member of. Routing,
hashing and random heads differ in how positions become members.

Shapes: B sequences or streams, H heads, C clusters, N positions, D head size, W attention window,
S slots of a cluster, L = B * H * C lists (the clusters of all heads), M members of the lists of one
head or of all, J some lists, members or repeats, Q queries of a head at one position (cache.py), R
= B * H * N rows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx.attention.arguments import check_choice, check_positive, check_seed
from rtx.attention.cache import (
    Cache,
    as_heads,
    attend_step,
    mask_without_self,
    rotated_queries,
)
from rtx.attention.documents import Documents
from rtx.attention.engine import MERGES, with_sink
from rtx.attention.engine.combine import Partial, combine
from rtx.attention.engine.softmax import RelativeTables, soft_attend
from rtx.attention.grouped import expanded
from rtx.attention.members import lists_of_places, normalise_twice
from rtx.attention.once import made_once
from rtx.attention.pairs import window_pairs
from rtx.attention.pattern import Pattern, Prepared
from rtx.attention.precision import wide_type
from rtx.attention.reads import (
    MemberLists,
    QueriesKeys,
    RangeReads,
    Reads,
    first_rows,
    members_around,
    members_read,
    within_documents,
)


def last_members(query_CN: Tensor, key_CN: Tensor, window: int) -> Tensor:
    """Return the mask `[C, N, N]`: a query reads the last `window` keys of each of its clusters.

    Args:
        query_CN: whether the query at each position is a member of each cluster.
        key_CN: whether the key at each position is a member of each cluster.
    """
    C, N = query_CN.shape
    mask_CNN = torch.zeros(C, N, N, dtype=torch.bool, device=query_CN.device)
    for c in range(C):
        queries = query_CN[c].nonzero().flatten().tolist()
        keys = key_CN[c].nonzero().flatten().tolist()
        for i in queries:
            past = [j for j in keys if j <= i]
            last = past[-window:]
            mask_CNN[c, i, last] = True
    return mask_CNN


def members_near(query_CN: Tensor, key_CN: Tensor, window: int) -> Tensor:
    """Return the mask `[C, Q, K]`: a query reads the `window` keys of its clusters around it.

    Half of them are before its position; those that are missing on one side are on the other.

    Args:
        query_CN: whether each of Q queries is a member of each cluster.
        key_CN: whether each of K keys is a member of each cluster.
    """
    C, Q = query_CN.shape
    mask_CQK = torch.zeros(C, Q, key_CN.shape[1], dtype=torch.bool, device=query_CN.device)
    for c in range(C):
        keys = key_CN[c].nonzero().flatten().tolist()
        for i in query_CN[c].nonzero().flatten().tolist():
            before = len([j for j in keys if j < i])
            last_start = max(0, len(keys) - window)
            start = min(max(0, before - window // 2), last_start)
            mask_CQK[c, i, keys[start : start + window]] = True
    return mask_CQK


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
        if k_BHND is None:
            return Prepared(wide_q_BHND, wide_q_BHND, narrow_q_BHND, narrow_q_BHND)
        wide_k_BHND, narrow_k_BHND = normalise_twice(k_BHND, self.backend)
        return Prepared(wide_q_BHND, wide_k_BHND, narrow_q_BHND, narrow_k_BHND)

    @abstractmethod
    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        """Return the members of all clusters.

        If queries and keys have separate memberships, the result has two items: the members as
        queries, and the members as keys. Otherwise it has one.
        """

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        lists = self.lists(qk)
        # If there is one item, `queries` and `keys` are the same object.
        queries = lists[0]
        keys = lists[-1]
        return [self.read_of_lists(queries, keys, qk)]

    def read_of_lists(self, queries: MemberLists, keys: MemberLists, qk: QueriesKeys) -> RangeReads:
        """Return which members read which, as packed lists."""
        N = qk.q_BHND.shape[2]
        if not self.causal:
            return members_around(queries, keys, N, self.window, self.attend_self)
        part = members_read(queries, keys, N, self.window, self.attend_self)
        return bounded(part, qk)

    def read_by_rule(self, query_CN: Tensor, key_CN: Tensor) -> Tensor:
        """Return the mask of what members read, `[C, N, N]`, bool."""
        if not self.causal:
            return members_near(query_CN, key_CN, self.window)
        return last_members(query_CN, key_CN, self.window)

    def pairs_of_cluster(self, members: float) -> float:
        """Return the number of pairs that are read in a cluster with this number of members."""
        if self.causal:
            return window_pairs(members, self.window)
        return members * min(members, self.window)

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
            parts: see `Cache.prefill`.
        """
        return self.lists(qk)[-1]

    @abstractmethod
    def clusters_of_next(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> Joins:
        """Return which clusters the query and the key at the next position of each stream join."""


def bounded(part: RangeReads, qk: QueriesKeys) -> RangeReads:
    """Return ranges within the documents of `qk`; the ranges themselves if it has none."""
    if qk.documents is None:
        return part
    heads = qk.q_BHND.shape[1]
    return within_documents(part, qk.documents.first_rows(heads))


def random_positions(heads: int, clusters: int, length: int, window: int, seed: int) -> Tensor:
    """Return `window` random positions below `length` for each cluster, ascending, `[H, C, W]`.

    They depend on the arguments alone. If the window exceeds `length`, they are all positions.
    """
    generator = torch.Generator().manual_seed(seed)
    window = min(window, length)
    drawn = [torch.zeros(0, window, dtype=torch.int64, device="cpu")]
    for _ in range(heads * clusters):
        # One draw for each cluster: members do not depend on the number of clusters after it.
        draw_N = torch.rand(length, generator=generator, device="cpu")
        position_W = draw_N.topk(window).indices
        drawn.append(position_W.sort().values[None])
    return torch.cat(drawn).view(heads, clusters, window)


class Random(ClusterPattern):
    """Clusters of random members, which ignore the contents of sequences: the control of Table 1.

    Each cluster has `window` random members among `length` positions, which depend on (seed, head,
    `clusters`, `window`, `length`) alone. Longer sequences repeat them every `length` positions.
    The paper says only that the indices of keys (Kidx) are chosen at random. One draw for all
    sequences is our choice.

    Args:
        heads: H.
        clusters: C.
        length: the number of positions among which members are drawn.
        seed: the seed of the draw.
        options: see `ClusterPattern`.
    """

    bounds_documents = True
    takes_both_sides = True

    def __init__(
        self,
        heads: int,
        clusters: int,
        *,
        length: int,
        seed: int,
        has_keys: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(has_keys=has_keys, **options)
        check_positive(0, heads=heads)
        check_positive(clusters=clusters, length=length)
        check_seed(seed)
        self.heads = heads
        self.clusters = clusters
        self.length = length
        self.seed = seed
        position_HCW = random_positions(heads, clusters, length, self.window, seed)
        self.register_buffer("position_HCW", position_HCW, persistent=False)
        self.position_HCW: Tensor

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        N = qk.q_BHND.shape[2]
        position_N = torch.arange(N, device=self.position_HCW.device)
        clusters = []
        for drawn_W in self.position_HCW[head]:
            is_member_N = torch.isin(position_N % self.length, drawn_W)
            clusters.append(is_member_N)
        member_CN = torch.stack(clusters)
        return self.read_by_rule(member_CN, member_CN)

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        """Return the lists, which depend on shapes and options alone, or also on documents.

        They are made once for each shape, or once for each batch with documents.
        """
        B, H, N, _ = qk.q_BHND.shape
        options = (
            self.clusters,
            self.length,
            self.seed,
            self.window,
            self.attend_self,
            self.causal,
        )
        form = (type(self), options, B, H, N)
        if qk.documents is not None:
            return qk.documents.made_once(form, partial(super().reads, qk, streaming))
        make = partial(self.make_reads, B, H, N)
        device = qk.q_BHND.device
        return [*made_once(form, device, make)]

    def make_reads(self, B: int, H: int, N: int, device: torch.device) -> list[RangeReads]:
        """Return the result of `reads` for B sequences of N positions without documents."""
        members = self.members(B, H, N, device)
        if not self.causal:
            return [members_around(members, members, N, self.window, self.attend_self)]
        return [members_read(members, members, N, self.window, self.attend_self)]

    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        B, H, N, _ = qk.q_BHND.shape
        if qk.documents is not None:
            return [self.members_of_documents(qk.documents)]
        return [self.members(B, H, N, qk.q_BHND.device)]

    def members_of_documents(self, documents: Documents) -> MemberLists:
        """Return the members of every cluster by their positions in documents."""
        N = documents.first_BN.shape[1]
        drawn_HCW = self.position_HCW.to(documents.first_BN.device)
        H, C, _ = drawn_HCW.shape
        is_drawn_HCN = torch.zeros(H, C, self.length, dtype=torch.bool, device=drawn_HCW.device)
        is_drawn_HCN.scatter_(-1, drawn_HCW, True)
        drawn_position_BN = documents.position_BN % self.length
        is_member_BHCN = is_drawn_HCN[..., drawn_position_BN].permute(2, 0, 1, 3)
        place_M = is_member_BHCN.flatten().nonzero()[:, 0]
        return lists_of_places(place_M, is_member_BHCN.shape[:2].numel(), C, N)

    def members(self, B: int, H: int, N: int, device: torch.device) -> MemberLists:
        """Return the members of every cluster in B sequences of N positions."""
        # Drawn again: if `position_HCW` is on a GPU, the CPU would have to wait for a copy.
        drawn_HCW = random_positions(H, self.clusters, self.length, self.window, self.seed)
        drawn_HC1W = drawn_HCW.to(device)[:, :, None]
        # Longer sequences repeat the drawn positions.
        repeats = math.ceil(N / self.length)
        repeat_J1 = torch.arange(repeats, device=device)[:, None]
        position_HCJW = repeat_J1 * self.length + drawn_HC1W
        position_HCM = position_HCJW.flatten(2)
        row_BHCM = first_rows(B, H, N, device) + position_HCM
        is_inside_HCM = position_HCM < N
        is_inside_BHCM = is_inside_HCM.expand(row_BHCM.shape)
        count_BHC = is_inside_BHCM.sum(-1)
        return MemberLists(row_BHCM[is_inside_BHCM], count_BHC.flatten())

    def pairs_of_head(self, length: int) -> float:
        return self.clusters * self.pairs_of_cluster(min(self.window, length))

    def clusters_of_next(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> Joins:
        B = len(qk.q_BHND)
        is_drawn_HCW = self.position_HCW == position % self.length
        joins_HC = is_drawn_HCW.any(-1)
        joins_BHC = joins_HC.expand(B, *joins_HC.shape)
        return Joins(query_BHC=joins_BHC, key_BHC=joins_BHC)


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
        list_M = lists.list_M()
        number_M = torch.arange(len(list_M), device=list_M.device)
        rank_M = number_M - lists.first_L()[list_M]
        # The number of members of the list from this one on.
        from_here_M = lists.count_L[list_M] - rank_M
        remains_M = from_here_M <= self.slots
        list_J = list_M[remains_M]
        row_J = lists.row_M[remains_M]
        slot_J = rank_M[remains_M] % self.slots
        k_BHND = qk.rotated_k_BHND.to(v_BHND.dtype)
        clusters = len(lists.count_L) // (B * H)
        self.allocate(k_BHND, v_BHND, clusters)
        self.write((list_J, slot_J), k_BHND, v_BHND, row_J, row_J % N)
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
        list_J = joins_BHC.flatten().nonzero().flatten()
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
        list_J = is_read_L.nonzero().flatten()
        shape_BHQ = q_BHQD.shape[:3]
        if not len(list_J):
            return as_heads(v_BH1D.new_zeros(*shape_BHQ, v_BH1D.shape[-1]))
        partials = [self.attend_lists(q_BHQD, list_J, position)]
        sink_HQ = self.sinks()
        if sink_HQ is not None and self.pattern.merge == "lse":
            partials.append(sinks_alone(sink_HQ, partials[0], len(q_BHQD)))
        out_RD = combine(partials, rows=shape_BHQ.numel())
        return as_heads(out_RD.to(v_BH1D.dtype).view(*shape_BHQ, -1))

    def sinks(self) -> Tensor | None:
        """Return the sink of each query of the newest position, `[H, Q]`; None: there are none."""
        sink_IH = self.pattern.sinks()
        if sink_IH is None:
            return None
        return sink_IH.T

    def attend_lists(self, q_BHQD: Tensor, list_J: Tensor, position: int) -> Partial:
        """Return the outputs of the newest position in each of J lists; `combine` merges them.

        With merge="mean" the log-sums are zero, so that all lists of a row have equal weight, and
        every list has the sink. With "lse" the caller adds the sink, once for all lists of a row.

        Args:
            q_BHQD: the queries of the position; those of one head read the same keys.
        """
        H = q_BHQD.shape[1]
        Q = q_BHQD.shape[2]
        head_J = list_J // self.clusters
        query_Q = torch.arange(Q, device=list_J.device)
        row_JQ = head_J[:, None] * Q + query_Q
        q_JQD = q_BHQD.flatten(0, 1)[head_J]
        out_JQD, sum_JQ = self.softmaxes(q_JQD, list_J, head_J % H, position)
        partial = Partial(row_JQ.flatten(), out_JQD.flatten(0, 1), sum_JQ.flatten())
        if self.pattern.merge == "lse":
            return partial
        sink_HQ = self.sinks()
        if sink_HQ is not None:
            return with_sink(partial, sink_HQ[head_J % H].flatten())
        return partial._replace(sum_S=torch.zeros_like(partial.sum_S))

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
        mask_J1S = self.slots_read(position_JS, list_J, position)[:, None]
        terms = self.pattern.terms(D, self.relative)
        needs_sums = self.pattern.merge == "lse" or terms.sink_IH is not None
        if needs_sums or terms.by_distance:
            distance_J1S = (position - position_JS)[:, None]
            distance_JQS = distance_J1S.expand(-1, Q, -1)
            return soft_attend(q_JQD, k_JSD, v_JSD, mask_J1S, distance_JQS, head_J, terms)
        out_J1QD = attend_step(
            q_JQD[:, None],
            k_JSD[:, None],
            v_JSD[:, None],
            mask_J1S[:, None],
            None,
            terms,
        )
        no_sum_JQ = q_JQD.new_zeros(J, Q, dtype=wide_type(q_JQD.dtype))
        return out_J1QD[:, 0], no_sum_JQ

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
    row_R = torch.arange(len(sink_R), device=sink_R.device)
    no_value_RD = partial.out_SD.new_zeros(len(sink_R), partial.out_SD.shape[1])
    return Partial(row_R, no_value_RD, sink_R.to(partial.sum_S.dtype))
