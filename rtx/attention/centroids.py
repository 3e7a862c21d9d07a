"""Centroids and thresholds of clusters, and the statistics that move them.

Forward passes in training add up statistics (`Centroids.observe`). Once after each optimizer step,
`after_step` sums them over ranks and moves the centroids and thresholds of all layers together;
centroid_update.py has the formulas.

Shapes: B sequences, H heads, C clusters, N positions, D head size, L = B * H * C lists of members,
Y layers with the same rule; V roles with thresholds: 2 if queries and keys have separate
memberships, else 1, or 0 without thresholds; Z numbers in a layer's row of statistics.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from statistics import NormalDist

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rtx.attention.arguments import check_choice, check_number, check_positive
from rtx.attention.centroid_update import (
    Rule,
    State,
    moved,
    statistics_in,
    statistics_sizes,
    to_sphere,
)
from rtx.attention.members import products
from rtx.attention.pattern import Pattern

QUERIES = 0
"""The number of the role of queries, and of the only role if memberships are not separate."""
KEYS = 1
"""The number of the role of keys, if memberships are separate."""


class Gathering:
    """Whether forward passes gather statistics: an attribute, which torch.compile can read."""

    is_paused = False


gathering = Gathering()


@contextlib.contextmanager
def statistics_paused() -> Iterator[None]:
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

    def _apply(self, fn, recurse: bool = True):
        """Move to another device with the model, but stay in float32 in a model of another type."""

        def on_device(buffer: Tensor) -> Tensor:
            after = fn(buffer)
            if after.dtype == buffer.dtype:
                return after
            return buffer.to(after.device)

        super()._apply(on_device, recurse)
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
        draws = []
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
    q_HDD, r_HDD = torch.linalg.qr(normal_HDD)
    diagonal_HD = r_HDD.diagonal(dim1=-2, dim2=-1)
    sign_HD = diagonal_HD.sign()
    return q_HDD * sign_HD[:, None]


# After a step.

Move = Callable[[Rule, State, Tensor], State]
"""A function with the arguments and the result of `centroid_update.moved`."""


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
        dist.all_reduce(total_YZ)
    after = move(rule, state, total_YZ)
    copy_rows(after.centroid_YHCD, [layer.centroid_HCD for layer in layers])
    thresholds = thresholds_of(layers)
    if thresholds:
        copy_rows(after.threshold_YVHC.flatten(0, 1), thresholds)
    copy_rows(after.steps_Y, [layer.steps for layer in layers])
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
        return all_HC.unflatten(0, (len(layers), -1))
    centroid_HCD = layers[0].centroid_HCD
    H, C, _ = centroid_HCD.shape
    return centroid_HCD.new_empty(len(layers), 0, H, C)


def thresholds_of(layers: list[Centroids]) -> list[Tensor]:
    """Return the thresholds of some layers, layer after layer."""
    thresholds = []
    for layer in layers:
        thresholds += layer.thresholds()
    return thresholds


def copy_rows(source_YX: Tensor, targets: list[Tensor]) -> None:
    """Copy row y of a tensor into target y, with one kernel for all targets."""
    # torch has no public name for this.
    torch._foreach_copy_(targets, list(source_YX.unbind()))  # type: ignore[attr-defined]
