"""Routing by the oracle, and centroids, thresholds and projections to try it with.

Shapes: B sequences, H heads, C clusters, N positions, D head size.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from oracle_cases import Case, Leaves, plain_normalise, plain_rotate, tables
from padding_cases import padding
from torch import Tensor

from rtx.attention import reference
from rtx.attention.kmeans import orthonormal
from rtx.attention.routing import routing
from rtx.model.positions import Rotary

LEVELS = {"all": -1e9, "most": -0.5, "some": 0.5, "none": 1e9}
"""Thresholds under which lists are far longer than W, down to clusters without members."""


class How(NamedTuple):
    """Which routing: the arguments of `routing` that a case does not hold; `level` is that of the thresholds."""

    selection: str = "topk"
    keys: str = "shared"
    causal: bool = True
    slots: bool = False
    masked: bool = False
    streaming: bool = False
    level: str = "mixed"


def centroids(case: Case) -> Tensor:
    """Return random centroids `[H, C, D]`."""
    generator = torch.Generator().manual_seed(100 + case.seed)
    return torch.randn(case.H, case.C, case.D, generator=generator, dtype=torch.float64)


def projection(case: Case) -> Tensor:
    """Return W_R of each head, `[H, D, D]`."""
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        return orthonormal(case.H, case.D).double()


def thresholds(case: Case, level: str, seed: int = 0) -> Tensor:
    """Return thresholds `[H, C]`, all of one level ("half": 0), or ("mixed") each of a random one."""
    if level != "mixed":
        return torch.full((case.H, case.C), 0.0 if level == "half" else LEVELS[level], dtype=torch.float64)
    which_HC = torch.randint(4, (case.H, case.C), generator=torch.Generator().manual_seed(case.seed + seed))
    return torch.tensor(list(LEVELS.values()), dtype=torch.float64)[which_HC]


def fast(case: Case, inputs: Leaves, how: How) -> Tensor:
    """Return `routing` for a case."""
    return routing(
        inputs["q"],
        None if how.keys == "shared" else inputs["k"],
        inputs["v"],
        centroids(case),
        window=case.W,
        selection=how.selection,
        threshold_HC=thresholds(case, how.level),
        key_threshold_HC=thresholds(case, how.level, seed=50),
        projection_HDD=projection(case) if how.keys == "projected" else None,
        causal=how.causal,
        scale=case.scale,
        attend_self=case.attend_self,
        relative=tables(inputs),
        slot_distance=how.slots,
        rotate=Rotary(case.D) if case.rotary else None,
        mask_BN=padding(case) if how.masked else None,
        streaming=how.streaming,
    )


def true_members(score_CN: Tensor, how: How, window: int, threshold_C: Tensor, real_N: Tensor) -> Tensor:
    """Return the oracle's memberships."""
    if how.selection == "topk":
        member_CN = reference.topk_members(score_CN.masked_fill(~real_N, float("-inf")), window)
    elif how.selection == "nearest":
        member_CN = reference.nearest_members(score_CN)
    else:
        member_CN = reference.threshold_members(score_CN, threshold_C)
    return member_CN & real_N


def true_rules(
    case: Case, how: How, scores: tuple[Tensor, Tensor], h: int, real_N: Tensor
) -> tuple[reference.Sets, reference.Sets]:
    """Return which keys a position of one head reads, and their slot distances."""
    limits = thresholds(case, how.level)[h], thresholds(case, how.level, seed=50 if how.keys == "separate" else 0)[h]

    def rule(i: int, function: object) -> list[list[int]]:
        seen = i + 1 if how.streaming else len(real_N)
        member, key_member = (
            true_members(score_CN[:, :seen], how, case.W, limit_C, real_N[:seen])
            for score_CN, limit_C in zip(scores, limits, strict=True)
        )
        return function(i, member, key_member, case.W, case.attend_self)  # type: ignore[operator]

    sets = partial(reference.separate_sets, causal=how.causal)
    return partial(rule, function=sets), partial(rule, function=reference.cluster_slots)


def truth(case: Case, inputs: Leaves, how: How) -> Tensor:
    """Return what the oracle says to the same."""
    mask_BN = padding(case) if how.masked else torch.ones(case.B, case.N, dtype=torch.bool)
    out_BHND = []
    for b in range(case.B):
        for h in range(case.H):
            q_ND = plain_normalise(inputs["q"][b, h])
            k_ND = q_ND if how.keys == "shared" else plain_normalise(inputs["k"][b, h])
            by_ND = by_key_ND = q_ND.detach()
            if how.keys == "separate":
                by_key_ND = k_ND.detach()
            if how.keys == "projected":
                by_ND = by_key_ND = torch.stack([projection(case)[h] @ (q + k) for q, k in zip(q_ND, k_ND)]).detach()  # noqa: B905
            scores = centroids(case)[h] @ by_ND.T, centroids(case)[h] @ by_key_ND.T
            sets, slots = true_rules(case, how, scores, h, mask_BN[b])
            if case.rotary:
                q_ND, k_ND = plain_rotate(q_ND), plain_rotate(k_ND)
            distances = slots if how.slots else None
            out_BHND.append(reference.read(q_ND, k_ND, inputs["v"][b, h], sets, case.scale, tables(inputs), distances))
    return torch.stack(out_BHND).unflatten(0, (case.B, case.H))
