"""Softmax attention inside blocks: what every pattern ends in once it has gathered its queries and keys.

Shapes: G blocks (any leading dimensions), Q queries, K keys, D head size, M distances.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Distances(NamedTuple):
    """Shaw's relative terms (Shaw et al. 2018, equations 3 and 4), by true distance i - j, clipped to M - 1."""

    keys_MD: Tensor
    values_MD: Tensor

    def clip(self, distance: Tensor) -> Tensor:
        """Return row numbers of the tables for true distances of any shape."""
        return distance.clamp(0, self.keys_MD.shape[0] - 1)


def logit_scale(scale: float | None, size: int) -> float:
    """Return `scale`, or 1 / sqrt(D) where it is None."""
    return 1 / math.sqrt(size) if scale is None else scale


def attend(
    q_GQD: Tensor,
    k_GKD: Tensor,
    v_GKD: Tensor,
    scale: float,
    *,
    mask_QK: Tensor | None = None,
    dropout: float = 0.0,
    relative: Distances | None = None,
    distance_QK: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T) v inside each block, causal by slot where no mask is given.

    `mask_QK` is true where a key may be read and broadcasts over blocks; every query must see at least one key.
    `relative` adds Shaw's terms, with true distances `distance_QK` (same broadcasting).
    """
    if relative is None:
        return F.scaled_dot_product_attention(
            q_GQD, k_GKD, v_GKD, attn_mask=mask_QK, is_causal=mask_QK is None, dropout_p=dropout, scale=scale
        )
    assert distance_QK is not None
    weights_GQK = softmax_weights(q_GQD, k_GKD, scale, mask_QK, relative, distance_QK)
    weights_GQK = F.dropout(weights_GQK, dropout, training=dropout > 0)
    rows_GQK = relative.clip(distance_QK).expand_as(weights_GQK)
    by_distance_GQM = weights_GQK.new_zeros(*weights_GQK.shape[:-1], relative.values_MD.shape[0])
    by_distance_GQM = by_distance_GQM.scatter_add(-1, rows_GQK, weights_GQK)
    return weights_GQK @ v_GKD + by_distance_GQM @ relative.values_MD.to(v_GKD.dtype)


def softmax_weights(
    q_GQD: Tensor,
    k_GKD: Tensor,
    scale: float,
    mask_QK: Tensor | None,
    relative: Distances | None = None,
    distance_QK: Tensor | None = None,
) -> Tensor:
    """Return the attention weights themselves, `[G, Q, K]`; arguments as in `attend`."""
    logits_GQK = q_GQD @ k_GKD.transpose(-1, -2)
    if relative is not None and distance_QK is not None:
        by_distance_GQM = q_GQD @ relative.keys_MD.to(q_GQD.dtype).T
        logits_GQK = logits_GQK + by_distance_GQM.gather(-1, relative.clip(distance_QK).expand_as(logits_GQK))
    if mask_QK is None:
        mask_QK = torch.ones(logits_GQK.shape[-2:], dtype=torch.bool, device=logits_GQK.device).tril()
    return (logits_GQK * scale).masked_fill(~mask_QK, float("-inf")).softmax(-1).to(k_GKD.dtype)
