"""KV caches: keys and values of earlier positions, which streams keep from step to step.

A stream begins with a prompt, which `prefill` takes in one pass over all its positions. Then
`decode` takes one position at a time. The caches of patterns with a window are bounded; those of
patterns that may read any earlier position grow.

Grouped queries (`rtx.attention.grouped`): keys and values are stored for G key-value heads. H heads
choose keys, and each of them has Q queries at the newest position. Example: 8 query heads, of which
4 share each of G = 2 key-value heads.

    each query head chooses    H = 8, Q = 1: a head is a query head
    they choose together       H = 2, Q = 4: a head is a key-value head

Shapes: B streams, H heads that choose, G heads that are stored (key-value heads), N positions, S
slots, K keys that a query reads, Q queries of a head, X = Q * B or B * H, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.engine.softmax import LogitTerms, soft_attend
from rtx.attention.grouped import expanded, first_of_each
from rtx.attention.reads import QueriesKeys, Reads

FIRST_SLOTS = 256
"""The number of slots that a growing cache starts with; it doubles when they are full."""


class Cache(ABC):
    """The KV cache of a batch of streams, for the heads of one pattern."""

    @abstractmethod
    def prefill(
        self,
        qk: QueriesKeys,
        v_BGND: Tensor,
        parts: list[Reads] | None = None,
    ) -> None:
        """Store the positions 0 to N - 1 of each stream, before any step.

        The cache then has the same contents as after N calls of `decode`. The outputs of these
        positions come from the pattern's forward pass with `streaming`.

        Args:
            v_BGND: the values, for key-value heads.
            parts: the result of `Pattern.reads` with `streaming`, so that a selection need not be
                computed twice; None: not available.
        """

    @abstractmethod
    def decode(self, qk: QueriesKeys, v_BG1D: Tensor, position: int) -> Tensor:
        """Store the next position of each stream, and return its outputs `[B, H * Q, 1, D]`."""


class RowCache(Cache):
    """Keys and values of each stream by position: position n is in slot n modulo their number.

    Args:
        terms: takes the head size, and returns the terms of logits besides queries and keys.
        ring: a fixed number of slots, which later positions overwrite; None: the cache grows.
        copies: how many successive heads of `qk` have the same keys (`Pattern.key_copies`). These
            are stored once.
    """

    def __init__(
        self,
        terms: Callable[[int], LogitTerms],
        ring: int | None = None,
        copies: int = 1,
    ) -> None:
        self.terms = terms
        self.ring = ring
        self.copies = copies
        self.key_BGSD: Tensor | None = None
        self.value_BGSD: Tensor | None = None

    def prefill(
        self,
        qk: QueriesKeys,
        v_BGND: Tensor,
        parts: list[Reads] | None = None,
    ) -> None:
        self.put(qk, v_BGND, 0)

    def put(self, qk: QueriesKeys, v_BGND: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Store positions from `first` on, and return the keys and values of all slots."""
        k_BGND = first_of_each(qk.rotated_k_BHND, self.copies).to(v_BGND.dtype)
        self.key_BGSD = stored(self.key_BGSD, k_BGND, first, self.ring)
        self.value_BGSD = stored(self.value_BGSD, v_BGND, first, self.ring)
        return self.key_BGSD, self.value_BGSD

    def attend_newest(
        self,
        qk: QueriesKeys,
        k_BGKD: Tensor,
        v_BGKD: Tensor,
        mask_BH1K: Tensor | None,
        distance_BH1K: Tensor,
    ) -> Tensor:
        """Return the outputs of all query heads at the newest position, over K keys.

        `attend_step` explains the arguments.
        """
        terms = self.terms(qk.q_BHND.shape[-1])
        q_BHQD = rotated_queries(qk).to(v_BGKD.dtype)
        out_BHQD = attend_step(q_BHQD, k_BGKD, v_BGKD, mask_BH1K, distance_BH1K, terms)
        return as_heads(out_BHQD)


def unrotated_queries(qk: QueriesKeys) -> Tensor:
    """Return the queries of the newest position, before rotation, `[B, H, Q, D]`."""
    if qk.each_q_XHND is None:
        return qk.q_BHND
    return as_queries(qk.each_q_XHND, len(qk.q_BHND))


def rotated_queries(qk: QueriesKeys) -> Tensor:
    """Return the rotated queries of the newest position, `[B, H, Q, D]`."""
    if qk.rotated_each_q_XHND is None:
        return qk.rotated_q_BHND
    return as_queries(qk.rotated_each_q_XHND, len(qk.q_BHND))


def as_queries(q_XH1D: Tensor, streams: int) -> Tensor:
    """Return query heads that choose together as queries of one head, `[B, H, Q, D]`.

    Args:
        q_XH1D: the query heads as copies of the streams, see `grouped.heads_to_copies`.
        streams: B.
    """
    q_XHD = q_XH1D[:, :, 0]
    q_QBHD = q_XHD.unflatten(0, (-1, streams))
    return q_QBHD.permute(1, 2, 0, 3)


def as_heads(out_BHQD: Tensor) -> Tensor:
    """Return the outputs of all query heads, `[B, H * Q, 1, D]`."""
    if out_BHQD.shape[2] == 1:
        return out_BHQD
    out_of_heads = out_BHQD.flatten(1, 2)
    return out_of_heads[:, :, None]


def stored(x_BGSD: Tensor | None, new_BGND: Tensor, first: int, ring: int | None = None) -> Tensor:
    """Return the slots with the vectors of the positions from `first` on written into them.

    Slots are changed in place if there are enough; otherwise the result has more.

    Args:
        x_BGSD: the slots; None: none yet.
        ring: a fixed number of slots; None: at least as many as there are positions.
    """
    B, G, N, D = new_BGND.shape
    if x_BGSD is None:
        slots = ring or max(FIRST_SLOTS, N)
        x_BGSD = new_BGND.new_zeros(B, G, slots, D)
    slots = x_BGSD.shape[2]
    missing = first + N - slots
    if not ring and missing > 0:
        added = max(missing, slots)
        x_BGSD = F.pad(x_BGSD, (0, 0, 0, added))
        slots += added
    if N == 1:
        slot = first % slots
        x_BGSD[:, :, slot] = new_BGND[:, :, 0]
        return x_BGSD
    # If there are more positions than slots, only the last ones remain.
    skipped = max(0, N - slots)
    last_BGND = new_BGND[:, :, skipped:]
    position_N = torch.arange(first + skipped, first + N, device=x_BGSD.device)
    slot_N = position_N % slots
    return x_BGSD.index_copy_(2, slot_N, last_BGND)


def attend_step(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    mask_BH1K: Tensor | None,
    distance_BH1K: Tensor | None,
    terms: LogitTerms,
) -> Tensor:
    """Return softmax attention of the queries of each head, `[B, H, Q, D]`.

    All queries are at one position. If keys and values have fewer heads than queries, successive
    heads share them. Sinks are logits without a value, one for each head and query.

    Args:
        mask_BH1K: true at keys that are read, in a shape that broadcasts over B and H; None: all.
        distance_BH1K: distances of the query from the keys, which broadcast likewise; terms by
            distance need them.
    """
    if not terms.by_distance and terms.sink_IH is None:
        return F.scaled_dot_product_attention(
            q_BHQD,
            k_BGKD,
            v_BGKD,
            attn_mask=mask_BH1K,
            scale=terms.scale,
            enable_gqa=q_BHQD.shape[1] != k_BGKD.shape[1],
        )
    B, H, Q, _ = q_BHQD.shape
    _, G, K, _ = k_BGKD.shape
    queries_of_key_head = H // max(1, G)
    k_BHKD = expanded(k_BGKD, queries_of_key_head)
    v_BHKD = expanded(v_BGKD, queries_of_key_head)
    if mask_BH1K is None:
        mask_BH1K = q_BHQD.new_ones(1, 1, 1, K, dtype=torch.bool)
    distance_XQK = None
    if distance_BH1K is not None:
        distance_XQK = distance_BH1K.expand(B, H, Q, K).flatten(0, 1)
    head_H = torch.arange(H, device=q_BHQD.device)
    out_XQD, log_sum_XQ = soft_attend(
        q_BHQD.flatten(0, 1),
        k_BHKD.flatten(0, 1),
        v_BHKD.flatten(0, 1),
        mask_BH1K.expand(B, H, 1, K).flatten(0, 1),
        distance_XQK,
        head_H.repeat(B),
        terms,
    )
    if terms.sink_IH is not None:
        # With the log-sum s and the sink z, the weights become e^s / (e^s + e^z) times as large.
        sink_XQ = terms.sink_IH.T.repeat(B, 1)
        share_XQ = (log_sum_XQ - sink_XQ).sigmoid()
        out_XQD = out_XQD * share_XQ[..., None]
    return out_XQD.to(v_BGKD.dtype).unflatten(0, (B, H))


def mask_without_self(mask_XK: Tensor, is_self_XK: Tensor) -> Tensor:
    """Return the mask without the query's own key, unless that is the only one that it reads.

    X stands for any dimensions.
    """
    others_XK = mask_XK & ~is_self_XK
    return torch.where(others_XK.any(-1, keepdim=True), others_XK, mask_XK)
