"""Telemetry against the same figures worked out with plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from rtx.analysis.telemetry import PROBES, read_telemetry
from rtx.attention.kmeans import Centroids
from rtx.attention.reference import separate_sets
from rtx.attention.routing import RoutingHeads
from rtx.attention.span import SpanHeads
from rtx.checks import resolve
from rtx.config import Config, DataConfig, ModelConfig, RoutingConfig
from rtx.model.transformer import Transformer

LENGTH, WINDOW, CLUSTERS = 24, 5, 4


def trained_heads(selection: str, attend_self: bool, keys: str = "shared") -> tuple[Transformer, RoutingHeads]:
    """A model with one routing layer that has seen a training batch, and that layer's heads."""
    config = Config(
        data=DataConfig(length=LENGTH),
        routing=RoutingConfig(
            selection=selection,
            keys=keys,
            heads=2,
            layers=1,
            window=WINDOW,
            clusters=CLUSTERS,
            attend_self=attend_self,
        ),
        model=ModelConfig(layers=1, heads=2, hidden=16, window=4, ffn_hidden=16, positions="none"),
    )
    torch.manual_seed(0)
    model = Transformer(resolve(config), 11).train()
    model.loss(torch.randint(0, 11, (3, LENGTH), generator=torch.Generator().manual_seed(1)))
    return model, next(heads for heads in model.modules() if isinstance(heads, RoutingHeads))


@pytest.mark.parametrize("keys", ["shared", "separate", "projected"])
@pytest.mark.parametrize("selection", ["causal", "topk", "nearest"])
@pytest.mark.parametrize("attend_self", [True, False])
def test_figures_are_those_of_plain_loops(selection: str, attend_self: bool, keys: str) -> None:
    model, heads = trained_heads(selection, attend_self, keys)
    told = read_telemetry(model)
    assert heads.snapshot is not None
    members, key_members, nearest_HN, query_HND, key_HND, _ = heads.snapshot
    member_HCN, key_member_HCN = (x.mask().unflatten(0, (2, CLUSTERS)) for x in (members, key_members))
    times = member_HCN.sum(1).flatten().tolist()
    assert told["routing/in_none"] == pytest.approx(times.count(0) / len(times))
    assert told["routing/in_one"] == pytest.approx(times.count(1) / len(times))
    assert told["routing/in_many"] == pytest.approx(sum(t > 1 for t in times) / len(times))
    assert told["routing/member_share"] == pytest.approx(int(member_HCN.sum()) / (2 * CLUSTERS * WINDOW))
    empty, entropy = 0, 0.0
    for nearest_N in nearest_HN.tolist():
        shares = [nearest_N.count(c) / LENGTH for c in range(CLUSTERS)]
        empty += shares.count(0)
        entropy -= sum(p * math.log(p) for p in shares if p) / math.log(CLUSTERS) / 2
    assert told["routing/empty_share"] == pytest.approx(empty / (2 * CLUSTERS))
    assert told["routing/usage_entropy"] == pytest.approx(entropy)
    own, distance = [], []
    assert LENGTH <= PROBES, "every position is probed"
    for h in range(2):
        for i in range(LENGTH):
            for read in separate_sets(i, member_HCN[h], key_member_HCN[h], WINDOW, attend_self):
                weights = (heads.scale * key_HND[h, read] @ query_HND[h, i]).softmax(0).tolist()
                own.append(sum(w for w, j in zip(weights, read, strict=True) if j == i))
                distance.append(sum(w * (i - j) for w, j in zip(weights, read, strict=True)))
    assert told["routing/self_weight"] == pytest.approx(sum(own) / len(own), rel=1e-5)
    assert told["routing/distance"] == pytest.approx(sum(distance) / len(distance), rel=1e-5)


@pytest.mark.parametrize("selection", ["causal", "topk", "nearest"])
def test_padding_counts_for_nothing(selection: str) -> None:
    generator = torch.Generator().manual_seed(3)
    q, v = torch.randn(2, 2, 2, LENGTH, 4, generator=generator)
    told = []
    for real in (LENGTH, 15):
        model, heads = trained_heads(selection, True)
        mask_BN = None if real == LENGTH else (torch.arange(LENGTH) < real).expand(2, LENGTH)
        length = 15 if mask_BN is None else LENGTH
        store = Centroids(2, CLUSTERS, 4, window=WINDOW, length=LENGTH, decay=0.9, thresholds=True)
        torch.manual_seed(4)
        heads.centroids = store
        store.centroid_HCD.normal_()
        heads.train()(q[:, :, :length], None, v[:, :, :length], mask_BN=mask_BN)
        told.append(read_telemetry(model))
    for name in ("empty_share", "usage_entropy", "in_none", "in_one", "in_many", "member_share"):
        assert told[0][f"routing/{name}"] == pytest.approx(told[1][f"routing/{name}"]), name


def test_nothing_to_tell_before_training_or_without_routing() -> None:
    config = resolve(
        Config(
            data=DataConfig(length=16),
            routing=RoutingConfig(heads=0, layers=0, window=4),
            model=ModelConfig(layers=1, heads=2, hidden=16, window=4, ffn_hidden=16),
        )
    )
    assert read_telemetry(Transformer(config, 11)) == {}


def test_evaluation_leaves_the_snapshot_alone() -> None:
    model, heads = trained_heads("causal", True)
    before = heads.snapshot
    model.eval()
    model.loss(torch.zeros(1, LENGTH, dtype=torch.int64))
    assert heads.snapshot is before


def test_spans_are_told_in_positions() -> None:
    config = Config(
        data=DataConfig(length=LENGTH),
        routing=RoutingConfig(heads=0, layers=0),
        model=ModelConfig(layers=2, heads=2, hidden=16, window=10, ffn_hidden=16, base="adaptive_span"),
    )
    model = Transformer(resolve(config), 11)
    spans = [heads for heads in model.modules() if isinstance(heads, SpanHeads)]
    with torch.no_grad():
        spans[0].share_H.copy_(torch.tensor([0.1, 0.7]))
        spans[1].share_H.copy_(torch.tensor([-0.2, 0.2]))
    assert read_telemetry(model) == pytest.approx({"span/mean": 2.5, "span/max": 7})
