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

`combine_kernel` makes one softmax over all keys that the members of a row read. With its log-sums
and outputs of rows in place of lse(p) and out(p), the formulas of the backward pass are those of
that softmax.

Every kernel computes logits and weights again, so no tensor has an entry for each pair.

A program has a tile of BQ neighbouring query members (`dkv_kernel`: BK neighbouring key members)
and loops over tiles of the others. Bounds of ranges ascend, so what the members of a tile read lies
between the least start and the greatest stop. With BQ = BK = 4, `x` where a query reads a key:

    key member      1 2 3 4   5 6 7 8
    query member 4  x x x .   . . . .
                 5  . x x x   . . . .
                 6  . . x x   x . . .
                 7  . . . x   x x . .
                    begin = 1, end = 7: two iterations of the loop, m = 1 to 4 and 5 to 8

Products of matrices and all sums accumulate in float32; operands have the type of the inputs.
Logits are kept in base 2, logit2 = logit * log2(e), because tl.exp2 is faster than tl.exp.

A parameter "with DROPOUT" is None without this flag, and so on. Heads of D and E numbers are padded
by zeros to D_PADDED and E_PADDED, powers of 2.

Shapes: R rows, P query members, M key members, T distances. Of a tile: Q = BQ query members, K = BK
key members, S members of either kind (or rows), W columns, D and E padded head sizes of keys and
values; 1 is an axis that broadcasts, so `p_Q1` and `m_1K` broadcast to a tile of pairs. Helpers
without these suffixes (`p`, `m`) take tiles of pairs in both orders, [BQ, BK] and [BK, BQ].
`valid` is False for entries of a tile after the last member, or after the end of the loop.
"""

# pyright: basic, reportGeneralTypeIssues=false
# Triton compiles what pyright takes for Python: its functions have no types for a checker.

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
COUNTS = ["P", "M"]
"""Parameters by whose value Triton must not compile again: they may change with every call."""


@triton.jit
def members_of_program(members, N, SIZE: tl.constexpr, IN_ORDER: tl.constexpr):
    """Return the SIZE members of a program, which of them are valid, and their group.

    A group is one head of one sequence, b * H + h. With IN_ORDER no tile has members of two groups.
    Otherwise the last result has no meaning.
    """
    offset_S = tl.arange(0, SIZE)
    tile = tl.program_id(0)
    if IN_ORDER:
        tiles_of_sequence = tl.cdiv(N, SIZE)
        group = tile // tiles_of_sequence
        first_n = (tile - group * tiles_of_sequence) * SIZE
        n_S = offset_S + first_n
        member_S = group * N + n_S
        valid_S = n_S < N
    else:
        group = 0
        member_S = tile * SIZE + offset_S
        valid_S = member_S < members
    return member_S, valid_S, group


@triton.jit
def load_rows_of_members(row, member_S, valid_S, IN_ORDER: tl.constexpr):
    """Return the rows of members; 0 where not valid."""
    if IN_ORDER:
        row_S = tl.where(valid_S, member_S, 0)
    else:
        row_S = tl.load(row + member_S, valid_S, 0)
    return row_S


@triton.jit
def members_of_iteration(first, end, row, SIZE: tl.constexpr, IN_ORDER: tl.constexpr):
    """Return SIZE members from `first` on, which of them are below `end`, and their rows."""
    member_S = first + tl.arange(0, SIZE)
    valid_S = member_S < end
    row_S = load_rows_of_members(row, member_S, valid_S, IN_ORDER)
    return member_S, valid_S, row_S


@triton.jit
def offsets_of_rows(strides, row_S, group, H, N, IN_ORDER: tl.constexpr):
    """Return where rows begin in a view [B, H, N, .] with strides of b, h and n, in int64.

    A row has the number (b * H + h) * N + n.
    """
    b_stride, h_stride, n_stride = strides
    if IN_ORDER:
        group_S = group  # one number: no division for each row
    else:
        group_S = row_S // N
    b_S = group_S // H
    offset_S = b_S.to(tl.int64) * b_stride
    h_S = group_S - b_S * H
    offset_S += h_S.to(tl.int64) * h_stride
    n_S = row_S - group_S * N
    offset_S += n_S.to(tl.int64) * n_stride
    return offset_S


@triton.jit
def load_vectors(x, offset_S, valid_S, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Return the vectors of SIZE numbers that begin at offsets, padded by 0; 0 where not valid."""
    d = tl.arange(0, PADDED)
    pointer_SD = x + offset_S[:, None] + d[None, :]
    mask_SD = valid_S[:, None] & (d < SIZE)[None, :]
    return tl.load(pointer_SD, mask_SD, 0.0)


@triton.jit
def load_matrix_rows(x, index_S, valid_S, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Return rows of a contiguous matrix with SIZE columns; 0 where not valid."""
    offset_S = index_S.to(tl.int64) * SIZE
    return load_vectors(x, offset_S, valid_S, SIZE, PADDED)


@triton.jit
def store_matrix_rows(x, index_S, valid_S, y_SD, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Write y to rows of a contiguous matrix with SIZE columns."""
    d = tl.arange(0, PADDED)
    offset_S = index_S.to(tl.int64) * SIZE
    mask_SD = valid_S[:, None] & (d < SIZE)[None, :]
    pointer_SD = x + offset_S[:, None] + d[None, :]
    tl.store(pointer_SD, y_SD.to(x.dtype.element_ty), mask_SD)


@triton.jit
def as_column(number_S, row_S, valid_S):
    """Return three vectors as columns [S, 1], which broadcast to a tile of pairs."""
    return number_S[:, None], row_S[:, None], valid_S[:, None]


@triton.jit
def as_row(number_S, row_S, valid_S):
    """Return three vectors as rows [1, S], which broadcast to a tile of pairs."""
    return number_S[None, :], row_S[None, :], valid_S[None, :]


@triton.jit
def load_ranges(start, stop, member_S, valid_S, members):
    """Return start and stop of each member's range, and the least start and the greatest stop.

    Empty ranges do not count for the latter two. If all are empty, these are `members` and 0, so
    that a loop from one to the other has no iteration.
    """
    start_S = tl.load(start + member_S, valid_S, 0)
    stop_S = tl.load(stop + member_S, valid_S, 0)
    begin = tl.min(tl.where(start_S < stop_S, start_S, members), 0)
    end = tl.max(tl.where(start_S < stop_S, stop_S, 0), 0)
    return start_S, stop_S, begin, end


@triton.jit
def is_within(number, start, stop):
    """Return whether start <= number < stop."""
    return (number >= start) & (number < stop)


@triton.jit
def logits_in_range(product, scale, number, start, stop):
    """Return logits in base 2, from products of queries and keys.

    They are -inf unless start <= number < stop: the number of the key member within the range of
    the query member, or the other way round.
    """
    return tl.where(is_within(number, start, stop), product * (scale * LOG2E), float("-inf"))


@triton.jit
def mask_holes(logit2, holes, p, m, valid_p, valid_m, P, M, HOLES: tl.constexpr):
    """Return logits, -inf for the pairs that any of the HOLES conditions excludes.

    Args:
        holes: the pointers hole_value, hole_low and hole_high, see `attend_kernel`.
    """
    value, low, high = holes
    for _ in tl.static_range(HOLES):
        value_m = tl.load(value + m, valid_m, 0)
        low_p = tl.load(low + p, valid_p, 0)
        high_p = tl.load(high + p, valid_p, 0)
        logit2 = tl.where(is_within(value_m, low_p, high_p), float("-inf"), logit2)
        # The next condition. As a number, HOLES * M might exceed int32.
        value += M
        low += P
        high += P
    return logit2


@triton.jit
def add_to_softmax(logit2_QK, max_Q, sum_Q):
    """Add a tile of logits to a softmax over several tiles of keys ("online softmax").

    Args:
        max_Q: the greatest logit so far, in base 2.
        sum_Q: the sum of 2^(logit - max_Q) so far.

    Returns:
        w_QK: the weights 2^(logit - new maximum).
        factor_Q: by this, sums of earlier weights become sums of weights with the new maximum.
        new_max_Q, new_sum_Q: with this tile.
    """
    new_max_Q = tl.maximum(max_Q, tl.max(logit2_QK, 1))
    # If nothing has been read so far: -inf minus -inf is not a number.
    base_Q = tl.where(new_max_Q == float("-inf"), 0.0, new_max_Q)
    w_QK = tl.exp2(logit2_QK - base_Q[:, None])
    factor_Q = tl.exp2(max_Q - base_Q)
    new_sum_Q = sum_Q * factor_Q + tl.sum(w_QK, 1)
    return w_QK, factor_Q, new_max_Q, new_sum_Q


@triton.jit
def log_sum(max_Q, sum_Q, reads_Q):
    """Return the natural log-sum of a softmax, see `add_to_softmax`; -inf where nothing is read."""
    lse_Q = (max_Q + tl.log2(sum_Q)) / LOG2E
    return tl.where(reads_Q, lse_Q, float("-inf"))


@triton.jit
def load_lse2(lse, index_Q, valid_Q):
    """Return log-sums in base 2; inf where nothing is read, so that 2^(logit - inf) = 0."""
    lse_Q = tl.load(lse + index_Q, valid_Q, float("-inf"))
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
def look_up(table, index, distance, last_distance):
    """Return the entries [index, distance] of a table [., T], in float32."""
    first_entry = table + index.to(tl.int64) * (last_distance + 1)
    return tl.load(first_entry + distance).to(tl.float32)


@triton.jit
def dropout_factors(seed, p, m, dropout, rescale):
    """Return 0 for pairs whose weights are dropped, else `rescale`: by p, m and seed alone.

    So every kernel, whatever its tiles, drops the same pairs.
    """
    zero = p * 0 + m * 0  # broadcasts p and m to the tile's shape
    bits, _, _, _ = tl.philox(tl.load(seed), p + zero, m + zero, zero, zero)
    return tl.where(tl.uint_to_uniform_float(bits) >= dropout, rescale, 0.0)


@triton.jit
def weights_and_dlogits(logit2, lse2, f, dw, delta, DROPOUT: tl.constexpr):
    """Return w * f and the gradients of logits, see the module's formulas.

    Args:
        f: factors of dropout; 1 without DROPOUT.
        dw: without the factor f.
    """
    w = tl.exp2(logit2 - lse2)
    wf = w
    if DROPOUT:
        dw *= f
        wf = w * f
    return wf, w * (dw - delta)


@triton.jit
def first_entries(p_Q, last_distance):
    """Return the number of each query member's entry of distance 0 in a table [P, T], int64."""
    return p_Q.to(tl.int64)[:, None] * (last_distance + 1)


@triton.jit
def zero_end_sums(BQ: tl.constexpr):
    """Return the sums with which `store_by_distance` begins."""
    return tl.zeros([BQ], tl.float32), tl.zeros([BQ], tl.float32)


@triton.jit
def store_by_distance(table, entry_Q1, x_QK, distance_QK, last_distance, end_sums):
    """Add up x by query member and distance: write the inner entries of a table [P, T].

    Of the keys at a distance between the ends, 0 and last_distance, a query member reads at most
    one, so its x is the whole sum and is stored at once. Many keys may be at the ends, where
    distances are clamped; their sums stay in registers until `store_end_sums`. So no entry needs an
    atomic addition. Pairs that are not read have x = 0 and must not write: their entry may be that
    of a key of another list.

    Args:
        entry_Q1: see `first_entries`.
        end_sums: the sums so far at distance 0 and at last_distance.

    Returns:
        end_sums with those of this tile.
    """
    nearest_Q, farthest_Q = end_sums
    mask_QK = (x_QK != 0.0) & (distance_QK > 0) & (distance_QK < last_distance)
    tl.store(table + entry_Q1 + distance_QK, x_QK.to(table.dtype.element_ty), mask_QK)
    nearest_Q += tl.sum(tl.where(distance_QK == 0, x_QK, 0.0), 1)
    farthest_Q += tl.sum(tl.where(distance_QK == last_distance, x_QK, 0.0), 1)
    return nearest_Q, farthest_Q


@triton.jit
def store_end_sums(table, entry_Q1, valid_Q, last_distance, end_sums):
    """Write the last result of `store_by_distance`. With T = 1 both ends are the same entry."""
    nearest_Q, farthest_Q = end_sums
    nearest = table + entry_Q1
    tl.store(nearest, nearest_Q[:, None].to(table.dtype.element_ty), valid_Q[:, None])
    farthest = nearest + last_distance
    tl.store(farthest, farthest_Q[:, None].to(table.dtype.element_ty), valid_Q[:, None])


@triton.jit
def member_or_row(p_Q, row_Q, valid_Q, BY_MEMBER: tl.constexpr):
    """Return the index of each query member in a tensor by member, or else in one by row."""
    index_Q = row_Q
    if BY_MEMBER:
        index_Q = tl.where(valid_Q, p_Q, 0)
    return index_Q


@triton.jit
def lse2_and_delta(
    dout_QE,
    out,
    lse,
    dlse,
    index_Q,
    valid_Q,
    HAS_DLSE: tl.constexpr,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
):
    """Return `load_lse2`, and delta = dout . out - dlse, which is 0 where nothing is read."""
    out_QE = load_matrix_rows(out, index_Q, valid_Q, E, E_PADDED)
    delta_Q = tl.sum(out_QE.to(tl.float32) * dout_QE.to(tl.float32), 1)
    lse2_Q = load_lse2(lse, index_Q, valid_Q)
    if HAS_DLSE:
        delta_Q -= tl.load(dlse + index_Q, valid_Q, 0.0)
    return lse2_Q, tl.where(lse2_Q == float("inf"), 0.0, delta_Q)


@triton.jit(do_not_specialize=COUNTS)
def attend_kernel(
    # Inputs: views whose last stride is 1, [B, H, N, D] of q and k, [B, H, N, E] of v
    q,
    k,
    v,
    # The lists, int32
    query_row,  # [P] the row of each query member
    key_row,  # [M] the row of each key member
    start,  # [P] the first key member that a query member reads
    stop,  # [P] the key member after the last one
    # What of these ranges is not read, see `rtx.attention.reads.Holes`
    hole_value,  # [HOLES, M]
    hole_low,  # [HOLES, P]
    hole_high,  # [HOLES, P]
    # Further inputs
    logit_table,  # [R, T] in units of a product q . k; with KEYS_BY_DISTANCE
    seed,  # [1] with DROPOUT
    # Outputs
    out,  # [P, E]
    lse,  # [P] natural logarithms; -inf where nothing is read
    # Strides
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    # Sizes
    H,
    N,
    P,
    M,
    last_distance,  # T - 1
    # Numbers
    scale,
    dropout,
    rescale,  # 1 / (1 - dropout)
    # Constants
    D: tl.constexpr,
    E: tl.constexpr,
    D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    HOLES: tl.constexpr,  # how many conditions exclude pairs
    KEYS_BY_DISTANCE: tl.constexpr,
    DROPOUT: tl.constexpr,
    IN_ORDER: tl.constexpr,  # member p is row p, so that query_row and key_row are not read
    BQ: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write outputs and log-sums of query members: the forward pass of FlashAttention-2.

    A program has BQ query members, and loops over the key members that they read, BK at a time.
    The grid is (tiles of query members,).
    """
    p_Q, valid_Q, group = members_of_program(P, N, BQ, IN_ORDER)
    start_Q, stop_Q, begin, end = load_ranges(start, stop, p_Q, valid_Q, M)
    row_Q = load_rows_of_members(query_row, p_Q, valid_Q, IN_ORDER)
    offset_Q = offsets_of_rows((q_b, q_h, q_n), row_Q, group, H, N, IN_ORDER)
    q_QD = load_vectors(q, offset_Q, valid_Q, D, D_PADDED)
    holes = (hole_value, hole_low, hole_high)
    max_Q = tl.full([BQ], float("-inf"), tl.float32)
    sum_Q = tl.zeros([BQ], tl.float32)
    out_QE = tl.zeros([BQ, E_PADDED], tl.float32)

    for first_m in tl.range(begin, end, BK, num_stages=STAGES):
        m_K, valid_K, row_K = members_of_iteration(first_m, end, key_row, BK, IN_ORDER)
        k_offset_K = offsets_of_rows((k_b, k_h, k_n), row_K, group, H, N, IN_ORDER)
        k_KD = load_vectors(k, k_offset_K, valid_K, D, D_PADDED)
        v_offset_K = offsets_of_rows((v_b, v_h, v_n), row_K, group, H, N, IN_ORDER)
        v_KE = load_vectors(v, v_offset_K, valid_K, E, E_PADDED)

        product_QK = tl.dot(q_QD, tl.trans(k_KD), input_precision="ieee")
        p_Q1, row_Q1, valid_Q1 = as_column(p_Q, row_Q, valid_Q)
        m_1K, row_1K, valid_1K = as_row(m_K, row_K, valid_K)
        if KEYS_BY_DISTANCE:
            distance_QK = distance_of(row_Q1, row_1K, N, last_distance, IN_ORDER)
            product_QK += look_up(logit_table, row_Q1, distance_QK, last_distance)
        logit2_QK = logits_in_range(product_QK, scale, m_1K, start_Q[:, None], stop_Q[:, None])
        logit2_QK = mask_holes(logit2_QK, holes, p_Q1, m_1K, valid_Q1, valid_1K, P, M, HOLES)

        w_QK, factor_Q, max_Q, sum_Q = add_to_softmax(logit2_QK, max_Q, sum_Q)
        if DROPOUT:
            w_QK *= dropout_factors(seed, p_Q1, m_1K, dropout, rescale)
        w_QK = w_QK.to(v_KE.dtype)
        out_QE *= factor_Q[:, None]
        out_QE = tl.dot(w_QK, v_KE, out_QE, input_precision="ieee")

    reads_Q = sum_Q != 0  # also if the sum is NaN: then the output is NaN
    sum_Q = tl.where(reads_Q, sum_Q, 1.0)
    store_matrix_rows(out, p_Q, valid_Q, out_QE / sum_Q[:, None], E, E_PADDED)
    tl.store(lse + p_Q, log_sum(max_Q, sum_Q, reads_Q), valid_Q)


@triton.jit(do_not_specialize=COUNTS)
def weigh_kernel(
    # Inputs, see `attend_kernel`
    q,
    k,
    v,
    query_row,
    key_row,
    start,
    stop,
    hole_value,
    hole_low,
    hole_high,
    logit_table,
    seed,
    lse,  # [P] from `attend_kernel`
    # Output
    weight_table,  # [P, T] sums of w * f by distance; zeros before this kernel
    # Strides
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    # Sizes
    H,
    N,
    P,
    M,
    last_distance,
    # Numbers
    scale,
    dropout,
    rescale,
    # Constants
    D: tl.constexpr,
    E: tl.constexpr,
    D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    HOLES: tl.constexpr,
    KEYS_BY_DISTANCE: tl.constexpr,
    DROPOUT: tl.constexpr,
    IN_ORDER: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the weights of query members, after dropout, added up by distance.

    A program has BQ query members, and loops over the key members that they read, BK at a time.
    The grid is (tiles of query members,). Only with keys by distance; values are not read.
    """
    p_Q, valid_Q, group = members_of_program(P, N, BQ, IN_ORDER)
    start_Q, stop_Q, begin, end = load_ranges(start, stop, p_Q, valid_Q, M)
    row_Q = load_rows_of_members(query_row, p_Q, valid_Q, IN_ORDER)
    offset_Q = offsets_of_rows((q_b, q_h, q_n), row_Q, group, H, N, IN_ORDER)
    q_QD = load_vectors(q, offset_Q, valid_Q, D, D_PADDED)
    lse2_Q = load_lse2(lse, p_Q, valid_Q)
    holes = (hole_value, hole_low, hole_high)
    entry_Q1 = first_entries(p_Q, last_distance)
    weight_ends = zero_end_sums(BQ)

    for first_m in tl.range(begin, end, BK, num_stages=STAGES):
        m_K, valid_K, row_K = members_of_iteration(first_m, end, key_row, BK, IN_ORDER)
        k_offset_K = offsets_of_rows((k_b, k_h, k_n), row_K, group, H, N, IN_ORDER)
        k_KD = load_vectors(k, k_offset_K, valid_K, D, D_PADDED)

        p_Q1, row_Q1, valid_Q1 = as_column(p_Q, row_Q, valid_Q)
        m_1K, row_1K, valid_1K = as_row(m_K, row_K, valid_K)
        distance_QK = distance_of(row_Q1, row_1K, N, last_distance, IN_ORDER)
        product_QK = tl.dot(q_QD, tl.trans(k_KD), input_precision="ieee")
        product_QK += look_up(logit_table, row_Q1, distance_QK, last_distance)
        logit2_QK = logits_in_range(product_QK, scale, m_1K, start_Q[:, None], stop_Q[:, None])
        logit2_QK = mask_holes(logit2_QK, holes, p_Q1, m_1K, valid_Q1, valid_1K, P, M, HOLES)

        w_QK = tl.exp2(logit2_QK - lse2_Q[:, None])
        if DROPOUT:
            w_QK *= dropout_factors(seed, p_Q1, m_1K, dropout, rescale)
        weight_ends = store_by_distance(
            weight_table, entry_Q1, w_QK, distance_QK, last_distance, weight_ends
        )
    store_end_sums(weight_table, entry_Q1, valid_Q, last_distance, weight_ends)


@triton.jit(do_not_specialize=COUNTS)
def dq_kernel(
    # Inputs of the forward pass, see `attend_kernel`
    q,
    k,
    v,
    query_row,
    key_row,
    start,
    stop,
    hole_value,
    hole_low,
    hole_high,
    logit_table,
    seed,
    # Outputs of the forward pass
    out,  # [P, E] with SUMS_BY_MEMBER, else [R, E]
    lse,  # [P] with SUMS_BY_MEMBER, else [R]
    # Their gradients
    dout,  # [P, E] with DOUT_BY_MEMBER, else [R, E]: the members of a row share it
    dlse,  # as lse; with HAS_DLSE
    dweight_table,  # [P, T] or [R, T] as dout: dout times the values by distance
    # Outputs
    dq,  # [P, D]
    delta,  # [P]
    dlogit_table,  # [P, T] sums of scale * dlogit by distance; with KEYS_BY_DISTANCE, zeros before
    weight_table,  # [P, T] as of `weigh_kernel`; with VALUES_BY_DISTANCE, zeros before
    # Strides
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    # Sizes
    H,
    N,
    P,
    M,
    last_distance,
    # Numbers
    scale,
    dropout,
    rescale,
    # Constants
    D: tl.constexpr,
    E: tl.constexpr,
    D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    HOLES: tl.constexpr,
    KEYS_BY_DISTANCE: tl.constexpr,
    VALUES_BY_DISTANCE: tl.constexpr,  # only with keys by distance
    DROPOUT: tl.constexpr,
    IN_ORDER: tl.constexpr,
    DOUT_BY_MEMBER: tl.constexpr,
    SUMS_BY_MEMBER: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradients of query members, and their delta, which `dkv_kernel` reads.

    A program has BQ query members, and loops over the key members that they read, BK at a time.
    The grid is (tiles of query members,).
    """
    p_Q, valid_Q, group = members_of_program(P, N, BQ, IN_ORDER)
    start_Q, stop_Q, begin, end = load_ranges(start, stop, p_Q, valid_Q, M)
    row_Q = load_rows_of_members(query_row, p_Q, valid_Q, IN_ORDER)
    offset_Q = offsets_of_rows((q_b, q_h, q_n), row_Q, group, H, N, IN_ORDER)
    q_QD = load_vectors(q, offset_Q, valid_Q, D, D_PADDED)
    dout_index_Q = member_or_row(p_Q, row_Q, valid_Q, DOUT_BY_MEMBER)
    dout_QE = load_matrix_rows(dout, dout_index_Q, valid_Q, E, E_PADDED)
    sum_index_Q = member_or_row(p_Q, row_Q, valid_Q, SUMS_BY_MEMBER)
    lse2_Q, delta_Q = lse2_and_delta(
        dout_QE, out, lse, dlse, sum_index_Q, valid_Q, HAS_DLSE, E, E_PADDED
    )
    tl.store(delta + p_Q, delta_Q, valid_Q)
    holes = (hole_value, hole_low, hole_high)
    dq_QD = tl.zeros([BQ, D_PADDED], tl.float32)
    if KEYS_BY_DISTANCE:
        entry_Q1 = first_entries(p_Q, last_distance)
        dlogit_ends = zero_end_sums(BQ)
        weight_ends = zero_end_sums(BQ)

    for first_m in tl.range(begin, end, BK, num_stages=STAGES):
        m_K, valid_K, row_K = members_of_iteration(first_m, end, key_row, BK, IN_ORDER)
        k_offset_K = offsets_of_rows((k_b, k_h, k_n), row_K, group, H, N, IN_ORDER)
        k_KD = load_vectors(k, k_offset_K, valid_K, D, D_PADDED)
        v_offset_K = offsets_of_rows((v_b, v_h, v_n), row_K, group, H, N, IN_ORDER)
        v_KE = load_vectors(v, v_offset_K, valid_K, E, E_PADDED)

        product_QK = tl.dot(q_QD, tl.trans(k_KD), input_precision="ieee")
        dw_QK = tl.dot(dout_QE, tl.trans(v_KE), input_precision="ieee")
        p_Q1, row_Q1, valid_Q1 = as_column(p_Q, row_Q, valid_Q)
        m_1K, row_1K, valid_1K = as_row(m_K, row_K, valid_K)
        if KEYS_BY_DISTANCE:
            distance_QK = distance_of(row_Q1, row_1K, N, last_distance, IN_ORDER)
            product_QK += look_up(logit_table, row_Q1, distance_QK, last_distance)
        if VALUES_BY_DISTANCE:
            dw_QK += look_up(dweight_table, dout_index_Q[:, None], distance_QK, last_distance)
        logit2_QK = logits_in_range(product_QK, scale, m_1K, start_Q[:, None], stop_Q[:, None])
        logit2_QK = mask_holes(logit2_QK, holes, p_Q1, m_1K, valid_Q1, valid_1K, P, M, HOLES)

        f_QK = 1.0
        if DROPOUT:
            f_QK = dropout_factors(seed, p_Q1, m_1K, dropout, rescale)
        wf_QK, dlogit_QK = weights_and_dlogits(
            logit2_QK, lse2_Q[:, None], f_QK, dw_QK, delta_Q[:, None], DROPOUT
        )
        dq_QD = tl.dot(dlogit_QK.to(k_KD.dtype), k_KD, dq_QD, input_precision="ieee")
        if KEYS_BY_DISTANCE:
            dlogit_ends = store_by_distance(
                dlogit_table, entry_Q1, dlogit_QK * scale, distance_QK, last_distance, dlogit_ends
            )
        if VALUES_BY_DISTANCE:
            weight_ends = store_by_distance(
                weight_table, entry_Q1, wf_QK, distance_QK, last_distance, weight_ends
            )

    store_matrix_rows(dq, p_Q, valid_Q, dq_QD * scale, D, D_PADDED)
    if KEYS_BY_DISTANCE:
        store_end_sums(dlogit_table, entry_Q1, valid_Q, last_distance, dlogit_ends)
    if VALUES_BY_DISTANCE:
        store_end_sums(weight_table, entry_Q1, valid_Q, last_distance, weight_ends)


@triton.jit(do_not_specialize=COUNTS)
def dkv_kernel(
    # Inputs of the forward pass, see `attend_kernel`
    q,
    k,
    v,
    query_row,
    key_row,
    low,  # [M] the first query member that reads a key member
    high,  # [M] the query member after the last one
    hole_value,
    hole_low,
    hole_high,
    logit_table,
    seed,
    # Log-sums and gradients, see `dq_kernel`
    lse,
    dout,
    delta,
    dweight_table,
    # Outputs
    dk,  # [M, D]
    dv,  # [M, E]
    # Strides
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    # Sizes
    H,
    N,
    P,
    M,
    last_distance,
    # Numbers
    scale,
    dropout,
    rescale,
    # Constants
    D: tl.constexpr,
    E: tl.constexpr,
    D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    HOLES: tl.constexpr,
    KEYS_BY_DISTANCE: tl.constexpr,
    VALUES_BY_DISTANCE: tl.constexpr,
    DROPOUT: tl.constexpr,
    IN_ORDER: tl.constexpr,
    DOUT_BY_MEMBER: tl.constexpr,
    SUMS_BY_MEMBER: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradients of key members and of their values.

    A program has BK key members, and loops over the query members that read them, BQ at a time.
    Tiles of pairs are transposed, [BK, BQ]. The grid is (tiles of key members,).
    """
    m_K, valid_K, group = members_of_program(M, N, BK, IN_ORDER)
    low_K, high_K, begin, end = load_ranges(low, high, m_K, valid_K, P)
    row_K = load_rows_of_members(key_row, m_K, valid_K, IN_ORDER)
    k_offset_K = offsets_of_rows((k_b, k_h, k_n), row_K, group, H, N, IN_ORDER)
    k_KD = load_vectors(k, k_offset_K, valid_K, D, D_PADDED)
    v_offset_K = offsets_of_rows((v_b, v_h, v_n), row_K, group, H, N, IN_ORDER)
    v_KE = load_vectors(v, v_offset_K, valid_K, E, E_PADDED)
    holes = (hole_value, hole_low, hole_high)
    dk_KD = tl.zeros([BK, D_PADDED], tl.float32)
    dv_KE = tl.zeros([BK, E_PADDED], tl.float32)

    for first_p in tl.range(begin, end, BQ, num_stages=STAGES):
        p_Q, valid_Q, row_Q = members_of_iteration(first_p, end, query_row, BQ, IN_ORDER)
        offset_Q = offsets_of_rows((q_b, q_h, q_n), row_Q, group, H, N, IN_ORDER)
        q_QD = load_vectors(q, offset_Q, valid_Q, D, D_PADDED)
        dout_index_Q = member_or_row(p_Q, row_Q, valid_Q, DOUT_BY_MEMBER)
        dout_QE = load_matrix_rows(dout, dout_index_Q, valid_Q, E, E_PADDED)
        sum_index_Q = member_or_row(p_Q, row_Q, valid_Q, SUMS_BY_MEMBER)
        lse2_Q = load_lse2(lse, sum_index_Q, valid_Q)
        delta_Q = tl.load(delta + p_Q, valid_Q, 0.0)

        product_KQ = tl.dot(k_KD, tl.trans(q_QD), input_precision="ieee")
        dw_KQ = tl.dot(v_KE, tl.trans(dout_QE), input_precision="ieee")
        p_1Q, row_1Q, valid_1Q = as_row(p_Q, row_Q, valid_Q)
        m_K1, row_K1, valid_K1 = as_column(m_K, row_K, valid_K)
        if KEYS_BY_DISTANCE:
            distance_KQ = distance_of(row_1Q, row_K1, N, last_distance, IN_ORDER)
            product_KQ += look_up(logit_table, row_1Q, distance_KQ, last_distance)
        if VALUES_BY_DISTANCE:
            dw_KQ += look_up(dweight_table, dout_index_Q[None, :], distance_KQ, last_distance)
        logit2_KQ = logits_in_range(product_KQ, scale, p_1Q, low_K[:, None], high_K[:, None])
        logit2_KQ = mask_holes(logit2_KQ, holes, p_1Q, m_K1, valid_1Q, valid_K1, P, M, HOLES)

        f_KQ = 1.0
        if DROPOUT:
            f_KQ = dropout_factors(seed, p_1Q, m_K1, dropout, rescale)
        wf_KQ, dlogit_KQ = weights_and_dlogits(
            logit2_KQ, lse2_Q[None, :], f_KQ, dw_KQ, delta_Q[None, :], DROPOUT
        )
        dv_KE = tl.dot(wf_KQ.to(dout_QE.dtype), dout_QE, dv_KE, input_precision="ieee")
        dk_KD = tl.dot(dlogit_KQ.to(q_QD.dtype), q_QD, dk_KD, input_precision="ieee")

    store_matrix_rows(dk, m_K, valid_K, dk_KD * scale, D, D_PADDED)
    store_matrix_rows(dv, m_K, valid_K, dv_KE, E, E_PADDED)


@triton.jit
def rows_of_program(first, R, BR: tl.constexpr):
    """Return the BR rows of a program, which of them are valid, their first members and counts.

    Args:
        first [R + 1]: see `lists.RowMembers`.
    """
    row_S = tl.program_id(0) * BR + tl.arange(0, BR)
    valid_S = row_S < R
    first_S = tl.load(first + row_S, valid_S, 0)
    count_S = tl.load(first + row_S + 1, valid_S, 0) - first_S
    return row_S, valid_S, first_S, count_S


@triton.jit
def columns_of_program(WIDTH, BW: tl.constexpr):
    """Return the BW columns of a program, and which of them are valid."""
    column_W = tl.program_id(1) * BW + tl.arange(0, BW)
    return column_W, column_W < WIDTH


@triton.jit
def matrix_entries(index_S, column_W, WIDTH):
    """Return the numbers of the entries [index, column] of a contiguous matrix, in int64."""
    return index_S.to(tl.int64)[:, None] * WIDTH + column_W[None, :]


@triton.jit
def reduce_kernel(
    # Inputs
    x,  # [P, WIDTH]
    y,  # [P, WIDTH] with HAS_Y
    first,  # [R + 1] and
    member,  # [P] the members of each row, see `lists.RowMembers`
    lse,  # [P] with MEAN: -inf for members that do not count
    # Outputs
    out,  # [R, WIDTH] with MEAN the mean over the members that count, 0 without any
    share,  # [R] with MEAN: 1 / the number of these, 1 without any
    # Sizes
    R,
    WIDTH,
    # Constants
    HAS_Y: tl.constexpr,
    MEAN: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
):
    """Write the sum over each row's members of x (and y), or the mean.

    A program has BR rows and BW columns. The grid is (tiles of rows, tiles of columns). Iteration i
    of the loop adds member i of every row that has one, so the order of additions is fixed.
    """
    row_S, valid_S, first_S, count_S = rows_of_program(first, R, BR)
    column_W, valid_W = columns_of_program(WIDTH, BW)
    sum_SW = tl.zeros([BR, BW], tl.float32)
    summands_S = tl.zeros([BR], tl.float32)
    for i in range(0, tl.max(count_S, 0)):
        counts_S = i < count_S
        p_S = tl.load(member + first_S + i, counts_S, 0)
        if MEAN:
            lse_S = tl.load(lse + p_S, counts_S, float("-inf"))
            counts_S = counts_S & (lse_S != float("-inf"))
            summands_S += counts_S.to(tl.float32)
        entry_SW = matrix_entries(p_S, column_W, WIDTH)
        mask_SW = counts_S[:, None] & valid_W[None, :]
        sum_SW += tl.load(x + entry_SW, mask_SW, 0.0).to(tl.float32)
        if HAS_Y:
            sum_SW += tl.load(y + entry_SW, mask_SW, 0.0).to(tl.float32)

    if MEAN:
        share_S = 1.0 / tl.maximum(summands_S, 1.0)
        sum_SW *= share_S[:, None]
        tl.store(share + row_S, share_S, valid_S & (tl.program_id(1) == 0))
    entry_SW = matrix_entries(row_S, column_W, WIDTH)
    mask_SW = valid_S[:, None] & valid_W[None, :]
    tl.store(out + entry_SW, sum_SW.to(out.dtype.element_ty), mask_SW)


@triton.jit
def combine_kernel(
    # Inputs
    x,  # [P, WIDTH] outputs of members
    lse,  # [P] their log-sums, -inf for members that read nothing
    first,  # [R + 1] and
    member,  # [P] the members of each row, see `lists.RowMembers`
    # Outputs
    out,  # [R, WIDTH] 0 where a row reads nothing
    row_lse,  # [R] log-sums of rows, -inf where a row reads nothing
    # Sizes
    R,
    WIDTH,
    # Constants
    BR: tl.constexpr,
    BW: tl.constexpr,
):
    """Write the softmax over the keys of all members of each row.

    In it the output of a member has the weight exp(its lse - the row's lse).

    A program has BR rows and BW columns. The grid is (tiles of rows, tiles of columns). Iteration i
    of the loop adds member i of every row that has one, so the order of additions is fixed.
    """
    row_S, valid_S, first_S, count_S = rows_of_program(first, R, BR)
    column_W, valid_W = columns_of_program(WIDTH, BW)
    max_S = tl.full([BR], float("-inf"), tl.float32)
    sum_S = tl.zeros([BR], tl.float32)
    out_SW = tl.zeros([BR, BW], tl.float32)
    for i in range(0, tl.max(count_S, 0)):
        has_member_S = i < count_S
        p_S = tl.load(member + first_S + i, has_member_S, 0)
        lse2_S = tl.load(lse + p_S, has_member_S, float("-inf")) * LOG2E
        w_S1, factor_S, max_S, sum_S = add_to_softmax(lse2_S[:, None], max_S, sum_S)
        entry_SW = matrix_entries(p_S, column_W, WIDTH)
        mask_SW = (lse2_S != float("-inf"))[:, None] & valid_W[None, :]
        x_SW = tl.load(x + entry_SW, mask_SW, 0.0).to(tl.float32)
        out_SW = out_SW * factor_S[:, None] + w_S1 * x_SW

    reads_S = sum_S != 0  # also if the sum is NaN: then the output is NaN
    sum_S = tl.where(reads_S, sum_S, 1.0)
    lse_S = log_sum(max_S, sum_S, reads_S)
    tl.store(row_lse + row_S, lse_S, valid_S & (tl.program_id(1) == 0))
    entry_SW = matrix_entries(row_S, column_W, WIDTH)
    mask_SW = valid_S[:, None] & valid_W[None, :]
    tl.store(out + entry_SW, (out_SW / sum_S[:, None]).to(out.dtype.element_ty), mask_SW)
