"""KV caches: what a stream keeps of earlier positions, so that a step costs the same at every position.

A prompt is taken in by one pass over all of its positions (`prefill`), then follows one position at a time (`decode`).
The caches of patterns with a window are bounded; those of patterns that may read any earlier position grow.

Shapes: B streams, H heads, C clusters, N positions, S slots, D head size, K keys read, L = B * H * C lists, J lists
joined at a position (over all streams).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.engine.combine import Partial, combine
from rtx.attention.engine.softmax import LogitTerms, RelativeTables, soft_attend

if TYPE_CHECKING:
    from rtx.attention.members import PrefixTopK
    from rtx.attention.pattern import ClusterPattern, Pattern, PositionPattern
    from rtx.attention.reads import QueriesKeys

FIRST_SLOTS = 256
"""Slots that a growing cache begins with; it doubles when they are full."""


class Cache(ABC):
    """What a stream of heads of one kind keeps."""

    @abstractmethod
    def prefill(self, qk: QueriesKeys, v_BHND: Tensor) -> None:
        """Take in positions 0 to N - 1 of each stream, before any step: what N steps would leave, in one pass.

        The outputs of these positions are those of the pattern's forward pass with `streaming`.
        """

    @abstractmethod
    def decode(self, qk: QueriesKeys, v_BH1D: Tensor, position: int) -> Tensor:
        """Take in the next position of each stream and return its output `[B, H, 1, D]`."""


def attend_step(
    q_BH1D: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    mask_BH1K: Tensor | None,
    distance_BH1K: Tensor | None,
    terms: LogitTerms,
) -> Tensor:
    """Return softmax attention of one query a head, `[B, H, 1, D]`; mask and distances broadcast over B and H."""
    if not terms.by_distance:
        return F.scaled_dot_product_attention(q_BH1D, k_BHKD, v_BHKD, attn_mask=mask_BH1K, scale=terms.scale)
    assert distance_BH1K is not None
    B, H, K, _ = k_BHKD.shape
    if mask_BH1K is None:
        mask_BH1K = torch.ones(1, 1, 1, K, dtype=torch.bool, device=k_BHKD.device)
    q, k, v = (x.flatten(0, 1) for x in (q_BH1D, k_BHKD, v_BHKD))
    mask, distance = (x.expand(B, H, 1, K).flatten(0, 1) for x in (mask_BH1K, distance_BH1K))
    head_G = torch.arange(H, device=q.device).repeat(B)
    return soft_attend(q, k, v, mask, distance, head_G, terms)[0].to(v.dtype).unflatten(0, (B, H))


class RowCache(Cache):
    """Keys and values by position: position n in slot n modulo their number, which doubles unless it is `ring`."""

    def __init__(self, pattern: Pattern, relative: RelativeTables | None = None, ring: int | None = None) -> None:
        self.pattern, self.relative, self.ring = pattern, relative, ring
        self.key_BHSD: Tensor | None = None
        self.value_BHSD: Tensor | None = None

    def prefill(self, qk: QueriesKeys, v_BHND: Tensor) -> None:
        self.put(qk, v_BHND, 0)

    def put(self, qk: QueriesKeys, v_BHND: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Take in positions from `first` on and return all slots of keys and values."""
        self.key_BHSD = place(self.key_BHSD, qk.rotated_k_BHND.to(v_BHND.dtype), first, self.ring)
        self.value_BHSD = place(self.value_BHSD, v_BHND, first, self.ring)
        return self.key_BHSD, self.value_BHSD

    def attend(self, qk: QueriesKeys, k: Tensor, v: Tensor, mask: Tensor | None, distance: Tensor) -> Tensor:
        """Return what the newest position reads of keys and values `[B, H, K, D]`."""
        terms = self.pattern.terms(qk.q_BHND.shape[-1], self.relative)
        return attend_step(qk.rotated_q_BHND.to(v.dtype), k, v, mask, distance, terms)


def place(x_BHSD: Tensor | None, new_BHND: Tensor, first: int, ring: int | None = None) -> Tensor:
    """Return the slots with new vectors of positions from `first` on, in more room where it is needed."""
    B, H, N, D = new_BHND.shape
    if x_BHSD is None:
        x_BHSD = new_BHND.new_zeros(B, H, ring or max(FIRST_SLOTS, N), D)
    if not ring and first + N > x_BHSD.shape[2]:
        x_BHSD = F.pad(x_BHSD, (0, 0, 0, max(first + N - x_BHSD.shape[2], x_BHSD.shape[2])))
    if N == 1:
        x_BHSD[:, :, first % x_BHSD.shape[2]] = new_BHND[:, :, 0]
        return x_BHSD
    skipped = max(0, N - x_BHSD.shape[2])
    slot_N = torch.arange(first + skipped, first + N, device=x_BHSD.device) % x_BHSD.shape[2]
    return x_BHSD.index_copy_(2, slot_N, new_BHND[:, :, skipped:])


class PositionCache(RowCache):
    """The cache of a pattern that chooses by position."""

    pattern: PositionPattern

    def decode(self, qk: QueriesKeys, v_BH1D: Tensor, position: int) -> Tensor:
        k, v = self.put(qk, v_BH1D, position)
        slots, filled = k.shape[2], min(k.shape[2], position + 1)
        at_S = position - (position - torch.arange(filled, device=k.device)) % slots
        k, v = k[:, :, :filled], v[:, :, :filled]
        if self.pattern.reads_all_kept and self.pattern.attend_self:
            return self.attend(qk, k, v, None, (position - at_S)[None, None, None])
        seen_HS = self.seen(at_S, position % slots, k.shape[1])
        if self.ring is None and len(seen_HS) and bool((seen_HS.sum(-1) == seen_HS[0].sum()).all()):
            # Most of what is kept is not read: gather what is.
            slot_HK = seen_HS.nonzero()[:, 1].view(len(seen_HS), -1)
            k, v = (x.take_along_dim(slot_HK[None, :, :, None], 2) for x in (k, v))
            return self.attend(qk, k, v, None, (position - at_S[slot_HK])[None, :, None])
        return self.attend(qk, k, v, seen_HS[None, :, None], (position - at_S)[None, None, None])

    def seen(self, at_S: Tensor, own: int, heads: int) -> Tensor:
        """Return which slots the position in slot `own` reads, `[H, S]`, where they hold the positions `at_S`."""
        seen_HS = torch.zeros(heads, len(at_S), dtype=torch.bool, device=at_S.device)
        for spread in self.pattern.spreads(at_S, heads):
            between_S = (at_S >= spread.since_N[own]) & (at_S < spread.until_N[own])
            seen_HS |= (spread.key_list_HN == spread.list_HN[..., own, None]) & between_S
        return seen_HS if self.pattern.attend_self else mask_without_self(seen_HS, at_S == at_S[own])


def mask_without_self(read_XS: Tensor, own_XS: Tensor) -> Tensor:
    """Return which slots are read beside the own one; where there are none (X: any dimensions), that one."""
    others_XS = read_XS & ~own_XS
    return torch.where(others_XS.any(-1, keepdim=True), others_XS, read_XS)


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
