"""What heads read: the weights of the oracle by the patterns' own rules, clusters, divergences and telemetry."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rtx.analysis import attention_weights
from rtx.analysis.attention_weights import Heads, clusters_of, groups_of, layer_inputs, summary, weight_blocks
from rtx.analysis.divergence import divergences, drawn_pairs, over_layers
from rtx.attention import oracle
from rtx.model.block import Block
from rtx.model.transformer import Transformer
from tests.model.tiny_models import tiny_model, tokens

AT = torch.tensor([0, 1, 7, 8, 20, 23])
CLUSTERED: list[dict[str, Any]] = [
    {"selection": "topk"},
    {"selection": "causal"},
    {"selection": "causal", "routing_attend_self": False, "positions": "shaw"},
    {"selection": "nearest"},
    {"selection": "random"},
    {"selection": "random", "routing_attend_self": False, "positions": "shaw"},
    {"selection": "topk", "routing_keys": "separate"},
    {"selection": "topk", "routing_keys": "separate", "routing_attend_self": False, "routing_key_shift": 1},
    {"selection": "causal", "routing_keys": "separate", "positions": "shaw"},
    {"selection": "topk", "routing_keys": "projected", "norm": "post"},
]
OTHERS: list[dict[str, Any]] = [
    *(
        {"selection": selection, "routing_keys": "separate", "routing_block": 3, "routing_attend_self": attend_self}
        for selection in ("exact", "blocks", "blocks_random", "indexer")
        for attend_self in (True, False)
    ),
    {"base": "local+full"},
    {"base": "strided+fixed", "positions": "shaw"},
    {"base": "adaptive_span"},
    {"base": "lsh"},
    {"base": "lsh", "positions": "shaw", "hash_rounds": 1, "lsh": "reformer"},
]


def in_every_list(heads: Heads) -> list[Tensor]:
    """Return the oracle's weights of each head in each of its lists, `[P, N, N]`."""
    pattern, given, _, relative = heads
    terms, found = pattern.terms(given.q_BHND.shape[-1], relative), []
    for head in range(given.q_BHND.shape[1]):
        q_ND, k_ND = given.turned_q_BHND[0, head], given.turned_k_BHND[0, head]
        rule = pattern.rule(given, head, False)
        found.append(oracle.dense(q_ND, k_ND, k_ND, rule, terms, head, pattern.attend_self)[1])
    return found


@torch.no_grad()
@pytest.mark.parametrize("options", [*CLUSTERED, *OTHERS], ids=str)
def test_weights_are_those_of_the_oracle(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(attention_weights, "KEYS", 10)
    attention, x_1NE = list(layer_inputs(tiny_model(**options), tokens(batch=1)))[2]
    for group in groups_of(attention, x_1NE).values():
        blocks, expected = list(weight_blocks(group, AT)), in_every_list(group)
        assert [block.shape[-1] for block in blocks] == [10, 10, 4]
        for head, weight_PN in enumerate(torch.cat(blocks, dim=-1)):
            torch.testing.assert_close(weight_PN, expected[head].sum(0)[AT], rtol=0, atol=1e-12)
            cluster_PN = clusters_of(group, head, AT)
            if cluster_PN is None:
                continue
            first_PN, read_PN = (expected[head][:, AT] > 0).int().argmax(0), weight_PN > 0
            assert bool((cluster_PN[read_PN] >= 0).all())
            same_PN = cluster_PN == first_PN if options.get("selection") == "nearest" else cluster_PN <= first_PN
            assert bool(same_PN[read_PN].all()), "the first cluster that both belong to, whether or not it is read in"
    clustered = {name: clusters_of(group, 0, AT) is not None for name, group in groups_of(attention, x_1NE).items()}
    assert clustered == {name: name == "routed" and options in CLUSTERED + OTHERS[8:] for name in clustered}


def test_what_a_head_reads_on_average() -> None:
    at_P = torch.tensor([0, 3])
    weight_PN = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.25, 0.0, 0.25, 0.5]])
    told = summary(weight_PN, at_P)
    assert told == {"reads_share": 0.5, "keys": 3, "distance": 1, "farthest": 3, "self_weight": 0.5}
    assert summary(weight_PN[:1], at_P[:1])["keys"] is None


def by_definition(p_NM: Tensor, q_NM: Tensor) -> Tensor:
    """Return (KL(p | m) + KL(q | m)) / 2 of each row, with m = (p + q) / 2."""

    def entropy(x: Tensor) -> Tensor:
        return torch.xlogy(x, x).sum(-1)

    return (entropy(p_NM) + entropy(q_NM)) / 2 - entropy((p_NM + q_NM) / 2)


@torch.no_grad()
def whole_weights(model: Transformer, layer: int, tokens_BN: Tensor) -> list[dict[tuple[str, int], Tensor]]:
    """Return for each sequence the weights `[N, N]` of every head of a layer, by the oracle."""
    attention, x_BNE = list(layer_inputs(model, tokens_BN))[layer]
    return [
        {
            (name, head): weight_PNN.sum(0)
            for name, group in groups_of(attention, x_1NE).items()
            for head, weight_PNN in enumerate(in_every_list(group))
        }
        for x_1NE in x_BNE.split(1)
    ]


@pytest.mark.parametrize("options", [{"positions": "rotary"}, {"selection": "topk", "positions": "shaw"}], ids=str)
def test_each_draw_is_the_mean_over_positions_where_both_read(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    model, tokens_BN = tiny_model(**options), tokens(batch=2)
    monkeypatch.setattr(attention_weights, "KEYS", 7)
    rows = divergences(model, tokens_BN, draws=3, seed=5)
    found = {(row["layer"], *row["kind"]): row for row in rows}
    kinds = (("local", "local"), ("local", "routed"), ("routed", "routed"))
    assert set(found) == {(0, "local", "local")} | {(layer, *kind) for layer in (1, 2) for kind in kinds}
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        weights = whole_weights(model, layer, tokens_BN)
        for kind, pairs in drawn_pairs(block.attention, 3, np.random.default_rng([5, layer])).items():
            for r, (a, b) in enumerate(pairs):
                p_NN, q_NN = weights[r % 2][a], weights[r % 2][b]
                both_N = (p_NN.sum(-1) > 0.5) & (q_NN.sum(-1) > 0.5)
                expected = float(by_definition(p_NN, q_NN)[both_N].mean())
                assert found[(layer, *kind)]["nats_R"][r] == pytest.approx(expected, abs=1e-9)
    assert all(0 <= nats <= math.log(2) + 1e-12 for row in rows for nats in row["nats_R"])
    local = next(row for row in over_layers(rows) if row["kind"] == ["local", "local"])
    draws_LR = [found[layer, "local", "local"]["nats_R"] for layer in range(3)]
    assert local["mean"] == pytest.approx(np.mean(draws_LR))
    assert local["deviation"] == pytest.approx(np.mean(draws_LR, axis=0).std(ddof=1))


def test_a_layer_of_one_head_has_no_pair() -> None:
    assert divergences(tiny_model(heads=1, hidden=8, routing_heads=0), tokens()) == []
