"""Telemetry against the same figures worked out with plain loops."""

from __future__ import annotations

import pytest
import torch

from rtx.analysis.telemetry import PROBES, read_telemetry
from rtx.attention.centroids import Centroids
from rtx.attention.patterns import AdaptiveSpan
from rtx.attention.routing import Routing
from rtx.model.transformer import Transformer
from tests.model.tiny_models import tiny_model

LENGTH, WINDOW, CLUSTERS = 24, 5, 4


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
    told = read_telemetry(model)
    assert heads.snapshot is not None
    lists, q_HND, k_HND, _ = heads.snapshot
    queries, of_keys = (
        [list_M.tolist() for list_M in x.row_M.split(x.count_L.tolist())] for x in (lists[0], lists[-1])
    )
    times = [sum(row in members for members in queries) for row in range(2 * LENGTH)]
    counts = [len(members) for members in of_keys]
    assert len(counts) == 2 * CLUSTERS and LENGTH <= PROBES, "every position is probed"
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


@pytest.mark.parametrize("selection", ["causal", "topk", "nearest"])
def test_padding_counts_for_nothing(selection: str) -> None:
    q, v = torch.randn(2, 2, 2, LENGTH, 8, generator=torch.Generator().manual_seed(3))
    told = []
    for real in (LENGTH, 15):
        model, heads = trained_heads(selection=selection)
        real_BN = None if real == LENGTH else (torch.arange(LENGTH) < real).expand(2, LENGTH)
        length = 15 if real_BN is None else LENGTH
        torch.manual_seed(4)
        heads.centroids = Centroids(2, CLUSTERS, 8, window=WINDOW, length=LENGTH, decay=0.9)
        heads.train()(q[:, :, :length], None, v[:, :, :length], real_BN=real_BN)
        told.append(read_telemetry(model))
    for name in ("empty_share", "in_none", "in_one", "in_many", "member_share", "member_most"):
        assert told[0][f"routing/{name}"] == pytest.approx(told[1][f"routing/{name}"]), name


def test_nothing_is_told_without_routing_and_evaluation_leaves_the_snapshot_alone() -> None:
    assert read_telemetry(tiny_model(routing_heads=0, routing_layers=0)) == {}
    model, heads = trained_heads(selection="causal")
    before = heads.snapshot
    model.eval()
    model.loss(torch.zeros(1, LENGTH, dtype=torch.int64))
    assert heads.snapshot is before


def test_spans_are_told_in_positions() -> None:
    model = tiny_model(layers=2, heads=2, window=10, base="adaptive_span", routing_heads=0, routing_layers=0)
    spans = [heads for heads in model.modules() if isinstance(heads, AdaptiveSpan)]
    with torch.no_grad():
        spans[0].share_H.copy_(torch.tensor([0.1, 0.7]))
        spans[1].share_H.copy_(torch.tensor([-0.2, 0.2]))
    assert read_telemetry(model) == pytest.approx({"span/mean": 2.5, "span/max": 7})
