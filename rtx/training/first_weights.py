"""The model of a run with its first weights, and the seeds of its random numbers."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from rtx.attention.centroids import all_centroids
from rtx.errors import UserError
from rtx.model.transformer import Transformer
from rtx.settings.schema import Config
from rtx.training.checkpoint import tensor_problem


def build_model(
    config: Config, vocabulary: int, first_N: Callable[[], Tensor] | None
) -> Transformer:
    """Return the model of a configuration with its first weights.

    `first_N` returns the sequence that routing.init=data and probed keys read. Raises `UserError`
    for a tensor, of a pattern that the user has written, which no checkpoint may hold.
    """
    seed_everything(config.seed)
    model = Transformer(config, vocabulary)
    check_savable(model)
    reads_data = config.routing.init == "data" or config.routing.selection == "probed"
    if first_N and reads_data:
        initialise_from_data(model, first_N()[None])
    return model


@torch.no_grad()
def initialise_from_data(model: nn.Module, tokens_BN: Tensor) -> None:
    """Start the centroids of all layers at vectors of one training sequence, on every rank alike.

    The loss of the sequence is computed once, without dropout; the centroids of a layer start as it
    reaches them. Those that it does not reach, or reaches with padding alone, start at the next
    training batch.
    """
    was_training = model.training
    model.eval()
    for centroids in all_centroids(model):
        centroids.seed_with_next = True
        centroids.train()
    model(tokens_BN[:1])
    model.train(was_training)


def check_savable(model: nn.Module) -> None:
    """Raise `UserError` for a tensor that no reader of a checkpoint would take."""
    change = "keep it contiguous and real, or register it with persistent=False"
    for name, tensor in model.state_dict().items():
        problem = tensor_problem(tensor)
        if problem:
            raise UserError(f"{name} is {problem}, which no checkpoint holds: {change}")


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed torch on all devices, the only source of random numbers here.

    Every rank draws the weights with `rank=0`.
    """
    torch.manual_seed(int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))
