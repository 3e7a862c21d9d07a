"""The type of weights by hardware.precision, and a context for the type of new tensors."""

import contextlib
from collections.abc import Iterator

import torch

WEIGHT_TYPES = {"fp64": torch.float64, "bf16-true": torch.bfloat16}
"""The type of weights for each hardware.precision where it is not float32."""


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Return a context in which new floating-point tensors are of type `dtype` by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
