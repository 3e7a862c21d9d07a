"""Probed keys: a query compares itself with C centroids of the keys, and reads the keys of the
clusters that match it best.

The method. Attention to all earlier keys costs N^2 / 2 products a head, and most of a softmax goes
to few of them. An *inverted file* finds these few (Sivic and Zisserman 2003; it is the index
"IVF" of FAISS, Johnson et al. 2017, arXiv 1702.08734). K-means divides a set of vectors into C
clusters, and the file has a list of the members of each. A search compares a query with the C
centroids alone, chooses some clusters by that, and looks at their lists: it *probes* them. Here
each head has a file of its keys, in which its queries search.

1. A key k belongs to the cluster c whose centroid mu_c is nearest: k . mu_c - |mu_c|^2 / 2 is the
   largest, which orders clusters as the distance does.
2. A query q at position i takes the clusters in the order of q . mu_c, the largest first, until
   they hold at least m keys at positions j <= i, or no cluster is left. The order is by products
   and not by distances: attention weighs a key by q . k, and where mu_c is the mean of a cluster's
   keys, q . mu_c is the mean of these products. The query counts keys and not clusters, because
   clusters differ in size, and the centroids with the largest products are often those of small
   clusters. Of each cluster it takes the last m keys at the most. So it probes at least m keys,
   where there are as many, and at most 2 m - 1: m - 1, and then m of one more cluster.
3. Without the option `candidates`, m is the window W, and the query reads all keys that it probes,
   in one softmax. With it, m = `candidates`, and the query reads the W keys of these whose logits
   are the largest.

Example: m = 3, C = 3. The keys at the positions 0 to 5 belong to the clusters a, b, a, c, a, b, so
the file is a: 0, 2, 4; b: 1, 5; c: 3. The query at position 5 has its largest product with the
centroid of c, then a, then b. It probes c, which holds one key, and then a, which holds three.
These are four keys, no fewer than m, so it does not probe b. It reads the positions 0, 2, 3 and 4.
With `candidates` = 3 and `window` = 2 it reads the two of the four whose logits are the largest.
It does not read its own key, at 5, which is in b.

Early positions. A query that may read no more than m keys probes all clusters and reads all of
these keys. In the batch form the early positions, 0 to m - 1, are therefore a list of their own in
each head, of which each position reads all up to itself; in the clusters' lists each would have C
ranges. Without `attend_self` a query may read the positions j < i, and position 0 alone itself.

Ties. Rounding differs from a pass to a stream, so scores within a margin count as equal (ties.py),
and of equals the first comes first. Of a key all clusters are equal whose scores are within the
margin of the best. Of a query all clusters have to be ordered: their sorted scores are cut where
neighbours are further apart than the margin, and the clusters between two cuts are equal. Of the
logits of candidates those within the margin of the last one taken are equal.

Centroids do not move within a pass, so the choice is strictly causal. `KeyCentroids` moves them
after each optimizer step.

The rule is `Probed.rule`, query by query. The batch form is `Probed.reads`: `probed_lists` or
`best_of_probed`, each either by the compiled kernel (probing.cpp) or by torch, for some heads at a
time (`pieces`). On a GPU `probed_lists` has kernels of its own (engine/triton_probing.py), for
float32 and up to 4,095 clusters; torch's operations, which serve all other cases there, are many
times slower. The stream is `ProbedCache`.

Shapes: B sequences, H heads, X = B * H of them or some of those, C clusters, N positions, D head
size, R = B * H * N rows, Q queries of a piece, K probed keys of a query, W keys that it reads, L =
B * H * C lists of clusters, M = R members of them as keys, P members as queries: a query is a
member of each list that it probes (packed.py explains lists, members and ranges).
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
from rtx.attention.centroids import QUERIES, Centroids, gathering
from rtx.attention.engine import native, static_selection, triton_probing, triton_selection
from rtx.attention.engine.by_triton import LISTS
from rtx.attention.engine.lists import KernelLists, readers, row_members
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.members import products
from rtx.attention.once import made_once
from rtx.attention.pieces import MAX_SCORES
from rtx.attention.reads import IndexReads, MemberLists, QueriesKeys, RangeReads, Reads, members_read, pack
from rtx.attention.static import is_static, selection_functions
from rtx.attention.ties import best, best_places, tie_margin
from rtx.attention.top_keys import TopKeys


class Probed(TopKeys):
    """H heads whose queries read keys of the clusters that match them best; see the module.

    Args:
        heads, size: H and D.
        clusters: C.
        decay: share of a centroid that survives one step.
        window: W. Without `candidates` m = W, and a query reads all keys that it probes, at most
            2 W - 1.
        candidates: m. A query then reads the W best of the keys that it probes, by q k^T.

    Raises:
        ValueError: a count below 1, a window above the candidates, or a decay not from 0 to 1.
    """

    merge = "lse"

    def __init__(
        self,
        heads: int,
        size: int,
        *,
        clusters: int,
        decay: float,
        candidates: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_positive(0, heads=heads)
        check_positive(clusters=clusters, size=size)
        if candidates is not None:
            check_positive(candidates=candidates)
            check_within("window", self.window, candidates, "candidates")
        self.heads = heads
        self.size = size
        self.clusters = clusters
        self.candidates = candidates
        self.centroids = KeyCentroids(heads, clusters, size, decay=decay)
        self.room_factor = 2
        """See `room`; `rtx.attention.room.make_room` doubles it where members are lost."""
        self.register_buffer("lost_members", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.lost_members: Tensor
        """How many queries have been left out of lists of clusters for want of room, in training,
        since `make_room` looked."""
        self.filed: triton_probing.Files | None = None
        """The clusters of the keys that `gather` has looked at, until `reads` has taken them."""

    @property
    def reads_all(self) -> bool:
        """Whether a query reads all keys that it probes."""
        return self.candidates is None

    @property
    def has_index(self) -> bool:
        """Whether `reads` returns an index, and no lists."""
        return not self.reads_all

    @property
    def may_lose_members(self) -> bool:
        """Whether lists on a GPU may lack room; see `rtx.attention.room.make_room`."""
        return self.reads_all

    def target(self, length: int) -> int:
        """Return m, the number of keys that a query probes for, or N where that is less."""
        m = self.window if self.candidates is None else self.candidates
        return min(m, length)

    def most_probed(self, length: int) -> int:
        """Return how many keys a query probes at the most: m - 1, and then m of one cluster."""
        return min(2 * self.target(length) - 1, length)

    def max_keys(self, length: int) -> int:
        """Return how many keys a query reads at the most."""
        if self.reads_all:
            return self.most_probed(length)
        return min(self.window, length)

    # The rule.

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        q_ND = qk.rotated_q_BHND[0, head]
        k_ND = qk.rotated_k_BHND[0, head]
        N = len(q_ND)
        centroid_1CD = self.centroids.centroid_HCD[head, None].to(q_ND.dtype)
        cluster_N = nearest_clusters(centroid_1CD, k_ND[None])[0].tolist()
        score_NC = (q_ND @ centroid_1CD[0].T).tolist()
        margin_N = query_margins(centroid_1CD, q_ND[None]).flatten().tolist()
        mask_NN = torch.zeros(N, N, dtype=torch.bool, device=q_ND.device)
        for i in range(N):
            last = i if self.attend_self else max(0, i - 1)
            members: dict[int, list[int]] = {}
            for j in range(last + 1):
                members.setdefault(cluster_N[j], []).append(j)
            read = oracle.probed(score_NC[i], margin_N[i], members, self.target(N))
            if not self.reads_all:
                read = self.best_by_rule(q_ND[i], k_ND, read)
            mask_NN[i, read] = True
        return mask_NN[None]

    def best_by_rule(self, q_D: Tensor, k_ND: Tensor, position_K: list[int]) -> list[int]:
        """Return the positions, of those that a query probes, whose W logits are the largest."""
        k_KD = k_ND[position_K]
        logit_K = (q_D @ k_KD.T).tolist()
        margin_K = self.tie_margins(q_D, k_KD).tolist()
        slots = best(logit_K, margin_K, self.window)
        return [position_K[slot] for slot in slots]

    # The batch form.

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        q_BHND = widened(qk.rotated_q_BHND)
        k_BHND = widened(qk.rotated_k_BHND)
        if self.reads_all:
            return self.probed_lists(q_BHND, k_BHND)
        return [self.best_of_probed(q_BHND, k_BHND)]

    def by_native(self, k_BHND: Tensor) -> bool:
        """Tell whether the compiled kernel probes."""
        is_static_here = is_static(k_BHND, self.backend)
        fits = k_BHND.dtype == torch.float32 and k_BHND.is_cpu and not is_static_here
        return fits and native.wanted(self.backend, k_BHND.shape[2])

    def by_triton(self, k_BHND: Tensor) -> bool:
        """Tell whether our kernels for GPUs probe."""
        if self.has_index or self.clusters > triton_probing.MAX_CLUSTERS:
            return False
        if k_BHND.shape[2] > triton_probing.MAX_LENGTH:
            return False
        is_static_here = is_static(k_BHND, self.backend)
        return is_static_here and selection_functions(k_BHND, self.backend) is triton_selection

    def early(self, length: int) -> int:
        """Return how many positions may read no more than m keys."""
        m = self.target(length)
        return m if self.attend_self else min(length, m + 1)

    def pieces(self, q_BHND: Tensor, k_BHND: Tensor) -> Iterator[tuple[slice, Searched]]:
        """Yield some heads of all sequences at a time, whose scores are held at once."""
        B, H, N, _ = q_BHND.shape
        centroid_HCD = self.centroids.centroid_HCD.to(q_BHND.dtype)
        last_N = self.last_readable(torch.arange(N, device=q_BHND.device))[:, 0]
        size = max(1, MAX_SCORES // max(1, N * self.clusters))
        for first in range(0, B * H, size):
            heads = slice(first, min(B * H, first + size))
            head_X = torch.arange(heads.start, heads.stop, device=q_BHND.device) % H
            q_XND = q_BHND.flatten(0, 1)[heads]
            k_XND = k_BHND.flatten(0, 1)[heads]
            yield heads, searched(centroid_HCD[head_X], q_XND, k_XND, last_N)

    # The batch form where queries read all keys that they probe: lists.

    def probed_lists(self, q_BHND: Tensor, k_BHND: Tensor) -> list[Reads]:
        """Return the lists of early positions and of clusters, and what queries read of them."""
        B, H, N, _ = q_BHND.shape
        early = self.early(N)
        files = self.filed
        self.filed = None
        if B * H * N and self.by_native(k_BHND):
            return [self.native_part(q_BHND, k_BHND, early)]
        if B * H and early < N and self.by_triton(k_BHND):
            if files is None:
                files = self.file_keys(k_BHND)
            return [self.triton_part(q_BHND, files)]
        make = partial(early_lists, B, H, N, early, self.attend_self)
        form = (type(self), B, H, N, early, self.attend_self)
        parts: list[Reads] = [*made_once(form, q_BHND.device, make)]
        if early == N or not B * H:
            return parts
        if is_static(q_BHND, self.backend):
            parts.append(self.static_part(q_BHND, k_BHND, early))
        else:
            parts.append(self.dynamic_part(q_BHND, k_BHND, early))
        return parts

    def native_part(self, q_BHND: Tensor, k_BHND: Tensor, early: int) -> RangeReads:
        """Return the lists of early positions and of clusters, made by the compiled kernel."""
        N = q_BHND.shape[2]
        lists = native.probe(
            self.centroids.centroid_HCD,
            q_BHND,
            k_BHND,
            candidates=self.target(N),
            early=early,
            attend_self=self.attend_self,
        )
        return RangeReads(lists.query, lists.key, lists.start_P, lists.stop_P, N, most=early)

    def dynamic_part(self, q_BHND: Tensor, k_BHND: Tensor, early: int) -> RangeReads:
        """Return what the queries from position `early` on read of the clusters' lists."""
        N = q_BHND.shape[2]
        number_P, keys = self.numbered(q_BHND, k_BHND, early)
        list_P = number_P // N
        position_P = number_P % N
        row_P = list_P // self.clusters * N + position_P
        queries = MemberLists(row_P, torch.bincount(list_P, minlength=len(keys.count_L)))
        start_P, stop_P = self.ranges(keys, list_P, position_P, N)
        return RangeReads(queries, keys, start_P, stop_P, N, most=self.target(N))

    def numbered(self, q_BHND: Tensor, k_BHND: Tensor, early: int) -> tuple[Tensor, MemberLists]:
        """Return the members of the clusters' lists: numbers of those as queries, and the keys.

        A member has the number list * N + position. Members in the order of numbers are in the
        order of lists, and of positions within a list.
        """
        B, H, N, _ = q_BHND.shape
        numbers = []
        clusters = []
        for heads, piece in self.pieces(q_BHND, k_BHND):
            is_probed_XCN = self.probed_from(early, piece)
            number_S = is_probed_XCN.flatten().nonzero()[:, 0]
            numbers.append(number_S + heads.start * self.clusters * N)
            clusters.append(piece.cluster_XN)
        keys = pack(torch.cat(clusters).view(B, H, N), self.clusters, complete=True)
        return torch.cat(numbers), keys

    def probed_from(self, early: int, piece: Searched) -> Tensor:
        """Return which queries from position `early` on probe which clusters, `[X, C, N]`."""
        target = self.target(piece.cluster_XN.shape[1])
        is_probed_XNC = probed_clusters(
            piece.score_XNC,
            piece.margin_XN1,
            piece.count_XNC,
            target,
        )
        is_probed_XNC[:, :early] = False
        return is_probed_XNC.mT

    def ranges(
        self,
        keys: MemberLists,
        list_P: Tensor,
        position_P: Tensor,
        length: int,
    ) -> tuple[Tensor, Tensor]:
        """Return where the range of each query in a list begins and ends, by its position.

        It ends with the last key of the list that the query may read, and has m keys at the most.
        """
        number_M = keys.list_M() * length + keys.row_M % length
        last_P = self.last_readable(position_P)[:, 0]
        stop_P = torch.searchsorted(number_M, list_P * length + last_P, right=True)
        start_P = keys.first_L()[list_P].maximum(stop_P - self.target(length))
        return start_P, stop_P

    def triton_part(self, q_BHND: Tensor, files: triton_probing.Files) -> RangeReads:
        """Return the lists of early positions and of clusters, made by our kernels for GPUs.

        The lists of clusters have room for a fixed number of queries, see `room_lacking`.
        """
        B, H, N, _ = q_BHND.shape
        reach = triton_probing.Reach(self.target(N), self.attend_self)
        probes = triton_probing.probe_files(self.centroids.centroid_HCD, q_BHND, files, reach)
        room = self.room(B * H, N)
        room += self.room_lacking(probes.count_1(), room)
        lists = triton_probing.pack_members(files, probes, reach, room)
        member_counts = triton_probing.member_counts
        return RangeReads(
            query=MemberLists(lists.query_row_P, member_counts(probes.tally, files.early, room)),
            key=MemberLists(lists.key_row_M, member_counts(files.tally, files.early, B * H * N)),
            start_P=lists.start_P,
            stop_P=lists.stop_P,
            length=N,
            most=files.early,
            derived={LISTS: lists},
        )

    def file_keys(self, k_BHND: Tensor) -> triton_probing.Files:
        """Return the lists of keys, made by our kernels for GPUs."""
        early = self.early(k_BHND.shape[2])
        return triton_probing.file_keys(self.centroids.centroid_HCD, k_BHND, early)

    def static_part(self, q_BHND: Tensor, k_BHND: Tensor, early: int) -> RangeReads:
        """Return what `dynamic_part` does, in lists with room for a fixed number of queries, see
        `room_lacking`."""
        B, H, N, _ = q_BHND.shape
        room = self.room(B * H, N)
        members = self.collected(q_BHND, k_BHND, early, room)
        if lost := self.room_lacking(members.count_1, room):
            members = self.collected(q_BHND, k_BHND, early, room + lost)
        return self.lists_with_room(members, N)

    def room_lacking(self, count_1: Tensor, room: int) -> int:
        """Return how much room lists are to get beyond `room`, for `count_1` queries.

        In training none, as the CPU never waits for a GPU: queries without room in a list are left
        out of it and counted (`lost_members`). In evaluation one number is read back, and there is
        room for all.
        """
        lost_1 = (count_1 - room).clamp(min=0)
        if not self.training:
            return int(lost_1)
        if not gathering.is_paused:
            self.lost_members += lost_1
        return 0

    def room(self, heads: int, length: int) -> int:
        """Return the room of the lists: `room_factor` times their members as queries where clusters
        are of equal size, and not more than there can be.

        Such clusters hold i / C keys at position i, so a query there probes m C / i of them, and
        one more for what does not come out even: 1 + m C / N log(N / m) on average. Where there are
        more members than room, some are lost until `make_room` has doubled it often enough.

        Args:
            heads: of all sequences together.
            length: N.
        """
        m = max(1, self.target(length))
        probed = 1 + m * self.clusters / max(1, length) * math.log(max(1, length) / m)
        room = self.room_factor * math.ceil(heads * length * min(probed, self.clusters))
        return min(room, heads * length * self.clusters)

    def collected(self, q_BHND: Tensor, k_BHND: Tensor, early: int, room: int) -> Members:
        """Return what `numbered` does, in room for a fixed number of members as queries."""
        B, H, N, _ = q_BHND.shape
        number_P1 = torch.zeros(room + 1, dtype=torch.int64, device=q_BHND.device)
        count_1 = torch.zeros(1, dtype=torch.int64, device=q_BHND.device)
        counts = []
        clusters = []
        for heads, piece in self.pieces(q_BHND, k_BHND):
            is_probed_XCN = self.probed_from(early, piece)
            offset = heads.start * self.clusters * N
            is_probed = is_probed_XCN.flatten()
            count_1 = static_selection.collect(is_probed, offset, number_P1, count_1)
            counts.append(is_probed_XCN.sum(-1).flatten())
            clusters.append(piece.cluster_XN)
        keys = pack(torch.cat(clusters).view(B, H, N), self.clusters, complete=True)
        return Members(number_P1[:room], torch.cat(counts), count_1, keys)

    def lists_with_room(self, members: Members, length: int) -> RangeReads:
        """Return lists with room, and with them what kernels read of them.

        Members behind the count are of no row. Their ranges are empty and begin behind all keys, so
        that starts and stops never fall.
        """
        keys = members.keys
        rows = len(keys.row_M)
        room = len(members.number_P)
        list_P = members.number_P // length
        position_P = members.number_P % length
        row_P = list_P // self.clusters * length + position_P
        start_P, stop_P = self.ranges(keys, list_P, position_P, length)
        is_real_P = torch.arange(room, device=row_P.device) < members.count_1
        lists = kernel_lists(
            torch.where(is_real_P, row_P, rows),
            keys.row_M,
            torch.where(is_real_P, start_P, rows).int(),
            torch.where(is_real_P, stop_P, rows).int(),
            members.count_1.clamp(max=room),
        )
        count_L = static_selection.bounds(members.count_L, room).diff()
        return RangeReads(
            query=MemberLists(lists.query_row_P, count_L),
            key=keys,
            start_P=lists.start_P,
            stop_P=lists.stop_P,
            length=length,
            most=self.target(length),
            derived={LISTS: lists},
        )

    # The batch form where queries read the best of the keys that they probe: an index.

    def best_of_probed(self, q_BHND: Tensor, k_BHND: Tensor) -> IndexReads:
        """Return the rows of the W best keys, by q k^T, of those that each query probes."""
        B, H, N, _ = q_BHND.shape
        if N and self.by_native(k_BHND):
            return self.native_index(q_BHND, k_BHND)
        index_XNW = torch.full((B * H, N, self.max_keys(N)), -1, device=q_BHND.device)
        for heads, piece in self.pieces(q_BHND, k_BHND):
            head_X = torch.arange(heads.start, heads.stop, device=q_BHND.device)
            first_row_X11 = head_X[:, None, None] * N
            for queries, position_XQW in self.best_positions(piece):
                row_XQW = torch.where(position_XQW < 0, -1, first_row_X11 + position_XQW)
                index_XNW[heads, queries] = row_XQW
        return IndexReads(index_XNW.flatten(0, 1), N)

    def native_index(self, q_BHND: Tensor, k_BHND: Tensor) -> IndexReads:
        """Return what `best_of_probed` does, by the compiled kernel."""
        N = q_BHND.shape[2]
        index_RW = native.probe_best(
            self.centroids.centroid_HCD,
            q_BHND,
            k_BHND,
            candidates=self.target(N),
            window=self.max_keys(N),
            attend_self=self.attend_self,
        )
        return IndexReads(index_RW, N)

    def best_positions(self, piece: Searched) -> Iterator[tuple[slice, Tensor]]:
        """Yield the positions `[X, Q, W]` that some queries at a time read, -1 for none."""
        X, N, D = piece.q_XND.shape
        head_X11 = torch.arange(X, device=piece.q_XND.device)[:, None, None]
        m = self.target(N)
        K = self.most_probed(N)
        is_probed_XNC = probed_clusters(piece.score_XNC, piece.margin_XN1, piece.count_XNC, m)
        order_XN = piece.order_XN()
        # The numbers held for each probed key: its vector, its score, and some of twice the width.
        size = max(1, MAX_SCORES // max(1, X * K * (D + 8)))
        for first in range(0, N, size):
            queries = slice(first, min(N, first + size))
            count_XQC = piece.count_XNC[:, queries]
            taken_XQC = count_XQC.clamp(max=m) * is_probed_XNC[:, queries]
            stop_XQC = piece.first_X1C + count_XQC
            position_XQK = positions_of(order_XN, stop_XQC, taken_XQC, K)
            k_XQKD = piece.k_XND[head_X11, position_XQK.clamp(max=N - 1)]
            yield queries, self.best_candidates(piece.q_XND[:, queries], k_XQKD, position_XQK, N)

    def best_candidates(
        self,
        q_XQD: Tensor,
        k_XQKD: Tensor,
        position_XQK: Tensor,
        length: int,
    ) -> Tensor:
        """Return the positions of each query's W best keys, `[X, Q, W]`, -1 for none.

        Args:
            k_XQKD: the keys of each query.
            position_XQK: their positions, ascending; `length` (N) for none.
        """
        is_none_XQK = position_XQK >= length
        logit_XQK = products(q_XQD[:, :, None], k_XQKD)[:, :, 0].masked_fill(is_none_XQK, -math.inf)

        def margin(slot_XQ1: Tensor) -> Tensor:
            k_XQ1D = k_XQKD.take_along_dim(slot_XQ1[..., None], dim=2)
            return self.tie_margins(q_XQD[:, :, None], k_XQ1D)

        choose = best_places
        if is_static(logit_XQK, self.backend):
            choose = selection_functions(logit_XQK, self.backend).best_places
        W = min(self.window, position_XQK.shape[-1])
        slot_XQW = choose(logit_XQK, W, margin)
        position_XQW = position_XQK.gather(-1, slot_XQW)
        return torch.where(position_XQW >= length, -1, position_XQW)

    # The stream.

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return ProbedCache(self, relative)

    # The centroids.

    @torch.no_grad()
    def gather(self, qk: QueriesKeys) -> None:
        """Let centroids start at keys, if they have not, and in training gather sums of keys."""
        self.filed = None
        store = self.centroids
        k_BHND = widened(qk.rotated_k_BHND.detach())
        if store.seed_with_next and store.training:
            store.seed_from([k_BHND])
        if not self.training or gathering.is_paused or not k_BHND.numel():
            return
        if self.by_triton(k_BHND):
            self.filed = self.file_keys(k_BHND)
        keys = self.clustered_keys(k_BHND)
        k_RD = k_BHND.reshape(-1, k_BHND.shape[-1])
        if is_static(k_BHND, self.backend):
            list_sums = selection_functions(k_BHND, self.backend).list_sums
            sum_LD = list_sums(k_RD, keys.row_M, keys.count_L)
        else:
            sum_LD = F.embedding_bag(keys.row_M, k_RD, keys.first_L(), mode="sum")
        store.observe(
            QUERIES,
            k_BHND,
            member_count_L=keys.count_L,
            sum_LD=sum_LD,
            count_L=keys.count_L,
            moment_2BHC=None,
        )

    def clustered_keys(self, k_BHND: Tensor) -> MemberLists:
        """Return the keys of each cluster: those of `filed`, if there are some."""
        if self.by_native(k_BHND):
            return native.cluster_keys(self.centroids.centroid_HCD, k_BHND)
        if self.filed is not None:
            return self.filed.packed()
        return pack(self.clusters_of(k_BHND), self.clusters, complete=True)

    def clusters_of(self, k_BHND: Tensor) -> Tensor:
        """Return the cluster of each key, `[B, H, N]`, with the scores of some heads at a time."""
        B, _, N, _ = k_BHND.shape
        centroid_XCD = self.centroids.centroid_HCD.to(k_BHND.dtype).repeat(B, 1, 1)
        size = max(1, MAX_SCORES // max(1, N * self.clusters))
        pairs = zip(centroid_XCD.split(size), k_BHND.flatten(0, 1).split(size), strict=True)
        clusters = [nearest_clusters(*pair) for pair in pairs]
        return torch.cat(clusters).view(k_BHND.shape[:3])


# Scores of clusters, and which clusters a query probes by them.


def widened(x: Tensor) -> Tensor:
    """Return the vectors in float32 or wider, in which everything is chosen."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def finite(score: Tensor) -> Tensor:
    """Return scores whose differences are numbers: the largest ones for infinite, the least for
    NaN."""
    limit = torch.finfo(score.dtype).max
    return score.nan_to_num(-limit, limit, -limit)


def largest_norm(centroid_XCD: Tensor) -> Tensor:
    """Return the largest norm of the centroids of each head, `[X, 1, 1]`."""
    return centroid_XCD.norm(dim=-1, keepdim=True).amax(1, keepdim=True)


def query_margins(centroid_XCD: Tensor, q_XND: Tensor) -> Tensor:
    """Return how far apart the scores q . c of equal centroids may come out, `[X, N, 1]`."""
    norm_XN1 = q_XND.norm(dim=-1, keepdim=True)
    margin_XN1 = tie_margin(norm_XN1, largest_norm(centroid_XCD), q_XND.dtype)
    return margin_XN1.nan_to_num(0.0, 0.0)


def nearest_clusters(centroid_XCD: Tensor, k_XND: Tensor) -> Tensor:
    """Return the cluster whose centroid is nearest to each key, `[X, N]`; of equals the first.

    Equal are those with k . c - |c|^2 / 2 within 64 units of the last place of (|k| + r) r of the
    largest, where r is the largest norm of a centroid.
    """
    half_square_X1C = centroid_XCD.square().sum(-1)[:, None] / 2
    score_XNC = finite(products(k_XND, centroid_XCD) - half_square_X1C)
    largest_X11 = largest_norm(centroid_XCD)
    norm_XN1 = k_XND.norm(dim=-1, keepdim=True) + largest_X11
    margin_XN1 = tie_margin(norm_XN1, largest_X11, k_XND.dtype).nan_to_num(0.0, 0.0)
    least_XN1 = score_XNC.amax(-1, keepdim=True) - margin_XN1
    return (score_XNC >= least_XN1).to(torch.uint8).argmax(-1)


def probed_clusters(
    score_XNC: Tensor,
    margin_XN1: Tensor,
    count_XNC: Tensor,
    target: int,
) -> Tensor:
    """Return which clusters each query probes, `[X, N, C]`, bool.

    Example: the scores of the clusters 0 to 2 are 5, 6.9999 and 7, and the margin is 0.001. Sorted
    they are 7, 6.9999, 5. The steps between them are 0.0001 and 1.9999, of which the second is a
    cut, so the groups are 0, 0, 1. With C = 3 the numbers group * C + cluster are 2, 1, 3; sorted
    they are 1, 2, 3, which are the clusters 1, 2, 0. If these hold 2, 1 and 4 keys, a query with a
    target of 3 probes 1 and 2.

    Args:
        score_XNC, margin_XN1: by centroids, and how far apart scores are equal.
        count_XNC: how many keys of each cluster a query may read.
        target: m.
    """
    C = score_XNC.shape[-1]
    score_XNC = finite(score_XNC).masked_fill(count_XNC == 0, -math.inf)
    sorted_XNC, cluster_XNC = score_XNC.sort(dim=-1, descending=True, stable=True)
    step_XNC = sorted_XNC[..., :-1] - sorted_XNC[..., 1:]
    group_XNC = F.pad((step_XNC > margin_XN1).cumsum(-1), (1, 0))
    cluster_XNC = (group_XNC * C + cluster_XNC).sort(dim=-1).values % C
    taken_XNC = count_XNC.clamp(max=target).gather(-1, cluster_XNC)
    before_XNC = taken_XNC.cumsum(-1) - taken_XNC
    is_probed_XNC = (taken_XNC > 0) & (before_XNC < target)
    return torch.zeros_like(is_probed_XNC).scatter(-1, cluster_XNC, is_probed_XNC)


# What the batch form makes of them.


class Searched(NamedTuple):
    """The files of the keys of some heads, and the scores that their queries search by."""

    q_XND: Tensor
    k_XND: Tensor
    cluster_XN: Tensor
    """The cluster of each key."""
    first_X1C: Tensor
    """How many keys of the head are in the clusters before each one."""
    count_XNC: Tensor
    """How many keys of each cluster a query may read, int32."""
    score_XNC: Tensor
    """The products of queries and centroids."""
    margin_XN1: Tensor
    """How far apart scores of a query are equal."""

    def order_XN(self) -> Tensor:
        """Return the positions of the keys, cluster after cluster."""
        return self.cluster_XN.sort(dim=-1, stable=True).indices


def searched(centroid_XCD: Tensor, q_XND: Tensor, k_XND: Tensor, last_N: Tensor) -> Searched:
    """Return the files and scores of some heads.

    Args:
        last_N: the last position that each query may read.
    """
    cluster_XN = nearest_clusters(centroid_XCD, k_XND)
    cluster_C = torch.arange(centroid_XCD.shape[1], device=cluster_XN.device)
    is_member_XNC = cluster_XN[..., None] == cluster_C
    count_XNC = is_member_XNC.cumsum(1, dtype=torch.int32)
    total_X1C = is_member_XNC.sum(1, keepdim=True)
    return Searched(
        q_XND=q_XND,
        k_XND=k_XND,
        cluster_XN=cluster_XN,
        first_X1C=total_X1C.cumsum(-1) - total_X1C,
        count_XNC=count_XNC[:, last_N],
        score_XNC=products(q_XND, centroid_XCD),
        margin_XN1=query_margins(centroid_XCD, q_XND),
    )


def early_lists(
    B: int,
    H: int,
    N: int,
    early: int,
    attend_self: bool,
    device: torch.device,
) -> list[RangeReads]:
    """Return one list for each head: the positions before `early`, each of which reads all up to
    itself."""
    row_XN = torch.arange(B * H * N, device=device).view(B * H, N)
    count_X = torch.full((B * H,), early, device=device)
    lists = MemberLists(row_XN[:, :early].flatten(), count_X)
    return [members_read(lists, lists, N, max(1, early), attend_self)]


class Members(NamedTuple):
    """The members of lists of clusters, in room for P queries."""

    number_P: Tensor
    """list * N + position of each query, ascending; 0 behind the last one."""
    count_L: Tensor
    """Queries of each list, those without room among them."""
    count_1: Tensor
    """Queries of all lists, those without room among them."""
    keys: MemberLists


def kernel_lists(
    row_P: Tensor,
    row_M: Tensor,
    start_P: Tensor,
    stop_P: Tensor,
    count_1: Tensor,
) -> KernelLists:
    """Return lists as kernels read them; see lists.py.

    Args:
        row_P: rows of queries, M for those that are of no row.
        start_P, stop_P: their ranges, int32.
        count_1: the number of the others.
    """
    M = len(row_M)
    low_M, high_M = readers(start_P, stop_P, M)
    key_count_1 = count_1.new_full((1,), M, dtype=torch.int32)
    return KernelLists(
        query_row_P=torch.where(row_P < M, row_P, 0).int(),
        key_row_M=row_M.int(),
        start_P=start_P,
        stop_P=stop_P,
        low_M=low_M,
        high_M=high_M,
        query_members=row_members(row_P, M),
        key_members=row_members(row_M, M),
        count_2=torch.cat([count_1.int(), key_count_1]),
    )


def positions_of(order_XN: Tensor, stop_XQC: Tensor, taken_XQC: Tensor, most: int) -> Tensor:
    """Return the positions of the keys that queries probe, ascending, `[X, Q, K]`; N for none.

    Example, the one of the module: the order is 0, 2, 4, 1, 5, 3. The query at 5 may read all, so
    its stops are 3, 5 and 6, and it takes 3 keys of a, 0 of b and 1 of c. Of the K slots the first
    3 are for a, and slot 3 is for c. Slot 3 is the last of c's, so it takes the place 6 - 1 = 5 of
    the order, which is position 3.

    Args:
        order_XN: positions, cluster after cluster.
        stop_XQC: where in that order the keys of each cluster end that a query may read.
        taken_XQC: how many before that it takes.
        most: K.
    """
    X, N = order_XN.shape
    Q = stop_XQC.shape[1]
    end_XQC = taken_XQC.cumsum(-1)
    slot_XQK = torch.arange(most, device=order_XN.device).expand(X, Q, most).contiguous()
    is_none_XQK = slot_XQK >= end_XQC[..., -1:]
    cluster_XQK = torch.searchsorted(end_XQC, slot_XQK, right=True)
    cluster_XQK = cluster_XQK.clamp(max=end_XQC.shape[-1] - 1)
    from_end_XQK = end_XQC.gather(-1, cluster_XQK) - slot_XQK
    place_XQK = stop_XQC.gather(-1, cluster_XQK) - from_end_XQK
    order_XQN = order_XN[:, None].expand(-1, Q, -1)
    position_XQK = order_XQN.gather(-1, place_XQK.clamp(0, max(0, N - 1)))
    return torch.where(is_none_XQK, N, position_XQK).sort(dim=-1).values


class ProbedCache(RowCache):
    """Every key and value so far, and the file of the keys: the cluster of each and its rank there.

    The rank is the number of keys before it in its cluster, so that a query knows the last m keys
    of a cluster by the number of those that it may read.
    """

    count_BHC: Tensor | None = None
    """Keys of each cluster."""
    filed_BHS2: Tensor | None = None
    """Cluster and rank of each key."""
    choice_BHSD: Tensor | None = None
    """The keys as they came, where the best are chosen: `key_BHSD` may round them to the values'
    type."""

    def __init__(self, pattern: Probed, relative: RelativeTables | None = None) -> None:
        super().__init__(partial(pattern.terms, relative=relative))
        self.pattern = pattern

    def put(self, qk: QueriesKeys, v_BHND: Tensor, first: int) -> tuple[Tensor, Tensor]:
        pattern = self.pattern
        k_BHND = widened(qk.rotated_k_BHND)
        B, H, _, _ = k_BHND.shape
        if self.count_BHC is None:
            shape = (B, H, pattern.clusters)
            self.count_BHC = torch.zeros(shape, dtype=torch.int64, device=k_BHND.device)
        cluster_BHN = pattern.clusters_of(k_BHND)
        rank_BHN, count_BHC = ranked(cluster_BHN, self.count_BHC)
        filed_BHN2 = torch.stack([cluster_BHN, rank_BHN], dim=-1)
        self.count_BHC = count_BHC
        self.filed_BHS2 = place(self.filed_BHS2, filed_BHN2, first)
        if not pattern.reads_all:
            self.choice_BHSD = place(self.choice_BHSD, qk.rotated_k_BHND, first)
        return super().put(qk, v_BHND, first)

    def decode(self, qk: QueriesKeys, v_BH1D: Tensor, position: int) -> Tensor:
        readable_BHC = self.count_BHC
        k_BHSD, v_BHSD = self.put(qk, v_BH1D, position)
        if self.pattern.attend_self or position == 0:
            readable_BHC = self.count_BHC
        assert readable_BHC is not None
        slot_BH1K = self.read_slots(widened(qk.rotated_q_BHND), readable_BHC, position)
        at_BHK1 = slot_BH1K.mT.clamp(min=0)
        k_BHKD = k_BHSD.take_along_dim(at_BHK1, 2)
        v_BHKD = v_BHSD.take_along_dim(at_BHK1, 2)
        return self.attend(qk, k_BHKD, v_BHKD, slot_BH1K >= 0, position - slot_BH1K)

    def read_slots(self, q_BH1D: Tensor, readable_BHC: Tensor, position: int) -> Tensor:
        """Return the slots that the query at a position reads, `[B, H, 1, K]`, -1 for none.

        Args:
            readable_BHC: how many keys of each cluster it may read.
        """
        pattern = self.pattern
        B, H = q_BH1D.shape[:2]
        N = position + 1
        is_probed_XN = self.probed_keys(q_BH1D, readable_BHC, N)
        slot_N = torch.arange(N, device=q_BH1D.device)
        slot_XN = torch.where(is_probed_XN, slot_N, N)
        slot_XK = slot_XN.topk(pattern.most_probed(N), largest=False, sorted=True).values
        if pattern.reads_all:
            return torch.where(slot_XK < N, slot_XK, -1).unflatten(0, (B, H))[:, :, None]
        assert self.choice_BHSD is not None
        at_BHK1 = slot_XK.clamp(max=position).unflatten(0, (B, H))[..., None]
        k_BHKD = widened(self.choice_BHSD.take_along_dim(at_BHK1, 2))
        k_X1KD = k_BHKD.flatten(0, 1)[:, None]
        best_X1W = pattern.best_candidates(q_BH1D.flatten(0, 1), k_X1KD, slot_XK[:, None], N)
        return best_X1W.unflatten(0, (B, H))

    def probed_keys(self, q_BH1D: Tensor, readable_BHC: Tensor, length: int) -> Tensor:
        """Return which of the first N keys the query probes, `[X, N]`, bool."""
        pattern = self.pattern
        assert self.filed_BHS2 is not None
        m = pattern.target(length)
        q_X1D = q_BH1D.flatten(0, 1)
        readable_XC = readable_BHC.flatten(0, 1)
        centroid_XCD = pattern.centroids.centroid_HCD.to(q_BH1D.dtype).repeat(len(q_BH1D), 1, 1)
        score_X1C = products(q_X1D, centroid_XCD)
        margin_X11 = query_margins(centroid_XCD, q_X1D)
        is_probed_X1C = probed_clusters(score_X1C, margin_X11, readable_XC[:, None], m)
        cluster_XN, rank_XN = self.filed_BHS2[:, :, :length].flatten(0, 1).unbind(-1)
        stop_XN = readable_XC.gather(-1, cluster_XN)
        is_last_XN = (rank_XN >= stop_XN - m) & (rank_XN < stop_XN)
        return is_probed_X1C[:, 0].gather(-1, cluster_XN) & is_last_XN


def ranked(cluster_BHN: Tensor, count_BHC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ranks of new keys in their clusters, `[B, H, N]`, and the clusters' new counts.

    Example: cluster c holds 4 keys, and of the new ones the second and the fifth join it. Their
    ranks are 4 and 5, and the new count is 6.
    """
    B, H, C = count_BHC.shape
    lists = pack(cluster_BHN, C, complete=True)
    first_rank_L = count_BHC.flatten() - lists.first_L()
    number_M = torch.arange(len(lists.row_M), device=cluster_BHN.device)
    rank_M = number_M + first_rank_L[lists.list_M()]
    rank_R = torch.empty_like(rank_M).scatter(0, lists.row_M, rank_M)
    return rank_R.view(cluster_BHN.shape), count_BHC + lists.count_L.view(B, H, C)


NOT_STARTED = -1
"""The number of steps of centroids that have not yet started at keys."""


class KeyCentroids(Centroids):
    """C centroids of the keys of each of H heads, of any norm, in float32: k-means over training.

    A centroid moves towards the mean of the keys that belonged to it in a step (`centroid_update`,
    "split"). One without any starts anew, right beside that of a cluster with many keys, whose keys
    the two then share (as FAISS splits clusters). They start at keys of the first sequence that
    training sees.
    """

    def __init__(self, heads: int, clusters: int, size: int, *, decay: float) -> None:
        # The window and the length are those of thresholds, which a nearest centroid does not need.
        super().__init__(heads, clusters, size, window=1, length=clusters, decay=decay)
        del self.threshold_HC
        self.update_rule = SPLIT
        self.seed_with_next = True
        self.steps.fill_(NOT_STARTED)
        self.register_load_state_dict_post_hook(KeyCentroids.seed_unless_started)

    def thresholds(self) -> list[Tensor]:
        return []

    def seed_unless_started(self, _: object) -> None:
        """Start at keys of the next batch only where the loaded centroids did not start at keys."""
        self.seed_with_next = int(self.steps) == NOT_STARTED

    @torch.no_grad()
    def seed_from(self, clustered: list[Tensor]) -> None:
        """Start at keys of the first sequence; without any key do nothing.

        Args:
            clustered: the keys alone, `[B, H, N, D]`.
        """
        (k_BHND,) = clustered
        if not k_BHND.numel():
            return
        self.centroid_HCD.copy_(self.drawn_from(k_BHND[0]).float())
        self.steps.clamp_(min=0)
        self.seed_with_next = False
