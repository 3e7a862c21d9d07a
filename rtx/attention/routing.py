"""Routing heads: a position reads the positions that share a cluster with it (paper section 4.1, Algorithm 1).

Shapes: B sequences, H routing heads, C clusters, N positions, D head size, W attention window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.clusters import attend_members, pack
from rtx.attention.heads import Heads, Rotate, turn_step
from rtx.attention.kmeans import Centroids, to_sphere
from rtx.attention.prefix import attend_prefix_topk
from rtx.attention.selection import BestOfPrefix, threshold_members, topk_members
from rtx.attention.state import ClusterState
from rtx.attention.weights import Distances, logit_scale


def normalise(q_BHND: Tensor) -> Tensor:
    """Return LayerNorm(q) without scale or bias, at least in float32 (Algorithm 1, line 7)."""
    return F.layer_norm(q_BHND.to(torch.promote_types(q_BHND.dtype, torch.float32)), q_BHND.shape[-1:], eps=1e-6)


def routing(
    q_BHND: Tensor,
    v_BHND: Tensor,
    centroid_HCD: Tensor,
    *,
    window: int,
    selection: str = "causal",
    threshold_HC: Tensor | None = None,
    scale: float | None = None,
    attend_self: bool = True,
    dropout: float = 0.0,
    relative: Distances | None = None,
    rotate: Rotate | None = None,
    streaming: bool = False,
) -> Tensor:
    """Return causal routing attention with shared queries and keys, `[B, H, N, D]`.

    Args:
        q_BHND: queries before normalisation; keys are the same vectors.
        centroid_HCD: centroids, of any norm.
        selection: "topk": each centroid takes its `window` best positions of the whole sequence, and a member reads the
            members up to itself. It follows Algorithm 1, but masks true positions, averages over the clusters of a
            position and divides by their count exactly. **It sees the future**: which past positions are members
            depends on later ones. "causal": a position joins every cluster whose centroid scores it at or above
            `threshold_HC`, and reads the last `window` members up to itself; strictly causal.
        scale: multiplies the logits (default 1 / sqrt(D); Algorithm 1 prints 1).
        attend_self: false: a position reads itself only where it sees nothing else.
        rotate: applied to the normalised queries after selection (rotary positions).
        streaming: with "topk", decide every membership from the prefix alone (evaluation only).

    A position in several clusters gets the mean of their outputs; in none, zero.

    Raises:
        ValueError: an unknown selection, or "causal" without thresholds.
    """
    if selection not in ("causal", "topk"):
        raise ValueError(f"selection={selection!r}: must be one of causal, topk")
    if selection == "causal" and threshold_HC is None:
        raise ValueError("selection=causal needs threshold_HC")
    scale = logit_scale(scale, q_BHND.shape[-1])
    q_BHND = normalise(q_BHND)
    with torch.no_grad(), torch.autocast(q_BHND.device.type, enabled=False):
        score_BHCN = centroid_HCD.to(q_BHND.dtype) @ q_BHND.transpose(-1, -2)
    logits_BHND = (q_BHND if rotate is None else rotate(q_BHND)).to(v_BHND.dtype)
    if streaming and selection == "topk":
        return attend_prefix_topk(
            logits_BHND, v_BHND, score_BHCN, window=window, scale=scale, attend_self=attend_self, relative=relative
        )
    member_BHCN = select(score_BHCN, window, threshold_HC if selection == "causal" else None)
    return attend_members(
        logits_BHND,
        logits_BHND,
        v_BHND,
        pack(member_BHCN),
        window=window,
        scale=scale,
        attend_self=attend_self,
        dropout=dropout,
        relative=relative,
    )


@torch.no_grad()
def select(score_BHCN: Tensor, window: int, threshold_HC: Tensor | None) -> Tensor:
    """Return the membership mask `[B, H, C, N]`: by thresholds where given, else the top `window` of each cluster."""
    if threshold_HC is None:
        return topk_members(score_BHCN, window)
    return threshold_members(score_BHCN, threshold_HC)


class Snapshot(NamedTuple):
    """What the first sequence of the last training batch looked like to some heads, for telemetry."""

    member_HCN: Tensor
    nearest_HN: Tensor
    logits_HND: Tensor


class RoutingHeads(Heads):
    """H routing heads with their centroids: `routing`, plus what training gathers.

    Args:
        centroids: the centroids of these heads.
        selection: "causal" or "topk".
        scale: multiplies the logits.
        attend_self: false: a position reads itself only where it sees nothing else.
        dropout: on attention weights, in training.
        commitment: weight of the mean squared distance between a query and its nearest centroid.
    """

    def __init__(
        self,
        centroids: Centroids,
        *,
        selection: str,
        scale: float,
        attend_self: bool = True,
        dropout: float = 0.0,
        commitment: float = 0.0,
    ) -> None:
        super().__init__()
        self.centroids = centroids
        self.selection, self.scale, self.attend_self = selection, scale, attend_self
        self.dropout, self.commitment = dropout, commitment
        self.snapshot: Snapshot | None = None

    def forward(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor | None,
        v_BHND: Tensor,
        *,
        rotate: Rotate | None = None,
        relative: Distances | None = None,
        streaming: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See `Heads.forward`; the loss is the weighted commitment loss, zero outside training."""
        q_BHND = normalise(q_BHND)
        if self.centroids.seed_with_next:
            self.centroids.seed_from(q_BHND)
        score_BHCN = self.centroids.scores(q_BHND)
        logits_BHND = (q_BHND if rotate is None else rotate(q_BHND)).to(v_BHND.dtype)
        options = {"window": self.centroids.window, "scale": self.scale, "attend_self": self.attend_self}
        if streaming and self.selection == "topk":
            out_BHND = attend_prefix_topk(logits_BHND, v_BHND, score_BHCN, relative=relative, **options)
            return out_BHND, q_BHND.new_zeros(())
        member_BHCN = select(score_BHCN, self.centroids.window, self.thresholds())
        loss = q_BHND.new_zeros(())
        if self.training:
            nearest_BHN = self.centroids.observe(q_BHND.detach(), score_BHCN)
            loss = self.commitment_loss(q_BHND, nearest_BHN)
            self.snapshot = Snapshot(member_BHCN[0].clone(), nearest_BHN[0].clone(), logits_BHND[0].detach().clone())
        dropout = self.dropout if self.training else 0.0
        out_BHND = attend_members(
            logits_BHND, logits_BHND, v_BHND, pack(member_BHCN), dropout=dropout, relative=relative, **options
        )
        return out_BHND, loss

    def thresholds(self) -> Tensor | None:
        """The thresholds `[H, C]` of causal selection, None for top-w."""
        return self.centroids.threshold_HC if self.selection == "causal" else None

    def commitment_loss(self, q_BHND: Tensor, nearest_BHN: Tensor) -> Tensor:
        """Return the weighted mean of (q - nearest centroid on the sphere)^2."""
        if not self.commitment:
            return q_BHND.new_zeros(())
        centroid_HCD = to_sphere(self.centroids.centroid_HCD).to(q_BHND.dtype)
        head_H1 = torch.arange(q_BHND.shape[1], device=q_BHND.device)[:, None]
        return self.commitment * F.mse_loss(q_BHND, centroid_HCD[head_H1, nearest_BHN])

    def start(self, relative: Distances | None = None) -> RoutingState:
        """See `Heads.start`."""
        return RoutingState(self, relative)


class RoutingState:
    """Streaming routing heads: for each cluster its last W members (causal) or the best W positions so far (topk)."""

    def __init__(self, heads: RoutingHeads, relative: Distances | None) -> None:
        self.heads = heads
        window = heads.centroids.window
        self.clusters = ClusterState(window, heads.scale, heads.attend_self, relative)
        self.best: BestOfPrefix | None = None

    def step(
        self, q_BHD: Tensor, k_BHD: Tensor | None, v_BHD: Tensor, position: int, rotate: Rotate | None = None
    ) -> Tensor:
        """Take in the next position of each stream and return its output `[B, H, D]`."""
        q_BHD = normalise(q_BHD)
        score_BHC = self.heads.centroids.scores(q_BHD[:, :, None])[..., 0]
        logits_BHD = turn_step(q_BHD, rotate).to(v_BHD.dtype)
        threshold_HC = self.heads.thresholds()
        if threshold_HC is not None:
            joins_BHC = score_BHC >= threshold_HC
            slot_BHC = self.clusters.oldest_slot(joins_BHC)
        else:
            if self.best is None:
                self.best = BestOfPrefix(tuple(score_BHC.shape), self.heads.centroids.window, score_BHC)
            joins_BHC, slot_BHC, _ = self.best.offer(score_BHC, position)
        return self.clusters.step(logits_BHD, v_BHD, joins_BHC, slot_BHC, position)
