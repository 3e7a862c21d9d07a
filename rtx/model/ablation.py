"""Ablations of trained models: routing heads are zeroed, or replaced by local or random heads."""

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
"""Added to the seed, so that the random members differ from those of training with
selection=random."""


def ablate(model: Transformer, config: Config, how: str) -> None:
    """Replace the routing heads of a model in place, if it has any.

    With "local" and "random", queries and keys are normalised and scaled as before, so that only
    the choice of positions differs.

    Args:
        how: "none": the model stays the same. "routing": the outputs of routing heads are set to
            zero. "local": they read the last `routing.window` positions. "random": they read
            `routing.window` random members of each cluster.
    """
    if how == "none":
        return
    for layer, attention in enumerate(model.attentions()):
        for group in attention.head_groups():
            if group.name != ROUTED:
                continue
            substitute = substitute_for(group, config, layer, how)
            substitute.group_queries(
                group.queries_of_key_head, together=group.pattern.chooses_together
            )
            substitute.sink_H = group.pattern.sink_H
            substitute = substitute.to(model.device)
            group.pattern = substitute.train(model.training)
            if how == "routing":
                silence(group, attention)


@torch.no_grad()
def silence(group: HeadGroup, attention: MultiheadAttention) -> None:
    """Set to zero the columns of the output matrix that multiply the outputs of a group."""
    groups = attention.head_groups()
    widths = [other.width for other in groups]
    columns = attention.out.weight.split(widths, dim=1)
    columns[groups.index(group)].zero_()


def substitute_for(group: HeadGroup, config: Config, layer: int, how: str) -> Pattern:
    """Return the pattern that replaces the one of routing heads."""
    routed = group.pattern
    routing = config.routing
    options = {
        "scale": routed.scale,
        "attend_self": routed.attend_self,
        "dropout": routed.dropout,
        "backend": routed.backend,
        "causal": routed.causal,
    }
    if how == "random":
        reseeded = dataclasses.replace(config, seed=config.seed + MEMBER_SEED)
        return RandomSubstitute(
            routed,
            group.choosing_heads,
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
        # The outputs are multiplied by zero, so the cheapest pattern suffices.
        window = 1
    return LocalSubstitute(routed, window=window, **options)


class LocalSubstitute(Local):
    """Local heads that prepare queries and keys as the heads that they replace."""

    def __init__(self, replaced: Pattern, **options: Any) -> None:
        super().__init__(**options)
        self.has_keys = replaced.has_keys
        self._prepare = replaced.prepare

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        return self._prepare(q_BHND, k_BHND)


class RandomSubstitute(Random):
    """Random heads that prepare queries and keys as the heads that they replace."""

    def __init__(self, replaced: Pattern, heads: int, clusters: int, **options: Any) -> None:
        super().__init__(heads, clusters, **options)
        self._prepare = replaced.prepare

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        return self._prepare(q_BHND, k_BHND)
