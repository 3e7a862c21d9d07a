"""The oracle: dense softmax in float64, by the rules that the patterns state; slow, obvious, differentiable.

The engine, the caches and every kernel are held against it. A rule is a mask `[lists, N, N]`, true where the query
(first) reads the key (second) in a list; a position's output is the mean over the lists in which it reads something,
or one softmax over all of them.

Shapes: H heads, N positions, D head size, P lists, C clusters, T hash rounds.
"""

from __future__ import annotations

import sys
from math import inf, isnan
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
            if getattr(pattern, "gate_H2D", None) is not None:
                out_ND = pattern.both_by_rule(out_ND, qk, v_BHND[b : b + 1], h)  # type: ignore[operator]
            outs.append(out_ND)
    return torch.stack(outs).view(v_BHND.shape) if outs else torch.zeros_like(v_BHND)


def last_members(query_CN: Tensor, key_CN: Tensor, window: int) -> Tensor:
    """Each query of a cluster reads its last `window` keys up to itself."""
    C, N = query_CN.shape
    mask_CNN = torch.zeros(C, N, N, dtype=torch.bool, device=query_CN.device)
    for c in range(C):
        for i in query_CN[c].nonzero()[:, 0].tolist():
            mask_CNN[c, i, [j for j in key_CN[c].nonzero()[:, 0].tolist() if j <= i][-window:]] = True
    return mask_CNN


def best(score_N: list[float], margin_N: list[float], count: int) -> list[int]:
    """The places of the `count` best scores; NaN is the worst.

    Scores within the margin of the last of these are equal to it, and of equals the earlier is the
    better. `margin_N` has the margin around each score.
    """
    score_N = [-inf if isnan(score) else score for score in score_N]
    order = sorted(range(len(score_N)), key=lambda j: -score_N[j])
    if len(order) <= count:
        return order
    last = order[count - 1]
    better = [j for j in order if score_N[j] > score_N[last] + margin_N[last]]
    equal = [j for j in sorted(order) if abs(score_N[j] - score_N[last]) <= margin_N[last] or j == last]
    return (better + equal)[:count]


def highest(score_C: list[float], margin_C: list[float]) -> int:
    """The first cluster whose score is no further than its margin below the highest; of NaN alone the first."""
    for c, score in enumerate(score_C):
        if score + margin_C[c] >= max(score_C):
            return c
    return 0


def topk_members(score_CN: Tensor, margin_C: Tensor, window: int) -> Tensor:
    """The `window` best positions of each cluster."""
    member_CN = torch.zeros(score_CN.shape, dtype=torch.bool, device=score_CN.device)
    for c, score_N in enumerate(score_CN.tolist()):
        member_CN[c, best(score_N, [float(margin_C[c])] * len(score_N), window)] = True
    return member_CN


def threshold_members(score_CN: Tensor, threshold_C: Tensor, margin_C: Tensor) -> Tensor:
    """Each position in the clusters whose thresholds it reaches, up to margins, else in the one it misses by least."""
    member_CN = torch.zeros(score_CN.shape, dtype=torch.bool, device=score_CN.device)
    above_CN = score_CN - threshold_C[:, None]
    for i, above_C in enumerate(above_CN.T.tolist()):
        reached = [c for c, above in enumerate(above_C) if above >= -float(margin_C[c])]
        member_CN[reached or highest(above_C, margin_C.tolist()), i] = True
    return member_CN


def nearest_members(score_CN: Tensor, margin_C: Tensor) -> Tensor:
    """Each position in the cluster that scores it highest."""
    member_CN = torch.zeros(score_CN.shape, dtype=torch.bool, device=score_CN.device)
    for i, score_C in enumerate(score_CN.T.tolist()):
        member_CN[highest(score_C, margin_C.tolist()), i] = True
    return member_CN


def kept_members(score_CN: Tensor, margin_C: Tensor, window: int) -> Tensor:
    """The members of each cluster behind every position, `[C, N, N]`, as positions arrive one after the other.

    A full cluster takes a newcomer that is better than the worst member by more than the margin. It replaces the latest
    of the members that are no better than the worst by more than that.
    """
    C, N = score_CN.shape
    member_CNN = torch.zeros(C, N, N, dtype=torch.bool, device=score_CN.device)
    for c, score_N in enumerate(score_CN.tolist()):
        members: list[int] = []
        for i, score in enumerate(score_N):
            bar = float(margin_C[c]) + min((score_N[j] for j in members), default=inf)
            if len(members) == window and score > bar:
                members.remove(max(j for j in members if score_N[j] <= bar))
            if len(members) < window:
                members.append(i)
            member_CNN[c, i, members] = True
    return member_CNN


def prefix_topk(query_score_CN: Tensor, key_score_CN: Tensor, margin_C: Tensor, window: int) -> Tensor:
    """Streaming top-w: position i reads a cluster's best keys of 0..i where it is among the best queries of 0..i."""
    query_CNN, key_CNN = (kept_members(score_CN, margin_C, window) for score_CN in (query_score_CN, key_score_CN))
    joins_CN = query_CNN.diagonal(dim1=1, dim2=2)
    return key_CNN & joins_CN[:, :, None]


def hashed(bucket_TN: Tensor, window: int, variant: str) -> Tensor:
    """The union over the rounds of what each shows, `[1, N, N]`; itself only where there is nothing else.

    "causal": the last `window` members of the bucket of i. "reformer": the members in its chunk and the one before, of
    window // 2 positions sorted by bucket, then position. "prefix": the same with chunks of positions up to i alone.
    """
    N, chunk = bucket_TN.shape[1], max(1, window // 2)
    mask_NN = torch.zeros(N, N, dtype=torch.bool, device=bucket_TN.device)
    for i in range(N):
        union = set()
        for bucket_N in bucket_TN.tolist():
            members = [j for j in range(i + 1) if bucket_N[j] == bucket_N[i]]
            if variant == "causal":
                union |= set(members[-window:])
                continue
            order = sorted(range(N if variant == "reformer" else i + 1), key=lambda j, of=bucket_N: (of[j], j))
            own = order.index(i) // chunk
            union |= {j for j in members if order.index(j) // chunk in (own - 1, own)}
        mask_NN[i, sorted(union - {i}) or [i]] = True
    return mask_NN[None]


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
