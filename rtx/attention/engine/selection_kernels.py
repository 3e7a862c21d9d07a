"""Triton kernels that find the members of clusters; `triton_selection.py` launches them.

By thresholds there are four, in this order:

    score_kernel    scores a tile of positions against all clusters of its head, and decides
    tally_kernel    counts the members of each row, and of each tile in each cluster
    (torch.cumsum   sums the counts of rows: where each row's members begin)
    emit_kernel     writes the members in order of rows
    (torch.sort     sorts them by list)
    range_kernel    writes rows and ranges in order of lists

Scores stay in registers; only the decisions go to memory. Bit i of word w of a position says
whether it is a member of cluster 32 w + i. The kernels that count and write members both read these
bits, so that they cannot disagree by a rounding error.

`product_kernel` and `moment_kernel` sum scores and their squares. `sum_kernel` sums members'
vectors. `top_kernels.py` has the kernels that choose the best scores.

Words: a tensor of members has `capacity` slots; the first hold members, the others are empty, see
`static_selection.py`. A *group* is one head of one sequence, x = b * H + h.

Products, scores and sums are in float32, except where a kernel says float64.

Shapes: X groups, C clusters of a head, N positions, D head size, L = X * C lists, L1 = L + 1, T
tiles of positions, R = X * N rows (row = x * N + n), R1 = R + 1, S slots of members in order of
rows, M slots of members in order of lists. Lower-case letters are the axes of a tile in registers:
n positions, c clusters, d and e numbers of a vector, s and m members, r rows, t tiles; 1 an axis
that broadcasts. `valid_n` is False for positions of a tile after the last one, and so on.
"""

# pyright: basic, reportGeneralTypeIssues=false
# Triton compiles what pyright takes for Python: its functions have no types for a checker.

import triton
import triton.language as tl

CLUSTERS = tl.constexpr(32)
"""Clusters that a program works on at once: their decisions are the bits of one int32."""
NO_CLUSTER = tl.constexpr(1 << 30)
"""Greater than the number of any cluster."""


@triton.jit
def popcount(word):
    """Return how many bits of int32 numbers are 1. Compilers make one instruction of it."""
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def take_lowest_bit(word):
    """Return the number of the lowest bit of each word that is 1, and the word without it."""
    others = word & (word - 1)
    return popcount((word ^ others) - 1), others


@triton.jit
def any_bit(word):
    """Return whether a bit of any word is 1."""
    return tl.max((word != 0).to(tl.int32), 0) > 0


@triton.jit
def load_chunk(x, row_r, valid_r, begin, D: tl.constexpr, CHUNK: tl.constexpr):
    """Return CHUNK numbers of vectors from number `begin` on; 0 after D, and where not valid."""
    d = begin + tl.arange(0, CHUNK)
    mask_rd = valid_r[:, None] & (d < D)[None, :]
    return tl.load(x + row_r[:, None] * D + d[None, :], mask_rd, 0.0)


@triton.jit
def scores_of(
    x_nd,
    x,
    row_n,
    valid_n,
    centroid,
    c,
    C,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the scores of positions with clusters; 0 for positions and clusters that do not exist.

    Args:
        x_nd: the first CHUNK numbers of each vector. The others are read here.
        PRECISION: how float32 is multiplied, see `triton_selection.precision`.
    """
    centroid_cd = load_chunk(centroid, c, c < C, 0, D, CHUNK)
    score_nc = tl.dot(x_nd, tl.trans(centroid_cd), input_precision=PRECISION)
    for begin in range(CHUNK, D, CHUNK):
        more_nd = load_chunk(x, row_n, valid_n, begin, D, CHUNK)
        centroid_cd = load_chunk(centroid, c, c < C, begin, D, CHUNK)
        score_nc = tl.dot(more_nd, tl.trans(centroid_cd), score_nc, input_precision=PRECISION)
    return score_nc


@triton.jit
def values_of(
    x_nd,
    x,
    row_n,
    valid_n,
    centroid,
    threshold,
    c,
    C,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    THRESHOLDS: tl.constexpr,
):
    """Return the values of positions with clusters; -inf for clusters that do not exist.

    A value is score - threshold with THRESHOLDS, else the score.
    """
    score_nc = scores_of(x_nd, x, row_n, valid_n, centroid, c, C, D, CHUNK, PRECISION)
    if THRESHOLDS:
        threshold_c = tl.load(threshold + c, c < C, float("inf"))
        value_nc = score_nc - threshold_c[None, :]
    else:
        value_nc = tl.where((c < C)[None, :], score_nc, float("-inf"))
    return value_nc


@triton.jit
def highest_of(best_nc, second_nc, iteration_nc, margin, BC: tl.constexpr):
    """Return each position's best value, the cluster that has it, and whether that is not sure.

    Args:
        best_nc: the best value of the clusters c, BC + c, 2 BC + c ...; NaN if one is.
        second_nc: the second best value of these.
        iteration_nc: which of these has the best value: 0, 1, 2 ...
        margin: the greatest margin of all clusters.

    Returns:
        best_n: NaN does not count.
        first_n: a cluster with this value; 0 if a value is NaN.
        is_unsure_n: 1 if another cluster is within the margin, which may be the first of tied ones.
    """
    has_nan_n = tl.max((best_nc != best_nc).to(tl.int32), 1) > 0
    best_nc = tl.where(best_nc == best_nc, best_nc, float("-inf"))
    best_n = tl.max(best_nc, 1)
    cluster_nc = iteration_nc * BC + tl.arange(0, BC)[None, :]
    first_n = tl.min(tl.where(best_nc == best_n[:, None], cluster_nc, NO_CLUSTER), 1)
    rival_nc = tl.where(cluster_nc == first_n[:, None], second_nc, best_nc)
    is_sure_n = has_nan_n | (tl.max(rival_nc, 1) + margin < best_n)
    return best_n, tl.where(has_nan_n, 0, first_n), (~is_sure_n).to(tl.int32)


@triton.jit
def first_tied_cluster(
    x_nd,
    x,
    row_n,
    valid_n,
    centroid,
    threshold,
    margin,
    best_n,
    C,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    THRESHOLDS: tl.constexpr,
):
    """Return the first cluster whose value + margin is at least the best value of each position.

    Args:
        best_n: the best values. The others: see `values_of` and `score_kernel`.
    """
    first_nc = tl.full([BN, CLUSTERS], NO_CLUSTER, tl.int32)
    for word in range(0, tl.cdiv(C, CLUSTERS)):
        c = word * CLUSTERS + tl.arange(0, CLUSTERS)
        value_nc = values_of(
            x_nd, x, row_n, valid_n, centroid, threshold, c, C, D, CHUNK, PRECISION, THRESHOLDS
        )
        margin_c = tl.load(margin + c, c < C, 0.0)
        reaches_nc = (value_nc + margin_c[None, :] >= best_n[:, None]) & (c < C)[None, :]
        cluster_nc = tl.where(reaches_nc, c[None, :], NO_CLUSTER)
        first_nc = tl.minimum(first_nc, cluster_nc)
    return tl.min(first_nc, 1)


@triton.jit
def bits_of(is_member_nc):
    """Return a word for each position, whose bit c is its decision on column c of 32."""
    bit_c = 1 << tl.arange(0, CLUSTERS)
    return tl.sum(tl.where(is_member_nc, bit_c[None, :], 0), 1)


@triton.jit
def score_kernel(
    # Inputs
    x,  # [X, N, D]
    centroid,  # [H, C, D]
    threshold,  # [H, C] with THRESHOLDS
    margin,  # [H, C] within which values are tied
    # Outputs
    bits,  # [X, ceil(C / 32), N] with THRESHOLDS
    highest,  # [X, N]
    # Sizes
    N,
    H,
    C,
    group_stride,  # added to `highest` for each group: C makes numbers of lists of it, 0 does not
    # Constants
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    THRESHOLDS: tl.constexpr,
):
    """Score positions against all clusters of their head, and write what the scores decide.

    A program has BN positions. It multiplies CHUNK numbers of the vectors at a time, with 32
    clusters at a time. The grid is (groups, tiles of positions).

    Writes:
        bits: bit i of word w is whether score - threshold of cluster 32 w + i is at least -margin.
        highest: `ties.highest_clusters` of the values of `values_of`: the first cluster whose
            value + margin is at least the best value; 0 if a value is NaN.
    """
    group = tl.program_id(0)
    head = group % H
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    valid_n = n < N
    row_n = group.to(tl.int64) * N + n
    x_nd = load_chunk(x, row_n, valid_n, 0, D, CHUNK)
    centroid += head * C * D
    margin += head * C
    threshold += head * C
    words = tl.cdiv(C, CLUSTERS)

    # See `highest_of`. Clusters of all iterations share the columns of these tiles, so that no
    # iteration needs a maximum over a row.
    best_nc = tl.full([BN, CLUSTERS], float("-inf"), tl.float32)
    second_nc = tl.full([BN, CLUSTERS], float("-inf"), tl.float32)
    iteration_nc = tl.zeros([BN, CLUSTERS], tl.int32)
    most_margin_c = tl.zeros([CLUSTERS], tl.float32)
    for word in range(0, words):
        c = word * CLUSTERS + tl.arange(0, CLUSTERS)
        value_nc = values_of(
            x_nd, x, row_n, valid_n, centroid, threshold, c, C, D, CHUNK, PRECISION, THRESHOLDS
        )
        margin_c = tl.load(margin + c, c < C, 0.0)
        most_margin_c = tl.maximum(most_margin_c, margin_c)
        if THRESHOLDS:
            word_n = bits_of(value_nc >= -margin_c[None, :])
            tl.store(bits + (group.to(tl.int64) * words + word) * N + n, word_n, valid_n)
        iteration_nc = tl.where(value_nc > best_nc, word, iteration_nc)
        second_nc = tl.maximum(second_nc, tl.minimum(best_nc, value_nc))
        best_nc = tl.maximum(best_nc, value_nc, propagate_nan=tl.PropagateNan.ALL)

    most_margin = tl.max(most_margin_c, 0)
    best_n, first_n, is_unsure_n = highest_of(
        best_nc, second_nc, iteration_nc, most_margin, CLUSTERS
    )
    is_unsure_n = tl.where(valid_n, is_unsure_n, 0)
    # Rare: two clusters are nearly tied. Then the scores are computed again, as the best values are
    # known, to find the first cluster that reaches them.
    if tl.max(is_unsure_n, 0) > 0:
        first_tied_n = first_tied_cluster(
            x_nd,
            x,
            row_n,
            valid_n,
            centroid,
            threshold,
            margin,
            best_n,
            C,
            D,
            CHUNK,
            BN,
            PRECISION,
            THRESHOLDS,
        )
        first_n = tl.where(is_unsure_n > 0, first_tied_n, first_n)
    number_n = (first_n + group * group_stride).to(highest.dtype.element_ty)
    tl.store(highest + row_n, number_n, valid_n)


@triton.jit
def load_word(bits, highest_n, group, n, valid_n, word, words, N):
    """Return a word of each position: bits of `score_kernel`, and that of the highest cluster."""
    word_n = tl.load(bits + (group.to(tl.int64) * words + word) * N + n, valid_n, 0)
    bit_n = 1 << (highest_n % CLUSTERS)
    return word_n | tl.where(valid_n & (highest_n // CLUSTERS == word), bit_n, 0)


@triton.jit
def tally_kernel(
    # Inputs, see `score_kernel`
    bits,
    highest,
    # Outputs
    times,  # [X, N] how many clusters each position is a member of
    count,  # [X, T, C] how many positions of the tile are members of each cluster
    # Sizes
    N,
    C,
    # Constants
    BN: tl.constexpr,
):
    """Count the members of BN positions, a tile. The grid is (groups, T tiles)."""
    group = tl.program_id(0)
    tile = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    valid_n = n < N
    row_n = group.to(tl.int64) * N + n
    highest_n = tl.load(highest + row_n, valid_n, 0)
    count += (group.to(tl.int64) * tl.num_programs(1) + tile) * C
    times_n = tl.zeros([BN], tl.int32)
    i = tl.arange(0, CLUSTERS)
    words = tl.cdiv(C, CLUSTERS)
    for word in range(0, words):
        word_n = load_word(bits, highest_n, group, n, valid_n, word, words, N)
        times_n += popcount(word_n)
        member_nc = (word_n[:, None] >> i[None, :]) & 1
        c = word * CLUSTERS + i
        tl.store(count + c, tl.sum(member_nc, 0), c < C)
    tl.store(times + row_n, times_n, valid_n)


@triton.jit
def emit_kernel(
    # Inputs
    bits,  # see `score_kernel`
    highest,
    times,  # [X, N] how many clusters each position is a member of
    last,  # [X, N] int64: the sums of `times` up to and with each position, perhaps beyond int32
    # Outputs
    row_S,  # the rows of the members that have a slot, in order of rows and clusters
    list_S,  # their lists
    first_R1,  # where the members of each row begin; after the last row the number of all
    # Sizes
    capacity,
    N,
    C,
    # Constants
    BN: tl.constexpr,
):
    """Write the members of BN positions to their slots. The grid is (groups, tiles of positions)"""
    group = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    valid_n = n < N
    row_n = group * N + n
    highest_n = tl.load(highest + row_n, valid_n, 0)
    last_n = tl.load(last + row_n, valid_n, 0)
    first_n = last_n - tl.load(times + row_n, valid_n, 0)
    slot_n = tl.minimum(first_n, capacity).to(tl.int32)
    tl.store(first_R1 + row_n, slot_n, valid_n)
    is_last_n = valid_n & (row_n == tl.num_programs(0) * N - 1)
    tl.store(first_R1 + row_n + 1, tl.minimum(last_n, capacity).to(tl.int32), is_last_n)

    words = tl.cdiv(C, CLUSTERS)
    for word in range(0, words):
        word_n = load_word(bits, highest_n, group, n, valid_n, word, words, N)
        while any_bit(word_n):
            is_member_n = word_n != 0
            bit_n, word_n = take_lowest_bit(word_n)
            list_n = group * C + word * CLUSTERS + bit_n
            fits_n = is_member_n & (slot_n < capacity)
            tl.store(row_S + slot_n, row_n, fits_n)
            tl.store(list_S + slot_n, list_n.to(list_S.dtype.element_ty), fits_n)
            slot_n += is_member_n.to(tl.int32)


@triton.jit
def ranges_around(m, first_m, end_m, window, SELF: tl.constexpr):
    """Return start, stop, low and high of members, see `static_selection.ranges_around`."""
    start_m = tl.maximum(first_m, m + 1 - window)
    high_m = tl.minimum(end_m, m + window)
    stop_m = m + 1
    low_m = m
    if not SELF:
        reads_others_m = (start_m < m).to(tl.int32)
        stop_m -= reads_others_m
        low_m += reads_others_m
    return start_m, stop_m, low_m, high_m


@triton.jit
def range_kernel(
    # Inputs
    list_M,  # the list of each member, ascending; L in empty slots
    slot_M,  # int64: its slot in order of rows
    row_S,  # the row of each slot
    bound_L1,  # int64: where lists begin, and where the last one ends
    # Outputs
    row_M,  # the members' rows; 0 in empty slots
    start_M,  # the members' ranges, see `static_selection.Ranges`;
    stop_M,  # `capacity` in empty slots, which makes them empty
    low_M,
    high_M,
    member_S,  # the member in each slot
    # Sizes
    capacity,
    window,  # not above N
    L,
    # Constants
    BM: tl.constexpr,
    SELF: tl.constexpr,  # whether a member that reads others also reads itself
):
    """Write rows and ranges of members in order of lists.

    A program has BM members. The grid is (tiles of members,).
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    valid_m = m < capacity
    list_m = tl.load(list_M + m, valid_m, 0).to(tl.int32)
    slot_m = tl.load(slot_M + m, valid_m, 0)
    tl.store(member_S + slot_m, m, valid_m)
    is_filled_m = valid_m & (list_m < L)
    row_m = tl.load(row_S + slot_m, is_filled_m, 0)
    tl.store(row_M + m, row_m, valid_m)

    first_m = tl.load(bound_L1 + list_m, is_filled_m, 0).to(tl.int32)
    end_m = tl.load(bound_L1 + list_m + 1, is_filled_m, 0).to(tl.int32)
    start_m, stop_m, low_m, high_m = ranges_around(m, first_m, end_m, window, SELF)
    tl.store(start_M + m, tl.where(is_filled_m, start_m, capacity), valid_m)
    tl.store(stop_M + m, tl.where(is_filled_m, stop_m, capacity), valid_m)
    tl.store(low_M + m, tl.where(is_filled_m, low_m, capacity), valid_m)
    tl.store(high_M + m, tl.where(is_filled_m, high_m, capacity), valid_m)


@triton.jit
def top_range_kernel(
    # Input
    position,  # [X, C, W] the members' positions
    # Outputs, see `range_kernel`
    row_M,
    start_M,
    stop_M,
    low_M,
    high_M,
    # Sizes
    N,
    C,
    W,
    capacity,  # X * C * W
    window,  # not above W
    # Constants
    BM: tl.constexpr,
    SELF: tl.constexpr,
):
    """Write rows and ranges of members of lists with W members each.

    A program has BM members. The grid is (tiles of members,).
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    valid_m = m < capacity
    list_m = m // W
    row_m = tl.load(position + m, valid_m, 0) + list_m // C * N
    first_m = list_m * W
    start_m, stop_m, low_m, high_m = ranges_around(m, first_m, first_m + W, window, SELF)
    tl.store(row_M + m, row_m, valid_m)
    tl.store(start_M + m, start_m, valid_m)
    tl.store(stop_M + m, stop_m, valid_m)
    tl.store(low_M + m, low_m, valid_m)
    tl.store(high_M + m, high_m, valid_m)


@triton.jit
def load_differences(x, first_d, n, N, d, D: tl.constexpr):
    """Return the numbers d of vectors n, less those of the first vector; 0 after vector N - 1."""
    valid_n1 = (n < N)[:, None]
    offset_n1 = n.to(tl.int64)[:, None] * D
    x_nd = tl.load(x + offset_n1 + d[None, :], valid_n1 & (d < D)[None, :], 0.0)
    return tl.where(valid_n1, x_nd - first_d[None, :], 0.0)


@triton.jit
def product_kernel(
    # Input
    x,  # [X, N, D]
    # Output
    part,  # [X, T, D + 1, D] the sums of y y^T, and in the last row those of y
    # Size
    N,
    # Constants
    D: tl.constexpr,
    PIECE: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum y and y y^T over PIECE positions, y being a vector less the first one of its head.

    Without this difference, float32 would lose the digits by which similar vectors differ.

    A program has a block of BD by BD products, and loops over its positions, BN at a time. The grid
    is (groups, T pieces of positions, blocks of products).
    """
    group = tl.program_id(0)
    piece = tl.program_id(1)
    blocks = tl.cdiv(D, BD)
    d = tl.program_id(2) // blocks * BD + tl.arange(0, BD)
    e = tl.program_id(2) % blocks * BD + tl.arange(0, BD)
    x += group.to(tl.int64) * N * D
    first_d = tl.load(x + d, d < D, 0.0)
    first_e = tl.load(x + e, e < D, 0.0)
    product_de = tl.zeros([BD, BD], tl.float32)
    sum_ne = tl.zeros([BN, BD], tl.float32)
    for begin in range(0, PIECE, BN):
        n = piece * PIECE + begin + tl.arange(0, BN)
        y_nd = load_differences(x, first_d, n, N, d, D)
        y_ne = load_differences(x, first_e, n, N, e, D)
        product_de = tl.dot(tl.trans(y_nd), y_ne, product_de, input_precision=PRECISION)
        sum_ne += y_ne

    part += (group.to(tl.int64) * tl.num_programs(1) + piece) * (D + 1) * D
    mask_de = (d < D)[:, None] & (e < D)[None, :]
    tl.store(part + d[:, None] * D + e[None, :], product_de, mask_de)
    is_first_block = tl.program_id(2) < blocks
    tl.store(part + D * D + e, tl.sum(sum_ne, 0), (e < D) & is_first_block)


@triton.jit
def moment_kernel(
    # Inputs
    x,  # [X, N, D]
    part,  # [X, D + 1, D] P and s: the sums of all pieces of `product_kernel`; float64
    centroid,  # [H, C, D]
    # Output
    moment,  # [2, X, C] float64
    # Sizes
    N,
    H,
    C,
    # Constants
    D: tl.constexpr,
    BD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the sums of a centroid's scores and of their squares, in float64.

    With y = x - first x, the sums s of y and P of y y^T, the centroid c and a = c (first x), the
    scores c x are a + c y. Their sum is N a + c s, and that of their squares
    N a^2 + 2 a c s + c P c.

    A program has a list, and reads ROWS rows of P at a time. The grid is (L lists,).
    """
    list_number = tl.program_id(0).to(tl.int64)
    group = list_number // C
    centroid += (group % H * C + list_number % C) * D
    part += group * (D + 1) * D
    e = tl.arange(0, BD)
    c_e = tl.load(centroid + e, e < D, 0.0).to(tl.float64)
    first_e = tl.load(x + group * N * D + e, e < D, 0.0).to(tl.float64)
    s_e = tl.load(part + D * D + e, e < D, 0.0)
    a = tl.sum(c_e * first_e, 0)
    cs = tl.sum(c_e * s_e, 0)
    cp_e = tl.zeros([BD], tl.float64)
    for begin in range(0, D, ROWS):
        d = begin + tl.arange(0, ROWS)
        c_d = tl.load(centroid + d, d < D, 0.0).to(tl.float64)
        mask_de = (d < D)[:, None] & (e < D)[None, :]
        p_de = tl.load(part + d[:, None] * D + e[None, :], mask_de, 0.0)
        cp_e += tl.sum(p_de * c_d[:, None], 0)
    cpc = tl.sum(cp_e * c_e, 0)
    tl.store(moment + list_number, N * a + cs)
    square = N * a * a + 2 * a * cs + cpc
    tl.store(moment + tl.num_programs(0).to(tl.int64) + list_number, square)


@triton.jit
def sum_kernel(
    # Inputs
    x,  # [R, D]
    row_M,  # the members' rows, list after list
    bound_L1,  # where lists begin, and where the last one ends
    # Output
    part,  # [L, S, D] float64: the sums of the S parts of each list
    # Constants
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BM: tl.constexpr,
):
    """Write the sums of the vectors of a part of a list's members, in float64.

    Each list has S parts: lists may differ much in length, and the longest would take long in one
    program. Members are added in a fixed order, so that equal inputs give equal bits.

    A program has CHUNK numbers of the vectors of one part, and adds BM members at a time. The grid
    is (L lists, chunks, S parts).
    """
    list_number = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    part_number = tl.program_id(2)
    parts = tl.num_programs(2)
    first = tl.load(bound_L1 + list_number)
    last = tl.load(bound_L1 + list_number + 1)
    part_size = tl.cdiv(last - first, parts)
    start = first + part_number * part_size
    end = tl.minimum(start + part_size, last)
    sum_d = tl.zeros([CHUNK], tl.float64)
    for begin in range(start, end, BM):
        m = begin + tl.arange(0, BM)
        row_m = tl.load(row_M + m, m < end, 0).to(tl.int64)
        mask_md = (m < end)[:, None] & (d < D)[None, :]
        x_md = tl.load(x + row_m[:, None] * D + d[None, :], mask_md, 0.0)
        sum_d += tl.sum(x_md, 0).to(tl.float64)
    tl.store(part + (list_number * parts + part_number) * D + d, sum_d, d < D)
