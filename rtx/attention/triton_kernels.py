"""Triton kernels of attention inside packed lists of members; `triton_clusters.py` calls them.

Lists are cut into tiles of neighbouring slots, one program each. A tile's rows are fetched by their numbers inside the
kernel; no gathered copy is ever written. Members' results are summed into positions in a fixed order, without atomics.

Shapes: R rows, M members of all lists, T tiles, D size of a query and a key, E of a value; in a kernel Q slots of
queries, K slots of keys, S either. `WIDE` sizes are powers of two, of 16 at least; columns behind the true size are
zeros. Pointers carry the shape of what they point to.
"""

# Triton's own types do not describe what kernels may do with tensors.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def columns(real_S, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Return which cells `[S, WIDE]` of some rows exist."""
    column_D = tl.arange(0, WIDE)
    return real_S[:, None] & (column_D < SIZE)[None, :]


INTERPRETED = not isinstance(columns, triton.JITFunction)
"""True where TRITON_INTERPRET=1 was set before this module was imported: the kernels run on CPU tensors."""
WIDEN = tl.constexpr(INTERPRETED)


@triton.jit
def multiply(x_SD, y_DS, PRECISION: tl.constexpr):
    """Return the matrix product of two tiles, added up in float32."""
    if WIDEN:  # the interpreter would multiply the bits of bfloat16 as if they were integers; products are the same
        x_SD, y_DS = x_SD.to(tl.float32), y_DS.to(tl.float32)
    return tl.dot(x_SD, y_DS, input_precision=PRECISION)


@triton.jit
def places(row_S, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Return the offsets `[S, WIDE]` of some rows; 64 bits, since a tensor may have more than 2^31 elements."""
    return row_S.to(tl.int64)[:, None] * SIZE + tl.arange(0, WIDE)[None, :]


@triton.jit
def load_rows(x_RD, row_S, real_S, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Return rows `[S, WIDE]`, zeros where they are not real."""
    return tl.load(x_RD + places(row_S, SIZE, WIDE), mask=columns(real_S, SIZE, WIDE), other=0.0)


@triton.jit
def store_rows(x_RD, row_S, real_S, value_SD, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Write the real rows."""
    value_SD = value_SD.to(x_RD.dtype.element_ty)
    tl.store(x_RD + places(row_S, SIZE, WIDE), value_SD, mask=columns(real_S, SIZE, WIDE))


@triton.jit
def sees(slot_Q1, slot_1K, count, window, SKIP: tl.constexpr):
    """Return which keys each query reads; broadcasts. SKIP: 1 where the first of a list alone reads itself, else 0."""
    apart_QK = slot_Q1 - slot_1K
    seen_QK = (apart_QK >= SKIP) & (apart_QK < window) & (slot_Q1 < count)
    if SKIP:
        seen_QK = seen_QK | ((slot_Q1 == 0) & (slot_1K == 0))
    return seen_QK


@triton.jit
def forward_tiles(
    q_RD, k_RD, v_RE, row_M, first_T, count_T, slot_T, out_ME, norm_M, window, log_scale,
    SKIP: tl.constexpr, D: tl.constexpr, WIDE_D: tl.constexpr, E: tl.constexpr, WIDE_E: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write each member's output and the base-2 logarithm of the sum of its weights; one program for a tile of queries.

    `log_scale` is the factor on the logits times log2(e), so that weights are powers of 2.
    """
    tile = tl.program_id(0)
    count = tl.load(count_T + tile)
    if count == 0:
        return
    first, start = tl.load(first_T + tile), tl.load(slot_T + tile)
    slot_Q = start + tl.arange(0, TILE)
    real_Q = slot_Q < count
    row_Q = tl.load(row_M + first + slot_Q, mask=real_Q, other=0)
    q_QD = load_rows(q_RD, row_Q, real_Q, D, WIDE_D)
    most_Q = tl.full([TILE], float("-inf"), tl.float32)
    sum_Q = tl.zeros([TILE], tl.float32)
    total_QE = tl.zeros([TILE, WIDE_E], tl.float32)
    for key_start in range(tl.maximum(start - window + 1, 0), tl.minimum(start + TILE, count), STEP):
        slot_K = key_start + tl.arange(0, STEP)
        real_K = slot_K < count
        row_K = tl.load(row_M + first + slot_K, mask=real_K, other=0)
        k_KD = load_rows(k_RD, row_K, real_K, D, WIDE_D)
        v_KE = load_rows(v_RE, row_K, real_K, E, WIDE_E)
        logit_QK = multiply(q_QD, tl.trans(k_KD), PRECISION) * log_scale
        logit_QK = tl.where(sees(slot_Q[:, None], slot_K[None, :], count, window, SKIP), logit_QK, float("-inf"))
        higher_Q = tl.maximum(most_Q, tl.max(logit_QK, 1))
        # A query may see nothing in its first blocks: -inf minus -inf would be NaN.
        base_Q = tl.where(higher_Q == float("-inf"), 0.0, higher_Q)
        weight_QK = tl.exp2(logit_QK - base_Q[:, None])
        shrink_Q = tl.exp2(most_Q - base_Q)
        sum_Q = sum_Q * shrink_Q + tl.sum(weight_QK, 1)
        total_QE = total_QE * shrink_Q[:, None]
        total_QE += multiply(weight_QK.to(v_KE.dtype), v_KE, PRECISION)
        most_Q = higher_Q
    sum_Q = tl.where(real_Q, sum_Q, 1.0)
    store_rows(out_ME, first + slot_Q, real_Q, total_QE / sum_Q[:, None], E, WIDE_E)
    tl.store(norm_M + first + slot_Q, most_Q + tl.log2(sum_Q), mask=real_Q)


@triton.jit
def prepare_members(
    grad_RE, out_ME, row_M, begin_R1, share_M, delta_M, M,
    E: tl.constexpr, WIDE_E: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Write what a member has of its position's mean, 1 / clusters, and that share of gradient · output."""
    member_S = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    real_S = member_S < M
    row_S = tl.load(row_M + member_S, mask=real_S, other=0)
    begin_S, end_S = tl.load(begin_R1 + row_S), tl.load(begin_R1 + row_S + 1)
    share_S = 1.0 / tl.maximum(end_S - begin_S, 1).to(tl.float32)
    grad_SE = load_rows(grad_RE, row_S, real_S, E, WIDE_E).to(tl.float32)
    out_SE = load_rows(out_ME, member_S, real_S, E, WIDE_E).to(tl.float32)
    tl.store(share_M + member_S, share_S, mask=real_S)
    tl.store(delta_M + member_S, share_S * tl.sum(grad_SE * out_SE, 1), mask=real_S)


@triton.jit
def load_queries(
    q_RD, grad_RE, row_M, norm_M, share_M, delta_M, first, count, slot_Q,
    D: tl.constexpr, WIDE_D: tl.constexpr, E: tl.constexpr, WIDE_E: tl.constexpr,
):  # fmt: skip
    """Return some queries of a list, the gradients of their outputs, and the forward pass's numbers of them."""
    real_Q = slot_Q < count
    row_Q = tl.load(row_M + first + slot_Q, mask=real_Q, other=0)
    q_QD = load_rows(q_RD, row_Q, real_Q, D, WIDE_D)
    grad_QE = load_rows(grad_RE, row_Q, real_Q, E, WIDE_E)
    norm_Q = tl.load(norm_M + first + slot_Q, mask=real_Q, other=0.0)
    share_Q = tl.load(share_M + first + slot_Q, mask=real_Q, other=0.0)
    delta_Q = tl.load(delta_M + first + slot_Q, mask=real_Q, other=0.0)
    return q_QD, grad_QE, norm_Q, share_Q, delta_Q


@triton.jit
def query_gradient(
    total_QD, q_RD, k_RD, v_RE, grad_RE, row_M, norm_M, share_M, delta_M, first, count, start, window, log_scale,
    SKIP: tl.constexpr, D: tl.constexpr, WIDE_D: tl.constexpr, E: tl.constexpr, WIDE_E: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `total_QD` plus the gradient `[Q, D]` of a tile of queries, still without the factor on the logits."""
    slot_Q = start + tl.arange(0, TILE)
    q_QD, grad_QE, norm_Q, share_Q, delta_Q = load_queries(
        q_RD, grad_RE, row_M, norm_M, share_M, delta_M, first, count, slot_Q, D, WIDE_D, E, WIDE_E
    )
    for key_start in range(tl.maximum(start - window + 1, 0), tl.minimum(start + TILE, count), STEP):
        slot_K = key_start + tl.arange(0, STEP)
        real_K = slot_K < count
        row_K = tl.load(row_M + first + slot_K, mask=real_K, other=0)
        k_KD = load_rows(k_RD, row_K, real_K, D, WIDE_D)
        v_KE = load_rows(v_RE, row_K, real_K, E, WIDE_E)
        logit_QK = multiply(q_QD, tl.trans(k_KD), PRECISION) * log_scale - norm_Q[:, None]
        seen_QK = sees(slot_Q[:, None], slot_K[None, :], count, window, SKIP)
        weight_QK = tl.exp2(tl.where(seen_QK, logit_QK, float("-inf")))
        slope_QK = multiply(grad_QE, tl.trans(v_KE), PRECISION) * share_Q[:, None] - delta_Q[:, None]
        total_QD += multiply((weight_QK * slope_QK).to(k_KD.dtype), k_KD, PRECISION)
    return total_QD


@triton.jit
def key_gradients(
    q_RD, k_RD, v_RE, grad_RE, row_M, norm_M, share_M, delta_M, first, count, start, window, log_scale,
    SKIP: tl.constexpr, D: tl.constexpr, WIDE_D: tl.constexpr, E: tl.constexpr, WIDE_E: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradients of a tile of keys `[K, D]`, without the factor on the logits, and of values `[K, E]`."""
    slot_K = start + tl.arange(0, TILE)
    real_K = slot_K < count
    row_K = tl.load(row_M + first + slot_K, mask=real_K, other=0)
    k_KD = load_rows(k_RD, row_K, real_K, D, WIDE_D)
    v_KE = load_rows(v_RE, row_K, real_K, E, WIDE_E)
    total_KD = tl.zeros([TILE, WIDE_D], tl.float32)
    total_KE = tl.zeros([TILE, WIDE_E], tl.float32)
    for query_start in range(start, tl.minimum(start + TILE + window - 1, count), STEP):
        slot_Q = query_start + tl.arange(0, STEP)
        q_QD, grad_QE, norm_Q, share_Q, delta_Q = load_queries(
            q_RD, grad_RE, row_M, norm_M, share_M, delta_M, first, count, slot_Q, D, WIDE_D, E, WIDE_E
        )
        logit_KQ = multiply(k_KD, tl.trans(q_QD), PRECISION) * log_scale - norm_Q[None, :]
        seen_KQ = sees(slot_Q[None, :], slot_K[:, None], count, window, SKIP)
        weight_KQ = tl.exp2(tl.where(seen_KQ, logit_KQ, float("-inf")))
        total_KE += multiply((weight_KQ * share_Q[None, :]).to(grad_QE.dtype), grad_QE, PRECISION)
        slope_KQ = multiply(v_KE, tl.trans(grad_QE), PRECISION) * share_Q[None, :] - delta_Q[None, :]
        total_KD += multiply((weight_KQ * slope_KQ).to(q_QD.dtype), q_QD, PRECISION)
    return total_KD, total_KE


@triton.jit
def backward_tiles(
    q_RD, k_RD, v_RE, grad_RE, row_M, first_T, count_T, slot_T, norm_M, share_M, delta_M,
    grad_q_MD, grad_k_MD, grad_v_ME, window, scale, log_scale,
    SHARED: tl.constexpr, SKIP: tl.constexpr, D: tl.constexpr, WIDE_D: tl.constexpr, E: tl.constexpr,
    WIDE_E: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write each member's gradients as a query, a key and a value; one program for a tile, in both parts.

    SHARED: queries are the keys, and `grad_q_MD` takes the sum of both gradients.
    """
    tile = tl.program_id(0)
    count = tl.load(count_T + tile)
    if count == 0:
        return
    first, start = tl.load(first_T + tile), tl.load(slot_T + tile)
    slot_S = start + tl.arange(0, TILE)
    key_SD, value_SE = key_gradients(
        q_RD, k_RD, v_RE, grad_RE, row_M, norm_M, share_M, delta_M, first, count, start, window, log_scale,
        SKIP, D, WIDE_D, E, WIDE_E, TILE, STEP, PRECISION,
    )  # fmt: skip
    store_rows(grad_v_ME, first + slot_S, slot_S < count, value_SE, E, WIDE_E)
    if not SHARED:
        store_rows(grad_k_MD, first + slot_S, slot_S < count, key_SD * scale, D, WIDE_D)
        key_SD = tl.zeros([TILE, WIDE_D], tl.float32)
    query_SD = query_gradient(
        key_SD, q_RD, k_RD, v_RE, grad_RE, row_M, norm_M, share_M, delta_M, first, count, start, window, log_scale,
        SKIP, D, WIDE_D, E, WIDE_E, TILE, STEP, PRECISION,
    )  # fmt: skip
    store_rows(grad_q_MD, first + slot_S, slot_S < count, query_SD * scale, D, WIDE_D)


@triton.jit
def sum_members(
    part_MD, member_M, begin_R1, out_RD, R,
    MEAN: tl.constexpr, D: tl.constexpr, WIDE_D: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Write for each row the sum (or mean) over its members, always in the order of `member_M`; zero without any."""
    row_S = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    real_S = row_S < R
    begin_S = tl.load(begin_R1 + row_S, mask=real_S, other=0)
    times_S = tl.load(begin_R1 + row_S + 1, mask=real_S, other=0) - begin_S
    # Rows that have no more members read one again and throw it away: Triton 3.6 and 3.7 cannot compile a mask here.
    begin_S = tl.where(times_S > 0, begin_S, 0)
    last_S = tl.maximum(times_S - 1, 0)
    total_SD = tl.zeros([SPAN, WIDE_D], tl.float32)
    for turn in range(0, tl.max(times_S, 0).to(tl.int32)):
        member_S = tl.load(member_M + begin_S + tl.minimum(last_S, turn))
        total_SD += load_rows(part_MD, member_S, turn < times_S, D, WIDE_D).to(tl.float32)
    if MEAN:
        total_SD = total_SD / tl.maximum(times_S, 1).to(tl.float32)[:, None]
    store_rows(out_RD, row_S, real_S, total_SD, D, WIDE_D)
