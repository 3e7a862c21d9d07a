"""The arithmetic of training (hardware.precision): types of weights and of forward passes."""

import contextlib
from collections.abc import Iterator

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn

WEIGHT_TYPES = {"fp64": torch.float64, "bf16-true": torch.bfloat16}
"""The type of weights by hardware.precision, where it is not float32."""


class Arithmetic(Precision):
    """hardware.precision for Lightning, without its context around the training step.

    Lightning would enter the context for the whole step. Backward pass, clipping and optimizer must
    not run in it, so each forward pass enters it by itself. Validation has it from Lightning.

    With bf16-true weights, gradients and the residual stream are in bfloat16. Lightning's plugin
    for that makes bfloat16 the type of every new tensor as well: random heads would draw other
    numbers.

    Args:
        name: fp32, tf32, bf16, bf16-true or fp64.
        device: cpu or cuda.
    """

    def __init__(self, name: str, device: str) -> None:
        super().__init__()
        self.name = name
        self.device = device

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Give the parameters of a module their type, in place."""
        if self.name in WEIGHT_TYPES:
            return module.to(WEIGHT_TYPES[self.name])
        return module

    def forward_context(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of a forward pass."""
        if self.name == "bf16":
            return torch.autocast(self.device, torch.bfloat16)
        if self.name == "fp64":
            return new_tensors_in(torch.float64)
        return contextlib.nullcontext()

    def train_step_context(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that does nothing: `forward_context` takes its place."""
        return contextlib.nullcontext()


@contextlib.contextmanager
def new_tensors_in(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default type of new floating-point tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
