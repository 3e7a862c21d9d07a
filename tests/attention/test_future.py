"""What stands behind a position never moves its output, but for the patterns that are declared to see the future."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import KINDS, SEES_FUTURE, Case, make, run, tensors

CASE = Case(B=2, H=2, N=40, D=4, C=4, W=6, seed=3)


@torch.no_grad()
def moved(kind: str, case: Case, prefix: bool) -> float:
    """Return how far outputs before some position move when everything behind it changes."""
    pattern = make(kind, case)
    most = 0.0
    for first in (1, 7, 20, 33):
        here = tensors(pattern, case)
        before = run(pattern, here, prefix=prefix)[:, :, :first]
        changed: dict[str, Any] = {n: x.clone() if torch.is_tensor(x) else x for n, x in here.items()}
        for name in ("q", "k", "v"):
            if changed[name] is not None:
                changed[name][:, :, first:] = torch.randn_like(changed[name][:, :, first:])
        after = run(pattern, changed, prefix=prefix)[:, :, :first]
        most = max(most, float((after - before).abs().max()))
    return most


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attend_self", [True, False])
def test_the_prefix_decides_alone(kind: str, attend_self: bool) -> None:
    case = CASE.with_(attend_self=attend_self, distances=5, rotary=True)
    # Blocks of other sizes may add up in another order.
    assert moved(kind, case, prefix=True) < 1e-12
    if kind not in SEES_FUTURE:
        assert make(kind, case).strictly_causal
        assert moved(kind, case, prefix=False) < 1e-12


@pytest.mark.parametrize("kind", SEES_FUTURE)
def test_what_sees_the_future_says_so(kind: str) -> None:
    assert not make(kind, CASE).strictly_causal
    assert moved(kind, CASE, prefix=False) > 1e-3
