"""How one step moves the centroids and thresholds of several layers at once: a pure function of stacked tensors.

It reads no number back, so a GPU never waits for it, and `torch.compile` makes a few kernels of it.

Shapes: Y layers that share a rule, H routing heads, C clusters, D head size; X is 2 where keys have memberships of
their own, else 1; T all statistics of a layer in one row.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SPLIT = "split"
"""The update of centroids of keys: means of any norm, and clusters without members share those of others."""
SPREAD = 2.0**-10
"""How far beside another such a centroid starts, as a share of each number of it."""


class Rule(NamedTuple):
    """What layers that move together have in common; see `rtx.attention.routing.Centroids` for the words."""

    update: str
    keys: str
    decay: float
    window: int
    length: int
    threshold_rate: float
    quantile: float
    shape_HCD: tuple[int, int, int]


class State(NamedTuple):
    """What moves: float32, and the count of steps int64."""

    centroid_YHCD: Tensor
    threshold_YXHC: Tensor
    steps_Y: Tensor


class Statistics(NamedTuple):
    """What a step has gathered, float64, behind the layers' dimension if there is one.

    `seen_2_3_HC`: of queries and of keys the number of members, and the first two moments of the scores.
    """

    sum_HCD: Tensor
    count_HC: Tensor
    seen_2_3_HC: Tensor
    positions: Tensor
    sequences: Tensor


def statistics_in(total_T: Tensor, shape_HCD: tuple[int, int, int]) -> Statistics:
    """Return the statistics that lie in rows of length T, `[T]` or `[Y, T]`, as views."""
    H, C, D = shape_HCD
    layers = total_T.shape[:-1]
    sums, counts, seen, positions, sequences = total_T.split(statistics_sizes(shape_HCD), dim=-1)
    return Statistics(
        sums.unflatten(-1, (H, C, D)),
        counts.unflatten(-1, (H, C)),
        seen.unflatten(-1, (2, 3, H, C)),
        positions.view(layers),
        sequences.view(layers),
    )


def statistics_sizes(shape_HCD: tuple[int, int, int]) -> list[int]:
    """Return how many numbers of a row of T each of the `Statistics` takes."""
    H, C, D = shape_HCD
    return [H * C * D, H * C, 6 * H * C, 1, 1]


def to_sphere(x_HCD: Tensor) -> Tensor:
    """Return the vectors with norm sqrt(D), the norm of a normalised query."""
    return F.normalize(x_HCD, dim=-1) * math.sqrt(x_HCD.shape[-1])


def moved(rule: Rule, state: State, total_YT: Tensor) -> State:
    """Return the centroids, thresholds and counts of steps after a step.

    A layer that has gathered nothing keeps what it has, and so does a head whose statistics are not all finite: its
    centroids and thresholds would be NaN for good.
    """
    seen = statistics_in(total_YT, rule.shape_HCD)
    gathered_Y = seen.sequences > 0
    finite_YH = seen.sum_HCD.isfinite().all(-1).all(-1) & seen.seen_2_3_HC.isfinite().all(-1).all(1).all(1)
    moves_YH = finite_YH & gathered_Y[:, None]
    old_YHCD = state.centroid_YHCD.double()
    new_YHCD = moved_centroids(rule, old_YHCD, seen)
    centroid_YHCD = torch.where(moves_YH[..., None, None], new_YHCD, old_YHCD).to(state.centroid_YHCD.dtype)
    threshold_YXHC = state.threshold_YXHC
    if rule.threshold_rate:
        threshold_YXHC = moved_thresholds(rule, state, seen, moves_YH)
    return State(centroid_YHCD, threshold_YXHC, state.steps_Y + gathered_Y)


def moved_centroids(rule: Rule, old_YHCD: Tensor, seen: Statistics) -> Tensor:
    """Return where the statistics move all centroids, float64; what a layer without any gets is not to be read."""
    if rule.update == SPLIT:
        return split_centroids(rule, old_YHCD, seen)
    if rule.update == "sum":
        # Halves of the sums of queries and of keys; where these are the same vectors, one sum.
        halves = 2.0 if rule.keys == "separate" else 1.0
        share_Y111 = (halves * seen.sequences)[:, None, None, None]
        return rule.decay * old_YHCD + (1 - rule.decay) * seen.sum_HCD / share_Y111
    moves_YHC1 = seen.count_HC[..., None] > 0
    mean_YHCD = seen.sum_HCD / seen.count_HC[..., None].clamp_min(1)
    if rule.update == "members" and not rule.threshold_rate:  # no threshold falls until members come
        others_YH1D = mean_YHCD.sum(2, keepdim=True) / moves_YHC1.sum(2, keepdim=True).clamp_min(1)
        mean_YHCD = torch.where(moves_YHC1, mean_YHCD, others_YH1D)
        moves_YHC1 = torch.ones_like(moves_YHC1)
    moved_YHCD = to_sphere(rule.decay * old_YHCD + (1 - rule.decay) * mean_YHCD)
    return torch.where(moves_YHC1, moved_YHCD, old_YHCD)


def split_centroids(rule: Rule, old_YHCD: Tensor, seen: Statistics) -> Tensor:
    """Return centroids moved towards the means of their members; those without any start beside the largest clusters.

    The first of them starts beside the largest cluster, the second beside the second largest, and so on.
    """
    count_YHC = seen.count_HC
    has_YHC = count_YHC > 0
    mean_YHCD = seen.sum_HCD / count_YHC[..., None].clamp_min(1)
    moved_YHCD = rule.decay * old_YHCD + (1 - rule.decay) * mean_YHCD
    order_YHC = count_YHC.argsort(dim=-1, descending=True, stable=True)
    filled_YH1 = has_YHC.sum(-1, keepdim=True).clamp_min(1)
    number_YHC = ((~has_YHC).cumsum(-1) - 1).clamp_min(0)
    beside_YHC = order_YHC.gather(-1, number_YHC % filled_YH1)
    D = old_YHCD.shape[-1]
    sign_D = 1 - 2 * (torch.arange(D, device=old_YHCD.device) % 2)
    times_YHC1 = (1 + number_YHC // filled_YH1)[..., None]
    beside_YHCD = moved_YHCD.gather(-2, beside_YHC[..., None].expand(*beside_YHC.shape, D))
    return torch.where(has_YHC[..., None], moved_YHCD, beside_YHCD * (1 + SPREAD * times_YHC1 * sign_D))


def moved_thresholds(rule: Rule, state: State, seen: Statistics, moves_YH: Tensor) -> Tensor:
    """Raise the thresholds of clusters with too many members, lower those of clusters with too few.

    The first step sets them by the scores' mean and deviation, as if these were normal. Thresholds of which no score
    was seen stay.
    """
    old_YXHC = state.threshold_YXHC
    seen_YX3HC = seen.seen_2_3_HC[:, : old_YXHC.shape[1]]
    positions_Y111 = seen.positions[:, None, None, None]
    count_YXHC = seen_YX3HC[:, :, 0]
    mean_YXHC = seen_YX3HC[:, :, 1] / positions_Y111
    square_YXHC = seen_YX3HC[:, :, 2] / positions_Y111
    deviation_YXHC = (square_YXHC - mean_YXHC.square()).clamp(min=0).sqrt()
    wanted_Y111 = rule.window * positions_Y111 / rule.length
    excess_YXHC = (count_YXHC / wanted_Y111 - 1).clamp(max=3)
    new_YXHC = old_YXHC + rule.threshold_rate * excess_YXHC * deviation_YXHC
    if math.isfinite(rule.quantile):
        is_first_Y111 = (state.steps_Y == 0)[:, None, None, None]
        new_YXHC = torch.where(is_first_Y111, mean_YXHC + rule.quantile * deviation_YXHC, new_YXHC)
    scored_YX = (seen_YX3HC[:, :, 1:] != 0).flatten(2).any(-1)
    moves_YXH1 = (scored_YX[..., None] & moves_YH[:, None])[..., None]
    return torch.where(moves_YXH1, new_YXHC, old_YXHC.double()).to(old_YXHC.dtype)
