"""The product with a weight matrix, by whichever of PyTorch's own kernels is fastest for it.

Shapes: R rows (any leading dimensions), in P parts; I inputs, O outputs.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_ROWS = 256
"""Rows from which the convolution is used: below, its set-up outweighs the product (streaming has few)."""

FEW_IMAGES = 16
"""Images from which torch gives a convolution of one point to oneDNN on one thread, too."""

WIDE_CONVOLUTIONS = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether oneDNN is here and the processor has AVX-512."""


def linear(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + b, `[R, O]`, as `torch.nn.functional.linear` does, to rounding.

    On a CPU with AVX-512 float32 products are written as a convolution of one point: oneDNN's kernels use AVX-512 on
    every processor that has it, MKL's, which `linear` takes, on Intel's alone. On AMD's the product and both gradients
    are then about twice as fast.
    """
    if not by_convolution(x_RI, weight_OI):
        return F.linear(x_RI, weight_OI, bias_O)
    parts = images(x_RI.numel() // x_RI.shape[-1])
    x_PIR1 = x_RI.reshape(parts, -1, 1, x_RI.shape[-1]).permute(0, 3, 1, 2)
    out_POR1 = F.conv2d(x_PIR1, weight_OI[:, :, None, None], bias_O)
    return out_POR1.permute(0, 2, 3, 1).reshape(*x_RI.shape[:-1], len(weight_OI))


def images(rows: int) -> int:
    """Return how many images to call the rows: on one thread torch gives a convolution of a point to oneDNN from 16."""
    if torch.get_num_threads() > 1:
        return 1
    return next((parts for parts in range(FEW_IMAGES, 2 * FEW_IMAGES) if rows % parts == 0), 1)


def by_convolution(x_RI: Tensor, weight_OI: Tensor) -> bool:
    """Tell whether a product goes through oneDNN's convolution."""
    return (
        x_RI.device.type == "cpu"
        and x_RI.dtype == weight_OI.dtype == torch.float32
        and x_RI.numel() >= MIN_ROWS * x_RI.shape[-1]
        and WIDE_CONVOLUTIONS
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


class Linear(nn.Linear):
    """`torch.nn.Linear` by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the product `[R, O]`."""
        return linear(input, self.weight, cast("Tensor | None", self.bias))
