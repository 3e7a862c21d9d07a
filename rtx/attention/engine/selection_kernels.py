"""Kernels that select the members of clusters on a GPU. `triton_selection.py` starts them and says what they return.

Scores exist in registers alone. What a position joins leaves the first kernel as bits, so that the
kernels that count and write members read one decision and cannot disagree.

Shapes: X sequences and heads (x = b * H + h), C clusters of a head, N positions, D head size,
L = X * C lists, T tiles of positions, M room for members. Rows are x * N + n.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
import triton.language as tl

CLUSTERS = tl.constexpr(32)
"""Clusters that a program works on at once: their decisions are the bits of one number."""


@triton.jit
def vectors(x, row_r, real_r, begin, D: tl.constexpr, CHUNK: tl.constexpr):
    """Return the numbers of some rows from `begin` on; 0 behind the last."""
    d = begin + tl.arange(0, CHUNK)
    return tl.load(x + row_r[:, None] * D + d[None, :], real_r[:, None] & (d < D)[None, :], 0.0)


@triton.jit
def scores_of(x_nd, x, row_n, inside_n, centroid, c, C, D: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the scores of a tile of positions with some clusters of a head; 0 behind the last.

    x_nd has the first CHUNK numbers of each vector; the others are read here.
    """
    centroid_cd = vectors(centroid, c, c < C, 0, D, CHUNK)
    score_nc = tl.dot(x_nd, tl.trans(centroid_cd), input_precision=PRECISION)
    for begin in range(CHUNK, D, CHUNK):
        more_nd = vectors(x, row_n, inside_n, begin, D, CHUNK)
        centroid_cd = vectors(centroid, c, c < C, begin, D, CHUNK)
        score_nc = tl.dot(more_nd, tl.trans(centroid_cd), score_nc, input_precision=PRECISION)
    return score_nc


@triton.jit
def sound_values(value, c, C):
    """Return the values with -inf for NaN and for clusters that do not exist, and who has a NaN."""
    real = (c < C)[None, :]
    broken = real & (value != value)
    value = tl.where(real & (value == value), value, float("-inf"))
    return value, tl.max(broken.to(tl.int32), 1)


@triton.jit
def first_that_reaches(reach_nc, c, best_n):
    """Return the first cluster of a tile whose value and margin reach the best; a large one: none."""
    reaches = reach_nc >= best_n[:, None]
    return tl.min(tl.where(reaches, tl.broadcast_to(c[None, :], reach_nc.shape), 1 << 30), 1)


@triton.jit
def follow(value_nc, margin_c, c, best_n, first_n, reach_n, rival_n, unsure_n):
    """Let the best value so far, and the first cluster tied with it, take in a tile of clusters.

    reach is value plus margin of that first cluster, rival the highest such sum of the others. A
    rival that reaches a new best, which the first does not, may not be the first to do so: `unsure`.
    """
    reach_nc = value_nc + margin_c[None, :]
    best_n = tl.maximum(best_n, tl.max(value_nc, 1))
    stays_n = reach_n >= best_n
    unsure_n = unsure_n | ((~stays_n) & (rival_n >= best_n)).to(tl.int32)
    first_n = tl.where(stays_n, first_n, first_that_reaches(reach_nc, c, best_n))
    is_first = c[None, :] == first_n[:, None]
    here_n = tl.max(tl.where(is_first, reach_nc, float("-inf")), 1)
    reach_n = tl.where(stays_n, reach_n, here_n)
    rival_n = tl.maximum(rival_n, tl.max(tl.where(is_first, float("-inf"), reach_nc), 1))
    return best_n, first_n, reach_n, rival_n, unsure_n


@triton.jit
def score_kernel(
    x, centroid, threshold, margin, bits, highest, nearest, moment, N, H, C,
    D: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
    THRESHOLDS: tl.constexpr, NEAREST: tl.constexpr,
):  # fmt: skip
    """Score a tile of positions; write who joins, the highest cluster, and the scores' moments.

    Writes:
        bits [X, ceil(C / 32), N]: bit i of word w: the position joins cluster 32 w + i by its threshold.
        highest [X, N]: the cluster of the highest score less threshold, or of the highest score.
        nearest [X, N]: with thresholds and if NEAREST, the cluster of the highest score.
        moment [2, X, C, T]: with thresholds, sums of a tile's scores, and of their squared distances
            from the tile's mean.
    """
    group = tl.program_id(0)
    tile = tl.program_id(1)
    head = group % H
    tiles = tl.num_programs(1)
    n = tile * BN + tl.arange(0, BN)
    inside = n < N
    row = group.to(tl.int64) * N + n
    x_nd = vectors(x, row, inside, 0, D, CHUNK)
    centroid += head * C * D
    margin += head * C
    threshold += head * C
    words = tl.cdiv(C, CLUSTERS)

    lowest_n = tl.full([BN], float("-inf"), tl.float32)
    nothing_n = tl.zeros([BN], tl.int32)
    best_n, first_n, reach_n, rival_n, unsure_n = lowest_n, nothing_n, lowest_n, lowest_n, nothing_n
    broken_n = nothing_n
    top_n, near_n, near_reach_n, near_rival_n = lowest_n, nothing_n, lowest_n, lowest_n
    near_broken_n = nothing_n
    for word in range(0, words):
        c = word * CLUSTERS + tl.arange(0, CLUSTERS)
        score_nc = scores_of(x_nd, x, row, inside, centroid, c, C, D, CHUNK, PRECISION)
        margin_c = tl.load(margin + c, c < C, 0.0)
        value_nc = score_nc
        if THRESHOLDS:
            value_nc = score_nc - tl.load(threshold + c, c < C, 0.0)[None, :]
            joins = (value_nc >= -margin_c[None, :]) & (c < C)[None, :]
            bit_nc = joins.to(tl.int32) << (c % CLUSTERS)[None, :]
            tl.store(bits + (group.to(tl.int64) * words + word) * N + n, tl.sum(bit_nc, 1), inside)
            write_moments(score_nc, inside, N - tile * BN, moment, group, c, C, tile, tiles, BN)
        value_nc, found_n = sound_values(value_nc, c, C)
        broken_n = broken_n | found_n
        best_n, first_n, reach_n, rival_n, unsure_n = follow(
            value_nc, margin_c, c, best_n, first_n, reach_n, rival_n, unsure_n
        )
        if NEAREST:
            score_nc, near_found_n = sound_values(score_nc, c, C)
            near_broken_n = near_broken_n | near_found_n
            top_n, near_n, near_reach_n, near_rival_n, unsure_n = follow(
                score_nc, margin_c, c, top_n, near_n, near_reach_n, near_rival_n, unsure_n
            )

    # Three clusters tied across tiles are rare: the scores are computed once more for them alone.
    if tl.max(unsure_n, 0) > 0:
        first_n = tl.full([BN], 1 << 30, tl.int32)
        near_n = tl.full([BN], 1 << 30, tl.int32)
        for word in range(0, words):
            c = word * CLUSTERS + tl.arange(0, CLUSTERS)
            score_nc = scores_of(x_nd, x, row, inside, centroid, c, C, D, CHUNK, PRECISION)
            margin_c = tl.load(margin + c, c < C, 0.0)
            value_nc = score_nc
            if THRESHOLDS:
                value_nc = score_nc - tl.load(threshold + c, c < C, 0.0)[None, :]
            value_nc, found_n = sound_values(value_nc, c, C)
            reach_nc = value_nc + margin_c[None, :]
            first_n = tl.minimum(first_n, first_that_reaches(reach_nc, c, best_n))
            if NEAREST:
                score_nc, near_found_n = sound_values(score_nc, c, C)
                reach_nc = score_nc + margin_c[None, :]
                near_n = tl.minimum(near_n, first_that_reaches(reach_nc, c, top_n))
    tl.store(highest + row, tl.where(broken_n > 0, 0, first_n), inside)
    if NEAREST:
        tl.store(nearest + row, tl.where(near_broken_n > 0, 0, near_n), inside)


@triton.jit
def write_moments(
    score_nc, inside, left, moment, group, c, C, tile, tiles, BN: tl.constexpr
):  # fmt: skip
    """Write the sums of a tile's scores, and of their squared distances from the tile's mean."""
    count = tl.minimum(left, BN).to(tl.float32)
    sum_c = tl.sum(tl.where(inside[:, None], score_nc, 0.0), 0)
    distance_nc = tl.where(inside[:, None], score_nc - (sum_c / count)[None, :], 0.0)
    to = (group.to(tl.int64) * C + c) * tiles + tile
    tl.store(moment + to, sum_c, c < C)
    behind = tl.num_programs(0).to(tl.int64) * C * tiles
    tl.store(moment + behind + to, tl.sum(distance_nc * distance_nc, 0), c < C)


@triton.jit
def memberships(bits, highest_n, group, n, inside, word, words, N, C, THRESHOLDS: tl.constexpr):
    """Return 1 where a position is a member of a cluster: by its threshold, or the highest."""
    c = word * CLUSTERS + tl.arange(0, CLUSTERS)
    joins = (highest_n[:, None] == c[None, :]) & inside[:, None]
    if THRESHOLDS:
        word_n = tl.load(bits + (group.to(tl.int64) * words + word) * N + n, inside, 0)
        joins = joins | (((word_n[:, None] >> (c % CLUSTERS)[None, :]) & 1) > 0)
    return joins.to(tl.int32)


@triton.jit
def tally_kernel(bits, highest, count, N, C, BN: tl.constexpr, THRESHOLDS: tl.constexpr):
    """Write how many positions of each tile are members of each cluster: count [X, C, T]."""
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
        to = (group.to(tl.int64) * C + c) * tiles + tile
        tl.store(count + to, tl.sum(joins_nc, 0), c < C)


@triton.jit
def before(count, last, tile, real, room):
    """Return how many members come before some tiles' own, `room` at the most."""
    members = tl.load(last + tile, real, 0) - tl.load(count + tile, real, 0)
    return tl.minimum(members, room).to(tl.int32)


@triton.jit
def write_kernel(
    bits, highest, count, last, row_M, start_M, stop_M, low_M, high_M, rank_M, times_R,
    room, window, N, C, BN: tl.constexpr, THRESHOLDS: tl.constexpr, SELF: tl.constexpr,
):  # fmt: skip
    """Write the members of a tile of positions, each with its range, readers and rank in its row.

    Args:
        count [X, C, T]: the members of each tile, and `last` their sums up to it, int64: with low
            thresholds every position joins every cluster.
        rank_M: how many members of the same row are in lists before.
        times_R: how many members each row has; of members for which there is room.
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
        of_list = (group.to(tl.int64) * C + c) * tiles
        m = before(count, last, of_list + tile, c < C, room)[None, :] + tl.cumsum(joins_nc, 0) - joins_nc
        fits = (joins_nc > 0) & (m < room)
        fits_nc = fits.to(tl.int32)
        rank = times_n[:, None] + tl.cumsum(fits_nc, 1) - fits_nc
        times_n += tl.sum(fits_nc, 1)

        first = before(count, last, of_list, c < C, room)[None, :]
        behind = tl.minimum(tl.load(last + of_list + tiles - 1, c < C, 0), room).to(tl.int32)[None, :]
        start = tl.maximum(first, m + 1 - window)
        stop = m + 1
        low = m
        if not SELF:  # a member reads itself where it reads nothing else
            alone = m == start
            stop = tl.where(alone, m + 1, m)
            low = tl.where(alone, m, m + 1)
        tl.store(row_M + m, tl.broadcast_to(row_n[:, None], m.shape), fits)
        tl.store(start_M + m, start, fits)
        tl.store(stop_M + m, stop, fits)
        tl.store(low_M + m, low, fits)
        tl.store(high_M + m, tl.minimum(behind, m + window), fits)
        tl.store(rank_M + m, rank, fits)
    tl.store(times_R + row_n, times_n, inside)


@triton.jit
def order_kernel(
    row_M, start_M, stop_M, low_M, high_M, rank_M, first_R1, total, member_M, real_1, lost_1,
    room, BM: tl.constexpr,
):  # fmt: skip
    """Write the members of rows, fill the room behind the last member, and write how many are real and lost."""
    block = tl.program_id(0)
    members = tl.load(total)
    count = tl.minimum(members, room).to(tl.int32)
    if block == 0:
        tl.store(real_1, count)
        tl.store(lost_1, members - count)
    m = block * BM + tl.arange(0, BM)
    is_real = m < count
    is_behind = (m >= count) & (m < room)
    row_m = tl.load(row_M + m, is_real, 0)
    slot_m = tl.load(first_R1 + row_m, is_real, 0) + tl.load(rank_M + m, is_real, 0)
    tl.store(member_M + slot_m, m, is_real)
    tl.store(member_M + m, m, is_behind)
    tl.store(row_M + m, tl.zeros([BM], tl.int32), is_behind)
    room_m = tl.full([BM], 0, tl.int32) + room
    tl.store(start_M + m, room_m, is_behind)
    tl.store(stop_M + m, room_m, is_behind)
    tl.store(low_M + m, room_m, is_behind)
    tl.store(high_M + m, room_m, is_behind)


@triton.jit
def moment_kernel(moment, total, N, L, T, TILE: tl.constexpr, BT: tl.constexpr):
    """Write the sum of a list's scores and of their squares, total [2, L], by the moments of its tiles.

    A tile's squares are of distances from its mean: of scores that hardly differ float32 has the deviation.
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
def compare(score_n, last, floor, bar):
    """Return which scores are above the last one taken, NaN being the best of all, and which are tied with it."""
    is_broken = score_n != score_n
    last_n = tl.broadcast_to(last, score_n.shape)
    better = (last_n == last_n) & ((score_n > bar) | is_broken)
    equal = ((score_n >= floor) & (score_n <= bar)) | ((last_n != last_n) & is_broken)
    return better, equal


@triton.jit
def tied_within(last, left_out, margin):
    """Return the margin if what is left out is tied with the last one taken, else 0."""
    # Scores that are not finite are never tied.
    finite = (left_out > float("-inf")) & (last < float("inf"))
    margin = tl.where(finite, margin, 0.0)
    return tl.where(left_out >= last - margin, margin, 0.0)


@triton.jit
def read_scores(score, n, N, NAN_IS_WORST: tl.constexpr):
    """Return some scores of a row."""
    score_n = tl.load(score + n, n < N, float("-inf"))
    if NAN_IS_WORST:
        score_n = tl.where(score_n == score_n, score_n, float("-inf"))
    return score_n


@triton.jit
def write_earliest(score, taken, last, margin, left, N, BN: tl.constexpr, NAN_IS_WORST: tl.constexpr):
    """Write the places of a row's scores that are better than the last one taken, and of the `left` earliest tied with
    it, ascending.
    """
    floor = last - margin
    bar = last + margin
    done = 0
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        score_n = read_scores(score, n, N, NAN_IS_WORST)
        better, equal = compare(score_n, last, floor, bar)
        equal_n = ((n < N) & equal).to(tl.int32)
        takes = ((n < N) & better) | ((equal_n > 0) & (tl.cumsum(equal_n, 0) <= left))
        takes_n = takes.to(tl.int32)
        tl.store(taken + done + tl.cumsum(takes_n, 0) - 1, n, takes)
        left -= tl.sum(equal_n, 0)
        done += tl.sum(takes_n, 0)


@triton.jit
def earliest_kernel(score, value, worst, margin, taken, N, K, BN: tl.constexpr):
    """Write the places of the K - 1 best of a row of N scores, ascending: all that are better than the last one taken,
    and the earliest of those tied with it. Of K best values the two worst are what is left out, and that last one.
    """
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(worst + 2 * row + 1)
    near = tied_within(last, tl.load(worst + 2 * row), tl.load(margin + row))
    left = K - 1
    for begin in range(0, K, BN):
        k = begin + tl.arange(0, BN)
        value_k = tl.load(value + row * K + k, k < K, 0.0)
        better, _ = compare(value_k, last, last - near, last + near)
        left -= tl.sum(((k < K) & better).to(tl.int32), 0)
    write_earliest(score + row * N, taken + row * (K - 1), last, near, left, N, BN, False)


@triton.jit
def order_of(score):
    """Return numbers that compare as scores do, which are not NaN."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def rank_of(order_s, wanted, low, high):
    """Return the largest number from low to high - 1 that `wanted` of the orders reach; low if none is."""
    while low + 1 < high:
        middle = (low + high) >> 1
        reached = tl.sum((order_s >= middle).to(tl.int32), 0)
        low = tl.where(reached >= wanted, middle, low)
        high = tl.where(reached >= wanted, high, middle)
    return low


@triton.jit
def candidate_kernel(
    score, at, value, floor, reached, N, rank, ROOM: tl.constexpr, SAMPLE: tl.constexpr, BN: tl.constexpr
):
    """Write which scores of a row reach the `rank`-th best of a sample of it, as many as there is room for.

    Writes:
        at, value [X, ROOM]: places, ascending, and scores.
        floor [X]: the score that they reach.
        reached [2, X]: how many reach it, and how many exceed it.
    """
    row = tl.program_id(0).to(tl.int64)
    score += row * N
    step = tl.cdiv(N, SAMPLE)
    sample_s = read_scores(score, tl.arange(0, SAMPLE) * step, N, True)
    order_s = order_of(sample_s).to(tl.int64)
    order = rank_of(order_s, rank, tl.full([], -(1 << 31), tl.int64), tl.full([], 1 << 31, tl.int64))
    least = tl.min(tl.where(order_s >= order, sample_s, float("inf")), 0)
    done = 0
    more = 0
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        score_n = read_scores(score, n, N, True)
        reaches_n = ((score_n >= least) & (n < N)).to(tl.int32)
        slot_n = done + tl.cumsum(reaches_n, 0) - 1
        fits = (reaches_n > 0) & (slot_n < ROOM)
        tl.store(at + row * ROOM + slot_n, n, fits)
        tl.store(value + row * ROOM + slot_n, score_n, fits)
        done += tl.sum(reaches_n, 0)
        more += tl.sum(((score_n > least) & (n < N)).to(tl.int32), 0)
    tl.store(floor + row, least)
    tl.store(reached + row, done)
    tl.store(reached + tl.num_programs(0) + row, more)


@triton.jit
def count_of(score, least, N, BN: tl.constexpr):
    """Return how many scores of a row, in their order, reach a number."""
    count = 0
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        order_n = order_of(read_scores(score, n, N, True)).to(tl.int64)
        count += tl.sum(((order_n >= least) & (n < N)).to(tl.int32), 0)
    return count


@triton.jit
def split_at(score, last, N, BN: tl.constexpr):
    """Return how many scores of a row reach one, and the best that does not."""
    reached = 0
    below = float("-inf")
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        score_n = read_scores(score, n, N, True)
        reached += tl.sum(((score_n >= last) & (n < N)).to(tl.int32), 0)
        below = tl.maximum(below, tl.max(tl.where((score_n < last) & (n < N), score_n, float("-inf")), 0))
    return reached, below


@triton.jit
def top_kernel(
    score, at, value, floor, reached, margin, taken, N, W, ROOM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Write the places of the W best of a row, ascending; of those tied with the last one taken the earliest.

    They are among the candidates of `candidate_kernel`, if these are more than W, fit in their room, and
    have all ties. If not, the row is searched itself.
    """
    row = tl.program_id(0).to(tl.int64)
    least = tl.load(floor + row)
    count = tl.load(reached + row)
    k = tl.arange(0, ROOM)
    inside = k < tl.minimum(count, ROOM)
    value_k = tl.load(value + row * ROOM + k, inside, float("-inf"))
    order_k = tl.where(inside, order_of(value_k).to(tl.int64), -(1 << 31))
    lowest = tl.full([], -(1 << 31), tl.int64)
    behind = tl.full([], 1 << 31, tl.int64)
    last = tl.min(tl.where(order_k >= rank_of(order_k, W, lowest, behind), value_k, float("inf")), 0)
    left_out = tl.max(tl.where(inside & (value_k < last), value_k, float("-inf")), 0)
    left_out = tl.where(tl.sum((inside & (value_k >= last)).to(tl.int32), 0) > W, last, left_out)
    near = tied_within(last, left_out, tl.load(margin + row))
    if (count > W) & (count <= ROOM) & (last - near >= least):
        better, equal = compare(value_k, last, last - near, last + near)
        left = W - tl.sum((inside & better).to(tl.int32), 0)
        equal_k = (inside & equal).to(tl.int32)
        takes = (inside & better) | ((equal_k > 0) & (tl.cumsum(equal_k, 0) <= left))
        at_k = tl.load(at + row * ROOM + k, inside, 0)
        tl.store(taken + row * W + tl.cumsum(takes.to(tl.int32), 0) - 1, at_k, takes)
    else:
        more = tl.load(reached + tl.num_programs(0) + row)
        search(score + row * N, tl.load(margin + row), taken + row * W, least, count, more, N, W, BN)


@triton.jit
def search(score, margin, taken, least, count, more, N, W, BN: tl.constexpr):
    """Write what `top_kernel` does, by counting the scores of a row again and again.

    `count` of them reach `least`, and `more` exceed it.
    """
    order = order_of(least).to(tl.int64)
    low = tl.where(count >= W, order, -(1 << 31))
    high = tl.where(count < W, order, tl.where(more < W, order + 1, 1 << 31))
    while low + 1 < high:
        middle = (low + high) >> 1
        enough = count_of(score, middle, N, BN) >= W
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    bits = low.to(tl.int32)
    last = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    reached, below = split_at(score, last, N, BN)
    near = tied_within(last, tl.where(reached > W, last, below), margin)
    better = 0
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        score_n = read_scores(score, n, N, True)
        better += tl.sum(((score_n > last + near) & (n < N)).to(tl.int32), 0)
    write_earliest(score, taken, last, near, W - better, N, BN, True)


@triton.jit
def sum_kernel(x, row_M, bound_L1, total, D: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr):
    """Write the sum of the vectors of a list's members, CHUNK numbers of it; always in the same order."""
    of_list = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    first = tl.load(bound_L1 + of_list)
    behind = tl.load(bound_L1 + of_list + 1)
    sum_d = tl.zeros([CHUNK], tl.float64)
    for begin in range(first, behind, BM):
        m = begin + tl.arange(0, BM)
        row_m = tl.load(row_M + m, m < behind, 0).to(tl.int64)
        real = (m < behind)[:, None] & (d < D)[None, :]
        x_md = tl.load(x + row_m[:, None] * D + d[None, :], real, 0.0)
        sum_d += tl.sum(x_md, 0).to(tl.float64)
    tl.store(total + of_list * D + d, sum_d, d < D)


class Variant(NamedTuple):
    """A kernel as it is compiled for one use."""

    kernel: Any
    signature: dict[str, str]
    """The type of every argument that is not constant."""
    constants: dict[str, Any]
    options: dict[str, int]
    """Warps and stages."""


def variants() -> Iterator[Variant]:
    """Yield the kernels as they are compiled for head sizes 64 to 256, for compilation ahead of time."""
    for size in (64, 128, 256):
        for precision, chunk in (("tf32x3", 64), ("ieee", 32)):
            sizes = {"D": size, "CHUNK": chunk, "BN": 64, "PRECISION": precision}
            for thresholds, nearest in ((True, False), (True, True), (False, False)):
                constants = {**sizes, "THRESHOLDS": thresholds, "NEAREST": nearest}
                yield variant(score_kernel, constants, 4)
    for thresholds in (True, False):
        yield variant(tally_kernel, {"BN": 32, "THRESHOLDS": thresholds}, 4)
        for attend_self in (True, False):
            constants = {"BN": 32, "THRESHOLDS": thresholds, "SELF": attend_self}
            yield variant(write_kernel, constants, 4)
    yield variant(order_kernel, {"BM": 256}, 4)
    yield variant(moment_kernel, {"TILE": 64, "BT": 128}, 4)
    yield variant(earliest_kernel, {"BN": 1024}, 4)
    for room in (1024, 4096):
        yield variant(candidate_kernel, {"ROOM": room, "SAMPLE": 4096, "BN": 2048}, 8)
        yield variant(top_kernel, {"ROOM": room, "BN": 2048}, 8)
    for size in (64, 128):
        yield variant(sum_kernel, {"D": size, "CHUNK": size, "BM": 32}, 4)


TYPES = {
    "*fp32": ("x", "centroid", "threshold", "margin", "moment", "score", "value", "worst", "floor"),
    "i32": ("N", "H", "C", "K", "L", "T", "W", "rank", "room", "window"),
}
"""The types of arguments by their names; others are *i32, but for those of some kernels."""
WIDE = {
    "write_kernel": {"last": "*i64"},
    "order_kernel": {"total": "*i64", "lost_1": "*i64"},
    "moment_kernel": {"total": "*fp64"},
    "sum_kernel": {"total": "*fp64"},
}


def variant(kernel: Any, constants: dict[str, Any], warps: int) -> Variant:
    """Return a variant of a kernel."""
    signature = dict.fromkeys(kernel.arg_names, "*i32")
    for kind, names in TYPES.items():
        signature |= {name: kind for name in kernel.arg_names if name in names}
    signature |= WIDE.get(kernel.__name__, {})
    signature = {name: kind for name, kind in signature.items() if name not in constants}
    return Variant(kernel, signature, constants, {"num_warps": warps, "num_stages": 1})
