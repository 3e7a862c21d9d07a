"""Two selections that were tried and are not part of rtx; docs/results/long_text.md has figures.

    rtx train experiment=long_text heads=probed seed=100 trainer.steps=300
        trainer.max_minutes=null extensions=docs/results/tried.py
        routing.selection=probed_and_near routing.candidates=128
    rtx train experiment=long_text heads=causal seed=100 trainer.steps=300
        trainer.max_minutes=null extensions=docs/results/tried.py
        routing.selection=clusters_by_recall routing.window=128 routing.clusters=64 routing.decay=1

Shapes: B sequences, H heads, C clusters, N positions, D head size, S sampled queries, R rows, K
keys of a query.
"""

import math

import torch
from torch import Tensor

import rtx
from rtx.attention import Local, Probed, Thresholds
from rtx.attention.centroids import gathering, to_sphere
from rtx.attention.probed import ProbedCache
from rtx.attention.reads import IndexReads, QueriesKeys, Reads
from rtx.attention.top_keys import readable_count
from rtx.model.heads import clusters, head_size, make_centroids, selection_options

SMALL = 1e-9
"""Added to soft counts, so that the logarithm of 0 is finite."""


class ProbedAndNear(Probed):
    """Probed keys and the last keys of each query, in one softmax.

    Args:
        near: how many of the last keys each query reads. Probed keys among them are left out.
    """

    def __init__(self, heads: int, size: int, *, near: int, **options) -> None:
        super().__init__(heads, size, **options)
        self.near = near
        self.local = Local(window=near, attend_self=self.attend_self)

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        (probed,) = super().reads(qk, streaming)
        assert isinstance(probed, IndexReads)
        index_RK = probed.index_RK
        row_R = torch.arange(len(index_RK), device=index_RK.device)
        is_near_RK = row_R[:, None] - index_RK < self.near
        far = probed._replace(index_RK=index_RK.masked_fill(is_near_RK, -1))
        return [far, *self.local.reads(qk, streaming)]

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        near_1NN = self.local.rule(qk, head, streaming)
        return super().rule(qk, head, streaming) | near_1NN

    def start(self, relative=None):
        return ProbedAndNearCache(self, relative)


class ProbedAndNearCache(ProbedCache):
    """The cache of `Probed`, whose newest query reads the last slots, too."""

    def chosen_slots(self, qk: QueriesKeys, position: int) -> Tensor:
        probed_BH1K = super().chosen_slots(qk, position)
        is_near_BH1K = position - probed_BH1K < self.pattern.near
        far_BH1K = probed_BH1K.masked_fill(is_near_BH1K, -1)
        first = max(0, position + 1 - self.pattern.near)
        stop = readable_count(position, self.pattern.attend_self)
        near_K = torch.arange(first, stop, device=far_BH1K.device)
        near_BH1K = near_K.expand(*far_BH1K.shape[:3], -1)
        return torch.cat([far_BH1K, near_BH1K], dim=-1)


class ClustersByRecall(Thresholds):
    """Clusters with thresholds, whose centroids are trained so that the keys that a query would
    weigh most in full attention are in its clusters.

    Queries are drawn from the last seven eighths of each training sequence. For each of them, p is
    the softmax of its logits of all keys up to it, and

        r_j = sum over clusters c of sigmoid(q . mu_c - t_c) sigmoid(k_j . mu_c - t'_c)

    is a soft count of the clusters that query and key share. The loss is the cross-entropy of p and
    of r, normalised over j. Its gradient moves the centroids alone, by a fixed distance a step in
    the direction of a running mean of gradients. Thresholds move as in `Thresholds`.

    Args:
        queries: the number of sampled queries of each head.
        rate: the distance, as a share of a centroid's norm.
        momentum: the share of the running mean that remains after a step.
    """

    def __init__(self, centroids, *, queries: int, rate: float, momentum: float, **options) -> None:
        super().__init__(centroids, **options)
        self.queries = queries
        self.rate = rate
        self.momentum = momentum
        self.gradient_HCD: Tensor | None = None
        self.mean_HCD = torch.zeros_like(centroids.centroid_HCD)

    def loss(self, qk: QueriesKeys, parts: list[Reads]) -> Tensor:
        if self.training and not gathering.is_paused:
            _, self.gradient_HCD = self.divergence(qk)
        return super().loss(qk, parts)

    def divergence(self, qk: QueriesKeys) -> tuple[Tensor, Tensor]:
        """Return the loss, and its gradient with respect to the centroids, `[H, C, D]`."""
        N = qk.q_BHND.shape[2]
        position_S = torch.randint(N // 8, N, (self.queries,))
        is_later_SN = torch.arange(N) > position_S[:, None]
        rotated_q_BHSD = qk.rotated_q_BHND.detach()[:, :, position_S]
        logit_BHSN = rotated_q_BHSD @ qk.rotated_k_BHND.detach().mT
        logit_BHSN = logit_BHSN * self.terms(rotated_q_BHSD.shape[-1], None).scale
        weight_BHSN = logit_BHSN.masked_fill(is_later_SN, -math.inf).softmax(-1)
        q_BHSD = qk.q_BHND.detach()[:, :, position_S]
        with torch.enable_grad():
            centroid_HCD = self.centroids.centroid_HCD.clone().requires_grad_()
            shared_BHSN = self.clusters_shared(q_BHSD, qk.k_BHND.detach(), centroid_HCD)
            shared_BHSN = shared_BHSN.masked_fill(is_later_SN, 0) + SMALL
            share_BHSN = shared_BHSN / shared_BHSN.sum(-1, keepdim=True)
            loss = -(weight_BHSN * share_BHSN.log()).sum(-1).mean()
            (gradient_HCD,) = torch.autograd.grad(loss, centroid_HCD)
        return loss.detach(), gradient_HCD

    def clusters_shared(self, q_BHSD: Tensor, k_BHND: Tensor, centroid_HCD: Tensor) -> Tensor:
        """Return the soft count of the clusters that a query and a key share, `[B, H, S, N]`."""
        query_threshold_HC, key_threshold_HC = self.centroids.thresholds()
        above_BHSC = q_BHSD @ centroid_HCD.mT - query_threshold_HC[:, None]
        above_BHNC = k_BHND @ centroid_HCD.mT - key_threshold_HC[:, None]
        return above_BHSC.sigmoid() @ above_BHNC.sigmoid().mT

    @torch.no_grad()
    def after_step(self) -> None:
        super().after_step()
        if self.gradient_HCD is None:
            return
        self.mean_HCD.mul_(self.momentum).add_(self.gradient_HCD, alpha=1 - self.momentum)
        direction_HCD = torch.nn.functional.normalize(self.mean_HCD, dim=-1)
        norm = math.sqrt(self.mean_HCD.shape[-1])
        moved_HCD = self.centroids.centroid_HCD - self.rate * norm * direction_HCD
        self.centroids.centroid_HCD.copy_(to_sphere(moved_HCD))
        self.gradient_HCD = None


def make_probed_and_near(heads, config, layer):
    """Return the heads of routing.selection=probed_and_near."""
    routing = config.routing
    return ProbedAndNear(
        heads,
        head_size(config),
        near=config.model.window,
        clusters=clusters(config),
        decay=routing.decay,
        candidates=routing.candidates,
        window=routing.window,
        qk_norm=True,
        **selection_options(config),
    )


def make_clusters_by_recall(heads, config, layer):
    """Return the heads of routing.selection=clusters_by_recall."""
    routing = config.routing
    return ClustersByRecall(
        make_centroids(heads, config, routing.threshold_rate),
        queries=64,
        rate=0.02,
        momentum=0.9,
        merge=routing.merge,
        **selection_options(config),
    )


rtx.register_pattern("probed_and_near", make_probed_and_near, selection=True)
rtx.register_pattern("clusters_by_recall", make_clusters_by_recall, selection=True)
