"""What positions read: the weights of the oracle by the patterns' own rules, and clusters that show the key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rtx.analysis import reading
from rtx.analysis.reading import Reading, groups_of, heads_of, layer_inputs, read_heads
from rtx.attention import oracle
from rtx.attention.lsh import Lsh, hash_positions
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
CHOSEN = [
    {"selection": selection, "routing_keys": "separate", "routing_block": 3, "routing_attend_self": attend_self}
    for selection in ("exact", "blocks", "blocks_random", "indexer")
    for attend_self in (True, False)
]
BASES: list[dict[str, Any]] = [
    {"base": "local+full"},
    {"base": "strided+fixed", "positions": "shaw"},
    {"base": "adaptive_span"},
    {"base": "lsh"},
    {"base": "lsh", "positions": "shaw", "hash_rounds": 1, "lsh": "reformer"},
]


@torch.no_grad()
def both(
    model: Transformer, number: int = 2
) -> tuple[dict[tuple[str, int], Reading], dict[tuple[str, int], Tensor], dict[str, reading.Group]]:
    """Return what a layer's heads read at some positions, by the oracle in every list `[P, N, N]`, and the groups."""
    attention, x_1NE = list(layer_inputs(model, tokens(batch=1)))[number]
    kept = {(name, head) for name, heads in heads_of(attention).items() for head in range(heads)}
    groups, expected = groups_of(attention, x_1NE), {}
    for name, head in kept:
        pattern, given, _, terms = (getattr(groups[name], field) for field in ("pattern", "given", "parts", "terms"))
        q_ND, k_ND = given.turned_q_BHND[0, head], given.turned_k_BHND[0, head]
        mask_PNN = pattern.rule(given, head, False)
        _, expected[name, head] = oracle.dense(q_ND, k_ND, k_ND, mask_PNN, terms, head, pattern.attend_self)
    return read_heads(attention, x_1NE, AT, kept), expected, groups


@pytest.mark.parametrize("options", [*CLUSTERED, *CHOSEN, *BASES], ids=str)
@pytest.mark.parametrize("most", [1 << 22, 24 * 2])
def test_weights_are_those_of_the_oracle(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], most: int) -> None:
    monkeypatch.setattr(reading, "MAX_PAIRS", most)  # two positions at a time
    found, expected, _ = both(tiny_model(**options))
    assert set(found) == set(expected) and len(found) == 4
    for head, told in found.items():
        weight_NN = expected[head].sum(0)
        torch.testing.assert_close(told.weight_PN, weight_NN[AT].float(), rtol=0, atol=1e-6)
        assert torch.equal(told.weight_PN > 0, weight_NN[AT] > 0)


@pytest.mark.parametrize("options", CLUSTERED, ids=str)
def test_a_key_belongs_to_the_cluster_in_which_it_has_most_weight(options: dict[str, Any]) -> None:
    found, expected, _ = both(tiny_model(**options))
    several = 0
    for head in (("routed", 0), ("routed", 1)):
        told, weight_CPN = found[head], expected[head][:, AT]
        assert told.clusters == 4
        most_PN, in_PN = weight_CPN.amax(0), told.cluster_PN.long()
        assert torch.equal(in_PN >= 0, most_PN > 0)
        there_PN = weight_CPN.gather(0, in_PN.clamp(min=0)[None])[0]
        torch.testing.assert_close(there_PN, most_PN, rtol=0, atol=1e-12)  # of equals either
        several += int(((weight_CPN > 0).sum(0) > 1).sum())
    assert several or options["selection"] in ("nearest", "random") or options.get("routing_keys") == "separate"


def test_hashing_heads_name_the_bucket_of_the_first_round_that_joins_a_pair() -> None:
    model = tiny_model(base="lsh", routing_heads=0, hash_rounds=3, hash_buckets=4)
    found, _, groups = both(model, number=0)
    lsh, given = groups["lsh"].pattern, groups["lsh"].given
    assert isinstance(lsh, Lsh)
    bucket_THN = hash_positions(given.q_BHND, lsh.rotation_HTDF)[:, 0]
    for head in range(4):
        told = found["lsh", head]
        assert told.clusters == 12
        for p, j in (told.weight_PN > 0).nonzero().tolist():
            same = [t for t in range(3) if bucket_THN[t, head, j] == bucket_THN[t, head, AT[p]]]
            assert told.cluster_PN[p, j] == same[0] * 4 + bucket_THN[same[0], head, j]
        assert bool((told.cluster_PN[told.weight_PN == 0] == -1).all())


@pytest.mark.parametrize("options", CHOSEN, ids=str)
def test_selections_of_keys_have_no_clusters(options: dict[str, Any]) -> None:
    found, _, _ = both(tiny_model(**options))
    assert all(told.clusters == 0 and bool((told.cluster_PN == -1).all()) for told in found.values())


def test_patterns_by_position_have_no_clusters() -> None:
    found, _, _ = both(tiny_model(base="local+full"), number=0)
    assert all(told.clusters == 0 and bool((told.cluster_PN == -1).all()) for told in found.values())
    assert (found["local", 0].weight_PN > 0).sum(1).tolist() == [1, 2, 5, 5, 5, 5]
    assert (found["full", 0].weight_PN > 0).sum(1).tolist() == [1, 2, 8, 9, 21, 24]
