"""Routing heads: a position reads the positions that share a cluster with it (paper section 4.1, Algorithm 1).

Shapes: B sequences, H routing heads, C clusters, N positions, D head size, W attention window, L = B * H * C lists,
P query members and A key members of all lists together.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from rtx.attention import oracle
from rtx.attention.arguments import check_choice, check_number
from rtx.attention.cache import ClusterCache
from rtx.attention.centroids import Centroids, paused, to_sphere
from rtx.attention.packed import Packed, Part, Reads, members_read, queries_read
from rtx.attention.pattern import Inputs, Pattern, routed_options
from rtx.attention.selection import (
    SELECTIONS,
    Assignment,
    PrefixTopK,
    arrivals,
    assign,
    centroid_scores,
    joins,
    normalise,
    tie_margin,
)
from rtx.attention.softmax import Relative
from rtx.config import Config, clusters


class Snapshot(NamedTuple):
    """What the first sequence of the last training batch looked like to some heads, for telemetry."""

    lists: list[Packed]
    """The members, or those of queries and of keys."""
    q_HND: Tensor
    k_HND: Tensor
    real_N: Tensor | None
    """False at padding, which is in no cluster; None: there is none."""


class Routing(Pattern):
    """H routing heads: each position reads, in every cluster that it is a member of, the last W members up to itself.

    Queries and keys are normalised (LayerNorm without scale or bias); members are chosen by their dot products with the
    centroids. A position in several clusters gets the mean of their outputs.

    Args:
        centroids: the centroids of these heads; their `keys` say what stands for keys. "shared": the queries
            (Algorithm 1 with its left-to-right mask). "separate": queries and keys have memberships of their own by
            the same centroids (TACL version, section 4.1). "projected": a position has one membership, that of
            W_R (q + k) (the ICLR and first arXiv versions; W_R (q + k) is not normalised again).
        selection: "topk": each centroid takes its W best positions of the whole sequence, as Algorithm 1 does (but
            masked by true positions, and divided by the clusters' count exactly). **It sees the future**: which past
            positions are members depends on later ones; `prefix` decides each from the prefix alone. "causal": a
            position joins every cluster that scores it at or above its threshold, and where there is none the one whose
            threshold it misses by least. "nearest": the cluster alone that scores it highest. The last two are strictly
            causal.
        attend_self: false: a position reads itself only where it sees nothing else.
        commitment: weight of the mean squared distance between what is clustered and its nearest centroid.
    """

    def __init__(
        self, centroids: Centroids, *, selection: str, attend_self: bool = True, commitment: float = 0.0, **given: Any
    ) -> None:
        super().__init__(**given)
        check_choice("selection", selection, SELECTIONS)
        check_number("commitment", commitment, "finite and at least 0", lambda x: 0 <= x < math.inf)
        self.centroids, self.selection, self.commitment = centroids, selection, commitment
        self.attend_self = attend_self
        self.heads, _, self.size = centroids.centroid_HCD.shape
        self.has_keys = centroids.keys != "shared"
        self.strictly_causal = selection != "topk"
        self.snapshot: Snapshot | None = None
        self.nearest: list[Tensor] = []

    @classmethod
    def from_config(cls, config: Config, heads: int, layer: int) -> Self:
        routing, model = config.routing, config.model
        centroids = Centroids(
            heads,
            clusters(config),
            model.hidden // model.heads,
            window=routing.window,
            length=config.data.length,
            decay=routing.decay,
            update=routing.update,
            threshold_rate=routing.threshold_rate if routing.selection == "causal" else 0.0,
            keys="separate" if routing.keys == "tied" else routing.keys,
        )
        own = {"selection": routing.selection, "commitment": routing.commitment}
        return cls(centroids, **own, **routed_options(config))

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> tuple[Tensor, Tensor]:
        q_BHND = normalise(q_BHND)
        return q_BHND, q_BHND if k_BHND is None else normalise(k_BHND)

    def clustered(self, given: Inputs) -> list[Tensor]:
        """Return what is clustered: one vector of each position, or its query and its key apart."""
        if self.centroids.keys == "separate":
            return [given.q_BHND, given.k_BHND]
        if self.centroids.projection_HDD is None:
            return [given.q_BHND]
        with torch.autocast(given.q_BHND.device.type, enabled=False):
            projection_HDD = self.centroids.projection_HDD.to(given.q_BHND.dtype)
            return [(given.q_BHND + given.k_BHND) @ projection_HDD.transpose(-1, -2)]

    def thresholds(self) -> list[Tensor | None]:
        """Return the thresholds `[H, C]` of what is clustered."""
        return [self.centroids.threshold_HC, self.centroids.key_threshold_HC]

    def assign(self, given: Inputs, real_BN: Tensor | None) -> list[Assignment]:
        """Return the members of every cluster: positions, or queries and keys apart."""
        store = self.centroids
        return [
            assign(
                store.centroid_HCD,
                x_BHND,
                real_BN,
                selection=self.selection,
                window=store.window,
                threshold_HC=threshold_HC if self.selection == "causal" or store.threshold_rate else None,
                update=store.update_rule if self.training and not paused.get() else None,
                nearest=self.training and bool(self.commitment),
                backend=self.backend,
            )
            for x_BHND, threshold_HC in zip(self.clustered(given), self.thresholds(), strict=False)
        ]

    def reads(self, given: Inputs, real_BN: Tensor | None, prefix: bool) -> list[Part]:
        """See `Pattern.reads`; in training the centroids gather their statistics here."""
        store, N = self.centroids, given.q_BHND.shape[2]
        if store.seed_with_next and store.training:
            store.seed_from([x.detach() for x in self.clustered(given)], real_BN)
        if prefix and self.selection == "topk":
            self.nearest = []
            # All that ever joined, until they leave: at least one is there beside a newcomer, unless W is 1.
            both = [arrivals(store.centroid_HCD, x, real_BN, store.window) for x in self.clustered(given)]
            part = queries_read(both[0].lists, both[-1].lists, N, N, self.attend_self or store.window == 1)
            return [part._replace(until_M=both[-1].leaves_M)]
        found = self.assign(given, real_BN)
        lists = [one.lists for one in found]
        if self.training:
            B = len(given.q_BHND)
            real = (B * N, B) if real_BN is None else (int(real_BN.sum()), int(real_BN.any(-1).sum()))
            for number, one in enumerate(found):
                if one.statistics is not None:
                    store.observe(one.statistics, *real, of_keys=number == 1)
            self.nearest = [one.nearest_BHN for one in found if one.nearest_BHN is not None]
            self.snapshot = self.first_sequence(given, lists, real_BN)
        return [self.read_lists(lists, N)]

    def read_lists(self, lists: list[Packed], length: int) -> Reads:
        """Return who reads whom where positions are members, or queries and keys apart."""
        if len(lists) == 1:
            return members_read(lists[0], length, self.centroids.window, self.attend_self)
        return queries_read(lists[0], lists[1], length, self.centroids.window, self.attend_self)

    def first_sequence(self, given: Inputs, lists: list[Packed], real_BN: Tensor | None) -> Snapshot | None:
        """Return what the first sequence looked like; a copy, unless it is the only one."""
        B, H, N, _ = given.q_BHND.shape
        if not B * H * N:
            return None
        q_HND, k_HND, real_N = (None if x is None else x[0].detach() for x in (*given[2:4], real_BN))
        if B > 1:
            count = H * self.centroids.centroid_HCD.shape[1]
            lists = [Packed(x.row_M[: int(x.count_L[:count].sum())].clone(), x.count_L[:count].clone()) for x in lists]
            q_HND, k_HND, real_N = (None if x is None else x.clone() for x in (q_HND, k_HND, real_N))
        assert q_HND is not None and k_HND is not None
        return Snapshot(lists, q_HND, k_HND, real_N)

    def loss(self, given: Inputs, real_BN: Tensor | None) -> Tensor:
        """Return the weighted commitment loss, zero outside training."""
        if not self.training or not self.commitment or not self.nearest or not given.q_BHND.numel():
            return super().loss(given, real_BN)
        pairs = zip(self.clustered(given), self.nearest, strict=True)
        return torch.stack([self.distance(x_BHND, nearest_BHN, real_BN) for x_BHND, nearest_BHN in pairs]).mean()

    def distance(self, x_BHND: Tensor, nearest_BHN: Tensor, real_BN: Tensor | None) -> Tensor:
        """Return the weighted mean of (x - nearest centroid on the sphere)^2 over real positions."""
        centroid_HCD = to_sphere(self.centroids.centroid_HCD).to(x_BHND.dtype)
        head_H1 = torch.arange(x_BHND.shape[1], device=x_BHND.device)[:, None]
        apart_BN = (x_BHND - centroid_HCD[head_H1, nearest_BHN]).square().mean((1, 3))
        apart = apart_BN.mean() if real_BN is None else (apart_BN * real_BN).sum() / real_BN.sum().clamp(min=1)
        return self.commitment * apart

    def rule(self, given: Inputs, head: int, prefix: bool) -> Tensor:
        centroid_CD = self.centroids.centroid_HCD[head]
        scores = [centroid_CD.to(x.dtype) @ x[0, head].T for x in self.clustered(given)]
        window = self.centroids.window
        if prefix and self.selection == "topk":
            return oracle.prefix_topk(scores[0], scores[-1], window)
        if self.selection == "topk":
            members = [oracle.topk_members(score_CN, window) for score_CN in scores]
        elif self.selection == "nearest":
            members = [oracle.nearest_members(score_CN) for score_CN in scores]
        else:
            pairs = zip(scores, self.thresholds(), strict=False)
            members = [oracle.threshold_members(score_CN, t_HC[head]) for score_CN, t_HC in pairs if t_HC is not None]
        return oracle.last_members(members[0], members[-1], window)

    def start(self, relative: Relative | None = None) -> RoutingCache:
        return RoutingCache(self, self.centroids.window, relative)

    def lists_kept(self, given: Inputs, cache: RoutingCache) -> Packed:
        """Return the key members that a prompt leaves in a stream's cache, and keep the best scores of topk there."""
        if self.selection != "topk":
            return self.assign(given, None)[-1].lists
        store, N = self.centroids, given.q_BHND.shape[2]
        cache.best = [arrivals(store.centroid_HCD, x, None, store.window).best for x in self.clustered(given)]
        position_LW = cache.best[-1].position_W
        list_M, slot_M = (position_LW < N).nonzero(as_tuple=True)
        rows_M = list_M // store.centroid_HCD.shape[1] * N + position_LW[list_M, slot_M]
        return Packed(rows_M, torch.bincount(list_M, minlength=len(position_LW)))

    def join(self, given: Inputs, position: int, cache: RoutingCache) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return which clusters a step's query and key join, and with topk the slots that the key takes."""
        scores = [centroid_scores(self.centroids.centroid_HCD, x) for x in self.clustered(given)]
        if self.selection != "topk":
            thresholds = self.thresholds() if self.selection == "causal" else (None, None)
            joined = [joins(score, t_HC)[..., 0] for score, t_HC in zip(scores, thresholds, strict=False)]
            return joined[0], joined[-1], None
        offers = [cache.offer(number, score[..., 0], position) for number, score in enumerate(scores)]
        return offers[0][0], *offers[-1]


class RoutingCache(ClusterCache):
    """The last W members of every cluster, or with topk the best W of the prefix and their scores."""

    pattern: Routing
    best: list[PrefixTopK]
    """Of queries, and of keys with memberships of their own."""

    def __init__(self, pattern: Routing, slots: int, relative: Relative | None = None) -> None:
        super().__init__(pattern, slots, relative)
        self.best = []

    def offer(self, number: int, score_BHC: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Offer a position's scores to the best of queries (number 0) or keys; return where it joins, and its slots."""
        if number == len(self.best):
            margin_HC = tie_margin(self.pattern.centroids.centroid_HCD, score_BHC.dtype)
            margin_L = margin_HC.expand_as(score_BHC).flatten()
            self.best.append(PrefixTopK((score_BHC.numel(),), self.slots, score_BHC, margin_L))
        at_L = torch.full((score_BHC.numel(),), position, device=score_BHC.device)
        joins_L, slot_L, _ = self.best[number].offer(score_BHC.flatten(), at_L)
        return joins_L.view(score_BHC.shape), slot_L.view(score_BHC.shape)
