"""Routing heads: a position reads the positions that share a cluster with it (paper section 4.1, Algorithm 1); and
their centroids, with the one place where training moves them.

Statistics are gathered in the forward pass of training; `after_step` reduces them over ranks and applies them once per
optimizer step.

Shapes: B sequences, H routing heads, C clusters, N positions, D head size, W attention window, L = B * H * C lists,
P query members and A key members of all lists together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import NormalDist
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention import oracle
from rtx.attention.arguments import check_choice, check_number, check_positive
from rtx.attention.autocast import no_autocast
from rtx.attention.cache import ClusterCache
from rtx.attention.centroid_update import (
    Rule,
    State,
    moved,
    statistics_in,
    statistics_sizes,
    to_sphere,
)
from rtx.attention.engine import native, static_selection
from rtx.attention.engine.by_triton import LISTS
from rtx.attention.engine.static_selection import Selected
from rtx.attention.members import PrefixTopK, arrivals, by_scores, centroid_scores, joins, products
from rtx.attention.pattern import ClusterPattern, Pattern, of_configuration
from rtx.attention.reads import Holes, MemberLists, QueriesKeys, RangeReads, Reads, members_read, pack
from rtx.attention.static import is_static, selection_functions
from rtx.attention.ties import centroid_margin


class Gathering:
    """Whether forward passes of training gather statistics; a plain attribute, which torch.compile can read."""

    is_paused = False


gathering = Gathering()


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

    decided = ("has_keys", "window")
    configured = ("commitment",)

    def __init__(self, centroids: Centroids, *, selection: str, commitment: float = 0.0, **options: Any) -> None:
        super().__init__(has_keys=centroids.keys != "shared", window=centroids.window, **options)
        check_choice("selection", selection, ("causal", "topk", "nearest"))
        check_number("commitment", commitment, "finite and at least 0", lambda x: 0 <= x < math.inf)
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

    @classmethod
    def from_config(cls, known: Mapping[str, Any]) -> Self:
        held = {**known, "threshold_rate": known["threshold_rate"] if known["selection"] == "causal" else 0.0}
        return super().from_config({**known, "centroids": Centroids(**of_configuration(Centroids, held))})

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
        store.observe_sums(number, x_BHND, sum_LD, selected.count_L, counted.count_L, moment_2BHC)

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
        if gathers:
            store.observe(number, x_BHND, lists, counted, moment_2BHC)
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
            return oracle.prefix_topk(scores[0], scores[-1], margin_C, window)
        if self.selection == "topk":
            members = [oracle.topk_members(score_CN, margin_C, window) for score_CN in scores]
        elif self.selection == "nearest":
            members = [oracle.nearest_members(score_CN, margin_C) for score_CN in scores]
        else:
            members = []
            for score_CN, threshold_HC in zip(scores, self.thresholds(), strict=False):
                if threshold_HC is not None:
                    members.append(oracle.threshold_members(score_CN, threshold_HC[head], margin_C))
        return oracle.last_members(members[0], members[-1], window)

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


@contextlib.contextmanager
def statistics_paused() -> Iterator[None]:
    """Gather nothing inside: for the second forward pass of recomputation."""
    was_paused = gathering.is_paused
    gathering.is_paused = True
    try:
        yield
    finally:
        gathering.is_paused = was_paused


class Centroids(nn.Module):
    """C centroids for each of H routing heads, in float32 whatever the model's type, with a threshold each.

    Args:
        heads, clusters, size: H, C and D.
        window, length: a cluster is to hold `window` of `length` positions; thresholds follow that.
        decay: share of a centroid that survives one step.
        update: "members" (ours): a centroid moves towards the mean of its members, however they were chosen, and goes
            back on the sphere; one without members towards where the others' are, if thresholds stay.
            "nearest": towards the mean of the positions that it scores highest of all centroids, and back
            on the sphere; without any it stays. The released code takes the same positions, but sets a
            centroid to a running sum over a running count, of any norm. "sum": Algorithm 1 as printed,
            sums of the nearest over a sequence (the mean over the sequences of a step), not normalised.
        threshold_rate: eta. Thresholds that choose move by eta (count / W - 1) deviations of their centroid's scores,
            where count is what the batch gave the cluster and W what it is to hold; 0: thresholds stay.
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

    configured = ("update", "threshold_rate", "keys")

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

        def moved(buffer: Tensor) -> Tensor:
            after = fn(buffer)
            return after if after.dtype == buffer.dtype else buffer.to(after.device)

        super()._apply(moved, recurse)
        self.reset_sums()
        return self

    def rule(self) -> Rule:
        """Return what says how a step moves these centroids; layers of the same rule move together."""
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

    def reset_sums(self) -> None:
        """Make room for statistics, on the device of the centroids, and forget what was gathered."""
        H, C, D = self.centroid_HCD.shape
        room = sum(statistics_sizes((H, C, D)))
        self.total_T = torch.zeros(room, dtype=torch.float64, device=self.centroid_HCD.device)
        """All statistics in one row, so that one kernel joins or forgets them; what follows are views of it."""
        seen = statistics_in(self.total_T, (H, C, D))
        self.sum_HCD, self.count_HC = seen.sum_HCD, seen.count_HC
        # Of queries and of keys with memberships of their own: members, and first two moments of the scores.
        self.seen_XHC = seen.seen_2_3_HC
        self.positions, self.sequences = seen.positions, seen.sequences

    def sums(self) -> tuple[Tensor, ...]:
        """The statistics gathered since the last update, to be summed over ranks."""
        return self.sum_HCD, self.count_HC, self.seen_XHC, self.positions, self.sequences

    def thresholds(self) -> list[Tensor]:
        """Return the thresholds of queries, and of keys where these have memberships of their own."""
        return [x for x in (self.threshold_HC, self.key_threshold_HC) if x is not None]

    @torch.no_grad()
    def observe(
        self, number: int, x_BHND: Tensor, lists: MemberLists, counted: MemberLists, moment_2BHC: Tensor | None
    ) -> None:
        """Gather statistics of a training batch of positions or queries (number 0) or keys.

        Args:
            lists: the members.
            counted: those that the centroids are to follow.
            moment_2BHC: with thresholds the sums of all scores and of their squares.
        """
        if not x_BHND.shape[0] * x_BHND.shape[2]:
            return
        rows_RD = x_BHND.reshape(-1, x_BHND.shape[-1])
        sum_LD = F.embedding_bag(counted.row_M, rows_RD, counted.first_L(), mode="sum")
        self.observe_sums(number, x_BHND, sum_LD, lists.count_L, counted.count_L, moment_2BHC)

    @torch.no_grad()
    def observe_sums(
        self,
        number: int,
        x_BHND: Tensor,
        sum_LD: Tensor,
        member_count_L: Tensor,
        count_L: Tensor,
        moment_2BHC: Tensor | None,
    ) -> None:
        """Gather statistics by the sums `[L, D]` of what the centroids are to follow, and its counts `[L]`."""
        B, H, N, D = x_BHND.shape
        C = self.centroid_HCD.shape[1]
        if not B * N:
            return
        self.sum_HCD += sum_LD.view(B, H, C, D).sum(0)
        self.count_HC += count_L.view(B, H, C).sum(0)
        self.seen_XHC[number, 0] += member_count_L.view(B, H, C).sum(0)
        if moment_2BHC is not None:
            self.seen_XHC[number, 1:] += moment_2BHC.sum(1)
        if number == 0:
            self.positions += B * N
            self.sequences += B

    @torch.no_grad()
    def seed_from(self, clustered: list[Tensor]) -> None:
        """Start at the first sequence, if there is any: centroids at queries, thresholds at what keeps W of N.

        `clustered`: what is clustered, `[B, H, N, D]`: one vector of a position, or its query and its key apart.
        """
        if not clustered[0].numel():
            return
        q_HND = clustered[0][0]
        self.centroid_HCD.copy_(to_sphere(self.drawn_from(q_HND).float()))
        z = self.quantile()
        for threshold_HC, x_BHND in zip((self.threshold_HC, self.key_threshold_HC), clustered, strict=False):
            if threshold_HC is not None and math.isfinite(z):
                score_HCN = centroid_scores(self.centroid_HCD, x_BHND[0])
                threshold_HC.copy_(score_HCN.quantile(1 - self.window / self.length, dim=-1))
        self.steps.fill_(1)  # the thresholds are of these data already
        self.seed_with_next = False

    def drawn_from(self, x_HND: Tensor) -> Tensor:
        """Return the vectors of C positions for each head, `[H, C, D]`: different ones, and always the same."""
        H, C, _ = self.centroid_HCD.shape
        N = x_HND.shape[1]
        generator = torch.Generator().manual_seed(0)
        draw_HC = torch.stack([torch.randperm(max(N, C), generator=generator)[:C] % N for _ in range(H)])
        head_H1 = torch.arange(H, device=x_HND.device)[:, None]
        return x_HND[head_H1, draw_HC.to(x_HND.device)]


def orthonormal(heads: int, size: int) -> Tensor:
    """Return a random orthonormal matrix W_R for each head, `[H, D, D]`, evenly drawn among all of them."""
    q_HDD, r_HDD = torch.linalg.qr(torch.randn(heads, size, size, dtype=torch.float32))
    return q_HDD * r_HDD.diagonal(dim1=-2, dim2=-1).sign()[:, None]


def make_room(model: nn.Module) -> list[str]:
    """Double the room of each module of heads that has left members out since the last call; say so in a line.

    To be called where the CPU reads numbers from the GPU anyway, as it waits for the GPU.
    """
    routed: dict[str, Any] = {}
    for name, module in model.named_modules():
        if getattr(module, "may_lose_members", False):
            routed[name] = module
    if not routed:
        return []
    lost = torch.stack([module.lost_members for module in routed.values()]).flatten().tolist()
    lines = []
    for (name, module), count in zip(routed.items(), lost, strict=True):
        if count:
            module.room_factor *= 2
            module.lost_members.zero_()
            lines.append(
                f"{name or 'routing heads'}: {count:,} members had no room in their clusters' lists and were left out;"
                f" from now on the lists have room for {module.room_factor} times the intended number of members"
            )
    return lines


def all_centroids(model: nn.Module) -> list[Centroids]:
    """Return the centroids of every routing layer, bottom to top."""
    return [module for module in model.modules() if isinstance(module, Centroids)]


@torch.no_grad()
def after_step(model: nn.Module, move: Callable[[Rule, State, Tensor], State] = moved) -> None:
    """Move the centroids and thresholds of every routing layer, and let every pattern do what is due.

    To be called once after each optimizer step, on every rank. Statistics are summed over ranks first, so that all
    ranks move alike from the joined batch. `move`: `moved`, or the same function compiled.
    """
    for rule, layers in layers_by_rule(model).items():
        move_together(rule, layers, move)
    for module in model.modules():
        if isinstance(module, Pattern):
            module.after_step()


def layers_by_rule(model: nn.Module) -> dict[Rule, list[Centroids]]:
    """Return the centroids of every routing layer, those that move together in one list."""
    groups: dict[Rule, list[Centroids]] = {}
    for centroids in all_centroids(model):
        groups.setdefault(centroids.rule(), []).append(centroids)
    return groups


def stacked(layers: list[Centroids]) -> tuple[State, Tensor]:
    """Return what layers of one rule have, and what each has gathered, `[Y, T]`, in new tensors."""
    state = State(
        torch.stack([layer.centroid_HCD for layer in layers]),
        stacked_thresholds(layers),
        torch.stack([layer.steps for layer in layers]),
    )
    return state, torch.stack([layer.total_T for layer in layers])


def stacked_thresholds(layers: list[Centroids]) -> Tensor:
    """Return the thresholds of layers of one rule, `[Y, V, H, C]`; V is 0 where they have none."""
    thresholds = thresholds_of(layers)
    if not thresholds:
        centroid_HCD = layers[0].centroid_HCD
        H, C, _ = centroid_HCD.shape
        return centroid_HCD.new_empty(len(layers), 0, H, C)
    return torch.stack(thresholds).unflatten(0, (len(layers), -1))


def thresholds_of(layers: list[Centroids]) -> list[Tensor]:
    """Return the thresholds of some layers, layer after layer."""
    return [threshold_HC for layer in layers for threshold_HC in layer.thresholds()]


def move_together(rule: Rule, layers: list[Centroids], move: Callable[[Rule, State, Tensor], State]) -> None:
    """Apply what layers of one rule have gathered, on all ranks, and forget it; no number is read back."""
    state, total_YT = stacked(layers)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total_YT)
    after = move(rule, state, total_YT)
    # torch's operations on lists of tensors, one launch for all layers, have no public names.
    torch._foreach_copy_([layer.centroid_HCD for layer in layers], list(after.centroid_YHCD.unbind()))  # type: ignore[attr-defined]
    if thresholds := thresholds_of(layers):
        torch._foreach_copy_(thresholds, list(after.threshold_YVHC.flatten(0, 1).unbind()))  # type: ignore[attr-defined]
    torch._foreach_copy_([layer.steps for layer in layers], list(after.steps_Y.unbind()))  # type: ignore[attr-defined]
    torch._foreach_zero_([layer.total_T for layer in layers])  # type: ignore[attr-defined]


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
