"""Products in the types of their factors, also where a caller has switched autocast on."""

import contextlib

import torch
from torch import Tensor


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which products of tensors on the device of `x` keep their types."""
    if x.device.type == "meta":  # shapes alone, of which torch knows no autocast
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)
