"""Triton kernels of LayerNorm without scale or bias; `norm.py` launches them.

Of a vector x of D numbers (Ba et al. 2016, equation 4, without gain and bias)

    y = (x - mean of x) * factor    with    factor = 1 / sqrt(variance of x + epsilon).

A row is a position of one sequence and head, r = (b * H + h) * N + n. A program has BR rows of BD
numbers, BD the least power of two that holds a vector. The grid is (tiles of rows,). All numbers
are float32 in registers.

Shapes: B sequences, H heads, N positions, D numbers of a vector, R rows. Lower-case letters are the
axes of a tile in registers: r rows, d numbers of a vector. `valid_rd` is False after R and D.
x_b, x_h and x_n are the strides of `x`, whose last stride is 1, and so on.
"""

# pyright: basic, reportGeneralTypeIssues=false
# Triton compiles what pyright takes for Python: its functions have no types for a checker.
import triton
import triton.language as tl


@triton.jit
def tile_of_program(R, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """Return the rows of a program, the numbers d of a vector, and which of [BR, BD] are valid."""
    row_r = tl.program_id(0) * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)
    valid_rd = (row_r < R)[:, None] & (d < D)[None, :]
    return row_r, d, valid_rd


@triton.jit
def offsets_in_view(row_r, d, strides, H, N):
    """Return the offsets of rows in a tensor `[B, H, N, D]` with strides of b, h and n.

    In int64, as a view may have strides beyond int32.
    """
    b_stride, h_stride, n_stride = strides
    group_r = row_r // N
    h_r = (group_r % H).to(tl.int64)
    b_r = (group_r // H).to(tl.int64)
    n_r = (row_r % N).to(tl.int64)
    offset_r = b_r * b_stride + h_r * h_stride + n_r * n_stride
    return offset_r[:, None] + d[None, :]


@triton.jit
def offsets_in_matrix(row_r, d, D: tl.constexpr):
    """Return the offsets of rows in a contiguous matrix [R, D], in int64."""
    return row_r.to(tl.int64)[:, None] * D + d[None, :]


@triton.jit
def normalised(x_rd, valid_rd, epsilon, D: tl.constexpr):
    """Return the normalised vectors, and the factor by which they differ from x - mean.

    Args:
        x_rd: 0 where not valid.
    """
    mean_r = tl.sum(x_rd, 1) / D
    distance_rd = tl.where(valid_rd, x_rd - mean_r[:, None], 0.0)
    variance_r = tl.sum(distance_rd * distance_rd, 1) / D
    factor_r = 1.0 / tl.sqrt_rn(variance_r + epsilon)
    return distance_rd * factor_r[:, None], factor_r


@triton.jit
def normalise_kernel(
    # Input
    x,  # [B, H, N, D]
    # Outputs
    wide,  # [R, D] float32
    narrow,  # [R, D] in the type of x; with NARROW
    # Strides
    x_b,
    x_h,
    x_n,
    # Sizes
    H,
    N,
    R,
    # Number
    epsilon,
    # Constants
    D: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Write the normalised vectors of BR rows, in float32 and in the type of x."""
    row_r, d, valid_rd = tile_of_program(R, D, BD, BR)
    x_offset_rd = offsets_in_view(row_r, d, (x_b, x_h, x_n), H, N)
    x_rd = tl.load(x + x_offset_rd, valid_rd, 0.0).to(tl.float32)
    y_rd, _ = normalised(x_rd, valid_rd, epsilon, D)
    offset_rd = offsets_in_matrix(row_r, d, D)
    tl.store(wide + offset_rd, y_rd, valid_rd)
    if NARROW:
        tl.store(narrow + offset_rd, y_rd.to(narrow.dtype.element_ty), valid_rd)


@triton.jit
def normalise_backward_kernel(
    # Inputs
    x,  # [B, H, N, D]
    dwide,  # [R, D] the gradient of `wide`; with WIDE
    dnarrow,  # [R, D] that of `narrow`; with NARROW
    # Output
    dx,  # [B, H, N, D]
    # Strides
    x_b,
    x_h,
    x_n,
    dx_b,
    dx_h,
    dx_n,
    # Sizes
    H,
    N,
    R,
    # Number
    epsilon,
    # Constants
    D: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Write the gradients of BR rows of x.

    With the normalised vector y and its gradient dy, the sum of those of `wide` and `narrow`,

        dx = factor * (dy - mean of dy - y * mean of (dy * y)).
    """
    row_r, d, valid_rd = tile_of_program(R, D, BD, BR)
    x_offset_rd = offsets_in_view(row_r, d, (x_b, x_h, x_n), H, N)
    x_rd = tl.load(x + x_offset_rd, valid_rd, 0.0).to(tl.float32)
    y_rd, factor_r = normalised(x_rd, valid_rd, epsilon, D)
    offset_rd = offsets_in_matrix(row_r, d, D)
    dy_rd = tl.zeros([BR, BD], tl.float32)
    if WIDE:
        dy_rd += tl.load(dwide + offset_rd, valid_rd, 0.0)
    if NARROW:
        dy_rd += tl.load(dnarrow + offset_rd, valid_rd, 0.0).to(tl.float32)

    mean_of_dy_r = tl.sum(dy_rd, 1) / D
    mean_of_product_r = tl.sum(dy_rd * y_rd, 1) / D
    dx_rd = dy_rd - mean_of_dy_r[:, None] - y_rd * mean_of_product_r[:, None]
    dx_rd = dx_rd * factor_r[:, None]
    dx_offset_rd = offsets_in_view(row_r, d, (dx_b, dx_h, dx_n), H, N)
    tl.store(dx + dx_offset_rd, dx_rd.to(dx.dtype.element_ty), valid_rd)
