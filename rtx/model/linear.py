"""Products of activations with weights: large ones in float32 on a CPU by oneDNN, all others torch's own.

For these torch asks MKL, which takes twice as long on processors that are not Intel's.

Shapes: R rows, I units in, O units out.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGE = 1 << 25
"""Multiplications from which oneDNN is worth its copies of inputs and outputs."""


class Product(torch.autograd.Function):
    """x W^T + b by oneDNN. torch's own derivative would keep a copy of x in oneDNN's layout beside x itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return F.linear(x.to_mkldnn(), weight_OI, bias_O).to_dense()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight_OI), (*_, biased) = ctx.saved_tensors, ctx.needs_input_grad
        given = x.to_mkldnn(), gradients[0].to_mkldnn(), weight_OI, (True, True, biased)
        of_x, of_weight_OI, of_bias_O = torch.ops.aten.mkldnn_linear_backward(*given)
        return of_x.to_dense(), of_weight_OI, of_bias_O if biased else None


class Linear(nn.Linear):
    """As torch's, but for who multiplies; `products` is `hardware.products`."""

    products = "torch"

    def forward(self, input: Tensor) -> Tensor:
        is_large = input.numel() * self.out_features >= LARGE and input.dtype == torch.float32
        by_torch = (
            self.products == "torch"
            or input.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
        )
        if (
            by_torch
            or not is_large
            or torch.compiler.is_compiling()
            or not torch.backends.mkldnn.is_available()
        ):
            return super().forward(input)
        return Product.apply(input, self.weight, self.bias)
