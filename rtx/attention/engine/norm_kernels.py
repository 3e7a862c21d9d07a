"""Triton kernels of LayerNorm without scale or bias; `norm.py` launches them.

A program normalises BR rows. A row is a position of one sequence and head, r = (b * H + h) * N + n.

Shapes: B sequences, H heads, N positions, D numbers of a vector, R rows. A tile in registers has BR
rows of BD numbers, BD the least power of two that holds a vector. Lower-case letters are its axes:
r rows, d numbers of a vector. x_b, x_h and x_n are the strides of `x`, and so on.
"""

import triton
import triton.language as tl


@triton.jit
def places_of(row_r, stride_b, stride_h, stride_n, H, N):
    """Return where the vectors of rows begin in a tensor `[B, H, N, D]` with these strides.

    In int64, as a view may have strides beyond int32.
    """
    group_r = row_r // N
    head_r = (group_r % H).to(tl.int64)
    sequence_r = (group_r // H).to(tl.int64)
    position_r = (row_r % N).to(tl.int64)
    return sequence_r * stride_b + head_r * stride_h + position_r * stride_n


@triton.jit
def normalised(x_rd, real_rd, epsilon, D: tl.constexpr):
    """Return the normalised vectors, and the factor by which they differ from x - mean.

    Args:
        real_rd: false beyond R and D, where x_rd is 0.
    """
    mean_r = tl.sum(x_rd, 1) / D
    distance_rd = tl.where(real_rd, x_rd - mean_r[:, None], 0.0)
    variance_r = tl.sum(distance_rd * distance_rd, 1) / D
    factor_r = 1.0 / tl.sqrt_rn(variance_r + epsilon)
    return distance_rd * factor_r[:, None], factor_r


@triton.jit
def normalise_kernel(
    x, wide, narrow, x_b, x_h, x_n, H, N, R, epsilon,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Normalise BR rows.

    Args:
        x [B, H, N, D]: with any strides whose last is 1.
        epsilon: added to the variance.

    Writes:
        wide [R, D]: in float32.
        narrow [R, D]: with NARROW, in the type of x.
    """
    row_r = tl.program_id(0) * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)
    real_rd = (row_r < R)[:, None] & (d < D)[None, :]
    from_r = places_of(row_r, x_b, x_h, x_n, H, N)
    x_rd = tl.load(x + from_r[:, None] + d[None, :], real_rd, 0.0).to(tl.float32)
    y_rd, _ = normalised(x_rd, real_rd, epsilon, D)
    to_rd = row_r.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(wide + to_rd, y_rd, real_rd)
    if NARROW:
        tl.store(narrow + to_rd, y_rd.to(narrow.dtype.element_ty), real_rd)


@triton.jit
def normalise_backward_kernel(
    x, dwide, dnarrow, dx, x_b, x_h, x_n, dx_b, dx_h, dx_n, H, N, R, epsilon,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Write the gradient of BR rows of x from those of `wide` and `narrow`.

    With the normalised vector y = (x - mean) * factor and its gradient dy

        dx = factor * (dy - mean of dy - y * mean of (dy * y)).

    Args:
        x, epsilon: see `normalise_kernel`.
        dwide [R, D]: read with WIDE.
        dnarrow [R, D]: read with NARROW.

    Writes:
        dx [B, H, N, D]: with any strides whose last is 1.
    """
    row_r = tl.program_id(0) * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)
    real_rd = (row_r < R)[:, None] & (d < D)[None, :]
    from_r = places_of(row_r, x_b, x_h, x_n, H, N)
    x_rd = tl.load(x + from_r[:, None] + d[None, :], real_rd, 0.0).to(tl.float32)
    y_rd, factor_r = normalised(x_rd, real_rd, epsilon, D)
    at_rd = row_r.to(tl.int64)[:, None] * D + d[None, :]
    dy_rd = tl.zeros([BR, BD], tl.float32)
    if WIDE:
        dy_rd += tl.load(dwide + at_rd, real_rd, 0.0)
    if NARROW:
        dy_rd += tl.load(dnarrow + at_rd, real_rd, 0.0).to(tl.float32)
    mean_of_dy_r = tl.sum(dy_rd, 1) / D
    mean_of_product_r = tl.sum(dy_rd * y_rd, 1) / D
    dx_rd = dy_rd - mean_of_dy_r[:, None] - y_rd * mean_of_product_r[:, None]
    dx_rd = dx_rd * factor_r[:, None]
    to_r = places_of(row_r, dx_b, dx_h, dx_n, H, N)
    tl.store(dx + to_r[:, None] + d[None, :], dx_rd.to(dx.dtype.element_ty), real_rd)
