"""Trained models without routing: their heads are silenced, or read positions by position."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from rtx.attention import Local, Pattern, Random
from rtx.attention.pattern import Prepared
from rtx.model.heads import HeadGroup, layer_seed
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer
from rtx.settings.derived import ROUTED, clusters
from rtx.settings.schema import Config

MEMBER_SEED = 1_000_003
"""Keeps swapped-in memberships apart from those that selection=random trained with."""


def ablate(
    model: Transformer,
    config: Config,
    how: str,
) -> None:
    """Take routing out of a model in place, as option `ablate` says; `none` changes nothing.

    routing: the outputs of the routing heads are ignored. local: they read the last
    `routing.window` positions. random: they read `routing.window` random members of each cluster.
    In both swaps queries and keys are normalised and scaled as before, so that only the choice of
    positions differs. A model without routing heads stays as it is.
    """
    if how == "none":
        return
    for layer, attention in enumerate(model.attentions()):
        for group in attention.head_groups():
            if group.name != ROUTED:
                continue
            substitute = substitute_for(group, config, layer, how)
            group.pattern = substitute.to(model.device).train(model.training)
            if how == "routing":
                silence(group, attention)


@torch.no_grad()
def silence(group: HeadGroup, attention: MultiheadAttention) -> None:
    """Zero the columns of the output matrix that read a group of heads."""
    groups = attention.head_groups()
    widths = [other.width for other in groups]
    columns = attention.out.weight.split(widths, dim=1)
    columns[groups.index(group)].zero_()


def substitute_for(
    group: HeadGroup,
    config: Config,
    layer: int,
    how: str,
) -> Pattern:
    """Return the pattern that replaces the one of routing heads."""
    routed = group.pattern
    routing = config.routing
    options = {
        "scale": routed.scale,
        "attend_self": routed.attend_self,
        "dropout": routed.dropout,
        "backend": routed.backend,
    }
    if how == "random":
        reseeded = dataclasses.replace(config, seed=config.seed + MEMBER_SEED)
        return RandomSubstitute(
            routed,
            group.heads,
            clusters(config),
            length=config.data.length,
            seed=layer_seed(reseeded, layer),
            has_keys=routed.has_keys,
            window=routing.window,
            merge=routed.merge,
            **options,
        )
    window = routing.window
    if how == "routing":
        # The outputs are ignored: the cheapest ones will do.
        window = 1
    return LocalSubstitute(routed, window=window, **options)


class LocalSubstitute(Local):
    """Local heads with the queries and keys of other heads, prepared as those prepare them."""

    def __init__(self, replaced: Pattern, **options: Any) -> None:
        super().__init__(**options)
        self.has_keys = replaced.has_keys
        self._prepare = replaced.prepare

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        return self._prepare(q_BHND, k_BHND)


class RandomSubstitute(Random):
    """Random heads with the queries and keys of other heads, prepared as those prepare them."""

    def __init__(
        self,
        replaced: Pattern,
        heads: int,
        clusters: int,
        **options: Any,
    ) -> None:
        super().__init__(heads, clusters, **options)
        self._prepare = replaced.prepare

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        return self._prepare(q_BHND, k_BHND)
