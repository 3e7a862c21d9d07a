"""Which scores are equal, and which of equals is taken: one rule for every choice by content.

Rounding depends on the shapes of matrices, so equal vectors can get slightly different dot products. Scores within a
margin therefore count as tied, and a tie goes to the earlier position, of clusters to the first. A pass, a stream, a
batch of another size and a kernel then choose alike. Where something is chosen from scores that are
all known, equal means equal to the last one taken; `PrefixTopK` of selection.py has the rule for scores that arrive one
after the other.

Shapes: H heads, C clusters, D head size, X any dimensions, N positions.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def tie_margin(norm: Tensor, other_norm: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return the largest rounding difference between dot products that should be equal, by the norms of the factors.

    Such dot products, of vectors that came out of matrix products, were seen to differ by a few units in the last place
    of `norm * other_norm`. The margin is 64 units: far above that, and up to D = 128 below 1e-4 of the scores'
    deviation.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return 64 * torch.finfo(wide).eps * norm.to(wide) * other_norm


def centroid_margin(centroid_HCD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the margins `[H, C]` of the centroids' scores of normalised vectors, which have norm sqrt(D)."""
    wide = torch.promote_types(dtype, torch.float32)
    return tie_margin(centroid_HCD.to(wide).norm(dim=-1), math.sqrt(centroid_HCD.shape[-1]), wide)


def highest(score_XCN: Tensor, margin_XC: Tensor) -> Tensor:
    """Return the cluster `[X, N]` that scores each position highest: the first of tied ones, 0 where a score is NaN."""
    best_X1N = score_XCN.amax(-2, keepdim=True)
    return (score_XCN + margin_XC[..., None] >= best_X1N).to(torch.uint8).argmax(-2)


def best_places(score: Tensor, count: int, margin: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the places of the `count` best along the last dimension (all of a shorter one), in any order.

    Scores within the margin of the lowest one taken count as equal to it; of these the earliest are taken.

    Args:
        margin: takes places `[..., 1]` and returns the margins of their scores, in a shape that broadcasts to it.
    """
    N = score.shape[-1]
    if count >= N:
        return torch.arange(N, device=score.device).expand(score.shape)
    value, at = score.topk(count + 1, dim=-1, sorted=False)
    # The best that is not taken, and the last that is. NaN is the best in both calls.
    worst, slot = value.topk(2, dim=-1, largest=False)
    left_out, last = worst.split(1, dim=-1)
    slot_left_out, slot_last = slot.split(1, dim=-1)
    margins = margin(at.gather(-1, slot_last))
    # Overwrite the place that is left out with the last of the list, and drop that.
    at = at.scatter(-1, slot_left_out, at[..., count:])[..., :count]
    # Scores that are not finite, such as hidden ones (-inf), are never tied.
    tied = (left_out >= last - margins) & left_out.isfinite() & last.isfinite()
    if bool(tied.any()):
        tied = tied[..., 0]
        at[tied] = earliest(score[tied], last[tied], margins.expand(last.shape)[tied], count)
    return at


def earliest(score_XN: Tensor, last_X1: Tensor, margin_X1: Tensor, count: int) -> Tensor:
    """Return the places `[X, count]` of all scores above the lowest one taken, then of the earliest tied with it."""
    better_XN = ~(score_XN <= last_X1 + margin_X1)  # NaN, too: it is the best
    equal_XN = (score_XN >= last_X1 - margin_X1) & ~better_XN
    room_X1 = count - better_XN.sum(-1, keepdim=True, dtype=torch.int32)  # int64 takes ten times as long on a CPU
    takes_XN = better_XN | (equal_XN & (equal_XN.cumsum(-1, dtype=torch.int32) <= room_X1))
    return takes_XN.nonzero()[:, 1].view(len(score_XN), count)
