"""First derivatives alone: for backward passes that are written out and cannot be differentiated themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Gradients = tuple[Tensor | None, ...]


def first_alone(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Let a backward pass refuse to be recorded (`create_graph=True`).

    torch's own `once_differentiable` refuses only where `.backward()` reaches it: `torch.autograd.grad` for one input
    would take the gradients for constants, and return a second derivative that is wrong.

    Raises:
        RuntimeError: when a graph of the backward pass is asked for.
    """
    once = once_differentiable(backward)  # what torch.compile knows, and leaves as it is

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Tensor) -> Gradients:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: this attention has first derivatives alone; backend='reference' has all of them"
            )
        return once(ctx, *gradients)

    return checked
