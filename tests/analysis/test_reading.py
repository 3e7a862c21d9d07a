"""What positions read: the weights of the whole forward pass, and the clusters that the oracle's rules give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rtx.analysis.reading import Reading, members, only_cluster, read_heads
from rtx.analysis.weights import Head, layer_inputs, weight_blocks
from rtx.attention import reference
from rtx.attention.hashing import hash_positions
from rtx.attention.lsh import LshHeads
from rtx.attention.random import RandomHeads
from rtx.attention.routing import RoutingHeads
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer
from tests.model.tiny_models import tiny_model, tokens

AT = torch.tensor([0, 1, 7, 8, 20, 23])
ROUTED = [
    {"selection": "topk"},
    {"selection": "causal"},
    {"selection": "causal", "routing_attend_self": False, "positions": "shaw"},
    {"selection": "nearest"},
    {"selection": "random"},
    {"selection": "topk", "routing_keys": "separate"},
    {"selection": "causal", "routing_keys": "separate", "positions": "shaw"},
    {"selection": "topk", "routing_keys": "projected", "norm": "post"},
]
BASES = ["local+full", "strided+fixed", "adaptive_span", "lsh"]


def layer(model: Transformer, number: int) -> tuple[MultiheadAttention, Tensor]:
    """Return the attention of a layer and what it reads of a sequence."""
    return list(layer_inputs(model, tokens(batch=1)))[number]


@torch.no_grad()
def both(model: Transformer, number: int = 2) -> tuple[dict[Head, Reading], dict[Head, Tensor], MultiheadAttention]:
    """Return what a layer's heads read at some positions, and their weights `[N, N]` by one pass for all keys."""
    attention, x_1NE = layer(model, number)
    widths = zip(attention.groups, attention.widths, strict=False)
    kept = {(name, head) for name, width in widths for head in range(width // attention.size)}
    whole = list(weight_blocks(attention, x_1NE, kept))
    assert len(whole) == 1
    return read_heads(attention, x_1NE, AT, kept), {head: weight[0] for head, weight in whole[0].items()}, attention


@pytest.mark.parametrize("options", [*ROUTED, *({"base": base} for base in BASES)], ids=str)
@pytest.mark.parametrize("most", [1 << 27, 24 * 2 * 2])
def test_weights_are_those_of_the_whole_pass(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], most: int
) -> None:
    model = tiny_model(**options)
    whole = both(model)[1]
    monkeypatch.setattr("rtx.analysis.reading.MAX_WEIGHTS", most)  # two columns of a cluster at a time
    found = both(model)[0]
    assert set(found) == set(whole) and len(found) == 4
    for head, reading in found.items():
        torch.testing.assert_close(reading.weight_PN, whole[head][AT].float(), rtol=0, atol=1e-6)
        assert torch.equal(reading.weight_PN > 0, whole[head][AT] > 0)


@pytest.mark.parametrize("options", ROUTED, ids=str)
@torch.no_grad()
def test_a_key_is_read_in_a_cluster_in_which_the_oracle_reads_it(options: dict[str, Any]) -> None:
    model = tiny_model(**options)
    found, _, attention = both(model)
    heads = attention.groups["routed"]
    assert isinstance(heads, RoutingHeads | RandomHeads)
    _, x_1NE = layer(model, 2)
    at = list(attention.groups).index("routed")
    q_1HND, k_1HND, _ = attention.split(x_1NE)[at]
    if isinstance(heads, RandomHeads):
        queries_HCN = keys_HCN = heads.members(1, 24).mask().unflatten(0, (2, -1))
        window = heads.window
    else:
        found_of, of_keys = heads.choose(heads.read(q_1HND, k_1HND), None)
        chosen = [of.members.mask().unflatten(0, (2, -1)) for of in (found_of, of_keys) if of and of.members]
        queries_HCN, keys_HCN, window = chosen[0], chosen[-1], heads.centroids.window
    seen = 0
    for head in range(2):
        reading = found["routed", head]
        assert reading.clusters == 4
        for p, i in enumerate(AT.tolist()):
            allowed: dict[int, set[int]] = {}
            for c in range(4):
                rows = queries_HCN[head, c][None], keys_HCN[head, c][None]
                for keys_of in reference.separate_sets(i, *rows, window, heads.attend_self):
                    for j in keys_of:
                        allowed.setdefault(j, set()).add(c)
            cluster_N = reading.cluster_PN[p].tolist()
            assert {j for j, c in enumerate(cluster_N) if c >= 0} == set(allowed)
            assert all(cluster_N[j] in clusters for j, clusters in allowed.items())
            seen += len(allowed)
    assert seen > 10


def test_in_several_clusters_a_key_belongs_to_the_one_with_most_weight() -> None:
    found, _, attention = both(tiny_model(selection="topk", routing_window=12))
    heads = attention.groups["routed"]
    assert isinstance(heads, RoutingHeads)
    _, x_1NE = layer(tiny_model(selection="topk", routing_window=12), 2)
    _, (q_1HND, k_1HND, v_1HND) = attention.split(x_1NE)
    member_HCN = members(heads, q_1HND, k_1HND)
    eye = torch.eye(24, dtype=v_1HND.dtype).expand(1, 2, 24, 24)
    inside_CNN = []
    with torch.no_grad():
        for cluster in range(4):
            with only_cluster(heads, cluster):
                inside_CNN.append(heads(q_1HND, k_1HND, eye, rotate=attention.rotary)[0][0, 0])
    assert torch.equal(members(heads, q_1HND, k_1HND), member_HCN), "the clusters are as before"
    best_NN = torch.stack(inside_CNN).argmax(0)
    reading = found["routed", 0]
    several_N = (torch.stack(inside_CNN)[:, AT] > 0).sum(0) > 1
    assert several_N.any()
    assert torch.equal(reading.cluster_PN[several_N].long(), best_NN[AT][several_N])


def test_hashing_heads_name_the_bucket_of_the_first_round_that_joins_a_pair() -> None:
    model = tiny_model(base="lsh", routing_heads=0, hash_rounds=3, hash_buckets=4)
    found, _, attention = both(model, number=0)
    heads = attention.groups["lsh"]
    assert isinstance(heads, LshHeads)
    _, x_1NE = layer(model, 0)
    bucket_THN = hash_positions(attention.split(x_1NE)[0][0], heads.rotation_HTDF)[:, 0]
    for head in range(4):
        reading = found["lsh", head]
        assert reading.clusters == 12
        for p, j in (reading.weight_PN > 0).nonzero().tolist():
            same = [t for t in range(3) if bucket_THN[t, head, j] == bucket_THN[t, head, AT[p]]]
            assert reading.cluster_PN[p, j] == same[0] * 4 + bucket_THN[same[0], head, j]
        assert bool((reading.cluster_PN[reading.weight_PN == 0] == -1).all())


def test_patterns_by_position_have_no_clusters() -> None:
    found, _, _ = both(tiny_model(base="local+full"), number=0)
    assert all(reading.clusters == 0 and bool((reading.cluster_PN == -1).all()) for reading in found.values())
    assert (found["local", 0].weight_PN > 0).sum(1).tolist() == [1, 2, 5, 5, 5, 5]
    assert (found["full", 0].weight_PN > 0).sum(1).tolist() == [1, 2, 8, 9, 21, 24]
