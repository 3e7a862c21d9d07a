"""The oracle: dense softmax in float64, by the rules that the patterns state; slow, obvious, differentiable.

The engine, the caches and every kernel are held against it. A rule is a mask `[lists, N, N]`, true where the query
(first) reads the key (second) in a list; a position's output is the mean over the lists in which it reads something,
or one softmax over all of them.

Shapes: H heads, N positions, D head size, P lists, C clusters, T hash rounds.
"""

from __future__ import annotations

import sys
from math import isnan
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rtx.attention.engine.softmax import LogitTerms, RelativeTables

if TYPE_CHECKING:
    from rtx.attention.pattern import Pattern, Rotate

MOST = sys.float_info.max


def dense(
    q_ND: Tensor,
    k_ND: Tensor,
    v_ND: Tensor,
    mask_PNN: Tensor,
    terms: LogitTerms,
    head: int = 0,
    attend_self: bool = True,
    merge: str = "mean",
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[N, D]` of one head of one sequence, and its weights in every list, `[P, N, N]`.

    Without `attend_self` a query that reads other keys of a list does not read its own; `merge`: "mean" or "lse".
    `terms.dropout` is left out.
    """
    N = len(q_ND)
    position_N = torch.arange(N, device=q_ND.device)
    true_NN = (position_N[:, None] - position_N).clamp(min=0)
    if not attend_self:
        others_PNN = mask_PNN & (position_N[:, None] != position_N)
        mask_PNN = torch.where(others_PNN.any(-1, keepdim=True), others_PNN, mask_PNN)
    logits_PNN = (q_ND @ k_ND.T).expand(mask_PNN.shape) * terms.scale
    relative = terms.relative
    if relative is not None:
        keys_MD, bias_M = relative.of_heads(head)
        row_NN = true_NN.clamp(max=len(keys_MD) - 1)
        logits_PNN = logits_PNN + terms.scale * torch.einsum("nd,nmd->nm", q_ND, keys_MD[row_NN])
        if bias_M is not None:
            logits_PNN = logits_PNN + terms.scale * bias_M[row_NN]
    if terms.bias_HM is not None:
        logits_PNN = logits_PNN + terms.bias_HM[head][true_NN.clamp(max=terms.bias_HM.shape[1] - 1)]
    mask_PNN = mask_PNN & (logits_PNN > float("-inf"))
    over = (-1,) if merge == "mean" else (0, -1)
    reads_PN1 = mask_PNN.any(over, keepdim=True)
    # Rows that read nothing get the weights of any row, and then none.
    logits_PNN = torch.where(mask_PNN | ~reads_PN1, logits_PNN, float("-inf"))
    logits_PNN = logits_PNN.nan_to_num(0.0, neginf=float("-inf"))
    weight_PNN = (logits_PNN - logits_PNN.logsumexp(over, keepdim=True)).exp() * mask_PNN
    weight_PNN = weight_PNN / reads_PN1.sum(0).clamp(min=1)
    out_ND = weight_PNN.sum(0) @ v_ND
    if relative is not None and relative.values_MD is not None:
        out_ND = out_ND + torch.einsum("pnm,nmd->nd", weight_PNN, relative.values_MD[row_NN])
    return out_ND, weight_PNN


def attend(
    pattern: Pattern,
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHND: Tensor,
    *,
    rotate: Rotate | None = None,
    relative: RelativeTables | None = None,
    streaming: bool = False,
) -> Tensor:
    """Return the outputs `[B, H, N, D]` of a pattern by its own rule, without padding or dropout."""
    outs = []
    for b in range(len(q_BHND)):
        qk = pattern.inputs(q_BHND[b : b + 1], None if k_BHND is None else k_BHND[b : b + 1], rotate)
        terms = pattern.terms(q_BHND.shape[-1], relative)
        for h in range(q_BHND.shape[1]):
            q_ND, k_ND = qk.rotated_q_BHND[0, h], qk.rotated_k_BHND[0, h]
            mask_PNN = pattern.rule(qk, h, streaming)
            own = pattern.attend_self, pattern.merge
            out_ND = dense(q_ND, k_ND, v_BHND[b, h], mask_PNN, terms, h, *own)[0]
            outs.append(pattern.finish_by_rule(out_ND, qk, v_BHND[b, h], h, terms))
    return torch.stack(outs).view(v_BHND.shape) if outs else torch.zeros_like(v_BHND)


def probed(
    score_C: list[float],
    margin: float,
    members: dict[int, list[int]],
    target: int,
) -> list[int]:
    """The positions, ascending, of the keys that a query probes.

    Clusters are taken in the order of their scores, of equal ones the first, until they hold
    `target` keys; of each the last `target` keys.
    """
    # Differences of finite scores are numbers; NaN is the worst.
    score_C = [-MOST if isnan(score) else min(max(score, -MOST), MOST) for score in score_C]
    positions: list[int] = []
    left = sorted(members)
    while left and len(positions) < target:
        equal = equal_to_best(score_C, margin, left)
        for c in equal:
            if len(positions) < target:
                positions += members[c][-target:]
        left = [c for c in left if c not in equal]
    return sorted(positions)


def equal_to_best(score_C: list[float], margin: float, clusters: list[int]) -> list[int]:
    """Those of some clusters, ascending, that steps no larger than the margin link to the best."""
    by_score = sorted(clusters, key=lambda c: -score_C[c])
    equal = by_score[:1]
    for c in by_score[1:]:
        if score_C[equal[-1]] - score_C[c] > margin:
            break
        equal.append(c)
    return sorted(equal)
