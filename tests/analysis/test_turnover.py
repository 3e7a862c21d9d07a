"""Turnover of memberships: by hand, and between two states of one model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rtx.analysis.turnover import read_memberships, turnover
from rtx.attention.routing import RoutingHeads
from rtx.checks import resolve
from rtx.config import Config, DataConfig, ModelConfig, RoutingConfig
from rtx.model.transformer import Transformer

LENGTH, CLUSTERS = 24, 4
TOKENS_1N = torch.randint(0, 11, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def small_model(
    selection: str = "causal", keys: str = "shared", layers: int = 2, heads: int = 2, dropout: float = 0.0
) -> Transformer:
    """A model whose layers have nothing but routing heads."""
    config = Config(
        data=DataConfig(length=LENGTH),
        routing=RoutingConfig(
            selection=selection, keys=keys, heads=heads, layers=layers, window=5, clusters=CLUSTERS if heads else None
        ),
        model=ModelConfig(layers=2, heads=2, hidden=16, window=4, ffn_hidden=16, positions="none", dropout=dropout),
    )
    torch.manual_seed(0)
    return Transformer(resolve(config), 11).train()


def routed(model: Transformer) -> list[RoutingHeads]:
    """The routing heads of each layer."""
    return [heads for heads in model.modules() if isinstance(heads, RoutingHeads)]


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_shares_by_hand() -> None:
    before = [numbers(0, 1, 5, 7), numbers(2, 3), numbers(4), numbers()]
    after = [numbers(1, 5, 6), numbers(2, 3), numbers(5, 6), numbers()]
    # Of 5 memberships 2 stayed; both of 2; none of 3; there was none.
    assert turnover(before, after) == {"routing/turnover": pytest.approx((3 / 5 + 0 + 1 + 0) / 4)}


def test_nothing_to_compare_with() -> None:
    assert turnover([], [numbers(1)]) == {}
    assert turnover([], []) == {}


@pytest.mark.parametrize("keys", ["shared", "separate", "projected"])
@pytest.mark.parametrize("selection", ["causal", "topk", "nearest"])
def test_what_is_read_are_the_memberships(selection: str, keys: str) -> None:
    model = small_model(selection, keys)
    was = [buffer.clone() for buffer in model.buffers()]
    read = read_memberships(model, TOKENS_1N)
    assert len(read) == 4 and model.training
    assert all(torch.equal(a, b) for a, b in zip(was, model.buffers(), strict=True))
    assert all(heads.snapshot is None and not heads._forward_pre_hooks for heads in routed(model))
    # The snapshot of a training pass has the same memberships.
    model.loss(TOKENS_1N)
    heads_of_layers = [(heads.snapshot, h) for heads in routed(model) for h in range(2)]
    for numbers_X, (snapshot, h) in zip(read, heads_of_layers, strict=True):
        assert snapshot is not None
        own = [snapshot.members, *([snapshot.key_members] if keys == "separate" else [])]
        expected = [
            (which * CLUSTERS + c) * LENGTH + i
            for which, members in enumerate(own)
            for c, member_N in enumerate(members.mask().unflatten(0, (2, CLUSTERS))[h].tolist())
            for i, is_member in enumerate(member_N)
            if is_member
        ]
        assert numbers_X.tolist() == expected
    assert turnover(read, read) == {"routing/turnover": 0.0}


def test_renamed_clusters_are_other_clusters_and_turned_queries_are_not() -> None:
    model = small_model("nearest", layers=1)
    (heads,) = routed(model)
    before = read_memberships(model, TOKENS_1N)
    heads.centroids.centroid_HCD.mul_(3)  # the nearest cluster is a matter of direction
    assert turnover(before, read_memberships(model, TOKENS_1N)) == {"routing/turnover": 0.0}
    heads.centroids.centroid_HCD.copy_(heads.centroids.centroid_HCD.roll(1, dims=1))
    assert turnover(before, read_memberships(model, TOKENS_1N)) == {"routing/turnover": 1.0}


def test_nothing_is_drawn_while_a_sequence_is_read() -> None:
    model = small_model(dropout=0.5)
    before, state = read_memberships(model, TOKENS_1N), torch.get_rng_state()
    assert turnover(before, read_memberships(model, TOKENS_1N)) == {"routing/turnover": 0.0}
    assert torch.equal(state, torch.get_rng_state())


def test_without_routing_heads_the_model_is_not_run() -> None:
    model = small_model(layers=0, heads=0)
    model.loss = None  # type: ignore[method-assign,assignment]
    assert read_memberships(model, TOKENS_1N) == []
