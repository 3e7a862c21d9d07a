"""What is routing worth in a trained model? Its routing heads silenced, or reading positions chosen without looking."""

import dataclasses

import torch

from rtx.attention.clusters import Random
from rtx.attention.pattern import Pattern, keys_of
from rtx.attention.positional import Local
from rtx.config import Config
from rtx.model.multihead import ROUTED, MultiheadAttention, layer_patterns
from rtx.model.transformer import Transformer

MEMBER_SEED = 1_000_003
"""Keeps swapped-in memberships apart from those that selection=random trained with."""


def ablate(model: Transformer, config: Config, how: str) -> None:
    """Take routing out of a model in place, as `how` (option `ablate`) says; `none` changes nothing.

    routing: the outputs of the routing heads count for nothing. local: they read the last `routing.window` positions.
    random: they read `routing.window` random members of each cluster. In both swaps queries and keys are normalised and
    scaled as before, so that only the choice of positions differs. A model without routing heads stays as it is.
    """
    if how == "none":
        return
    for layer, block in enumerate(model.blocks):
        attention: MultiheadAttention = block.attention  # type: ignore[assignment]
        if not (heads := layer_patterns(config, layer).get(ROUTED, 0)):
            continue
        swapped = substitute(attention.each()[-1], heads, config, layer, how)
        attention.groups[ROUTED] = swapped.to(model.device).train(model.training)
        if how == "routing":  # the routing heads are the last that `out` joins
            with torch.no_grad():
                attention.out.weight[:, -heads * attention.size :] = 0


def substitute(routed: Pattern, heads: int, config: Config, layer: int, how: str) -> Pattern:
    """Return what takes the place of the routing heads of a layer."""
    known = keys_of(dataclasses.replace(config, seed=config.seed + MEMBER_SEED), heads, layer, routed=True)
    known |= {name: getattr(routed, name) for name in ("scale", "attend_self", "backend", "has_keys", "merge")}
    known |= {"window": 1} if how == "routing" else {}
    swapped: Pattern = (Random if how == "random" else Local).from_config(known)
    swapped.prepare, swapped.has_keys = routed.prepare, routed.has_keys  # type: ignore[method-assign]
    return swapped
