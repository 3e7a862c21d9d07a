"""Triton kernels that choose the best scores of rows; `triton_selection.py` launches them.

`earliest_kernel` works on what torch.topk found, and lets the earliest of tied scores win.

For long rows torch.topk reads the scores some 18 times. Four kernels read them about twice:

1. `floor_kernel`: a sample of the row tells a score, the *floor*, that a few more than W scores
   reach. These scores are the *candidates*, few enough for the registers of one program.
2. `mark_kernel` marks the candidates: bit i of word w says whether score 32 w + i is one.
3. `list_kernel` lists the places of the marks.
4. `top_kernel` finds the W best candidates by bisection. If the sample misled, so that there are
   too few or too many candidates, it searches the row itself (`search`).

Words: of the scores of a row, the W best are *taken*. The worst of these is the *last* one taken.
The best of the others is the first one *left out*. Scores within a margin of the last one taken are
tied with it, and of these the earliest are taken; `near` is that margin, or 0 where the first one
left out is not tied, so that ties change nothing. Better scores are taken anyway.

Shapes: X rows, N scores of a row, K = W + 1 best scores, ROOM slots for candidates. Lower-case
letters are the axes of a tile in registers: n scores of a row, w words of marks, i bits of a word,
s scores of a sample, k candidates or best scores.
"""

import triton
import triton.language as tl

from rtx.attention.engine.selection_kernels import ones_in


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
def floor_kernel(score, floor, N, rank, SAMPLE: tl.constexpr):
    """Write the `rank`-th best of a sample of each row: floor [X].

    The sample are up to SAMPLE scores at equal distances.
    """
    row = tl.program_id(0).to(tl.int64)
    step = tl.cdiv(N, SAMPLE)
    sample_s = read_scores(score + row * N, tl.arange(0, SAMPLE) * step, N, True)
    order_s = order_of(sample_s).to(tl.int64)
    lowest = tl.full([], -(1 << 31), tl.int64)
    beyond = tl.full([], 1 << 31, tl.int64)
    order = order_reached(order_s, rank, lowest, beyond)
    tl.store(floor + row, tl.min(tl.where(order_s >= order, sample_s, float("inf")), 0))


@triton.jit
def mark_kernel(score, floor, mark, N, BW: tl.constexpr):
    """Mark the scores that reach the floor of their row: mark [X, ceil(N / 32)].

    A program is (row, block of BW words).
    """
    row = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    i = tl.arange(0, 32)
    n_wi = w[:, None] * 32 + i[None, :]
    score_wi = read_scores(score + row * N, n_wi, N, True)
    reaches_wi = (score_wi >= tl.load(floor + row)) & (n_wi < N)
    bit_i = 1 << i
    words = tl.cdiv(N, 32)
    tl.store(mark + row * words + w, tl.sum(tl.where(reaches_wi, bit_i[None, :], 0), 1), w < words)


@triton.jit
def list_kernel(mark, at, count, N, ROOM: tl.constexpr, BW: tl.constexpr):
    """List the candidates of a row.

    Writes:
        at [X, ROOM]: their places, ascending; as many as have room.
        count [X]: their number.
    """
    row = tl.program_id(0).to(tl.int64)
    words = tl.cdiv(N, 32)
    mark += row * words
    at += row * ROOM
    done = 0
    for begin in range(0, words, BW):
        w = begin + tl.arange(0, BW)
        word_w = tl.load(mark + w, w < words, 0)
        ones_w = ones_in(word_w)
        slot_w = done + tl.cumsum(ones_w, 0) - ones_w
        done += tl.sum(ones_w, 0)
        while tl.max((word_w != 0).to(tl.int32), 0) > 0:
            # Take the lowest bit of each word away, until none is left.
            others_w = word_w & (word_w - 1)
            n_w = w * 32 + ones_in((word_w ^ others_w) - 1)
            tl.store(at + slot_w, n_w, (word_w != 0) & (slot_w < ROOM))
            slot_w += 1
            word_w = others_w
    tl.store(count + row, done)


@triton.jit
def top_kernel(
    score, at, floor, count, margin, taken, N, W, ROOM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Write the places of the W best scores of a row, ascending: taken [X, W].

    Args:
        floor, at, count: see `floor_kernel` and `list_kernel`.
        margin [X]: within which scores are tied with the last one taken.
    """
    row = tl.program_id(0).to(tl.int64)
    score += row * N
    taken += row * W
    least = tl.load(floor + row)
    reached = tl.load(count + row)
    k = tl.arange(0, ROOM)
    inside_k = k < tl.minimum(reached, ROOM)
    at_k = tl.load(at + row * ROOM + k, inside_k, N)
    value_k = read_scores(score, at_k, N, True)
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
    if (reached > W) & (reached <= ROOM) & (last - near >= least):
        better_k, tied_k = compare(value_k, last, last - near, last + near)
        ties = W - tl.sum((inside_k & better_k).to(tl.int32), 0)
        is_tied_k = (inside_k & tied_k).to(tl.int32)
        takes_k = (inside_k & better_k) | ((is_tied_k > 0) & (tl.cumsum(is_tied_k, 0) <= ties))
        tl.store(taken + tl.cumsum(takes_k.to(tl.int32), 0) - 1, at_k, takes_k)
    else:
        search(score, tl.load(margin + row), taken, least, reached, N, W, BN)


@triton.jit
def search(score, margin, taken, least, reached, N, W, BN: tl.constexpr):
    """Write the places of the W best scores of a row by reading all of it some 32 times.

    Args:
        least, reached: `reached` is the number of scores that are at least `least`.
    """
    # The order of the last one taken is in [low, high).
    order = order_of(least).to(tl.int64)
    low = tl.where(reached >= W, order, -(1 << 31))
    high = tl.where(reached >= W, 1 << 31, order)
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
