"""Intermediate results that the backward pass computes again instead of storing them."""

# pyright: reportUnknownVariableType=false
# torch declares no types of what `checkpoint` calls and returns.

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *inputs: Any, store: bool = False) -> Any:
    """Return function(*inputs), whose intermediates the backward pass computes again.

    Dropout draws the same mask again. Pass every large tensor among `inputs`: one that the function
    reaches in another way (as a variable of an enclosing function) stays in memory until the
    backward pass, even inside a larger block that is recomputed.

    Args:
        store: store the intermediates instead, as without this function.
    """
    if torch.is_grad_enabled() and not store:
        return checkpoint(function, *inputs, use_reentrant=False)
    return function(*inputs)
