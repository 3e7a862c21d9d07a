"""Attention by locality-sensitive hashing: a query reads keys of the bucket that it hashes into
(Kitaev et al. 2020, Reformer, section 2).

Queries and keys are the same vectors; a key is its query scaled to norm 1. Each of T hash rounds
has a fixed random matrix R, `[D, F]`. It puts the query x, before it is rotated, into the bucket
argmax [xR, -xR] of C = 2 F. In each round a query may read some members of its bucket, up to its
position. It reads the keys of all rounds in one softmax, where a key that several rounds have
counts once (Reformer corrects for this by the logarithm of the count). It reads its own key only if
it reads no other.

The two variants differ in which members of a bucket a query may read:

    "causal"    the last W, its own key among them. Strictly causal; it is not in the paper.
    "reformer"  as published. The N positions are sorted by bucket, then by position, and cut into
                chunks of m = W // 2 (at least 1). A query reads the members of its bucket in its
                chunk and in the chunk before. It sees the future: later positions push earlier
                ones into other chunks. A stream, and a pass with `streaming`, sorts and cuts the
                positions up to each query.

Example: one round, two buckets, six positions. Bucket a has the positions 0, 2, 3 and 5, bucket b
has 1 and 4. With "causal" and W = 3 the query at 5 may read 2, 3 and 5, so it reads 2 and 3. With
"reformer" and W = 4 the chunks are (0, 2), (3, 5) and (1, 4). The query at 5 reads 0, 2 and 3. The
query at 4 reads 1, and nothing of the chunk before, whose members are in another bucket.

Shapes: B sequences or streams, H heads, X = B * H, N positions, D head size, T hash rounds, C
buckets, F = C / 2 columns of R, R = X * N rows, M = R members of the buckets of one round, J lists
that a query of a stream is a member of, S slots of a bucket, K = T * S, P positions of a piece.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.arguments import check_choice, check_positive, check_seed
from rtx.attention.cache import Cache, mask_without_self
from rtx.attention.clusters import ClusterCache, ClusterPattern
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.pattern import Prepared
from rtx.attention.pieces import piece_size
from rtx.attention.precision import no_autocast
from rtx.attention.reads import Holes, MemberLists, QueriesKeys, RangeReads, Reads, pack

CAUSAL = "causal"
REFORMER = "reformer"
VARIANTS = (CAUSAL, REFORMER)


def hashed(
    bucket_TN: Tensor,
    window: int,
    variant: str,
    streaming: bool,
) -> Tensor:
    """Return which keys each query reads, `[1, N, N]`, bool.

    Args:
        bucket_TN: the bucket of each position in each round.
        window: W.
        variant: of `VARIANTS`.
        streaming: whether "reformer" sorts the positions up to each query alone.
    """
    rounds = bucket_TN.tolist()
    N = bucket_TN.shape[1]
    mask_NN = torch.zeros(N, N, dtype=torch.bool, device=bucket_TN.device)
    for i in range(N):
        length = i + 1 if streaming else N
        read: set[int] = set()
        for bucket_N in rounds:
            if variant == CAUSAL:
                read.update(earlier_members(bucket_N, i)[-window:])
            else:
                read.update(members_in_chunks(bucket_N[:length], i, max(1, window // 2)))
        others = sorted(read - {i})
        mask_NN[i, others or [i]] = True
    return mask_NN[None]


def earlier_members(bucket_N: list[int], i: int) -> list[int]:
    """Return the positions up to i in the bucket of position i."""
    return [j for j in range(i + 1) if bucket_N[j] == bucket_N[i]]


def members_in_chunks(bucket_N: list[int], i: int, chunk: int) -> list[int]:
    """Return those of `earlier_members` that are in the chunk of position i or the chunk before.

    Args:
        chunk: m.
    """

    def bucket_and_position(j: int) -> tuple[int, int]:
        return bucket_N[j], j

    chunks: dict[int, int] = {}
    for number, j in enumerate(sorted(range(len(bucket_N)), key=bucket_and_position)):
        chunks[j] = number // chunk
    return [j for j in earlier_members(bucket_N, i) if chunks[j] in (chunks[i] - 1, chunks[i])]


class Lsh(ClusterPattern):
    """H heads that read by hash buckets; see the module. Their memory is linear in N.

    Args:
        heads, size: H and D.
        window: W.
        rounds, buckets: T, and C (even).
        seed: the rotations follow from the seed and the head's number. They are a buffer that a
            checkpoint does not have.
        variant: "causal" or "reformer", which sees the future.

    Raises:
        ValueError: an unknown variant, a count below 1 (heads below 0), an odd number of buckets,
            or a seed that torch does not take.
    """

    def __init__(
        self,
        heads: int,
        size: int,
        *,
        rounds: int,
        buckets: int,
        seed: int,
        variant: str = CAUSAL,
        **options: Any,
    ) -> None:
        merge = "mean" if rounds == 1 else "lse"
        super().__init__(has_keys=False, attend_self=False, merge=merge, **options)
        check_choice("variant", variant, VARIANTS)
        check_positive(0, heads=heads)
        check_positive(size=size, rounds=rounds, buckets=buckets)
        check_seed(seed)
        if buckets % 2:
            raise ValueError(f"buckets={buckets}: must be even, at least 2")
        self.heads = heads
        self.size = size
        self.rounds = rounds
        self.buckets = buckets
        self.variant = variant
        self.strictly_causal = variant == CAUSAL
        self.chunk = max(1, self.window // 2)
        self.slots = self.window if variant == CAUSAL else 2 * self.chunk
        """The number of a bucket's last members that a query may read at most, its own included."""
        generator = torch.Generator().manual_seed(seed)
        rotation_HTDF = torch.empty(heads, rounds, size, buckets // 2, device="cpu")
        # One draw for each head, so that it does not depend on the number of heads.
        for rotation_TDF in rotation_HTDF:
            rotation_TDF.normal_(generator=generator)
        self.register_buffer("rotation_HTDF", rotation_HTDF, persistent=False)
        self.rotation_HTDF: Tensor

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        """Return the queries, and as keys the same at norm 1; those far below 1e-3 stay short."""
        wide_BHND = q_BHND.to(torch.promote_types(q_BHND.dtype, torch.float32))
        square_BHN1 = wide_BHND.square().sum(-1, keepdim=True)
        return Prepared(q_BHND, wide_BHND / (square_BHN1 + 1e-6).sqrt())

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        q_ND = qk.q_BHND[0, head]
        rotation_TDF = self.rotation_HTDF[head].to(q_ND.dtype)
        product_TNF = torch.stack([q_ND @ rotation_DF for rotation_DF in rotation_TDF])
        bucket_TN = torch.cat([product_TNF, -product_TNF], dim=-1).argmax(-1)
        return hashed(bucket_TN, self.window, self.variant, streaming)

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        """Return one part for each round, with holes for the pairs of earlier rounds."""
        bucket_TBHN = hash_positions(qk.q_BHND, self.rotation_HTDF)
        rounds = [self.hash_round(bucket_BHN, streaming) for bucket_BHN in bucket_TBHN]
        member_TR = torch.stack([one.member_R for one in rounds])
        first_TR = torch.stack([one.first_M[one.member_R] for one in rounds])
        # A query that reads no other key in any round reads its own in the first round.
        reads_itself_R = (first_TR == member_TR).all(0)
        parts: list[Reads] = []
        for t, hash_round in enumerate(rounds):
            lists = hash_round.lists
            row_M = lists.row_M
            start_M = hash_round.first_M
            stop_M = torch.arange(len(row_M), device=row_M.device)
            if t == 0:
                stop_M = stop_M + reads_itself_R[row_M].long()
            # In an earlier round a row reads the members from its first one to the one before it.
            before_XM = member_TR[:t, row_M]
            holes: Holes | None = Holes(before_XM, first_TR[:t, row_M], before_XM)
            if streaming and self.variant == REFORMER:
                start_M, holes = with_ascending_starts(start_M, holes)
            if not len(holes.value_XM):
                holes = None
            length = bucket_TBHN.shape[-1]
            parts.append(RangeReads(lists, lists, start_M, stop_M, length, holes))
        return parts

    def hash_round(self, bucket_BHN: Tensor, streaming: bool) -> HashRound:
        """Return the buckets of one round, and what their members may read."""
        lists = pack(bucket_BHN, self.buckets, complete=True)
        number_M = torch.arange(len(lists.row_M), device=bucket_BHN.device)
        first_of_list_M = lists.first_L()[lists.list_M()]
        first_in_reach_M = self.first_in_reach(bucket_BHN, lists, streaming)
        return HashRound(
            lists=lists,
            first_M=first_of_list_M.maximum(first_in_reach_M),
            member_R=torch.empty_like(number_M).scatter(0, lists.row_M, number_M),
        )

    def first_in_reach(
        self,
        bucket_BHN: Tensor,
        lists: MemberLists,
        streaming: bool,
    ) -> Tensor:
        """Return the first member that each member could read if its bucket began early enough."""
        N = bucket_BHN.shape[2]
        number_M = torch.arange(len(lists.row_M), device=bucket_BHN.device)
        if self.variant == CAUSAL:
            return number_M + 1 - self.window
        if streaming:
            place_XN = sorted_places(bucket_BHN.flatten(0, 1), self.buckets)
            place_M = place_XN.flatten()[lists.row_M]
            return number_M - self.chunk - place_M % self.chunk
        # Members are numbered in the order that chunks are cut from, N for each head.
        first_of_head_M = number_M // max(1, N) * N
        chunk_M = (number_M - first_of_head_M) // self.chunk
        return first_of_head_M + (chunk_M - 1) * self.chunk

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return LshCache(self, self.slots, relative)

    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        """Return the members of all buckets, those of a head round after round."""
        bucket_TBHN = hash_positions(qk.q_BHND, self.rotation_HTDF)
        T, B, H, N = bucket_TBHN.shape
        bucket_BHTN = bucket_TBHN.permute(1, 2, 0, 3)
        lists = pack(bucket_BHTN.reshape(B, H * T, N), self.buckets, complete=True)
        # `pack` took each round of a head for a head.
        row_M = lists.row_M // (T * N) * N + lists.row_M % N
        return [MemberLists(row_M, lists.count_L)]

    def clusters_of_next(
        self,
        qk: QueriesKeys,
        position: int,
        cache: ClusterCache,
    ) -> tuple[Tensor, Tensor, None]:
        bucket_TBH = hash_positions(qk.q_BHND, self.rotation_HTDF)[..., 0]
        joins_BHTC = F.one_hot(bucket_TBH.permute(1, 2, 0), self.buckets).bool()
        joins_BHC = joins_BHTC.flatten(2)
        return joins_BHC, joins_BHC, None


class HashRound(NamedTuple):
    """The buckets of one round. A member reads those from its first one to the one before it."""

    lists: MemberLists
    first_M: Tensor
    """The first member that each member reads."""
    member_R: Tensor
    """The member that each row is."""


@torch.no_grad()
def hash_positions(q_BHND: Tensor, rotation_HTDF: Tensor) -> Tensor:
    """Return the bucket of each position in each round, `[T, B, H, N]`; the first of equal ones."""
    B, H, _, _ = q_BHND.shape
    wide = torch.promote_types(q_BHND.dtype, torch.float32)
    positions = piece_size(B * H * rotation_HTDF.shape[-1])
    rounds = []
    with no_autocast(q_BHND):
        for rotation_HDF in rotation_HTDF.to(wide).unbind(1):
            buckets = []
            for q_BHPD in q_BHND.split(positions, dim=2):
                product_BHPF = q_BHPD.to(wide) @ rotation_HDF
                score_BHPC = torch.cat([product_BHPF, -product_BHPF], dim=-1)
                buckets.append(score_BHPC.argmax(-1))
            rounds.append(torch.cat(buckets, dim=2))
    return torch.stack(rounds)


def with_ascending_starts(start_M: Tensor, holes: Holes) -> tuple[Tensor, Holes]:
    """Return starts that never fall, as ranges need them, and holes for the keys that they add.

    Each start becomes the least of itself and all later ones. Example: the starts 0, 3, 2 become
    0, 2, 2, and the second query gets a hole at key 2.
    """
    least_M = start_M.flip(0).cummin(0).values.flip(0)
    number_M = torch.arange(len(start_M), device=start_M.device)
    more_holes = Holes(
        value_XM=torch.cat([holes.value_XM, number_M[None]]),
        low_XP=torch.cat([holes.low_XP, least_M[None]]),
        high_XP=torch.cat([holes.high_XP, start_M[None]]),
    )
    return least_M, more_holes


def sorted_places(bucket_XN: Tensor, buckets: int) -> Tensor:
    """Return the place of each position among those up to it, `[X, N]`.

    They are sorted by bucket, then by position. Example: the buckets 1, 0, 1 give the places 0, 0
    and 2.

    Args:
        buckets: C.
    """
    place_XN = torch.empty_like(bucket_XN)
    count_XC = torch.zeros(len(bucket_XN), buckets, dtype=torch.int64, device=bucket_XN.device)
    positions = piece_size(count_XC.numel())
    pairs = zip(place_XN.split(positions, 1), bucket_XN.split(positions, 1), strict=True)
    for place_XP, bucket_XP in pairs:
        is_member_XPC = F.one_hot(bucket_XP, buckets)
        count_XPC = count_XC[:, None] + is_member_XPC.cumsum(1)
        # A position comes last in its bucket.
        up_to_bucket_XPC = count_XPC.cumsum(2)
        place_XP.copy_(up_to_bucket_XPC.gather(2, bucket_XP[..., None])[..., 0] - 1)
        if count_XPC.shape[1]:
            count_XC = count_XPC[:, -1]
    return place_XN


class LshCache(ClusterCache):
    """The last members of all buckets of all rounds."""

    pattern: Lsh

    def seen(self, at_JS: Tensor, list_J: Tensor, position: int) -> Tensor:
        """Return which slots a query reads; it reads a key in the first round that has it."""
        slot_S = torch.arange(self.slots, device=list_J.device)
        newest_J1 = self.joined_L[list_J, None] - 1
        members_since_JS = (newest_J1 - slot_S) % self.slots
        is_in_reach_JS = members_since_JS < self.reach(list_J)[:, None]
        readable_JS = torch.where(is_in_reach_JS & (at_JS >= 0), at_JS, -1)
        read_XK = without_repeats(readable_JS.view(-1, self.pattern.rounds * self.slots))
        return mask_without_self(read_XK >= 0, read_XK == position).view_as(at_JS)

    def reach(self, list_J: Tensor) -> Tensor:
        """Return how many of a list's last members the query may read, its own key included."""
        pattern = self.pattern
        if pattern.variant == CAUSAL:
            return torch.full_like(list_J, pattern.window)
        # The query comes last in its bucket, among the positions so far.
        place_L = self.joined_L.view(-1, pattern.buckets).cumsum(-1).flatten() - 1
        return pattern.chunk + place_L[list_J] % pattern.chunk + 1


def without_repeats(position_XK: Tensor) -> Tensor:
    """Return the positions with -1 in place of all but the first of equal ones."""
    sorted_XK, slot_XK = position_XK.sort(dim=-1, stable=True)
    is_repeated = sorted_XK[:, 1:] == sorted_XK[:, :-1]
    sorted_XK[:, 1:].masked_fill_(is_repeated, -1)
    return torch.empty_like(sorted_XK).scatter_(-1, slot_XK, sorted_XK)
