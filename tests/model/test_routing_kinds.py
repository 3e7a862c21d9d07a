"""Models whose routing heads have keys of their own, or one cluster each: streaming and the future."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_decoding import streams_as_it_scores
from tiny_models import TIED, gradients, tiny_config, tiny_model, tokens

from rtx.attention.centroids import all_centroids
from rtx.errors import UserError
from rtx.model.multihead import MultiheadAttention

KINDS = list(itertools.product(("causal", "topk", "nearest"), ("shared", "separate", "projected"), ("rotary", "shaw")))


@pytest.mark.parametrize(("selection", "keys", "positions"), KINDS)
def test_streaming_equals_parallel(selection: str, keys: str, positions: str) -> None:
    streams_as_it_scores(tiny_model(selection=selection, routing_keys=keys, positions=positions), tokens(length=37))


@pytest.mark.parametrize(("selection", "keys", "positions"), KINDS)
def test_only_top_w_sees_the_future(selection: str, keys: str, positions: str) -> None:
    model = tiny_model(selection=selection, routing_keys=keys, positions=positions)
    before_BN = tokens(length=44)
    after_BN = torch.cat([before_BN[:, :31], tokens(length=44, seed=1)[:, 31:]], dim=1)
    with torch.no_grad():
        for prefix in (False, True):
            before, after = (model(x, prefix)[0][:, :32] for x in (before_BN, after_BN))
            moved = float((after - before).abs().max())
            assert moved > 1e-3 if selection == "topk" and not prefix else moved <= 1e-12


@pytest.mark.parametrize("keys", ["separate", "projected"])
def test_keys_of_their_own_are_learned_and_counted(keys: str) -> None:
    options: dict[str, Any] = {"routing_heads": 4, "routing_commitment": 0.1, "routing_update": "nearest"}
    model = tiny_model(selection="topk", routing_keys=keys, **options).train()
    found = gradients(model, tokens())["blocks.2.attention.qkv.weight"]
    assert found.shape == (3 * 16, 16)
    assert (found[16:32] != 0).any(-1).all()
    counted = 2 if keys == "separate" else 1
    assert [int(store.count_HC.sum()) for store in all_centroids(model)] == 2 * [counted * 4 * 2 * 24]


def test_tied_keys_are_the_queries_before_them_at_any_distance() -> None:
    model = tiny_model(selection="exact", positions="rotary", **TIED)
    attention: MultiheadAttention = model.blocks[2].attention  # type: ignore[assignment]
    assert attention.qkv.out_features == 16 + 8 + 16, "queries, keys of local heads alone, values"
    x_BNE = torch.randn(2, 9, 16, dtype=torch.float64)
    q_BHND, k_BHND, _ = attention.split(x_BNE)[1]
    assert k_BHND is not None and torch.equal(k_BHND[:, :, 1:], q_BHND[:, :, :-1])
    local, routed = attention.rotations()
    assert local is not None and routed is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selection": "random", "routing_keys": "projected"}, r"keys=projected needs .*selection=causal, topk or"),
        ({"selection": "exact", "routing_keys": "shared"}, r"selection=exact needs routing\.keys=separate or tied"),
        ({"routing_key_shift": 1}, r"key_shift .* are for .* projected, not for shared"),
        ({"selection": "blocks", "routing_block": 7}, r"block=7 must be at most routing\.window=6"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"routing\." + message):
        tiny_config(**options)
