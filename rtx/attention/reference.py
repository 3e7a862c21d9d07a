"""The oracle: every pattern as plain loops over positions. Slow, obvious, differentiable; the rest is held against it.

A pattern is a rule that lists, for each position i, the sets of positions that it reads: one set for full and local
heads, one for each cluster of i for the others. Its output is the mean over the sets of softmax attention inside each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rtx.attention.weights import Distances

Sets = Callable[[int], list[list[int]]]


def read(q_ND: Tensor, k_ND: Tensor, v_ND: Tensor, sets: Sets, scale: float, relative: Distances | None) -> Tensor:
    """Return the outputs `[N, D]` of one head of one sequence."""
    outputs = []
    for i in range(q_ND.shape[0]):
        reads = [one_read(q_ND[i], i, k_ND, v_ND, keys, scale, relative) for keys in sets(i)]
        outputs.append(torch.stack(reads).mean(0) if reads else torch.zeros_like(v_ND[0]))
    return torch.stack(outputs)


def one_read(
    q_D: Tensor, i: int, k_ND: Tensor, v_ND: Tensor, keys: list[int], scale: float, relative: Distances | None
) -> Tensor:
    """Return softmax attention of position i over one set of positions."""
    logits, values = [], []
    for j in keys:
        key_D, value_D = k_ND[j], v_ND[j]
        if relative is not None:
            far = min(i - j, relative.keys_MD.shape[0] - 1)
            key_D, value_D = key_D + relative.keys_MD[far], value_D + relative.values_MD[far]
        logits.append(scale * (q_D @ key_D))
        values.append(value_D)
    return torch.stack(logits).softmax(0) @ torch.stack(values)


def full_sets(i: int) -> list[list[int]]:
    """Every position up to i."""
    return [list(range(i + 1))]


def local_sets(i: int, window: int) -> list[list[int]]:
    """The last `window` positions up to i."""
    return [list(range(max(0, i - window + 1), i + 1))]


def cluster_sets(i: int, member_CN: Tensor, window: int, attend_self: bool) -> list[list[int]]:
    """For each cluster of i, its last `window` members up to i; i itself only where it may, or stands alone."""
    sets = []
    for member_N in member_CN:
        if member_N[i]:
            keys = [j for j in range(i + 1) if member_N[j]][-window:]
            sets.append(keys if attend_self else keys[:-1] or keys)
    return sets


def topk_members(score_CN: Tensor, window: int) -> Tensor:
    """The `window` best positions of each cluster; equal scores: the earlier position wins."""
    member_CN = torch.zeros(score_CN.shape, dtype=torch.bool)
    for c, score_N in enumerate(score_CN.tolist()):
        for j in sorted(range(len(score_N)), key=lambda j: (-score_N[j], j))[:window]:
            member_CN[c, j] = True
    return member_CN


def streaming_topk_sets(i: int, score_CN: Tensor, window: int, attend_self: bool) -> list[list[int]]:
    """For each cluster whose best `window` positions of the prefix 0..i hold i: those positions."""
    member_CP = topk_members(score_CN[:, : i + 1], window)
    return cluster_sets(i, member_CP, window, attend_self)


def threshold_members(score_CN: Tensor, threshold_C: Tensor) -> Tensor:
    """The positions that a centroid scores at or above its threshold."""
    return score_CN >= threshold_C[:, None]
