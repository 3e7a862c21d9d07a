"""The centroids of routing heads, and the one place where they change.

Statistics are gathered in the forward pass of training; `update_centroids` reduces them over ranks and applies them
once per optimizer step. Shapes: B sequences, H heads, C clusters, N positions, D head size.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from statistics import NormalDist

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rtx.attention.arguments import check_number, check_positive
from rtx.attention.choice import Found, Rule, Wish, read_scores
from rtx.attention.selection import centroid_scores

KEYS = ("shared", "separate", "projected")
"""What the keys of routing heads are; see `Centroids`."""

_paused: ContextVar[bool] = ContextVar("centroid_statistics_paused", default=False)


@contextlib.contextmanager
def statistics_paused() -> Iterator[None]:
    """Gather nothing inside: for the second forward pass of activation recomputation."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


def to_sphere(x: Tensor) -> Tensor:
    """Return vectors of norm sqrt(D), the norm of a LayerNormed query."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) * math.sqrt(x.shape[-1])


def orthonormal(heads: int, size: int) -> Tensor:
    """Return a random orthonormal matrix for each head, `[H, D, D]`, evenly drawn among all of them."""
    q_HDD, r_HDD = torch.linalg.qr(torch.randn(heads, size, size, dtype=torch.float32))
    return q_HDD * r_HDD.diagonal(dim1=-2, dim2=-1).sign()[:, None]


class Centroids(nn.Module):
    """Spherical online k-means of the queries of H heads (paper section 4.1, Algorithm 1 lines 28 to 31).

    Buffers are float32 whatever the precision around them, and are saved with the model:
    `centroid_HCD`; `threshold_HC`, the score at which a position joins a cluster (selection=causal); `idle_HC`, steps
    since a cluster last had a member; `steps`, updates so far; with keys=separate `key_threshold_HC`, the thresholds of
    keys; with keys=projected `projection_HDD`, the fixed random orthonormal W_R of each head. Sums gathered between two
    updates are float64 and not saved.

    Args:
        update: "mean" moves a centroid towards its members' mean and puts it back on the sphere; an empty cluster keeps
            its centroid. "sum" is Algorithm 1 as printed, with sums over one sequence (the mean over the sequences of a
            step); nothing is normalised.
        thresholds: whether thresholds are learned: the running mean of the score that keeps `window` of `length`
            positions.
        revive_after: steps without a member after which a centroid restarts beside the fullest one of its head; 0:
            never.
        keys: "shared" where queries stand for keys; "separate": keys are members of their own, and both are counted
            ("mean": in one mean; "sum": in halves); "projected": the members are W_R (q + k).

    Raises:
        ValueError: unknown keys or an unknown update, a count below 1 (`revive_after`: below 0), or a
            decay that is not from 0 to 1.
    """

    centroid_HCD: Tensor
    threshold_HC: Tensor
    key_threshold_HC: Tensor | None
    projection_HDD: Tensor | None
    idle_HC: Tensor
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
        update: str = "mean",
        thresholds: bool = False,
        threshold_decay: float = 0.99,
        revive_after: int = 0,
        keys: str = "shared",
    ) -> None:
        super().__init__()
        if keys not in KEYS:
            raise ValueError(f"keys={keys!r}: must be one of {', '.join(KEYS)}")
        if update not in ("mean", "sum"):
            raise ValueError(f"update={update!r}: must be one of mean, sum")
        check_positive("revive_after", revive_after, least=0)
        counts = {"heads": heads, "clusters": clusters, "size": size, "window": window, "length": length}
        for name, count in counts.items():
            check_positive(name, count)
        for name, share in (("decay", decay), ("threshold_decay", threshold_decay)):
            check_number(name, share, "from 0 to 1", lambda x: 0 <= x <= 1)
        self.keys = keys
        self.window, self.length = window, length
        self.decay, self.update_rule = decay, update
        self.thresholds, self.threshold_decay = thresholds, threshold_decay
        self.revive_after = revive_after
        self.seed_with_next = False
        centroid_HCD = to_sphere(torch.randn(heads, clusters, size, dtype=torch.float32))
        self.register_buffer("centroid_HCD", centroid_HCD)
        # Scores of queries in random directions are normal with variance D: keep their upper share of W / N.
        share = min(1.0, window / length)
        start = math.sqrt(size) * NormalDist().inv_cdf(1.0 - share) if share < 1 else -math.inf
        self.register_buffer("threshold_HC", torch.full((heads, clusters), start, dtype=torch.float32))
        separate = keys == "separate"
        self.register_buffer("key_threshold_HC", self.threshold_HC.clone() if separate else None)
        self.register_buffer("projection_HDD", orthonormal(heads, size) if keys == "projected" else None)
        self.register_buffer("idle_HC", torch.zeros(heads, clusters, dtype=torch.int64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.reset_sums()

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
        device = self.centroid_HCD.device
        self.sum_HCD = torch.zeros(H, C, D, dtype=torch.float64, device=device)
        self.count_HC = torch.zeros(H, C, dtype=torch.float64, device=device)
        self.window_score_HC = torch.zeros(H, C, dtype=torch.float64, device=device)
        self.key_window_score_HC = torch.zeros(H, C, dtype=torch.float64, device=device)
        self.sequences = torch.zeros((), dtype=torch.float64, device=device)

    def sums(self) -> tuple[Tensor, ...]:
        """The statistics gathered since the last update, to be summed over ranks."""
        totals = self.sum_HCD, self.count_HC, self.window_score_HC, self.sequences
        return (*totals, self.key_window_score_HC) if self.keys == "separate" else totals

    def scores(self, q_BHND: Tensor) -> Tensor:
        """Return the dot products `[B, H, C, N]` of centroids with normalised queries, float32 or wider."""
        return centroid_scores(self.centroid_HCD, q_BHND)

    def window_scores(self, x_BHND: Tensor) -> Tensor:
        """Return the scores `[B, H, C]` that keep `window` of `length` vectors."""
        found = read_scores(self.centroid_HCD, x_BHND, None, Wish(window_of=(self.window, self.length)))
        assert found.window_score_BHC is not None
        return found.window_score_BHC

    def look(
        self, x_BHND: Tensor, mask_BN: Tensor | None = None, rule: Rule | None = None, backend: str = "torch"
    ) -> Found:
        """Return what a training batch is observed by, and members by a rule; see `read_scores`."""
        window_of = (self.window, self.length) if self.thresholds and not _paused.get() else None
        wish = Wish(rule, nearest=True, window_of=window_of)
        return read_scores(self.centroid_HCD, x_BHND, mask_BN, wish, backend)

    def observe(self, q_BHND: Tensor, found: Found, mask_BN: Tensor | None = None) -> None:
        """Gather statistics of a training batch, which `look` has seen (unless paused).

        `mask_BN` is true at real positions; padding is not counted.
        """
        if not _paused.get():
            self.add(q_BHND, found, mask_BN, self.window_score_HC)
            self.sequences += len(q_BHND) if mask_BN is None else mask_BN.any(-1).sum()

    def observe_keys(self, k_BHND: Tensor, found: Found, mask_BN: Tensor | None = None) -> None:
        """As `observe`, for the keys of the sequences whose queries are observed (keys=separate)."""
        assert self.keys == "separate"
        if not _paused.get():
            self.add(k_BHND, found, mask_BN, self.key_window_score_HC)

    @torch.no_grad()
    def add(self, x_BHND: Tensor, found: Found, mask_BN: Tensor | None, window_score_HC: Tensor) -> None:
        """Add vectors to the sum and the count of their nearest centroids, and their window scores to a sum."""
        assert found.nearest_BHN is not None
        self.add_members(x_BHND, found.nearest_BHN, mask_BN)
        if self.thresholds:
            assert found.window_score_BHC is not None
            window_score_HC += found.window_score_BHC.double().sum(0)

    def add_members(self, x_BHND: Tensor, nearest_BHN: Tensor, mask_BN: Tensor | None) -> None:
        """Add vectors to the sum and the count of their nearest centroids."""
        H, C, D = self.centroid_HCD.shape
        cell_R = (nearest_BHN + torch.arange(H, device=x_BHND.device)[None, :, None] * C).flatten()
        x_RD = x_BHND.reshape(-1, D)
        if mask_BN is not None:
            real_R = mask_BN[:, None].expand(nearest_BHN.shape).flatten()
            cell_R, x_RD = cell_R[real_R], x_RD[real_R]
        self.sum_HCD.view(H * C, D).index_add_(0, cell_R, x_RD.double())
        self.count_HC += torch.bincount(cell_R, minlength=H * C).view(H, C)

    @torch.no_grad()
    def seed_from(self, q_BHND: Tensor, k_BHND: Tensor | None = None, mask_BN: Tensor | None = None) -> None:
        """Start the centroids at queries of the first sequence, and the thresholds at what keeps W of N of them.

        `k_BHND`: keys that are members of their own, for their thresholds. A first sequence of padding alone seeds
        nothing.
        """
        if not len(q_BHND):
            return
        H, C, _ = self.centroid_HCD.shape
        q_1HND = q_BHND[:1] if mask_BN is None else q_BHND[:1, :, mask_BN[0]]
        N = q_1HND.shape[2]
        if N == 0:
            return
        generator = torch.Generator().manual_seed(0)
        draw_HC = torch.stack([torch.randperm(max(N, C), generator=generator)[:C] % N for _ in range(H)])
        head_H1 = torch.arange(H)[:, None]
        self.centroid_HCD.copy_(to_sphere(q_1HND[0][head_H1, draw_HC.to(q_BHND.device)].float()))
        self.threshold_HC.copy_(self.window_scores(q_1HND)[0])
        if self.key_threshold_HC is not None:
            assert k_BHND is not None
            k_1HND = k_BHND[:1] if mask_BN is None else k_BHND[:1, :, mask_BN[0]]
            self.key_threshold_HC.copy_(self.window_scores(k_1HND)[0])
        self.seed_with_next = False

    @torch.no_grad()
    def update(self) -> None:
        """Apply the gathered (and reduced) statistics, and forget them. Nothing gathered: nothing changes.

        Nor does a head whose statistics are not all finite: its centroids and thresholds would be NaN for good.
        """
        if self.sequences == 0:
            return
        sums = [total_HC for total_HC in self.sums() if total_HC.dim()]
        sound_H1 = torch.stack([total.flatten(1).isfinite().all(-1) for total in sums]).all(0)[:, None]
        sum_HCD, full_HC1 = self.sum_HCD, (self.count_HC > 0)[..., None]
        old_HCD = self.centroid_HCD.double()
        if self.update_rule == "mean":
            mean_HCD = sum_HCD / self.count_HC[..., None].clamp_min(1)
            moved_HCD = to_sphere(self.decay * old_HCD + (1 - self.decay) * mean_HCD)
            new_HCD = torch.where(full_HC1, moved_HCD, old_HCD)
        else:
            # Halves of the sums of queries and of keys; where these are the same vectors, one sum.
            halves = 2.0 if self.keys == "separate" else 1.0
            new_HCD = self.decay * old_HCD + (1 - self.decay) * sum_HCD / (halves * self.sequences)
        self.centroid_HCD.copy_(torch.where(sound_H1[..., None], new_HCD, old_HCD))
        if self.thresholds:
            self.move_threshold(self.threshold_HC, self.window_score_HC, sound_H1)
            if self.key_threshold_HC is not None:
                self.move_threshold(self.key_threshold_HC, self.key_window_score_HC, sound_H1)
        self.steps += 1
        self.idle_HC.copy_(torch.where(full_HC1[..., 0], 0, self.idle_HC + 1))
        if self.revive_after:
            self.revive()
        self.reset_sums()

    def move_threshold(self, threshold_HC: Tensor, window_score_HC: Tensor, sound_H1: Tensor) -> None:
        """Take the step's mean W-th best score into the running mean of sound heads; the first step sets it."""
        keep = torch.where(self.steps == 0, 0.0, self.threshold_decay)
        old_HC = torch.where(self.steps == 0, 0.0, threshold_HC.double())
        mean_HC = window_score_HC / self.sequences
        threshold_HC.copy_(torch.where(sound_H1, keep * old_HC + (1 - keep) * mean_HC, threshold_HC.double()))

    def revive(self) -> None:
        """Restart long idle clusters beside the fullest cluster of their head, with its threshold."""
        idle_HC = self.idle_HC >= self.revive_after
        fullest_H = self.count_HC.argmax(-1)
        head_H = torch.arange(len(fullest_H), device=fullest_H.device)
        generator = torch.Generator().manual_seed(int(self.steps))
        nudge_HCD = torch.randn(self.centroid_HCD.shape, generator=generator).to(self.centroid_HCD.device)
        beside_HCD = to_sphere(self.centroid_HCD[head_H, fullest_H][:, None] + 0.1 * nudge_HCD)
        self.centroid_HCD.copy_(torch.where(idle_HC[..., None], beside_HCD, self.centroid_HCD))
        for threshold_HC in (self.threshold_HC, self.key_threshold_HC):
            if threshold_HC is not None:
                threshold_HC.copy_(torch.where(idle_HC, threshold_HC[head_H, fullest_H][:, None], threshold_HC))
        self.idle_HC.masked_fill_(idle_HC, 0)


def all_centroids(model: nn.Module) -> list[Centroids]:
    """Return the centroids of every routing layer, bottom to top."""
    return [module for module in model.modules() if isinstance(module, Centroids)]


def update_centroids(model: nn.Module) -> None:
    """Move the centroids and thresholds of every routing layer; call it once after each optimizer step, on every rank.

    Statistics are summed over ranks first, so that all ranks take the same step from the joined batch.
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


@torch.no_grad()
def initialise_from_data(model: nn.Module, tokens_BN: Tensor) -> None:
    """Start every layer's centroids at queries of one sequence (routing.init=data); the same on every rank.

    `model.loss(tokens)` is run once in evaluation mode; each layer seeds itself as the sequence reaches it. Centroids
    that it does not reach, or reaches with padding alone, wait for the next sequence that comes.
    """
    for centroids in all_centroids(model):
        centroids.seed_with_next = True
    was_training = model.training
    model.eval()
    model.loss(tokens_BN[:1])  # type: ignore[operator]
    model.train(was_training)
