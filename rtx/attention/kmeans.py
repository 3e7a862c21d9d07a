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

from rtx.attention.selection import window_scores

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


class Centroids(nn.Module):
    """Spherical online k-means of the queries of H heads (paper section 4.1, Algorithm 1 lines 28 to 31).

    Buffers are float32 whatever the precision around them, and are saved with the model:
    `centroid_HCD`; `threshold_HC`, the score at which a position joins a cluster (selection=causal); `idle_HC`, steps
    since a cluster last had a member; `steps`, updates so far. Sums gathered between two updates are float64 and not
    saved.

    Args:
        update: "mean" moves a centroid towards its members' mean and puts it back on the sphere; an empty cluster keeps
            its centroid. "sum" is Algorithm 1 as printed, with sums over one sequence (the mean over the sequences of a
            step); nothing is normalised.
        thresholds: whether thresholds are learned: the running mean of the score that keeps `window` of `length`
            positions.
        revive_after: steps without a member after which a centroid restarts beside the fullest one of its head; 0:
            never.
    """

    centroid_HCD: Tensor
    threshold_HC: Tensor
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
    ) -> None:
        super().__init__()
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
        self.sequences = torch.zeros((), dtype=torch.float64, device=device)

    def sums(self) -> tuple[Tensor, ...]:
        """The statistics gathered since the last update, to be summed over ranks."""
        return self.sum_HCD, self.count_HC, self.window_score_HC, self.sequences

    @torch.no_grad()
    def scores(self, q_BHND: Tensor) -> Tensor:
        """Return the dot products `[B, H, C, N]` of centroids with normalised queries, float32 or wider."""
        with torch.autocast(q_BHND.device.type, enabled=False):
            centroid_HCD = self.centroid_HCD.to(torch.promote_types(q_BHND.dtype, torch.float32))
            return centroid_HCD @ q_BHND.to(centroid_HCD.dtype).transpose(-1, -2)

    @torch.no_grad()
    def observe(self, q_BHND: Tensor, score_BHCN: Tensor) -> Tensor:
        """Gather statistics of a training batch (unless paused); return the nearest centroids `[B, H, N]`."""
        nearest_BHN = score_BHCN.argmax(dim=2)
        if _paused.get():
            return nearest_BHN
        H, C, D = self.centroid_HCD.shape
        cell_BHN = nearest_BHN + torch.arange(H, device=q_BHND.device)[None, :, None] * C
        self.sum_HCD.view(H * C, D).index_add_(0, cell_BHN.flatten(), q_BHND.reshape(-1, D).double())
        self.count_HC += torch.bincount(cell_BHN.flatten(), minlength=H * C).view(H, C)
        self.sequences += q_BHND.shape[0]
        if self.thresholds:
            self.window_score_HC += window_scores(score_BHCN, self.window, self.length).double().sum(0)
        return nearest_BHN

    @torch.no_grad()
    def seed_from(self, q_BHND: Tensor) -> None:
        """Start the centroids at queries of the first sequence, and the thresholds at what keeps W of N of them."""
        H, C, _ = self.centroid_HCD.shape
        N = q_BHND.shape[2]
        generator = torch.Generator().manual_seed(0)
        draw_HC = torch.stack([torch.randperm(max(N, C), generator=generator)[:C] % N for _ in range(H)])
        head_H1 = torch.arange(H)[:, None]
        self.centroid_HCD.copy_(to_sphere(q_BHND[0][head_H1, draw_HC.to(q_BHND.device)].float()))
        self.threshold_HC.copy_(window_scores(self.scores(q_BHND[:1]), self.window, self.length)[0])
        self.seed_with_next = False

    @torch.no_grad()
    def update(self) -> None:
        """Apply the gathered (and reduced) statistics, and forget them. Nothing gathered: nothing changes."""
        if self.sequences == 0:
            return
        sum_HCD, full_HC1 = self.sum_HCD, (self.count_HC > 0)[..., None]
        old_HCD = self.centroid_HCD.double()
        if self.update_rule == "mean":
            mean_HCD = sum_HCD / self.count_HC[..., None].clamp_min(1)
            moved_HCD = to_sphere(self.decay * old_HCD + (1 - self.decay) * mean_HCD)
            new_HCD = torch.where(full_HC1, moved_HCD, old_HCD)
        else:
            # Queries and keys are the same vectors: two halves of one sum.
            new_HCD = self.decay * old_HCD + (1 - self.decay) * sum_HCD / self.sequences
        self.centroid_HCD.copy_(new_HCD)
        if self.thresholds:
            mean_HC = self.window_score_HC / self.sequences
            keep = torch.where(self.steps == 0, 0.0, self.threshold_decay)
            old_HC = torch.where(self.steps == 0, 0.0, self.threshold_HC.double())
            self.threshold_HC.copy_(keep * old_HC + (1 - keep) * mean_HC)
        self.steps += 1
        self.idle_HC.copy_(torch.where(full_HC1[..., 0], 0, self.idle_HC + 1))
        if self.revive_after:
            self.revive()
        self.reset_sums()

    def revive(self) -> None:
        """Restart long idle clusters beside the fullest cluster of their head, with its threshold."""
        idle_HC = self.idle_HC >= self.revive_after
        fullest_H = self.count_HC.argmax(-1)
        head_H = torch.arange(len(fullest_H), device=fullest_H.device)
        generator = torch.Generator().manual_seed(int(self.steps))
        nudge_HCD = torch.randn(self.centroid_HCD.shape, generator=generator).to(self.centroid_HCD.device)
        beside_HCD = to_sphere(self.centroid_HCD[head_H, fullest_H][:, None] + 0.1 * nudge_HCD)
        self.centroid_HCD.copy_(torch.where(idle_HC[..., None], beside_HCD, self.centroid_HCD))
        self.threshold_HC.copy_(torch.where(idle_HC, self.threshold_HC[head_H, fullest_H][:, None], self.threshold_HC))
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

    `model.loss(tokens)` is run once in evaluation mode; each layer seeds itself as the sequence reaches it.
    """
    for centroids in all_centroids(model):
        centroids.seed_with_next = True
    was_training = model.training
    model.eval()
    model.loss(tokens_BN[:1])  # type: ignore[operator]
    model.train(was_training)
