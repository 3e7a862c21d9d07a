"""KV caches: what a stream keeps of earlier positions, so that a step costs the same at every position.

A prompt is taken in by one pass over all of its positions (`prefill`), then follows one position at a time (`decode`).
The caches of patterns with a window are bounded; those of patterns that may read any earlier position grow.

Shapes: B streams, H heads, C clusters, N positions, S slots, D head size, K keys read, L = B * H * C lists, J lists
joined at a position (over all streams).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.packed import Packed
from rtx.attention.softmax import Relative, Terms, soft_attend

if TYPE_CHECKING:
    from rtx.attention.choices import Choice
    from rtx.attention.pattern import Inputs, Pattern, PositionPattern, Spread

FIRST_SLOTS = 256
"""Slots that a growing cache begins with; it doubles when they are full."""


class Cache:
    """What a stream of heads of one kind keeps."""

    def prefill(self, given: Inputs, v_BHND: Tensor) -> None:
        """Take in positions 0 to N - 1 of each stream, before any step: what N steps would leave, in one pass.

        The outputs of these positions are those of the pattern's forward pass with `prefix`.
        """
        raise NotImplementedError

    def decode(self, given: Inputs, v_BH1D: Tensor, position: int) -> Tensor:
        """Take in the next position of each stream and return its output `[B, H, 1, D]`."""
        raise NotImplementedError


def attend_step(
    q_BH1D: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    mask_BH1K: Tensor | None,
    distance_BH1K: Tensor | None,
    terms: Terms,
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


class GrowingCache(Cache):
    """Every key and value so far, position n in slot n; for patterns that may read any of them."""

    def __init__(self, pattern: Choice, relative: Relative | None = None) -> None:
        self.pattern, self.relative = pattern, relative
        self.key_BHSD: Tensor | None = None
        self.value_BHSD: Tensor | None = None
        self.choice_BHSE: Tensor | None = None
        """What the choice of keys reads of each earlier position."""

    def prefill(self, given: Inputs, v_BHND: Tensor) -> None:
        self.put(given, v_BHND, 0)

    def put(self, given: Inputs, v_BHND: Tensor, first: int) -> None:
        """Take in the keys and values of positions from `first` on."""
        self.key_BHSD = place(self.key_BHSD, given.turned_k_BHND.to(v_BHND.dtype), first)
        self.value_BHSD = place(self.value_BHSD, v_BHND, first)
        self.choice_BHSE = place(self.choice_BHSE, self.pattern.choice_keys(given), first)

    def choose(self, given: Inputs, position: int) -> Tensor:
        """Return the slots that the newest position reads, `[B, H, K]`, -1 for none."""
        assert self.choice_BHSE is not None
        position_1 = torch.tensor([position], device=given.q_BHND.device)
        earlier_BHSE = self.choice_BHSE[:, :, : position + 1]
        return self.pattern.best(self.pattern.choice_queries(given), earlier_BHSE, position_1)[:, :, 0]

    def decode(self, given: Inputs, v_BH1D: Tensor, position: int) -> Tensor:
        self.put(given, v_BH1D, position)
        assert self.key_BHSD is not None and self.value_BHSD is not None
        slot_BHK = self.choose(given, position)
        at_BHK1 = slot_BHK.clamp(min=0)[..., None]
        return attend_step(
            given.turned_q_BHND.to(v_BH1D.dtype),
            self.key_BHSD.take_along_dim(at_BHK1, 2),
            self.value_BHSD.take_along_dim(at_BHK1, 2),
            (slot_BHK >= 0)[:, :, None],
            (position - slot_BHK)[:, :, None],
            self.pattern.terms(given.q_BHND.shape[-1], self.relative),
        )


def place(x_BHSD: Tensor | None, new_BHND: Tensor, first: int) -> Tensor:
    """Return the slots with new vectors from slot `first` on, in more room where it is needed."""
    B, H, N, D = new_BHND.shape
    if x_BHSD is None:
        x_BHSD = new_BHND.new_zeros(B, H, max(FIRST_SLOTS, N), D)
    if first + N > x_BHSD.shape[2]:
        x_BHSD = F.pad(x_BHSD, (0, 0, 0, max(first + N - x_BHSD.shape[2], x_BHSD.shape[2])))
    x_BHSD[:, :, first : first + N] = new_BHND
    return x_BHSD


class PositionCache(Cache):
    """The cache of a pattern that chooses by position: its last `keeps` positions, or all where it keeps all."""

    def __init__(self, pattern: PositionPattern, relative: Relative | None = None) -> None:
        self.pattern, self.relative, self.ring = pattern, relative, pattern.keeps
        self.key_BHSD: Tensor | None = None
        self.value_BHSD: Tensor | None = None
        self.position_S = torch.zeros(0, dtype=torch.int64)
        self.list_XHS = torch.zeros(0, dtype=torch.int64)
        """The list of every slot's key in each of the pattern's spreads."""

    def prefill(self, given: Inputs, v_BHND: Tensor) -> None:
        N = v_BHND.shape[2]
        first = 0 if self.ring is None else max(0, N - self.ring)
        k_BHND = given.turned_k_BHND.to(v_BHND.dtype)
        if N:
            self.put(k_BHND[:, :, first:], v_BHND[:, :, first:], first)

    def put(self, k_BHND: Tensor, v_BHND: Tensor, first: int) -> list[Spread]:
        """Take in keys and values of positions from `first` on, and return the spreads of these positions."""
        H, N = k_BHND.shape[1:3]
        position_N = torch.arange(first, first + N, device=k_BHND.device)
        spreads = self.pattern.spreads(position_N, H)
        list_XHN = torch.stack([spread.key_list_HN.expand(H, N) for spread in spreads])
        slots = self.ring or max(first + N, len(self.position_S))
        if self.key_BHSD is None or self.value_BHSD is None or slots > len(self.position_S):
            self.make_room(k_BHND, v_BHND, slots, len(spreads))
        assert self.key_BHSD is not None and self.value_BHSD is not None
        slot_N = position_N % len(self.position_S)
        self.key_BHSD[:, :, slot_N], self.value_BHSD[:, :, slot_N] = k_BHND, v_BHND
        self.position_S[slot_N], self.list_XHS[:, :, slot_N] = position_N, list_XHN
        return spreads

    def make_room(self, k_BHND: Tensor, v_BHND: Tensor, slots: int, spreads: int) -> None:
        """Have slots for all streams, at least twice as many as before; empty ones have position -1."""
        before = len(self.position_S)
        slots = slots if self.ring else max(slots, 2 * before, FIRST_SLOTS)
        more, device = slots - before, k_BHND.device
        B, H, _, D = k_BHND.shape
        if self.key_BHSD is None or self.value_BHSD is None:
            self.key_BHSD, self.value_BHSD = k_BHND.new_zeros(B, H, 0, D), v_BHND.new_zeros(B, H, 0, v_BHND.shape[-1])
            self.list_XHS = torch.zeros(spreads, H, 0, dtype=torch.int64, device=device)
            self.position_S = self.position_S.to(device)
        self.key_BHSD, self.value_BHSD = (F.pad(x, (0, 0, 0, more)) for x in (self.key_BHSD, self.value_BHSD))
        self.list_XHS = F.pad(self.list_XHS, (0, more), value=-1)
        self.position_S = F.pad(self.position_S, (0, more), value=-1)

    def decode(self, given: Inputs, v_BH1D: Tensor, position: int) -> Tensor:
        spreads = self.put(given.turned_k_BHND.to(v_BH1D.dtype), v_BH1D, position)
        assert self.key_BHSD is not None and self.value_BHSD is not None
        k_BHKD, v_BHKD, at_K = self.key_BHSD, self.value_BHSD, self.position_S
        mask_1H1K = self.seen(spreads)[None, :, None]
        if self.ring is None:  # most of what is kept is not read: gather what is
            count_H = mask_1H1K.sum(-1)
            if bool((count_H == count_H[0, 0]).all()):
                slot_HK = mask_1H1K[0, :, 0].nonzero()[:, 1].view(mask_1H1K.shape[1], -1)
                k_BHKD, v_BHKD = (x.take_along_dim(slot_HK[None, :, :, None], 2) for x in (k_BHKD, v_BHKD))
                at_K = at_K[slot_HK]
                mask_1H1K = None
        distance = position - at_K
        distance_1H1K = distance[None, None, None] if distance.dim() == 1 else distance[None, :, None]
        terms = self.pattern.terms(given.q_BHND.shape[-1], self.relative)
        q_BH1D = given.turned_q_BHND.to(v_BH1D.dtype)
        return attend_step(q_BH1D, k_BHKD, v_BHKD, mask_1H1K, distance_1H1K, terms)

    def seen(self, spreads: list[Spread]) -> Tensor:
        """Return which slots the newest position reads, `[H, S]`."""
        seen_HS = torch.zeros_like(self.list_XHS[0], dtype=torch.bool)
        for spread, list_HS in zip(spreads, self.list_XHS, strict=True):
            between_S = (self.position_S >= spread.since_N.clamp(min=0)) & (self.position_S < spread.until_N)
            seen_HS |= (list_HS == spread.list_HN) & between_S
        return seen_HS


class ClusterCache(Cache):
    """The last `slots` members of every cluster, or those that the pattern puts into slots of its choice.

    The pattern's `join(given, position)` returns the clusters that a step's query and its key join, `[B, H, C]`, and
    the slots that the key takes there (None: that of the oldest member).
    """

    def __init__(self, pattern: Pattern, slots: int, relative: Relative | None = None) -> None:
        self.pattern, self.slots, self.relative = pattern, slots, relative
        self.key_LSD: Tensor | None = None

    def allocate(self, k_BHND: Tensor, v_BHND: Tensor, clusters: int) -> None:
        """Make room for all streams; empty slots have position -1."""
        B, H, _, D = k_BHND.shape
        lists, device = B * H * clusters, k_BHND.device
        self.clusters = clusters
        self.key_LSD = k_BHND.new_zeros(lists, self.slots, D)
        self.value_LSD = v_BHND.new_zeros(lists, self.slots, v_BHND.shape[-1])
        self.position_LS = torch.full((lists, self.slots), -1, device=device)
        self.joined_L = torch.zeros(lists, dtype=torch.int64, device=device)

    def fill(self, k_BHND: Tensor, v_BHND: Tensor, lists: Packed) -> None:
        """Take in the last members of each list; the next to come takes the place of the oldest."""
        B, H, N, D = k_BHND.shape
        if not B * H * N:
            return
        self.allocate(k_BHND, v_BHND, len(lists.count_L) // (B * H))
        assert self.key_LSD is not None
        list_M = lists.list_M()
        rank_M = torch.arange(len(list_M), device=list_M.device) - lists.first_L()[list_M]
        kept_M = rank_M >= lists.count_L[list_M] - self.slots
        list_J, slot_J, row_J = list_M[kept_M], rank_M[kept_M] % self.slots, lists.row_M[kept_M]
        self.key_LSD[list_J, slot_J] = k_BHND.reshape(-1, D)[row_J]
        self.value_LSD[list_J, slot_J] = v_BHND.reshape(-1, v_BHND.shape[-1])[row_J]
        self.position_LS[list_J, slot_J] = row_J % N
        self.joined_L = lists.count_L.clone()

    def prefill(self, given: Inputs, v_BHND: Tensor) -> None:
        lists: Packed = self.pattern.lists_kept(given, self)  # type: ignore[operator]
        self.fill(given.turned_k_BHND.to(v_BHND.dtype), v_BHND, lists)

    def put(self, k_BH1D: Tensor, v_BH1D: Tensor, joins_BHC: Tensor, slot_BHC: Tensor | None, position: int) -> None:
        """Put a position's key and value into the clusters that it joins."""
        if self.key_LSD is None:
            self.allocate(k_BH1D, v_BH1D, joins_BHC.shape[-1])
        assert self.key_LSD is not None
        list_J = joins_BHC.flatten().nonzero()[:, 0]
        if len(list_J):
            slot_J = self.joined_L[list_J] % self.slots if slot_BHC is None else slot_BHC.flatten()[list_J]
            row_J = list_J // self.clusters
            self.joined_L[list_J] += 1
            self.key_LSD[list_J, slot_J] = k_BH1D.flatten(0, 2)[row_J]
            self.value_LSD[list_J, slot_J] = v_BH1D.flatten(0, 2)[row_J]
            self.position_LS[list_J, slot_J] = position

    def decode(self, given: Inputs, v_BH1D: Tensor, position: int) -> Tensor:
        dtype = v_BH1D.dtype
        query_BHC, key_BHC, slot_BHC = self.pattern.join(given, position, self)  # type: ignore[operator]
        self.put(given.turned_k_BHND.to(dtype), v_BH1D, key_BHC, slot_BHC, position)
        assert self.key_LSD is not None
        list_J = (query_BHC.flatten() & (self.joined_L > 0)).nonzero()[:, 0]
        total_RD = torch.zeros_like(v_BH1D.flatten(0, 2), dtype=torch.promote_types(dtype, torch.float32))
        if not len(list_J):
            return torch.zeros_like(v_BH1D)
        row_J, at_JS = list_J // self.clusters, self.position_LS[list_J]
        terms = self.pattern.terms(given.q_BHND.shape[-1], self.relative)
        out_JD = attend_step(
            given.turned_q_BHND.to(dtype).flatten(0, 2)[row_J][:, None, None],
            self.key_LSD[list_J][:, None],
            self.value_LSD[list_J][:, None],
            self.readable(at_JS, position)[:, None, None],
            (position - at_JS)[:, None, None],
            terms,
        )[:, 0, 0]
        total_RD.index_add_(0, row_J, out_JD.to(total_RD.dtype))
        count_R1 = torch.bincount(row_J, minlength=len(total_RD)).clamp(min=1)[:, None]
        return (total_RD / count_R1).to(dtype).view_as(v_BH1D)

    def readable(self, at_JS: Tensor, position: int) -> Tensor:
        """Return which slots a position reads: all members, or all but itself where there are others."""
        filled_JS = at_JS >= 0
        if self.pattern.attend_self:
            return filled_JS
        others_JS = filled_JS & (at_JS != position)
        return others_JS | (filled_JS & ~others_JS.any(-1, keepdim=True))
