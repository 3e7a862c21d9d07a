"""The norms of a model, all of one kind: torch's LayerNorm or RMSNorm."""

import torch
from torch import Tensor, nn

from rtx.settings.schema import ModelConfig


def make_norm(config: ModelConfig, size: int) -> nn.Module:
    """Return a norm of vectors with `size` numbers, of the kind `model.norm_kind`.

    layernorm has a scale and a bias; rmsnorm (Zhang and Sennrich 2019) has a scale alone.
    """
    epsilon = config.norm_eps
    if config.norm_kind == "rmsnorm":
        return nn.RMSNorm(size, eps=epsilon)
    return nn.LayerNorm(size, eps=epsilon)


def without_gradient(norm: nn.Module, x: Tensor) -> Tensor:
    """Return the normalised vectors; the parameters of the norm get no gradient."""
    parameters = {}
    for name, parameter in norm.named_parameters():
        parameters[name] = parameter.detach()
    return torch.func.functional_call(norm, parameters, (x,))
