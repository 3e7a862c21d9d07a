"""Routing heads: a position reads the positions that share a cluster with it (paper section 4.1, Algorithm 1).

Statistics for the centroids are gathered in the forward pass of training.

Shapes: B sequences, H routing heads, C clusters, N positions, D head size, W attention window, L = B * H * C lists,
P query members and A key members of all lists together.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.arguments import check_choice, check_number
from rtx.attention.autocast import no_autocast
from rtx.attention.centroid_update import to_sphere
from rtx.attention.centroids import Centroids, gathering, is_rate, statistics_paused
from rtx.attention.clusters import ClusterCache, ClusterPattern, last_members
from rtx.attention.engine import native, static_selection
from rtx.attention.engine.by_triton import LISTS
from rtx.attention.engine.static_selection import Selected
from rtx.attention.members import PrefixTopK, arrivals, by_scores, centroid_scores, joins, products
from rtx.attention.reads import Holes, MemberLists, QueriesKeys, RangeReads, Reads, members_read, pack
from rtx.attention.static import is_static, selection_functions
from rtx.attention.ties import best, centroid_margin, highest

ROOM = 4
"""Lists on a GPU have room for this many times the intended number of members at first."""


class Routing(ClusterPattern):
    """H routing heads: the members of clusters are chosen by their dot products with the centroids.

    Other options than these: see `ClusterPattern`; its keys and window are those of the centroids.

    Args:
        centroids: the centroids of these heads; their `keys` say what stands for keys. "shared": the queries
            (Algorithm 1 with its left-to-right mask). "separate": queries and keys have memberships of their own by
            the same centroids (TACL version, section 4.1). "projected": a position has one membership, that of
            W_R (q + k) (the ICLR and first arXiv versions; W_R (q + k) is not normalised again).
        selection: "topk": each centroid takes its W best positions of the whole sequence, as Algorithm 1 does (but
            masked by true positions, and divided by the clusters' count exactly). **It sees the future**: which past
            positions are members depends on later ones; `streaming` decides each from the prefix alone. "causal": a
            position joins every cluster that scores it at or above its threshold, and where there is none the one whose
            threshold it misses by least. "nearest": the cluster alone that scores it highest. The last two are strictly
            causal.
        commitment: weight of the mean squared distance between what is clustered and its nearest centroid.
    """

    def __init__(self, centroids: Centroids, *, selection: str, commitment: float = 0.0, **options: Any) -> None:
        super().__init__(has_keys=centroids.keys != "shared", window=centroids.window, **options)
        check_choice("selection", selection, ("causal", "topk", "nearest"))
        check_number("commitment", commitment, "finite and at least 0", is_rate)
        self.centroids, self.selection, self.commitment = centroids, selection, commitment
        self.heads, _, self.size = centroids.centroid_HCD.shape
        self.strictly_causal = selection != "topk"
        self.seen: tuple[list[MemberLists], int] | None = None
        """The members in the last training batch (of its last padding), and how many rows it had, for telemetry."""
        self.may_lose_members = selection == "causal"
        """Whether lists on a GPU may lack room; see `make_room`."""
        self.room_factor = ROOM
        self.register_buffer("lost_members", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.lost_members: Tensor
        """How many members have been left out in training for want of room, since `make_room` looked."""

    def clustered(self, qk: QueriesKeys) -> list[Tensor]:
        """Return what is clustered: one vector of each position, or its query and its key apart."""
        if self.centroids.keys == "separate":
            return [qk.q_BHND, qk.k_BHND]
        if self.centroids.projection_HDD is None:
            return [qk.q_BHND]
        with no_autocast(qk.q_BHND):
            projection_HDD = self.centroids.projection_HDD.to(qk.q_BHND.dtype)
            return [(qk.q_BHND + qk.k_BHND) @ projection_HDD.transpose(-1, -2)]

    def thresholds(self) -> list[Tensor | None]:
        """Return the thresholds `[H, C]` of what is clustered, None where they choose nothing."""
        store = self.centroids
        return [store.threshold_HC, store.key_threshold_HC] if self.selection == "causal" else [None, None]

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        store = self.centroids
        if store.seed_with_next and store.training:
            store.seed_from([x.detach() for x in self.clustered(qk)])
        if streaming and self.selection == "topk":
            return self.prefix_reads(qk)
        if is_static(qk.q_BHND, self.backend):
            return self.static_reads(qk)
        return super().reads(qk, streaming)

    def static_reads(self, qk: QueriesKeys) -> list[Reads]:
        """Return who reads whom, in lists with room for a fixed number of members.

        In training the CPU never waits for a GPU. In evaluation causal selection reads one number back (`select`).
        """
        N = qk.q_BHND.shape[2]
        selected = []
        members = []
        for number, x_BHND in enumerate(self.clustered(qk)):
            x_BHND = x_BHND.to(torch.promote_types(x_BHND.dtype, torch.float32))
            choose = self.chooser(x_BHND)
            selected.append(self.select(number, x_BHND, choose))
            members.append(packed_of(selected[number]))
            if self.training and not gathering.is_paused:
                self.observe(number, x_BHND, selected[number], members[number])
        self.remember(members, qk)
        if len(selected) == 1:
            lists = selected[0].lists
        else:
            queries, keys = selected
            lists = static_selection.separate_lists(queries, keys, N, self.window, self.attend_self)
        part = RangeReads(
            query=members[0],
            key=members[-1],
            start_P=lists.start_P,
            stop_P=lists.stop_P,
            length=N,
            most=min(self.window, N),
            derived={LISTS: lists},
        )
        return [part]

    @torch.no_grad()
    def select(self, number: int, x_BHND: Tensor, choose: partial[Selected]) -> Selected:
        """Return the same members as `assign`, in static shapes, of vectors in float32 or wider.

        With causal selection the lists may lack room. In training the members without room are left out
        and counted (`lost_members`). In evaluation the selection is repeated with room for all.
        """
        rows = x_BHND.shape[:3].numel()
        threshold_HC = self.thresholds()[number]
        if self.selection == "topk":
            return self.select_best(x_BHND, choose.keywords["margin_HC"])
        if threshold_HC is None:  # "nearest": one cluster for each position
            return choose(threshold_HC=None, room=rows)
        threshold_HC = threshold_HC.to(x_BHND.dtype)
        room = min(self.room(x_BHND), rows * threshold_HC.shape[1])
        selected = choose(threshold_HC=threshold_HC, room=room)
        if self.training:
            if not gathering.is_paused:
                self.lost_members += selected.lost
        elif lost := int(selected.lost):
            selected = choose(threshold_HC=threshold_HC, room=room + lost)
        return selected

    def chooser(self, x_BHND: Tensor) -> partial[Selected]:
        """Return the function that selects members by thresholds, or without them the nearest clusters."""
        store = self.centroids
        return partial(
            selection_functions(x_BHND, self.backend).by_thresholds,
            store.centroid_HCD,
            x_BHND,
            margin_HC=centroid_margin(store.centroid_HCD, x_BHND.dtype),
            window=self.window,
            attend_self=self.attend_self,
        )

    @torch.no_grad()
    def observe(self, number: int, x_BHND: Tensor, selected: Selected, members: MemberLists) -> None:
        """Let the centroids gather the statistics of a training batch; members without room are in no mean."""
        store = self.centroids
        functions = selection_functions(x_BHND, self.backend)
        counted = members
        if store.update_rule != "members" and self.selection != "nearest":
            margin_HC = centroid_margin(store.centroid_HCD, x_BHND.dtype)
            counted = functions.nearest_members(store.centroid_HCD, x_BHND, margin_HC)
        sum_LD = functions.list_sums(x_BHND.flatten(0, 2), counted.row_M, counted.count_L)
        moment_2BHC = None
        if self.thresholds()[number] is not None:
            moment_2BHC = functions.score_moments(store.centroid_HCD, x_BHND)
        store.observe(
            number,
            x_BHND,
            member_count_L=selected.count_L,
            sum_LD=sum_LD,
            count_L=counted.count_L,
            moment_2BHC=moment_2BHC,
        )

    def select_best(self, x_BHND: Tensor, margin_HC: Tensor) -> Selected:
        """Return the `window` best members of every cluster, or all positions where these are fewer."""
        B, H, N, _ = x_BHND.shape
        centroid_HCD = self.centroids.centroid_HCD
        C = centroid_HCD.shape[1]
        window = min(self.window, N)
        functions = selection_functions(x_BHND, self.backend)
        size = max(1, functions.MAX_SCORES // max(1, C * N))
        of_heads = (
            centroid_HCD.repeat(B, 1, 1).split(size),
            x_BHND.flatten(0, 1).split(size),
            margin_HC.repeat(B, 1).split(size),
        )
        best = []
        for centroid_XCD, x_XND, margin_XC in zip(*of_heads, strict=True):
            best.append(functions.top_members(products(centroid_XCD, x_XND), margin_XC, window))
        lists = functions.top_lists(torch.cat(best), N, window, self.attend_self)
        return Selected(
            row_M=lists.query_row_P,
            count_L=torch.full((B * H * C,), window, device=x_BHND.device),
            lists=lists,
            bound_L1=torch.arange(B * H * C + 1, device=x_BHND.device) * window,
            lost=torch.zeros(1, dtype=torch.int64, device=x_BHND.device),
        )

    def room(self, x_BHND: Tensor) -> int:
        """Return the room of the lists: `room_factor` times the number of members that all clusters are to hold."""
        B, H, N, _ = x_BHND.shape
        share = min(1.0, self.window / self.centroids.length)
        # Each position joins one cluster at least.
        expected = B * H * max(N, self.centroids.centroid_HCD.shape[1] * math.ceil(share * N))
        return self.room_factor * expected

    def remember(self, lists: list[MemberLists], qk: QueriesKeys) -> None:
        """Keep the members of a training batch for telemetry."""
        if self.training and not gathering.is_paused and (rows := qk.q_BHND.shape[:3].numel()):
            self.seen = lists, rows

    def prefix_reads(self, qk: QueriesKeys) -> list[Reads]:
        """Return who reads whom with top-w sets of every prefix."""
        store, N = self.centroids, qk.q_BHND.shape[2]
        # All that ever joined, until they leave: at least one is there beside a newcomer, unless W is 1.
        both = [arrivals(store.centroid_HCD, x, self.window) for x in self.clustered(qk)]
        part = members_read(both[0].lists, both[-1].lists, N, N, self.attend_self or self.window == 1)
        position_1P = part.query.row_M[None] % max(1, N)
        hidden = Holes(both[-1].leaves_M[None], torch.zeros_like(position_1P), position_1P + 1)
        return [part._replace(holes=hidden)]

    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        lists = [self.assign(number, x_BHND) for number, x_BHND in enumerate(self.clustered(qk))]
        self.remember(lists, qk)
        return lists

    @torch.no_grad()
    def assign(self, number: int, x_BHND: Tensor) -> MemberLists:
        """Return the members of every cluster, of positions or queries (number 0) or keys, `[B, H, N, D]`.

        Of equals (`rtx.attention.members` says what these are) it is the earlier position or the first cluster, which
        takes positions of NaN, too; else NaN is worse than every score. In training the centroids gather their
        statistics here.
        """
        store, gathers = self.centroids, self.training and not gathering.is_paused
        x_BHND = x_BHND.to(torch.promote_types(x_BHND.dtype, torch.float32))
        is_for_kernel = x_BHND.dtype == torch.float32 and x_BHND.device.type == "cpu"
        choose = native.select if is_for_kernel and native.wanted(self.backend, x_BHND.shape[2]) else by_scores
        nearest = self.selection == "nearest" or (gathers and store.update_rule != "members")
        window = 0 if self.selection == "nearest" else self.window
        given = store.centroid_HCD, x_BHND, self.thresholds()[number]
        row_M, count_L, nearest_BHN, moment_2BHC = choose(*given, window=window, nearest=nearest)
        lists = counted = MemberLists(row_M, count_L)
        if nearest_BHN is not None:
            counted = pack(nearest_BHN, store.centroid_HCD.shape[1], complete=True)
            lists = counted if self.selection == "nearest" else lists
        if gathers and x_BHND.shape[0] * x_BHND.shape[2]:
            rows_RD = x_BHND.reshape(-1, x_BHND.shape[-1])
            sum_LD = F.embedding_bag(counted.row_M, rows_RD, counted.first_L(), mode="sum")
            store.observe(
                number,
                x_BHND,
                member_count_L=lists.count_L,
                sum_LD=sum_LD,
                count_L=counted.count_L,
                moment_2BHC=moment_2BHC,
            )
        return lists

    def loss(self, qk: QueriesKeys, parts: list[Reads]) -> Tensor:
        """Return the weighted commitment loss, zero outside training."""
        if not self.training or not self.commitment or not qk.q_BHND.numel():
            return super().loss(qk, parts)
        return self.commitment * torch.stack([self.distance(x_BHND) for x_BHND in self.clustered(qk)]).mean()

    def distance(self, x_BHND: Tensor) -> Tensor:
        """Return the mean of (x - nearest centroid on the sphere)^2."""
        with torch.no_grad():
            nearest_BHN = self.nearest(x_BHND)
        centroid_HCD = to_sphere(self.centroids.centroid_HCD).to(x_BHND.dtype)
        head_H1 = torch.arange(x_BHND.shape[1], device=x_BHND.device)[:, None]
        return (x_BHND - centroid_HCD[head_H1, nearest_BHN]).square().mean()

    def nearest(self, x_BHND: Tensor) -> Tensor:
        """Return the cluster that scores each position highest, `[B, H, N]`."""
        centroid_HCD = self.centroids.centroid_HCD
        if not is_static(x_BHND, self.backend):
            nearest_BHN = by_scores(centroid_HCD, x_BHND, None, window=0, nearest=True)[2]
            assert nearest_BHN is not None
            return nearest_BHN
        margin_HC = centroid_margin(centroid_HCD, x_BHND.dtype)
        functions = selection_functions(x_BHND, self.backend)
        return functions.nearest_clusters(centroid_HCD, x_BHND, margin_HC).long()

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        centroid_CD = self.centroids.centroid_HCD[head]
        scores, window = [centroid_CD.to(x.dtype) @ x[0, head].T for x in self.clustered(qk)], self.window
        margin_C = centroid_margin(centroid_CD, scores[0].dtype)
        if streaming and self.selection == "topk":
            return prefix_topk(scores[0], scores[-1], margin_C, window)
        if self.selection == "topk":
            members = [topk_members(score_CN, margin_C, window) for score_CN in scores]
        elif self.selection == "nearest":
            members = [nearest_members(score_CN, margin_C) for score_CN in scores]
        else:
            members = []
            for score_CN, threshold_HC in zip(scores, self.thresholds(), strict=False):
                if threshold_HC is not None:
                    members.append(threshold_members(score_CN, threshold_HC[head], margin_C))
        return last_members(members[0], members[-1], window)

    def lists_kept(self, qk: QueriesKeys, cache: ClusterCache) -> MemberLists:
        """See `ClusterPattern.lists_kept`; the best scores of topk are kept, too."""
        if self.selection != "topk":
            with statistics_paused():
                return super().lists_kept(qk, cache)
        store, N = self.centroids, qk.q_BHND.shape[2]
        cache.best = [arrivals(store.centroid_HCD, x, self.window).best for x in self.clustered(qk)]
        position_LW = cache.best[-1].position_W
        list_M, slot_M = (position_LW < N).nonzero(as_tuple=True)
        rows_M = list_M // store.centroid_HCD.shape[1] * N + position_LW[list_M, slot_M]
        return MemberLists(rows_M, torch.bincount(list_M, minlength=len(position_LW)))

    def join(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> tuple[Tensor, Tensor, Tensor | None]:
        scores = [centroid_scores(self.centroids.centroid_HCD, x) for x in self.clustered(qk)]
        margin_HC = centroid_margin(self.centroids.centroid_HCD, scores[0].dtype)
        if self.selection != "topk":
            pairs = zip(scores, self.thresholds(), strict=False)
            joined = [joins(score, threshold_HC, margin_HC)[..., 0] for score, threshold_HC in pairs]
            return joined[0], joined[-1], None
        shape, like = scores[0].shape[:3], scores[0]
        if not cache.best:
            margin_L = margin_HC.expand(shape).flatten()
            cache.best = [PrefixTopK((len(margin_L),), self.window, like, margin_L) for _ in scores]
        at_L = torch.full((shape.numel(),), position, device=like.device)
        offers = [best.offer(score.flatten(), at_L) for best, score in zip(cache.best, scores, strict=True)]
        return offers[0][0].view(shape), offers[-1][0].view(shape), offers[-1][1].view(shape)


def packed_of(selected: Selected) -> MemberLists:
    """Return the members as lists; counts are of those for which there is room."""
    return MemberLists(selected.row_M, selected.bound_L1.diff())


def topk_members(score_CN: Tensor, margin_C: Tensor, window: int) -> Tensor:
    """The `window` best positions of each cluster."""
    member_CN = torch.zeros(score_CN.shape, dtype=torch.bool, device=score_CN.device)
    for c, score_N in enumerate(score_CN.tolist()):
        member_CN[c, best(score_N, [float(margin_C[c])] * len(score_N), window)] = True
    return member_CN


def threshold_members(score_CN: Tensor, threshold_C: Tensor, margin_C: Tensor) -> Tensor:
    """Each position in the clusters whose thresholds it reaches, up to margins, else in the one it misses by least."""
    member_CN = torch.zeros(score_CN.shape, dtype=torch.bool, device=score_CN.device)
    above_CN = score_CN - threshold_C[:, None]
    for i, above_C in enumerate(above_CN.T.tolist()):
        reached = [c for c, above in enumerate(above_C) if above >= -float(margin_C[c])]
        member_CN[reached or highest(above_C, margin_C.tolist()), i] = True
    return member_CN


def nearest_members(score_CN: Tensor, margin_C: Tensor) -> Tensor:
    """Each position in the cluster that scores it highest."""
    member_CN = torch.zeros(score_CN.shape, dtype=torch.bool, device=score_CN.device)
    for i, score_C in enumerate(score_CN.T.tolist()):
        member_CN[highest(score_C, margin_C.tolist()), i] = True
    return member_CN


def kept_members(score_CN: Tensor, margin_C: Tensor, window: int) -> Tensor:
    """The members of each cluster behind every position, `[C, N, N]`, as positions arrive one after the other.

    A full cluster takes a newcomer that is better than the worst member by more than the margin. It replaces the latest
    of the members that are no better than the worst by more than that.
    """
    C, N = score_CN.shape
    member_CNN = torch.zeros(C, N, N, dtype=torch.bool, device=score_CN.device)
    for c, score_N in enumerate(score_CN.tolist()):
        members: list[int] = []
        for i, score in enumerate(score_N):
            bar = float(margin_C[c]) + min((score_N[j] for j in members), default=math.inf)
            if len(members) == window and score > bar:
                members.remove(max(j for j in members if score_N[j] <= bar))
            if len(members) < window:
                members.append(i)
            member_CNN[c, i, members] = True
    return member_CNN


def prefix_topk(query_score_CN: Tensor, key_score_CN: Tensor, margin_C: Tensor, window: int) -> Tensor:
    """Streaming top-w: position i reads a cluster's best keys of 0..i where it is among the best queries of 0..i."""
    query_CNN, key_CNN = (kept_members(score_CN, margin_C, window) for score_CN in (query_score_CN, key_score_CN))
    joins_CN = query_CNN.diagonal(dim1=1, dim2=2)
    return key_CNN & joins_CN[:, :, None]
