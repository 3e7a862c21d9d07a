"""Routing by the fast path and by the oracle; centroids, thresholds and projections to try it with.

Shapes: B sequences, H heads, C clusters, N positions, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from oracle_cases import Case, Leaves, plain_rotate, tables
from padding_cases import padding
from torch import Tensor

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


def fast(case: Case, inputs: Leaves, how: How, backend: str = "torch") -> Tensor:
    """Return `routing` for a case."""
    rotate = plain_rotate if backend == "reference" else Rotary(case.D)
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
        rotate=rotate if case.rotary else None,
        mask_BN=padding(case) if how.masked else None,
        streaming=how.streaming,
        backend=backend,
    )


def truth(case: Case, inputs: Leaves, how: How) -> Tensor:
    """Return what the oracle says to the same."""
    return fast(case, inputs, how, backend="reference")
