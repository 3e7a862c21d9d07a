"""Changing the future moves nothing: exactly in the oracle, to 1e-12 on the fast paths. It does move top-w."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracle_cases import PLAIN, Case, Leaves, leaves
from routing_cases import fast_routing, thresholds, true_routing
from test_full import fast as fast_full
from test_full import truth as true_full
from test_local import fast as fast_local
from test_local import truth as true_local
from test_random import fast as fast_random
from test_random import truth as true_random

CASE = PLAIN._replace(N=45, W=6, C=4, attend_self=False)
PREFIXES = (1, 2, 5, 6, 7, 31, 32, 33, 44)
Pattern = Callable[[Case, Leaves], torch.Tensor]


def causal(case: Case, inputs: Leaves) -> torch.Tensor:
    """Routing by thresholds that half the positions pass."""
    return fast_routing(case, inputs, thresholds(case, "mixed") * 0)


def true_causal(case: Case, inputs: Leaves) -> torch.Tensor:
    """The oracle of `causal`."""
    return true_routing(case, inputs, thresholds(case, "mixed") * 0)


FAST: dict[str, Pattern] = {
    "full": fast_full,
    "local": fast_local,
    "random": partial(fast_random, length=45),
    "routing causal": causal,
    "routing topk streaming": partial(fast_routing, threshold_HC=None, streaming=True),
}
TRUE: dict[str, Pattern] = {
    "full": true_full,
    "local": true_local,
    "random": partial(true_random, length=45),
    "routing causal": true_causal,
    "routing topk streaming": partial(true_routing, threshold_HC=None, streaming=True),
}


def with_another_future(inputs: Leaves, prefix: int) -> Leaves:
    """Return the inputs with other queries, keys and values from position `prefix` on."""
    other = leaves(CASE._replace(seed=99))
    changed = {n: torch.cat([inputs[n][:, :, :prefix], 3 * other[n][:, :, prefix:]], dim=2) for n in "qkv"}
    return {**inputs, **changed}


@pytest.mark.parametrize("distances", [0, 9])
@pytest.mark.parametrize("pattern", FAST)
def test_the_future_moves_nothing(pattern: str, distances: int) -> None:
    case = CASE._replace(distances=distances, rotary=distances == 0)
    inputs = leaves(case)
    before = FAST[pattern](case, inputs)
    for prefix in PREFIXES:
        after = FAST[pattern](case, with_another_future(inputs, prefix))
        torch.testing.assert_close(after[:, :, :prefix], before[:, :, :prefix], rtol=1e-12, atol=1e-14)
        assert prefix > 33 or not torch.equal(after, before)


@pytest.mark.parametrize("pattern", TRUE)
def test_the_future_moves_nothing_in_the_oracle(pattern: str) -> None:
    inputs = leaves(CASE)
    before = TRUE[pattern](CASE, inputs)
    for prefix in (1, 2, 31, 32, 33):
        after = TRUE[pattern](CASE, with_another_future(inputs, prefix))
        assert torch.equal(after[:, :, :prefix], before[:, :, :prefix])


@pytest.mark.parametrize("route", [fast_routing, true_routing])
def test_the_future_moves_top_w(route: Callable[..., torch.Tensor]) -> None:
    inputs = leaves(CASE)
    before = route(CASE, inputs, None)[:, :, :31]
    after = route(CASE, with_another_future(inputs, 31), None)[:, :, :31]
    assert (after - before).abs().max() > 0.1
