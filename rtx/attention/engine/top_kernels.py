"""Triton kernels that choose the best scores of rows; `triton_selection.py` launches them.

`earliest_kernel` works on what torch.topk found, and lets the earliest of tied scores win.

For long rows torch.topk reads the scores some 18 times. `candidate_kernel` and `top_kernel` read
them about twice:

1. A sample of the row tells a score, the *floor*, that a few more than W scores reach.
2. These scores are the *candidates*. They are few enough for the registers of one program.
3. The W best are found among them, by bisection. If the sample misled, so that there are too few or
   too many candidates, the row itself is searched (`search`).

Words: of the scores of a row, the W best are *taken*. The worst of these is the *last* one taken.
The best of the others is the first one *left out*. Scores within a margin of the last one taken are
tied with it, and of these the earliest are taken; `near` is that margin, or 0 where the first one
left out is not tied, so that ties change nothing. Better scores are taken anyway.

Shapes: X rows (a program each), N scores of a row, K = W + 1 best scores, ROOM slots for
candidates. Lower-case letters are the axes of a tile in registers: n scores of a row, s scores of a
sample, k candidates or best scores.
"""

import triton
import triton.language as tl


@triton.jit
def compare(score_n, last, floor, bar):
    """Return which scores are better than the last one taken, and which are tied with it.

    Tied are those from `floor`, which is last - near, to `bar`, which is last + near. NaN is better
    than every score; if the last one taken is NaN, no score is better, and all NaN are tied.
    """
    is_nan_n = score_n != score_n
    last_n = tl.broadcast_to(last, score_n.shape)
    better_n = (last_n == last_n) & ((score_n > bar) | is_nan_n)
    tied_n = ((score_n >= floor) & (score_n <= bar)) | ((last_n != last_n) & is_nan_n)
    return better_n, tied_n


@triton.jit
def margin_near(last, left_out, margin):
    """Return the margin if the first score left out is tied with the last one taken, else 0.

    Infinities are never tied. Neither is NaN.
    """
    is_finite = (left_out > float("-inf")) & (last < float("inf"))
    margin = tl.where(is_finite, margin, 0.0)
    return tl.where(left_out >= last - margin, margin, 0.0)


@triton.jit
def read_scores(score, n, N, NAN_IS_WORST: tl.constexpr):
    """Return scores of a row; -inf beyond its end, and for NaN with NAN_IS_WORST."""
    score_n = tl.load(score + n, n < N, float("-inf"))
    if NAN_IS_WORST:
        score_n = tl.where(score_n == score_n, score_n, float("-inf"))
    return score_n


@triton.jit
def write_earliest(score, taken, last, near, ties, N, BN: tl.constexpr, NAN_IS_WORST: tl.constexpr):
    """Write the places of a row's scores that are taken, ascending.

    Args:
        ties: how many scores are taken of those tied with the last one; the earliest are.
    """
    floor = last - near
    bar = last + near
    done = 0
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        score_n = read_scores(score, n, N, NAN_IS_WORST)
        better, tied = compare(score_n, last, floor, bar)
        tied_n = ((n < N) & tied).to(tl.int32)
        takes = ((n < N) & better) | ((tied_n > 0) & (tl.cumsum(tied_n, 0) <= ties))
        takes_n = takes.to(tl.int32)
        tl.store(taken + done + tl.cumsum(takes_n, 0) - 1, n, takes)
        ties -= tl.sum(tied_n, 0)
        done += tl.sum(takes_n, 0)


@triton.jit
def earliest_kernel(score, best, edge, margin, taken, N, K, BN: tl.constexpr):
    """Write the places of the K - 1 best scores of a row, ascending: taken [X, K - 1].

    Args:
        best [X, K]: the K best scores, in any order.
        edge [X, 2]: the two lowest of these: the first one left out, and the last one taken.
        margin [X]: within which scores are tied with the last one taken.
    """
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(edge + 2 * row + 1)
    near = margin_near(last, tl.load(edge + 2 * row), tl.load(margin + row))
    ties = K - 1
    for begin in range(0, K, BN):
        k = begin + tl.arange(0, BN)
        best_k = tl.load(best + row * K + k, k < K, 0.0)
        better_k, _ = compare(best_k, last, last - near, last + near)
        ties -= tl.sum(((k < K) & better_k).to(tl.int32), 0)
    write_earliest(score + row * N, taken + row * (K - 1), last, near, ties, N, BN, False)


@triton.jit
def order_of(score):
    """Return the int32 number of a score in the order of all float32 numbers; not of NaN.

    The bits of positive floats, read as integers, ascend with the floats. Those of negative floats
    descend, until all bits but the sign are flipped.
    """
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(order):
    """Return the score with an int32 number of `order_of`, which is its own inverse on bits."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def order_reached(order_s, wanted, low, high):
    """Return the greatest number from low to high - 1 that `wanted` of the orders reach; else low.

    Found by bisection. Numbers are int64, so that `high` may be 1 above the greatest int32.
    """
    while low + 1 < high:
        middle = (low + high) >> 1
        reached = tl.sum((order_s >= middle).to(tl.int32), 0)
        low = tl.where(reached >= wanted, middle, low)
        high = tl.where(reached >= wanted, high, middle)
    return low


@triton.jit
def candidate_kernel(
    score, at, value, floor, reached, N, rank,
    ROOM: tl.constexpr, SAMPLE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the candidates of a row: the scores that are at least the `rank`-th best of a sample.

    The sample are up to SAMPLE scores at equal distances.

    Writes:
        at, value [X, ROOM]: the candidates' places, ascending, and scores; as many as have room.
        floor [X]: the score that candidates reach.
        reached [2, X]: how many scores reach the floor, and how many exceed it.
    """
    row = tl.program_id(0).to(tl.int64)
    score += row * N
    step = tl.cdiv(N, SAMPLE)
    sample_s = read_scores(score, tl.arange(0, SAMPLE) * step, N, True)
    order_s = order_of(sample_s).to(tl.int64)
    lowest = tl.full([], -(1 << 31), tl.int64)
    beyond = tl.full([], 1 << 31, tl.int64)
    order = order_reached(order_s, rank, lowest, beyond)
    least = tl.min(tl.where(order_s >= order, sample_s, float("inf")), 0)
    done = 0
    more = 0
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        score_n = read_scores(score, n, N, True)
        reaches_n = ((score_n >= least) & (n < N)).to(tl.int32)
        slot_n = done + tl.cumsum(reaches_n, 0) - 1
        fits_n = (reaches_n > 0) & (slot_n < ROOM)
        tl.store(at + row * ROOM + slot_n, n, fits_n)
        tl.store(value + row * ROOM + slot_n, score_n, fits_n)
        done += tl.sum(reaches_n, 0)
        more += tl.sum(((score_n > least) & (n < N)).to(tl.int32), 0)
    tl.store(floor + row, least)
    tl.store(reached + row, done)
    tl.store(reached + tl.num_programs(0) + row, more)


@triton.jit
def top_kernel(
    score, at, value, floor, reached, margin, taken, N, W, ROOM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Write the places of the W best scores of a row, ascending: taken [X, W].

    Args:
        at, value, floor, reached: see `candidate_kernel`.
        margin [X]: within which scores are tied with the last one taken.
    """
    row = tl.program_id(0).to(tl.int64)
    least = tl.load(floor + row)
    count = tl.load(reached + row)
    k = tl.arange(0, ROOM)
    inside_k = k < tl.minimum(count, ROOM)
    value_k = tl.load(value + row * ROOM + k, inside_k, float("-inf"))
    order_k = tl.where(inside_k, order_of(value_k).to(tl.int64), -(1 << 31))
    lowest = tl.full([], -(1 << 31), tl.int64)
    beyond = tl.full([], 1 << 31, tl.int64)
    order = order_reached(order_k, W, lowest, beyond)
    last = tl.min(tl.where(order_k >= order, value_k, float("inf")), 0)
    # If more than W candidates reach the last one taken, one that equals it is left out.
    left_out = tl.max(tl.where(inside_k & (value_k < last), value_k, float("-inf")), 0)
    reaches_k = inside_k & (value_k >= last)
    left_out = tl.where(tl.sum(reaches_k.to(tl.int32), 0) > W, last, left_out)
    near = margin_near(last, left_out, tl.load(margin + row))
    # The candidates decide if the W best and the first one left out are among them, if all of them
    # are in their slots, and if every score tied with the last one taken is a candidate.
    if (count > W) & (count <= ROOM) & (last - near >= least):
        better_k, tied_k = compare(value_k, last, last - near, last + near)
        ties = W - tl.sum((inside_k & better_k).to(tl.int32), 0)
        is_tied_k = (inside_k & tied_k).to(tl.int32)
        takes_k = (inside_k & better_k) | ((is_tied_k > 0) & (tl.cumsum(is_tied_k, 0) <= ties))
        at_k = tl.load(at + row * ROOM + k, inside_k, 0)
        tl.store(taken + row * W + tl.cumsum(takes_k.to(tl.int32), 0) - 1, at_k, takes_k)
    else:
        more = tl.load(reached + tl.num_programs(0) + row)
        search(
            score + row * N,
            tl.load(margin + row),
            taken + row * W,
            least,
            count,
            more,
            N,
            W,
            BN,
        )


@triton.jit
def search(score, margin, taken, least, count, more, N, W, BN: tl.constexpr):
    """Write the places of the W best scores of a row by reading all of it some 32 times.

    Args:
        least, count, more: `count` scores reach the score `least`, and `more` exceed it.
    """
    # The last one taken is in [low, high): above the least, below it, or the least itself.
    order = order_of(least).to(tl.int64)
    low = tl.where(count >= W, order, -(1 << 31))
    high = tl.where(count < W, order, tl.where(more < W, order + 1, 1 << 31))
    while low + 1 < high:
        middle = (low + high) >> 1
        enough = count_of_orders(score, middle, N, BN) >= W
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    last = score_of(low.to(tl.int32))
    reached, below = split_at(score, last, N, BN)
    near = margin_near(last, tl.where(reached > W, last, below), margin)
    better = 0
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        score_n = read_scores(score, n, N, True)
        better += tl.sum(((score_n > last + near) & (n < N)).to(tl.int32), 0)
    write_earliest(score, taken, last, near, W - better, N, BN, True)


@triton.jit
def count_of_orders(score, least, N, BN: tl.constexpr):
    """Return how many scores of a row have an order (`order_of`) of at least `least`."""
    count = 0
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        order_n = order_of(read_scores(score, n, N, True)).to(tl.int64)
        count += tl.sum(((order_n >= least) & (n < N)).to(tl.int32), 0)
    return count


@triton.jit
def split_at(score, last, N, BN: tl.constexpr):
    """Return how many scores of a row are at least `last`, and the best of the others."""
    reached = 0
    below = float("-inf")
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        score_n = read_scores(score, n, N, True)
        reached += tl.sum(((score_n >= last) & (n < N)).to(tl.int32), 0)
        others_n = tl.where((score_n < last) & (n < N), score_n, float("-inf"))
        below = tl.maximum(below, tl.max(others_n, 0))
    return reached, below
