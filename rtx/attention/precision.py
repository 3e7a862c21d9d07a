"""Number types: float32 or wider for selections, norms and sums, and products without autocast."""

import contextlib

import torch
from torch import Tensor


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 for float64: the type of selections, norms and sums."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """Return the numbers in float32 or wider."""
    wide = wide_type(x.dtype)
    return x.to(wide)


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which products of tensors on the device of `x` keep their types.

    A caller may have switched autocast on.
    """
    device = x.device.type
    # Tensors of shapes alone: torch has no autocast for their device.
    if device == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
