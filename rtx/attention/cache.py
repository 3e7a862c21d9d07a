"""KV caches: what a stream keeps of earlier positions, so that a step costs the same at every position.

A prompt is taken in by one pass over all of its positions (`prefill`), then follows one position at a time (`decode`).
The caches of patterns with a window are bounded; those of patterns that may read any earlier position grow.

Shapes: B streams, H heads, C clusters, N positions, S slots, D head size, K keys read, L = B * H * C lists, J lists
joined at a position (over all streams).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.engine.softmax import LogitTerms, soft_attend
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

    def __init__(self, terms: Callable[[int], LogitTerms], ring: int | None = None) -> None:
        self.terms = terms
        self.ring = ring
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
        terms = self.terms(qk.q_BHND.shape[-1])
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


def mask_without_self(read_XS: Tensor, own_XS: Tensor) -> Tensor:
    """Return which slots are read beside the own one; where there are none (X: any dimensions), that one."""
    others_XS = read_XS & ~own_XS
    return torch.where(others_XS.any(-1, keepdim=True), others_XS, read_XS)
