"""Models whose routing heads have keys of their own, one cluster each, or slot distances: streaming and the future."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_decoding import streamed_nats
from tiny_models import gradients, tiny_config, tiny_model, tokens

from rtx.attention.routing import RoutingHeads
from rtx.errors import UserError
from rtx.model.patterns import has_keys

KINDS = list(
    itertools.product(
        ("causal", "topk", "nearest"),
        ("shared", "separate", "projected"),
        ({"positions": "rotary"}, {"positions": "shaw", "routing_slot_distance": True}),
    )
)


@pytest.mark.parametrize(("selection", "keys", "options"), KINDS)
def test_streaming_equals_parallel(selection: str, keys: str, options: dict[str, Any]) -> None:
    model = tiny_model(selection=selection, routing_keys=keys, **options)
    tokens_BN = tokens(length=37)
    with torch.no_grad():
        expected, _ = model.loss(tokens_BN, streaming=True)
    torch.testing.assert_close(streamed_nats(model, tokens_BN), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("selection", "keys", "options"), KINDS)
def test_only_top_w_sees_the_future(selection: str, keys: str, options: dict[str, Any]) -> None:
    model = tiny_model(selection=selection, routing_keys=keys, **options)
    before_BN = tokens(length=44)
    after_BN = torch.cat([before_BN[:, :31], tokens(length=44, seed=1)[:, 31:]], dim=1)
    with torch.no_grad():
        for streaming in (False, True):
            nats, other = (model.loss(x, streaming)[0][:, :31] for x in (before_BN, after_BN))
            moved = float((other / nats - 1).abs().max())
            assert moved > 1e-3 if selection == "topk" and not streaming else moved <= 1e-12


@pytest.mark.parametrize("keys", ["separate", "projected"])
def test_keys_of_their_own_are_learned_and_counted(keys: str) -> None:
    model = tiny_model(routing_keys=keys, routing_heads=4, routing_commitment=0.1, selection="topk").train()
    assert has_keys("routed", tiny_config(routing_keys=keys)) and not has_keys("routed", tiny_config())
    found = gradients(model, tokens())["blocks.2.attention.qkv.weight"]
    assert found.shape == (3 * 16, 16)
    assert (found[16:32] != 0).any(-1).all()
    counted = 2 if keys == "separate" else 1
    for heads in model.modules():
        if isinstance(heads, RoutingHeads):
            assert heads.centroids.count_HC.sum() == counted * 4 * 2 * 24


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match=r"routing\.keys=separate needs routing\.selection=causal, topk or nearest"):
        tiny_config(selection="random", routing_keys="separate")
    with pytest.raises(UserError, match=r"routing\.slot_distance=true needs model\.positions=shaw"):
        tiny_config(routing_slot_distance=True, positions="rotary")
