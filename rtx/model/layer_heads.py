"""From a configuration to the heads of a layer: which patterns it has, and how many heads of each."""

from rtx.attention.pattern import Pattern
from rtx.config import BASES, REGISTERED, SELECTIONS, Config
from rtx.errors import UserError
from rtx.keys import imported

ROUTED = "routed"
"""The group of the heads that `routing` describes; the others are called by their pattern."""


def routing_heads(config: Config, layer: int) -> int:
    """Return how many heads of a layer (0 is the lowest) route: routing layers are the topmost ones."""
    return config.routing.heads if layer >= config.model.layers - config.routing.layers else 0


def layer_patterns(config: Config, layer: int) -> dict[str, int]:
    """Return the groups of a layer's heads in order, and how many heads each has: base patterns, then `routed`."""
    routed = routing_heads(config, layer)
    patterns = config.model.base.split("+")
    share = (config.model.heads - routed) // len(patterns)
    groups = {name: share * patterns.count(name) for name in patterns} if share else {}
    return groups | ({ROUTED: routed} if routed else {})


def make_pattern(name: str, heads: int, config: Config, layer: int) -> Pattern:
    """Return one group of a layer's heads, by the tables of `rtx.config`."""
    table, name = (SELECTIONS, config.routing.selection) if name == ROUTED else (BASES, name)
    pattern = imported(table[name]).from_config(config, heads, layer)
    if name in REGISTERED and not pattern.strictly_causal:  # every score of it would be said to see no future
        raise UserError(f"{name}: strictly_causal=False: a pattern of an extension reads no later position")
    return pattern
