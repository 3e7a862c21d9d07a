"""LayerNorm without scale or bias of the vectors of heads, by Triton kernels.

`normalise` is an operator with gradients. One pass over the vectors returns them normalised in two
types: in float32, in which clusters are chosen, and in their own, in which attention reads them. By
torch's `layer_norm` this takes several passes: to widen, to normalise and to narrow them.

Shapes: B sequences, H heads, N positions, D head size, R = B * H * N rows.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rtx.attention.engine import packed_attention
from rtx.attention.engine.rounding import power_of_two, whole_pieces
from rtx.attention.typed_torch import custom_op

EPSILON = 1e-6
"""Added to the variance."""
MAX_SIZE = 1024
"""The greatest head size: a program holds whole vectors in registers."""
TILE = 2048
"""How many numbers a program holds, vectors filled up to a power of two."""


@functools.cache
def kernels() -> ModuleType:
    """Return the module of the kernels, which needs Triton."""
    from rtx.attention.engine import norm_kernels

    return norm_kernels


def can_normalise(x_BHND: Tensor) -> bool:
    """Return whether the kernels can normalise these vectors."""
    if x_BHND.dtype not in packed_attention.TYPES:
        return False
    if not 1 <= x_BHND.shape[-1] <= MAX_SIZE:
        return False
    return packed_attention.can_run(x_BHND.device)


@custom_op("rtx::normalise")
def normalise(x_BHND: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalised vectors in float32, and in the type of `x_BHND`, both contiguous.

    The second tensor is empty where that type is float32: an operator may not return a tensor
    twice.

    Args:
        x_BHND: float32, float16 or bfloat16; a view with any strides.
    """
    x_BHND = packed_attention.unit_stride(x_BHND)
    wide_BHND, narrow_BHND = empty_results(x_BHND)
    rows = x_BHND.shape[:3].numel()
    if rows:
        constants = tile_constants(x_BHND.shape[-1])
        programs = whole_pieces(rows, constants["BR"])
        with torch.cuda.device_of(x_BHND):
            kernels().normalise_kernel[(programs,)](
                x=x_BHND,
                wide=wide_BHND,
                narrow=narrow_BHND,
                **strides_of("x", x_BHND),
                **row_sizes(x_BHND),
                epsilon=EPSILON,
                **constants,
                NARROW=narrow_BHND.numel() > 0,
                num_warps=4,
            )
    return wide_BHND, narrow_BHND


@normalise.register_fake
def empty_results(x_BHND: Tensor) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes that `normalise` returns."""
    wide_BHND = x_BHND.new_empty(x_BHND.shape, dtype=torch.float32)
    narrow_shape = (0,) if x_BHND.dtype == torch.float32 else x_BHND.shape
    return wide_BHND, x_BHND.new_empty(narrow_shape)


def tile_constants(size: int) -> dict[str, int]:
    """Return the constants of the kernels for heads of a size; tiles have BR rows of BD numbers."""
    width = power_of_two(size)
    return {"D": size, "BD": width, "BR": max(1, TILE // width)}


def strides_of(name: str, x_BHND: Tensor) -> dict[str, int]:
    """Return the strides of a tensor, by the names that the kernels give them."""
    b_stride, h_stride, n_stride, _ = x_BHND.stride()
    return {f"{name}_b": b_stride, f"{name}_h": h_stride, f"{name}_n": n_stride}


def row_sizes(x_BHND: Tensor) -> dict[str, int]:
    """Return the numbers of heads, positions and rows, by their names in the kernels."""
    B, H, N, _ = x_BHND.shape
    return {"H": H, "N": N, "R": B * H * N}


@custom_op("rtx::normalise_backward")
def normalise_backward(
    x_BHND: Tensor,
    dwide_BHND: Tensor | None,
    dnarrow_BHND: Tensor | None,
) -> Tensor:
    """Return the gradient of `x_BHND`, in its layout, from those of the results of `normalise`.

    Args:
        dwide_BHND, dnarrow_BHND: None if nothing depends on that result.
    """
    x_BHND = packed_attention.unit_stride(x_BHND)
    dx_BHND = torch.empty_like(x_BHND)
    rows = x_BHND.shape[:3].numel()
    has_wide = dwide_BHND is not None
    has_narrow = dnarrow_BHND is not None
    if rows:
        # The kernel does not read an absent gradient, but needs a pointer.
        dwide_BHND = dwide_BHND.contiguous() if has_wide else x_BHND
        dnarrow_BHND = dnarrow_BHND.contiguous() if has_narrow else x_BHND
        constants = tile_constants(x_BHND.shape[-1])
        programs = whole_pieces(rows, constants["BR"])
        with torch.cuda.device_of(x_BHND):
            kernels().normalise_backward_kernel[(programs,)](
                x=x_BHND,
                dwide=dwide_BHND,
                dnarrow=dnarrow_BHND,
                dx=dx_BHND,
                **strides_of("x", x_BHND),
                **strides_of("dx", dx_BHND),
                **row_sizes(x_BHND),
                epsilon=EPSILON,
                **constants,
                WIDE=has_wide,
                NARROW=has_narrow,
                num_warps=4,
            )
    return dx_BHND


@normalise_backward.register_fake
def _(x_BHND: Tensor, dwide_BHND: Tensor | None, dnarrow_BHND: Tensor | None) -> Tensor:
    return torch.empty_like(packed_attention.unit_stride(x_BHND))


def save_for_backward(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    """Save on `ctx` what `gradient` reads."""
    ctx.save_for_backward(inputs[0])
    ctx.has_narrow = output[1].numel() > 0
    ctx.set_materialize_grads(False)  # a result that nothing depends on has gradient None


def gradient(ctx: Any, dwide_BHND: Tensor | None, dnarrow_BHND: Tensor | None) -> Tensor | None:
    """Return the gradient of the input of `normalise`."""
    if not ctx.has_narrow:
        dnarrow_BHND = None
    if dwide_BHND is None and dnarrow_BHND is None:
        return None
    (x_BHND,) = ctx.saved_tensors
    return normalise_backward(x_BHND, dwide_BHND, dnarrow_BHND)


normalise.register_autograd(gradient, setup_context=save_for_backward)
