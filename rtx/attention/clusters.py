"""Heads of clusters, by whatever rule a position joins clusters; and clusters whose members are drawn at random.

Shapes: B sequences or streams, H heads, C clusters, N positions, D head size, W attention window, S slots,
L = B * H * C lists, J lists joined at a position (over all streams).
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rtx.attention.arguments import check_choice, check_positive, check_seed
from rtx.attention.cache import Cache, attend_step, mask_without_self
from rtx.attention.engine import MERGES
from rtx.attention.engine.combine import Partial, combine
from rtx.attention.engine.softmax import RelativeTables, soft_attend
from rtx.attention.members import PrefixTopK, normalise_twice
from rtx.attention.once import made_once
from rtx.attention.pattern import Pattern, Prepared
from rtx.attention.reads import MemberLists, QueriesKeys, RangeReads, Reads, members_read


def last_members(query_CN: Tensor, key_CN: Tensor, window: int) -> Tensor:
    """Each query of a cluster reads its last `window` keys up to itself."""
    C, N = query_CN.shape
    mask_CNN = torch.zeros(C, N, N, dtype=torch.bool, device=query_CN.device)
    for c in range(C):
        for i in query_CN[c].nonzero()[:, 0].tolist():
            mask_CNN[c, i, [j for j in key_CN[c].nonzero()[:, 0].tolist() if j <= i][-window:]] = True
    return mask_CNN


class ClusterPattern(Pattern):
    """Heads of clusters: each position reads, in every cluster that it is a member of, the last W members up to itself.

    Queries and keys are normalised (LayerNorm without scale or bias), but for hashing.

    Args:
        has_keys: whether keys are given, else the queries stand for them.
        window: W.
        attend_self: false: a position reads itself only where it sees nothing else; None: so where queries stand for
            keys, as a vector is nearest to itself.
        merge: "mean": a position in several clusters gets the mean of their outputs (the paper's
            released code divides by their number + 0.01). "lse": one softmax over the keys of all.
    """

    def __init__(
        self, *, has_keys: bool, window: int, attend_self: bool | None = None, merge: str = "mean", **options: Any
    ) -> None:
        super().__init__(attend_self=has_keys if attend_self is None else attend_self, **options)
        check_positive(window=window)
        check_choice("merge", merge, MERGES)
        self.has_keys, self.window, self.merge = has_keys, window, merge

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        q_BHND, narrow_q_BHND = normalise_twice(q_BHND, self.backend)
        if k_BHND is None:
            return Prepared(q_BHND, q_BHND, narrow_q_BHND, narrow_q_BHND)
        k_BHND, narrow_k_BHND = normalise_twice(k_BHND, self.backend)
        return Prepared(q_BHND, k_BHND, narrow_q_BHND, narrow_k_BHND)

    @abstractmethod
    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        """Return the members of every cluster, or those of queries and of keys."""

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        lists, N = self.lists(qk), qk.q_BHND.shape[2]
        return [members_read(lists[0], lists[-1], N, self.window, self.attend_self)]

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return ClusterCache(self, self.window, relative)

    def lists_kept(self, qk: QueriesKeys, cache: ClusterCache) -> MemberLists:
        """Return the members that a prompt leaves in a stream's cache."""
        return self.lists(qk)[-1]

    @abstractmethod
    def join(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return which clusters the next query and key of a stream join, `[B, H, C]`.

        And the slots that the key takes there; None: those of the oldest members.
        """


class Random(ClusterPattern):
    """The control of Table 1: clusters whose members are drawn, whatever the sequence holds.

    The paper says no more than that Kidx is chosen at random. One draw, which is kept, is ours.

    Each cluster has `window` random members among `length` positions, a function of (seed, head, `clusters`, `window`,
    `length`) alone. Later positions go on with the same members over and over. Other options: see `ClusterPattern`.
    """

    def __init__(
        self, heads: int, clusters: int, *, length: int, seed: int, has_keys: bool = False, **options: Any
    ) -> None:
        super().__init__(has_keys=has_keys, **options)
        check_positive(0, heads=heads)
        check_positive(clusters=clusters, length=length)
        check_seed(seed)
        self.heads, self.clusters, self.length, self.seed = heads, clusters, length, seed
        position_HCW = random_positions(heads, clusters, length, self.window, seed)
        self.register_buffer("position_HCW", position_HCW, persistent=False)
        self.position_HCW: Tensor

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        B, H, N, _ = qk.q_BHND.shape
        form = type(self), self.clusters, self.length, self.seed, self.window, self.attend_self, B, H, N
        return [*made_once(form, qk.q_BHND.device, partial(self.make_reads, B, H, N))]

    def make_reads(self, B: int, H: int, N: int, device: torch.device) -> list[RangeReads]:
        """Return who reads whom in B sequences of N positions."""
        lists = self.members(B, H, N, device)
        return [members_read(lists, lists, N, self.window, self.attend_self)]

    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        B, H, N, _ = qk.q_BHND.shape
        return [self.members(B, H, N, qk.q_BHND.device)]

    def members(self, B: int, H: int, N: int, device: torch.device) -> MemberLists:
        """Return the members of every cluster."""
        turn_T1 = torch.arange(-(-N // self.length), device=device)[:, None]
        drawn_HCW = random_positions(H, self.clusters, self.length, self.window, self.seed).to(device)
        position_HCT = (turn_T1 * self.length + drawn_HCW[:, :, None]).flatten(2)
        inside_BHCT = (position_HCT < N).expand(B, *position_HCT.shape)
        first_BH = torch.arange(B * H, device=device).view(B, H) * N
        row_BHCT = first_BH[..., None, None] + position_HCT
        return MemberLists(row_BHCT[inside_BHCT], inside_BHCT.sum(-1).flatten())

    def member_HCN(self, length: int) -> Tensor:
        """Return the memberships of positions 0 to `length` - 1."""
        member_HCN = self.position_HCW.new_zeros(*self.position_HCW.shape[:2], self.length, dtype=torch.bool)
        member_HCN.scatter_(2, self.position_HCW, True)
        return member_HCN.repeat(1, 1, -(-length // self.length))[..., :length]

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        member_CN = self.member_HCN(qk.q_BHND.shape[2])[head]
        return last_members(member_CN, member_CN, self.window)

    def join(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> tuple[Tensor, Tensor, None]:
        joins_HC = (self.position_HCW == position % self.length).any(-1)
        joins_BHC = joins_HC.expand(len(qk.q_BHND), *joins_HC.shape)
        return joins_BHC, joins_BHC, None


def random_positions(heads: int, clusters: int, length: int, window: int, seed: int) -> Tensor:
    """Return `window` random positions for each cluster, ascending, `[H, C, W]`: a function of the arguments alone.

    A window over `length` is `length`.
    """
    generator = torch.Generator().manual_seed(seed)
    window = min(window, length)
    # One draw a cluster, however many there are.
    draws = [torch.rand(length, generator=generator, device="cpu") for _ in range(heads * clusters)]
    chosen = [draw_N.topk(window).indices.sort().values for draw_N in draws]
    return torch.stack(chosen).view(heads, clusters, window) if chosen else torch.zeros(heads, clusters, window).long()


class ClusterCache(Cache):
    """The last `slots` members of every cluster, or those that `ClusterPattern.join` puts into slots of its choice."""

    def __init__(self, pattern: ClusterPattern, slots: int, relative: RelativeTables | None = None) -> None:
        self.pattern, self.slots, self.relative = pattern, slots, relative
        self.key_LSD: Tensor | None = None
        self.best: list[PrefixTopK] = []
        """With top-w those of queries, and of keys with memberships of their own."""

    def allocate(self, k_BHND: Tensor, v_BHND: Tensor, clusters: int) -> None:
        """Make room for all streams; empty slots have position -1."""
        B, H, _, D = k_BHND.shape
        lists, device = B * H * clusters, k_BHND.device
        self.clusters = clusters
        self.key_LSD = k_BHND.new_zeros(lists, self.slots, D)
        self.value_LSD = v_BHND.new_zeros(lists, self.slots, v_BHND.shape[-1])
        self.position_LS = torch.full((lists, self.slots), -1, device=device)
        self.joined_L = torch.zeros(lists, dtype=torch.int64, device=device)

    def prefill(self, qk: QueriesKeys, v_BHND: Tensor) -> None:
        """Take in the last members of each list; the next to come takes the place of the oldest."""
        B, H, N, _ = v_BHND.shape
        if not B * H * N:
            return
        lists = self.pattern.lists_kept(qk, self)
        list_M = lists.list_M()
        rank_M = torch.arange(len(list_M), device=list_M.device) - lists.first_L()[list_M]
        kept_M = rank_M >= lists.count_L[list_M] - self.slots
        list_J, row_J = list_M[kept_M], lists.row_M[kept_M]
        self.allocate(qk.rotated_k_BHND.to(v_BHND.dtype), v_BHND, len(lists.count_L) // (B * H))
        self.write(qk, v_BHND, (list_J, rank_M[kept_M] % self.slots), row_J, row_J % N)
        self.joined_L = lists.count_L.clone()

    def write(
        self, qk: QueriesKeys, v: Tensor, at: tuple[Tensor, Tensor], row_J: Tensor, position: int | Tensor
    ) -> None:
        """Write the keys and values of some rows of B * H * N into slots."""
        assert self.key_LSD is not None
        self.key_LSD[at] = qk.rotated_k_BHND.to(v.dtype).flatten(0, 2)[row_J]
        self.value_LSD[at] = v.flatten(0, 2)[row_J]
        self.position_LS[at] = position  # type: ignore[assignment]

    def put(self, qk: QueriesKeys, v_BH1D: Tensor, joins_BHC: Tensor, slot_BHC: Tensor | None, position: int) -> None:
        """Put a position's key and value into the clusters that it joins."""
        if self.key_LSD is None:
            self.allocate(qk.rotated_k_BHND.to(v_BH1D.dtype), v_BH1D, joins_BHC.shape[-1])
        list_J = joins_BHC.flatten().nonzero()[:, 0]
        slot_J = self.joined_L[list_J] % self.slots if slot_BHC is None else slot_BHC.flatten()[list_J]
        self.write(qk, v_BH1D, (list_J, slot_J), list_J // self.clusters, position)
        self.joined_L[list_J] += 1

    def decode(self, qk: QueriesKeys, v_BH1D: Tensor, position: int) -> Tensor:
        dtype = v_BH1D.dtype
        query_BHC, key_BHC, slot_BHC = self.pattern.join(qk, position, self)
        self.put(qk, v_BH1D, key_BHC, slot_BHC, position)
        assert self.key_LSD is not None
        # Where queries stand for keys there is a key in every list that a query reads: its own.
        read_L = query_BHC.flatten() if query_BHC is key_BHC else query_BHC.flatten() & (self.joined_L > 0)
        list_J = read_L.nonzero()[:, 0]
        if not len(list_J):
            return torch.zeros_like(v_BH1D)
        row_J, at_JS = list_J // self.clusters, self.position_LS[list_J]
        q_J1D = qk.rotated_q_BHND.to(dtype).flatten(0, 2)[row_J, None]
        seen_J1S = self.seen(at_JS, list_J, position)[:, None]
        read = q_J1D, self.key_LSD[list_J], self.value_LSD[list_J], seen_J1S
        terms = self.pattern.terms(qk.q_BHND.shape[-1], self.relative)
        if terms.by_distance or self.pattern.merge == "lse":
            head_J = row_J % v_BH1D.shape[1]
            out_J1D, sum_J1 = soft_attend(*read, (position - at_JS)[:, None], head_J, terms)
        else:
            q, k, v, mask = (x[:, None] for x in read)
            out_J1D = attend_step(q, k, v, mask, None, terms)[:, 0]
            sum_J1 = out_J1D[..., 0].to(torch.promote_types(dtype, torch.float32))
        if self.pattern.merge == "mean":
            sum_J1 = torch.zeros_like(sum_J1)  # all lists weigh the same
        out_RD = combine([Partial(row_J, out_J1D[:, 0], sum_J1[:, 0])], v_BH1D[..., 0].numel())
        return out_RD.to(dtype).view_as(v_BH1D)

    def seen(self, at_JS: Tensor, list_J: Tensor, position: int) -> Tensor:
        """Return which slots of some lists a position reads, which hold the positions `at_JS` (-1: none)."""
        return at_JS >= 0 if self.pattern.attend_self else mask_without_self(at_JS >= 0, at_JS == position)
