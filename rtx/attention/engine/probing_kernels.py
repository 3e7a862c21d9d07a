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

A *tile* is 32 neighbouring positions, 32 t to 32 t + 31. The members of a tile in one cluster are a
*word*: bit j is 1 if position 32 t + j is a member. The word of a tile and a cluster, and the
running sum of the ones of words, tell how many members of a list come before a position. So no
kernel searches lists.

Example with tiles of 4 positions (bit 0 is the rightmost one): cluster c holds the positions 1, 3
and 6, and the lists before it have 10 members.

    tile               0       1
    word            1010    0100
    last              12      13      members up to and with this tile, those of lists before too
    before 3       12 - ones(1010 >> 3) = 11: ten of the lists before, and position 1

The lists of all heads follow one another (reads.py, lists.py): first a list of the `early` first
positions for each head, then the lists of clusters. So the first X * early members, as keys and as
queries, are those of early positions. "Members of clusters' lists" are numbered without these.

Scores are in float32; all other numbers are integers.

Shapes: H heads, X heads of all sequences, also called groups (group % H is the head), C clusters of
a head, N positions, S positions at a time, D head size, T tiles, L = X * C lists of clusters,
L1 = L + 1, R = X * N rows (row = group * N + n), R1 = R + 1, M = X * early + R key members,
P = X * early + capacity slots of query members. Lower-case letters are the axes of a tensor in
registers: n positions, c clusters, d numbers of a vector, t tiles, j positions of a tile, w words
of `bits`, p query members. `n * 0 + x` is the number x as a tensor of axis n, which a store needs.
`valid_n` is False for positions after the last one.

Parameters that several kernels have:

    centroid [H, C, D]
    key_word [X, T, C], key_last [X, C, T]      words of the keys, and running sums of their ones
    key_bound [L1]                              the first key of each list, and the end of the last
    query_word [X, T, C], query_last [X, C, T]  the same of queries that probe; the sums may be
                                                int64, as there may be more members than slots
    query_bound [L1]
    bits [X, ceil(C / 32), N]                   bit i of word w: whether a query takes cluster
                                                32 w + i
    target                                      how many keys a query probes for, and the most that
                                                it reads of a cluster
    early                                       how many first positions of a sequence are early: a
                                                query there reads all keys before it
    SELF                                        whether a query may read the key of its position
"""

# pyright: basic, reportGeneralTypeIssues=false
# Triton compiles what pyright takes for Python: its functions have no types for a checker.

import triton
import triton.language as tl

from rtx.attention.engine.selection_kernels import (
    NO_CLUSTER,
    any_bit,
    load_chunk,
    popcount,
    scores_of,
    take_lowest_bit,
)

TILE = tl.constexpr(32)
"""Positions of a tile: a bit of an int32 for each."""
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
CLUSTER_WEIGHT = tl.constexpr(1 << 20)
"""The weight of a cluster in `last_taken`, above the number of all keys of a head."""
KEYS_OF_WEIGHT = tl.constexpr((1 << 20) - 1)
"""The bits of a sum of weights that count keys."""


@triton.jit
def members_before(last, word, j, INCLUDED: tl.constexpr):
    """Return how many members come before position j of a tile, see the module's example.

    Args:
        last, word: of the list and the tile.
        INCLUDED: count that position, too.
    """
    # The members at position j and at later positions of the tile. They are in `last`, too.
    from_j = word.to(tl.uint32, bitcast=True) >> j.to(tl.uint32)
    if INCLUDED:
        from_j = from_j >> 1
    return last - popcount(from_j)


@triton.jit
def first_that_reaches(value_nc, c, least_n):
    """Return the first cluster whose value is at least least_n; NO_CLUSTER if there is none."""
    reaches_nc = value_nc >= least_n[:, None]
    cluster_nc = tl.broadcast_to(c[None, :], value_nc.shape)
    return tl.min(tl.where(reaches_nc, cluster_nc, NO_CLUSTER), 1)


@triton.jit
def to_finite(score):
    """Return scores whose differences are no NaN: infinite ones are clamped, NaN is the lowest."""
    score = tl.where(score != score, -FLOAT32_MAX, score)
    return tl.minimum(tl.maximum(score, -FLOAT32_MAX), FLOAT32_MAX)


@triton.jit
def margin_of(norm_n, unit):
    """Return how far apart equal scores may come out by rounding; 0 where that is not finite."""
    margin_n = norm_n * unit
    return tl.where(margin_n <= FLOAT32_MAX, margin_n, 0.0)


@triton.jit
def norm_of(x_nd, x, row_n, valid_n, D: tl.constexpr, CHUNK: tl.constexpr):
    """Return the norms of vectors. Args: see `selection_kernels.scores_of`."""
    square_n = tl.sum(x_nd * x_nd, 1)
    for begin in range(CHUNK, D, CHUNK):
        more_nd = load_chunk(x, row_n, valid_n, begin, D, CHUNK)
        square_n += tl.sum(more_nd * more_nd, 1)
    return tl.sqrt(square_n)


@triton.jit
def nearness_of(score_nc, half_square, c, C):
    """Return how near keys are to clusters: x . c - |c|^2 / 2, or -inf after the last cluster."""
    half_square_c = tl.load(half_square + c, c < C, 0.0)
    near_nc = to_finite(score_nc - half_square_c[None, :])
    return tl.where((c < C)[None, :], near_nc, float("-inf"))


@triton.jit
def nearest_cluster(
    x_nd,
    x,
    row_n,
    valid_n,
    centroid,
    half_square,
    C,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the nearest cluster of keys, how near it is, and how near the second nearest one is.

    Args: see `scores_of` and `cluster_kernel`.
    """
    best_n = tl.full([BN], float("-inf"), tl.float32)
    second_n = tl.full([BN], float("-inf"), tl.float32)
    nearest_n = tl.zeros([BN], tl.int32)
    for begin in range(0, C, BC):
        c = begin + tl.arange(0, BC)
        score_nc = scores_of(x_nd, x, row_n, valid_n, centroid, c, C, D, CHUNK, PRECISION)
        near_nc = nearness_of(score_nc, half_square, c, C)
        best_here_n = tl.max(near_nc, 1)
        nearest_here_n = first_that_reaches(near_nc, c, best_here_n)
        others_nc = tl.where(c[None, :] == nearest_here_n[:, None], float("-inf"), near_nc)
        second_n = tl.maximum(second_n, tl.max(others_nc, 1))
        # Of the best before and the best here, the lesser one.
        second_n = tl.maximum(second_n, tl.minimum(best_n, best_here_n))
        nearest_n = tl.where(best_here_n > best_n, nearest_here_n, nearest_n)
        best_n = tl.maximum(best_n, best_here_n)
    return nearest_n, best_n, second_n


@triton.jit
def cluster_kernel(
    # Inputs
    x,  # [X, N, D] keys
    centroid,
    half_square,  # [H, C] |c|^2 / 2 of each centroid
    radius,  # [H] r, the largest norm of a centroid
    unit,  # [H] the margin of a key is (|x| + r) * unit
    # Output
    cluster,  # [X, N] the first cluster within the margin of the nearest one
    # Sizes
    N,
    H,
    C,
    # Constants
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the cluster of each key.

    A program has BN keys, and loops over BC clusters at a time. The grid is (groups, tiles of
    keys).
    """
    group = tl.program_id(0)
    head = group % H
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    valid_n = n < N
    row_n = group.to(tl.int64) * N + n
    centroid += head * C * D
    half_square += head * C
    x_nd = load_chunk(x, row_n, valid_n, 0, D, CHUNK)
    norm_n = norm_of(x_nd, x, row_n, valid_n, D, CHUNK) + tl.load(radius + head)
    margin_n = margin_of(norm_n, tl.load(unit + head))

    first_n, best_n, second_n = nearest_cluster(
        x_nd, x, row_n, valid_n, centroid, half_square, C, D, CHUNK, BN, BC, PRECISION
    )

    # Rare: another cluster is within the margin. Then look for the first one that is.
    least_n = best_n - margin_n
    if tl.max((second_n >= least_n).to(tl.int32), 0) > 0:
        first_n = tl.full([BN], NO_CLUSTER, tl.int32)
        for begin in range(0, C, BC):
            c = begin + tl.arange(0, BC)
            score_nc = scores_of(x_nd, x, row_n, valid_n, centroid, c, C, D, CHUNK, PRECISION)
            near_nc = nearness_of(score_nc, half_square, c, C)
            first_n = tl.minimum(first_n, first_that_reaches(near_nc, c, least_n))
    tl.store(cluster + row_n, first_n, valid_n)


@triton.jit
def tally_kernel(
    # Input
    source,  # with KEYS the cluster of each key [X, N], else `bits` of queries
    # Outputs
    word,  # [X, T, C] the words of tiles in clusters
    count,  # [X, C, T] how many ones they have
    # Sizes
    N,
    C,
    T,
    # Constants
    BT: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Write which positions are members of which clusters.

    A program has BT tiles and 32 clusters. The grid is (groups, tiles / BT, words of clusters).
    """
    group = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    w = tl.program_id(2)
    c = w * 32 + tl.arange(0, 32)
    j = tl.arange(0, TILE)
    n_tj = t[:, None] * TILE + j[None, :]
    if KEYS:
        cluster_tj = tl.load(source + group * N + n_tj, n_tj < N, -1)
        is_member_tjc = cluster_tj[:, :, None] == c[None, None, :]
    else:
        source += (group * tl.num_programs(2) + w) * N
        bits_tj = tl.load(source + n_tj, n_tj < N, 0)
        bit_tjc = (bits_tj[:, :, None] >> (c % 32)[None, None, :]) & 1
        is_member_tjc = bit_tjc > 0
    member_tjc = is_member_tjc.to(tl.int32)
    word_tc = tl.sum(member_tjc << j[None, :, None], 1)
    count_tc = tl.sum(member_tjc, 1)

    valid_tc = (t < T)[:, None] & (c < C)[None, :]
    tl.store(word + (group * T + t[:, None]) * C + c[None, :], word_tc, valid_tc)
    tl.store(count + (group * C + c[None, :]) * T + t[:, None], count_tc, valid_tc)


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
    # Inputs
    cluster,  # [X, N] of each key
    key_last,
    key_word,
    # Outputs
    row_M,  # the row of each key member
    first_R1,  # the key members of each row, see `lists.RowMembers`
    member_M,
    # Sizes
    N,
    C,
    T,
    early,
    # Constant
    BN: tl.constexpr,
):
    """Write the key members of positions: one each, and early positions one more.

    A program has BN positions. The grid is (groups, tiles of positions).
    """
    group = tl.program_id(0)
    groups = tl.num_programs(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    valid_n = n < N
    row_n = group * N + n
    cluster_n = tl.load(cluster + row_n, valid_n, 0)
    last_n, word_n = load_tally(key_last, key_word, group, cluster_n, n // TILE, C, T, valid_n)
    member_n = groups * early + members_before(last_n, word_n, n % TILE, False)
    early_member_n = group * early + n
    is_early_n = valid_n & (n < early)
    tl.store(row_M + member_n, row_n, valid_n)
    tl.store(row_M + early_member_n, row_n, is_early_n)

    # Before a row come one member of each row before it, and one more of each early one.
    first_n = row_n + group * early + tl.minimum(n, early)
    tl.store(first_R1 + row_n, first_n, valid_n)
    tl.store(member_M + first_n, tl.where(is_early_n, early_member_n, member_n), valid_n)
    tl.store(member_M + first_n + 1, member_n, is_early_n)
    is_last_n = valid_n & (row_n == groups * N - 1)
    tl.store(first_R1 + row_n + 1, groups * (N + early) + n * 0, is_last_n)


@triton.jit
def middle_of(low, high, margin):
    """Return the middle of an interval, and whether the interval can be halved any further.

    It cannot if it is no wider than the margin, nor if no number is between its ends.
    """
    middle = 0.5 * low + 0.5 * high
    return middle, (high - low > margin) & (middle > low) & (middle < high)


@triton.jit
def weight_from(score_c, weight_c, least):
    """Return the sum of the weights of the clusters whose scores are `least` or more."""
    return tl.sum(tl.where(score_c >= least, weight_c, 0), 0)


@triton.jit
def clusters_between(weight_low, weight_high):
    """Return how many clusters the first of two sums of weights has more than the second."""
    return (weight_low - weight_high).to(tl.uint32, bitcast=True) // CLUSTER_WEIGHT


@triton.jit
def last_taken(score_c, count_c, margin, target):
    """Return a score that is tied with that of the last cluster that a query takes.

    Let v be the largest score such that the clusters with scores of v or more hold `target` keys;
    the least score if all hold fewer. Bisection looks for v. It ends when one cluster is left
    between its bounds, or several that are tied.

    A cluster weighs CLUSTER_WEIGHT for itself, and 1 for each key that counts. So one sum says how
    many clusters there are, in its upper bits, and how many keys. It may exceed int32, but a
    difference of two sums is right for up to MAX_CLUSTERS of `triton_probing.py`.

    Args:
        score_c: -inf if a cluster holds no key that the query may read.
        count_c: how many keys a cluster holds that count.
    """
    weight_c = count_c + CLUSTER_WEIGHT
    most = tl.max(score_c, 0)
    weight_of_most = weight_from(score_c, weight_c, most)
    # v is at least `low`, and below `high` unless both are the largest score.
    high = most
    low = most
    weight_low = weight_of_most
    weight_high = weight_of_most
    takes_lower_scores = (weight_of_most & KEYS_OF_WEIGHT) < target
    if takes_lower_scores:
        low = tl.min(tl.where(count_c > 0, score_c, most), 0)
        weight_low = weight_from(score_c, weight_c, low)
    middle, is_wide = middle_of(low, high, margin)
    while is_wide & (clusters_between(weight_low, weight_high) > 1):
        weight = weight_from(score_c, weight_c, middle)
        if (weight & KEYS_OF_WEIGHT) >= target:
            low = middle
            weight_low = weight
        else:
            high = middle
            weight_high = weight
        middle, is_wide = middle_of(low, high, margin)
    return tl.min(tl.where(score_c >= low, score_c, most), 0)


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
    """Return which clusters a query takes, as `rtx.attention.inverted_file.probed_clusters` does.

    A query takes all clusters whose scores are higher than those tied with the last one taken, and
    of the tied clusters the first ones, until it has `target` keys.

    Args: see `last_taken`.
    """
    low, high = tied_with(score_c, margin, last_taken(score_c, count_c, margin, target))
    is_above_c = score_c > high
    is_tied_c = (score_c >= low) & ~is_above_c
    # The keys of clusters that are taken before a tied one. A single tied cluster is taken anyway.
    keys_before_c = tl.zeros_like(count_c)
    if tl.sum(is_tied_c.to(tl.int32), 0) > 1:
        tied_count_c = tl.where(is_tied_c, count_c, 0)
        keys_above = tl.sum(tl.where(is_above_c, count_c, 0), 0)
        keys_before_c = keys_above + tl.cumsum(tied_count_c, 0) - tied_count_c
    return is_above_c | (is_tied_c & (keys_before_c < target))


@triton.jit
def score_kernel(
    # Inputs
    x,  # [X, N, D] queries
    centroid,
    unit,  # [H] the margin of a query is |x| * unit
    # Outputs
    score,  # [X, S, C] scores of queries with all clusters
    margin,  # [X, S]
    # Sizes
    begin_n,  # the first of S positions: position n is s = n - begin_n in the outputs
    N,
    H,
    C,
    S,
    # Constants
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the scores of S queries of each group, and the margins within which they are tied.

    A program has BN queries, and loops over BC clusters at a time. The grid is (groups, tiles of
    queries).
    """
    group = tl.program_id(0)
    head = group % H
    s_n = tl.program_id(1) * BN + tl.arange(0, BN)
    valid_n = (s_n < S) & (begin_n + s_n < N)
    row_n = group.to(tl.int64) * N + begin_n + s_n
    out_row_n = group.to(tl.int64) * S + s_n
    centroid += head * C * D
    x_nd = load_chunk(x, row_n, valid_n, 0, D, CHUNK)
    margin_n = margin_of(norm_of(x_nd, x, row_n, valid_n, D, CHUNK), tl.load(unit + head))
    tl.store(margin + out_row_n, margin_n, valid_n)
    for begin in range(0, C, BC):
        c = begin + tl.arange(0, BC)
        score_nc = scores_of(x_nd, x, row_n, valid_n, centroid, c, C, D, CHUNK, PRECISION)
        mask_nc = valid_n[:, None] & (c < C)[None, :]
        tl.store(score + out_row_n[:, None] * C + c[None, :], to_finite(score_nc), mask_nc)


@triton.jit
def probe_kernel(
    # Inputs
    score,  # see `score_kernel`
    margin,
    key_word,
    key_last,
    key_bound,
    # Output
    bits,
    # Sizes
    begin_n,  # see `score_kernel`
    N,
    C,
    T,
    S,
    target,
    early,
    # Constants
    QUERIES: tl.constexpr,
    BC: tl.constexpr,  # a power of two that is not below C, nor below 32
    SELF: tl.constexpr,
):
    """Write which clusters queries take, as bits; early ones take none.

    A program has QUERIES queries of a tile. It chooses for one query after the other. The grid is
    (groups, S / QUERIES).
    """
    group = tl.program_id(0)
    s = tl.program_id(1) * QUERIES
    tile = (begin_n + s) // TILE
    c = tl.arange(0, BC)
    w = tl.arange(0, BC // 32)
    words = tl.cdiv(C, 32)
    last_c, word_c = load_tally(key_last, key_word, group, c, tile, C, T, c < C)
    # How many keys of each cluster come before the position of the query.
    before_c = members_before(last_c, word_c, c * 0 + s % TILE, False)
    before_c -= tl.load(key_bound + group * C + c, c < C, 0)
    for _ in range(0, QUERIES):
        # 1 for the cluster of the key at this position.
        is_own_c = (word_c >> (s % TILE)) & 1
        count_c = before_c
        if SELF:
            count_c = before_c + is_own_c
        before_c += is_own_c
        n = begin_n + s
        bits_w = tl.zeros([BC // 32], tl.int32)
        if (n >= early) & (n < N):
            row = group.to(tl.int64) * S + s
            score_c = tl.load(score + row * C + c, c < C, 0.0)
            score_c = tl.where(count_c > 0, score_c, float("-inf"))
            count_c = tl.minimum(count_c, target)
            is_taken_c = clusters_taken(score_c, count_c, tl.load(margin + row), target)
            bit_c = is_taken_c.to(tl.int32) << (c % 32)
            bits_w = tl.sum(tl.reshape(bit_c, [BC // 32, 32]), 1)
        bits_n_w = bits + (group.to(tl.int64) * words + w) * N + n
        tl.store(bits_n_w, bits_w, (w < words) & (n < N))
        s += 1


@triton.jit
def write_early_members(
    row_P,
    start_P,
    stop_P,
    rank_P,
    group,
    n,
    row_n,
    is_early_n,
    early,
    SELF: tl.constexpr,
):
    """Write the members of early queries in the list of early positions of their head."""
    first = group * early
    member_n = first + n
    tl.store(row_P + member_n, row_n, is_early_n)
    tl.store(start_P + member_n, first + n * 0, is_early_n)
    # A query that may not read itself reads the positions before, and position 0 itself.
    tl.store(stop_P + member_n, first + tl.maximum(n + SELF, 1), is_early_n)
    tl.store(rank_P + member_n, n * 0, is_early_n)


@triton.jit
def write_kernel(
    # Inputs
    bits,
    query_word,
    query_last,
    key_word,
    key_last,
    key_bound,
    # Outputs
    row_P,  # the rows of the members
    start_P,  # the key members that they read: start to stop - 1
    stop_P,
    rank_P,  # how many members with the same row come before
    times_R,  # how many members each row has, those without a slot left out
    # Sizes
    capacity,
    N,
    C,
    T,
    target,
    early,
    # Constant
    SELF: tl.constexpr,
):
    """Write the members of queries to their slots.

    A program has a tile of queries. Each iteration of its inner loop writes one member of each
    query that has more. The grid is (groups, T tiles).
    """
    group = tl.program_id(0)
    early_members = tl.num_programs(0) * early
    tile = tl.program_id(1)
    j = tl.arange(0, TILE)
    n = tile * TILE + j
    valid_n = n < N
    row_n = group * N + n
    is_early_n = valid_n & (n < early)
    write_early_members(row_P, start_P, stop_P, rank_P, group, n, row_n, is_early_n, early, SELF)
    times_n = is_early_n.to(tl.int32)

    words = tl.cdiv(C, 32)
    for w in range(0, words):
        word_n = tl.load(bits + (group.to(tl.int64) * words + w) * N + n, valid_n, 0)
        while any_bit(word_n):
            takes_n = word_n != 0
            bit_n, word_n = take_lowest_bit(word_n)
            c_n = w * 32 + bit_n
            last_n, tile_n = load_tally(query_last, query_word, group, c_n, tile, C, T, takes_n)
            slot_n = members_before(last_n, tile_n, j, False)
            fits_n = takes_n & (slot_n < capacity)
            member_n = early_members + tl.minimum(slot_n, capacity).to(tl.int32)

            # It reads the last `target` keys of the cluster before it.
            last_n, tile_n = load_tally(key_last, key_word, group, c_n, tile, C, T, fits_n)
            stop_n = members_before(last_n, tile_n, j, SELF)
            first_n = tl.load(key_bound + group * C + c_n, fits_n, 0)
            start_n = tl.maximum(first_n, stop_n - target)
            tl.store(row_P + member_n, row_n, fits_n)
            tl.store(start_P + member_n, early_members + start_n, fits_n)
            tl.store(stop_P + member_n, early_members + stop_n, fits_n)
            tl.store(rank_P + member_n, times_n, fits_n)
            times_n += fits_n.to(tl.int32)
    tl.store(times_R + row_n, times_n, valid_n)


@triton.jit
def place_kernel(
    # Inputs
    row_P,  # also an output: row 0 in empty slots
    start_P,  # also outputs: M in empty slots, which read nothing
    stop_P,
    rank_P,
    first_R1,  # where the members of each row begin in `member_P`
    total,  # [1] the number of members of clusters' lists, those without a slot among them
    # Outputs
    member_P,  # at first_R1[row] + rank of each member, its number; in empty slots, their own
    count_2,  # the numbers of query members with a slot, and of key members
    # Sizes
    capacity,
    early_members,  # X * early
    key_members,  # M
    # Constant
    BP: tl.constexpr,
):
    """Write the query members sorted by row, and fill empty slots.

    A program has BP slots. The grid is (tiles of slots,).
    """
    filled = early_members + tl.minimum(tl.load(total), capacity).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(count_2, filled)
        tl.store(count_2 + 1, key_members)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    is_filled_p = p < filled
    is_empty_p = (p >= filled) & (p < early_members + capacity)
    row_p = tl.load(row_P + p, is_filled_p, 0)
    first_p = tl.load(first_R1 + row_p, is_filled_p, 0)
    rank_p = tl.load(rank_P + p, is_filled_p, 0)
    tl.store(member_P + first_p + rank_p, p, is_filled_p)

    tl.store(member_P + p, p, is_empty_p)
    tl.store(row_P + p, p * 0, is_empty_p)
    tl.store(start_P + p, key_members + p * 0, is_empty_p)
    tl.store(stop_P + p, key_members + p * 0, is_empty_p)


@triton.jit
def queries_before(
    query_last,
    query_word,
    group,
    cluster_n,
    n,
    C,
    T,
    capacity,
    mask_n,
    SELF: tl.constexpr,
):
    """Return how many query members come before the first that may read the keys at positions n.

    Args:
        cluster_n: the clusters of the keys.
        capacity: members without a slot do not count.
    """
    last_n, word_n = load_tally(query_last, query_word, group, cluster_n, n // TILE, C, T, mask_n)
    # A query that may not read itself reads a key from the next position on.
    before_n = members_before(last_n, word_n, n % TILE, not SELF)
    return tl.minimum(before_n, capacity).to(tl.int32)


@triton.jit
def reader_kernel(
    # Inputs
    cluster,  # [X, N] of each key
    query_word,
    query_last,
    query_bound,
    key_word,
    key_last,
    key_bound,
    row_M,  # the row of each key member
    # Outputs
    low_M,  # the first query member that reads a key member
    high_M,  # the query member after the last one
    # Sizes
    capacity,
    N,
    C,
    T,
    target,
    early,
    # Constants
    BN: tl.constexpr,
    SELF: tl.constexpr,
):
    """Write by which query members keys are read, in both of their lists.

    A query reads the last `target` keys of a cluster before it. So the first query that does not
    read a key any more is the first one that may read the key `target` places after it.

    A program has BN keys. The grid is (groups, tiles of keys).
    """
    group = tl.program_id(0)
    early_members = tl.num_programs(0) * early
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    valid_n = n < N
    cluster_n = tl.load(cluster + group * N + n, valid_n, 0)
    list_n = group * C + cluster_n
    last_n, word_n = load_tally(key_last, key_word, group, cluster_n, n // TILE, C, T, valid_n)
    member_n = members_before(last_n, word_n, n % TILE, False)
    low_n = queries_before(
        query_last, query_word, group, cluster_n, n, C, T, capacity, valid_n, SELF
    )

    # If no key is `target` places after, all later queries of the list read the key.
    later_member_n = member_n + target
    list_end_n = tl.load(key_bound + list_n + 1, valid_n, 0)
    has_later_n = valid_n & (later_member_n < list_end_n)
    later_row_n = tl.load(row_M + early_members + later_member_n, has_later_n, 0)
    later_n = tl.where(has_later_n, later_row_n - group * N, 0)
    high_n = queries_before(
        query_last, query_word, group, cluster_n, later_n, C, T, capacity, has_later_n, SELF
    )
    query_end_n = tl.load(query_bound + list_n + 1, valid_n, 0)
    high_n = tl.where(has_later_n, high_n, tl.minimum(query_end_n, capacity).to(tl.int32))
    tl.store(low_M + early_members + member_n, early_members + low_n, valid_n)
    tl.store(high_M + early_members + member_n, early_members + high_n, valid_n)

    is_early_n = valid_n & (n < early)
    first = group * early
    # The query at position 0 reads itself in any case.
    early_low_n = first + n
    if not SELF:
        early_low_n = first + tl.where(n > 0, n + 1, 0)
    tl.store(low_M + first + n, early_low_n, is_early_n)
    tl.store(high_M + first + n, first + early + n * 0, is_early_n)
