"""From hidden states to nats, without holding the logits of a whole batch at once.

Shapes: B sequences, N positions, A of them, E width, V vocabulary, R = B * N rows.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 1 << 24
"""Logits held at once; beyond it they are computed in parts, and again in the backward pass."""


def token_nats(hidden_BNE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_BN: Tensor) -> Tensor:
    """Return -log p(target) of every position, in nats, float32 or wider, `[B, N]`."""
    of_rows = functools.partial(rows_nats, weight_VE=weight_VE, bias_V=bias_V)
    return in_parts(of_rows, hidden_BNE, target_BN, len(weight_VE))


def in_parts(of_rows: Callable[..., Tensor], hidden_BNE: Tensor, target_BN: Tensor, logits: int) -> Tensor:
    """Return what `of_rows(hidden_RE, target_R)` does, which holds so many logits for a row, `[B, N]`."""
    hidden_RE, target_R = hidden_BNE.flatten(0, 1), target_BN.flatten()
    part = max(1, MAX_LOGITS // logits)
    if len(target_R) <= part:
        return of_rows(hidden_RE, target_R).view(target_BN.shape)
    parts = [
        checkpoint(of_rows, rows_RE, target, use_reentrant=False)
        for rows_RE, target in zip(hidden_RE.split(part), target_R.split(part), strict=True)
    ]
    return torch.cat(parts).view(target_BN.shape)  # type: ignore[arg-type]


def answer_nats(hidden_BAE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_BA: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log p(target) in nats, float32 or wider, and whether the target is the likeliest, each `[B, A]`."""
    logits_BAV = F.linear(hidden_BAE, weight_VE, bias_V)
    wide = torch.promote_types(logits_BAV.dtype, torch.float32)
    nats_BA = F.cross_entropy(logits_BAV.to(wide).mT, target_BA, reduction="none")
    return nats_BA, logits_BAV.argmax(-1) == target_BA


def rows_nats(hidden_RE: Tensor, target_R: Tensor, weight_VE: Tensor, bias_V: Tensor) -> Tensor:
    """Return the nats of some rows."""
    logits_RV = F.linear(hidden_RE, weight_VE, bias_V)
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    return F.cross_entropy(logits_RV.to(wide), target_R, reduction="none")
