"""The oracle: every pattern as plain loops over positions. Slow, obvious, differentiable; the rest is held against it.

A pattern is a rule that lists, for each position i, the sets of positions that it reads: one set for full and local
heads, one for each cluster of i for the others. Its output is the mean over the sets of softmax attention inside each.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isnan

import torch
from torch import Tensor

from rtx.attention.weights import Distances

Sets = Callable[[int], list[list[int]]]


def read(
    q_ND: Tensor,
    k_ND: Tensor,
    v_ND: Tensor,
    sets: Sets,
    scale: float,
    relative: Distances | None,
    distances: Sets | None = None,
) -> Tensor:
    """Return the outputs `[N, D]` of one head of one sequence; `distances` of the keys in `sets`, unset: true ones."""
    outputs = []
    for i in range(q_ND.shape[0]):
        read_sets = sets(i)
        far = [[i - j for j in keys] for keys in read_sets] if distances is None else distances(i)
        reads = [
            one_read(q_ND[i], k_ND, v_ND, keys, scale, relative, apart)
            for keys, apart in zip(read_sets, far, strict=True)
        ]
        outputs.append(torch.stack(reads).mean(0) if reads else v_ND.new_zeros(v_ND.shape[-1]))
    return torch.stack(outputs)


def one_read(
    q_D: Tensor,
    k_ND: Tensor,
    v_ND: Tensor,
    keys: list[int],
    scale: float,
    relative: Distances | None,
    distances: list[int],
) -> Tensor:
    """Return softmax attention of one query over one set of positions, each at its distance."""
    logits, values = [], []
    for j, distance in zip(keys, distances, strict=True):
        key_D, value_D = k_ND[j], v_ND[j]
        if relative is not None:
            far = min(distance, relative.keys_MD.shape[0] - 1)
            key_D, value_D = key_D + relative.keys_MD[far], value_D + relative.values_MD[far]
        logits.append(scale * (q_D @ key_D))
        values.append(value_D)
    return torch.stack(logits).softmax(0) @ torch.stack(values)


def normalise(x_ND: Tensor) -> Tensor:
    """LayerNorm without scale or bias."""
    centred_ND = x_ND - x_ND.mean(-1, keepdim=True)
    return centred_ND / (centred_ND.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def full_sets(i: int) -> list[list[int]]:
    """Every position up to i."""
    return [list(range(i + 1))]


def local_sets(i: int, window: int) -> list[list[int]]:
    """The last `window` positions up to i."""
    return [list(range(max(0, i - window + 1), i + 1))]


def strided_sets(i: int, stride: int) -> list[list[int]]:
    """The positions up to i that lie a multiple of the stride before it."""
    return [[j for j in range(i + 1) if (i - j) % stride == 0]]


def fixed_sets(i: int, block: int, summary: int, head: int) -> list[list[int]]:
    """The own block up to i, and of each earlier block the head's `summary` columns, counted from the block's end."""
    end = block - summary * (head % (block // summary))
    return [[j for j in range(i + 1) if j // block == i // block or end - summary <= j % block < end]]


def cluster_sets(i: int, member_CN: Tensor, window: int, attend_self: bool) -> list[list[int]]:
    """For each cluster of i, its last `window` members up to i; i itself only where it may, or stands alone."""
    sets = []
    for member_N in member_CN:
        if member_N[i]:
            keys = [j for j in range(i + 1) if member_N[j]][-window:]
            sets.append(keys if attend_self else keys[:-1] or keys)
    return sets


def separate_sets(
    i: int, member_CN: Tensor, key_member_CM: Tensor, window: int, attend_self: bool, causal: bool = True
) -> list[list[int]]:
    """For each cluster of query i that shows it a key, its last `window` keys up to i; all of them without a mask."""
    sets = []
    for member_N, key_member_M in zip(member_CN, key_member_CM, strict=True):
        keys = [j for j in range(len(key_member_M)) if key_member_M[j] and (j <= i or not causal)]
        keys = keys[-window:] if causal else keys
        others = [j for j in keys if j != i]
        if member_N[i] and keys:
            sets.append(keys if attend_self else others or keys)
    return sets


def cluster_slots(i: int, member_CN: Tensor, key_member_CN: Tensor, window: int, attend_self: bool) -> list[list[int]]:
    """For each key that `separate_sets` lists, how many later keys of its cluster there are up to i."""
    slots = []
    for member_N, key_member_N in zip(member_CN, key_member_CN, strict=True):
        for keys in separate_sets(i, member_N[None], key_member_N[None], window, attend_self):
            slots.append([sum(bool(key_member_N[m]) for m in range(j + 1, i + 1)) for j in keys])
    return slots


def topk_members(score_CN: Tensor, window: int) -> Tensor:
    """The `window` best positions of each cluster; equal scores: the earlier position wins; NaN is the worst."""
    member_CN = torch.zeros(score_CN.shape, dtype=torch.bool)
    for c, score_N in enumerate(score_CN.tolist()):
        worse_N = [(isnan(score), 0.0 if isnan(score) else -score, j) for j, score in enumerate(score_N)]
        for _, _, j in sorted(worse_N)[:window]:
            member_CN[c, j] = True
    return member_CN


def streaming_topk_sets(i: int, score_CN: Tensor, window: int, attend_self: bool) -> list[list[int]]:
    """For each cluster whose best `window` positions of the prefix 0..i hold i: those positions."""
    member_CP = topk_members(score_CN[:, : i + 1], window)
    return cluster_sets(i, member_CP, window, attend_self)


def nearest_members(score_CN: Tensor) -> Tensor:
    """Each position in the cluster that scores it highest; equal scores: the first cluster wins."""
    member_CN = torch.zeros(score_CN.shape, dtype=torch.bool)
    for i, score_C in enumerate(score_CN.T.tolist()):
        member_CN[score_C.index(max(score_C)), i] = True
    return member_CN


def threshold_members(score_CN: Tensor, threshold_C: Tensor) -> Tensor:
    """The positions that a centroid scores at or above its threshold."""
    return score_CN >= threshold_C[:, None]


def buckets(q_ND: Tensor, rotation_TDF: Tensor) -> Tensor:
    """The bucket of each position in each round, `[T, N]`: the largest of xR and -xR; of equals the first wins."""
    score_TNF = torch.stack([q_ND @ rotation_DF for rotation_DF in rotation_TDF])
    return torch.cat([score_TNF, -score_TNF], dim=-1).argmax(-1)


def lsh_sets(i: int, bucket_TN: Tensor, window: int, variant: str) -> list[list[int]]:
    """The union over the rounds of what each shows: the last `window` members of the bucket of i ("causal").

    "reformer": the members in its chunk and the one before, of window // 2 positions sorted by bucket, then position;
    "prefix": the same with chunks of the positions up to i alone. Itself only where there is nothing else.
    """
    union, chunk = set(), max(1, window // 2)
    for bucket_N in bucket_TN.tolist():
        members = [j for j in range(i + 1) if bucket_N[j] == bucket_N[i]]
        if variant == "causal":
            union |= set(members[-window:])
        else:
            sorted_up = range(len(bucket_N)) if variant == "reformer" else range(i + 1)
            order = sorted(sorted_up, key=lambda j, bucket_N=bucket_N: (bucket_N[j], j))
            own = order.index(i) // chunk
            union |= {j for j in members if order.index(j) // chunk in (own - 1, own)}
    return [sorted(union - {i}) or [i]]


def read_span(
    q_ND: Tensor,
    k_ND: Tensor,
    v_ND: Tensor,
    span: Tensor,
    *,
    window: int,
    ramp: int,
    scale: float,
    relative: Distances | None,
    real_N: list[bool],
) -> Tensor:
    """Return the outputs `[N, D]` of one head with an adaptive span: softmax terms times m_z(i - j), over their sum.

    What is not real is read by nobody and gets zero.
    """
    outputs = []
    for i in range(q_ND.shape[0]):
        logits, shares, values = [], [], []
        for j in local_sets(i, window)[0]:
            share = ((ramp + span - (i - j)) / ramp).clamp(0, 1)
            if not real_N[i] or not real_N[j] or share == 0:
                continue
            key_D, value_D = k_ND[j], v_ND[j]
            if relative is not None:
                far = min(i - j, relative.keys_MD.shape[0] - 1)
                key_D, value_D = key_D + relative.keys_MD[far], value_D + relative.values_MD[far]
            logits.append(scale * (q_ND[i] @ key_D))
            shares.append(share)
            values.append(value_D)
        if not values:
            outputs.append(torch.zeros_like(v_ND[0]))
            continue
        logits_K = torch.stack(logits)
        # Less the largest, which changes no ratio: exponentials of large logits are infinite.
        weights_K = torch.stack(shares) * (logits_K - logits_K.detach().amax()).exp()
        outputs.append(weights_K @ torch.stack(values) / weights_K.sum())
    return torch.stack(outputs)
