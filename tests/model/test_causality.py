"""Changing later units changes nothing earlier, for every model but those that select over the sequence."""

import pytest
import torch
from tiny_models import BY_QUERY, KINDS, OTHERS, POSITIONS, Kind, each_kind, tiny_model, tokens

PREFIXES = (1, 2, 6, 31, 32, 42)
HASHED: Kind = {"base": "lsh", "hash_rounds": 2, "hash_buckets": 4}
SEE_THE_FUTURE = [kind for kind in KINDS if kind.get("selection") == "topk" and "routing_keys" in kind]
SEE_THE_FUTURE += [*({"selection": "topk", "positions": p} for p in POSITIONS), HASHED | {"lsh": "reformer"}]


def moves(kind: Kind, prefix: bool = False) -> list[float]:
    """The largest relative change of what predicts a prefix and the unit behind it when all others change."""
    model = tiny_model(length=44, **kind)
    before_BN, other_BN = tokens(length=44), tokens(length=44, seed=1)
    changes = []
    with torch.no_grad():
        before = model(before_BN, prefix)[0]
        for units in PREFIXES:
            after = model(torch.cat([before_BN[:, :units], other_BN[:, units:]], dim=1), prefix)[0]
            assert not torch.equal(before, after)
            changes.append(float((after - before)[:, : units + 1].abs().max() / before.abs().max()))
    return changes


@each_kind([*(kind for kind in KINDS if kind["selection"] != "topk"), HASHED | {"lsh": "causal"}])
def test_the_future_moves_nothing(kind: Kind) -> None:
    assert max(moves(kind)) <= 1e-12


@each_kind(SEE_THE_FUTURE)
def test_top_w_and_published_hashing_see_the_future_unless_they_stream(kind: Kind) -> None:
    assert max(moves(kind)) > 1e-3
    assert max(moves(kind, prefix=True)) <= 1e-12


@pytest.mark.parametrize("selection", ["causal", "random", *BY_QUERY])
def test_it_holds_in_training_too(selection: str) -> None:
    model = tiny_model(length=44, selection=selection).train()
    before_BN = tokens(length=44)
    after_BN = torch.cat([before_BN[:, :31], tokens(length=44, seed=1)[:, 31:]], dim=1)
    before, after = (model(x)[0][:, :32] for x in (before_BN, after_BN))
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


@each_kind([{"selection": "causal"}, *(kind for kind in OTHERS if kind["selection"] != "topk")])
def test_a_gradient_reaches_only_earlier_units(kind: Kind) -> None:
    model = tiny_model(**kind)
    inputs_B1NE = model.embedding(tokens(1)).detach().requires_grad_()
    x_BNE = inputs_B1NE
    for block in model.blocks:
        x_BNE, _ = block(x_BNE)
    # The first position of a block of 2, 3 or 4: what stands behind it in the block must not reach it.
    x_BNE[0, 12].square().sum().backward()
    assert inputs_B1NE.grad is not None
    reach_N = inputs_B1NE.grad[0].abs().amax(-1)
    assert (reach_N[13:] == 0).all() and reach_N[12] > 0
