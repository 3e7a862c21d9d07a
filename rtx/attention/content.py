"""What routing heads read of queries and keys: normalised vectors, and attention inside chosen clusters.

Shapes: B sequences, H routing heads, N positions, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.backends import attend_packed
from rtx.attention.heads import Rotate, turn
from rtx.attention.lists import Members
from rtx.attention.separate import attend_lists
from rtx.attention.weights import Distances, without_padding


def normalise(q_BHND: Tensor) -> Tensor:
    """Return LayerNorm(q) without scale or bias, at least in float32 (Algorithm 1, line 7)."""
    return F.layer_norm(q_BHND.to(torch.promote_types(q_BHND.dtype, torch.float32)), q_BHND.shape[-1:], eps=1e-6)


class Content(NamedTuple):
    """What a sequence offers to routing heads."""

    q_BHND: Tensor
    """Normalised queries."""
    k_BHND: Tensor | None
    """Normalised keys; None: the queries."""
    routed_BHND: Tensor
    """What the memberships of queries are chosen by: the queries, or W_R (q + k)."""
    routed_keys_BHND: Tensor | None
    """Keys with memberships of their own; None: a position's key belongs where its query does."""

    def logits(self, rotate: Rotate | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return queries and keys as the logits use them (the same tensor where keys are shared)."""
        q_BHND = turn(self.q_BHND, rotate).to(dtype)
        if self.k_BHND is None:
            return q_BHND, q_BHND
        return q_BHND, turn(self.k_BHND, rotate).to(dtype)


def read_content(
    q_BHND: Tensor, k_BHND: Tensor | None, projection_HDD: Tensor | None = None, mask_BN: Tensor | None = None
) -> Content:
    """Return normalised queries and keys.

    Without keys the queries stand for them. With keys and `projection_HDD` (W_R) each position has one routing vector
    W_R (q + k), which is not normalised again; with keys alone, queries and keys have memberships apart.
    """
    q_BHND = normalise(without_padding(q_BHND, mask_BN))
    if k_BHND is None:
        return Content(q_BHND, None, q_BHND, None)
    k_BHND = normalise(without_padding(k_BHND, mask_BN))
    if projection_HDD is None:
        return Content(q_BHND, k_BHND, q_BHND, k_BHND)
    with torch.autocast(q_BHND.device.type, enabled=False):
        routed_BHND = (q_BHND + k_BHND) @ projection_HDD.to(q_BHND.dtype).transpose(-1, -2)
    return Content(q_BHND, k_BHND, routed_BHND, None)


def attend_content(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    queries: Members,
    keys: Members | None,
    *,
    window: int,
    scale: float,
    causal: bool = True,
    attend_self: bool = True,
    dropout: float = 0.0,
    relative: Distances | None = None,
    slot_distance: bool = False,
    backend: str = "torch",
) -> Tensor:
    """Return attention inside the clusters; `keys` is None where the members' keys are what they read."""
    options = {
        "window": window,
        "scale": scale,
        "attend_self": attend_self,
        "dropout": dropout,
        "relative": relative,
        "slot_distance": slot_distance,
    }
    if causal and keys is None:
        return attend_packed(backend)(q_BHND, k_BHND, v_BHND, queries, **options)
    return attend_lists(q_BHND, k_BHND, v_BHND, queries, queries if keys is None else keys, causal=causal, **options)
