"""Softmax attention inside blocks: what every pattern ends in once it has gathered its queries and keys.

Shapes: G blocks (any leading dimensions), Q queries, K keys, D head size, M distances.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.chunked import MIN_ROWS, chunked
from rtx.attention.kernel import CausalKernel
from rtx.attention.products import trusted
from rtx.attention.shaw import Dense, Distances, Rule

MOST_KEYS = 2048
"""Keys of a block up to which tiles are faster than torch's kernel where products go through oneDNN."""


def logit_scale(scale: float | None, size: int) -> float:
    """Return `scale`, or 1 / sqrt(D) where it is None."""
    return 1 / math.sqrt(size) if scale is None else scale


def in_graph(out: Tensor, *inputs: Tensor | None) -> Tensor:
    """Return outputs that belong to the graph of the inputs: zero gradients where no input was read.

    A loss over them alone can then be differentiated, as that of any other batch.
    """
    learned = [x for x in inputs if x is not None and x.requires_grad]
    if out.requires_grad or not learned or not torch.is_grad_enabled():
        return out
    # The sum of nothing: what stands in the inputs cannot reach it.
    return out + sum(x[..., :0].sum() for x in learned)


def without_padding(x_BHND: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return the vectors with zeros at padding, so that what stands there reaches neither outputs nor gradients."""
    return x_BHND if mask_BN is None else x_BHND.masked_fill(~mask_BN[:, None, :, None], 0.0)


def worked_in_tiles(q_GQD: Tensor, k_GKD: Tensor, dropout: float) -> bool:
    """Tell whether plain attention is worked out in tiles rather than by torch's kernel.

    On a CPU with dropout, whose weights the kernel would keep, and for blocks of the usual sizes where the kernel's
    products are slow.
    """
    if q_GQD.device.type != "cpu":
        return False
    Q, K = q_GQD.shape[-2], k_GKD.shape[-2]
    return dropout > 0 or (q_GQD.dtype == torch.float32 and MIN_ROWS <= Q and K <= MOST_KEYS and trusted())


def takes_wide_kernel(q_GQD: Tensor, k_GKD: Tensor, v_GKD: Tensor, dropout: float) -> bool:
    """Tell whether long causal attention on a CPU is torch's kernel with the faster of its libraries' products."""
    alike = q_GQD.dim() == 4 and q_GQD.shape == k_GKD.shape == v_GKD.shape and q_GQD.numel() > 0
    plain = q_GQD.device.type == "cpu" and q_GQD.dtype == torch.float32 and dropout == 0
    return plain and alike and k_GKD.shape[-2] > MOST_KEYS and trusted()


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
    if relative is None and mask_QK is None and takes_wide_kernel(q_GQD, k_GKD, v_GKD, dropout):
        return CausalKernel.apply(q_GQD, k_GKD, v_GKD, scale)  # type: ignore[return-value]
    if relative is None and not worked_in_tiles(q_GQD, k_GKD, dropout):
        return F.scaled_dot_product_attention(
            q_GQD, k_GKD, v_GKD, attn_mask=mask_QK, is_causal=mask_QK is None, dropout_p=dropout, scale=scale
        )
    leading, Q, K = q_GQD.shape[:-2], q_GQD.shape[-2], k_GKD.shape[-2]
    if mask_QK is None:
        mask_QK = torch.ones(Q, K, dtype=torch.bool, device=q_GQD.device).tril()
    if isinstance(distance_QK, Tensor):
        distance_QK = Dense(distance_QK.expand(*leading, Q, K).flatten(0, -3))
    # One mask for all blocks stays one: it tells which keys a part of the queries never reads.
    mask = mask_QK if mask_QK.dim() == 2 else mask_QK.expand(*leading, Q, K).flatten(0, -3)
    out_GQD = chunked(
        q_GQD.flatten(0, -3),
        k_GKD.flatten(0, -3),
        v_GKD.flatten(0, -3),
        scale,
        mask,
        dropout=dropout,
        relative=relative,
        rule=distance_QK,
    )
    return out_GQD.view(*leading, Q, v_GKD.shape[-1])
