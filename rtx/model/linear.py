"""Products of activations with weights: torch's own, or on a CPU oneDNN's, which some processors do twice as fast.

Shapes: R rows, I units in, O units out.
"""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEWEST, TIMED = 64, 1024
"""Rows from which oneDNN is worth its copies of inputs and outputs; rows that are timed at the most."""
MARGIN = 0.8
"""What share of torch's time oneDNN's may be where it is chosen: near to a tie, chance would choose the bits."""


class Product(torch.autograd.Function):
    """x W^T + b by oneDNN. torch's own derivative would keep a copy of x in oneDNN's layout beside x itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return onednn_product(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (x, weight_OI), gradient = ctx.saved_tensors, gradients[0]
        x_RI, gradient_RO = x.flatten(0, -2), gradient.flatten(0, -2)
        of_bias_O = gradient_RO.sum(0) if ctx.needs_input_grad[2] else None
        return onednn_product(gradient, weight_OI.T), onednn_product(gradient_RO.T, x_RI.T), of_bias_O


def onednn_product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return F.linear(x.to_mkldnn(), weight_OI, bias_O).to_dense()


class Linear(nn.Linear):
    """As torch's; with `by_onednn` large products in float32 on a CPU are oneDNN's."""

    by_onednn = False

    def forward(self, input: Tensor) -> Tensor:
        is_plain = input.dtype != torch.float32 or input.device.type != "cpu" or torch.is_autocast_enabled("cpu")
        if not self.by_onednn or is_plain or input.numel() < FEWEST * self.in_features or torch.compiler.is_compiling():
            return super().forward(input)
        return Product.apply(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> None:
    """Let a model's products be oneDNN's, wherever torch has it."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.by_onednn = torch.backends.mkldnn.is_available()


def faster_products(rows: int, inputs: int, outputs: int) -> str:
    """Return whose products `[R, I] x [I, O]` are the faster ones on this machine, forward and backward.

    "onednn" or "torch"; some milliseconds of both, in turn.
    """
    if not torch.backends.mkldnn.is_available():
        return "torch"
    rows = min(rows, TIMED)
    with torch.random.fork_rng(devices=[]):  # nothing that is drawn later depends on it
        layer, x_RI = Linear(inputs, outputs), torch.randn(rows, inputs, requires_grad=True)
    gradient_RO, best = torch.ones(rows, outputs), {}
    for _ in range(6):
        for layer.by_onednn in (False, True):
            start = time.perf_counter()
            torch.autograd.grad(layer(x_RI), [x_RI, *layer.parameters()], gradient_RO)
            seconds = time.perf_counter() - start
            best[layer.by_onednn] = min(seconds, best.get(layer.by_onednn, seconds))
    return "onednn" if best[True] < MARGIN * best[False] else "torch"
