"""Triton kernels of attention over packed lists. `packed_launch.py` starts them.

`lists.py` explains members and their ranges. What the kernels compute, for query member p and key
member m, at distance t = min(max(position of p - position of m, 0), T - 1):

    logit(p, m) = scale * (q[p] . k[m] + logit_table[row of p, t])
    lse(p)      = log of the sum over m of exp(logit(p, m))
    w(p, m)     = exp(logit(p, m) - lse(p))
    out(p)      = sum over m of w(p, m) * f(p, m) * v[m]

f is the factor of dropout, 0 or 1 / (1 - dropout). `weigh_kernel` writes the sum of w * f by member
and distance, from which `packed_attention.py` adds values by distance to `out`. The backward pass
(FlashAttention-2, Dao 2023, section 3.1, with terms by distance and dropout) is

    dw(p, m)     = f(p, m) * (dout(p) . v[m] + dweight_table[p, t])
    delta(p)     = dout(p) . out(p) - dlse(p)
    dlogit(p, m) = w(p, m) * (dw(p, m) - delta(p))
    dq(p)        = scale * sum over m of dlogit(p, m) * k[m]
    dk(m)        = scale * sum over p of dlogit(p, m) * q[p]
    dv(m)        = sum over p of w(p, m) * f(p, m) * dout(p)

`join_kernel` makes one softmax of all that the members of a row read. With its log-sums and outputs
of rows in place of lse(p) and out(p), the formulas of the backward pass are those of that softmax.

Every kernel computes the pairs' numbers again, so that no tensor has an entry for each pair.

A program has a tile of BQ neighbouring query members (`dkv_kernel`: BK neighbouring key members)
and loops over tiles of the other side. Bounds of ranges ascend, so what the members of a tile read
lies between the least start and the greatest stop. With BQ = BK = 4, `x` where a query reads a key:

    key member      1 2 3 4   5 6 7 8
    query member 4  x x x .   . . . .
                 5  . x x x   . . . .
                 6  . . x x   x . . .
                 7  . . . x   x x . .
                    begin = 1, end = 7: two turns of the loop, m = 1 to 4 and 5 to 8

Parameters that several kernels have (`x [P, T]`: a pointer to a contiguous tensor of this shape):

    q, k, v                       views [B, H, N, D], of v [B, H, N, E]; their last stride is 1
    q_b, q_h, q_n, ...            their other strides
    query_row [P], key_row [M]    the members' rows
    start, stop [P]               the key members that a query member reads
    low, high [M]                 the query members that read a key member
    hidden_value [HIDDEN, M]      with hidden_low, hidden_high [HIDDEN, P]: what of these ranges is
                                  not read (`rtx.attention.reads.Hidden`)
    logit_table [R, T]            in units of a product q . k; with BY_DISTANCE
    dweight_table [., T]          dout times the values by distance, of what `dout` is; with VALUES
    weight_table [P, T]           sums of w * f by distance, with VALUES; zeros before a kernel
    dlogit_table [P, T]           sums of scale * dlogit by distance, with BY_DISTANCE; zeros before
    seed [1]                      of dropout; with DROPOUT
    out, lse, dlse                [P, E], [P] and [P]; in the backward pass [R, E], [R] and [R]
                                  without SUMS_BY_MEMBER. lse are natural logarithms, -inf where
                                  nothing is read. dlse with HAS_DLSE
    dout                          [P, E] with BY_MEMBER, else [R, E]: members share their row's
    last_distance                 T - 1
    rescale                       1 / (1 - dropout)
    IN_ORDER                      member p is row p (`KernelLists.in_order`): query_row and key_row
                                  are not read

Tensors without their flag are None. Heads of D and E numbers are padded by zeros to D_PADDED and
E_PADDED, powers of 2.

Shapes of tiles, in the names' suffixes: Q = BQ query members, K = BK key members, S members of
either kind, D and E padded head sizes of keys and values. Helpers have p, m, row_p, real_p, ... in
shapes that broadcast to a tile of pairs: [BQ, 1] and [1, BK], in `dkv_kernel` [1, BQ] and [BK, 1].
`real` is False for places of a tile after the last member, or after `end` of the loop.
Logits are kept times log2(e), in names `s_QK`, because tl.exp2 is faster than tl.exp.
"""

# pyright: reportGeneralTypeIssues=false
# Triton compiles what pyright takes for Python: its functions have no types for a checker.

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
COUNTS = ["P", "M"]
"""Parameters by whose value Triton must not compile again: they may change with every call."""


@triton.jit
def tile_members(members, N, SIZE: tl.constexpr, IN_ORDER: tl.constexpr):
    """Return the SIZE members of a program, which of them are real, and their sequence and head.

    The last is a number b * H + h with IN_ORDER, where each list is cut into tiles of its own; else
    it has no meaning, as a tile may have members of several lists.
    """
    place_S = tl.arange(0, SIZE)
    tile = tl.program_id(0)
    if IN_ORDER:
        tiles = tl.cdiv(N, SIZE)
        head = tile // tiles
        place_S += (tile - head * tiles) * SIZE
        member_S = head * N + place_S
        real_S = place_S < N
    else:
        head = 0
        member_S = tile * SIZE + place_S
        real_S = member_S < members
    return member_S, real_S, head


@triton.jit
def load_row_numbers(row, member_S, real_S, IN_ORDER: tl.constexpr):
    """Return the rows of members; 0 where not real."""
    if IN_ORDER:
        row_S = tl.where(real_S, member_S, 0)
    else:
        row_S = tl.load(row + member_S, real_S, 0)
    return row_S


@triton.jit
def gather_rows(
    x, strides, row_S, real_S, head, H, N,
    IN_ORDER: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return rows of a view [B, H, N, SIZE] by number, (b * H + h) * N + n; 0 where not real.

    strides: of b, h and n.
    head: see `tile_members`.
    """
    d = tl.arange(0, PADDED)
    b_stride, h_stride, n_stride = strides
    if IN_ORDER:
        head_S = head  # one number: no division for each row
    else:
        head_S = row_S // N
    b_S = head_S // H
    at_S = b_S.to(tl.int64) * b_stride
    h_S = head_S - b_S * H
    at_S += h_S.to(tl.int64) * h_stride
    n_S = row_S - head_S * N
    at_S += n_S.to(tl.int64) * n_stride
    return tl.load(x + at_S[:, None] + d[None, :], real_S[:, None] & (d < SIZE)[None, :], 0.0)


@triton.jit
def load_rows(x, number_S, real_S, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Return rows of a contiguous matrix with SIZE columns; 0 where not real."""
    d = tl.arange(0, PADDED)
    at_S = number_S.to(tl.int64) * SIZE
    return tl.load(x + at_S[:, None] + d[None, :], real_S[:, None] & (d < SIZE)[None, :], 0.0)


@triton.jit
def store_rows(x, number_S, real_S, y, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Write y to rows of a contiguous matrix with SIZE columns."""
    d = tl.arange(0, PADDED)
    at_S = number_S.to(tl.int64) * SIZE
    mask = real_S[:, None] & (d < SIZE)[None, :]
    tl.store(x + at_S[:, None] + d[None, :], y.to(x.dtype.element_ty), mask)


@triton.jit
def tile_ranges(start, stop, number_S, real_S, members):
    """Return start and stop of each member's range, and the least start and the greatest stop.

    Empty ranges do not count for the latter two. Where all are empty these are `members` and 0, so
    that a loop from one to the other has no turn.
    """
    start_S = tl.load(start + number_S, real_S, 0)
    stop_S = tl.load(stop + number_S, real_S, 0)
    begin = tl.min(tl.where(start_S < stop_S, start_S, members), 0)
    end = tl.max(tl.where(start_S < stop_S, stop_S, 0), 0)
    return start_S, stop_S, begin, end


@triton.jit
def is_within(number, start, stop):
    """Return whether start <= number < stop."""
    return (number >= start) & (number < stop)


@triton.jit
def masked_logits(
    products, in_range, scale, hidden_value, hidden_low, hidden_high,
    p, m, real_p, real_m, P, M, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Return logits times log2(e) by products of queries and keys; -inf where a pair is not read.

    A pair is read where it is `in_range` and none of the HIDDEN conditions hides it.
    """
    s = tl.where(in_range, products * (scale * LOG2E), float("-inf"))
    for _ in tl.static_range(HIDDEN):
        value_m = tl.load(hidden_value + m, real_m, 0)
        low_p = tl.load(hidden_low + p, real_p, 0)
        high_p = tl.load(hidden_high + p, real_p, 0)
        s = tl.where(is_within(value_m, low_p, high_p), float("-inf"), s)
        # The next condition. As a number, HIDDEN * M might exceed int32.
        hidden_value += M
        hidden_low += P
        hidden_high += P
    return s


@triton.jit
def add_to_softmax(s_QK, top_Q, total_Q):
    """Add a tile's logits to a softmax that goes on over tiles of keys ("online softmax").

    Args:
        top_Q, total_Q: the greatest logit so far, and the sum of 2^(s - top).

    Returns:
        weights 2^(s - new top), the factor for sums with the old top, new top, new total.
    """
    new_top_Q = tl.maximum(top_Q, tl.max(s_QK, 1))
    # Where nothing has been read so far: -inf minus -inf is not a number.
    base_Q = tl.where(new_top_Q == float("-inf"), 0.0, new_top_Q)
    w_QK = tl.exp2(s_QK - base_Q[:, None])
    factor_Q = tl.exp2(top_Q - base_Q)
    new_total_Q = total_Q * factor_Q + tl.sum(w_QK, 1)
    return w_QK, factor_Q, new_top_Q, new_total_Q


@triton.jit
def load_lse(lse, number_Q, real_Q):
    """Return log-sums times log2(e); inf where nothing is read, so that 2^(s - inf) = 0."""
    lse_Q = tl.load(lse + number_Q, real_Q, float("-inf"))
    return tl.where(lse_Q == float("-inf"), float("inf"), lse_Q * LOG2E)


@triton.jit
def distance_of(row_p, row_m, N, last_distance, IN_ORDER: tl.constexpr):
    """Return how many positions the key is before the query, at least 0, at most last_distance."""
    if IN_ORDER:  # they are rows of one sequence
        distance = row_p - row_m
    else:
        distance = row_p % N - row_m % N
    return tl.minimum(tl.maximum(distance, 0), last_distance)


@triton.jit
def lookup(table, row, distance, last_distance):
    """Return the entries [row, distance] of a table [., T], in float32."""
    return tl.load(table + row.to(tl.int64) * (last_distance + 1) + distance).to(tl.float32)


@triton.jit
def dropout_factors(seed, p, m, dropout, rescale):
    """Return 0 where a pair's weight is dropped, else `rescale`: by p, m and seed alone.

    So every kernel, whatever its tiles, drops the same pairs.
    """
    zero = p * 0 + m * 0  # broadcasts p and m to the tile's shape
    bits, _, _, _ = tl.philox(tl.load(seed), p + zero, m + zero, zero, zero)
    return tl.where(tl.uint_to_uniform_float(bits) >= dropout, rescale, 0.0)


@triton.jit
def no_end_sums(BQ: tl.constexpr):
    """Return the sums with which `write_by_distance` begins."""
    return tl.zeros([BQ], tl.float32), tl.zeros([BQ], tl.float32)


@triton.jit
def write_by_distance(table, entry_Q1, x_QK, distance_QK, last_distance, end_sums):
    """Add up x by query member and distance: write the inner entries of a table [P, T].

    Of the keys at a distance between the ends, 0 and last_distance, a query member reads at most
    one, so its x is the whole sum and is stored at once. Many keys may be at the ends, where
    distances are clamped; their sums stay in registers until `write_ends`. No entry gets an atomic
    addition. Pairs that are not read have x = 0 and must not write: they may lie at an entry that
    a key of another list has.

    Args:
        entry_Q1: the number of each member's entry of distance 0.
        end_sums: the sums so far at distance 0 and at last_distance.

    Returns:
        end_sums with those of this tile.
    """
    nearest_Q, farthest_Q = end_sums
    mask = (x_QK != 0.0) & (distance_QK > 0) & (distance_QK < last_distance)
    tl.store(table + entry_Q1 + distance_QK, x_QK.to(table.dtype.element_ty), mask)
    nearest_Q += tl.sum(tl.where(distance_QK == 0, x_QK, 0.0), 1)
    farthest_Q += tl.sum(tl.where(distance_QK == last_distance, x_QK, 0.0), 1)
    return nearest_Q, farthest_Q


@triton.jit
def write_ends(table, entry_Q1, real_Q, last_distance, end_sums):
    """Write what `write_by_distance` returns last. With T = 1 both ends are the same entry."""
    nearest_Q, farthest_Q = end_sums
    nearest = table + entry_Q1 + tl.zeros([1, 1], tl.int32)
    tl.store(nearest, nearest_Q[:, None].to(table.dtype.element_ty), real_Q[:, None])
    farthest = nearest + last_distance
    tl.store(farthest, farthest_Q[:, None].to(table.dtype.element_ty), real_Q[:, None])


@triton.jit
def entries(p_Q, row_Q, real_Q, BY_MEMBER: tl.constexpr):
    """Return which entry of a tensor by member, or else by row, belongs to each query member."""
    entry_Q = row_Q
    if BY_MEMBER:
        entry_Q = tl.where(real_Q, p_Q, 0)
    return entry_Q


@triton.jit
def lse_and_delta(
    dout_QE, out, lse, dlse, number_Q, real_Q, HAS_DLSE: tl.constexpr,
    E: tl.constexpr, E_PADDED: tl.constexpr,
):  # fmt: skip
    """Return `load_lse`, and delta = dout . out - dlse, which is 0 where nothing is read."""
    out_QE = load_rows(out, number_Q, real_Q, E, E_PADDED)
    delta_Q = tl.sum(out_QE.to(tl.float32) * dout_QE.to(tl.float32), 1)
    lse_Q = load_lse(lse, number_Q, real_Q)
    if HAS_DLSE:
        delta_Q -= tl.load(dlse + number_Q, real_Q, 0.0)
    return lse_Q, tl.where(lse_Q == float("inf"), 0.0, delta_Q)


@triton.jit(do_not_specialize=COUNTS)
def attend_kernel(
    q, k, v, query_row, key_row, hidden_value, hidden_low, hidden_high, logit_table, seed,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, H, N, P, M, last_distance, scale, dropout, rescale,
    start, stop,
    out, lse,  # written
    D: tl.constexpr, E: tl.constexpr, D_PADDED: tl.constexpr, E_PADDED: tl.constexpr,
    HIDDEN: tl.constexpr, BY_DISTANCE: tl.constexpr, DROPOUT: tl.constexpr, IN_ORDER: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write outputs and log-sums of BQ query members."""
    p_Q, real_Q, head = tile_members(P, N, BQ, IN_ORDER)
    start_Q, stop_Q, begin, end = tile_ranges(start, stop, p_Q, real_Q, M)
    row_Q = load_row_numbers(query_row, p_Q, real_Q, IN_ORDER)
    q_QD = gather_rows(
        q, (q_b, q_h, q_n), row_Q, real_Q, head, H, N, IN_ORDER, D, D_PADDED
    )  # fmt: skip
    top_Q = tl.full([BQ], float("-inf"), tl.float32)
    total_Q = tl.zeros([BQ], tl.float32)
    out_QE = tl.zeros([BQ, E_PADDED], tl.float32)

    for first_m in tl.range(begin, end, BK, num_stages=STAGES):
        m_K = first_m + tl.arange(0, BK)
        real_K = m_K < end
        row_K = load_row_numbers(key_row, m_K, real_K, IN_ORDER)
        k_KD = gather_rows(
            k, (k_b, k_h, k_n), row_K, real_K, head, H, N, IN_ORDER, D, D_PADDED
        )  # fmt: skip
        v_KE = gather_rows(
            v, (v_b, v_h, v_n), row_K, real_K, head, H, N, IN_ORDER, E, E_PADDED
        )  # fmt: skip

        s_QK = tl.dot(q_QD, tl.trans(k_KD), input_precision="ieee")
        if BY_DISTANCE:
            distance_QK = distance_of(row_Q[:, None], row_K[None, :], N, last_distance, IN_ORDER)
            s_QK += lookup(logit_table, row_Q[:, None], distance_QK, last_distance)
        in_range_QK = is_within(m_K[None, :], start_Q[:, None], stop_Q[:, None])
        s_QK = masked_logits(
            s_QK, in_range_QK, scale, hidden_value, hidden_low, hidden_high,
            p_Q[:, None], m_K[None, :], real_Q[:, None], real_K[None, :], P, M, HIDDEN,
        )  # fmt: skip

        w_QK, factor_Q, top_Q, total_Q = add_to_softmax(s_QK, top_Q, total_Q)
        if DROPOUT:
            w_QK *= dropout_factors(seed, p_Q[:, None], m_K[None, :], dropout, rescale)
        w_QK = w_QK.to(v_KE.dtype)
        out_QE *= factor_Q[:, None]
        out_QE = tl.dot(w_QK, v_KE, out_QE, input_precision="ieee")

    reads_Q = total_Q != 0  # also where the total is NaN: then the output is
    total_Q = tl.where(reads_Q, total_Q, 1.0)
    store_rows(out, p_Q, real_Q, out_QE / total_Q[:, None], E, E_PADDED)
    lse_Q = (top_Q + tl.log2(total_Q)) / LOG2E
    tl.store(lse + p_Q, tl.where(reads_Q, lse_Q, float("-inf")), real_Q)


@triton.jit(do_not_specialize=COUNTS)
def weigh_kernel(
    q, k, v, query_row, key_row, hidden_value, hidden_low, hidden_high, logit_table, seed,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, H, N, P, M, last_distance, scale, dropout, rescale,
    start, stop, lse,
    weight_table,  # written
    D: tl.constexpr, E: tl.constexpr, D_PADDED: tl.constexpr, E_PADDED: tl.constexpr,
    HIDDEN: tl.constexpr, BY_DISTANCE: tl.constexpr, DROPOUT: tl.constexpr, IN_ORDER: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the weights of BQ query members, after dropout, added up by distance."""
    p_Q, real_Q, head = tile_members(P, N, BQ, IN_ORDER)
    start_Q, stop_Q, begin, end = tile_ranges(start, stop, p_Q, real_Q, M)
    row_Q = load_row_numbers(query_row, p_Q, real_Q, IN_ORDER)
    q_QD = gather_rows(
        q, (q_b, q_h, q_n), row_Q, real_Q, head, H, N, IN_ORDER, D, D_PADDED
    )  # fmt: skip
    lse_Q = load_lse(lse, p_Q, real_Q)
    entry_Q1 = p_Q.to(tl.int64)[:, None] * (last_distance + 1)
    weight_ends = no_end_sums(BQ)

    for first_m in tl.range(begin, end, BK, num_stages=STAGES):
        m_K = first_m + tl.arange(0, BK)
        real_K = m_K < end
        row_K = load_row_numbers(key_row, m_K, real_K, IN_ORDER)
        k_KD = gather_rows(
            k, (k_b, k_h, k_n), row_K, real_K, head, H, N, IN_ORDER, D, D_PADDED
        )  # fmt: skip

        distance_QK = distance_of(row_Q[:, None], row_K[None, :], N, last_distance, IN_ORDER)
        s_QK = tl.dot(q_QD, tl.trans(k_KD), input_precision="ieee")
        s_QK += lookup(logit_table, row_Q[:, None], distance_QK, last_distance)
        in_range_QK = is_within(m_K[None, :], start_Q[:, None], stop_Q[:, None])
        s_QK = masked_logits(
            s_QK, in_range_QK, scale, hidden_value, hidden_low, hidden_high,
            p_Q[:, None], m_K[None, :], real_Q[:, None], real_K[None, :], P, M, HIDDEN,
        )  # fmt: skip

        w_QK = tl.exp2(s_QK - lse_Q[:, None])
        if DROPOUT:
            w_QK *= dropout_factors(seed, p_Q[:, None], m_K[None, :], dropout, rescale)
        weight_ends = write_by_distance(
            weight_table, entry_Q1, w_QK, distance_QK, last_distance, weight_ends
        )  # fmt: skip
    write_ends(weight_table, entry_Q1, real_Q, last_distance, weight_ends)


@triton.jit(do_not_specialize=COUNTS)
def dq_kernel(
    q, k, v, query_row, key_row, hidden_value, hidden_low, hidden_high, logit_table, seed,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, H, N, P, M, last_distance, scale, dropout, rescale,
    start, stop, out, lse, dout, dlse, dweight_table,
    dq, delta, dlogit_table, weight_table,  # written
    D: tl.constexpr, E: tl.constexpr, D_PADDED: tl.constexpr, E_PADDED: tl.constexpr,
    HIDDEN: tl.constexpr, BY_DISTANCE: tl.constexpr, DROPOUT: tl.constexpr, IN_ORDER: tl.constexpr,
    VALUES: tl.constexpr, BY_MEMBER: tl.constexpr, SUMS_BY_MEMBER: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BQ query members, and their `delta`, which `dkv_kernel` reads.

    With BY_DISTANCE also dlogit by distance, and with VALUES the weights as `weigh_kernel` does.
    """
    p_Q, real_Q, head = tile_members(P, N, BQ, IN_ORDER)
    start_Q, stop_Q, begin, end = tile_ranges(start, stop, p_Q, real_Q, M)
    row_Q = load_row_numbers(query_row, p_Q, real_Q, IN_ORDER)
    q_QD = gather_rows(
        q, (q_b, q_h, q_n), row_Q, real_Q, head, H, N, IN_ORDER, D, D_PADDED
    )  # fmt: skip
    dout_row_Q = entries(p_Q, row_Q, real_Q, BY_MEMBER)
    dout_QE = load_rows(dout, dout_row_Q, real_Q, E, E_PADDED)
    sum_Q = entries(p_Q, row_Q, real_Q, SUMS_BY_MEMBER)
    lse_Q, delta_Q = lse_and_delta(
        dout_QE, out, lse, dlse, sum_Q, real_Q, HAS_DLSE, E, E_PADDED
    )  # fmt: skip
    tl.store(delta + p_Q, delta_Q, real_Q)
    dq_QD = tl.zeros([BQ, D_PADDED], tl.float32)
    if BY_DISTANCE:
        entry_Q1 = p_Q.to(tl.int64)[:, None] * (last_distance + 1)
        dlogit_ends = no_end_sums(BQ)
        weight_ends = no_end_sums(BQ)

    for first_m in tl.range(begin, end, BK, num_stages=STAGES):
        m_K = first_m + tl.arange(0, BK)
        real_K = m_K < end
        row_K = load_row_numbers(key_row, m_K, real_K, IN_ORDER)
        k_KD = gather_rows(
            k, (k_b, k_h, k_n), row_K, real_K, head, H, N, IN_ORDER, D, D_PADDED
        )  # fmt: skip
        v_KE = gather_rows(
            v, (v_b, v_h, v_n), row_K, real_K, head, H, N, IN_ORDER, E, E_PADDED
        )  # fmt: skip

        s_QK = tl.dot(q_QD, tl.trans(k_KD), input_precision="ieee")
        dw_QK = tl.dot(dout_QE, tl.trans(v_KE), input_precision="ieee")
        if BY_DISTANCE:
            distance_QK = distance_of(row_Q[:, None], row_K[None, :], N, last_distance, IN_ORDER)
            s_QK += lookup(logit_table, row_Q[:, None], distance_QK, last_distance)
        if VALUES:
            dw_QK += lookup(dweight_table, dout_row_Q[:, None], distance_QK, last_distance)
        in_range_QK = is_within(m_K[None, :], start_Q[:, None], stop_Q[:, None])
        s_QK = masked_logits(
            s_QK, in_range_QK, scale, hidden_value, hidden_low, hidden_high,
            p_Q[:, None], m_K[None, :], real_Q[:, None], real_K[None, :], P, M, HIDDEN,
        )  # fmt: skip

        w_QK = tl.exp2(s_QK - lse_Q[:, None])
        dropped_out_QK = w_QK
        if DROPOUT:
            factor_QK = dropout_factors(seed, p_Q[:, None], m_K[None, :], dropout, rescale)
            dw_QK *= factor_QK
            dropped_out_QK = w_QK * factor_QK
        dlogit_QK = w_QK * (dw_QK - delta_Q[:, None])
        dq_QD = tl.dot(dlogit_QK.to(k_KD.dtype), k_KD, dq_QD, input_precision="ieee")
        if BY_DISTANCE:
            dlogit_ends = write_by_distance(
                dlogit_table, entry_Q1, dlogit_QK * scale, distance_QK, last_distance, dlogit_ends
            )
        if VALUES:
            weight_ends = write_by_distance(
                weight_table, entry_Q1, dropped_out_QK, distance_QK, last_distance, weight_ends
            )

    store_rows(dq, p_Q, real_Q, dq_QD * scale, D, D_PADDED)
    if BY_DISTANCE:
        write_ends(dlogit_table, entry_Q1, real_Q, last_distance, dlogit_ends)
    if VALUES:
        write_ends(weight_table, entry_Q1, real_Q, last_distance, weight_ends)


@triton.jit(do_not_specialize=COUNTS)
def dkv_kernel(
    q, k, v, query_row, key_row, hidden_value, hidden_low, hidden_high, logit_table, seed,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, H, N, P, M, last_distance, scale, dropout, rescale,
    low, high, lse, dout, delta, dweight_table,
    dk, dv,  # written
    D: tl.constexpr, E: tl.constexpr, D_PADDED: tl.constexpr, E_PADDED: tl.constexpr,
    HIDDEN: tl.constexpr, BY_DISTANCE: tl.constexpr, DROPOUT: tl.constexpr, IN_ORDER: tl.constexpr,
    VALUES: tl.constexpr, BY_MEMBER: tl.constexpr, SUMS_BY_MEMBER: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BK key members and their values, sums over the queries that read them.

    Tiles of pairs are transposed, [BK, BQ]: key members stay, query members come by.
    """
    m_K, real_K, head = tile_members(M, N, BK, IN_ORDER)
    low_K, high_K, begin, end = tile_ranges(low, high, m_K, real_K, P)
    row_K = load_row_numbers(key_row, m_K, real_K, IN_ORDER)
    k_KD = gather_rows(
        k, (k_b, k_h, k_n), row_K, real_K, head, H, N, IN_ORDER, D, D_PADDED
    )  # fmt: skip
    v_KE = gather_rows(
        v, (v_b, v_h, v_n), row_K, real_K, head, H, N, IN_ORDER, E, E_PADDED
    )  # fmt: skip
    dk_KD = tl.zeros([BK, D_PADDED], tl.float32)
    dv_KE = tl.zeros([BK, E_PADDED], tl.float32)

    for first_p in tl.range(begin, end, BQ, num_stages=STAGES):
        p_Q = first_p + tl.arange(0, BQ)
        real_Q = p_Q < end
        row_Q = load_row_numbers(query_row, p_Q, real_Q, IN_ORDER)
        dout_row_Q = entries(p_Q, row_Q, real_Q, BY_MEMBER)
        q_QD = gather_rows(
            q, (q_b, q_h, q_n), row_Q, real_Q, head, H, N, IN_ORDER, D, D_PADDED
        )  # fmt: skip
        dout_QE = load_rows(dout, dout_row_Q, real_Q, E, E_PADDED)
        lse_Q = load_lse(lse, entries(p_Q, row_Q, real_Q, SUMS_BY_MEMBER), real_Q)
        delta_Q = tl.load(delta + p_Q, real_Q, 0.0)

        s_KQ = tl.dot(k_KD, tl.trans(q_QD), input_precision="ieee")
        dw_KQ = tl.dot(v_KE, tl.trans(dout_QE), input_precision="ieee")
        if BY_DISTANCE:
            distance_KQ = distance_of(row_Q[None, :], row_K[:, None], N, last_distance, IN_ORDER)
            s_KQ += lookup(logit_table, row_Q[None, :], distance_KQ, last_distance)
        if VALUES:
            dw_KQ += lookup(dweight_table, dout_row_Q[None, :], distance_KQ, last_distance)
        in_range_KQ = is_within(p_Q[None, :], low_K[:, None], high_K[:, None])
        s_KQ = masked_logits(
            s_KQ, in_range_KQ, scale, hidden_value, hidden_low, hidden_high,
            p_Q[None, :], m_K[:, None], real_Q[None, :], real_K[:, None], P, M, HIDDEN,
        )  # fmt: skip

        w_KQ = tl.exp2(s_KQ - lse_Q[None, :])
        dropped_out_KQ = w_KQ
        if DROPOUT:
            factor_KQ = dropout_factors(seed, p_Q[None, :], m_K[:, None], dropout, rescale)
            dw_KQ *= factor_KQ
            dropped_out_KQ = w_KQ * factor_KQ
        dlogit_KQ = w_KQ * (dw_KQ - delta_Q[None, :])
        dv_KE = tl.dot(dropped_out_KQ.to(dout_QE.dtype), dout_QE, dv_KE, input_precision="ieee")
        dk_KD = tl.dot(dlogit_KQ.to(q_QD.dtype), q_QD, dk_KD, input_precision="ieee")

    store_rows(dk, m_K, real_K, dk_KD * scale, D, D_PADDED)
    store_rows(dv, m_K, real_K, dv_KE, E, E_PADDED)


@triton.jit
def by_row_kernel(
    x, y, first, member, lse,
    out, share,  # written
    R, WIDTH,
    HAS_Y: tl.constexpr, MEAN: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Write, for BR rows and BW columns, the sum over each row's members of x (and y).

    Turn t of the loop adds the t-th member of every row that has one: a fixed order.

    Parameters:
        x, y [P, WIDTH]: y with HAS_Y.
        first [R + 1], member [P]: the members of each row (`lists.RowMembers`).
        lse [P]: with MEAN, -inf for members that do not count.
        out [R, WIDTH]: with MEAN the mean over the members that count, 0 where there is none.
        share [R]: with MEAN, 1 / the number of these, 1 where there is none.
    """
    r_S = tl.program_id(0) * BR + tl.arange(0, BR)
    column_W = tl.program_id(1) * BW + tl.arange(0, BW)
    real_S = r_S < R
    first_S = tl.load(first + r_S, real_S, 0)
    members_S = tl.load(first + r_S + 1, real_S, 0) - first_S
    sum_SW = tl.zeros([BR, BW], tl.float32)
    counted_S = tl.zeros([BR], tl.float32)
    for turn in range(0, tl.max(members_S, 0)):
        has_S = turn < members_S
        p_S = tl.load(member + first_S + turn, has_S, 0)
        if MEAN:
            has_S = has_S & (tl.load(lse + p_S, has_S, float("-inf")) != float("-inf"))
            counted_S += has_S.to(tl.float32)
        at_SW = p_S.to(tl.int64)[:, None] * WIDTH + column_W[None, :]
        mask_SW = has_S[:, None] & (column_W < WIDTH)[None, :]
        sum_SW += tl.load(x + at_SW, mask_SW, 0.0).to(tl.float32)
        if HAS_Y:
            sum_SW += tl.load(y + at_SW, mask_SW, 0.0).to(tl.float32)
    if MEAN:
        share_S = 1.0 / tl.maximum(counted_S, 1.0)
        sum_SW *= share_S[:, None]
        tl.store(share + r_S, share_S, real_S & (tl.program_id(1) == 0))
    at_SW = r_S.to(tl.int64)[:, None] * WIDTH + column_W[None, :]
    mask_SW = real_S[:, None] & (column_W < WIDTH)[None, :]
    tl.store(out + at_SW, sum_SW.to(out.dtype.element_ty), mask_SW)


@triton.jit
def join_kernel(
    x, lse, first, member,
    out, row_lse,  # written
    R, WIDTH,
    BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Write, for BR rows and BW columns, the softmax over the keys of all members of each row.

    A member weighs exp(lse) in it. Turn t of the loop adds the t-th member of every row that has so
    many: a fixed order.

    Parameters:
        x [P, WIDTH]: outputs of members.
        lse [P]: their log-sums, -inf for members that read nothing.
        first [R + 1], member [P]: the members of each row (`lists.RowMembers`).
        out [R, WIDTH]: 0 where a row reads nothing.
        row_lse [R]: log-sums of rows, -inf where a row reads nothing.
    """
    r_S = tl.program_id(0) * BR + tl.arange(0, BR)
    column_W = tl.program_id(1) * BW + tl.arange(0, BW)
    real_S = r_S < R
    first_S = tl.load(first + r_S, real_S, 0)
    members_S = tl.load(first + r_S + 1, real_S, 0) - first_S
    top_S = tl.full([BR], float("-inf"), tl.float32)
    total_S = tl.zeros([BR], tl.float32)
    sum_SW = tl.zeros([BR, BW], tl.float32)
    for turn in range(0, tl.max(members_S, 0)):
        has_S = turn < members_S
        p_S = tl.load(member + first_S + turn, has_S, 0)
        s_S = tl.load(lse + p_S, has_S, float("-inf")) * LOG2E
        w_S1, factor_S, top_S, total_S = add_to_softmax(s_S[:, None], top_S, total_S)
        at_SW = p_S.to(tl.int64)[:, None] * WIDTH + column_W[None, :]
        mask_SW = (s_S != float("-inf"))[:, None] & (column_W < WIDTH)[None, :]
        x_SW = tl.load(x + at_SW, mask_SW, 0.0).to(tl.float32)
        sum_SW = sum_SW * factor_S[:, None] + w_S1 * x_SW
    reads_S = total_S != 0  # also where the total is NaN: then the output is
    total_S = tl.where(reads_S, total_S, 1.0)
    lse_S = tl.where(reads_S, (top_S + tl.log2(total_S)) / LOG2E, float("-inf"))
    tl.store(row_lse + r_S, lse_S, real_S & (tl.program_id(1) == 0))
    at_SW = r_S.to(tl.int64)[:, None] * WIDTH + column_W[None, :]
    mask_SW = real_S[:, None] & (column_W < WIDTH)[None, :]
    tl.store(out + at_SW, (sum_SW / total_S[:, None]).to(out.dtype.element_ty), mask_SW)
