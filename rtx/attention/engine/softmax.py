"""Softmax attention inside blocks, with what no kernel of PyTorch's offers: terms by distance, and logarithms of sums.

Shapes: G blocks, Q queries, K keys, D head size, M distances.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rtx.attention.autocast import no_autocast


class Relative(NamedTuple):
    """Keys and values by distance: row m is for distance m, the last for every distance beyond.

    Shaw's tables (Shaw et al. 2018, equations 3 and 4) are shared by all heads of a kind. Transformer-XL (Dai et al.
    2019, section 3.3) has keys of each head, a bias and no values.
    """

    keys_MD: Tensor
    """`[M, D]`, or of each head `[H, M, D]`."""
    values_MD: Tensor | None = None
    bias_HM: Tensor | None = None
    """Added to the products of queries and keys, before the scale."""

    def of_heads(self, head: Tensor | int) -> tuple[Tensor, Tensor | None]:
        """Return the keys `[M, D]`, or of some heads `[G, M, D]`, and the bias of these heads."""
        keys = self.keys_MD if self.keys_MD.dim() == 2 else self.keys_MD[head]
        return keys, None if self.bias_HM is None else self.bias_HM[head]


class Terms(NamedTuple):
    """What the logits and the weights get besides queries, keys and values."""

    scale: float
    dropout: float = 0.0
    relative: Relative | None = None
    bias_HM: Tensor | None = None
    """Added to the logits by head and distance, as `relative` by the last row beyond; -inf: not read."""
    heads: int = 1
    """H; `rtx.attention.engine.attend` sets it."""

    @property
    def by_distance(self) -> bool:
        """Whether anything depends on distances."""
        return self.relative is not None or self.bias_HM is not None


def soft_attend(
    q_GQD: Tensor,
    k_GKD: Tensor,
    v_GKD: Tensor,
    mask_GQK: Tensor,
    distance_GQK: Tensor | None,
    head_G: Tensor | None,
    terms: Terms,
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[G, Q, D]` and the logarithms of the summed exponentials `[G, Q]`, in float32 or wider.

    A query that sees no key, or whose logits are all near the least number, gets zeros and -inf. The mask broadcasts.
    `distance_GQK` and the head of each block are read where terms depend on them.
    """
    wide = torch.promote_types(q_GQD.dtype, torch.float32)
    unseen = torch.finfo(wide).min / 2  # finite, as a softmax of infinities alone has no gradient but NaN
    if not k_GKD.shape[1]:
        out_GQD = v_GKD.new_zeros(*q_GQD.shape[:2], v_GKD.shape[2], dtype=wide)
        return out_GQD, out_GQD.new_full(q_GQD.shape[:2], float("-inf"))
    with no_autocast(q_GQD):
        q_GQD, k_GKD, v_GKD = q_GQD.to(wide) * terms.scale, k_GKD.to(wide), v_GKD.to(wide)
        relative, bias_HM = terms.relative, terms.bias_HM
        if relative is None:
            logits_GQK = q_GQD @ k_GKD.mT
        else:
            assert distance_GQK is not None
            row_GQK = distance_GQK.clamp(0, relative.keys_MD.shape[-2] - 1).expand(-1, -1, k_GKD.shape[1])
            keys, bias_GM = relative.of_heads(0 if head_G is None else head_G)
            by_GQM = q_GQD @ keys.to(wide).mT
            if bias_GM is not None:
                by_GQM = by_GQM + bias_GM.to(wide)[:, None] * terms.scale
            logits_GQK = torch.baddbmm(by_GQM.gather(-1, row_GQK), q_GQD, k_GKD.mT)
        if bias_HM is not None:
            assert distance_GQK is not None and head_G is not None
            by_GQM = bias_HM.to(wide)[head_G][:, None].expand(-1, logits_GQK.shape[1], -1)
            bias_GQK = by_GQM.gather(-1, distance_GQK.clamp(0, bias_HM.shape[-1] - 1))
            logits_GQK += bias_GQK.clamp(min=unseen)
        logits_GQK.masked_fill_(~mask_GQK, unseen)
        weight_GQK, best_GQ1 = logits_GQK.softmax(-1), logits_GQK.argmax(-1, keepdim=True)
        top_GQ1 = logits_GQK.gather(-1, best_GQ1)  # its weight is e^(logit - sum)
        sum_GQ, none_GQ1 = (top_GQ1 - weight_GQK.gather(-1, best_GQ1).log())[..., 0], top_GQ1 <= unseen / 2
        weight_GQK = F.dropout(weight_GQK, terms.dropout, training=terms.dropout > 0)
        out_GQD = weight_GQK @ v_GKD
        if relative is not None and relative.values_MD is not None:
            by_GQM = weight_GQK.new_zeros(*weight_GQK.shape[:2], len(relative.values_MD))
            out_GQD = out_GQD + by_GQM.scatter_add(-1, row_GQK, weight_GQK) @ relative.values_MD.to(wide)
    return out_GQD.masked_fill(none_GQ1, 0.0), sum_GQ.masked_fill(none_GQ1[..., 0], float("-inf"))


def recomputed(function: Callable[..., Any], *inputs: Any, kept: bool = False) -> Any:
    """Return function(*inputs); what it computes on the way is computed again in the backward pass, unless `kept`.

    The same dropout mask is drawn again. What the function has otherwise is kept, in recomputed blocks, too.
    """
    if torch.is_grad_enabled() and not kept:
        return checkpoint(function, *inputs, use_reentrant=False)
    return function(*inputs)
