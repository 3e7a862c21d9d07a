"""torch's attention kernel on a CPU, with its products by oneDNN where that is faster (`rtx.attention.products`).

Shapes: B sequences, H heads, N positions, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtx.attention.derivatives import first_alone
from rtx.attention.products import wide_products


class CausalKernel(torch.autograd.Function):
    """softmax(scale * q k^T) v over every position up to the query's own, float32 on a CPU.

    Written out because the products of the backward pass want the same treatment as those of the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, scale: float) -> Tensor:
        """Return the outputs `[B, H, N, D]`."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        q_BHND, k_BHND, v_BHND = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BHND, k_BHND, v_BHND))
        with wide_products(q_BHND):
            out_BHND, log_sum_BHN = kernel(q_BHND, k_BHND, v_BHND, 0.0, True, scale=scale)
        ctx.save_for_backward(q_BHND, k_BHND, v_BHND, out_BHND, log_sum_BHN)
        ctx.scale = scale
        return out_BHND

    @staticmethod
    @first_alone
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        with wide_products(gradients[0]):
            return *kernel(gradients[0].contiguous(), *ctx.saved_tensors, 0.0, True, scale=ctx.scale), None
