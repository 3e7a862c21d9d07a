"""Triton kernels that choose the best scores of rows; `triton_selection.py` launches them.

`earliest_kernel` works on what torch.topk returns, and lets the earliest of tied scores win.

For long rows torch.topk reads the scores some 18 times. Four kernels read them about twice:

1. `floor_kernel`: a sample of the row tells a score, the *floor*, that a few more than W scores
   reach. These scores are the *candidates*, few enough for the registers of one program.
2. `mark_kernel` marks the candidates: bit i of word w says whether score 32 w + i is one.
3. `list_kernel` lists the places of the marks.
4. `top_kernel` finds the W best candidates by bisection. If the sample misled, so that there are
   too few or too many candidates, it searches the row itself (`search_row`).

Words: of the scores of a row, the W best are *taken*. The worst of these is the *last* one taken.
The best of the others is the first one *left out*. Scores within a margin of the last one taken are
tied with it, and of these the earliest are taken; `near` is that margin, or 0 if the first one left
out is not tied, so that ties change nothing. Better scores are taken anyway.

Scores are float32. Bisection is by their order as integers, so it is exact.

Shapes: X rows, N scores of a row, K = W + 1 best scores, CAPACITY slots for candidates. Lower-case
letters are the axes of a tile in registers: n scores of a row, w words of marks, i bits of a word,
s scores of a sample, k candidates or best scores. `valid_n` is False after the last score of a row,
and so on. The grid of each kernel is (rows,), of `mark_kernel` (rows, blocks of words).
"""

# pyright: basic
# Triton compiles what pyright takes for Python: its functions have no types for a checker.

import triton
import triton.language as tl

from rtx.attention.engine.selection_kernels import any_bit, popcount, take_lowest_bit

LOWEST = tl.constexpr(-(1 << 31))
"""The least int32 number: no score has a lower order, see `order_of`."""
BEYOND = tl.constexpr(1 << 31)
"""Above every int32 number: all scores have a lower order."""


@triton.jit
def count_of(is_true):
    """Return how many entries are True."""
    return tl.sum(is_true.to(tl.int32), 0)


@triton.jit
def better_and_tied(score_n, last, near):
    """Return which scores are better than the last one taken, and which are tied with it.

    Tied are those from last - near to last + near. NaN is better than every score; if the last one
    taken is NaN, no score is better, and all NaN are tied.
    """
    floor = last - near
    ceiling = last + near
    is_nan_n = score_n != score_n
    last_n = tl.broadcast_to(last, score_n.shape)
    is_better_n = (last_n == last_n) & ((score_n > ceiling) | is_nan_n)
    is_within_n = (score_n >= floor) & (score_n <= ceiling)
    is_tied_n = is_within_n | ((last_n != last_n) & is_nan_n)
    return is_better_n, is_tied_n


@triton.jit
def margin_near(last, left_out, margin):
    """Return the margin if the first score left out is tied with the last one taken, else 0.

    Infinities are never tied. Neither is NaN.
    """
    is_finite = (left_out > float("-inf")) & (last < float("inf"))
    margin = tl.where(is_finite, margin, 0.0)
    return tl.where(left_out >= last - margin, margin, 0.0)


@triton.jit
def load_scores(score, n, N, NAN_IS_WORST: tl.constexpr):
    """Return scores of a row; -inf after its end, and for NaN with NAN_IS_WORST."""
    score_n = tl.load(score + n, n < N, float("-inf"))
    if NAN_IS_WORST:
        score_n = tl.where(score_n == score_n, score_n, float("-inf"))
    return score_n


@triton.jit
def store_earliest(score, taken, last, near, ties, N, BN: tl.constexpr, NAN_IS_WORST: tl.constexpr):
    """Write the places of a row's scores that are taken, ascending.

    Args:
        taken: the output, places.
        ties: how many scores are taken of those tied with the last one; the earliest are.
    """
    written = 0
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        valid_n = n < N
        score_n = load_scores(score, n, N, NAN_IS_WORST)
        is_better_n, is_tied_n = better_and_tied(score_n, last, near)
        tied_n = (valid_n & is_tied_n).to(tl.int32)
        is_early_n = (tied_n > 0) & (tl.cumsum(tied_n, 0) <= ties)
        is_taken_n = (valid_n & is_better_n) | is_early_n
        taken_n = is_taken_n.to(tl.int32)
        tl.store(taken + written + tl.cumsum(taken_n, 0) - 1, n, is_taken_n)
        ties -= tl.sum(tied_n, 0)
        written += tl.sum(taken_n, 0)


@triton.jit
def earliest_kernel(
    # Inputs
    score,  # [X, N]
    best,  # [X, K] the K best scores, in any order
    edge,  # [X, 2] the two lowest of these: the first one left out, and the last one taken
    margin,  # [X] within which scores are tied with the last one taken
    # Output
    taken,  # [X, K - 1] places
    # Sizes
    N,
    K,
    # Constant
    BN: tl.constexpr,
):
    """Write the places of the K - 1 best scores of a row, ascending.

    A program has one row, and reads it BN scores at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(edge + 2 * row + 1)
    near = margin_near(last, tl.load(edge + 2 * row), tl.load(margin + row))
    ties = K - 1
    for begin in range(0, K, BN):
        k = begin + tl.arange(0, BN)
        best_k = tl.load(best + row * K + k, k < K, 0.0)
        is_better_k, _ = better_and_tied(best_k, last, near)
        ties -= count_of((k < K) & is_better_k)
    store_earliest(score + row * N, taken + row * (K - 1), last, near, ties, N, BN, False)


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
def order_reached(order_s, count):
    """Return the greatest number that `count` of the orders reach; LOWEST if there is none.

    Found by bisection. Numbers are int64, as BEYOND is 1 above the greatest int32.
    """
    low = tl.full([], LOWEST, tl.int64)
    high = tl.full([], BEYOND, tl.int64)
    while low + 1 < high:
        middle = (low + high) >> 1
        reached = count_of(order_s >= middle)
        low = tl.where(reached >= count, middle, low)
        high = tl.where(reached >= count, high, middle)
    return low


@triton.jit
def floor_kernel(
    # Input
    score,  # [X, N]
    # Output
    floor,  # [X]
    # Sizes
    N,
    rank,
    # Constant
    SAMPLE: tl.constexpr,
):
    """Write the score that has this rank, 1 for the best, in a sample of each row.

    A program has one row. Its sample is up to SAMPLE scores at equal distances.
    """
    row = tl.program_id(0).to(tl.int64)
    step = tl.cdiv(N, SAMPLE)
    sample_s = load_scores(score + row * N, tl.arange(0, SAMPLE) * step, N, True)
    order_s = order_of(sample_s).to(tl.int64)
    order = order_reached(order_s, rank)
    reached_s = tl.where(order_s >= order, sample_s, float("inf"))
    tl.store(floor + row, tl.min(reached_s, 0))


@triton.jit
def mark_kernel(
    # Inputs
    score,  # [X, N]
    floor,  # [X]
    # Output
    mark,  # [X, ceil(N / 32)]
    # Size
    N,
    # Constant
    BW: tl.constexpr,
):
    """Mark the scores that reach the floor of their row. A program has BW words of a row."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    i = tl.arange(0, 32)
    n_wi = w[:, None] * 32 + i[None, :]
    score_wi = load_scores(score + row * N, n_wi, N, True)
    reaches_wi = (score_wi >= tl.load(floor + row)) & (n_wi < N)
    bit_i = 1 << i
    word_w = tl.sum(tl.where(reaches_wi, bit_i[None, :], 0), 1)
    words = tl.cdiv(N, 32)
    tl.store(mark + row * words + w, word_w, w < words)


@triton.jit
def list_kernel(
    # Input
    mark,  # [X, ceil(N / 32)]
    # Outputs
    place,  # [X, CAPACITY] the places of candidates, ascending; as many as there are slots
    count,  # [X] the number of candidates
    # Size
    N,
    # Constants
    CAPACITY: tl.constexpr,
    BW: tl.constexpr,
):
    """List the candidates of a row. A program has one row, and reads it BW words at a time."""
    row = tl.program_id(0).to(tl.int64)
    words = tl.cdiv(N, 32)
    mark += row * words
    place += row * CAPACITY
    listed = 0
    for begin in range(0, words, BW):
        w = begin + tl.arange(0, BW)
        word_w = tl.load(mark + w, w < words, 0)
        ones_w = popcount(word_w)
        slot_w = listed + tl.cumsum(ones_w, 0) - ones_w
        listed += tl.sum(ones_w, 0)
        while any_bit(word_w):
            fits_w = (word_w != 0) & (slot_w < CAPACITY)
            bit_w, word_w = take_lowest_bit(word_w)
            tl.store(place + slot_w, w * 32 + bit_w, fits_w)
            slot_w += 1
    tl.store(count + row, listed)


@triton.jit
def last_and_near(value_k, valid_k, margin, W):
    """Return the last score taken of the candidates, and `near`, see the module's words."""
    order_k = tl.where(valid_k, order_of(value_k).to(tl.int64), LOWEST)
    order = order_reached(order_k, W)
    last = tl.min(tl.where(order_k >= order, value_k, float("inf")), 0)
    # If more than W candidates reach the last one taken, one that equals it is left out.
    left_out = tl.max(tl.where(valid_k & (value_k < last), value_k, float("-inf")), 0)
    reached = count_of(valid_k & (value_k >= last))
    left_out = tl.where(reached > W, last, left_out)
    return last, margin_near(last, left_out, margin)


@triton.jit
def top_kernel(
    # Inputs
    score,  # [X, N]
    place,  # see `list_kernel`
    floor,  # [X]
    count,  # see `list_kernel`
    margin,  # [X] within which scores are tied with the last one taken
    # Output
    taken,  # [X, W] places
    # Sizes
    N,
    W,
    # Constants
    CAPACITY: tl.constexpr,
    BN: tl.constexpr,
):
    """Write the places of the W best scores of a row, ascending.

    A program has one row, and all of its candidates in registers.
    """
    row = tl.program_id(0).to(tl.int64)
    score += row * N
    taken += row * W
    least = tl.load(floor + row)
    candidates = tl.load(count + row)
    k = tl.arange(0, CAPACITY)
    valid_k = k < tl.minimum(candidates, CAPACITY)
    place_k = tl.load(place + row * CAPACITY + k, valid_k, N)
    value_k = load_scores(score, place_k, N, True)
    last, near = last_and_near(value_k, valid_k, tl.load(margin + row), W)
    # The candidates decide if the W best and the first one left out are among them, if all of them
    # are in their slots, and if every score tied with the last one taken is a candidate.
    if (candidates > W) & (candidates <= CAPACITY) & (last - near >= least):
        is_better_k, is_tied_k = better_and_tied(value_k, last, near)
        is_better_k = valid_k & is_better_k
        ties = W - count_of(is_better_k)
        tied_k = (valid_k & is_tied_k).to(tl.int32)
        is_taken_k = is_better_k | ((tied_k > 0) & (tl.cumsum(tied_k, 0) <= ties))
        tl.store(taken + tl.cumsum(is_taken_k.to(tl.int32), 0) - 1, place_k, is_taken_k)
    else:
        search_row(score, tl.load(margin + row), taken, least, candidates, N, W, BN)


@triton.jit
def search_row(score, margin, taken, least, reached, N, W, BN: tl.constexpr):
    """Write the places of the W best scores of a row by reading all of it some 32 times.

    Args:
        least, reached: `reached` is the number of scores that are at least `least`.
    """
    # The order of the last one taken is in [low, high).
    order = order_of(least).to(tl.int64)
    low = tl.where(reached >= W, order, LOWEST)
    high = tl.where(reached >= W, BEYOND, order)
    while low + 1 < high:
        middle = (low + high) >> 1
        is_reached = count_of_orders(score, middle, N, BN) >= W
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    last = score_of(low.to(tl.int32))
    reached, best_below = split_at(score, last, N, BN)
    left_out = tl.where(reached > W, last, best_below)
    near = margin_near(last, left_out, margin)
    better = 0
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        score_n = load_scores(score, n, N, True)
        better += count_of((score_n > last + near) & (n < N))
    store_earliest(score, taken, last, near, W - better, N, BN, True)


@triton.jit
def count_of_orders(score, least, N, BN: tl.constexpr):
    """Return how many scores of a row have an order (`order_of`) of at least `least`."""
    count = 0
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        order_n = order_of(load_scores(score, n, N, True)).to(tl.int64)
        count += count_of((order_n >= least) & (n < N))
    return count


@triton.jit
def split_at(score, last, N, BN: tl.constexpr):
    """Return how many scores of a row are at least `last`, and the best of the others."""
    reached = 0
    best_below = float("-inf")
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        score_n = load_scores(score, n, N, True)
        reached += count_of((score_n >= last) & (n < N))
        below_n = tl.where((score_n < last) & (n < N), score_n, float("-inf"))
        best_below = tl.maximum(best_below, tl.max(below_n, 0))
    return reached, best_below
