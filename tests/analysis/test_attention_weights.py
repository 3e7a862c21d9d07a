"""What heads read: the weights of the oracle by the patterns' own rules, divergences, telemetry."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rtx.analysis import attention_weights as weights
from rtx.attention import oracle
from rtx.attention.patterns import AdaptiveSpan
from rtx.attention.routing import Routing
from rtx.model.transformer import Transformer
from tests.model.tiny_models import OTHERS, OWN_KEYS, Kind, each_kind, tiny_model, tokens

AT = torch.tensor([0, 1, 7, 8, 20, 23])
LENGTH, WINDOW, CLUSTERS = 24, 5, 4
OPTIONS: list[Kind] = [
    *(kind for kind in OTHERS + OWN_KEYS if "routing_compressed" not in kind),
    {"selection": "topk", "routing_keys": "separate", "routing_attend_self": False, "routing_key_shift": 1},
    {"selection": "random", "routing_attend_self": False, "positions": "shaw"},
    {"selection": "topk", "base": "local+full"},
    {"base": "strided+fixed", "positions": "shaw", "norm": "post"},
    {"base": "adaptive_span"},
    {"base": "lsh"},
    {"base": "lsh", "positions": "shaw", "hash_rounds": 1, "lsh": "reformer"},
]


def oracle_weights(heads: weights.Heads) -> list[Tensor]:
    pattern, given, _, relative = heads
    terms, found = pattern.terms(given.q_BHND.shape[-1], relative), []
    for head in range(given.q_BHND.shape[1]):
        q_ND, k_ND = given.turned_q_BHND[0, head], given.turned_k_BHND[0, head]
        rule = pattern.rule(given, head, False)
        found.append(oracle.dense(q_ND, k_ND, k_ND, rule, terms, head, pattern.attend_self)[1].sum(0))
    return found


@torch.no_grad()
@each_kind(OPTIONS)
def test_weights_are_those_of_the_oracle(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    monkeypatch.setattr(weights, "KEYS", 10)
    attention, x_1NE = list(weights.layer_inputs(tiny_model(**kind), tokens(batch=1)))[2]
    for group in weights.groups_of(attention, x_1NE).values():
        blocks, expected = list(weights.weight_blocks(group, AT)), oracle_weights(group)
        assert [block.shape[-1] for block in blocks] == [10, 10, 4]
        for head, weight_PN in enumerate(torch.cat(blocks, dim=-1)):
            torch.testing.assert_close(weight_PN, expected[head][AT], rtol=0, atol=1e-12)


def test_what_a_head_reads_on_average() -> None:
    weight_PN = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.25, 0.0, 0.25, 0.5]])
    told = weights.summary(weight_PN, torch.tensor([0, 3]))
    assert told == {"reads_share": 0.5, "keys": 3, "distance": 1, "farthest": 3, "self_weight": 0.5}
    assert weights.summary(weight_PN[:1], torch.tensor([0])) == {"reads_share": 0}


def apart(p_NN: Tensor, q_NN: Tensor) -> float:
    """Return (KL(p | m) + KL(q | m)) / 2 with m = (p + q) / 2, a mean over the positions where both read something."""

    def entropy(x: Tensor) -> Tensor:
        return torch.xlogy(x, x).sum(-1)

    both_N = (p_NN.sum(-1) > 0.5) & (q_NN.sum(-1) > 0.5)
    return float(((entropy(p_NN) + entropy(q_NN)) / 2 - entropy((p_NN + q_NN) / 2))[both_N].mean())


@torch.no_grad()
@pytest.mark.parametrize("options", [{"positions": "rotary"}, {"selection": "topk", "positions": "shaw"}], ids=str)
def test_each_draw_is_a_mean_where_both_read(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    model, tokens_BN = tiny_model(**options), tokens(batch=2)
    monkeypatch.setattr(weights, "KEYS", 7)
    rows = weights.divergences(model, tokens_BN, draws=3, seed=5)
    kinds = (("local", "local"), ("local", "routed"), ("routed", "routed"))
    assert [(row["layer"], *row["kind"]) for row in rows] == [(0, *kinds[0]), *((n, *k) for n in (1, 2) for k in kinds)]
    inputs = list(weights.layer_inputs(model, tokens_BN))
    for row in rows:
        attention, x_BNE = inputs[row["layer"]]
        for r, nats in enumerate(row["nats_R"]):
            groups = weights.groups_of(attention, x_BNE[r % 2][None])
            first, second = (oracle_weights(groups[name]) for name in row["kind"])
            same = row["kind"][0] == row["kind"][1]
            pairs = itertools.combinations(first, 2) if same else itertools.product(first, second)
            assert min(abs(apart(p, q) - nats) for p, q in pairs) < 1e-9
    local = next(row for row in weights.over_layers(rows) if row["kind"] == ["local", "local"])
    draws_LR = [row["nats_R"] for row in rows if row["kind"] == ["local", "local"]]
    assert local["mean"] == pytest.approx(np.mean(draws_LR))
    assert local["deviation"] == pytest.approx(np.mean(draws_LR, axis=0).std(ddof=1))
    assert weights.divergences(model, tokens_BN, draws=3, seed=5) == rows
    assert weights.divergences(tiny_model(heads=1, hidden=8, routing_heads=0), tokens()) == [], "one head is no pair"


def trained_heads(**options: object) -> tuple[Transformer, Routing]:
    """A model with one routing layer that has seen a training batch, and that layer's heads."""
    sizes = {"layers": 1, "heads": 2, "routing_layers": 1, "routing_window": WINDOW, "positions": "none"}
    model = tiny_model(**sizes, **options).train()  # type: ignore[arg-type]
    model.loss(torch.randint(0, 11, (3, LENGTH), generator=torch.Generator().manual_seed(1)))
    return model, next(heads for heads in model.modules() if isinstance(heads, Routing))


@pytest.mark.parametrize("keys", ["shared", "separate", "projected"])
@pytest.mark.parametrize("selection", ["causal", "topk", "nearest"])
@pytest.mark.parametrize("attend_self", [True, False])
def test_figures_are_those_of_plain_loops(selection: str, attend_self: bool, keys: str) -> None:
    model, heads = trained_heads(selection=selection, routing_attend_self=attend_self, routing_keys=keys)
    told = weights.read_telemetry(model)
    assert heads.snapshot is not None
    lists, q_HND, k_HND, _ = heads.snapshot
    queries, of_keys = (
        [list_M.tolist() for list_M in x.row_M.split(x.count_L.tolist())] for x in (lists[0], lists[-1])
    )
    times = [sum(row in members for members in queries) for row in range(2 * LENGTH)]
    counts = [len(members) for members in of_keys]
    assert len(counts) == 2 * CLUSTERS and LENGTH <= weights.PROBES, "every position is probed"
    weight_RN = torch.zeros(2 * LENGTH, LENGTH, dtype=torch.float64)
    for query_rows, key_rows in zip(queries, of_keys, strict=True):
        for i in query_rows:
            read = [j for j in key_rows if j <= i][-WINDOW:]
            read = read if attend_self or len(read) == 1 else [j for j in read if j != i]
            if read:
                q_D, k_KD = q_HND.flatten(0, 1)[i], k_HND.flatten(0, 1)[read]
                weight_K = (heads.terms(q_HND.shape[-1], None).scale * k_KD @ q_D).softmax(0)
                weight_RN[i, [j % LENGTH for j in read]] += weight_K
    own_R = weight_RN.sum(1).nonzero()[:, 0]
    weight_RN = (weight_RN / weight_RN.sum(1, keepdim=True))[own_R]
    distance_RN = own_R[:, None] % LENGTH - torch.arange(LENGTH)
    expected = {
        "in_none": times.count(0) / len(times),
        "in_one": times.count(1) / len(times),
        "in_many": sum(t > 1 for t in times) / len(times),
        "empty_share": counts.count(0) / len(counts),
        "member_share": sum(counts) / len(counts) / WINDOW,
        "member_most": max(counts) / WINDOW,
        "self_weight": float(weight_RN[distance_RN == 0].mean()),
        "distance": float((weight_RN * distance_RN).sum(1).mean()),
    }
    assert told == pytest.approx({f"routing/{name}": value for name, value in expected.items()}, rel=1e-4)


def test_spans_are_told_in_positions_and_nothing_without_routing() -> None:
    model = tiny_model(layers=2, heads=2, window=10, base="adaptive_span", routing_heads=0, routing_layers=0)
    spans = [heads for heads in model.modules() if isinstance(heads, AdaptiveSpan)]
    with torch.no_grad():
        spans[0].share_H.copy_(torch.tensor([0.1, 0.7]))
        spans[1].share_H.copy_(torch.tensor([-0.2, 0.2]))
    assert weights.read_telemetry(model) == pytest.approx({"span/mean": 2.5, "span/max": 7})
