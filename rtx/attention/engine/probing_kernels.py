"""Triton kernels that let queries probe clusters of keys; `triton_probing.py` launches them.

`rtx.attention.probed` has the method. The kernels run in this order,
score_kernel and probe_kernel for some positions at a time:

    cluster_kernel  finds the cluster of each key
    tally_kernel    turns this around: which keys of each tile are in each cluster, and how many
    (torch.cumsum   sums these counts, list after list: where each tile's keys end)
    key_kernel      writes the keys, list after list, and the members of each row
    score_kernel    scores queries against all clusters
    probe_kernel    chooses the clusters of each query by these scores
    tally_kernel    turns this around: which queries of each tile probe each cluster, and how many
    (torch.cumsum   sums these counts)
    write_kernel    writes the queries of each list, with the ranges of keys that they read
    place_kernel    sorts them by row, and fills the empty slots
    reader_kernel   writes by which queries each key is read

A *tile* is 32 neighbouring positions, 32 t to 32 t + 31. What is true of positions of a tile is one
*word*: bit j of it stands for position 32 t + j. From the word of a tile and a cluster, and the
running sum of the words' ones, follows how many members of a list come before a position, without a
search.
Example with tiles of 4 positions (bit 0 is the rightmost one): cluster c holds the positions 1, 3
and 6, and the lists before it have 10 members.

    tile               0       1
    word            1010    0100
    last              12      13      members up to and with this tile, those of lists before too
    before 3       12 - ones(1010 >> 3) = 11: ten of the lists before, and position 1

The lists of all heads follow one another (packed.py, lists.py): first a list of early positions for
each head, then the lists of clusters. E early positions of X heads are the first X * E members as
keys and as queries. "Members of clusters' lists" are numbered without these.

Shapes: H heads, X heads of all sequences, also called groups (group % H is the head), C clusters of
a head, N positions, S positions at a time, D head size, T tiles, E early positions, L = X * C lists
of clusters, L1 = L + 1, R = X * N rows (row = group * N + n), R1 = R + 1, M = X * E + R key
members, P = X * E + room query members. Lower-case letters are the axes of a tensor in registers:
n positions, c clusters, d numbers of a vector, t tiles, j positions of a tile, w words of `bits`,
p query members. `n * 0 + x` is the number x as a tensor of axis n, which a store needs.

Parameters that several kernels have:

    centroid [H, C, D]
    key_word [X, T, C], key_last [X, C, T]      words of the keys, and running sums of their ones
    key_bound [L1]                              the first key of each list, and the end of the last
    query_word [X, T, C], query_last [X, C, T]  the same of queries that probe; the sums may be
                                                int64, as there may be more members than room
    query_bound [L1]
    bits [X, ceil(C / 32), N]                   bit i of word w: whether a query takes cluster
                                                32 w + i
    target                                      how many keys a query probes for, and the most that
                                                it reads of a cluster
    early                                       E
    SELF                                        whether a query may read the key of its position
"""

# pyright: reportGeneralTypeIssues=false
# Triton compiles what pyright takes for Python: its functions have no types for a checker.

import triton
import triton.language as tl

from rtx.attention.engine.selection_kernels import NO_CLUSTER, load_vectors, scores_of

TILE = tl.constexpr(32)
"""Positions of a tile: a bit of an int32 for each."""
MOST = tl.constexpr(3.4028234663852886e38)
"""The largest number of float32."""
ONE = tl.constexpr(1 << 20)
"""The weight of a cluster in `last_taken`, above the number of all keys of a head."""


@triton.jit
def ones(word):
    """Return how many bits of words are set. Compilers make one instruction of it."""
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def members_before(last, word, j, INCLUDED: tl.constexpr):
    """Return how many members come before position j of a tile, see the module's example.

    Args:
        last, word: of the list and the tile.
        INCLUDED: count that position, too.
    """
    behind = word.to(tl.uint32, bitcast=True) >> j.to(tl.uint32)
    if INCLUDED:
        behind = behind >> 1
    return last - ones(behind)


@triton.jit
def first_that_reaches(value_nc, c, least_n):
    """Return the first cluster whose value is at least least_n; NO_CLUSTER where there is none."""
    reaches_nc = value_nc >= least_n[:, None]
    cluster_nc = tl.broadcast_to(c[None, :], value_nc.shape)
    return tl.min(tl.where(reaches_nc, cluster_nc, NO_CLUSTER), 1)


@triton.jit
def finite(score):
    """Return scores whose differences are no NaN: +-MOST for infinite ones, and -MOST for NaN."""
    score = tl.where(score != score, -MOST, score)
    return tl.minimum(tl.maximum(score, -MOST), MOST)


@triton.jit
def margin_of(norm_n, unit):
    """Return how far apart equal scores may come out by rounding; 0 where that is not finite."""
    margin_n = norm_n * unit
    return tl.where(margin_n <= MOST, margin_n, 0.0)


@triton.jit
def norm_of(x_nd, x, row_n, inside_n, D: tl.constexpr, CHUNK: tl.constexpr):
    """Return the norms of vectors. Args: see `selection_kernels.scores_of`."""
    square_n = tl.sum(x_nd * x_nd, 1)
    for begin in range(CHUNK, D, CHUNK):
        more_nd = load_vectors(x, row_n, inside_n, begin, D, CHUNK)
        square_n += tl.sum(more_nd * more_nd, 1)
    return tl.sqrt(square_n)


@triton.jit
def nearness(score_nc, half_square, c, C):
    """Return how near keys are to clusters: x . c - |c|^2 / 2, or -inf beyond the last cluster."""
    half_square_c = tl.load(half_square + c, c < C, 0.0)
    score_nc = finite(score_nc - half_square_c[None, :])
    return tl.where((c < C)[None, :], score_nc, float("-inf"))


@triton.jit
def nearest_cluster(
    x_nd, x, row_n, inside_n, centroid, half_square, C,
    D: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the nearest cluster of keys, how near it is, and how near the second nearest one is.

    Args: see `scores_of` and `nearness`.
    """
    best_n = tl.full([BN], float("-inf"), tl.float32)
    second_n = tl.full([BN], float("-inf"), tl.float32)
    nearest_n = tl.zeros([BN], tl.int32)
    for begin in range(0, C, BC):
        c = begin + tl.arange(0, BC)
        score_nc = scores_of(x_nd, x, row_n, inside_n, centroid, c, C, D, CHUNK, PRECISION)
        near_nc = nearness(score_nc, half_square, c, C)
        here_n = tl.max(near_nc, 1)
        at_n = first_that_reaches(near_nc, c, here_n)
        others_nc = tl.where(c[None, :] == at_n[:, None], float("-inf"), near_nc)
        second_n = tl.maximum(second_n, tl.max(others_nc, 1))
        # Of the best before and the best here, the lesser one.
        second_n = tl.maximum(second_n, tl.minimum(best_n, here_n))
        nearest_n = tl.where(here_n > best_n, at_n, nearest_n)
        best_n = tl.maximum(best_n, here_n)
    return nearest_n, best_n, second_n


@triton.jit
def cluster_kernel(
    x, centroid, half_square, radius, unit, cluster, N, H, C,
    D: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the cluster of BN keys, cluster [X, N]: the first within the margin of the nearest.

    A program is (group, positions). It looks at BC clusters at a time.

    Args:
        half_square [H, C]: |c|^2 / 2 of each centroid.
        radius [H]: r, the largest norm of a centroid.
        unit [H]: the margin of a key is (|x| + r) * unit.
    """
    group = tl.program_id(0)
    head = group % H
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = n < N
    row = group.to(tl.int64) * N + n
    centroid += head * C * D
    half_square += head * C
    x_nd = load_vectors(x, row, inside, 0, D, CHUNK)
    norm_n = norm_of(x_nd, x, row, inside, D, CHUNK) + tl.load(radius + head)
    margin_n = margin_of(norm_n, tl.load(unit + head))

    first_n, best_n, second_n = nearest_cluster(
        x_nd, x, row, inside, centroid, half_square, C, D, CHUNK, BN, BC, PRECISION
    )  # fmt: skip

    # Rare: another cluster is within the margin. Then look for the first one that is.
    least_n = best_n - margin_n
    if tl.max((second_n >= least_n).to(tl.int32), 0) > 0:
        first_n = tl.full([BN], NO_CLUSTER, tl.int32)
        for begin in range(0, C, BC):
            c = begin + tl.arange(0, BC)
            score_nc = scores_of(x_nd, x, row, inside, centroid, c, C, D, CHUNK, PRECISION)
            near_nc = nearness(score_nc, half_square, c, C)
            first_n = tl.minimum(first_n, first_that_reaches(near_nc, c, least_n))
    tl.store(cluster + row, first_n, inside)


@triton.jit
def tally_kernel(source, word, count, N, C, T, BT: tl.constexpr, KEYS: tl.constexpr):
    """Write the words of BT tiles in 32 clusters, word [X, T, C], and their ones, count [X, C, T].

    A program is (group, block of tiles, 32 clusters).

    Args:
        source: with KEYS the cluster of each key [X, N], else `bits`.
    """
    group = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    block = tl.program_id(2)
    c = block * 32 + tl.arange(0, 32)
    j = tl.arange(0, TILE)
    n_tj = t[:, None] * TILE + j[None, :]
    if KEYS:
        cluster_tj = tl.load(source + group * N + n_tj, n_tj < N, -1)
        is_member_tjc = cluster_tj[:, :, None] == c[None, None, :]
    else:
        source += (group * tl.num_programs(2) + block) * N
        bits_tj = tl.load(source + n_tj, n_tj < N, 0)
        is_member_tjc = ((bits_tj[:, :, None] >> (c % 32)[None, None, :]) & 1) > 0
    member_tjc = is_member_tjc.to(tl.int32)
    word_tc = tl.sum(member_tjc << j[None, :, None], 1)
    count_tc = tl.sum(member_tjc, 1)
    real_tc = (t < T)[:, None] & (c < C)[None, :]
    tl.store(word + (group * T + t[:, None]) * C + c[None, :], word_tc, real_tc)
    tl.store(count + (group * C + c[None, :]) * T + t[:, None], count_tc, real_tc)


@triton.jit
def load_tally(last, word, group, c, tile, C, T, mask):
    """Return the running sums and the words of clusters at a tile; 0 where not in the mask.

    Args:
        c, tile: of one axis, or one of them a number.
    """
    group = group.to(tl.int64)
    last_here = tl.load(last + (group * C + c) * T + tile, mask, 0)
    word_here = tl.load(word + (group * T + tile) * C + c, mask, 0)
    return last_here, word_here


@triton.jit
def key_kernel(
    cluster, key_last, key_word, row_M, first_R1, member_M, N, C, T, early, BN: tl.constexpr
):  # fmt: skip
    """Write the key members of BN positions: one each, and early positions one more.

    A program is (group, positions).

    Writes:
        row_M: the row of each key member.
        first_R1, member_M: the key members of each row, see `lists.RowMembers`.
    """
    group = tl.program_id(0)
    groups = tl.num_programs(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = n < N
    row = group * N + n
    cluster_n = tl.load(cluster + row, inside, 0)
    last, word = load_tally(key_last, key_word, group, cluster_n, n // TILE, C, T, inside)
    member = groups * early + members_before(last, word, n % TILE, False)
    early_member = group * early + n
    is_early = inside & (n < early)
    tl.store(row_M + member, row, inside)
    tl.store(row_M + early_member, row, is_early)

    # Before a row come one member of each row before it, and one more of each early one.
    first = row + group * early + tl.minimum(n, early)
    tl.store(first_R1 + row, first, inside)
    tl.store(member_M + first, tl.where(is_early, early_member, member), inside)
    tl.store(member_M + first + 1, member, is_early)
    is_last = inside & (row == groups * N - 1)
    tl.store(first_R1 + row + 1, groups * (N + early) + n * 0, is_last)


@triton.jit
def middle(low, high, margin):
    """Return the middle of an interval, and whether the interval can be halved any further.

    It cannot where it is no wider than the margin, nor where no number is between its ends.
    """
    half = 0.5 * low + 0.5 * high
    return half, (high - low > margin) & (half > low) & (half < high)


@triton.jit
def weight_from(score_c, weight_c, least):
    """Return the sum of the weights of the clusters whose scores are `least` or more."""
    return tl.sum(tl.where(score_c >= least, weight_c, 0), 0)


@triton.jit
def last_taken(score_c, count_c, margin, target):
    """Return a score that is tied with that of the last cluster that a query takes.

    Let v be the largest score such that the clusters with scores of v or more hold `target` keys;
    the least score where all hold fewer. Bisection looks for v. It ends when one cluster is left
    between its bounds, or several that are tied.

    A cluster weighs ONE for itself, and 1 for each key that counts. So one sum says how many
    clusters there are, in its upper bits, and how many keys. It may exceed int32, but a difference
    of two sums is right for up to MAX_CLUSTERS of `triton_probing.py`.

    Args:
        score_c: -inf where a cluster holds no key that the query may read.
        count_c: how many keys a cluster holds that count.
    """
    weight_c = count_c + ONE
    most = tl.max(score_c, 0)
    above = weight_from(score_c, weight_c, most)
    # Whether clusters with lower scores are taken, too.
    is_open = (above & (ONE - 1)) < target
    # v is at least `low`, and below `high` unless both are the largest score.
    high = most
    low = most
    weight_low = above
    weight_high = above
    if is_open:
        low = tl.min(tl.where(count_c > 0, score_c, most), 0)
        weight_low = weight_from(score_c, weight_c, low)
    at, is_wide = middle(low, high, margin)
    while is_wide & (clusters_between(weight_low, weight_high) > 1):
        weight = weight_from(score_c, weight_c, at)
        if (weight & (ONE - 1)) >= target:
            low = at
            weight_low = weight
        else:
            high = at
            weight_high = weight
        at, is_wide = middle(low, high, margin)
    return tl.min(tl.where(score_c >= low, score_c, most), 0)


@triton.jit
def clusters_between(weight_low, weight_high):
    """Return how many clusters the first of two sums of weights has more than the second."""
    return (weight_low - weight_high).to(tl.uint32, bitcast=True) // ONE


@triton.jit
def tied_with(score_c, margin, tied):
    """Return the least and the largest score that steps of at most the margin link to `tied`."""
    low = tied
    high = tied
    grows = True
    while grows:
        below = tl.max(tl.where(score_c < low, score_c, float("-inf")), 0)
        above = tl.min(tl.where(score_c > high, score_c, float("inf")), 0)
        has_below = low - below <= margin
        has_above = above - high <= margin
        low = tl.where(has_below, below, low)
        high = tl.where(has_above, above, high)
        grows = has_below | has_above
    return low, high


@triton.jit
def clusters_taken(score_c, count_c, margin, target):
    """Return which clusters a query takes, as `rtx.attention.inverted_file.probed_clusters` says.

    A query takes all clusters whose scores are higher than those tied with the last one taken, and
    of the tied clusters the first ones, until it has `target` keys.

    Args: see `last_taken`.
    """
    low, high = tied_with(score_c, margin, last_taken(score_c, count_c, margin, target))
    is_above_c = score_c > high
    is_tied_c = (score_c >= low) & ~is_above_c
    # The keys of clusters that are taken before a tied one. A single tied cluster is taken anyway.
    before_c = tl.zeros_like(count_c)
    if tl.sum(is_tied_c.to(tl.int32), 0) > 1:
        tied_c = tl.where(is_tied_c, count_c, 0)
        above = tl.sum(tl.where(is_above_c, count_c, 0), 0)
        before_c = above + tl.cumsum(tied_c, 0) - tied_c
    return is_above_c | (is_tied_c & (before_c < target))


@triton.jit
def score_kernel(
    x, centroid, unit, score, margin, begin_n, N, H, C, S,
    D: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the scores of BN queries with all clusters, score [X, S, C], and their margins [X, S].

    A program is (group, positions). It looks at BC clusters at a time.

    Args:
        unit [H]: the margin of a query is |x| * unit.
        begin_n: the first of S positions; position n is s = n - begin_n in `score` and `margin`.
    """
    group = tl.program_id(0)
    head = group % H
    s = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (s < S) & (begin_n + s < N)
    row = group.to(tl.int64) * N + begin_n + s
    to_n = group.to(tl.int64) * S + s
    centroid += head * C * D
    x_nd = load_vectors(x, row, inside, 0, D, CHUNK)
    margin_n = margin_of(norm_of(x_nd, x, row, inside, D, CHUNK), tl.load(unit + head))
    tl.store(margin + to_n, margin_n, inside)
    for begin in range(0, C, BC):
        c = begin + tl.arange(0, BC)
        score_nc = scores_of(x_nd, x, row, inside, centroid, c, C, D, CHUNK, PRECISION)
        to_nc = score + to_n[:, None] * C + c[None, :]
        tl.store(to_nc, finite(score_nc), inside[:, None] & (c < C)[None, :])


@triton.jit
def probe_kernel(
    score, margin, key_word, key_last, key_bound, bits, begin_n, N, C, T, S, target, early,
    QUERIES: tl.constexpr, BC: tl.constexpr, SELF: tl.constexpr,
):  # fmt: skip
    """Write which clusters QUERIES queries of a tile take, `bits`; early ones take none.

    A program is (group, queries). It chooses for one query after the other.

    Args:
        score, margin, begin_n: see `score_kernel`.
        BC: a power of two that is not below C, nor below 32.
    """
    group = tl.program_id(0)
    s = tl.program_id(1) * QUERIES
    tile = (begin_n + s) // TILE
    c = tl.arange(0, BC)
    w = tl.arange(0, BC // 32)
    words = tl.cdiv(C, 32)
    # held_c: how many keys of each cluster come before the position of the query.
    last_c, word_c = load_tally(key_last, key_word, group, c, tile, C, T, c < C)
    held_c = members_before(last_c, word_c, c * 0 + s % TILE, False)
    held_c -= tl.load(key_bound + group * C + c, c < C, 0)
    for _ in range(0, QUERIES):
        own_c = (word_c >> (s % TILE)) & 1  # 1 for the cluster of the key at this position
        count_c = held_c
        if SELF:
            count_c = held_c + own_c
        held_c += own_c
        n = begin_n + s
        bits_w = tl.zeros([BC // 32], tl.int32)
        if (n >= early) & (n < N):
            at = group.to(tl.int64) * S + s
            score_c = tl.load(score + at * C + c, c < C, 0.0)
            score_c = tl.where(count_c > 0, score_c, float("-inf"))
            count_c = tl.minimum(count_c, target)
            is_taken_c = clusters_taken(score_c, count_c, tl.load(margin + at), target)
            bits_w = tl.sum(tl.reshape(is_taken_c.to(tl.int32) << (c % 32), [BC // 32, 32]), 1)
        to_w = bits + (group.to(tl.int64) * words + w) * N + n
        tl.store(to_w, bits_w, (w < words) & (n < N))
        s += 1


@triton.jit
def write_early_members(
    row_P, start_P, stop_P, rank_P, group, n, row, is_early, early, SELF: tl.constexpr
):  # fmt: skip
    """Write the members of early queries in the list of early positions of their head."""
    first = group * early
    member = first + n
    tl.store(row_P + member, row, is_early)
    tl.store(start_P + member, first + n * 0, is_early)
    # A query that may not read itself reads the positions before, and position 0 itself.
    tl.store(stop_P + member, first + tl.maximum(n + SELF, 1), is_early)
    tl.store(rank_P + member, n * 0, is_early)


@triton.jit
def write_kernel(
    bits, query_word, query_last, key_word, key_last, key_bound,
    row_P, start_P, stop_P, rank_P, times_R, room, N, C, T, target, early, SELF: tl.constexpr,
):  # fmt: skip
    """Write the members of a tile of queries to their slots.

    A program is (group, tile). Each turn of the loop writes one member of each query that has more.

    Writes:
        row_P: the rows of the members.
        start_P, stop_P: the key members that they read.
        rank_P: how many members with the same row come before.
        times_R: how many members each row has, those without room left out.
    """
    group = tl.program_id(0)
    groups = tl.num_programs(0)
    tile = tl.program_id(1)
    j = tl.arange(0, TILE)
    n = tile * TILE + j
    inside = n < N
    row = group * N + n
    of_early = groups * early  # members of the lists of early positions

    is_early = inside & (n < early)
    write_early_members(row_P, start_P, stop_P, rank_P, group, n, row, is_early, early, SELF)
    times_n = is_early.to(tl.int32)

    words = tl.cdiv(C, 32)
    for w in range(0, words):
        left_n = tl.load(bits + (group.to(tl.int64) * words + w) * N + n, inside, 0)
        while tl.max((left_n != 0).to(tl.int32), 0) > 0:
            takes_n = left_n != 0
            # The lowest bit of what is left is the next cluster; the bits below it count up to it.
            rest_n = left_n & (left_n - 1)
            cluster_n = w * 32 + ones((left_n ^ rest_n) - 1)
            last, word = load_tally(query_last, query_word, group, cluster_n, tile, C, T, takes_n)
            slot = members_before(last, word, j, False)
            fits_n = takes_n & (slot < room)
            member = of_early + tl.minimum(slot, room).to(tl.int32)

            # It reads the last `target` keys of the cluster before it.
            last, word = load_tally(key_last, key_word, group, cluster_n, tile, C, T, fits_n)
            stop = members_before(last, word, j, SELF)
            begin = tl.load(key_bound + group * C + cluster_n, fits_n, 0)
            start = tl.maximum(begin, stop - target)
            tl.store(row_P + member, row, fits_n)
            tl.store(start_P + member, of_early + start, fits_n)
            tl.store(stop_P + member, of_early + stop, fits_n)
            tl.store(rank_P + member, times_n, fits_n)
            times_n += fits_n.to(tl.int32)
            left_n = rest_n
    tl.store(times_R + row, times_n, inside)


@triton.jit
def place_kernel(
    row_P, start_P, stop_P, rank_P, first_R1, total, member_P, count_2, room, of_early, keys,
    BP: tl.constexpr,
):  # fmt: skip
    """Write the query members sorted by row, and fill empty slots.

    Args:
        first_R1: where the members of each row begin in `member_P`.
        total [1]: the number of members of clusters' lists, those without room among them.
        of_early: the number of members of the lists of early positions.
        keys: M.

    Writes:
        member_P: at first_R1[row] + rank of each member, its number; in empty slots, their own.
        row_P: in empty slots, row 0.
        start_P, stop_P: in empty slots, M: they read nothing.
        count_2: the numbers of query members with room, and of key members.
    """
    filled = of_early + tl.minimum(tl.load(total), room).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(count_2, filled)
        tl.store(count_2 + 1, keys)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    is_filled = p < filled
    is_empty = (p >= filled) & (p < of_early + room)
    row = tl.load(row_P + p, is_filled, 0)
    place = tl.load(first_R1 + row, is_filled, 0) + tl.load(rank_P + p, is_filled, 0)
    tl.store(member_P + place, p, is_filled)
    tl.store(member_P + p, p, is_empty)
    tl.store(row_P + p, p * 0, is_empty)
    tl.store(start_P + p, keys + p * 0, is_empty)
    tl.store(stop_P + p, keys + p * 0, is_empty)


@triton.jit
def queries_before(
    query_last, query_word, group, cluster_n, n, C, T, room, mask, SELF: tl.constexpr
):  # fmt: skip
    """Return how many query members come before the first that may read the keys at positions n.

    Args:
        cluster_n: the clusters of the keys.
        room: members without room do not count.
    """
    last, word = load_tally(query_last, query_word, group, cluster_n, n // TILE, C, T, mask)
    # A query that may not read itself reads a key from the next position on.
    return tl.minimum(members_before(last, word, n % TILE, not SELF), room).to(tl.int32)


@triton.jit
def reader_kernel(
    cluster, query_word, query_last, query_bound, key_word, key_last, key_bound, row_M,
    low_M, high_M, room, N, C, T, target, early, BN: tl.constexpr, SELF: tl.constexpr,
):  # fmt: skip
    """Write by which query members BN keys are read: low_M to high_M - 1, in both of their lists.

    A query reads the last `target` keys of a cluster before it. So the first query that does not
    read a key any more is the first one that may read the key `target` places after it.
    """
    group = tl.program_id(0)
    of_early = tl.num_programs(0) * early
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = n < N
    cluster_n = tl.load(cluster + group * N + n, inside, 0)
    list_n = group * C + cluster_n
    last, word = load_tally(key_last, key_word, group, cluster_n, n // TILE, C, T, inside)
    member = members_before(last, word, n % TILE, False)
    low = queries_before(query_last, query_word, group, cluster_n, n, C, T, room, inside, SELF)

    # Where no key is `target` places after, all later queries of the list read the key.
    has_later = inside & (member + target < tl.load(key_bound + list_n + 1, inside, 0))
    later_row = tl.load(row_M + of_early + member + target, has_later, 0)
    later_n = tl.where(has_later, later_row - group * N, 0)
    high = queries_before(
        query_last, query_word, group, cluster_n, later_n, C, T, room, has_later, SELF
    )  # fmt: skip
    end = tl.load(query_bound + list_n + 1, inside, 0)
    high = tl.where(has_later, high, tl.minimum(end, room).to(tl.int32))
    tl.store(low_M + of_early + member, of_early + low, inside)
    tl.store(high_M + of_early + member, of_early + high, inside)

    is_early = inside & (n < early)
    first = group * early
    # The query at position 0 reads itself in any case.
    early_low = first + n
    if not SELF:
        early_low = first + tl.where(n > 0, n + 1, 0)
    tl.store(low_M + first + n, early_low, is_early)
    tl.store(high_M + first + n, first + early + n * 0, is_early)
