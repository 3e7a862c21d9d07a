"""The centroids of routing heads, and the one place where training moves them.

Statistics are gathered in the forward pass of training; `after_step` reduces them over ranks and applies them
once per optimizer step. Shapes: B sequences, H heads, C clusters, N positions, D head size, M members.
"""

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from statistics import NormalDist

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.arguments import check_choice, check_number, check_positive
from rtx.attention.pattern import Pattern
from rtx.attention.selection import Statistics, centroid_scores

KEYS = ("shared", "separate", "projected")
UPDATES = ("members", "nearest", "sum")

paused: ContextVar[bool] = ContextVar("statistics_paused", default=False)


@contextlib.contextmanager
def statistics_paused() -> Iterator[None]:
    """Gather nothing inside: for the second forward pass of recomputation."""
    token = paused.set(True)
    try:
        yield
    finally:
        paused.reset(token)


def to_sphere(x_HCD: Tensor) -> Tensor:
    """Return the vectors with norm sqrt(D), the norm of a normalised query."""
    return F.normalize(x_HCD, dim=-1) * math.sqrt(x_HCD.shape[-1])


class Centroids(nn.Module):
    """C centroids for each of H routing heads, in float32 whatever the model's type, with a threshold each.

    Args:
        heads, clusters, size: H, C and D.
        window, length: a cluster is to hold `window` of `length` positions; thresholds follow that.
        decay: share of a centroid that survives one step.
        update: "members" (ours): a centroid moves towards the mean of its members, however they were chosen, and goes
            back on the sphere; one without members towards where the others' are, if thresholds stay. "nearest" (the
            released code): towards the mean of the positions that it scores highest of all centroids; without any it
            stays. "sum": Algorithm 1 as printed, sums of the nearest over a sequence (the mean over the sequences of a
            step); nothing is normalised.
        threshold_rate: eta. A threshold moves by eta (count / W - 1) deviations of its centroid's scores, where count
            is what the batch gave the cluster and W what it is to hold; 0: thresholds stay.
        keys: "shared" where queries stand for keys; "separate": keys are members of their own, and both are counted
            ("sum": in halves); "projected": the members are W_R (q + k).

    Raises:
        ValueError: an unknown word, a count below 1, a decay that is not from 0 to 1, or a rate below 0.
    """

    centroid_HCD: Tensor
    threshold_HC: Tensor
    key_threshold_HC: Tensor | None
    projection_HDD: Tensor | None
    steps: Tensor

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
        check_choice("keys", keys, KEYS)
        check_choice("update", update, UPDATES)
        counts = {"heads": heads, "clusters": clusters, "size": size, "window": window, "length": length}
        for name, count in counts.items():
            check_positive(name, count)
        check_number("decay", decay, "from 0 to 1", lambda x: 0 <= x <= 1)
        check_number("threshold_rate", threshold_rate, "finite and at least 0", lambda x: 0 <= x < math.inf)
        self.keys, self.update_rule, self.decay = keys, update, decay
        self.window, self.length = window, length
        self.threshold_rate = threshold_rate
        self.seed_with_next = False
        self.register_buffer("centroid_HCD", to_sphere(torch.randn(heads, clusters, size, dtype=torch.float32)))
        # Scores of vectors in random directions are normal with variance D.
        start = self.quantile() * math.sqrt(size)
        self.register_buffer("threshold_HC", torch.full((heads, clusters), start, dtype=torch.float32))
        self.register_buffer("key_threshold_HC", self.threshold_HC.clone() if keys == "separate" else None)
        self.register_buffer("projection_HDD", orthonormal(heads, size) if keys == "projected" else None)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.reset_sums()

    def quantile(self) -> float:
        """Return how many deviations above its mean a normal score is for `window` of `length` positions."""
        share = min(1.0, self.window / self.length)
        return NormalDist().inv_cdf(1.0 - share) if share < 1 else -math.inf

    def _apply(self, fn, recurse: bool = True):
        """Move with the model, but keep the buffers in float32 under `.half()`, `.bfloat16()` and `.double()`."""
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            assert after is not None
            if after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        self.reset_sums()
        return self

    def reset_sums(self) -> None:
        """Forget the statistics gathered since the last update."""
        H, C, D = self.centroid_HCD.shape
        zeros = {"dtype": torch.float64, "device": self.centroid_HCD.device}
        self.sum_HCD, self.count_HC = torch.zeros(H, C, D, **zeros), torch.zeros(H, C, **zeros)
        # Of queries and of keys with memberships of their own: members, and first two moments of the scores.
        self.seen_XHC = torch.zeros(2, 3, H, C, **zeros)
        self.positions, self.sequences = torch.zeros((), **zeros), torch.zeros((), **zeros)

    def sums(self) -> tuple[Tensor, ...]:
        """The statistics gathered since the last update, to be summed over ranks."""
        return self.sum_HCD, self.count_HC, self.seen_XHC, self.positions, self.sequences

    @torch.no_grad()
    def observe(self, found: Statistics, positions: int, sequences: int, of_keys: bool = False) -> None:
        """Gather statistics of a training batch: so many real positions, of so many sequences."""
        if not positions:
            return
        self.sum_HCD += found.sum_HCD
        self.count_HC += found.count_HC
        self.seen_XHC[int(of_keys)] += torch.stack([found.joined_HC, found.score_HC, found.square_HC])
        if not of_keys:
            self.positions += positions
            self.sequences += sequences

    @torch.no_grad()
    def seed_from(self, clustered: list[Tensor], real_BN: Tensor | None) -> None:
        """Start at the first sequence, if it is not all padding: centroids at queries, thresholds at what keeps W of N.

        `clustered`: what is clustered, `[B, H, N, D]`: one vector of a position, or its query and its key apart.
        """
        first = [x if real_BN is None else x[:, :, real_BN[:1].flatten()] for x in (x[:1] for x in clustered)]
        if not first[0].numel():
            return
        q_HND = first[0][0]
        H, C, _ = self.centroid_HCD.shape
        N = q_HND.shape[1]
        generator = torch.Generator().manual_seed(0)
        draw_HC = torch.stack([torch.randperm(max(N, C), generator=generator)[:C] % N for _ in range(H)])
        head_H1 = torch.arange(H, device=q_HND.device)[:, None]
        self.centroid_HCD.copy_(to_sphere(q_HND[head_H1, draw_HC.to(q_HND.device)].float()))
        z = self.quantile()
        for threshold_HC, x_BHND in zip((self.threshold_HC, self.key_threshold_HC), first, strict=False):
            if threshold_HC is not None and math.isfinite(z):
                score_HCN = centroid_scores(self.centroid_HCD, x_BHND[0])
                threshold_HC.copy_(score_HCN.quantile(1 - self.window / self.length, dim=-1))
        self.steps.fill_(1)  # the thresholds are of these data already
        self.seed_with_next = False

    @torch.no_grad()
    def update(self) -> None:
        """Apply the gathered (and reduced) statistics, and forget them. Nothing gathered: nothing changes.

        Nor does a head whose statistics are not all finite: its centroids and thresholds would be NaN for good.
        """
        if self.sequences == 0:
            return
        sound_H = self.sum_HCD.isfinite().all(-1).all(-1) & self.seen_XHC.isfinite().all(-1).all(0).all(0)
        old_HCD = self.centroid_HCD.double()
        if self.update_rule == "sum":
            # Halves of the sums of queries and of keys; where these are the same vectors, one sum.
            halves = 2.0 if self.keys == "separate" else 1.0
            new_HCD = self.decay * old_HCD + (1 - self.decay) * self.sum_HCD / (halves * self.sequences)
        else:
            moves_HC1 = self.count_HC[..., None] > 0
            mean_HCD = self.sum_HCD / self.count_HC[..., None].clamp_min(1)
            if self.update_rule == "members" and not self.threshold_rate:  # no threshold falls until members come
                others_H1D = mean_HCD.sum(1, keepdim=True) / moves_HC1.sum(1, keepdim=True).clamp_min(1)
                mean_HCD, moves_HC1 = torch.where(moves_HC1, mean_HCD, others_H1D), torch.ones_like(moves_HC1)
            moved_HCD = to_sphere(self.decay * old_HCD + (1 - self.decay) * mean_HCD)
            new_HCD = torch.where(moves_HC1, moved_HCD, old_HCD)
        self.centroid_HCD.copy_(torch.where(sound_H[:, None, None], new_HCD, old_HCD))
        for threshold_HC, seen_XHC in zip((self.threshold_HC, self.key_threshold_HC), self.seen_XHC, strict=True):
            if self.threshold_rate and threshold_HC is not None:
                self.move_threshold(threshold_HC, seen_XHC, sound_H)
        self.steps += 1
        self.reset_sums()

    def move_threshold(self, threshold_HC: Tensor, seen_XHC: Tensor, sound_H: Tensor) -> None:
        """Raise the thresholds of clusters with too many members, lower those of clusters with too few.

        The first step sets them by the scores' mean and deviation, as if these were normal.
        """
        count_HC, mean_HC, square_HC = seen_XHC[0], seen_XHC[1] / self.positions, seen_XHC[2] / self.positions
        deviation_HC = (square_HC - mean_HC.square()).clamp(min=0).sqrt()
        wanted = self.window * self.positions / self.length
        excess_HC = (count_HC / wanted - 1).clamp(max=3)
        moved_HC = threshold_HC + self.threshold_rate * excess_HC * deviation_HC
        if int(self.steps) == 0 and math.isfinite(z := self.quantile()):
            moved_HC = mean_HC + z * deviation_HC
        threshold_HC.copy_(torch.where(sound_H[:, None], moved_HC, threshold_HC.double()))


def orthonormal(heads: int, size: int) -> Tensor:
    """Return a random orthonormal matrix W_R for each head, `[H, D, D]`, evenly drawn among all of them."""
    q_HDD, r_HDD = torch.linalg.qr(torch.randn(heads, size, size, dtype=torch.float32))
    return q_HDD * r_HDD.diagonal(dim1=-2, dim2=-1).sign()[:, None]


def all_centroids(model: nn.Module) -> list[Centroids]:
    """Return the centroids of every routing layer, bottom to top."""
    return [module for module in model.modules() if isinstance(module, Centroids)]


def after_step(model: nn.Module) -> None:
    """Move the centroids and thresholds of every routing layer, and let every pattern do what is due.

    To be called once after each optimizer step, on every rank. Statistics are summed over ranks first, so that all
    ranks move alike from the joined batch.
    """
    layers = all_centroids(model)
    totals = [total for centroids in layers for total in centroids.sums()]
    if totals and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        joined = torch.cat([total.flatten() for total in totals])
        dist.all_reduce(joined)
        for total, part in zip(totals, joined.split([total.numel() for total in totals]), strict=True):
            total.copy_(part.view(total.shape))
    for centroids in layers:
        centroids.update()
    for module in model.modules():
        if isinstance(module, Pattern):
            module.after_step()


@torch.no_grad()
def initialise_from_data(model: nn.Module, tokens_BN: Tensor) -> None:
    """Start every layer's centroids at queries of one training sequence (routing.init=data); the same on every rank.

    `model.loss(tokens)` is run once without dropout; each layer seeds itself as the sequence reaches it. Centroids that
    it does not reach, or reaches with padding alone, wait for the next training batch.
    """
    was_training = model.training
    model.eval()
    for centroids in all_centroids(model):
        centroids.seed_with_next = True
        centroids.train()
    model.loss(tokens_BN[:1])  # type: ignore[operator]
    model.train(was_training)
