"""Which scores are equal, and which of equal ones is taken: one rule for all choices by content.

Rounding depends on the shapes of matrices, so equal vectors may get dot products that differ a
little. If such a difference decided, a selection would differ between a forward pass, a stream, a
batch of another size and a kernel. So scores within a *margin* of each other count as equal, which
is a *tie*. Of equal ones the earlier position is taken, or the cluster with the lower number. A
margin is 64 units in the last place of the product of the norms (`tie_margin`).

There are three choices.

- The `count` best of some scores (`best`, `best_places`). The scores within the margin of the
  lowest selected one count as equal to it. Example: the 2 best of 4.9, 3, 5 and 9, with a margin of
  0.2. The highest are 9 and 5. 4.9 counts as equal to 5 and comes earlier, so 9 and 4.9 are taken.
- The cluster that scores a position highest (`highest`, `highest_clusters`): the first cluster
  whose score comes within its margin of the highest.
- The best of scores that arrive one by one: `rtx.attention.routing_topk.PrefixTopK`.

NaN and infinity. To `best`, NaN is lower than every score. To `best_places` it is higher, as to
`torch.topk`; selections by centroids replace it by -inf first. A position with a NaN among its
scores belongs to cluster 0. No score equals an infinite one.

Functions for lists of numbers define the choice; those for tensors compute it.

Shapes: H heads, X of any sequences, C clusters, D head size, N positions, R rows of scores.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rtx.attention.precision import wide_type
from rtx.attention.typed_torch import vector_norm

UNITS = 64
"""A margin in units in the last place. Dot products of equal vectors were observed to differ by a
few units. Up to D = 128 a margin is below 1e-4 standard deviations of the scores."""


def tie_margin(norm: Tensor, other_norm: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return the margin within which dot products count as equal, from the norms of both factors.

    Args:
        dtype: the type of the vectors; products of narrow types are float32.
    """
    wide = wide_type(dtype)
    relative_margin = UNITS * torch.finfo(wide).eps
    return relative_margin * norm.to(wide) * other_norm


def centroid_margin(centroid_HCD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the margins `[H, C]` of centroids' scores of normalised vectors, of norm sqrt(D)."""
    D = centroid_HCD.shape[-1]
    wide = wide_type(dtype)
    norm_HC = vector_norm(centroid_HCD.to(wide), dim=-1)
    norm_of_vectors = math.sqrt(D)
    return tie_margin(norm_HC, norm_of_vectors, wide)


# The choices among lists of numbers, which the rules of patterns call.


def best(score_N: list[float], margin_N: list[float], count: int) -> list[int]:
    """Return the places of the `count` best scores, or of all if there are fewer.

    Args:
        margin_N: for each score, the margin within which others count as equal to it.
    """
    score_N = [nan_to_least(score) for score in score_N]
    places = range(len(score_N))
    by_score = sorted(places, key=lambda n: -score_N[n])
    if len(by_score) <= count:
        return by_score
    last = by_score[count - 1]
    last_score = score_N[last]
    margin = margin_N[last]
    better: list[int] = []
    equal: list[int] = []
    for n, score in enumerate(score_N):
        distance = abs(score - last_score)
        if score > last_score + margin:
            better.append(n)
        elif n == last or distance <= margin:
            equal.append(n)
    best_first = better + equal
    return best_first[:count]


def nan_to_least(score: float) -> float:
    """Return the score, or -inf for NaN."""
    if math.isnan(score):
        return -math.inf
    return score


def highest(score_C: list[float], margin_C: list[float]) -> int:
    """Return the first cluster whose score comes within its margin of the highest."""
    top = max(score_C)
    for c, score in enumerate(score_C):
        if score + margin_C[c] >= top:
            return c
    return 0


# The same choices by tensors.


def highest_clusters(score_XCN: Tensor, margin_XC: Tensor) -> Tensor:
    """Return the cluster that scores each position highest, `[X, N]`."""
    top_X1N = score_XCN.amax(-2, keepdim=True)
    raised_XCN = score_XCN + margin_XC[..., None]
    reaches_XCN = raised_XCN >= top_X1N
    # argmax takes no bool; of equal numbers it returns the first.
    reaches_XCN = reaches_XCN.to(torch.uint8)
    return reaches_XCN.argmax(-2)


def best_places(score: Tensor, count: int, margin: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the places of the `count` best scores along the last dimension, in any order.

    If there are fewer, all places. The CPU waits for a GPU here; `static_selection.best_places`
    does the same in static shapes.

    Args:
        margin: takes places `[..., 1]`, and returns the margins within which other scores count as
            equal to the scores there, in a shape that broadcasts to that of the places.
    """
    N = score.shape[-1]
    if count >= N:
        place_N = torch.arange(N, device=score.device)
        return place_N.expand(score.shape)
    # The count + 1 best, in any order. The lowest of them is the first that is left out, and the
    # second lowest the last that is taken.
    candidates = score.topk(count + 1, dim=-1, sorted=False)
    candidate = candidates.indices
    lowest_two = candidates.values.topk(2, dim=-1, largest=False)
    left_out, last = torch.split(lowest_two.values, 1, dim=-1)
    slot_left_out, slot_last = torch.split(lowest_two.indices, 1, dim=-1)
    last_place = candidate.gather(-1, slot_last)
    last_margin = margin(last_place)
    # The candidate in the final slot takes the slot of the one left out, and the final slot is cut
    # off.
    final_candidate = candidate[..., count:]
    candidate = candidate.scatter(-1, slot_left_out, final_candidate)
    place = candidate[..., :count]
    is_near = left_out >= last - last_margin
    is_tied = is_near & left_out.isfinite() & last.isfinite()
    if bool(is_tied.any()):
        take_earliest(place, is_tied[..., 0], score, last, last_margin.expand(last.shape))
    return place


def take_earliest(
    place: Tensor,
    is_tied: Tensor,
    score: Tensor,
    last: Tensor,
    last_margin: Tensor,
) -> None:
    """Set the places of rows with ties to those of the best scores, of equal ones the earliest.

    Args:
        is_tied: the rows with ties.
        last, last_margin: the lowest score of each row that is taken, and its margin, `[..., 1]`.
    """
    count = place.shape[-1]
    place[is_tied] = earliest(score[is_tied], last[is_tied], last_margin[is_tied], count)


def earliest(score_RN: Tensor, last_R1: Tensor, margin_R1: Tensor, count: int) -> Tensor:
    """Return the places `[R, count]` of the best scores, of equal ones the earliest.

    Args:
        last_R1: the lowest score that is taken.
        margin_R1: the margin within which scores count as equal to it.
    """
    # Every comparison with NaN is false, so NaN counts as better.
    is_better_RN = ~(score_RN <= last_R1 + margin_R1)
    is_near_RN = score_RN >= last_R1 - margin_R1
    is_equal_RN = is_near_RN & ~is_better_RN
    # Sums of int64 take ten times as long on a CPU.
    better_R1 = is_better_RN.sum(-1, keepdim=True, dtype=torch.int32)
    number_RN = is_equal_RN.cumsum(-1, dtype=torch.int32)
    is_among_first_RN = number_RN <= count - better_R1
    is_taken_RN = is_better_RN | (is_equal_RN & is_among_first_RN)
    place_M = is_taken_RN.nonzero()[:, 1]
    rows = len(score_RN)
    return place_M.view(rows, count)
