"""Hashing for heads whose keys are not their queries.

`rtx.attention.Lsh` is for queries that serve as keys. A pretrained model has separate keys, so here
both are hashed by the same random matrices: in each of T rounds a query reads the last W keys of
its bucket, up to its position.

Shapes: B sequences, H heads, N positions, D head size, T rounds, C buckets, F = C / 2 columns.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rtx.attention.clusters import ClusterCache, ClusterPattern, Joins, last_members
from rtx.attention.lsh import buckets_of, hash_positions, random_rotations
from rtx.attention.pattern import Prepared
from rtx.attention.reads import MemberLists, QueriesKeys, pack


class HashedKeys(ClusterPattern):
    """H heads whose queries read keys with the same hash; see the module.

    Args:
        heads, size: H and D.
        rounds, buckets: T, and C (even).
        seed: decides the random matrices.
        options: `window` is W.
    """

    def __init__(
        self,
        heads: int,
        size: int,
        *,
        rounds: int,
        buckets: int,
        seed: int,
        **options: Any,
    ) -> None:
        super().__init__(has_keys=True, **options)
        self.heads = heads
        self.size = size
        self.rounds = rounds
        self.buckets = buckets
        rotation_HTDF = random_rotations(heads, (rounds, size, buckets // 2), seed)
        self.register_buffer("rotation_HTDF", rotation_HTDF, persistent=False)
        self.rotation_HTDF: Tensor

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        """Return queries and keys as they are: a hash does not depend on their norms."""
        assert k_BHND is not None
        return Prepared(q_BHND, k_BHND)

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        """Return the mask of each bucket of each round, `[T * C, N, N]`."""
        members = []
        for x_BHND in (qk.q_BHND, qk.k_BHND):
            rotation_TDF = self.rotation_HTDF[head].to(x_BHND.dtype)
            product_TNF = x_BHND[0, head] @ rotation_TDF
            bucket_TN = buckets_of(product_TNF)
            is_member_TNC = F.one_hot(bucket_TN, self.buckets).bool()
            members.append(is_member_TNC.mT.flatten(0, 1))
        query_CN, key_CN = members
        return last_members(query_CN, key_CN, self.window)

    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        queries = self.members(qk.q_BHND)
        keys = self.members(qk.k_BHND)
        return [queries, keys]

    def members(self, x_BHND: Tensor) -> MemberLists:
        """Return the members of all buckets, those of a head round after round."""
        bucket_TBHN = hash_positions(x_BHND, self.rotation_HTDF)
        T, B, H, N = bucket_TBHN.shape
        bucket_BHTN = bucket_TBHN.permute(1, 2, 0, 3)
        # Here each round of a head is a head, so rows are numbered with H * T heads.
        lists = pack(bucket_BHTN.reshape(B, H * T, N), self.buckets, complete=True)
        rows_of_head = T * N
        head_M = lists.row_M // rows_of_head
        position_M = lists.row_M % N
        return MemberLists(head_M * N + position_M, lists.count_L)

    def clusters_of_next(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> Joins:
        query_BHL = self.joins(qk.q_BHND)
        key_BHL = self.joins(qk.k_BHND)
        return Joins(query_BHC=query_BHL, key_BHC=key_BHL)

    def joins(self, x_BH1D: Tensor) -> Tensor:
        """Return which buckets of all rounds the vectors of a position are in, `[B, H, T * C]`."""
        bucket_TBH1 = hash_positions(x_BH1D, self.rotation_HTDF)
        bucket_BHT = bucket_TBH1[..., 0].permute(1, 2, 0)
        return F.one_hot(bucket_BHT, self.buckets).bool().flatten(2)
