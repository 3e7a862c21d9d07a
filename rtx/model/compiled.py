"""torch.compile around a model: attention stays outside of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rtx.attention.pattern import Pattern


def compile_loss(model: nn.Module, loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled `loss`, a method of `model`; changes the model's patterns so that no graph takes them in.

    The sizes of their blocks depend on data, they keep statistics, and what they compute is in kernels of its own
    already; the matrices, norms and activations around them are compiled.
    """
    for pattern in model.modules():
        if isinstance(pattern, Pattern):
            pattern.forward = torch.compiler.disable(pattern.forward)  # type: ignore[method-assign]
    return torch.compile(loss)
