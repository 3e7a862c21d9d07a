"""Triton kernels that find the members of clusters; `triton_selection.py` launches them.

By thresholds there are four, in this order:

    score_kernel    scores a tile of positions against all clusters of its head, and decides
    tally_kernel    counts the members of each row, and of each tile in each cluster
    (torch.cumsum   sums the counts of rows: where each row's members begin)
    emit_kernel     writes the members in order of rows
    (torch.sort     sorts them by list)
    range_kernel    writes rows and ranges in order of lists

Scores stay in registers; memory gets the decisions. Bit i of word w of a position says whether it
joins cluster 32 w + i. The kernels that count and write members both read these bits, so that they
cannot disagree by a rounding error.

`product_kernel` and `moment_kernel` sum scores and their squares. `sum_kernel` sums members'
vectors. `top_kernels.py` has the kernels that choose the best scores.

Words: a tensor of members has `room` slots; the first hold members, the others are empty, see
`static_selection.py`. A *group* is one head of one sequence, x = b * H + h.

Shapes: X groups, C clusters of a head, N positions, D head size, L = X * C lists, T tiles of
positions, R = X * N rows, S slots of members in order of rows, M slots of members in order of
lists. Rows are x * N + n. Lower-case letters are the axes of a tile in registers: n positions, c
clusters, d numbers of a vector, s and m members, t tiles; 1 an axis that broadcasts.
"""

# pyright: reportGeneralTypeIssues=false
# Triton compiles what pyright takes for Python: its functions have no types for a checker.

import triton
import triton.language as tl

CLUSTERS = tl.constexpr(32)
"""Clusters that a program works on at once: their decisions are the bits of one int32."""
NO_CLUSTER = tl.constexpr(1 << 30)
"""Greater than the number of any cluster."""


@triton.jit
def load_vectors(x, row_r, real_r, begin, D: tl.constexpr, CHUNK: tl.constexpr):
    """Return the numbers begin to begin + CHUNK - 1 of vectors; 0 beyond D, and where not real."""
    d = begin + tl.arange(0, CHUNK)
    return tl.load(x + row_r[:, None] * D + d[None, :], real_r[:, None] & (d < D)[None, :], 0.0)


@triton.jit
def scores_of(
    x_nd, x, row_n, inside_n, centroid, c, C,
    D: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores of positions with clusters; 0 for positions and clusters that do not exist.

    Args:
        x_nd: the first CHUNK numbers of each vector. The others are read here.
    """
    centroid_cd = load_vectors(centroid, c, c < C, 0, D, CHUNK)
    score_nc = tl.dot(x_nd, tl.trans(centroid_cd), input_precision=PRECISION)
    for begin in range(CHUNK, D, CHUNK):
        more_nd = load_vectors(x, row_n, inside_n, begin, D, CHUNK)
        centroid_cd = load_vectors(centroid, c, c < C, begin, D, CHUNK)
        score_nc = tl.dot(more_nd, tl.trans(centroid_cd), score_nc, input_precision=PRECISION)
    return score_nc


@triton.jit
def values_of(
    x_nd, x, row_n, inside_n, centroid, threshold, c, C,
    D: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, THRESHOLDS: tl.constexpr,
):  # fmt: skip
    """Return the values of positions with clusters; -inf for clusters that do not exist.

    A value is score - threshold with THRESHOLDS, else the score.
    """
    score_nc = scores_of(x_nd, x, row_n, inside_n, centroid, c, C, D, CHUNK, PRECISION)
    if THRESHOLDS:
        threshold_c = tl.load(threshold + c, c < C, float("inf"))
        value_nc = score_nc - threshold_c[None, :]
    else:
        value_nc = tl.where((c < C)[None, :], score_nc, float("-inf"))
    return value_nc


@triton.jit
def highest_of(best_nc, second_nc, turn_nc, margin, BC: tl.constexpr):
    """Return each position's best value, the cluster that has it, and whether that is not sure.

    Args:
        best_nc: of the clusters c, BC + c, 2 BC + c ... the best value; NaN if one is.
        second_nc: of these the second best value.
        turn_nc: which of these has the best value: 0, 1, 2 ...
        margin: the greatest margin of all clusters.

    Returns:
        best_n: NaN does not count.
        first_n: a cluster with this value; 0 where a value is NaN.
        unsure_n: 1 where another cluster is within the margin, which may be the first of tied ones.
    """
    is_nan_n = tl.max((best_nc != best_nc).to(tl.int32), 1) > 0
    best_nc = tl.where(best_nc == best_nc, best_nc, float("-inf"))
    best_n = tl.max(best_nc, 1)
    cluster_nc = turn_nc * BC + tl.arange(0, BC)[None, :]
    first_n = tl.min(tl.where(best_nc == best_n[:, None], cluster_nc, NO_CLUSTER), 1)
    rival_nc = tl.where(cluster_nc == first_n[:, None], second_nc, best_nc)
    is_sure_n = is_nan_n | (tl.max(rival_nc, 1) + margin < best_n)
    return best_n, tl.where(is_nan_n, 0, first_n), (~is_sure_n).to(tl.int32)


@triton.jit
def score_kernel(
    x, centroid, threshold, margin, bits, highest, N, H, C, apart,
    D: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
    THRESHOLDS: tl.constexpr,
):  # fmt: skip
    """Score a tile of BN positions against all clusters of its head, and write what they decide.

    A program is (group, tile). CHUNK numbers of the vectors are multiplied at a time, with 32
    clusters.

    Writes:
        bits [X, ceil(C / 32), N]: with THRESHOLDS, bit i of word w: score - threshold of cluster
            32 w + i is at least -margin.
        highest [X, N]: `ties.highest_clusters` of the values of `values_of`: the first cluster
            whose value + margin is at least the best value; 0 if a value is NaN. `apart` times the
            group is added: with C this makes it the number of a list.
    """
    group = tl.program_id(0)
    tile = tl.program_id(1)
    head = group % H
    n = tile * BN + tl.arange(0, BN)
    inside = n < N
    row = group.to(tl.int64) * N + n
    x_nd = load_vectors(x, row, inside, 0, D, CHUNK)
    centroid += head * C * D
    margin += head * C
    threshold += head * C
    words = tl.cdiv(C, CLUSTERS)

    # See `highest_of`. Clusters of all turns share the columns of these tiles, so that no turn
    # needs a maximum over a row.
    best_nc = tl.full([BN, CLUSTERS], float("-inf"), tl.float32)
    second_nc = tl.full([BN, CLUSTERS], float("-inf"), tl.float32)
    turn_nc = tl.zeros([BN, CLUSTERS], tl.int32)
    most_margin_c = tl.zeros([CLUSTERS], tl.float32)
    for word in range(0, words):
        c = word * CLUSTERS + tl.arange(0, CLUSTERS)
        value_nc = values_of(
            x_nd, x, row, inside, centroid, threshold, c, C, D, CHUNK, PRECISION, THRESHOLDS
        )  # fmt: skip
        margin_c = tl.load(margin + c, c < C, 0.0)
        most_margin_c = tl.maximum(most_margin_c, margin_c)
        if THRESHOLDS:
            joins_nc = value_nc >= -margin_c[None, :]
            bit_c = 1 << tl.arange(0, CLUSTERS)
            word_n = tl.sum(tl.where(joins_nc, bit_c[None, :], 0), 1)
            tl.store(bits + (group.to(tl.int64) * words + word) * N + n, word_n, inside)
        turn_nc = tl.where(value_nc > best_nc, word, turn_nc)
        second_nc = tl.maximum(second_nc, tl.minimum(best_nc, value_nc))
        best_nc = tl.maximum(best_nc, value_nc, propagate_nan=tl.PropagateNan.ALL)

    most_margin = tl.max(most_margin_c, 0)
    best_n, first_n, unsure_n = highest_of(best_nc, second_nc, turn_nc, most_margin, CLUSTERS)
    unsure_n = tl.where(inside, unsure_n, 0)
    # Rare: two clusters are nearly tied. Then the scores are computed again, as the best values are
    # known, to find the first cluster that reaches them.
    if tl.max(unsure_n, 0) > 0:
        reaching_nc = tl.full([BN, CLUSTERS], NO_CLUSTER, tl.int32)
        for word in range(0, words):
            c = word * CLUSTERS + tl.arange(0, CLUSTERS)
            value_nc = values_of(
                x_nd, x, row, inside, centroid, threshold, c, C, D, CHUNK, PRECISION, THRESHOLDS
            )  # fmt: skip
            margin_c = tl.load(margin + c, c < C, 0.0)
            reaches_nc = (value_nc + margin_c[None, :] >= best_n[:, None]) & (c < C)[None, :]
            cluster_nc = tl.where(reaches_nc, c[None, :], NO_CLUSTER)
            reaching_nc = tl.minimum(reaching_nc, cluster_nc)
        first_n = tl.where(unsure_n > 0, tl.min(reaching_nc, 1), first_n)
    number_n = (first_n + group * apart).to(highest.dtype.element_ty)
    tl.store(highest + row, number_n, inside)


@triton.jit
def word_of(bits, highest_n, group, n, inside, word, words, N):
    """Return the bits of the clusters that positions join: by the word, and the highest cluster."""
    word_n = tl.load(bits + (group.to(tl.int64) * words + word) * N + n, inside, 0)
    bit_n = 1 << (highest_n % CLUSTERS)
    return word_n | tl.where(inside & (highest_n // CLUSTERS == word), bit_n, 0)


@triton.jit
def ones_in(word_n):
    """Return how many bits of int32 numbers are 1: in pairs of bits, in fours, in bytes, in all."""
    word_n = word_n - ((word_n >> 1) & 0x55555555)
    word_n = (word_n & 0x33333333) + ((word_n >> 2) & 0x33333333)
    word_n = (word_n + (word_n >> 4)) & 0x0F0F0F0F
    return (word_n * 0x01010101) >> 24


@triton.jit
def tally_kernel(bits, highest, times, count, N, C, BN: tl.constexpr):
    """Count the members of a tile of BN positions.

    Writes:
        times [X, N]: how many clusters each position is a member of.
        count [X, T, C]: how many positions of the tile are members of each cluster.
    """
    group = tl.program_id(0)
    tile = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    inside = n < N
    row_n = group.to(tl.int64) * N + n
    highest_n = tl.load(highest + row_n, inside, 0)
    count += (group.to(tl.int64) * tl.num_programs(1) + tile) * C
    times_n = tl.zeros([BN], tl.int32)
    words = tl.cdiv(C, CLUSTERS)
    for word in range(0, words):
        word_n = word_of(bits, highest_n, group, n, inside, word, words, N)
        times_n += ones_in(word_n)
        i = tl.arange(0, CLUSTERS)
        joins_nc = (word_n[:, None] >> i[None, :]) & 1
        c = word * CLUSTERS + i
        tl.store(count + c, tl.sum(joins_nc, 0), c < C)
    tl.store(times + row_n, times_n, inside)


@triton.jit
def emit_kernel(
    bits, highest, times, last, row_S, list_S, first_R1, room, N, C, BN: tl.constexpr
):  # fmt: skip
    """Write the members of a tile of BN positions to their slots, in order of rows and clusters.

    Args:
        times [X, N]: how many clusters each position is a member of.
        last [X, N]: the sums of `times` up to and with each position, in int64: where every
            position joins every cluster, they may exceed int32.

    Writes:
        row_S, list_S: the rows and lists of the members for which there is room.
        first_R1: where the members of each row begin; after the last row the number of all.
    """
    group = tl.program_id(0)
    tile = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    inside = n < N
    row_n = group * N + n
    highest_n = tl.load(highest + row_n, inside, 0)
    last_n = tl.load(last + row_n, inside, 0)
    first_n = last_n - tl.load(times + row_n, inside, 0)
    slot_n = tl.minimum(first_n, room).to(tl.int32)
    tl.store(first_R1 + row_n, slot_n, inside)
    is_last_n = row_n == tl.num_programs(0) * N - 1
    tl.store(first_R1 + row_n + 1, tl.minimum(last_n, room).to(tl.int32), inside & is_last_n)
    words = tl.cdiv(C, CLUSTERS)
    for word in range(0, words):
        word_n = word_of(bits, highest_n, group, n, inside, word, words, N)
        while tl.max((word_n != 0).to(tl.int32), 0) > 0:
            # Take the lowest bit of each word away, until none is left.
            others_n = word_n & (word_n - 1)
            c_n = word * CLUSTERS + ones_in((word_n ^ others_n) - 1)
            fits_n = (word_n != 0) & (slot_n < room)
            tl.store(row_S + slot_n, row_n, fits_n)
            tl.store(list_S + slot_n, (group * C + c_n).to(list_S.dtype.element_ty), fits_n)
            slot_n += (word_n != 0).to(tl.int32)
            word_n = others_n


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
    list_M, slot_M, row_S, bound_L1, row_M, start_M, stop_M, low_M, high_M, member_S,
    room, window, L, BM: tl.constexpr, SELF: tl.constexpr,
):  # fmt: skip
    """Write rows and ranges of BM members in order of lists.

    Args:
        list_M: the list of each member; L in empty slots, which come last.
        slot_M: its slot in order of rows.
        row_S: the row of each slot.
        bound_L1: where lists begin, int64.
        window: not above N.
        SELF: False: a member that reads others does not read itself.

    Writes:
        row_M: the members' rows; 0 in empty slots.
        start_M, stop_M, low_M, high_M: their ranges, see `static_selection.Ranges`; `room` in empty
            slots, which makes them empty.
        member_S: the member in each slot.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = m < room
    list_m = tl.load(list_M + m, inside, 0).to(tl.int32)
    slot_m = tl.load(slot_M + m, inside, 0)
    tl.store(member_S + slot_m, m, inside)
    is_filled = inside & (list_m < L)
    tl.store(row_M + m, tl.load(row_S + slot_m, is_filled, 0), inside)

    first_m = tl.load(bound_L1 + list_m, is_filled, 0).to(tl.int32)
    end_m = tl.load(bound_L1 + list_m + 1, is_filled, 0).to(tl.int32)
    start_m, stop_m, low_m, high_m = ranges_around(m, first_m, end_m, window, SELF)
    tl.store(start_M + m, tl.where(is_filled, start_m, room), inside)
    tl.store(stop_M + m, tl.where(is_filled, stop_m, room), inside)
    tl.store(low_M + m, tl.where(is_filled, low_m, room), inside)
    tl.store(high_M + m, tl.where(is_filled, high_m, room), inside)


@triton.jit
def top_range_kernel(
    position, row_M, start_M, stop_M, low_M, high_M, N, C, W, room, window,
    BM: tl.constexpr, SELF: tl.constexpr,
):  # fmt: skip
    """Write rows and ranges of BM members in lists of W members each.

    Args:
        position [X, C, W]: the members' positions.
        window: not above W.

    Writes:
        row_M, start_M, stop_M, low_M, high_M: see `range_kernel`.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = m < room
    list_m = m // W
    row_m = tl.load(position + m, inside, 0) + list_m // C * N
    first_m = list_m * W
    start_m, stop_m, low_m, high_m = ranges_around(m, first_m, first_m + W, window, SELF)
    tl.store(row_M + m, row_m, inside)
    tl.store(start_M + m, start_m, inside)
    tl.store(stop_M + m, stop_m, inside)
    tl.store(low_M + m, low_m, inside)
    tl.store(high_M + m, high_m, inside)


@triton.jit
def product_kernel(
    x, part, N, D: tl.constexpr, PIECE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the vectors of a piece of positions and their products, less the head's first vector.

    Less that vector, float32 keeps the digits by which vectors that hardly differ do.

    A program is (group, piece of PIECE positions, block of BD by BD products).

    Writes:
        part [X, T, D + 1, D]: with y = x - first x the sums of y y^T, and in the last row of y.
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
        inside_n1 = (n < N)[:, None]
        from_n1 = n.to(tl.int64)[:, None] * D
        x_nd = tl.load(x + from_n1 + d[None, :], inside_n1 & (d < D)[None, :], 0.0)
        x_ne = tl.load(x + from_n1 + e[None, :], inside_n1 & (e < D)[None, :], 0.0)
        y_nd = tl.where(inside_n1, x_nd - first_d[None, :], 0.0)
        y_ne = tl.where(inside_n1, x_ne - first_e[None, :], 0.0)
        product_de = tl.dot(tl.trans(y_nd), y_ne, product_de, input_precision=PRECISION)
        sum_ne += y_ne
    part += (group.to(tl.int64) * tl.num_programs(1) + piece) * (D + 1) * D
    tl.store(part + d[:, None] * D + e[None, :], product_de, (d < D)[:, None] & (e < D)[None, :])
    tl.store(part + D * D + e, tl.sum(sum_ne, 0), (e < D) & (tl.program_id(2) < blocks))


@triton.jit
def moment_kernel(
    x, part, centroid, moment, N, H, C, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Write the sums of a centroid's scores and of their squares, in float64.

    A program is a list. With y = x - first x, the sums s of y and P of y y^T, the centroid c and
    a = c (first x), the scores c x are a + c y. Their sum is N a + c s, and that of their squares
    N a^2 + 2 a c s + c P c.

    Args:
        part [X, D + 1, D]: P and s, see `product_kernel`; float64.

    Writes:
        moment [2, X, C].
    """
    of_list = tl.program_id(0).to(tl.int64)
    group = of_list // C
    centroid += (group % H * C + of_list % C) * D
    part += group * (D + 1) * D
    e = tl.arange(0, BD)
    c_e = tl.load(centroid + e, e < D, 0.0).to(tl.float64)
    first_e = tl.load(x + group * N * D + e, e < D, 0.0).to(tl.float64)
    first = tl.sum(c_e * first_e, 0)
    along = tl.sum(c_e * tl.load(part + D * D + e, e < D, 0.0), 0)
    along_e = tl.zeros([BD], tl.float64)
    for begin in range(0, D, ROWS):
        d = begin + tl.arange(0, ROWS)
        c_d = tl.load(centroid + d, d < D, 0.0).to(tl.float64)
        real_de = (d < D)[:, None] & (e < D)[None, :]
        product_de = tl.load(part + d[:, None] * D + e[None, :], real_de, 0.0)
        along_e += tl.sum(product_de * c_d[:, None], 0)
    square = tl.sum(along_e * c_e, 0)
    tl.store(moment + of_list, N * first + along)
    second = N * first * first + 2 * first * along + square
    tl.store(moment + tl.num_programs(0).to(tl.int64) + of_list, second)


@triton.jit
def sum_kernel(x, row_M, bound_L1, part, D: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr):
    """Write CHUNK numbers of the sum of the vectors of a part of a list's members, in float64.

    A program is (list, chunk, part): lists may differ much in length, and the longest would take
    long in one program. It adds members in a fixed order, so that equal inputs give equal bits.

    Writes:
        part [L, S, D]: the sums of the S parts of each list.
    """
    of_list = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    number = tl.program_id(2)
    parts = tl.num_programs(2)
    first = tl.load(bound_L1 + of_list)
    last = tl.load(bound_L1 + of_list + 1)
    size = tl.cdiv(last - first, parts)
    start = first + number * size
    end = tl.minimum(start + size, last)
    sum_d = tl.zeros([CHUNK], tl.float64)
    for begin in range(start, end, BM):
        m = begin + tl.arange(0, BM)
        row_m = tl.load(row_M + m, m < end, 0).to(tl.int64)
        real_md = (m < end)[:, None] & (d < D)[None, :]
        x_md = tl.load(x + row_m[:, None] * D + d[None, :], real_md, 0.0)
        sum_d += tl.sum(x_md, 0).to(tl.float64)
    tl.store(part + (of_list * parts + number) * D + d, sum_d, d < D)
