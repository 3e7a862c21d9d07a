"""What is routing worth in a trained model? Its routing heads silenced, or reading positions chosen without looking.

Shapes: B sequences or streams, H heads, N positions, D head size.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from rtx.attention.heads import Heads, HeadState, Rotate, RotateFrom
from rtx.attention.random import RandomHeads
from rtx.attention.weights import Distances
from rtx.config import Config
from rtx.errors import UserError
from rtx.model.patterns import ROUTED, layer_patterns, make_routed
from rtx.model.transformer import Transformer

MEMBER_SEED = 1_000_003
"""Keeps swapped-in memberships apart from those that selection=random trained with."""


def check_ablation(config: Config) -> None:
    """Refuse an ablation that the model has nothing for, before anything is loaded.

    Raises:
        UserError: no routing heads, or heads that are random already.
    """
    how, routing = config.eval.ablate, config.routing
    if how == "none":
        return
    if routing.heads == 0 or routing.layers == 0:
        raise UserError(f"eval.ablate={how}: the model has no routing heads to take away")
    if how == "random" and routing.selection == "random":
        raise UserError("eval.ablate=random: the heads of selection=random read random members already")


def ablate(model: Transformer, config: Config) -> None:
    """Take routing out of a model in place, as `eval.ablate` says; all weights stay, `none` changes nothing.

    routing: the outputs of the routing heads are zero. local: they read the last `routing.window` positions. random:
    they read `routing.window` random members of each cluster. In both swaps queries and keys are normalised and scaled
    as before, so that only the choice of positions differs.

    Raises:
        UserError: as `check_ablation`.
    """
    check_ablation(config)
    how = config.eval.ablate
    if how == "none":
        return
    for layer, block in enumerate(model.blocks):
        groups: nn.ModuleDict = block.attention.groups  # type: ignore[union-attr,assignment]
        if ROUTED in groups:
            swapped = substitute(how, layer_patterns(config, layer)[ROUTED], config, layer)
            groups[ROUTED] = swapped.to(model.output_VS.device).train(model.training)


def substitute(how: str, count: int, config: Config, layer: int) -> Heads:
    """Return what takes the place of the routing heads of a layer."""
    if how == "routing":
        return SilentHeads()
    routing = dataclasses.replace(config.routing, selection="random")
    swapped = make_routed(count, dataclasses.replace(config, routing=routing, seed=config.seed + MEMBER_SEED), layer)
    assert isinstance(swapped, RandomHeads)
    if how == "local":  # one cluster of all positions, of which a member reads the last W
        swapped.position_HCW, swapped.length = torch.zeros(count, 1, 1, dtype=torch.int64), 1
    return swapped


class SilentHeads(Heads):
    """Heads that give nothing."""

    def forward(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor | None,
        v_BHND: Tensor,
        *,
        rotate: Rotate | None = None,
        relative: Distances | None = None,
        streaming: bool = False,
        mask_BN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Heads.forward`."""
        return torch.zeros_like(v_BHND), q_BHND.new_zeros(())

    def start(self, relative: Distances | None = None) -> HeadState:
        """See `Heads.start`."""
        return SilentState()


class SilentState(HeadState):
    """Silent heads remember nothing."""

    def fill(self, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor, rotate: RotateFrom | None = None) -> None:
        """See `HeadState`."""

    def step(
        self, q_BHD: Tensor, k_BHD: Tensor | None, v_BHD: Tensor, position: int, rotate: Rotate | None = None
    ) -> Tensor:
        """Return zeros `[B, H, D]`."""
        return torch.zeros_like(v_BHD)
