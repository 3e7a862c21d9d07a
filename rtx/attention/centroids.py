"""Centroids and thresholds of clusters, the statistics that move them, and how they move.

Forward passes in training add up statistics (`Centroids.observe`). Once after each optimizer step,
`after_step` sums them over ranks and moves the centroids and thresholds of all layers, by one pure
function of stacked tensors for all layers with the same rule (`moved`). That copies no number to
the CPU, and `torch.compile` fuses it into a few kernels.

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

Shapes: B sequences, H heads, C clusters, N positions, D head size, L = B * H * C lists of members,
Y layers with the same rule; V roles with thresholds: 2 if queries and keys have separate
memberships, else 1, or 0 without thresholds; Z numbers in a layer's row of statistics.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Generator
from statistics import NormalDist
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.arguments import check_choice, check_number, check_positive
from rtx.attention.members import products
from rtx.attention.pattern import Pattern
from rtx.attention.typed_torch import qr

QUERIES = 0
"""The number of the role of queries, and of the only role if memberships are not separate."""
KEYS = 1
"""The number of the role of keys, if memberships are separate."""
MAX_EXCESS = 3.0
"""The upper limit of members / wanted - 1, which limits how fast a threshold rises."""
SPLIT = "split"
"""The update of centroids of keys, see `split_centroids`."""
SPREAD = 2.0**-10
"""The distance at which such a centroid restarts from another one, relative to each component."""
MOST_PASSES = 1000
"""The number of training passes without a step after which centroids warn."""


class Gathering:
    """Whether forward passes gather statistics: an attribute, which torch.compile can read."""

    is_paused = False


gathering = Gathering()


@contextlib.contextmanager
def statistics_paused() -> Generator[None]:
    """Return a context in which forward passes gather no statistics, e.g. for recomputation."""
    was_paused = gathering.is_paused
    gathering.is_paused = True
    try:
        yield
    finally:
        gathering.is_paused = was_paused


class Centroids(nn.Module):
    """C centroids for each of H heads, with a threshold each; float32, whatever the model's type.

    Args:
        heads, clusters, size: H, C and D.
        window, length: thresholds move so that a cluster gets `window` of `length` positions.
        decay: the weight of the old centroid in a step; the new vectors have 1 - decay.
        update: what a centroid moves towards.
            "members": the mean of its members; then it is scaled to norm sqrt(D). If thresholds do
            not move, a centroid without members moves towards the mean of the others' means. The
            paper has no such update.
            "nearest": the mean of the positions whose highest score is that of this centroid; then
            it is scaled to norm sqrt(D). Without such positions it stays. The paper's released code
            takes the same positions, but sets a centroid to a running sum over a running count, of
            any norm.
            "sum": Algorithm 1 of the paper as printed: the sum of the same positions of a sequence,
            averaged over the sequences of a step, not normalised.
        threshold_rate: eta. After a step the threshold of a cluster rises by
            eta * (members / wanted - 1) standard deviations of its scores. 0: thresholds stay.
        keys: which vectors are assigned to clusters.
            "shared": queries, which serve as keys.
            "separate": queries and keys, with separate memberships. Statistics are of both.
            "projected": W_R (q + k) of each position, with a fixed orthonormal matrix W_R.

    Raises:
        ValueError: for an unknown word, a count below 1, a decay outside 0 to 1, or a rate below 0.
    """

    centroid_HCD: Tensor
    threshold_HC: Tensor
    key_threshold_HC: Tensor | None
    projection_HDD: Tensor | None
    steps: Tensor
    """The number of steps that have moved the centroids."""

    def __init__(
        self,
        heads: int,
        clusters: int,
        size: int,
        *,
        window: int,
        length: int,
        decay: float,
        update: str = "members",
        threshold_rate: float = 0.0,
        keys: str = "shared",
    ) -> None:
        super().__init__()
        check_choice("keys", keys, ("shared", "separate", "projected"))
        check_choice("update", update, ("members", "nearest", "sum"))
        check_positive(0, heads=heads)
        check_positive(clusters=clusters, size=size, window=window, length=length)
        check_number("decay", decay, "from 0 to 1", lambda x: 0 <= x <= 1)
        check_number("threshold_rate", threshold_rate, "finite and at least 0", is_rate)
        self.keys = keys
        self.update_rule = update
        self.decay = decay
        self.window = window
        self.length = length
        self.threshold_rate = threshold_rate
        self.seed_with_next = False
        """Whether the next training batch initialises the centroids, see `seed_from`."""
        self.warns = True
        """Whether to warn after `MOST_PASSES` training passes without a step."""
        self.passes = 0
        """The number of training passes since the last step."""
        directions_HCD = torch.randn(heads, clusters, size, dtype=torch.float32)
        self.register_buffer("centroid_HCD", to_sphere(directions_HCD))
        # Scores of random vectors of norm sqrt(D) are nearly normal with variance D.
        start = self.quantile() * math.sqrt(size)
        threshold_HC = torch.full((heads, clusters), start, dtype=torch.float32)
        key_threshold_HC = None
        if keys == "separate":
            key_threshold_HC = threshold_HC.clone()
        projection_HDD = None
        if keys == "projected":
            projection_HDD = orthonormal(heads, size)
        self.register_buffer("threshold_HC", threshold_HC)
        self.register_buffer("key_threshold_HC", key_threshold_HC)
        self.register_buffer("projection_HDD", projection_HDD)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.reset_statistics()

    def quantile(self) -> float:
        """Return the value that a standard normal variable exceeds with probability window / N.

        N is `length`. If the probability is 1, the value is -inf.
        """
        share = self.window / self.length
        if share >= 1:
            return -math.inf
        return NormalDist().inv_cdf(1.0 - share)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device with the model, but stay in float32 in a model of another type."""

        def on_device(buffer: Tensor) -> Tensor:
            after = fn(buffer)
            if after.dtype == buffer.dtype:
                return after
            return buffer.to(after.device)

        super()._apply(on_device, recurse)  # pyright: ignore[reportUnknownMemberType]
        self.reset_statistics()
        return self

    def rule(self) -> Rule:
        """Return the options by which a step moves these centroids.

        Layers with the same rule move together.
        """
        H, C, D = self.centroid_HCD.shape
        return Rule(
            update=self.update_rule,
            keys=self.keys,
            decay=self.decay,
            window=self.window,
            length=self.length,
            threshold_rate=self.threshold_rate,
            quantile=self.quantile(),
            shape_HCD=(H, C, D),
        )

    def thresholds(self) -> list[Tensor]:
        """Return the thresholds `[H, C]` of each role."""
        if self.key_threshold_HC is None:
            return [self.threshold_HC]
        return [self.threshold_HC, self.key_threshold_HC]

    def reset_statistics(self) -> None:
        """Set the statistics to zero, on the device of the centroids."""
        H, C, D = self.centroid_HCD.shape
        numbers = sum(statistics_sizes((H, C, D)))
        device = self.centroid_HCD.device
        self.total_Z = torch.zeros(numbers, dtype=torch.float64, device=device)
        """All statistics since the last step in one vector; one all-reduce sums it over ranks."""
        self.statistics = statistics_in(self.total_Z, (H, C, D))
        """Views of `total_Z`."""

    @torch.no_grad()
    def observe(
        self,
        role: int,
        x_BHND: Tensor,
        *,
        member_count_L: Tensor,
        sum_LD: Tensor,
        count_L: Tensor,
        moment_2BHC: Tensor | None,
    ) -> None:
        """Add statistics of the vectors of one role in a training batch.

        Args:
            role: `QUERIES` or `KEYS`.
            member_count_L: the number of members of each list.
            sum_LD, count_L: the sums and numbers of the vectors that each centroid moves towards.
                With update "members" these are the members that lists have room for.
            moment_2BHC: for each centroid the sum of the scores of all positions, and the sum of
                their squares. None: members are not selected by thresholds, so these sums are not
                needed.
        """
        B, H, N, D = x_BHND.shape
        C = self.centroid_HCD.shape[1]
        if not B * N:
            return
        statistics = self.statistics
        sum_BHCD = sum_LD.view(B, H, C, D)
        count_BHC = count_L.view(B, H, C)
        member_count_BHC = member_count_L.view(B, H, C)
        statistics.sum_HCD.add_(sum_BHCD.sum(0))
        statistics.count_HC.add_(count_BHC.sum(0))
        sums_3HC = statistics.role_sums_2_3_HC[role]
        sums_3HC[0].add_(member_count_BHC.sum(0))
        if moment_2BHC is not None:
            sums_3HC[1:].add_(moment_2BHC.sum(1))
        if role == QUERIES:
            statistics.positions.add_(B * N)
            statistics.sequences.add_(B)
            self.count_pass()

    def count_pass(self) -> None:
        """Count a training pass; `RuntimeWarning` if many have passed without a step.

        Compiled passes are not counted: torch would compile them again for each count.
        """
        if torch.compiler.is_compiling():
            return
        self.passes += 1
        if self.warns and self.passes == MOST_PASSES:
            warnings.warn(
                f"{MOST_PASSES} training passes have not moved the centroids: "
                "call rtx.attention.after_step(model) after each optimizer step",
                RuntimeWarning,
                stacklevel=2,
            )

    @torch.no_grad()
    def seed_from(self, clustered: list[Tensor]) -> None:
        """Initialise centroids and thresholds with the first sequence of a batch that is not empty.

        Each centroid gets the direction of a query, as k-means commonly starts at data; the paper
        starts at random. Thresholds are set so that `window` of `length` positions of the sequence
        reach them.

        Args:
            clustered: the vectors of each role, `[B, H, N, D]`.
        """
        if not clustered[QUERIES].numel():
            return
        q_BHND = clustered[QUERIES]
        start_HCD = self.drawn_from(q_BHND[0])
        self.centroid_HCD.copy_(to_sphere(start_HCD.float()))
        if math.isfinite(self.quantile()):
            below = 1 - self.window / self.length
            for threshold_HC, x_BHND in zip(self.thresholds(), clustered, strict=True):
                score_HCN = products(self.centroid_HCD, x_BHND[0])
                threshold_HC.copy_(score_HCN.quantile(below, dim=-1))
        # At 0 the next step would set the thresholds again.
        self.steps.fill_(1)
        self.seed_with_next = False

    def drawn_from(self, x_HND: Tensor) -> Tensor:
        """Return the vectors at C random positions of each head, `[H, C, D]`.

        The positions are distinct if there are at least C. The seed of the draw is fixed.
        """
        H, C, _ = self.centroid_HCD.shape
        N = x_HND.shape[1]
        generator = torch.Generator().manual_seed(0)
        draws: list[Tensor] = []
        for _ in range(H):
            draw = torch.randperm(max(N, C), generator=generator)
            draws.append(draw[:C] % N)
        position_HC = torch.stack(draws).to(x_HND.device)
        head_H = torch.arange(H, device=x_HND.device)
        return x_HND[head_H[:, None], position_HC]


def is_rate(x: float) -> bool:
    """Return whether a number is finite and at least 0."""
    return 0 <= x < math.inf


def orthonormal(heads: int, size: int) -> Tensor:
    """Return a uniformly random orthonormal matrix for each head, `[H, D, D]`."""
    normal_HDD = torch.randn(heads, size, size, dtype=torch.float32)
    q_HDD, r_HDD = qr(normal_HDD)
    diagonal_HD = r_HDD.diagonal(dim1=-2, dim2=-1)
    sign_HD = diagonal_HD.sign()
    return q_HDD * sign_HD[:, None]


# The state and the statistics of several layers.


class Rule(NamedTuple):
    """The options of layers that move together; `Centroids` explains them."""

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
    fields = torch.split(total_Z, sizes, dim=-1)
    sums, counts, scores, positions, sequences = fields
    return Statistics(
        sum_HCD=torch.unflatten(sums, -1, (H, C, D)),
        count_HC=torch.unflatten(counts, -1, (H, C)),
        role_sums_2_3_HC=torch.unflatten(scores, -1, (2, 3, H, C)),
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


# How centroids and thresholds move.


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


# After a step.

Move = Callable[[Rule, State, Tensor], State]
"""A function with the arguments and the result of `moved`."""


@torch.no_grad()
def after_step(model: nn.Module, move: Move = moved) -> None:
    """Move all centroids and thresholds of a model, and call `after_step` of every pattern.

    Call this once after each optimizer step, on every rank. Ranks sum their statistics first, so
    that all ranks move their centroids alike, by the statistics of the whole batch.

    Args:
        move: `moved`, or the same function compiled.
    """
    for rule, layers in layers_by_rule(model).items():
        move_together(rule, layers, move)
    for module in model.modules():
        if isinstance(module, Pattern):
            module.after_step()


def all_centroids(model: nn.Module) -> list[Centroids]:
    """Return the centroids of all layers, from the lowest."""
    return [module for module in model.modules() if isinstance(module, Centroids)]


def layers_by_rule(model: nn.Module) -> dict[Rule, list[Centroids]]:
    """Return the centroids of all layers, by their rules."""
    groups: dict[Rule, list[Centroids]] = {}
    for centroids in all_centroids(model):
        groups.setdefault(centroids.rule(), []).append(centroids)
    return groups


def move_together(rule: Rule, layers: list[Centroids], move: Move) -> None:
    """Move the layers of one rule by the statistics of all ranks, and reset these.

    The CPU reads no number back from a GPU.
    """
    state, total_YZ = stacked(layers)
    if is_distributed():
        dist.all_reduce(total_YZ)  # pyright: ignore[reportUnknownMemberType]
    after = move(rule, state, total_YZ)
    copy_rows(after.centroid_YHCD, [layer.centroid_HCD for layer in layers])
    thresholds = thresholds_of(layers)
    if thresholds:
        copy_rows(after.threshold_YVHC.flatten(0, 1), thresholds)
    copy_rows(after.steps_Y, [layer.steps for layer in layers])
    for layer in layers:
        layer.passes = 0
    # One kernel for a list of tensors; torch has no public name for it.
    torch._foreach_zero_([layer.total_Z for layer in layers])  # type: ignore[attr-defined]


def is_distributed() -> bool:
    """Return whether there are several ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    return dist.get_world_size() > 1


def stacked(layers: list[Centroids]) -> tuple[State, Tensor]:
    """Return copies of the state of layers with one rule, and of their statistics, `[Y, Z]`."""
    state = State(
        centroid_YHCD=torch.stack([layer.centroid_HCD for layer in layers]),
        threshold_YVHC=stacked_thresholds(layers),
        steps_Y=torch.stack([layer.steps for layer in layers]),
    )
    return state, torch.stack([layer.total_Z for layer in layers])


def stacked_thresholds(layers: list[Centroids]) -> Tensor:
    """Return the thresholds of layers with one rule, `[Y, V, H, C]`."""
    thresholds = thresholds_of(layers)
    if thresholds:
        all_HC = torch.stack(thresholds)
        return torch.unflatten(all_HC, 0, (len(layers), -1))
    centroid_HCD = layers[0].centroid_HCD
    H, C, _ = centroid_HCD.shape
    return centroid_HCD.new_empty(len(layers), 0, H, C)


def thresholds_of(layers: list[Centroids]) -> list[Tensor]:
    """Return the thresholds of some layers, layer after layer."""
    thresholds: list[Tensor] = []
    for layer in layers:
        thresholds += layer.thresholds()
    return thresholds


def copy_rows(source_YX: Tensor, targets: list[Tensor]) -> None:
    """Copy row y of a tensor into target y, with one kernel for all targets."""
    # torch has no public name for this.
    torch._foreach_copy_(targets, list(source_YX.unbind()))  # type: ignore[attr-defined]
