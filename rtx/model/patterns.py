"""From a configuration to the heads of a layer: which patterns it has, and how many heads of each."""

from __future__ import annotations

from rtx.attention.fixed import FixedHeads
from rtx.attention.full import FullHeads
from rtx.attention.heads import Heads
from rtx.attention.kmeans import Centroids
from rtx.attention.local import LocalHeads
from rtx.attention.lsh import LshHeads
from rtx.attention.random import RandomHeads
from rtx.attention.routing import RoutingHeads
from rtx.attention.span import SpanHeads
from rtx.attention.strided import StridedHeads
from rtx.config import Config, base_patterns, hash_buckets

ROUTED = "routed"
"""The group of the heads that `routing` describes; the others are called by their pattern."""


def routing_heads(config: Config, layer: int) -> int:
    """Return how many heads of a layer (0 is the lowest) route: routing layers are the topmost ones."""
    return config.routing.heads if layer >= config.model.layers - config.routing.layers else 0


def layer_patterns(config: Config, layer: int) -> dict[str, int]:
    """Return the groups of a layer's heads in order, and how many heads each has: base patterns, then `routed`."""
    routed = routing_heads(config, layer)
    patterns = base_patterns(config.model)
    share = (config.model.heads - routed) // len(patterns)
    groups = {name: share * patterns.count(name) for name in patterns} if share else {}
    return groups | ({ROUTED: routed} if routed else {})


def has_keys(name: str, config: Config) -> bool:
    """Tell whether a group has a key matrix; without one its queries stand for keys."""
    return config.routing.keys != "shared" if name == ROUTED else name != "lsh"


def make_heads(name: str, count: int, config: Config, layer: int) -> Heads:
    """Return one group of a layer."""
    model = config.model
    if name == ROUTED:
        return make_routed(count, config, layer)
    scale = (model.hidden // model.heads) ** -0.5
    if name == "local":
        return LocalHeads(window=model.window, scale=scale, dropout=model.attention_dropout)
    if name == "strided":
        return StridedHeads(stride=model.stride, scale=scale, dropout=model.attention_dropout)
    if name == "fixed":
        return FixedHeads(block=model.stride, summary=model.summary, scale=scale, dropout=model.attention_dropout)
    if name == "adaptive_span":
        ramp, cost, dropout = model.span_ramp, model.span_cost, model.attention_dropout
        return SpanHeads(count, window=model.window, ramp=ramp, cost=cost, scale=scale, dropout=dropout)
    if name == "lsh":
        return make_lsh(count, config, layer)
    assert name == "full"
    return FullHeads(scale=scale, dropout=model.attention_dropout)


def make_lsh(count: int, config: Config, layer: int) -> Heads:
    """Return the heads of a layer that hash."""
    model = config.model
    size = model.hidden // model.heads
    return LshHeads(
        count,
        size,
        window=model.window,
        rounds=model.hash_rounds,
        buckets=hash_buckets(config),
        seed=config.seed * 1_000 + layer,
        variant=model.lsh,
        scale=size**-0.5,
        dropout=model.attention_dropout,
    )


def make_routed(count: int, config: Config, layer: int) -> Heads:
    """Return the content-based or random heads of a layer."""
    routing, model = config.routing, config.model
    size = model.hidden // model.heads
    scale = size**-0.5 if routing.logit_scale == "sqrt_d" else 1.0
    assert routing.clusters is not None, "rtx.checks.resolve freezes the clusters"
    if routing.selection == "random":
        return RandomHeads(
            count,
            routing.clusters,
            window=routing.window,
            length=config.data.length,
            seed=config.seed * 1_000 + layer,
            scale=scale,
            attend_self=routing.attend_self,
            dropout=model.attention_dropout,
            slot_distance=routing.slot_distance,
        )
    centroids = Centroids(
        count,
        routing.clusters,
        size,
        window=routing.window,
        length=config.data.length,
        decay=routing.decay,
        update=routing.update,
        thresholds=routing.selection == "causal",
        threshold_decay=routing.threshold_decay,
        revive_after=routing.revive_after,
        keys=routing.keys,
    )
    return RoutingHeads(
        centroids,
        selection=routing.selection,
        scale=scale,
        attend_self=routing.attend_self,
        dropout=model.attention_dropout,
        commitment=routing.commitment,
        slot_distance=routing.slot_distance,
    )
