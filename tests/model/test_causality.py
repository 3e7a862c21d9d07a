"""Changing later units changes no earlier likelihood, for every model but those that select over the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import KINDS, POSITIONS, tiny_model, tokens

PREFIXES = (1, 2, 5, 6, 31, 32, 33, 43)


def moves(streaming: bool = False, **config: Any) -> list[float]:
    """The largest relative change of the nats of each prefix of units when all later units change."""
    model = tiny_model(length=44, **config)
    before_BN, other_BN = tokens(length=44), tokens(length=44, seed=1)
    changes = []
    with torch.no_grad():
        before = model.loss(before_BN, streaming)[0]
        for prefix in PREFIXES:
            after = model.loss(torch.cat([before_BN[:, :prefix], other_BN[:, prefix:]], dim=1), streaming)[0]
            assert not torch.equal(before, after)
            changes.append(float((after / before - 1)[:, :prefix].abs().max()))
    return changes


@pytest.mark.parametrize(("selection", "positions", "norm", "base"), [kind for kind in KINDS if kind[0] != "topk"])
def test_the_future_moves_nothing(selection: str, positions: str, norm: str, base: str) -> None:
    assert max(moves(selection=selection, positions=positions, norm=norm, base=base)) <= 1e-12


@pytest.mark.parametrize("positions", POSITIONS)
def test_top_w_sees_the_future_unless_it_streams(positions: str) -> None:
    assert max(moves(selection="topk", positions=positions)) > 1e-3
    assert max(moves(True, selection="topk", positions=positions)) <= 1e-12


def test_published_hashing_sees_the_future_unless_it_streams() -> None:
    kind: dict[str, Any] = {"base": "lsh", "lsh": "reformer", "hash_rounds": 2, "hash_buckets": 4}
    assert max(moves(**kind)) > 1e-3
    assert max(moves(True, **kind)) <= 1e-12
    kind["lsh"] = "causal"
    assert max(moves(**kind)) <= 1e-12


@pytest.mark.parametrize("selection", ["causal", "random"])
def test_it_holds_in_training_too(selection: str) -> None:
    model = tiny_model(length=44, selection=selection).train()
    before_BN = tokens(length=44)
    after_BN = torch.cat([before_BN[:, :31], tokens(length=44, seed=1)[:, 31:]], dim=1)
    nats, other = (model.loss(x)[0][:, :31] for x in (before_BN, after_BN))
    torch.testing.assert_close(nats, other, rtol=1e-12, atol=0)


def test_a_gradient_reaches_only_earlier_units() -> None:
    model = tiny_model(selection="causal")
    inputs_B1NE = model.embedding(tokens(1)).detach().requires_grad_()
    x_BNE = inputs_B1NE
    for block in model.blocks:
        x_BNE, _ = block(x_BNE)
    x_BNE[0, 11].square().sum().backward()
    assert inputs_B1NE.grad is not None
    reach_N = inputs_B1NE.grad[0].abs().amax(-1)
    assert (reach_N[12:] == 0).all() and reach_N[11] > 0
