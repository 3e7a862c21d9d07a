"""A model with its first weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rtx.attention.centroids import initialise_from_data
from rtx.config import Config
from rtx.model.transformer import Transformer
from rtx.training.rng import seed_everything


def fresh_model(config: Config, vocabulary: int, first_N: Callable[[], torch.Tensor] | None) -> Transformer:
    """Return the model of a configuration with its first weights, the same on every rank.

    Args:
        config: the resolved configuration.
        vocabulary: number of different units.
        first_N: returns the first training sequence, ids `[N]`, which routing.init=data reads; None: the weights are
            to be replaced anyway.
    """
    seed_everything(config.seed)
    model = Transformer(config, vocabulary)
    if first_N and config.routing.init == "data":
        initialise_from_data(model, first_N()[None])
    return model
