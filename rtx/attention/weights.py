"""Softmax attention inside blocks: what every pattern ends in once it has gathered its queries and keys.

Shapes: G blocks (any leading dimensions), Q queries, K keys, D head size, M distances.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.chunked import chunked
from rtx.attention.shaw import Dense, Distances, Rule


def logit_scale(scale: float | None, size: int) -> float:
    """Return `scale`, or 1 / sqrt(D) where it is None."""
    return 1 / math.sqrt(size) if scale is None else scale


def without_padding(x_BHND: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return the vectors with zeros at padding, so that what stands there reaches neither outputs nor gradients."""
    return x_BHND if mask_BN is None else x_BHND.masked_fill(~mask_BN[:, None, :, None], 0.0)


def attend(
    q_GQD: Tensor,
    k_GKD: Tensor,
    v_GKD: Tensor,
    scale: float,
    *,
    mask_QK: Tensor | None = None,
    dropout: float = 0.0,
    relative: Distances | None = None,
    distance_QK: Tensor | Rule | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T) v inside each block, causal by slot where no mask is given.

    `mask_QK` is true where a key may be read and broadcasts over blocks; every query must see at least one key.
    `relative` adds Shaw's terms, with true distances `distance_QK` (same broadcasting) or a rule that knows them for
    the flattened blocks.
    """
    if relative is None and (dropout == 0 or q_GQD.device.type != "cpu"):
        return F.scaled_dot_product_attention(
            q_GQD, k_GKD, v_GKD, attn_mask=mask_QK, is_causal=mask_QK is None, dropout_p=dropout, scale=scale
        )
    leading, Q, K = q_GQD.shape[:-2], q_GQD.shape[-2], k_GKD.shape[-2]
    if mask_QK is None:
        mask_QK = torch.ones(Q, K, dtype=torch.bool, device=q_GQD.device).tril()
    if isinstance(distance_QK, Tensor):
        distance_QK = Dense(distance_QK.expand(*leading, Q, K).flatten(0, -3))
    out_GQD = chunked(
        q_GQD.flatten(0, -3),
        k_GKD.flatten(0, -3),
        v_GKD.flatten(0, -3),
        scale,
        mask_QK.expand(*leading, Q, K).flatten(0, -3),
        dropout=dropout,
        relative=relative,
        rule=distance_QK,
    )
    return out_GQD.view(*leading, Q, -1)
