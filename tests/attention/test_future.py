"""Changing the future moves nothing: exactly in the oracle, to 1e-12 on the fast paths. It does move top-w."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracle_cases import PLAIN, Case, Leaves, leaves
from routing_cases import How
from routing_cases import fast as fast_routing
from routing_cases import truth as true_routing
from test_full import fast as fast_full
from test_full import truth as true_full
from test_local import fast as fast_local
from test_local import truth as true_local
from test_random import fast as fast_random
from test_random import truth as true_random

CASE = PLAIN._replace(N=45, W=6, C=4, attend_self=False)
PREFIXES = (1, 2, 5, 6, 7, 31, 32, 33, 44)
Pattern = Callable[[Case, Leaves], torch.Tensor]


ROUTING = {
    f"routing {how.selection} {how.keys}{' streaming' * how.streaming}": how
    for keys in ("shared", "separate", "projected")
    for how in (How("causal", keys, level="half"), How("nearest", keys), How("topk", keys, streaming=True))
}
"""Routing that must not see the future; thresholds that half the positions pass."""

FAST: dict[str, Pattern] = {
    "full": fast_full,
    "local": fast_local,
    "random": partial(fast_random, length=45),
    **{name: partial(fast_routing, how=how) for name, how in ROUTING.items()},
}
TRUE: dict[str, Pattern] = {
    "full": true_full,
    "local": true_local,
    "random": partial(true_random, length=45),
    **{name: partial(true_routing, how=how) for name, how in ROUTING.items()},
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


@pytest.mark.parametrize("keys", ["shared", "separate", "projected"])
@pytest.mark.parametrize("route", [fast_routing, true_routing])
def test_the_future_moves_top_w(route: Callable[..., torch.Tensor], keys: str) -> None:
    inputs = leaves(CASE)
    before = route(CASE, inputs, How(keys=keys))[:, :, :31]
    after = route(CASE, with_another_future(inputs, 31), How(keys=keys))[:, :, :31]
    assert (after - before).abs().max() > 0.1
