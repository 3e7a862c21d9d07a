"""Routing by the oracle, and centroids and thresholds to try it with.

Shapes: B sequences, H heads, C clusters, N positions, D head size.
"""

from __future__ import annotations

from functools import partial

import torch
from oracle_cases import Case, Leaves, plain_normalise, plain_rotate, tables
from torch import Tensor

from rtx.attention import reference
from rtx.attention.routing import routing
from rtx.model.positions import Rotary

LEVELS = {"all": -1e9, "most": -0.5, "some": 0.5, "none": 1e9}
"""Thresholds under which lists are far longer than W, down to clusters without members."""


def centroids(case: Case) -> Tensor:
    """Return random centroids `[H, C, D]`."""
    generator = torch.Generator().manual_seed(100 + case.seed)
    return torch.randn(case.H, case.C, case.D, generator=generator, dtype=torch.float64)


def thresholds(case: Case, level: str) -> Tensor:
    """Return thresholds `[H, C]`, all of one level or ("mixed") each of a random one."""
    if level != "mixed":
        return torch.full((case.H, case.C), LEVELS[level], dtype=torch.float64)
    which_HC = torch.randint(4, (case.H, case.C), generator=torch.Generator().manual_seed(case.seed))
    return torch.tensor(list(LEVELS.values()), dtype=torch.float64)[which_HC]


def fast_routing(case: Case, inputs: Leaves, threshold_HC: Tensor | None, streaming: bool = False) -> Tensor:
    """Return `routing` for a case: by thresholds where given, else top-w."""
    return routing(
        inputs["q"],
        inputs["v"],
        centroids(case),
        window=case.W,
        selection="topk" if threshold_HC is None else "causal",
        threshold_HC=threshold_HC,
        scale=case.scale,
        attend_self=case.attend_self,
        relative=tables(inputs),
        rotate=Rotary(case.D) if case.rotary else None,
        streaming=streaming,
    )


def true_routing(case: Case, inputs: Leaves, threshold_HC: Tensor | None, streaming: bool = False) -> Tensor:
    """Return what the oracle says to the same."""
    out_BHND = []
    for b in range(case.B):
        for h in range(case.H):
            q_ND = plain_normalise(inputs["q"][b, h])
            score_CN = centroids(case)[h] @ q_ND.detach().T
            key_ND = plain_rotate(q_ND) if case.rotary else q_ND
            if threshold_HC is not None:
                member_CN = reference.threshold_members(score_CN, threshold_HC[h])
            else:
                member_CN = reference.topk_members(score_CN, case.W)
            rule = {"window": case.W, "attend_self": case.attend_self}
            if streaming and threshold_HC is None:
                sets = partial(reference.streaming_topk_sets, score_CN=score_CN, **rule)
            else:
                sets = partial(reference.cluster_sets, member_CN=member_CN, **rule)
            out_BHND.append(reference.read(key_ND, key_ND, inputs["v"][b, h], sets, case.scale, tables(inputs)))
    return torch.stack(out_BHND).unflatten(0, (case.B, case.H))
