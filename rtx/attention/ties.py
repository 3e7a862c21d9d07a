"""Which scores are equal, and which of equal ones is taken: one rule for all choices by content.

Rounding depends on the shapes of matrices, so equal vectors may get dot products that differ a
little. If such a difference decided, then a pass, a stream, a batch of another size and a kernel
would choose differently. So scores within a *margin* of each other count as equal, which is a
*tie*, and of equal ones the earlier position is taken, or the first cluster. A margin is 64 units
in the last place of the product of the norms (`tie_margin`).

There are three choices.

- The `count` best of scores that are all there (`best`, `best_places`). Equal are the scores within
  the margin of the lowest one taken. Example: the 2 best of 4.9, 3, 5 and 9, with a margin of 0.2.
  The highest are 9 and 5. 4.9 equals 5 and comes earlier, so 9 and 4.9 are taken.
- The cluster that scores a position highest (`highest`, `highest_clusters`): the first cluster
  whose score comes within its margin of the highest.
- The best of scores that come one after the other: `rtx.attention.members.PrefixTopK`.

NaN and infinity. To `best`, NaN is lower than every score. To `best_places` it is higher, as to
`torch.topk`; selections by centroids replace it by -inf first. A position with a NaN among its
scores belongs to cluster 0. No score equals an infinite one.

Functions for lists of numbers define the choice; those for tensors compute it.

Shapes: H heads, C clusters, D head size, N positions, X any dimensions.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

UNITS = 64
"""A margin in units in the last place. Dot products that should be equal, of vectors that came out
of matrix products, were seen to differ by a few units. Up to D = 128 a margin is below 1e-4 of the
scores' deviation."""


def tie_margin(
    norm: Tensor,
    other_norm: Tensor | float,
    dtype: torch.dtype,
) -> Tensor:
    """Return within which margin dot products are equal, by the norms of the two factors.

    Args:
        dtype: the type of the vectors; products of narrow types are float32.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return UNITS * torch.finfo(wide).eps * norm.to(wide) * other_norm


def centroid_margin(centroid_HCD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the margins `[H, C]` of centroids' scores of normalised vectors, of norm sqrt(D)."""
    wide = torch.promote_types(dtype, torch.float32)
    norm_HC = centroid_HCD.to(wide).norm(dim=-1)
    return tie_margin(norm_HC, math.sqrt(centroid_HCD.shape[-1]), wide)


# The choices by lists of numbers, for the rules of patterns.


def best(score_N: list[float], margin_N: list[float], count: int) -> list[int]:
    """Return the places of the `count` best scores, or of all if there are fewer.

    Args:
        margin_N: within which margin of each score others are equal to it.
    """
    sound_N = [-math.inf if math.isnan(score) else score for score in score_N]
    by_score = sorted(range(len(sound_N)), key=lambda place: -sound_N[place])
    if len(by_score) <= count:
        return by_score
    last = by_score[count - 1]
    better = []
    equal = []
    for place, score in enumerate(sound_N):
        if score > sound_N[last] + margin_N[last]:
            better.append(place)
        elif place == last or abs(score - sound_N[last]) <= margin_N[last]:
            equal.append(place)
    return (better + equal)[:count]


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
    reaches_XCN = score_XCN + margin_XC[..., None] >= top_X1N
    return reaches_XCN.to(torch.uint8).argmax(-2)


def best_places(
    score: Tensor,
    count: int,
    margin: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the places of the `count` best scores along the last dimension, in any order.

    All places, if there are fewer. The CPU waits for a GPU here; in static shapes there is
    `static_selection.best_places`.

    Args:
        margin: takes places `[..., 1]` and returns within which margins other scores are equal to
            the scores there, in a shape that broadcasts to that of the places.
    """
    N = score.shape[-1]
    if count >= N:
        return torch.arange(N, device=score.device).expand(score.shape)
    best_score, place = score.topk(count + 1, dim=-1, sorted=False)
    # The two lowest of the best: the first score that is left out, then the last one taken.
    edge, edge_slot = best_score.topk(2, dim=-1, largest=False)
    left_out, last = edge.split(1, dim=-1)
    slot_left_out, slot_last = edge_slot.split(1, dim=-1)
    last_margin = margin(place.gather(-1, slot_last))
    # The place in the last slot moves into the slot of the one left out.
    place = place.scatter(-1, slot_left_out, place[..., count:])[..., :count]
    is_tied = (left_out >= last - last_margin) & left_out.isfinite() & last.isfinite()
    if bool(is_tied.any()):
        row = is_tied[..., 0]
        margin_X1 = last_margin.expand(last.shape)[row]
        place[row] = earliest(score[row], last[row], margin_X1, count)
    return place


def earliest(
    score_XN: Tensor,
    last_X1: Tensor,
    margin_X1: Tensor,
    count: int,
) -> Tensor:
    """Return the places `[X, count]` of the best scores, of equal ones the earliest.

    Args:
        last_X1: the lowest score that is taken.
        margin_X1: within which margin of that scores are equal to it.
    """
    # NaN is not at most any number, so it is better.
    better_XN = ~(score_XN <= last_X1 + margin_X1)
    equal_XN = (score_XN >= last_X1 - margin_X1) & ~better_XN
    # Sums of int64 take ten times as long on a CPU.
    room_X1 = count - better_XN.sum(-1, keepdim=True, dtype=torch.int32)
    turn_XN = equal_XN.cumsum(-1, dtype=torch.int32)
    takes_XN = better_XN | (equal_XN & (turn_XN <= room_X1))
    return takes_XN.nonzero()[:, 1].view(len(score_XN), count)
