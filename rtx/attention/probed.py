"""Probed keys: a query compares itself with C centroids of the keys, and reads the keys of the
clusters that match it best.

The method. Attention to all earlier keys costs N^2 / 2 products for each head, and most of a
softmax goes to few of them. An *inverted file* finds these few (Sivic and Zisserman 2003; it is the
index "IVF" of FAISS, Johnson et al. 2017, arXiv 1702.08734). K-means divides vectors into C
clusters, and the file lists the members of each. A search compares a query with the C centroids
alone, chooses some clusters by that, and looks at their lists: it *probes* these clusters. Here the
vectors are the keys of a head, and its queries search.

1. A key k belongs to the cluster c with the closest centroid mu_c: that with the largest
   k . mu_c - |mu_c|^2 / 2, which orders centroids as their distances do.
2. A query q at position i takes the clusters in the order of q . mu_c, the largest first, until
   they hold at least m keys at positions j <= i, or no cluster is left. The order is by products
   and not by distances, because attention weighs a key by q . k, and q . mu_c is the mean of these
   products if mu_c is the mean of the cluster's keys. The query counts keys and not clusters,
   because clusters differ in size, and small ones often have the largest products. It probes the
   last m keys of a cluster at most. So it probes at least m keys, if there are as many, and at most
   2 m - 1: m - 1, and then m of one more cluster.
3. Without the option `candidates`, m is the window W, and the query reads all keys that it probes.
   With it, m is `candidates`, and the query reads those W of the probed keys, its *candidates*,
   that have the largest logits.

Example: m = 3, C = 3. The keys at the positions 0 to 5 belong to the clusters a, b, a, c, a and b,
so the file is a: 0, 2, 4; b: 1, 5; c: 3. The query at position 5 has its largest product with the
centroid of c, then a, then b. It probes c, which holds one key, and then a, which holds three.
These are four keys, no fewer than m, so it does not probe b. It reads the positions 0, 2, 3 and 4.
With `candidates` = 3 and `window` = 2 it reads the two of the four with the largest logits. It does
not read its own key, at 5, which is in b.

A query that may read no more than m keys probes all clusters, and reads all of these keys.

With causal=False a query may probe all keys, and of a cluster with more than m keys the m around
its position, half of them before it. Its own key counts among those that it probes, also if it does
not read it (`attend_self`).

Rounding differs between a pass and a stream, so scores within a margin count as equal (ties.py). A
key belongs to the first of the clusters whose scores equal the best. A query takes equal clusters
in the order of their numbers: the sorted scores are cut where neighbours are further apart than the
margin, and clusters between two cuts are equal. Of candidates whose logits equal the last one taken
the earliest are taken.

Centroids do not move within a pass, so the choice is strictly causal (or, with causal=False, by all
keys). After each optimizer step
they follow the keys of the step (`KeyCentroids`).

The rule is first in this file, then the pattern, which chooses among the batch forms, then the
stream. inverted_file.py has the clusters of keys and those that queries probe, probed_lists.py the
lists of queries that read all that they probe, and candidates.py the index of the others. On a CPU
a compiled kernel makes both (engine/probing.cpp). On a GPU our kernels make the lists
(engine/triton_probing.py), for all types but float64, up to 4,095 clusters and 1,048,575 positions.
Torch's operations make all else, and everything with causal=False; on a GPU they are many times
slower.

Shapes: B sequences or streams, H heads, X = B * H, C clusters, N positions, D head size, S slots of
a cache, A keys that a query probes, W the best of them that it reads with `candidates`, M keys of
all lists, L = B * H * C lists.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import torch
from torch import Tensor

from rtx.attention.arguments import check_positive, check_within
from rtx.attention.candidates import best_candidates, candidate_index, native_index
from rtx.attention.centroids import QUERIES, gathering
from rtx.attention.clusters import around
from rtx.attention.engine import native, triton_probing, triton_selection
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.engine.triton_probing import Reach
from rtx.attention.inverted_file import (
    clusters_of,
    early_count,
    max_probed,
    probed_clusters,
    query_margins,
)
from rtx.attention.key_centroids import KeyCentroids
from rtx.attention.members import products, sums_of_lists
from rtx.attention.pairs import pairs_within
from rtx.attention.pattern import Cache
from rtx.attention.positional import stored
from rtx.attention.precision import widened
from rtx.attention.probed_lists import (
    collect_members,
    dynamic_lists,
    early_lists,
    lists_with_capacity,
    native_lists,
    triton_lists,
)
from rtx.attention.reads import IndexReads, MemberLists, QueriesKeys, RangeReads, Reads, pack
from rtx.attention.static import is_static, selection_functions
from rtx.attention.ties import best, highest, tie_margin
from rtx.attention.top_keys import GrowingCache, TopKeys, readable_count
from rtx.attention.typed_torch import tolist, vector_norm

LARGEST = sys.float_info.max


def probed_positions(
    score_C: list[float],
    margin: float,
    members: dict[int, list[int]],
    target: int,
    i: int,
    causal: bool,
) -> list[int]:
    """Return the positions of the keys that the query at position i probes, ascending.

    Args:
        score_C: the products of the query with the centroids. NaN is the least.
        margin: within which neighbouring scores are equal.
        members: the positions that the query may probe, by cluster.
        target: m.
        causal: the query takes the last m keys of a cluster; otherwise the m keys around it.
    """
    score_C = [finite_number(score) for score in score_C]
    positions: list[int] = []
    remaining = sorted(members)
    while remaining and len(positions) < target:
        equal = equal_to_best(score_C, margin, remaining)
        for c in equal:
            if len(positions) < target:
                taken = members[c][-target:]
                if not causal:
                    taken = around(members[c], i, target)
                positions += taken
        remaining = [c for c in remaining if c not in equal]
    return sorted(positions)


def cluster_of_key(k_D: Tensor, centroid_CD: Tensor, largest_norm: Tensor) -> int:
    """Return the cluster whose centroid is closest to a key; the first of equal ones.

    Args:
        largest_norm: of the centroids.
    """
    scores: list[float] = []
    for mu_D in centroid_CD:
        half_square = mu_D @ mu_D / 2
        score = k_D @ mu_D - half_square
        scores.append(finite_number(float(score)))
    margin = margin_or_zero(vector_norm(k_D) + largest_norm, largest_norm)
    return highest(scores, [margin for _ in scores])


def margin_or_zero(norm: Tensor, other_norm: Tensor) -> float:
    """Return the margin of products of vectors with these norms; 0 if it is no finite number."""
    margin = float(tie_margin(norm, other_norm, norm.dtype))
    if math.isfinite(margin):
        return margin
    return 0.0


def positions_by_cluster(cluster_N: list[int]) -> dict[int, list[int]]:
    """Return the positions in each cluster, ascending."""
    members: dict[int, list[int]] = {}
    for position, cluster in enumerate(cluster_N):
        members.setdefault(cluster, []).append(position)
    return members


def finite_number(score: float) -> float:
    """Return the score, or the number closest to an infinite one, or the least one for NaN.

    The difference of two equal infinite scores would be NaN.
    """
    if math.isnan(score):
        return -LARGEST
    return min(max(score, -LARGEST), LARGEST)


def equal_to_best(score_C: list[float], margin: float, clusters: list[int]) -> list[int]:
    """Return the clusters that count as equal to the best of some clusters, ascending.

    Sorted by score, each differs from the one before it by at most the margin.
    """
    by_score = sorted(clusters, key=lambda c: -score_C[c])
    equal = by_score[:1]
    for before, c in itertools.pairwise(by_score):
        step = score_C[before] - score_C[c]
        if step > margin:
            break
        equal.append(c)
    return sorted(equal)


class Probed(TopKeys):
    """H heads whose queries read keys of the clusters that match them best; see the module.

    Args:
        heads, size: H and D.
        clusters: C.
        decay: the share of a centroid that remains after one step.
        window: W. Without `candidates`, m = W, and a query reads all keys that it probes, at most
            2 W - 1.
        candidates: m. A query then reads the W best of the keys that it probes, by q k^T.

    Raises:
        ValueError: a count below 1 (heads below 0), a window above the candidates, or a decay
            outside 0 to 1.
    """

    merge = "lse"
    may_be_bidirectional = True

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
        self.capacity_factor = 2
        """See `capacity`; `raise_capacities` doubles it if members are lost."""
        none_lost = torch.zeros(1, dtype=torch.int64)
        self.register_buffer("lost_members", none_lost, persistent=False)
        self.lost_members: Tensor
        """How many query members exceeded the capacity of lists, see capacity.py."""
        self.files: triton_probing.Files | None = None
        """The inverted files of this pass, from `gather` to `reads`, so that they are made once."""

    @property
    def reads_all(self) -> bool:
        """Whether a query reads all keys that it probes."""
        return self.candidates is None

    @property
    def has_index(self) -> bool:
        return not self.reads_all

    @property
    def may_lose_members(self) -> bool:
        """Whether lists on a GPU have a fixed capacity, see capacity.py."""
        return self.reads_all and self.causal

    def reach(self, length: int) -> Reach:
        """Return how far a query probes in N positions; its target is m, or N if that is less."""
        m = self.window
        if self.candidates is not None:
            m = self.candidates
        target = min(m, length)
        return Reach(target, self.attend_self, self.causal)

    def max_keys(self, length: int) -> int:
        if self.reads_all:
            return max_probed(self.reach(length).target, length)
        return min(self.window, length)

    # The rule.

    @torch.no_grad()
    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        q_ND = qk.rotated_q_BHND[0, head]
        k_ND = qk.rotated_k_BHND[0, head]
        N = len(q_ND)
        centroid_CD = self.centroids.centroid_HCD[head]
        centroid_CD = centroid_CD.to(q_ND.dtype)
        largest_norm = max(vector_norm(mu_D) for mu_D in centroid_CD)
        cluster_N = [cluster_of_key(k_D, centroid_CD, largest_norm) for k_D in k_ND]
        score_NC = tolist(q_ND @ centroid_CD.T)
        target = self.reach(N).target
        mask_NN = torch.zeros(N, N, dtype=torch.bool, device=q_ND.device)
        for i, q_D in enumerate(q_ND):
            probeable = N
            if self.causal:
                probeable = readable_count(i, self.attend_self)
            members = positions_by_cluster(cluster_N[:probeable])
            margin = margin_or_zero(vector_norm(q_D), largest_norm)
            read = probed_positions(score_NC[i], margin, members, target, i, self.causal)
            if not self.attend_self:
                others = [j for j in read if j != i]
                read = others or read
            if not self.reads_all:
                read = self.best_by_rule(q_D, k_ND, read)
            mask_NN[i, read] = True
        return mask_NN[None]

    def best_by_rule(self, q_D: Tensor, k_ND: Tensor, position_A: list[int]) -> list[int]:
        """Return the positions of a query's W best candidates."""
        k_AD = k_ND[position_A]
        logits = tolist(q_D @ k_AD.T)
        margins = tolist(self.tie_margins(q_D, k_AD))
        best_of_A = best(logits, margins, self.window)
        return [position_A[number] for number in best_of_A]

    # The batch form.

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        q_BHND = widened(qk.rotated_q_BHND)
        k_BHND = widened(qk.rotated_k_BHND)
        if self.reads_all:
            return self.lists_read(q_BHND, k_BHND)
        return [self.index_read(q_BHND, k_BHND)]

    def uses_cpu_kernel(self, k_BHND: Tensor) -> bool:
        """Return whether the compiled kernel for CPUs finds the clusters of keys.

        It makes the batch form of causal heads, too.
        """
        fits_kernel = k_BHND.is_cpu and k_BHND.dtype == torch.float32
        if not fits_kernel or is_static(k_BHND, self.backend):
            return False
        N = k_BHND.shape[2]
        return native.wanted(self.backend, N)

    def uses_gpu_kernels(self, k_BHND: Tensor) -> bool:
        """Return whether our kernels for GPUs make the batch form."""
        if self.has_index or not self.causal or not is_static(k_BHND, self.backend):
            return False
        N = k_BHND.shape[2]
        if N > triton_probing.MAX_LENGTH or self.clusters > triton_probing.MAX_CLUSTERS:
            return False
        functions = selection_functions(k_BHND, self.backend)
        return functions is triton_selection

    def index_read(self, q_BHND: Tensor, k_BHND: Tensor) -> IndexReads:
        """Return the W best candidates of all queries."""
        N = q_BHND.shape[2]
        centroid_HCD = self.centroids.centroid_HCD
        reach = self.reach(N)
        window = self.max_keys(N)
        if N and self.causal and self.uses_cpu_kernel(k_BHND):
            return native_index(centroid_HCD, q_BHND, k_BHND, reach, window)
        return candidate_index(
            centroid_HCD,
            q_BHND,
            k_BHND,
            reach=reach,
            window=window,
            backend=self.backend,
        )

    def lists_read(self, q_BHND: Tensor, k_BHND: Tensor) -> list[Reads]:
        """Return the lists of early positions and of clusters.

        A query at an early position may read m keys at most (`early_count`); all others are *late*.
        """
        B, H, N, _ = q_BHND.shape
        reach = self.reach(N)
        files = self.files
        self.files = None
        if not self.causal:
            return [dynamic_lists(self.centroids.centroid_HCD, q_BHND, k_BHND, reach)]
        if B * H * N and self.uses_cpu_kernel(k_BHND):
            centroid_HCD = self.centroids.centroid_HCD
            return [native_lists(centroid_HCD, q_BHND, k_BHND, reach)]
        early = early_count(reach, N)
        has_late = B * H > 0 and early < N
        if has_late and self.uses_gpu_kernels(k_BHND):
            if files is None:
                files = self.file_keys(k_BHND)
            return [self.triton_part(q_BHND, files, reach)]
        parts = early_lists(q_BHND.shape, reach, q_BHND.device)
        if not has_late:
            return parts
        late_part = self.late_part(q_BHND, k_BHND, reach)
        return [*parts, late_part]

    def late_part(self, q_BHND: Tensor, k_BHND: Tensor, reach: Reach) -> RangeReads:
        """Return the lists of clusters, for late queries, by torch's operations."""
        centroid_HCD = self.centroids.centroid_HCD
        inputs = (centroid_HCD, q_BHND, k_BHND, reach)
        if not is_static(q_BHND, self.backend):
            return dynamic_lists(*inputs)
        B, H, N, _ = q_BHND.shape
        capacity = self.capacity(B * H, N)
        members = collect_members(*inputs, capacity)
        excess = self.excess_members(members.count_1, capacity)
        if excess:
            members = collect_members(*inputs, capacity + excess)
        return lists_with_capacity(members, self.clusters, N, reach)

    def triton_part(self, q_BHND: Tensor, files: triton_probing.Files, reach: Reach) -> RangeReads:
        """Return all lists, by our kernels for GPUs."""
        B, H, N, _ = q_BHND.shape
        centroid_HCD = self.centroids.centroid_HCD
        probes = triton_probing.probe_files(centroid_HCD, q_BHND, files, reach)
        capacity = self.capacity(B * H, N)
        excess = self.excess_members(probes.count_1(), capacity)
        return triton_lists(files, probes, reach, capacity + excess)

    def file_keys(self, k_BHND: Tensor) -> triton_probing.Files:
        """Return the keys of each cluster, by our kernels for GPUs."""
        N = k_BHND.shape[2]
        early = early_count(self.reach(N), N)
        return triton_probing.file_keys(self.centroids.centroid_HCD, k_BHND, early)

    def capacity(self, heads: int, length: int) -> int:
        """Return the largest number of query members of the lists of clusters together.

        That is `capacity_factor` times their number if clusters are of equal size, and no more than
        there can be. A cluster then holds i / C keys at position i, so a query there probes at most
        1 + m C / i clusters: m C / i rounded up. The average over the positions from m to N is
        about 1 + m C / N log(N / m).

        Args:
            heads: of all sequences.
            length: N.
        """
        m = max(1, self.reach(length).target)
        N = max(1, length)
        rows = heads * length
        clusters_of_m_keys = m * self.clusters / N
        probed = 1 + clusters_of_m_keys * math.log(N / m)
        probed = min(probed, self.clusters)
        capacity = self.capacity_factor * math.ceil(rows * probed)
        return min(capacity, rows * self.clusters)

    def excess_members(self, count_1: Tensor, capacity: int) -> int:
        """Return by how much to raise the capacity, so that the lists hold all query members.

        In evaluation the CPU reads that number. In training it would have to wait for a GPU, so the
        result is 0: members beyond the capacity are left out of their lists, and this function adds
        their number to `lost_members` (capacity.py).

        Args:
            count_1: the number of query members.
        """
        lost_1 = (count_1 - capacity).clamp(min=0)
        if not self.training:
            return int(lost_1)
        if not gathering.is_paused:
            self.lost_members += lost_1
        return 0

    # Statistics that move the centroids.

    @torch.no_grad()
    def observe(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        self.gather(qk)
        return self.reads(qk, streaming)

    def gather(self, qk: QueriesKeys) -> None:
        """Add up the keys of each cluster in training.

        The first batch initialises the centroids.
        """
        self.files = None
        k_BHND = widened(qk.rotated_k_BHND.detach())
        if self.centroids.seed_with_next and self.centroids.training:
            self.centroids.seed_from([k_BHND])
        gathers = self.training and not gathering.is_paused
        if not gathers or not k_BHND.numel():
            return
        if self.uses_gpu_kernels(k_BHND):
            self.files = self.file_keys(k_BHND)
        keys = self.clustered_keys(k_BHND)
        # There is one role, the number 0: that of keys, as queries are in no cluster.
        self.centroids.observe(
            QUERIES,
            k_BHND,
            member_count_L=keys.count_L,
            sum_LD=sums_of_lists(k_BHND, keys, self.backend),
            count_L=keys.count_L,
            moment_2BHC=None,
        )

    def clustered_keys(self, k_BHND: Tensor) -> MemberLists:
        """Return the keys of each cluster; from `files`, if there are some."""
        if self.uses_cpu_kernel(k_BHND):
            return native.cluster_keys(self.centroids.centroid_HCD, k_BHND)
        if self.files is not None:
            return self.files.packed()
        cluster_BHN = clusters_of(self.centroids.centroid_HCD, k_BHND)
        return pack(cluster_BHN, self.clusters, complete=True)

    # Costs.

    def choice_operations(self, length: int, size: int) -> float:
        """Return the operations of products with centroids, and with candidates.

        Keys and queries are both multiplied with all centroids.
        """
        products_of_head = 2.0 * length * self.clusters
        if self.candidates is not None:
            products_of_head += pairs_within(length, self.candidates, self.causal)
        return 2 * size * products_of_head

    # The stream.

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return ProbedCache(self, relative)


class ProbedCache(GrowingCache):
    """All keys and values so far, and the inverted file: the cluster and the rank of each key.

    The rank of a key is the number of keys before it in its cluster. So if a query may read the
    first n keys of a cluster, the last m of these have the ranks n - m to n - 1.
    """

    pattern: Probed
    count_BHC: Tensor | None = None
    """The number of keys of each cluster."""
    filed_BHS2: Tensor | None = None
    """The cluster and the rank of the key in each slot."""

    def put_choice(self, qk: QueriesKeys, first: int) -> None:
        """Store the keys of positions from `first` on.

        If queries choose by logits (`candidates`), `choice_BHSE` has the keys once more, in their
        type in `qk`, because `key_BGSD` has them rounded to the type of the values.
        """
        pattern = self.pattern
        k_BHND = widened(qk.rotated_k_BHND)
        cluster_BHN = clusters_of(pattern.centroids.centroid_HCD, k_BHND)
        if self.count_BHC is None:
            B, H, _ = cluster_BHN.shape
            self.count_BHC = cluster_BHN.new_zeros(B, H, pattern.clusters)
        rank_BHN, new_count_BHC = ranked(cluster_BHN, self.count_BHC)
        self.count_BHC = new_count_BHC
        filed_BHN2 = torch.stack([cluster_BHN, rank_BHN], dim=-1)
        self.filed_BHS2 = stored(self.filed_BHS2, filed_BHN2, first)
        if not pattern.reads_all:
            self.choice_BHSE = stored(self.choice_BHSE, qk.rotated_k_BHND, first)

    def chosen_slots(self, qk: QueriesKeys, position: int) -> Tensor:
        q_X1D = widened(qk.rotated_q_BHND).flatten(0, 1)
        N = position + 1
        slot_N = torch.arange(N, device=q_X1D.device)
        is_probed_XN = self.probed_keys(q_X1D, N)
        slot_XN = torch.where(is_probed_XN, slot_N, N)
        target = self.pattern.reach(N).target
        most = max_probed(target, N)
        slot_XA = slot_XN.topk(most, largest=False, sorted=True).values
        if self.pattern.reads_all:
            read_XA = torch.where(slot_XA < N, slot_XA, -1)
            read = read_XA[:, None]
        else:
            read = self.best_slots(q_X1D, slot_XA, N)
        streams_and_heads = qk.rotated_q_BHND.shape[:2]
        return torch.unflatten(read, 0, streams_and_heads)

    def probed_keys(self, q_X1D: Tensor, length: int) -> Tensor:
        """Return which of the first N keys the newest query probes, `[X, N]`, bool."""
        pattern = self.pattern
        assert self.filed_BHS2 is not None
        filed_BHN2 = self.filed_BHS2[:, :, :length]
        cluster_XN, rank_XN = filed_BHN2.flatten(0, 1).unbind(-1)
        readable_XC = self.readable_counts(cluster_XN)
        streams = len(self.filed_BHS2)
        centroid_HCD = pattern.centroids.centroid_HCD.to(q_X1D.dtype)
        centroid_XCD = centroid_HCD.repeat(streams, 1, 1)
        m = pattern.reach(length).target
        is_probed_X1C = probed_clusters(
            score_XNC=products(q_X1D, centroid_XCD),
            margin_XN1=query_margins(centroid_XCD, q_X1D),
            readable_XNC=readable_XC[:, None],
            target=m,
        )
        is_probed_XC = is_probed_X1C[:, 0]
        is_in_probed_XN = is_probed_XC.gather(-1, cluster_XN)
        stop_XN = readable_XC.gather(-1, cluster_XN)
        is_readable_XN = rank_XN < stop_XN
        is_among_last_XN = rank_XN >= stop_XN - m
        return is_in_probed_XN & is_among_last_XN & is_readable_XN

    def readable_counts(self, cluster_XN: Tensor) -> Tensor:
        """Return how many keys of each cluster the newest query may read, `[X, C]`."""
        assert self.count_BHC is not None
        count_XC = self.count_BHC.flatten(0, 1)
        N = cluster_XN.shape[1]
        readable = readable_count(N - 1, self.pattern.attend_self)
        if readable == N:
            return count_XC
        newest_cluster_X1 = cluster_XN[:, -1:]
        minus_one_X1 = torch.full_like(newest_cluster_X1, -1)
        return count_XC.scatter_add(-1, newest_cluster_X1, minus_one_X1)

    def best_slots(self, q_X1D: Tensor, slot_XA: Tensor, length: int) -> Tensor:
        """Return the slots of the query's W best candidates, `[X, 1, W]`; -1 for none.

        Args:
            slot_XA: those of the candidates, ascending; N for none.
            length: N.
        """
        pattern = self.pattern
        assert self.choice_BHSE is not None
        k_XSD = self.choice_BHSE.flatten(0, 1)
        real_slot_XA = slot_XA.clamp(max=length - 1)
        real_slot_XA1 = real_slot_XA[..., None]
        k_XAD = k_XSD.take_along_dim(real_slot_XA1, 1)
        return best_candidates(
            q_X1D,
            widened(k_XAD)[:, None],
            slot_XA[:, None],
            length=length,
            window=pattern.window,
            backend=pattern.backend,
        )


def ranked(cluster_BHN: Tensor, count_BHC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ranks of new keys in their clusters, `[B, H, N]`, and the clusters' new counts.

    Example: cluster c holds 4 keys, and of the new ones the second and the fifth join it. Their
    ranks are 4 and 5, and the new count is 6.
    """
    B, H, C = count_BHC.shape
    lists = pack(cluster_BHN, C, complete=True)
    row_M = lists.row_M
    first_rank_L = count_BHC.flatten() - lists.first_L()
    number_M = torch.arange(len(row_M), device=row_M.device)
    rank_M = number_M + first_rank_L[lists.list_M()]
    rank_R = torch.empty_like(rank_M)
    rank_R.scatter_(0, row_M, rank_M)
    rank_BHN = rank_R.view(cluster_BHN.shape)
    new_BHC = lists.count_L.view(B, H, C)
    return rank_BHN, count_BHC + new_BHC
