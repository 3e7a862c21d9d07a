"""Shapes to try, and the comparison of a fast path with the oracle: outputs and every input gradient, in float64.

Shapes: B sequences, H heads, C clusters, N positions, D head size, M distances.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.weights import Distances

Leaves = dict[str, Tensor]


class Case(NamedTuple):
    """One shape with its options; `distances` is the number of Shaw rows, 0 for none."""

    B: int
    H: int
    N: int
    D: int
    C: int
    W: int
    distances: int
    attend_self: bool
    rotary: bool
    scaled: bool
    seed: int

    @property
    def scale(self) -> float:
        """The factor on the logits: 1 / sqrt(D), or 1 as Algorithm 1 prints it."""
        return self.D**-0.5 if self.scaled else 1.0


PLAIN = Case(B=1, H=1, N=13, D=4, C=3, W=5, distances=0, attend_self=True, rotary=False, scaled=True, seed=0)
EDGES = [
    PLAIN,
    PLAIN._replace(N=1),
    PLAIN._replace(N=1, W=1, C=1, distances=1, attend_self=False),
    PLAIN._replace(N=7, W=1),
    PLAIN._replace(N=7, W=1, attend_self=False, distances=3),
    PLAIN._replace(N=9, W=9, C=1),
    PLAIN._replace(N=6, W=11, distances=2, rotary=True),
    PLAIN._replace(N=24, W=8, B=2, H=2),
    PLAIN._replace(N=25, W=8, B=2, H=3, distances=40, scaled=False),
    PLAIN._replace(N=37, W=4, C=1, attend_self=False, rotary=True),
]


def cases(count: int = 15) -> list[Case]:
    """Return the edge cases and `count` random ones, the same at every call."""
    draw = random.Random(7)
    return EDGES + [
        Case(
            B=draw.randint(1, 2),
            H=draw.randint(1, 2),
            N=draw.randint(1, 26),
            D=draw.choice((2, 4, 6)),
            C=draw.randint(1, 4),
            W=draw.randint(1, 12),
            distances=draw.choice((0, 1, 5, 30)),
            attend_self=draw.random() < 0.6,
            rotary=draw.random() < 0.5,
            scaled=draw.random() < 0.5,
            seed=seed,
        )
        for seed in range(1, count + 1)
    ]


def leaves(case: Case) -> Leaves:
    """Return random float64 inputs `q`, `k`, `v` and, where the case has distances, the tables `rk` and `rv`."""
    generator = torch.Generator().manual_seed(case.seed)
    shapes = dict.fromkeys("qkv", (case.B, case.H, case.N, case.D))
    if case.distances:
        shapes |= dict.fromkeys(("rk", "rv"), (case.distances, case.D))
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def qkv(inputs: Leaves) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values."""
    return inputs["q"], inputs["k"], inputs["v"]


def tables(inputs: Leaves) -> Distances | None:
    """Return Shaw's tables where the inputs hold them."""
    return Distances(inputs["rk"], inputs["rv"]) if "rk" in inputs else None


def assert_same(fast: Callable[[Leaves], Tensor], truth: Callable[[Leaves], Tensor], inputs: Leaves) -> None:
    """Compare outputs and the gradients of every input under a random linear loss."""
    results = []
    for function in (fast, truth):
        copies = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        out = function(copies)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        total = (out * weight).sum()
        if total.requires_grad:
            total.backward()
        gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in copies.items()}
        results.append({"output": out.detach(), **gradients})
    for name, expected in results[1].items():
        torch.testing.assert_close(results[0][name], expected, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def plain_rotate(x_BHND: Tensor, first: int = 0) -> Tensor:
    """Rotary positions as multiplication of complex numbers: unit f turns with unit f + D / 2."""
    N, D = x_BHND.shape[-2:]
    rows = []
    for i in range(N):
        turn_F = torch.tensor([(first + i) * 10_000.0 ** (-2 * f / D) for f in range(D // 2)], dtype=x_BHND.dtype)
        pair_BHF = torch.complex(x_BHND[..., i, : D // 2], x_BHND[..., i, D // 2 :])
        turned_BHF = pair_BHF * torch.polar(torch.ones_like(turn_F), turn_F)
        rows.append(torch.cat([turned_BHF.real, turned_BHF.imag], dim=-1))
    return torch.stack(rows, dim=-2)
