"""Triton kernels of attention over packed lists; `packed_attention.py` launches them and says what they compute.

A program works on a tile of query members, or of key members, that are neighbours in the lists. It
visits those key (or query) members that any of its own may read: as bounds of ranges never fall, these
are neighbours, too. Rows of queries, keys and values are gathered by the members' row numbers. What
depends on a pair is computed anew in every kernel and written nowhere but in tables by distance.

Exponentials are powers of 2, so logits are multiplied by log2(e) with the scale.

Shapes: Q query members and K key members of a tile, D and E padded head sizes of keys and values.
"""

# pyright: reportGeneralTypeIssues=false
# Triton compiles what pyright takes for Python: its ranges and functions have no types for a checker.

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
COUNTS = ["P", "M"]
"""What differs from call to call where lists depend on content: no reason to compile a kernel again."""


@triton.jit
def rows_of(x, row_S, real_S, b_stride, h_stride, n_stride, H, N, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Return the rows of a view `[B, H, N, SIZE]` by number (b * H + h) * N + n; zero where not real."""
    d = tl.arange(0, PADDED)
    head_S = row_S // N
    b_S = head_S // H
    at_S = b_S.to(tl.int64) * b_stride
    at_S += (head_S - b_S * H).to(tl.int64) * h_stride
    at_S += (row_S - head_S * N).to(tl.int64) * n_stride
    return tl.load(x + at_S[:, None] + d[None, :], real_S[:, None] & (d < SIZE)[None, :], 0.0)


@triton.jit
def load_tile(x, number_S, real_S, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Return rows of a matrix with SIZE columns."""
    d = tl.arange(0, PADDED)
    at_S = number_S.to(tl.int64) * SIZE
    return tl.load(x + at_S[:, None] + d[None, :], real_S[:, None] & (d < SIZE)[None, :], 0.0)


@triton.jit
def store_tile(x, number_S, real_S, y, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Write rows of a matrix with SIZE columns."""
    d = tl.arange(0, PADDED)
    at_S = number_S.to(tl.int64) * SIZE
    mask = real_S[:, None] & (d < SIZE)[None, :]
    tl.store(x + at_S[:, None] + d[None, :], y.to(x.dtype.element_ty), mask)


@triton.jit
def span(low, high, number_S, real_S, members):
    """Return the bounds of a tile's members, and the least and the greatest of all: (members, 0) for none."""
    low_S = tl.load(low + number_S, real_S, 0)
    high_S = tl.load(high + number_S, real_S, 0)
    least = tl.min(tl.where(low_S < high_S, low_S, members), 0)
    return low_S, high_S, least, tl.max(tl.where(low_S < high_S, high_S, 0), 0)


@triton.jit
def exponents(products, read, scale, value, low, high, p, m, real_p, real_m, P, M, X: tl.constexpr):
    """Return logits to base 2, -inf for pairs that are not read; p and m have shapes that broadcast."""
    s = tl.where(read, products * (scale * LOG2E), float("-inf"))
    for x in tl.static_range(X):
        value_m = tl.load(value + x * M + m, real_m, 0)
        low_p = tl.load(low + x * P + p, real_p, 0)
        high_p = tl.load(high + x * P + p, real_p, 0)
        s = tl.where((value_m >= low_p) & (value_m < high_p), float("-inf"), s)
    return s


@triton.jit
def sums_of(lse, p_Q, real_Q):
    """Return log-sums to base 2; inf where nothing is read, which makes all weights 0."""
    sum_Q = tl.load(lse + p_Q, real_Q, float("-inf"))
    return tl.where(sum_Q == float("-inf"), float("inf"), sum_Q * LOG2E)


@triton.jit
def distances(row_q, row_k, N, last):
    """Return the distance of every pair of rows, at least 0 and at most `last`."""
    return tl.minimum(tl.maximum(row_q % N - row_k % N, 0), last)


@triton.jit
def lookup(table, row, distance, last):
    """Return a table's entries by row and distance, in float32."""
    return tl.load(table + row.to(tl.int64) * (last + 1) + distance).to(tl.float32)


@triton.jit
def dropout_factors(seed, p, m, dropout, rescale):
    """Return by pair of members 0 where its weight is dropped and `rescale` elsewhere: the same in every kernel."""
    zero = p * 0 + m * 0
    number, _, _, _ = tl.philox(tl.load(seed), p + zero, m + zero, zero, zero)
    return tl.where(tl.uint_to_uniform_float(number) >= dropout, rescale, 0.0)


@triton.jit
def scatter(table, at_Q1, x_QK, distance_QK, last, first_Q, final_Q):
    """Write numbers of pairs by query member and distance, and return the sums for the first and final entry.

    One query reads many keys at these two entries, at any other one at most. Zeros are not written, so
    that pairs that are not read leave entries of others alone.
    """
    mask = (x_QK != 0.0) & (distance_QK > 0) & (distance_QK < last)
    tl.store(table + at_Q1 + distance_QK, x_QK.to(table.dtype.element_ty), mask)
    first_Q += tl.sum(tl.where(distance_QK == 0, x_QK, 0.0), 1)
    final_Q += tl.sum(tl.where(distance_QK == last, x_QK, 0.0), 1)
    return first_Q, final_Q


@triton.jit
def store_ends(table, at_Q1, real_Q, last, first_Q, final_Q):
    """Write the sums that `scatter` returns. With one entry both are the same."""
    first = table + at_Q1 + tl.zeros([1, 1], tl.int32)
    tl.store(first, first_Q[:, None].to(table.dtype.element_ty), real_Q[:, None])
    tl.store(first + last, final_Q[:, None].to(table.dtype.element_ty), real_Q[:, None])


@triton.jit(do_not_specialize=COUNTS)
def attend_kernel(
    q, k, v, query_row, key_row, hidden_value, hidden_low, hidden_high, table, seed,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, H, N, P, M, last, scale, dropout, rescale,
    start, stop, out, lse,
    D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
    X: tl.constexpr, BY_DISTANCE: tl.constexpr, DROPOUT: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write outputs and log-sums of BQ query members."""
    p_Q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    real_Q = p_Q < P
    start_Q, stop_Q, begin, end = span(start, stop, p_Q, real_Q, M)
    row_Q = tl.load(query_row + p_Q, real_Q, 0)
    q_QD = rows_of(q, row_Q, real_Q, q_b, q_h, q_n, H, N, D, D_PADDED)
    top_Q = tl.full([BQ], float("-inf"), tl.float32)
    total_Q = tl.zeros([BQ], tl.float32)
    out_QE = tl.zeros([BQ, DV_PADDED], tl.float32)
    for first in tl.range(begin, end, BK, num_stages=STAGES):
        m_K = first + tl.arange(0, BK)
        real_K = m_K < end
        row_K = tl.load(key_row + m_K, real_K, 0)
        k_KD = rows_of(k, row_K, real_K, k_b, k_h, k_n, H, N, D, D_PADDED)
        v_KE = rows_of(v, row_K, real_K, v_b, v_h, v_n, H, N, DV, DV_PADDED)
        s_QK = tl.dot(q_QD, tl.trans(k_KD), input_precision="ieee")
        if BY_DISTANCE:
            distance_QK = distances(row_Q[:, None], row_K[None, :], N, last)
            s_QK += lookup(table, row_Q[:, None], distance_QK, last)
        read_QK = (m_K[None, :] >= start_Q[:, None]) & (m_K[None, :] < stop_Q[:, None])
        s_QK = exponents(
            s_QK, read_QK, scale, hidden_value, hidden_low, hidden_high,
            p_Q[:, None], m_K[None, :], real_Q[:, None], real_K[None, :], P, M, X,
        )  # fmt: skip
        new_Q = tl.maximum(top_Q, tl.max(s_QK, 1))
        base_Q = tl.where(new_Q == float("-inf"), 0.0, new_Q)  # -inf minus -inf is not a number
        w_QK = tl.exp2(s_QK - base_Q[:, None])
        old_Q = tl.exp2(top_Q - base_Q)
        total_Q = total_Q * old_Q + tl.sum(w_QK, 1)
        if DROPOUT:
            w_QK *= dropout_factors(seed, p_Q[:, None], m_K[None, :], dropout, rescale)
        out_QE = tl.dot(w_QK.to(v_KE.dtype), v_KE, out_QE * old_Q[:, None], input_precision="ieee")
        top_Q = new_Q
    some_Q = total_Q > 0
    out_QE = out_QE / tl.where(some_Q, total_Q, 1.0)[:, None]
    store_tile(out, p_Q, real_Q, out_QE, DV, DV_PADDED)
    sum_Q = (top_Q + tl.log2(tl.where(some_Q, total_Q, 1.0))) / LOG2E
    tl.store(lse + p_Q, tl.where(some_Q, sum_Q, float("-inf")), real_Q)


@triton.jit(do_not_specialize=COUNTS)
def weigh_kernel(
    q, k, v, query_row, key_row, hidden_value, hidden_low, hidden_high, table, seed,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, H, N, P, M, last, scale, dropout, rescale,
    start, stop, lse, weights,
    D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
    X: tl.constexpr, BY_DISTANCE: tl.constexpr, DROPOUT: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the weights of BQ query members by distance."""
    p_Q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    real_Q = p_Q < P
    start_Q, stop_Q, begin, end = span(start, stop, p_Q, real_Q, M)
    row_Q = tl.load(query_row + p_Q, real_Q, 0)
    q_QD = rows_of(q, row_Q, real_Q, q_b, q_h, q_n, H, N, D, D_PADDED)
    sum_Q = sums_of(lse, p_Q, real_Q)
    at_Q1 = p_Q.to(tl.int64)[:, None] * (last + 1)
    first_Q = tl.zeros([BQ], tl.float32)
    final_Q = tl.zeros([BQ], tl.float32)
    for first in tl.range(begin, end, BK, num_stages=STAGES):
        m_K = first + tl.arange(0, BK)
        real_K = m_K < end
        row_K = tl.load(key_row + m_K, real_K, 0)
        k_KD = rows_of(k, row_K, real_K, k_b, k_h, k_n, H, N, D, D_PADDED)
        distance_QK = distances(row_Q[:, None], row_K[None, :], N, last)
        s_QK = tl.dot(q_QD, tl.trans(k_KD), input_precision="ieee")
        s_QK += lookup(table, row_Q[:, None], distance_QK, last)
        read_QK = (m_K[None, :] >= start_Q[:, None]) & (m_K[None, :] < stop_Q[:, None])
        s_QK = exponents(
            s_QK, read_QK, scale, hidden_value, hidden_low, hidden_high,
            p_Q[:, None], m_K[None, :], real_Q[:, None], real_K[None, :], P, M, X,
        )  # fmt: skip
        w_QK = tl.exp2(s_QK - sum_Q[:, None])
        if DROPOUT:
            w_QK *= dropout_factors(seed, p_Q[:, None], m_K[None, :], dropout, rescale)
        first_Q, final_Q = scatter(weights, at_Q1, w_QK, distance_QK, last, first_Q, final_Q)
    store_ends(weights, at_Q1, real_Q, last, first_Q, final_Q)


@triton.jit(do_not_specialize=COUNTS)
def dq_kernel(
    q, k, v, query_row, key_row, hidden_value, hidden_low, hidden_high, table, seed,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, H, N, P, M, last, scale, dropout, rescale,
    start, stop, out, lse, dout, dlse, value_table, dq, delta, dtable, weights,
    D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
    X: tl.constexpr, BY_DISTANCE: tl.constexpr, DROPOUT: tl.constexpr,
    VALUES: tl.constexpr, JOINED: tl.constexpr, SUMS: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BQ query members, and what all their keys' gradients need of them (`delta`).

    Gradients of outputs stand by member where JOINED, else by row; SUMS: log-sums have gradients, too.
    """
    p_Q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    real_Q = p_Q < P
    start_Q, stop_Q, begin, end = span(start, stop, p_Q, real_Q, M)
    row_Q = tl.load(query_row + p_Q, real_Q, 0)
    q_QD = rows_of(q, row_Q, real_Q, q_b, q_h, q_n, H, N, D, D_PADDED)
    dout_number_Q = row_Q
    if JOINED:
        dout_number_Q = tl.where(real_Q, p_Q, 0)
    dout_QE = load_tile(dout, dout_number_Q, real_Q, DV, DV_PADDED)
    out_QE = load_tile(out, p_Q, real_Q, DV, DV_PADDED)
    delta_Q = tl.sum(out_QE.to(tl.float32) * dout_QE.to(tl.float32), 1)
    sum_Q = sums_of(lse, p_Q, real_Q)
    if SUMS:
        delta_Q -= tl.load(dlse + p_Q, real_Q, 0.0)
    delta_Q = tl.where(sum_Q == float("inf"), 0.0, delta_Q)
    tl.store(delta + p_Q, delta_Q, real_Q)
    dq_QD = tl.zeros([BQ, D_PADDED], tl.float32)
    if BY_DISTANCE:
        at_Q1 = p_Q.to(tl.int64)[:, None] * (last + 1)
        first_Q = tl.zeros([BQ], tl.float32)
        final_Q = tl.zeros([BQ], tl.float32)
        first_weight_Q = tl.zeros([BQ], tl.float32)
        final_weight_Q = tl.zeros([BQ], tl.float32)
    for first in tl.range(begin, end, BK, num_stages=STAGES):
        m_K = first + tl.arange(0, BK)
        real_K = m_K < end
        row_K = tl.load(key_row + m_K, real_K, 0)
        k_KD = rows_of(k, row_K, real_K, k_b, k_h, k_n, H, N, D, D_PADDED)
        v_KE = rows_of(v, row_K, real_K, v_b, v_h, v_n, H, N, DV, DV_PADDED)
        s_QK = tl.dot(q_QD, tl.trans(k_KD), input_precision="ieee")
        dw_QK = tl.dot(dout_QE, tl.trans(v_KE), input_precision="ieee")
        if BY_DISTANCE:
            distance_QK = distances(row_Q[:, None], row_K[None, :], N, last)
            s_QK += lookup(table, row_Q[:, None], distance_QK, last)
        if VALUES:
            dw_QK += lookup(value_table, dout_number_Q[:, None], distance_QK, last)
        read_QK = (m_K[None, :] >= start_Q[:, None]) & (m_K[None, :] < stop_Q[:, None])
        s_QK = exponents(
            s_QK, read_QK, scale, hidden_value, hidden_low, hidden_high,
            p_Q[:, None], m_K[None, :], real_Q[:, None], real_K[None, :], P, M, X,
        )  # fmt: skip
        w_QK = tl.exp2(s_QK - sum_Q[:, None])
        dropped_QK = w_QK
        if DROPOUT:
            factor_QK = dropout_factors(seed, p_Q[:, None], m_K[None, :], dropout, rescale)
            dw_QK *= factor_QK
            dropped_QK = w_QK * factor_QK
        ds_QK = w_QK * (dw_QK - delta_Q[:, None])
        dq_QD = tl.dot(ds_QK.to(k_KD.dtype), k_KD, dq_QD, input_precision="ieee")
        if BY_DISTANCE:
            first_Q, final_Q = scatter(dtable, at_Q1, ds_QK * scale, distance_QK, last, first_Q, final_Q)
        if VALUES:
            first_weight_Q, final_weight_Q = scatter(
                weights, at_Q1, dropped_QK, distance_QK, last, first_weight_Q, final_weight_Q
            )
    store_tile(dq, p_Q, real_Q, dq_QD * scale, D, D_PADDED)
    if BY_DISTANCE:
        store_ends(dtable, at_Q1, real_Q, last, first_Q, final_Q)
    if VALUES:
        store_ends(weights, at_Q1, real_Q, last, first_weight_Q, final_weight_Q)


@triton.jit(do_not_specialize=COUNTS)
def dkv_kernel(
    q, k, v, query_row, key_row, hidden_value, hidden_low, hidden_high, table, seed,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, H, N, P, M, last, scale, dropout, rescale,
    low, high, lse, dout, delta, value_table, dk, dv,
    D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
    X: tl.constexpr, BY_DISTANCE: tl.constexpr, DROPOUT: tl.constexpr,
    VALUES: tl.constexpr, JOINED: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BK key members: sums over the query members low to high - 1, which read them."""
    m_K = tl.program_id(0) * BK + tl.arange(0, BK)
    real_K = m_K < M
    low_K, high_K, begin, end = span(low, high, m_K, real_K, P)
    row_K = tl.load(key_row + m_K, real_K, 0)
    k_KD = rows_of(k, row_K, real_K, k_b, k_h, k_n, H, N, D, D_PADDED)
    v_KE = rows_of(v, row_K, real_K, v_b, v_h, v_n, H, N, DV, DV_PADDED)
    dk_KD = tl.zeros([BK, D_PADDED], tl.float32)
    dv_KE = tl.zeros([BK, DV_PADDED], tl.float32)
    for first in tl.range(begin, end, BQ, num_stages=STAGES):
        p_Q = first + tl.arange(0, BQ)
        real_Q = p_Q < end
        row_Q = tl.load(query_row + p_Q, real_Q, 0)
        dout_number_Q = row_Q
        if JOINED:
            dout_number_Q = tl.where(real_Q, p_Q, 0)
        q_QD = rows_of(q, row_Q, real_Q, q_b, q_h, q_n, H, N, D, D_PADDED)
        dout_QE = load_tile(dout, dout_number_Q, real_Q, DV, DV_PADDED)
        sum_Q = sums_of(lse, p_Q, real_Q)
        delta_Q = tl.load(delta + p_Q, real_Q, 0.0)
        s_KQ = tl.dot(k_KD, tl.trans(q_QD), input_precision="ieee")
        dw_KQ = tl.dot(v_KE, tl.trans(dout_QE), input_precision="ieee")
        if BY_DISTANCE:
            distance_KQ = distances(row_Q[None, :], row_K[:, None], N, last)
            s_KQ += lookup(table, row_Q[None, :], distance_KQ, last)
        if VALUES:
            dw_KQ += lookup(value_table, dout_number_Q[None, :], distance_KQ, last)
        read_KQ = (p_Q[None, :] >= low_K[:, None]) & (p_Q[None, :] < high_K[:, None])
        s_KQ = exponents(
            s_KQ, read_KQ, scale, hidden_value, hidden_low, hidden_high,
            p_Q[None, :], m_K[:, None], real_Q[None, :], real_K[:, None], P, M, X,
        )  # fmt: skip
        w_KQ = tl.exp2(s_KQ - sum_Q[None, :])
        dropped_KQ = w_KQ
        if DROPOUT:
            factor_KQ = dropout_factors(seed, p_Q[None, :], m_K[:, None], dropout, rescale)
            dw_KQ *= factor_KQ
            dropped_KQ = w_KQ * factor_KQ
        ds_KQ = w_KQ * (dw_KQ - delta_Q[None, :])
        dv_KE = tl.dot(dropped_KQ.to(dout_QE.dtype), dout_QE, dv_KE, input_precision="ieee")
        dk_KD = tl.dot(ds_KQ.to(q_QD.dtype), q_QD, dk_KD, input_precision="ieee")
    store_tile(dk, m_K, real_K, dk_KD * scale, D, D_PADDED)
    store_tile(dv, m_K, real_K, dv_KE, DV, DV_PADDED)


@triton.jit
def combine_kernel(
    x, y, first, member, lse, out, share, R, WIDTH,
    TWO: tl.constexpr, MEAN: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Write for BR rows, in BW columns, the sum of what their members have in x and, with TWO, in y.

    MEAN: the mean over the members that read something, and 1 / their number in `share`.
    """
    r_S = tl.program_id(0) * BR + tl.arange(0, BR)
    w_W = tl.program_id(1) * BW + tl.arange(0, BW)
    real_S = r_S < R
    begin_S = tl.load(first + r_S, real_S, 0)
    count_S = tl.load(first + r_S + 1, real_S, 0) - begin_S
    sum_SW = tl.zeros([BR, BW], tl.float32)
    times_S = tl.zeros([BR], tl.float32)
    for turn in range(0, tl.max(count_S, 0)):
        has_S = turn < count_S
        p_S = tl.load(member + begin_S + turn, has_S, 0)
        if MEAN:
            has_S = has_S & (tl.load(lse + p_S, has_S, float("-inf")) > float("-inf"))
            times_S += has_S.to(tl.float32)
        at = p_S.to(tl.int64)[:, None] * WIDTH + w_W[None, :]
        mask = has_S[:, None] & (w_W < WIDTH)[None, :]
        sum_SW += tl.load(x + at, mask, 0.0).to(tl.float32)
        if TWO:
            sum_SW += tl.load(y + at, mask, 0.0).to(tl.float32)
    if MEAN:
        share_S = 1.0 / tl.maximum(times_S, 1.0)
        sum_SW *= share_S[:, None]
        tl.store(share + r_S, share_S, real_S & (tl.program_id(1) == 0))
    at = r_S.to(tl.int64)[:, None] * WIDTH + w_W[None, :]
    tl.store(out + at, sum_SW.to(out.dtype.element_ty), real_S[:, None] & (w_W < WIDTH)[None, :])
