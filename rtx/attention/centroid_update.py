"""How one optimizer step moves centroids and thresholds: a pure function of stacked tensors.

Layers with the same rule are stacked and move together. `moved` copies no number to the CPU, and
`torch.compile` fuses it into a few kernels.

A centroid c moves towards the vectors that the step gathered for it. Their sum is s, and their
number is n:

    update="members", "nearest":   c <- to_sphere(decay c + (1 - decay) s / n)
    update="sum" (Algorithm 1):    c <- decay c + (1 - decay) s / (number of sequences)
    update="split" (of keys):      c <- decay c + (1 - decay) s / n; if n = 0, c restarts elsewhere

A cluster's threshold t moves so that the cluster gets `window` of `length` positions:

    t <- t + threshold_rate min(members / wanted - 1, MAX_EXCESS) deviation

where wanted = positions * window / length, and deviation is the standard deviation of the scores of
all positions with the centroid, members or not.

Example: window 256 of length 8,192, two sequences of 8,192 positions. A cluster is to have
16,384 * 256 / 8,192 = 512 members in the batch. It has 768, and the standard deviation of its
scores is 8. At a rate of 0.01 its threshold rises by 0.01 * (768 / 512 - 1) * 8 = 0.04.

Shapes: Y layers with the same rule, H heads, C clusters, D head size; V roles with thresholds: 2 if
queries and keys have separate memberships, else 1, or 0 without thresholds; Z numbers in a layer's
row of statistics.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_EXCESS = 3.0
"""The upper limit of members / wanted - 1, which limits how fast a threshold rises."""
SPLIT = "split"
"""The update of centroids of keys, see `split_centroids`."""
SPREAD = 2.0**-10
"""The distance at which such a centroid restarts from another one, relative to each component."""


class Rule(NamedTuple):
    """The options of layers that move together; `centroids.Centroids` explains them."""

    update: str
    """"members", "nearest", "sum" or "split"."""
    keys: str
    """"shared", "separate" or "projected"."""
    decay: float
    window: int
    length: int
    """A cluster is to hold `window` of `length` positions."""
    threshold_rate: float
    """0: thresholds do not move."""
    quantile: float
    """The value that a standard normal variable exceeds with probability window / length.

    -inf if that is 1.
    """
    shape_HCD: tuple[int, int, int]


class State(NamedTuple):
    """The tensors that a step changes."""

    centroid_YHCD: Tensor
    """float32."""
    threshold_YVHC: Tensor
    """float32."""
    steps_Y: Tensor
    """The number of steps that have changed each layer, int64."""


class Statistics(NamedTuple):
    """The statistics of the forward passes of a step, in float64.

    Those of a stack of layers have Y as their first dimension, which the names below leave out.
    """

    sum_HCD: Tensor
    """The sum of the vectors that each centroid moves towards, over all roles."""
    count_HC: Tensor
    """The number of these vectors."""
    role_sums_2_3_HC: Tensor
    """For each role (queries, keys) and cluster three sums: the number of members, the sum of the
    scores of all positions, and the sum of the squares of these scores.

    The latter two are 0 if members are not selected by thresholds. Members may be other vectors
    than those that the centroid moves towards.
    """
    positions: Tensor
    """The number of positions of all sequences."""
    sequences: Tensor
    """The number of sequences."""


def statistics_in(total_Z: Tensor, shape_HCD: tuple[int, int, int]) -> Statistics:
    """Return the statistics as views of one vector `[Z]`, or of one vector a layer `[Y, Z]`."""
    H, C, D = shape_HCD
    layers = total_Z.shape[:-1]
    sizes = statistics_sizes(shape_HCD)
    fields = total_Z.split(sizes, dim=-1)
    sums, counts, scores, positions, sequences = fields
    return Statistics(
        sum_HCD=sums.unflatten(-1, (H, C, D)),
        count_HC=counts.unflatten(-1, (H, C)),
        role_sums_2_3_HC=scores.unflatten(-1, (2, 3, H, C)),
        positions=positions.view(layers),
        sequences=sequences.view(layers),
    )


def statistics_sizes(shape_HCD: tuple[int, int, int]) -> list[int]:
    """Return how many numbers each field of `Statistics` has; their sum is Z."""
    H, C, D = shape_HCD
    clusters = H * C
    sums = clusters * D
    scores = 2 * 3 * clusters
    return [sums, clusters, scores, 1, 1]


def to_sphere(x_HCD: Tensor) -> Tensor:
    """Return the vectors scaled to norm sqrt(D), the norm of a normalised query."""
    D = x_HCD.shape[-1]
    unit_HCD = F.normalize(x_HCD, dim=-1)
    return unit_HCD * math.sqrt(D)


def moved(rule: Rule, state: State, total_YZ: Tensor) -> State:
    """Return the centroids, thresholds and numbers of steps after a step.

    A layer without statistics keeps its state. A head with a NaN or infinity in its statistics
    keeps its centroids and thresholds, because NaN would stay in the running means for ever.

    Args:
        total_YZ: the statistics of each layer, see `statistics_in`.
    """
    statistics = statistics_in(total_YZ, rule.shape_HCD)
    gathered_Y = statistics.sequences > 0
    moves_YH = gathered_Y[:, None] & all_finite(statistics)
    old_YHCD = state.centroid_YHCD.double()
    new_YHCD = moved_centroids(rule, old_YHCD, statistics)
    moves_YH11 = moves_YH[..., None, None]
    centroid_YHCD = torch.where(moves_YH11, new_YHCD, old_YHCD)
    threshold_YVHC = state.threshold_YVHC
    if rule.threshold_rate:
        threshold_YVHC = moved_thresholds(rule, state, statistics, moves_YH)
    return State(
        centroid_YHCD=centroid_YHCD.to(state.centroid_YHCD.dtype),
        threshold_YVHC=threshold_YVHC,
        steps_Y=state.steps_Y + gathered_Y,
    )


def all_finite(statistics: Statistics) -> Tensor:
    """Return whether the sums of a head are all finite, `[Y, H]`."""
    are_vectors_finite_YHC = statistics.sum_HCD.isfinite().all(-1)
    are_sums_finite_Y2HC = statistics.role_sums_2_3_HC.isfinite().all(2)
    are_sums_finite_YHC = are_sums_finite_Y2HC.all(1)
    all_YHC = are_vectors_finite_YHC & are_sums_finite_YHC
    return all_YHC.all(-1)


def moved_centroids(rule: Rule, old_YHCD: Tensor, statistics: Statistics) -> Tensor:
    """Return the centroids after a step, float64.

    Those of layers without statistics may be NaN (0 / 0 sequences); `moved` does not take them.
    """
    if rule.update == SPLIT:
        return split_centroids(rule, old_YHCD, statistics)
    if rule.update == "sum":
        return moved_by_sums(rule, old_YHCD, statistics)
    mean_YHCD = means_of_clusters(statistics)
    has_mean_YHC1 = statistics.count_HC[..., None] > 0
    if rule.update == "members" and not rule.threshold_rate:
        # A centroid without members might never get any, as its threshold does not fall. So it
        # moves towards the mean of the other clusters' means. If no cluster of the head has
        # members, that mean is 0, and the centroid keeps its direction.
        count_YH11 = has_mean_YHC1.sum(2, keepdim=True)
        sum_YH1D = mean_YHCD.sum(2, keepdim=True)
        others_YH1D = sum_YH1D / count_YH11.clamp_min(1)
        mean_YHCD = torch.where(has_mean_YHC1, mean_YHCD, others_YH1D)
        return to_sphere(blended(rule, old_YHCD, mean_YHCD))
    new_YHCD = to_sphere(blended(rule, old_YHCD, mean_YHCD))
    return torch.where(has_mean_YHC1, new_YHCD, old_YHCD)


def means_of_clusters(statistics: Statistics) -> Tensor:
    """Return the mean of the vectors of each centroid, `[Y, H, C, D]`; 0 if there are none."""
    count_YHC1 = statistics.count_HC[..., None]
    return statistics.sum_HCD / count_YHC1.clamp_min(1)


def blended(rule: Rule, old_YHCD: Tensor, target_YHCD: Tensor) -> Tensor:
    """Return decay * old + (1 - decay) * target."""
    old_part_YHCD = rule.decay * old_YHCD
    return old_part_YHCD + (1 - rule.decay) * target_YHCD


def moved_by_sums(rule: Rule, old_YHCD: Tensor, statistics: Statistics) -> Tensor:
    """Return the centroids after a step of Algorithm 1, averaged over the sequences of the step.

    Algorithm 1 adds half of the sum of the queries and half of the sum of the keys (line 31). If
    queries serve as keys, the halves are equal, and the statistics have the sum once. With separate
    keys they have both sums, so the result is divided by 2.
    """
    sums_gathered = 1.0
    if rule.keys == "separate":
        sums_gathered = 2.0
    divisor_Y = sums_gathered * statistics.sequences
    divisor_Y111 = divisor_Y[:, None, None, None]
    old_part_YHCD = rule.decay * old_YHCD
    new_part_YHCD = (1 - rule.decay) * statistics.sum_HCD
    return old_part_YHCD + new_part_YHCD / divisor_Y111


def split_centroids(rule: Rule, old_YHCD: Tensor, statistics: Statistics) -> Tensor:
    """Return centroids moved towards the means of their members, without normalisation.

    A centroid without members restarts next to another one, which `sources` selects. It gets the
    components of that centroid, multiplied by 1 + SPREAD and 1 - SPREAD in turn, so that its
    direction differs.
    """
    count_YHC = statistics.count_HC
    moved_YHCD = blended(rule, old_YHCD, means_of_clusters(statistics))
    source_YHC, turn_YHC = sources(count_YHC)
    index_YHCD = source_YHC[..., None].expand_as(moved_YHCD)
    source_YHCD = moved_YHCD.gather(-2, index_YHCD)
    D = old_YHCD.shape[-1]
    column_D = torch.arange(D, device=old_YHCD.device)
    is_odd_D = column_D % 2
    sign_D = 1 - 2 * is_odd_D
    distance_YHC1 = SPREAD * turn_YHC[..., None]
    split_YHCD = source_YHCD * (1 + distance_YHC1 * sign_D)
    has_members_YHC1 = count_YHC[..., None] > 0
    return torch.where(has_members_YHC1, moved_YHCD, split_YHCD)


def sources(count_YHC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cluster next to which each cluster without members restarts, and its turn.

    The first of them restarts next to the largest cluster, the second next to the second largest,
    and so on. After the smallest cluster with members, the next turn begins with the largest again.
    In turn t, the distance is t times SPREAD.

    Example: clusters 0 to 4 have 5, 0, 9, 0 and 0 members. Those with members are, by size, 2 and
    0. So in turn 1, cluster 1 restarts next to 2 and cluster 3 next to 0; in turn 2, 4 next to 2.

    Returns:
        Clusters and turns, `[Y, H, C]`, undefined for clusters that have members.
    """
    is_empty_YHC = count_YHC == 0
    by_size_YHC = count_YHC.argsort(dim=-1, descending=True, stable=True)
    is_filled_YHC = ~is_empty_YHC
    filled_YH1 = is_filled_YHC.sum(-1, keepdim=True)
    filled_YH1 = filled_YH1.clamp_min(1)
    # The clusters without members are numbered from 0.
    number_YHC = is_empty_YHC.cumsum(-1) - 1
    number_YHC = number_YHC.clamp_min(0)
    source_YHC = by_size_YHC.gather(-1, number_YHC % filled_YH1)
    turn_YHC = 1 + number_YHC // filled_YH1
    return source_YHC, turn_YHC


class ScoreSummary(NamedTuple):
    """The number of members of each cluster, and the distribution of scores, float64."""

    count_YVHC: Tensor
    """The number of members."""
    mean_YVHC: Tensor
    """The mean of the scores of all positions with the centroid, members or not."""
    deviation_YVHC: Tensor
    """Their standard deviation."""
    scored_YV: Tensor
    """Whether the layer has gathered any score."""


def summary_of(statistics: Statistics, V: int) -> ScoreSummary:
    """Return the summary of the first V roles."""
    sums_YV3HC = statistics.role_sums_2_3_HC[:, :V]
    count_YVHC, sum_YVHC, square_sum_YVHC = sums_YV3HC.unbind(2)
    positions_Y111 = statistics.positions[:, None, None, None]
    mean_YVHC = sum_YVHC / positions_Y111
    mean_square_YVHC = square_sum_YVHC / positions_Y111
    variance_YVHC = mean_square_YVHC - mean_YVHC.square()
    # Rounding may make a variance of 0 negative.
    variance_YVHC = variance_YVHC.clamp(min=0)
    is_scored_YV2HC = sums_YV3HC[:, :, 1:] != 0
    return ScoreSummary(
        count_YVHC=count_YVHC,
        mean_YVHC=mean_YVHC,
        deviation_YVHC=variance_YVHC.sqrt(),
        scored_YV=is_scored_YV2HC.flatten(2).any(-1),
    )


def moved_thresholds(rule: Rule, state: State, statistics: Statistics, moves_YH: Tensor) -> Tensor:
    """Return thresholds after a step: higher if clusters have too many members, lower if too few.

    The first step of a layer sets its thresholds instead: to the score that `window` of `length`
    positions would exceed if scores were normal with the mean and deviation of this step. The
    thresholds of a layer without scores stay.

    Args:
        moves_YH: whether the thresholds of each head may change.
    """
    old_YVHC = state.threshold_YVHC
    scores = summary_of(statistics, old_YVHC.shape[1])
    positions_Y111 = statistics.positions[:, None, None, None]
    wanted_Y111 = rule.window * positions_Y111 / rule.length
    excess_YVHC = scores.count_YVHC / wanted_Y111 - 1
    excess_YVHC = excess_YVHC.clamp(max=MAX_EXCESS)
    rise_YVHC = rule.threshold_rate * excess_YVHC * scores.deviation_YVHC
    new_YVHC = old_YVHC + rise_YVHC
    if math.isfinite(rule.quantile):
        first_YVHC = scores.mean_YVHC + rule.quantile * scores.deviation_YVHC
        is_first_Y = state.steps_Y == 0
        is_first_Y111 = is_first_Y[:, None, None, None]
        new_YVHC = torch.where(is_first_Y111, first_YVHC, new_YVHC)
    moves_YVH = scores.scored_YV[..., None] & moves_YH[:, None]
    moves_YVH1 = moves_YVH[..., None]
    new_YVHC = torch.where(moves_YVH1, new_YVHC, old_YVHC.double())
    return new_YVHC.to(old_YVHC.dtype)
