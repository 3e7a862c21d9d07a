"""Every pattern against the oracle on shapes that hypothesis draws: outputs and every gradient, in float64."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, KINDS, SEES_FUTURE, Case, gradients, leaves, make, run, tensors
from hypothesis import HealthCheck, given, settings

from rtx.attention import oracle

EVERY = [*((kind, False) for kind in KINDS if kind != "compressed"), *((kind, True) for kind in SEES_FUTURE)]


@pytest.mark.parametrize(("kind", "prefix"), EVERY)
@given(case=CASES)
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_outputs_and_gradients_are_the_oracles(kind: str, prefix: bool, case: Case) -> None:
    pattern = make(kind, case)
    here = tensors(pattern, case)
    named = leaves(pattern, here)
    ours = run(pattern, here, prefix=prefix)
    theirs = run(lambda *given, **more: oracle.attend(pattern, *given, **more), here, prefix=prefix)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    mine, its = gradients(ours, named), gradients(theirs, named)
    for name in named:
        torch.testing.assert_close(mine[name], its[name], rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
