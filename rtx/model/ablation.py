"""What is routing worth in a trained model? Its routing heads silenced, or reading positions chosen without looking.

Shapes: B sequences or streams, H heads, N positions, D head size.
"""

import dataclasses

import torch
from torch import Tensor, nn

from rtx.attention.pattern import Pattern, PositionPattern, Spread
from rtx.attention.patterns import Random
from rtx.config import Config
from rtx.errors import UserError
from rtx.model.multihead import ROUTED, layer_patterns
from rtx.model.transformer import Transformer

MEMBER_SEED = 1_000_003
"""Keeps swapped-in memberships apart from those that selection=random trained with."""


def check_ablation(config: Config, how: str) -> None:
    """Refuse an ablation that the model has nothing for, before anything is loaded.

    Raises:
        UserError: no routing heads, or heads that are random already.
    """
    routing = config.routing
    if how == "none":
        return
    if routing.heads == 0 or routing.layers == 0:
        raise UserError(f"ablate={how}: the model has no routing heads to take away")
    if how == "random" and routing.selection == "random":
        raise UserError("ablate=random: the heads of selection=random read random members already")


def ablate(model: Transformer, config: Config, how: str) -> None:
    """Take routing out of a model in place, as `how` (option `ablate`) says; all weights stay, `none` changes nothing.

    routing: the outputs of the routing heads are zero. local: they read the last `routing.window` positions. random:
    they read `routing.window` random members of each cluster. In both swaps queries and keys are normalised and scaled
    as before, so that only the choice of positions differs.
    """
    if how == "none":
        return
    for layer, block in enumerate(model.blocks):
        groups: nn.ModuleDict = block.attention.groups  # type: ignore[union-attr,assignment]
        if ROUTED in groups:
            swapped = substitute(groups[ROUTED], layer_patterns(config, layer)[ROUTED], config, layer, how)  # type: ignore[arg-type]
            groups[ROUTED] = swapped.to(model.device).train(model.training)


def substitute(routed: Pattern, heads: int, config: Config, layer: int, how: str) -> Pattern:
    """Return what takes the place of the routing heads of a layer."""
    if how == "routing":
        return Recent(routed, 0)
    if how == "local":
        return Recent(routed, config.routing.window)
    swapped = Random.from_config(dataclasses.replace(config, seed=config.seed + MEMBER_SEED), heads, layer)
    swapped.prepare = routed.prepare  # type: ignore[method-assign]
    swapped.has_keys = routed.has_keys
    return swapped


class Recent(PositionPattern):
    """Heads that read the last `window` positions (0: nothing), by the queries and keys of the heads they stand for."""

    def __init__(self, routed: Pattern, window: int) -> None:
        attend_self = getattr(routed, "attend_self", True)
        super().__init__(scale=routed.scale, backend=routed.backend, attend_self=attend_self)
        self.prepare, self.has_keys = routed.prepare, routed.has_keys  # type: ignore[method-assign]
        self.window, self.keeps = window, max(1, window)

    def spreads(self, position_N: Tensor, heads: int) -> list[Spread]:
        one_N = torch.zeros_like(position_N)
        return [Spread(one_N, one_N, position_N + 1 - self.window, position_N + 1 if self.window else one_N)]

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        return i - j < self.window
