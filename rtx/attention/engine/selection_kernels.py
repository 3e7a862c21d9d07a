"""Triton kernels that find the members of clusters; `triton_selection.py` launches them.

By thresholds there are five, in this order:

    score_kernel    scores a tile of positions against all clusters of its head, and decides
    tally_kernel    counts the members of each tile in each cluster
    (torch.cumsum   sums these counts, list after list: where each tile's members begin)
    write_kernel    writes the members of a tile to their slots, with their ranges
    order_kernel    sorts members by row, and fills the empty slots
    moment_kernel   sums the tiles' moments of scores

Scores stay in registers; memory gets the decisions. Bit i of word w of a position says whether it
joins cluster 32 w + i. The kernels that count and write members both read these bits, so that they
cannot disagree by a rounding error.

`sum_kernel` sums members' vectors. `top_kernels.py` has the kernels that choose the best scores.

Words: a tensor of members has `room` slots; the first hold members, the others are empty, see
`static_selection.py`. A *group* is one head of one sequence, x = b * H + h.

Shapes: X groups, C clusters of a head, N positions, D head size, L = X * C lists, T tiles of
positions, M slots of members. Rows are x * N + n. Lower-case letters are the axes of a tile in
registers: n positions, c clusters, d numbers of a vector, m members, t tiles, r rows; 1 an axis
that broadcasts.
"""

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
def without_nan(value_nc, c, C):
    """Return the values, -inf for NaN and clusters that do not exist; and 1 where n has a NaN."""
    real_1c = (c < C)[None, :]
    nan_nc = real_1c & (value_nc != value_nc)
    value_nc = tl.where(real_1c & (value_nc == value_nc), value_nc, float("-inf"))
    return value_nc, tl.max(nan_nc.to(tl.int32), 1)


@triton.jit
def first_that_reaches(reach_nc, c, best_n):
    """Return the first cluster whose reach (value + margin) is at least best_n; else NO_CLUSTER."""
    reaches_nc = reach_nc >= best_n[:, None]
    cluster_nc = tl.broadcast_to(c[None, :], reach_nc.shape)
    return tl.min(tl.where(reaches_nc, cluster_nc, NO_CLUSTER), 1)


@triton.jit
def take_in(value_nc, margin_c, c, best_n, first_n, reach_n, rival_n, unsure_n):
    """Return the state of the search for each position's cluster after 32 more clusters.

    The aim is `ties.highest`: the first cluster whose *reach*, its value + margin, is at least the
    best value of all clusters. The clusters come 32 at a time, so a later best value may be out of
    the reach of an earlier first cluster.

    Example, margin 1. Clusters 0 to 31 have the best value 5 at cluster 7; cluster 2 has 4.5 and is
    the first (reach 5.5), and cluster 7 is the best rival (reach 6). Then cluster 40 has the value
    5.8. It is out of the reach of cluster 2, but not of cluster 7. The first cluster is now cluster
    7, or one between 2 and 7. The state cannot tell which, as it has but the highest reach of these
    (`rival_n`): the first cluster is *unsure*. With the value 7 at cluster 40, no earlier cluster
    would reach it, and the first one is among the 32 new ones.

    Returns:
        best_n: the best value so far.
        first_n: the first cluster that reaches it.
        reach_n: the reach of that cluster.
        rival_n: the highest reach of the other clusters. A former first cluster is not among them:
            no later best value is in its reach.
        unsure_n: 1 if first_n may be wrong.
    """
    reach_nc = value_nc + margin_c[None, :]
    best_n = tl.maximum(best_n, tl.max(value_nc, 1))
    stays_n = reach_n >= best_n
    unsure_n = unsure_n | ((~stays_n) & (rival_n >= best_n)).to(tl.int32)
    first_n = tl.where(stays_n, first_n, first_that_reaches(reach_nc, c, best_n))
    is_first_nc = c[None, :] == first_n[:, None]
    first_reach_n = tl.max(tl.where(is_first_nc, reach_nc, float("-inf")), 1)
    reach_n = tl.where(stays_n, reach_n, first_reach_n)
    rival_n = tl.maximum(rival_n, tl.max(tl.where(is_first_nc, float("-inf"), reach_nc), 1))
    return best_n, first_n, reach_n, rival_n, unsure_n


@triton.jit
def score_kernel(
    x, centroid, threshold, margin, bits, highest, nearest, moment, N, H, C,
    D: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
    THRESHOLDS: tl.constexpr, NEAREST: tl.constexpr,
):  # fmt: skip
    """Score a tile of BN positions against all clusters of its head, and write what they decide.

    A program is (group, tile). CHUNK numbers of the vectors are multiplied at a time.

    Writes:
        bits [X, ceil(C / 32), N]: with THRESHOLDS, bit i of word w: score - threshold of cluster
            32 w + i is at least -margin.
        highest [X, N]: the first cluster tied with the highest value; a value is score - threshold
            with THRESHOLDS, else the score. Cluster 0 where a value is NaN.
        nearest [X, N]: with NEAREST, which needs THRESHOLDS, the same of the scores themselves.
        moment [2, X, C, T]: with THRESHOLDS, see `write_moments`.
    """
    group = tl.program_id(0)
    tile = tl.program_id(1)
    head = group % H
    tiles = tl.num_programs(1)
    n = tile * BN + tl.arange(0, BN)
    inside = n < N
    row = group.to(tl.int64) * N + n
    x_nd = load_vectors(x, row, inside, 0, D, CHUNK)
    centroid += head * C * D
    margin += head * C
    threshold += head * C
    words = tl.cdiv(C, CLUSTERS)

    # The state of `take_in` before the first cluster: of values, and with NEAREST of scores.
    lowest_n = tl.full([BN], float("-inf"), tl.float32)
    zero_n = tl.zeros([BN], tl.int32)
    best_n = lowest_n
    first_n = zero_n
    reach_n = lowest_n
    rival_n = lowest_n
    nan_n = zero_n
    near_best_n = lowest_n
    near_first_n = zero_n
    near_reach_n = lowest_n
    near_rival_n = lowest_n
    near_nan_n = zero_n
    unsure_n = zero_n
    for word in range(0, words):
        c = word * CLUSTERS + tl.arange(0, CLUSTERS)
        score_nc = scores_of(x_nd, x, row, inside, centroid, c, C, D, CHUNK, PRECISION)
        margin_c = tl.load(margin + c, c < C, 0.0)
        value_nc = score_nc
        if THRESHOLDS:
            value_nc = score_nc - tl.load(threshold + c, c < C, 0.0)[None, :]
            joins_nc = (value_nc >= -margin_c[None, :]) & (c < C)[None, :]
            bit_nc = joins_nc.to(tl.int32) << (c % CLUSTERS)[None, :]
            to_n = bits + (group.to(tl.int64) * words + word) * N + n
            tl.store(to_n, tl.sum(bit_nc, 1), inside)
            write_moments(score_nc, inside, N - tile * BN, moment, group, c, C, tile, tiles, BN)
        value_nc, has_nan_n = without_nan(value_nc, c, C)
        nan_n = nan_n | has_nan_n
        best_n, first_n, reach_n, rival_n, unsure_n = take_in(
            value_nc, margin_c, c, best_n, first_n, reach_n, rival_n, unsure_n
        )
        if NEAREST:
            score_nc, has_nan_n = without_nan(score_nc, c, C)
            near_nan_n = near_nan_n | has_nan_n
            near_best_n, near_first_n, near_reach_n, near_rival_n, unsure_n = take_in(
                score_nc, margin_c, c,
                near_best_n, near_first_n, near_reach_n, near_rival_n, unsure_n,
            )  # fmt: skip

    # Rare: three clusters, not all of one word, must be nearly tied. Then the scores are computed
    # again, now that the best values are known.
    if tl.max(unsure_n, 0) > 0:
        first_n = tl.full([BN], NO_CLUSTER, tl.int32)
        near_first_n = tl.full([BN], NO_CLUSTER, tl.int32)
        for word in range(0, words):
            c = word * CLUSTERS + tl.arange(0, CLUSTERS)
            score_nc = scores_of(x_nd, x, row, inside, centroid, c, C, D, CHUNK, PRECISION)
            margin_c = tl.load(margin + c, c < C, 0.0)
            value_nc = score_nc
            if THRESHOLDS:
                value_nc = score_nc - tl.load(threshold + c, c < C, 0.0)[None, :]
            value_nc, _ = without_nan(value_nc, c, C)
            reach_nc = value_nc + margin_c[None, :]
            first_n = tl.minimum(first_n, first_that_reaches(reach_nc, c, best_n))
            if NEAREST:
                score_nc, _ = without_nan(score_nc, c, C)
                reach_nc = score_nc + margin_c[None, :]
                here_n = first_that_reaches(reach_nc, c, near_best_n)
                near_first_n = tl.minimum(near_first_n, here_n)
    tl.store(highest + row, tl.where(nan_n > 0, 0, first_n), inside)
    if NEAREST:
        tl.store(nearest + row, tl.where(near_nan_n > 0, 0, near_first_n), inside)


@triton.jit
def write_moments(
    score_nc, inside, left, moment, group, c, C, tile, tiles, BN: tl.constexpr
):  # fmt: skip
    """Write two moments of a tile's scores with each cluster.

    Args:
        left: positions from the tile's first one to the last of all.

    Writes:
        moment [2, X, C, T]: the sums of the scores, and of their squared distances from the tile's
            mean. float32 keeps the digits of these distances where scores hardly differ, which it
            would lose in a sum of squares.
    """
    count = tl.minimum(left, BN).to(tl.float32)
    sum_c = tl.sum(tl.where(inside[:, None], score_nc, 0.0), 0)
    distance_nc = tl.where(inside[:, None], score_nc - (sum_c / count)[None, :], 0.0)
    to_c = (group.to(tl.int64) * C + c) * tiles + tile
    tl.store(moment + to_c, sum_c, c < C)
    second_moments = tl.num_programs(0).to(tl.int64) * C * tiles
    squares_c = tl.sum(distance_nc * distance_nc, 0)
    tl.store(moment + second_moments + to_c, squares_c, c < C)


@triton.jit
def memberships(bits, highest_n, group, n, inside, word, words, N, C, THRESHOLDS: tl.constexpr):
    """Return 1 where a position is a member of a word's cluster: by its bit, or as the highest."""
    c = word * CLUSTERS + tl.arange(0, CLUSTERS)
    joins_nc = (highest_n[:, None] == c[None, :]) & inside[:, None]
    if THRESHOLDS:
        word_n = tl.load(bits + (group.to(tl.int64) * words + word) * N + n, inside, 0)
        joins_nc = joins_nc | (((word_n[:, None] >> (c % CLUSTERS)[None, :]) & 1) > 0)
    return joins_nc.to(tl.int32)


@triton.jit
def tally_kernel(bits, highest, count, N, C, BN: tl.constexpr, THRESHOLDS: tl.constexpr):
    """Write how many positions of a tile are members of each cluster: count [X, C, T]."""
    group = tl.program_id(0)
    tile = tl.program_id(1)
    tiles = tl.num_programs(1)
    n = tile * BN + tl.arange(0, BN)
    inside = n < N
    highest_n = tl.load(highest + group.to(tl.int64) * N + n, inside, -1)
    words = tl.cdiv(C, CLUSTERS)
    for word in range(0, words):
        joins_nc = memberships(bits, highest_n, group, n, inside, word, words, N, C, THRESHOLDS)
        c = word * CLUSTERS + tl.arange(0, CLUSTERS)
        to_c = (group.to(tl.int64) * C + c) * tiles + tile
        tl.store(count + to_c, tl.sum(joins_nc, 0), c < C)


@triton.jit
def members_before(count, last, tile_c, real_c, room):
    """Return how many members have slots before those of tiles: `room` at the most.

    Args:
        tile_c: the tiles, as places in [X, C, T].
        count, last: see `write_kernel`.
    """
    members_c = tl.load(last + tile_c, real_c, 0) - tl.load(count + tile_c, real_c, 0)
    return tl.minimum(members_c, room).to(tl.int32)


@triton.jit
def write_kernel(
    bits, highest, count, last, row_M, start_M, stop_M, low_M, high_M, rank_M, times_R,
    room, window, N, C, BN: tl.constexpr, THRESHOLDS: tl.constexpr, SELF: tl.constexpr,
):  # fmt: skip
    """Write the members of a tile of positions to their slots, in all clusters of the head.

    Args:
        count [X, C, T]: the number of members of each tile.
        last [X, C, T]: the sums of `count` up to and with each tile, in int64: where every position
            joins every cluster, they may exceed int32.
        window: not above N.
        SELF: False: a member that reads others does not read itself.

    Writes:
        row_M: the members' rows.
        start_M, stop_M, low_M, high_M: their ranges, see `static_selection.Ranges`.
        rank_M: how many members with the same row are in lists before.
        times_R: how many members each row has. Members without room do not count.
    """
    group = tl.program_id(0)
    tile = tl.program_id(1)
    tiles = tl.num_programs(1)
    n = tile * BN + tl.arange(0, BN)
    inside = n < N
    row_n = group * N + n
    highest_n = tl.load(highest + row_n, inside, -1)
    times_n = tl.zeros([BN], tl.int32)
    words = tl.cdiv(C, CLUSTERS)
    for word in range(0, words):
        joins_nc = memberships(bits, highest_n, group, n, inside, word, words, N, C, THRESHOLDS)
        c = word * CLUSTERS + tl.arange(0, CLUSTERS)
        first_tile_c = (group.to(tl.int64) * C + c) * tiles
        before_c = members_before(count, last, first_tile_c + tile, c < C, room)
        m = before_c[None, :] + tl.cumsum(joins_nc, 0) - joins_nc
        fits = (joins_nc > 0) & (m < room)
        fits_nc = fits.to(tl.int32)
        rank_nc = times_n[:, None] + tl.cumsum(fits_nc, 1) - fits_nc
        times_n += tl.sum(fits_nc, 1)

        # The ranges, as `static_selection.ranges_around` makes them.
        first_1c = members_before(count, last, first_tile_c, c < C, room)[None, :]
        end_c = tl.minimum(tl.load(last + first_tile_c + tiles - 1, c < C, 0), room)
        end_1c = end_c.to(tl.int32)[None, :]
        start_nc = tl.maximum(first_1c, m + 1 - window)
        stop_nc = m + 1
        low_nc = m
        if not SELF:
            reads_only_self = m == start_nc
            stop_nc = tl.where(reads_only_self, m + 1, m)
            low_nc = tl.where(reads_only_self, m, m + 1)
        tl.store(row_M + m, tl.broadcast_to(row_n[:, None], m.shape), fits)
        tl.store(start_M + m, start_nc, fits)
        tl.store(stop_M + m, stop_nc, fits)
        tl.store(low_M + m, low_nc, fits)
        tl.store(high_M + m, tl.minimum(end_1c, m + window), fits)
        tl.store(rank_M + m, rank_nc, fits)
    tl.store(times_R + row_n, times_n, inside)


@triton.jit
def order_kernel(
    row_M, start_M, stop_M, low_M, high_M, rank_M, first_R1, total, member_M, filled_1, lost_1,
    room, BM: tl.constexpr,
):  # fmt: skip
    """Write the members sorted by row, and fill empty slots.

    Args:
        first_R1: where the members of each row begin in `member_M`.
        total [1]: the number of members, those without room included, int64.

    Writes:
        member_M: first_R1[row] + rank of each member: its number. Empty slots: their own number.
        row_M, start_M, stop_M, low_M, high_M: in empty slots row 0, and `room`: empty ranges.
        filled_1, lost_1: how many slots are filled, and how many members have no room.
    """
    block = tl.program_id(0)
    members = tl.load(total)
    filled = tl.minimum(members, room).to(tl.int32)
    if block == 0:
        tl.store(filled_1, filled)
        tl.store(lost_1, members - filled)
    m = block * BM + tl.arange(0, BM)
    is_filled = m < filled
    is_empty = (m >= filled) & (m < room)
    row_m = tl.load(row_M + m, is_filled, 0)
    slot_m = tl.load(first_R1 + row_m, is_filled, 0) + tl.load(rank_M + m, is_filled, 0)
    tl.store(member_M + slot_m, m, is_filled)
    tl.store(member_M + m, m, is_empty)
    tl.store(row_M + m, tl.zeros([BM], tl.int32), is_empty)
    room_m = tl.full([BM], 0, tl.int32) + room
    tl.store(start_M + m, room_m, is_empty)
    tl.store(stop_M + m, room_m, is_empty)
    tl.store(low_M + m, room_m, is_empty)
    tl.store(high_M + m, room_m, is_empty)


@triton.jit
def moment_kernel(moment, total, N, L, T, TILE: tl.constexpr, BT: tl.constexpr):
    """Write the sums of a list's scores and of their squares, total [2, L], in float64.

    A tile of k scores with the sum s and the squared distances q from its mean s / k (`moment`, see
    `write_moments`) has the sum of squares q + s^2 / k.
    """
    of_list = tl.program_id(0).to(tl.int64)
    sum_t = tl.zeros([BT], tl.float64)
    square_t = tl.zeros([BT], tl.float64)
    for begin in range(0, T, BT):
        t = begin + tl.arange(0, BT)
        part_t = tl.load(moment + of_list * T + t, t < T, 0.0).to(tl.float64)
        distance_t = tl.load(moment + (L + of_list) * T + t, t < T, 0.0).to(tl.float64)
        size_t = tl.maximum(tl.minimum(N - t * TILE, TILE), 1)
        sum_t += part_t
        square_t += distance_t + part_t * part_t / size_t.to(tl.float64)
    tl.store(total + of_list, tl.sum(sum_t, 0))
    tl.store(total + L + of_list, tl.sum(square_t, 0))


@triton.jit
def sum_kernel(x, row_M, bound_L1, total, D: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr):
    """Write CHUNK numbers of the sum of the vectors of a list's members, total [L, D], in float64.

    A program is (list, chunk). It adds members in a fixed order, so that equal inputs give equal
    bits.
    """
    of_list = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    first = tl.load(bound_L1 + of_list)
    end = tl.load(bound_L1 + of_list + 1)
    sum_d = tl.zeros([CHUNK], tl.float64)
    for begin in range(first, end, BM):
        m = begin + tl.arange(0, BM)
        row_m = tl.load(row_M + m, m < end, 0).to(tl.int64)
        real_md = (m < end)[:, None] & (d < D)[None, :]
        x_md = tl.load(x + row_m[:, None] * D + d[None, :], real_md, 0.0)
        sum_d += tl.sum(x_md, 0).to(tl.float64)
    tl.store(total + of_list * D + d, sum_d, d < D)
