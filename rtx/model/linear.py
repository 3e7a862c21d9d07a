"""Products of activations with weights: large float32 ones on a CPU by oneDNN, all others by torch.

For large float32 products torch calls MKL, which takes twice as long on processors that are not
Intel's.

Shapes: R rows, I inputs of a row, O outputs of a row.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGE = 1 << 25
"""Number of multiplications from which oneDNN is worth its copies of inputs and outputs."""


class Product(torch.autograd.Function):
    """x W^T + b by oneDNN.

    torch's own derivative would keep a copy of x in oneDNN's layout beside x itself.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        product = F.linear(x.to_mkldnn(), weight_OI, bias_O)
        return product.to_dense()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        has_bias = ctx.needs_input_grad[2]
        dx, dweight_OI, dbias_O = torch.ops.aten.mkldnn_linear_backward(
            x.to_mkldnn(),
            gradients[0].to_mkldnn(),
            weight_OI,
            (True, True, has_bias),
        )
        if not has_bias:
            dbias_O = None
        return dx.to_dense(), dweight_OI, dbias_O


class Linear(nn.Linear):
    """`nn.Linear` that may use oneDNN for large float32 products on a CPU."""

    products = "torch"
    """"torch", or "onednn" for large products; see `use_products`."""

    def forward(self, input: Tensor) -> Tensor:
        if self.uses_onednn(input):
            return Product.apply(input, self.weight, self.bias)
        return super().forward(input)

    def uses_onednn(self, input: Tensor) -> bool:
        """Return whether oneDNN computes the product with these inputs."""
        if self.products == "torch" or input.device.type != "cpu":
            return False
        if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            return False
        is_large = input.numel() * self.out_features >= LARGE
        is_float32 = input.dtype == torch.float32
        return is_large and is_float32 and torch.backends.mkldnn.is_available()


def use_products(model: nn.Module, products: str) -> None:
    """Let all `Linear` layers of a model compute their products by "torch" or "onednn"."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.products = products
