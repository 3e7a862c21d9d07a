"""Heads whose clusters have random members: the control of routing heads.

Example: `length` = 4, W = 2, and one cluster with the drawn positions 1 and 2. In a sequence of
eight positions its members are 1, 2, 5 and 6. The query at 5 reads the keys at 2 and 5.

clusters.py has the base class, with the mask of what members read and the cache of a stream.

Shapes: B sequences or streams, H heads, C clusters, N positions, W attention window, J repeats of
the draw, M members of a head or of all.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rtx.attention.arguments import check_positive, check_seed
from rtx.attention.clusters import ClusterCache, ClusterPattern, Joins
from rtx.attention.documents import Documents
from rtx.attention.members import lists_of_places
from rtx.attention.once import cached_by_shape
from rtx.attention.reads import (
    MemberLists,
    QueriesKeys,
    RangeReads,
    Reads,
    first_rows,
    members_around,
    members_read,
)


def random_positions(heads: int, clusters: int, length: int, window: int, seed: int) -> Tensor:
    """Return `window` random positions below `length` for each cluster, ascending, `[H, C, W]`.

    They depend on the arguments alone. If the window exceeds `length`, they are all positions.
    """
    generator = torch.Generator().manual_seed(seed)
    shape_HCW = (heads, clusters, min(window, length))
    position_HCW = torch.empty(shape_HCW, dtype=torch.int64, device="cpu")
    for position_W in position_HCW.flatten(0, 1):
        # One draw for each cluster: members do not depend on the number of clusters after it.
        draw_N = torch.rand(length, generator=generator, device="cpu")
        drawn_W = draw_N.topk(len(position_W)).indices
        position_W.copy_(drawn_W.sort().values)
    return position_HCW


class Random(ClusterPattern):
    """Clusters of random members, which ignore the contents of sequences: the control of Table 1.

    Each cluster has `window` random members among `length` positions, which depend on (seed, head,
    `clusters`, `window`, `length`) alone. Longer sequences repeat them every `length` positions.
    The paper says only that the indices of keys (Kidx) are chosen at random. One draw for all
    sequences is our choice.

    Args:
        heads: H.
        clusters: C.
        length: the number of positions among which members are drawn.
        seed: the seed of the draw.
        options: see `ClusterPattern`.
    """

    bounds_documents = True
    may_be_bidirectional = True

    def __init__(
        self,
        heads: int,
        clusters: int,
        *,
        length: int,
        seed: int,
        has_keys: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(has_keys=has_keys, **options)
        check_positive(0, heads=heads)
        check_positive(clusters=clusters, length=length)
        check_seed(seed)
        self.heads = heads
        self.clusters = clusters
        self.length = length
        self.seed = seed
        position_HCW = random_positions(heads, clusters, length, self.window, seed)
        self.register_buffer("position_HCW", position_HCW, persistent=False)
        self.position_HCW: Tensor

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        N = qk.q_BHND.shape[2]
        position_N = torch.arange(N, device=self.position_HCW.device)
        clusters: list[Tensor] = []
        for drawn_W in self.position_HCW[head]:
            is_member_N = torch.isin(position_N % self.length, drawn_W)
            clusters.append(is_member_N)
        member_CN = torch.stack(clusters)
        return self.read_by_rule(member_CN, member_CN)

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        """Return the lists, which depend on shapes and options alone, or also on documents.

        They are made once for each shape, or once for each batch with documents.
        """
        B, H, N, _ = qk.q_BHND.shape
        form = (
            type(self),
            self.clusters,
            self.length,
            self.seed,
            self.window,
            self.attend_self,
            self.causal,
            (B, H, N),
        )
        if qk.documents is not None:
            make_in_documents = partial(super().reads, qk, streaming)
            return qk.documents.cached(form, make_in_documents)
        make = partial(self.make_reads, B, H, N)
        device = qk.q_BHND.device
        return [*cached_by_shape(form, device, make)]

    def make_reads(self, B: int, H: int, N: int, device: torch.device) -> list[RangeReads]:
        """Return the result of `reads` for B sequences of N positions without documents."""
        members = self.members(B, H, N, device)
        make_ranges = members_read
        if not self.causal:
            make_ranges = members_around
        part = make_ranges(
            queries=members,
            keys=members,
            length=N,
            window=self.window,
            attend_self=self.attend_self,
        )
        return [part]

    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        if qk.documents is not None:
            return [self.members_of_documents(qk.documents)]
        B, H, N, _ = qk.q_BHND.shape
        members = self.members(B, H, N, qk.q_BHND.device)
        return [members]

    def members_of_documents(self, documents: Documents) -> MemberLists:
        """Return the members of every cluster by their positions in documents."""
        B, N = documents.first_BN.shape
        drawn_HCW = self.position_HCW.to(documents.first_BN.device)
        H, C, _ = drawn_HCW.shape
        is_drawn_HCN = drawn_HCW.new_zeros(H, C, self.length, dtype=torch.bool)
        is_drawn_HCN.scatter_(-1, drawn_HCW, True)
        drawn_position_BN = documents.position_BN % self.length
        is_member_HCBN = is_drawn_HCN[..., drawn_position_BN]
        is_member_BHCN = is_member_HCBN.permute(2, 0, 1, 3)
        place_M = is_member_BHCN.flatten().nonzero()[:, 0]
        return lists_of_places(place_M, B * H, C, N)

    def members(self, B: int, H: int, N: int, device: torch.device) -> MemberLists:
        """Return the members of every cluster in B sequences of N positions."""
        # Drawn again: if `position_HCW` is on a GPU, the CPU would have to wait for a copy.
        drawn_HCW = random_positions(
            heads=H,
            clusters=self.clusters,
            length=self.length,
            window=self.window,
            seed=self.seed,
        )
        drawn_HCW = drawn_HCW.to(device)
        # Longer sequences repeat the drawn positions.
        repeats = math.ceil(N / self.length)
        repeat_J = torch.arange(repeats, device=device)
        first_J = repeat_J * self.length
        position_HCJW = first_J[:, None] + drawn_HCW[:, :, None]
        position_HCM = position_HCJW.flatten(2)
        row_BHCM = first_rows(B, H, N, device) + position_HCM
        is_inside_HCM = position_HCM < N
        is_inside_BHCM = is_inside_HCM.expand(row_BHCM.shape)
        count_BHC = is_inside_BHCM.sum(-1)
        return MemberLists(row_BHCM[is_inside_BHCM], count_BHC.flatten())

    def pairs_of_head(self, length: int) -> float:
        members = min(self.window, length)
        return self.clusters * self.pairs_of_cluster(members)

    def clusters_of_next(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> Joins:
        B = len(qk.q_BHND)
        is_drawn_HCW = self.position_HCW == position % self.length
        joins_HC = is_drawn_HCW.any(-1)
        joins_BHC = joins_HC.expand(B, *joins_HC.shape)
        return Joins(query_BHC=joins_BHC, key_BHC=joins_BHC)
