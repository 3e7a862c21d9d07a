"""Probed keys: an inverted file over each head's keys, strictly causal. A query reads the clusters
nearest to it.

Of each head's keys, C centroids are learned by k-means. A key belongs to the cluster whose centroid
is nearest. A query orders the clusters by the product with their centroids, and probes them in that
order until they hold m keys.

Example: C = 3 and m = 3. The keys at the positions 0 to 5 belong to the clusters a, b, a, c, a, b.
The query at position 5 scores c highest, then a, then b. It probes c, which holds one key, at 3,
then a, which holds three, at 0, 2 and 4: these are four keys, which is enough, and b is not probed.
The query reads the positions 0, 2, 3 and 4 in one softmax; or with `candidates` = 3 and `window` =
2 those two of the four whose logits are the highest. It does not read its own key, at 5, which is
in b.

Shapes: B sequences, H heads, X = B * H of them or some of those, C clusters, N positions, R = B * H
* N rows, D head size, Q queries, K candidates of a query, W keys of a query, m candidates that
suffice, L = B * H * C lists, M = R key members, P query members.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention import oracle
from rtx.attention.arguments import check_positive, check_within
from rtx.attention.cache import Cache, RowCache, place
from rtx.attention.centroid_update import SPLIT
from rtx.attention.choices import Choice
from rtx.attention.engine import native, static_selection
from rtx.attention.engine.by_triton import LISTS
from rtx.attention.engine.lists import KernelLists, row_members
from rtx.attention.engine.softmax import Relative
from rtx.attention.once import made_once
from rtx.attention.packed import Indexed, Packed, Part, Reads, members_read, pack
from rtx.attention.pattern import Inputs
from rtx.attention.routing import ROOM, Centroids, gathering
from rtx.attention.selection import MAX_SCORES, products
from rtx.attention.static import is_static, selection_functions
from rtx.attention.ties import best_places, tie_margin


class Probed(Choice):
    """H heads whose queries read the keys of the nearest clusters: an inverted file, as FAISS has it.

    A key belongs to the cluster c whose centroid is nearest, by k . c - |c|^2 / 2. A query at
    position i probes clusters in the order of q . c, until the keys j <= i in these are at least m,
    or no cluster is left. Of one cluster it takes the last m keys at the most. Scores no further
    apart than `ties.py` says are equal; of equals it is the first cluster.

    Args:
        heads, size: H and D.
        clusters: C.
        decay: share of a centroid that survives one step.
        window: W. Without `candidates` m = W, and a query reads all keys that it has probed, at
            most 2 W - 1.
        candidates: m. A query then reads the W best of the keys that it has probed, by q k^T.
    """

    merge = "lse"
    configured = ("candidates",)

    def __init__(
        self, heads: int, size: int, *, clusters: int, decay: float, candidates: int | None = None, **given: Any
    ) -> None:
        super().__init__(**given)
        check_positive(0, heads=heads)
        check_positive(clusters=clusters, size=size)
        if candidates is not None:
            check_positive(candidates=candidates)
            check_within("window", self.window, candidates, "candidates")
        self.heads, self.size = heads, size
        self.candidates = candidates
        self.centroids = KeyCentroids(heads, clusters, size, decay=decay)
        self.room_factor = ROOM
        self.register_buffer("lost_members", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.lost_members: Tensor
        """See `rtx.attention.routing.Routing`; of queries that probe clusters."""

    @property
    def enough(self) -> int:
        """Return m, the number of keys for which a query probes clusters."""
        return self.window if self.candidates is None else self.candidates

    @property
    def reads_all(self) -> bool:
        """Whether a query reads all keys that it has probed."""
        return self.candidates is None

    @property
    def may_lose_members(self) -> bool:
        """Whether lists on a GPU may lack room; see `rtx.attention.routing.make_room`."""
        return self.reads_all

    @property
    def has_index(self) -> bool:
        return not self.reads_all

    def most_probed(self, length: int) -> int:
        """Return how many keys a query probes at the most: m - 1, and then m of one cluster."""
        return min(2 * self.enough - 1, length)

    def most_keys(self, length: int) -> int:
        return self.most_probed(length) if self.reads_all else min(self.window, length)

    # The rule.

    def rule(self, given: Inputs, head: int, prefix: bool) -> Tensor:
        centroid_CD = self.centroids.centroid_HCD[head]
        q_ND, k_ND = given.turned_q_BHND[0, head], given.turned_k_BHND[0, head]
        centroid_1CD = centroid_CD[None].to(q_ND.dtype)
        cluster_N = nearest_clusters(centroid_1CD, k_ND[None])[0].tolist()
        margin_N = score_margins(centroid_1CD, q_ND[None])[0, :, 0].tolist()
        score_NC = (q_ND @ centroid_1CD[0].T).tolist()
        mask_NN = torch.zeros(len(q_ND), len(q_ND), dtype=torch.bool, device=q_ND.device)
        for i, score_C in enumerate(score_NC):
            members: dict[int, list[int]] = {}
            for j in range(i + 1 if self.attend_self or i == 0 else i):
                members.setdefault(cluster_N[j], []).append(j)
            probed = oracle.probed(score_C, margin_N[i], members, self.enough)
            if not self.reads_all:
                logit_K = q_ND[i] @ k_ND[probed].T
                margin_K = self.margins(q_ND[i], k_ND[probed])
                best = oracle.best(logit_K.tolist(), margin_K.tolist(), self.window)
                probed = [probed[place] for place in best]
            mask_NN[i, probed] = True
        return mask_NN[None]

    # The batch form.

    def reads(self, given: Inputs, prefix: bool) -> list[Part]:
        q_BHND, k_BHND = (wide(x) for x in (given.turned_q_BHND, given.turned_k_BHND))
        if self.reads_all:
            return self.all_reads(q_BHND, k_BHND)
        B, H, N, _ = q_BHND.shape
        if N and self.by_native(k_BHND):
            of_kernel = {"candidates": self.enough, "window": self.most_keys(N), "attend_self": self.attend_self}
            return [Indexed(native.probe_best(self.centroids.centroid_HCD, q_BHND, k_BHND, **of_kernel), N)]
        index_BHNW = torch.full((B, H, N, self.most_keys(N)), -1, device=q_BHND.device)
        for heads, probing in self.pieces(q_BHND, k_BHND):
            first_X11 = torch.arange(heads.start, heads.stop, device=q_BHND.device)[:, None, None] * N
            for positions, at_XQW in self.best_places(probing):
                some = slice(positions.start, positions.stop)
                row_XQW = torch.where(at_XQW < 0, -1, at_XQW + first_X11)
                index_BHNW.flatten(0, 1)[heads.start : heads.stop, some, : at_XQW.shape[-1]] = row_XQW
        return [Indexed(index_BHNW.flatten(0, 2), N)]

    def all_reads(self, q_BHND: Tensor, k_BHND: Tensor) -> list[Part]:
        """Return who reads whom where queries read all keys that they have probed.

        The first positions have no more than m keys, and read all of these: they are a part of
        their own, of one list for each head. They would probe all clusters, and have a range in
        each.
        """
        B, H, N, _ = q_BHND.shape
        first = min(N, self.enough if self.attend_self else self.enough + 1)
        if N and B * H and self.by_native(k_BHND):
            of_kernel = {"candidates": self.enough, "first": first, "attend_self": self.attend_self}
            lists = native.probe(self.centroids.centroid_HCD, q_BHND, k_BHND, **of_kernel)
            return [Reads(lists.query, lists.key, lists.start_P, lists.stop_P, N, most=first)]
        make = partial(causal_lists, B, H, N, first, self.attend_self)
        parts: list[Part] = [*made_once((type(self), B, H, N, first, self.attend_self), q_BHND.device, make)]
        if first < N and B * H:
            static = is_static(q_BHND, self.backend)
            parts.append((self.static_part if static else self.probed_part)(q_BHND, k_BHND, first))
        return parts

    def probed_part(self, q_BHND: Tensor, k_BHND: Tensor, first: int) -> Reads:
        """Return the members of clusters that the queries from position `first` on read."""
        N = q_BHND.shape[2]
        most = min(self.enough, N)
        numbers, rows = [], []
        C = self.centroids.centroid_HCD.shape[1]
        for heads, probing in self.pieces(q_BHND, k_BHND):
            takes_XCN = self.taken(probing, first)
            numbers.append(takes_XCN.flatten().nonzero()[:, 0] + heads.start * C * N)
            rows.append(probing.cluster_XN)
        number_P = torch.cat(numbers)
        list_P, position_P = number_P // N, number_P % N
        count_L = torch.bincount(list_P, minlength=q_BHND.shape[:2].numel() * C)
        queries = Packed(list_P // C * N + position_P, count_L)
        keys = pack(torch.cat(rows).view(q_BHND.shape[:3]), C, complete=True)
        start_P, stop_P = self.ranges(keys, list_P, position_P, N)
        return Reads(queries, keys, start_P, stop_P, N, most=most)

    def taken(self, probing: Probing, first: int) -> Tensor:
        """Return which queries from position `first` on probe which clusters, `[X, C, N]`."""
        takes_XNC = probes(probing.score_XNC, probing.margin_XN1, probing.count_XNC, self.enough)
        takes_XNC[:, :first] = False
        return takes_XNC.mT

    def ranges(self, keys: Packed, list_P: Tensor, position_P: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return where the range of each query that probes a list begins and ends."""
        order_M = keys.list_M() * length + keys.row_M % max(1, length)
        last_P = self.last(position_P)[:, 0]
        stop_P = torch.searchsorted(order_M, list_P * length + last_P, right=True)
        start_P = keys.first_L()[list_P.clamp(max=len(keys.count_L) - 1)].maximum(stop_P - self.enough)
        return start_P, stop_P

    def static_part(self, q_BHND: Tensor, k_BHND: Tensor, first: int) -> Reads:
        """Return the members in static shapes, with room for a fixed number of queries that probe a cluster.

        In training the CPU never waits for a GPU: what has no room is left out and counted
        (`lost_members`). In evaluation one number is read back, and the lists are made again with
        room for all where they lack it.
        """
        B, H, N, _ = q_BHND.shape
        room = min(self.room(B * H * N), B * H * N * self.centroids.centroid_HCD.shape[1])
        part, lost = self.static_lists(q_BHND, k_BHND, first, room)
        if self.training:
            if not gathering.is_paused:
                self.lost_members += lost
        elif count := int(lost):
            part, _ = self.static_lists(q_BHND, k_BHND, first, room + count)
        return part

    def room(self, rows: int) -> int:
        """Return the room of the lists: `room_factor` times what clusters of equal size would need."""
        length, C = max(1, self.enough), self.centroids.centroid_HCD.shape[1]
        return self.room_factor * math.ceil(rows * (1 + min(C, 4) * length / (length + C)))

    def static_lists(self, q_BHND: Tensor, k_BHND: Tensor, first: int, room: int) -> tuple[Reads, Tensor]:
        """Return the members for which there is room, and how many have none, `[1]`."""
        B, H, N, _ = q_BHND.shape
        C, rows = self.centroids.centroid_HCD.shape[1], B * H * N
        number_P = torch.zeros(room + 1, dtype=torch.int64, device=q_BHND.device)
        done = torch.zeros(1, dtype=torch.int64, device=q_BHND.device)
        counts, clusters = [], []
        for heads, probing in self.pieces(q_BHND, k_BHND):
            takes_XCN = self.taken(probing, first)
            done = static_selection.collect(takes_XCN.flatten(), heads.start * C * N, number_P, done)
            counts.append(takes_XCN.sum(-1).flatten())
            clusters.append(probing.cluster_XN)
        number_P = number_P[:room]
        list_P, position_P = number_P // N, number_P % N
        is_real_P = torch.arange(room, device=q_BHND.device) < done
        row_P = torch.where(is_real_P, list_P // C * N + position_P, rows)
        keys = pack(torch.cat(clusters).view(B, H, N), C, complete=True)
        start_P, stop_P = self.ranges(keys, list_P, position_P, N)
        # Behind the count a range is empty, and behind all keys, so that neither bound falls.
        start_P = torch.where(is_real_P, start_P, rows)
        stop_P = torch.where(is_real_P, stop_P, rows)
        lists = lists_with_room(row_P, keys.row_M, start_P, stop_P, done.clamp(max=room))
        part = Reads(
            query=Packed(lists.query_row_P, static_selection.bounds(torch.cat(counts), room).diff()),
            key=keys,
            start_P=lists.start_P,
            stop_P=lists.stop_P,
            length=N,
            most=min(self.enough, N),
            derived={LISTS: lists},
        )
        return part, (done - room).clamp(min=0)

    def by_native(self, k_BHND: Tensor) -> bool:
        """Tell whether the compiled kernel probes."""
        fits = k_BHND.dtype == torch.float32 and k_BHND.is_cpu and not is_static(k_BHND, self.backend)
        return fits and native.wanted(self.backend, k_BHND.shape[2])

    def pieces(self, q_BHND: Tensor, k_BHND: Tensor) -> Iterator[tuple[range, Probing]]:
        """Yield some heads of all sequences at a time, whose scores are held at once."""
        (B, H, N, _), centroid_HCD = q_BHND.shape, self.centroids.centroid_HCD
        size = max(1, MAX_SCORES // max(1, N * centroid_HCD.shape[1]))
        readable_N = self.last(torch.arange(N, device=q_BHND.device))[:, 0]
        for first in range(0, B * H, size):
            heads = range(first, min(B * H, first + size))
            head_X = torch.arange(heads.start, heads.stop, device=q_BHND.device) % max(1, H)
            q_XND, k_XND = (x.flatten(0, 1)[heads.start : heads.stop] for x in (q_BHND, k_BHND))
            yield heads, probing_of(centroid_HCD[head_X].to(q_BHND.dtype), q_XND, k_XND, readable_N)

    def best_places(self, probing: Probing) -> Iterator[tuple[range, Tensor]]:
        """Yield the positions `[X, Q, W]` that some queries at a time read, -1 for none."""
        q_XND, k_XND = probing.q_XND, probing.k_XND
        X, N, D = q_XND.shape
        order_XN = probing.cluster_XN.sort(dim=-1, stable=True).indices
        takes_XNC = probes(probing.score_XNC, probing.margin_XN1, probing.count_XNC, self.enough)
        K = self.most_probed(N)
        size = max(1, MAX_SCORES // max(1, X * K * (D + 8)))
        for first in range(0, N, size):
            some = slice(first, min(N, first + size))
            count_XQC = probing.count_XNC[:, some]
            width_XQC = count_XQC.clamp(max=self.enough) * takes_XNC[:, some]
            at_XQK = candidates(order_XN, probing.first_X1C + count_XQC, width_XQC, K)
            yield range(some.start, some.stop), self.best_of_candidates(q_XND[:, some], k_XND, at_XQK)

    def best_of_candidates(self, q_XQD: Tensor, k_XND: Tensor, at_XQK: Tensor) -> Tensor:
        """Return the `window` best of ascending positions (N: none), `[X, Q, W]`, -1 for none."""
        N = k_XND.shape[1]
        k_XQKD = k_XND[torch.arange(len(k_XND), device=k_XND.device)[:, None, None], at_XQK.clamp(max=N - 1)]
        score_XQK = products(q_XQD[:, :, None], k_XQKD)[:, :, 0].masked_fill(at_XQK >= N, -math.inf)

        def margin(place_XQ1: Tensor) -> Tensor:
            k_XQ1D = k_XQKD.take_along_dim(place_XQ1[..., None], dim=2)
            return self.margins(q_XQD[:, :, None], k_XQ1D)

        best = best_places
        if is_static(score_XQK, self.backend):
            best = selection_functions(score_XQK, self.backend).best_places
        place_XQW = best(score_XQK, min(self.window, at_XQK.shape[-1]), margin)
        found_XQW = at_XQK.gather(-1, place_XQW)
        return torch.where(found_XQW >= N, -1, found_XQW)

    # The stream.

    def start(self, relative: Relative | None = None) -> Cache:
        return ProbedCache(self, relative)

    # The centroids.

    @torch.no_grad()
    def gather(self, given: Inputs) -> None:
        """Let centroids start at keys of the first training batch, and gather statistics of each."""
        store, k_BHND = self.centroids, wide(given.turned_k_BHND.detach())
        if store.seed_with_next and store.training:
            store.seed_from([k_BHND])
        if not self.training or gathering.is_paused or not k_BHND.numel():
            return
        keys = self.clustered_keys(k_BHND)
        x_RD = k_BHND.reshape(-1, k_BHND.shape[-1])
        if is_static(k_BHND, self.backend):
            sums = selection_functions(k_BHND, self.backend).list_sums
            sum_LD = sums(x_RD, keys.row_M, keys.count_L)
        else:
            sum_LD = F.embedding_bag(keys.row_M, x_RD, keys.first_L(), mode="sum")
        store.observe_sums(0, k_BHND, sum_LD, keys.count_L, keys.count_L, None)

    def clustered_keys(self, k_BHND: Tensor) -> Packed:
        """Return the keys of each cluster."""
        centroid_HCD = self.centroids.centroid_HCD
        if self.by_native(k_BHND):
            return native.cluster_keys(centroid_HCD, k_BHND)
        return pack(self.clusters_of(k_BHND), centroid_HCD.shape[1], complete=True)

    def clusters_of(self, k_BHND: Tensor) -> Tensor:
        """Return the cluster of each key, `[B, H, N]`."""
        B, _, N, _ = k_BHND.shape
        centroid_XCD = self.centroids.centroid_HCD.to(k_BHND.dtype).repeat(B, 1, 1)
        size = max(1, MAX_SCORES // max(1, N * centroid_XCD.shape[1]))
        pairs = zip(centroid_XCD.split(size), k_BHND.flatten(0, 1).split(size), strict=True)
        return torch.cat([nearest_clusters(*pair) for pair in pairs]).view(k_BHND.shape[:3])


class Probing(NamedTuple):
    """What some heads probe by."""

    q_XND: Tensor
    k_XND: Tensor
    cluster_XN: Tensor
    """The cluster of each key."""
    count_XNC: Tensor
    """How many keys of each cluster a query may read, int32."""
    first_X1C: Tensor
    """Where the keys of each cluster begin among those of the head, in order of clusters."""
    score_XNC: Tensor
    margin_XN1: Tensor
    """By centroids, and how far apart scores are equal."""


def probing_of(centroid_XCD: Tensor, q_XND: Tensor, k_XND: Tensor, readable_N: Tensor) -> Probing:
    """Return what some heads probe by; a query reads no key behind the position readable_N[n]."""
    cluster_XN = nearest_clusters(centroid_XCD, k_XND)
    C = centroid_XCD.shape[1]
    hot_XNC = cluster_XN[..., None] == torch.arange(C, device=cluster_XN.device)
    count_XNC = hot_XNC.cumsum(1, dtype=torch.int32)
    total_X1C = hot_XNC.sum(1, keepdim=True)
    first_X1C = total_X1C.cumsum(-1) - total_X1C
    score_XNC, margin_XN1 = products(q_XND, centroid_XCD), score_margins(centroid_XCD, q_XND)
    return Probing(q_XND, k_XND, cluster_XN, count_XNC[:, readable_N], first_X1C, score_XNC, margin_XN1)


def wide(x: Tensor) -> Tensor:
    """Return the vectors in float32 or wider, in which everything is chosen."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sound(score: Tensor) -> Tensor:
    """Return finite scores, NaN being worse than all others, so that differences are numbers."""
    limit = torch.finfo(score.dtype).max
    return score.nan_to_num(-limit, limit, -limit)


def widest(centroid_XCD: Tensor) -> Tensor:
    """Return the largest norm of the centroids of each head, `[X, 1, 1]`."""
    return centroid_XCD.norm(dim=-1, keepdim=True).amax(1, keepdim=True)


def score_margins(centroid_XCD: Tensor, q_XND: Tensor) -> Tensor:
    """Return how far apart scores of equal centroids may come out, `[X, N, 1]`."""
    margin_XN1 = tie_margin(q_XND.norm(dim=-1, keepdim=True), widest(centroid_XCD), q_XND.dtype)
    return margin_XN1.nan_to_num(0.0, 0.0)


def nearest_clusters(centroid_XCD: Tensor, k_XND: Tensor) -> Tensor:
    """Return the cluster whose centroid is nearest to each key, `[X, N]`; of equals the first."""
    half_X1C = centroid_XCD.square().sum(-1)[:, None] / 2
    score_XNC = sound(products(k_XND, centroid_XCD) - half_X1C)
    widest_X11 = widest(centroid_XCD)
    norm_XN1 = k_XND.norm(dim=-1, keepdim=True) + widest_X11
    margin_XN1 = tie_margin(norm_XN1, widest_X11, k_XND.dtype).nan_to_num(0.0, 0.0)
    least_XN1 = score_XNC.amax(-1, keepdim=True) - margin_XN1
    return (score_XNC >= least_XN1).to(torch.uint8).argmax(-1)


def probes(score_XNC: Tensor, margin_XN1: Tensor, count_XNC: Tensor, enough: int) -> Tensor:
    """Return which clusters each query probes, `[X, N, C]`, by its scores and how many keys it may read in each.

    Clusters are taken in the order of their scores until they hold enough keys. Scores that a chain
    of steps no larger than the margin links are equal, and of equals the first cluster comes first.
    """
    C = score_XNC.shape[-1]
    score_XNC = sound(score_XNC).masked_fill(count_XNC == 0, -math.inf)
    sorted_XNC, at_XNC = score_XNC.sort(dim=-1, descending=True, stable=True)
    steps_XND = sorted_XNC[..., :-1] - sorted_XNC[..., 1:]
    group_XNC = F.pad((steps_XND > margin_XN1).cumsum(-1), (1, 0))
    at_XNC = (group_XNC * C + at_XNC).sort(dim=-1).values % C
    held_XNC = count_XNC.clamp(max=enough).gather(-1, at_XNC)
    before_XNC = held_XNC.cumsum(-1) - held_XNC
    takes_XNC = (held_XNC > 0) & (before_XNC < enough)
    return torch.zeros_like(takes_XNC).scatter(-1, at_XNC, takes_XNC)


def candidates(order_XN: Tensor, stop_XQC: Tensor, width_XQC: Tensor, most: int) -> Tensor:
    """Return the positions of the last `width` keys of each cluster before `stop`, ascending, `[X, Q, K]`.

    `order_XN`: positions in order of clusters, which `stop` counts by. N stands for none.
    """
    N = order_XN.shape[1]
    end_XQC = width_XQC.cumsum(-1)
    slot_XQK = torch.arange(most, device=order_XN.device).expand(*end_XQC.shape[:2], most).contiguous()
    cluster_XQK = torch.searchsorted(end_XQC, slot_XQK, right=True).clamp(max=end_XQC.shape[-1] - 1)
    member_XQK = stop_XQC.gather(-1, cluster_XQK) - (end_XQC.gather(-1, cluster_XQK) - slot_XQK)
    every_XQN = order_XN[:, None].expand(-1, end_XQC.shape[1], -1)
    at_XQK = every_XQN.gather(-1, member_XQK.clamp(0, max(0, N - 1)))
    return torch.where(slot_XQK < end_XQC[..., -1:], at_XQK, N).sort(dim=-1).values


def causal_lists(B: int, H: int, N: int, first: int, attend_self: bool, device: torch.device) -> list[Reads]:
    """Return one list for each head, of the positions before `first`, which read all up to themselves."""
    row_M = torch.arange(B * H * N, device=device).view(B * H, N)[:, :first].flatten()
    lists = Packed(row_M, torch.full((B * H,), first, device=device))
    return [members_read(lists, lists, N, max(1, first), attend_self)]


def lists_with_room(row_P: Tensor, row_M: Tensor, start_P: Tensor, stop_P: Tensor, count_1: Tensor) -> KernelLists:
    """Return the lists as kernels read them; behind the count, queries have row M and no keys."""
    rows = len(row_M)
    member_M = torch.arange(rows, device=row_M.device)
    return KernelLists(
        query_row_P=torch.where(row_P < rows, row_P, 0).int(),
        key_row_M=row_M.int(),
        start_P=start_P.int(),
        stop_P=stop_P.int(),
        low_M=torch.searchsorted(stop_P, member_M, right=True, out_int32=True),
        high_M=torch.searchsorted(start_P, member_M, right=True, out_int32=True),
        query_members=row_members(row_P, rows),
        key_members=row_members(row_M, rows),
        count_2=torch.cat([count_1.int(), count_1.new_full((1,), rows, dtype=torch.int32)]),
    )


class ProbedCache(RowCache):
    """Every key and value so far, each key's cluster, and how many keys its cluster had before it."""

    pattern: Probed
    filed_BHS2: Tensor | None = None
    """Cluster and rank of each key."""
    choice_BHSD: Tensor | None = None
    """The keys as logits read them, where the best are chosen; a narrower type would round them."""

    def put(self, given: Inputs, v_BHND: Tensor, first: int) -> tuple[Tensor, Tensor]:
        k_BHND = wide(given.turned_k_BHND)
        B, H, N, _ = k_BHND.shape
        C = self.pattern.centroids.centroid_HCD.shape[1]
        if self.filed_BHS2 is None:
            self.count_BHC = torch.zeros(B, H, C, dtype=torch.int64, device=k_BHND.device)
        cluster_BHN = self.pattern.clusters_of(k_BHND)
        lists = pack(cluster_BHN, C, complete=True)
        rank_M = torch.arange(len(lists.row_M), device=k_BHND.device)
        rank_M = rank_M - (lists.first_L() - self.count_BHC.flatten())[lists.list_M()]
        rank_BHN = torch.empty_like(rank_M).scatter(0, lists.row_M, rank_M).view(B, H, N)
        self.count_BHC = self.count_BHC + lists.count_L.view(B, H, C)
        self.filed_BHS2 = place(self.filed_BHS2, torch.stack([cluster_BHN, rank_BHN], dim=-1), first)
        if not self.pattern.reads_all:
            self.choice_BHSD = place(self.choice_BHSD, given.turned_k_BHND, first)
        return super().put(given, v_BHND, first)

    def decode(self, given: Inputs, v_BH1D: Tensor, position: int) -> Tensor:
        before = None if self.filed_BHS2 is None else self.count_BHC
        rows = self.put(given, v_BH1D, position)
        is_first = before is None or position == 0
        count_BHC = self.count_BHC if self.pattern.attend_self or is_first else before
        assert count_BHC is not None
        slot_BH1K = self.probed(wide(given.turned_q_BHND), count_BHC, position)
        k, v = (x.take_along_dim(slot_BH1K.mT.clamp(min=0), 2) for x in rows)
        return self.attend(given, k, v, slot_BH1K >= 0, position - slot_BH1K)

    def probed(self, q_BH1D: Tensor, count_BHC: Tensor, position: int) -> Tensor:
        """Return the slots that the query at a position reads, `[B, H, 1, K]`, -1 for none."""
        pattern = self.pattern
        assert self.filed_BHS2 is not None
        B, H, _, _ = q_BH1D.shape
        centroid_XCD = pattern.centroids.centroid_HCD.to(q_BH1D.dtype).repeat(B, 1, 1)
        q_X1D, count_X1C = q_BH1D.flatten(0, 1), count_BHC.flatten(0, 1)[:, None]
        margin_X11 = score_margins(centroid_XCD, q_X1D)
        takes_XC = probes(products(q_X1D, centroid_XCD), margin_X11, count_X1C, pattern.enough)[:, 0]
        N = position + 1
        cluster_XN, rank_XN = self.filed_BHS2[:, :, :N].flatten(0, 1).unbind(-1)
        count_XN = count_X1C[:, 0].gather(-1, cluster_XN)
        is_read_XN = takes_XC.gather(-1, cluster_XN) & (rank_XN >= count_XN - pattern.enough) & (rank_XN < count_XN)
        slot_N = torch.arange(N, device=q_X1D.device)
        at_XK = torch.where(is_read_XN, slot_N, N).topk(pattern.most_probed(N), largest=False, sorted=True).values
        if pattern.reads_all:
            return torch.where(at_XK < N, at_XK, -1).unflatten(0, (B, H))[:, :, None]
        assert self.choice_BHSD is not None
        k_XND = wide(self.choice_BHSD[:, :, :N].flatten(0, 1))
        return pattern.best_of_candidates(q_X1D, k_XND, at_XK[:, None]).unflatten(0, (B, H))


class KeyCentroids(Centroids):
    """C centroids of the keys of each of H heads, of any norm, in float32: minibatch k-means over training steps.

    A centroid moves towards the mean of the keys that belonged to it in a step. One without any
    starts anew, right beside that of a cluster with many keys, whose keys the two then share (as
    FAISS splits clusters). They start at keys of the first sequence that training sees. The
    thresholds of `Centroids` are not used.
    """

    configured = ()

    def __init__(self, heads: int, clusters: int, size: int, *, decay: float) -> None:
        super().__init__(heads, clusters, size, window=1, length=clusters, decay=decay)
        self.update_rule = SPLIT
        self.seed_with_next = True
        self.register_load_state_dict_post_hook(KeyCentroids.seed_unless_begun)

    def seed_unless_begun(self, _: object) -> None:
        """Start at keys only where those of a checkpoint have taken no step yet."""
        self.seed_with_next = int(self.steps) == 0

    @torch.no_grad()
    def seed_from(self, clustered: list[Tensor]) -> None:
        """Start at keys of the first sequence, if there is any; `clustered`: the keys, `[B, H, N, D]`."""
        (k_BHND,) = clustered
        if not k_BHND.numel():
            return
        self.centroid_HCD.copy_(self.drawn_from(k_BHND[0]).float())
        self.seed_with_next = False
