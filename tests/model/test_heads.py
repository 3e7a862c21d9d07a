"""Every pattern is made with the values of the configuration."""

from typing import Any

import pytest
from torch import nn

from rtx.attention import Pattern
from rtx.model.heads import make_pattern
from rtx.settings.derived import ROUTED
from rtx.settings.names import BASES, SELECTIONS
from rtx.settings.schema import Config, DataConfig, HardwareConfig, ModelConfig, RoutingConfig

HEADS = 3
LAYER = 2

CONFIG = Config(
    seed=4,
    data=DataConfig(length=40),
    hardware=HardwareConfig(attention="torch"),
    model=ModelConfig(
        heads=4,
        hidden=24,
        window=5,
        stride=7,
        summary=2,
        memory=9,
        compressed=6,
        same_length=True,
        attend_self=False,
        attention_dropout=0.25,
        lsh="reformer",
        hash_rounds=2,
        hash_buckets=6,
        span_ramp=3,
        span_cost=0.5,
    ),
    routing=RoutingConfig(
        keys="tied",
        window=6,
        candidates=8,
        clusters=10,
        logit_scale="unit",
        qk_norm=True,
        attend_self=True,
        merge="lse",
        update="nearest",
        decay=0.5,
        threshold_rate=0.75,
        commitment=0.125,
        block=4,
        compressed=True,
        warmup=11,
    ),
)
"""No value is that of a class's default."""

COMMON = {"dropout": 0.25, "backend": "torch"}
BASE = {"scale": 6**-0.5, "attend_self": False, **COMMON}
CLUSTERED = {"has_keys": True, "window": 6, "merge": "lse"}
CENTROIDS = {
    "centroids.keys": "separate",
    "centroids.update_rule": "nearest",
    "centroids.decay": 0.5,
    "centroids.window": 6,
    "centroids.length": 40,
    "heads": 3,
    "size": 6,
    "commitment": 0.125,
}
BLOCKS = {"block": 4, "window": 6, "qk_norm": True, "heads": 3, "size": 6}
MADE_OF: dict[str, dict[str, Any]] = {
    "full": BASE,
    "local": {"window": 5, **BASE},
    "recurrent": {"length": 40, "memory": 15, "same_length": True, **BASE},
    "strided": {"stride": 7, **BASE},
    "fixed": {"block": 7, "summary": 2, **BASE},
    "fixed_block": {"length": 7, "memory": 0, "same_length": False, **BASE},
    "fixed_summary": {"block": 7, "summary": 2, **BASE},
    "adaptive_span": {
        "heads": 3,
        "window": 5,
        "ramp": 3,
        "cost": 0.5,
        **BASE,
        "attend_self": True,
    },
    "lsh": {
        "heads": 3,
        "size": 6,
        "rounds": 2,
        "buckets": 6,
        "variant": "reformer",
        "window": 5,
        **BASE,
    },
    "causal": {**CLUSTERED, **CENTROIDS, "centroids.threshold_rate": 0.75},
    "topk": {**CLUSTERED, **CENTROIDS, "centroids.threshold_rate": 0.0},
    "nearest": {**CLUSTERED, **CENTROIDS, "centroids.threshold_rate": 0.0},
    "random": {**CLUSTERED, "heads": 3, "clusters": 10, "length": 40, "seed": 4002},
    "exact": {"window": 6, "qk_norm": True},
    "blocks": BLOCKS,
    "blocks_random": {"seed": 4002, **BLOCKS},
    "indexer": {"heads": 3, "size": 6, "warmup": 11, "window": 6, "qk_norm": True},
    "probed": {
        "heads": 3,
        "size": 6,
        "clusters": 10,
        "candidates": 8,
        "centroids.decay": 0.5,
        "window": 6,
        "qk_norm": True,
    },
}


def value_of(pattern: Pattern, path: str) -> Any:
    """Return an attribute of a pattern, or of its centroids."""
    found: Any = pattern
    for name in path.split("."):
        found = getattr(found, name)
    return found


def test_every_pattern_of_the_configuration_is_tested() -> None:
    assert {*MADE_OF} == {*BASES, *SELECTIONS}


@pytest.mark.parametrize("name", MADE_OF)
def test_a_pattern_is_made_with_the_values_of_the_configuration(name: str) -> None:
    expected = MADE_OF[name]
    group = name
    config = CONFIG
    if name in SELECTIONS:
        group = ROUTED
        config = with_selection(name)
        expected = {"scale": 1 / 6, "attend_self": True, **COMMON, **expected}
    pattern = make_pattern(group, HEADS, config, LAYER)
    assert {path: value_of(pattern, path) for path in expected} == expected
    if name.startswith("blocks"):
        assert isinstance(pattern.gate_H2D, nn.Parameter)


def with_selection(name: str) -> Config:
    """Return the configuration with another selection."""
    routing = RoutingConfig(**{**vars(CONFIG.routing), "selection": name})
    return Config(**{**vars(CONFIG), "routing": routing})


@pytest.mark.parametrize("keys", ["shared", "separate", "projected"])
def test_keys_of_clusters_are_those_of_the_configuration(keys: Any) -> None:
    for name in ("causal", "random"):
        config = with_selection(name)
        config.routing.keys = keys
        pattern = make_pattern(ROUTED, HEADS, config, LAYER)
        assert pattern.has_keys == (keys != "shared")
        if name == "causal":
            assert value_of(pattern, "centroids.keys") == keys
