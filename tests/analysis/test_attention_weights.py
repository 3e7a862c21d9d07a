"""What heads read: the weights of the oracle by the patterns' own rules, clusters and divergences."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rtx.analysis import attention_weights
from rtx.analysis.attention_weights import (
    Heads,
    clusters_of,
    divergences,
    groups_of,
    layer_inputs,
    over_layers,
    summary,
    weight_blocks,
)
from rtx.attention import oracle
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
    weight_PN = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.25, 0.0, 0.25, 0.5]])
    told = summary(weight_PN, torch.tensor([0, 3]))
    assert told == {"reads_share": 0.5, "keys": 3, "distance": 1, "farthest": 3, "self_weight": 0.5}
    assert summary(weight_PN[:1], torch.tensor([0])) == {"reads_share": 0}


def apart(p_NN: Tensor, q_NN: Tensor) -> float:
    """Return (KL(p | m) + KL(q | m)) / 2 with m = (p + q) / 2, a mean over the positions where both read something."""

    def entropy(x: Tensor) -> Tensor:
        return torch.xlogy(x, x).sum(-1)

    both_N = (p_NN.sum(-1) > 0.5) & (q_NN.sum(-1) > 0.5)
    return float(((entropy(p_NN) + entropy(q_NN)) / 2 - entropy((p_NN + q_NN) / 2))[both_N].mean())


@torch.no_grad()
@pytest.mark.parametrize("options", [{"positions": "rotary"}, {"selection": "topk", "positions": "shaw"}], ids=str)
def test_each_draw_is_the_mean_over_positions_where_both_read(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    model, tokens_BN = tiny_model(**options), tokens(batch=2)
    monkeypatch.setattr(attention_weights, "KEYS", 7)
    rows = divergences(model, tokens_BN, draws=3, seed=5)
    kinds = (("local", "local"), ("local", "routed"), ("routed", "routed"))
    assert [(row["layer"], *row["kind"]) for row in rows] == [(0, *kinds[0]), *((n, *k) for n in (1, 2) for k in kinds)]
    inputs = list(layer_inputs(model, tokens_BN))
    for row in rows:
        attention, x_BNE = inputs[row["layer"]]
        for r, nats in enumerate(row["nats_R"]):
            groups = groups_of(attention, x_BNE[r % 2][None])
            first, second = ([w.sum(0) for w in in_every_list(groups[name])] for name in row["kind"])
            same = row["kind"][0] == row["kind"][1]
            pairs = itertools.combinations(first, 2) if same else itertools.product(first, second)
            assert min(abs(apart(p, q) - nats) for p, q in pairs) < 1e-9
    local = next(row for row in over_layers(rows) if row["kind"] == ["local", "local"])
    draws_LR = [row["nats_R"] for row in rows if row["kind"] == ["local", "local"]]
    assert local["mean"] == pytest.approx(np.mean(draws_LR))
    assert local["deviation"] == pytest.approx(np.mean(draws_LR, axis=0).std(ddof=1))
    assert divergences(model, tokens_BN, draws=3, seed=5) == rows
    assert divergences(tiny_model(heads=1, hidden=8, routing_heads=0), tokens()) == [], "one head is no pair"
