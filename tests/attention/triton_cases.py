"""Membership lists to try the Triton kernels with, and what torch and the oracle make of them in float64.

Shapes: B sequences, H heads, C clusters, N positions, D size of queries and keys, E of values.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Lists(NamedTuple):
    """One shape with its options; `dense`: how likely a position is in a cluster, None: uneven, some lists empty."""

    B: int = 1
    H: int = 1
    C: int = 3
    N: int = 21
    D: int = 4
    E: int = 4
    W: int = 5
    dense: float | None = None
    attend_self: bool = True
    own_keys: bool = False
    scale: float = 0.5
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `attend_members`."""
        return {"window": self.W, "scale": self.scale, "attend_self": self.attend_self}


EDGES = [
    Lists(),
    Lists(N=1, C=1, W=1, dense=1.0, attend_self=False),
    Lists(N=9, W=1, attend_self=False, own_keys=True),
    Lists(N=9, W=20, C=1, dense=1.0),
    Lists(N=70, W=3, C=2, dense=0.9, attend_self=False),
    Lists(N=75, W=40, C=2, dense=0.8, own_keys=True),
    Lists(N=40, W=200, C=2, dense=0.9, D=17, E=33, own_keys=True),
    Lists(N=33, W=16, C=5, dense=0.05),
    Lists(N=12, dense=0.0),
    Lists(N=20, dense=0.0, own_keys=True),
    Lists(B=0, N=4),
    Lists(N=30, W=7, scale=-2.0),
    Lists(N=30, W=7, scale=0.0),
]


def cases(count: int = 12) -> list[Lists]:
    """Return the edge cases and `count` random ones, the same at every call."""
    draw = random.Random(11)
    return EDGES + [
        Lists(
            B=draw.randint(1, 2),
            H=draw.randint(1, 2),
            C=draw.randint(1, 4),
            N=draw.randint(1, 60),
            D=draw.choice((1, 6, 16)),
            E=draw.choice((3, 16, 20)),
            W=draw.randint(1, 40),
            attend_self=draw.random() < 0.5,
            own_keys=draw.random() < 0.5,
            scale=draw.choice((0.25, 1.0)),
            seed=seed,
        )
        for seed in range(1, count + 1)
    ]


def membership(case: Lists) -> Tensor:
    """Return the mask `[B, H, C, N]`."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.B, case.H, case.C, case.N)
    dense_BHC1 = torch.tensor([0.0, 0.1, 0.5, 1.0])[torch.randint(4, (*shape[:3], 1), generator=generator)]
    return torch.rand(shape, generator=generator) < (dense_BHC1 if case.dense is None else case.dense)


def inputs(case: Lists, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return queries, keys, values and the gradient of the output."""
    generator = torch.Generator().manual_seed(100 + case.seed)
    sizes = (case.D, case.D, case.E, case.E)
    return [torch.randn(case.B, case.H, case.N, size, generator=generator).to(dtype) for size in sizes]


def run(attend: Callable[..., Tensor], case: Lists, given: list[Tensor], *rest: object) -> dict[str, Tensor]:
    """Return output and every gradient, on the CPU, of `attend(q, k, v, *rest, …)`; shared keys are the same tensor."""
    q, k, v = (x.detach().clone().requires_grad_() for x in given[:3])
    out = attend(q, k if case.own_keys else q, v, *rest, **case.options)
    out.backward(given[3])
    results = {"output": out.detach(), "q": q.grad, "v": v.grad} | ({"k": k.grad} if case.own_keys else {})
    return {name: torch.zeros(0) if x is None else x.cpu() for name, x in results.items()}
