"""Attention by locality-sensitive hashing: a query reads keys of the bucket that it hashes into
(Kitaev et al. 2020, Reformer, section 2).

Queries and keys are the same vectors; a key is its query scaled to norm 1. Each of T hash rounds
has a fixed random matrix Phi, `[D, F]`. It puts the query x, before it is rotated, into the bucket
argmax [x Phi, -x Phi] of C = 2 F. In each round a query may read some members of its bucket, up to
its position. It reads the keys of all rounds in one softmax, where a key that several rounds have
counts once (Reformer corrects for this by the logarithm of the count). It reads its own key only if
it reads no other.

The two variants differ in which members of a bucket a query may read:

    "causal"    the last W, its own key among them. Strictly causal; it is not in the paper.
    "reformer"  as published. The N positions are sorted by bucket, then by position, and cut into
                chunks of m = W // 2 (at least 1). A query reads the members of its bucket in its
                chunk and in the chunk before. It sees the future: later positions push earlier
                ones into other chunks. A stream, and a pass with `streaming`, sorts and cuts the
                positions up to each query.

With causal=False a query reads keys after its position, too: with "causal" W members of its bucket
around it, its own key among them (`clusters.around`), with "reformer" all members of its bucket in
its chunk and in the chunk before.

Example: one round, two buckets, six positions. Bucket a has the positions 0, 2, 3 and 5, bucket b
has 1 and 4. With "causal" and W = 3 the query at 5 may read 2, 3 and 5, so it reads 2 and 3. With
"reformer" and W = 4 the chunks are (0, 2), (3, 5) and (1, 4). The query at 5 reads 0, 2 and 3. The
query at 4 reads 1, and nothing of the chunk before, whose members are in another bucket.

Shapes: B sequences or streams, H heads, X = B * H, N positions, D head size, T hash rounds, C
buckets, F = C / 2 columns of a random matrix, O = H * T or B * H * T rounds of all heads, R = X * N
rows, M = R members of the buckets of one round, L lists of all rounds, J lists that a query of a
stream is a member of, S slots of a bucket, A = T * S slots that a query looks at, Q positions of a
piece.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.arguments import check_choice, check_positive, check_seed
from rtx.attention.clusters import ClusterCache, ClusterPattern, Joins, around
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.pattern import Cache, Prepared
from rtx.attention.pieces import piece_size, pieces
from rtx.attention.precision import no_autocast, wide_type, widened
from rtx.attention.reads import (
    Holes,
    MemberLists,
    QueriesKeys,
    RangeReads,
    Reads,
    mask_without_self,
    pack,
    starts_around,
)
from rtx.attention.typed_torch import tolist

CAUSAL = "causal"
REFORMER = "reformer"
VARIANTS = (CAUSAL, REFORMER)


def hashed(
    bucket_TN: Tensor,
    window: int,
    variant: str,
    streaming: bool,
    causal: bool,
) -> Tensor:
    """Return which keys each query reads, `[1, N, N]`, bool.

    Args:
        bucket_TN: the bucket of each position in each round.
        window: W.
        variant: one of `VARIANTS`.
        streaming: whether "reformer" sorts the positions up to each query alone.
        causal: whether a query reads keys up to its position alone.
    """
    rounds = tolist(bucket_TN)
    N = bucket_TN.shape[1]
    chunk = max(1, window // 2)
    mask_NN = torch.zeros(N, N, dtype=torch.bool, device=bucket_TN.device)
    for i in range(N):
        length = N
        if streaming:
            length = i + 1
        read: set[int] = set()
        for bucket_N in rounds:
            members = members_of_bucket(bucket_N, i, causal)
            if variant == REFORMER:
                sorted_N = bucket_N[:length]
                members = those_in_chunks(members, sorted_N, i, chunk)
            elif causal:
                members = members[-window:]
            else:
                members = around(members, i, window)
            read.update(members)
        others = read - {i}
        if not others:
            others = {i}
        mask_NN[i, sorted(others)] = True
    return mask_NN[None]


def members_of_bucket(bucket_N: list[int], i: int, causal: bool) -> list[int]:
    """Return the positions in the bucket of position i, ascending.

    Args:
        causal: whether they are those up to i alone.
    """
    stop = len(bucket_N)
    if causal:
        stop = i + 1
    members: list[int] = []
    for j in range(stop):
        if bucket_N[j] == bucket_N[i]:
            members.append(j)
    return members


def those_in_chunks(members: list[int], bucket_N: list[int], i: int, chunk: int) -> list[int]:
    """Return those members that are in the chunk of position i or the chunk before.

    Args:
        members: positions.
        chunk: m.
    """
    chunk_N = chunks_of_positions(bucket_N, chunk)
    first_chunk = chunk_N[i] - 1
    return [j for j in members if first_chunk <= chunk_N[j] <= chunk_N[i]]


def chunks_of_positions(bucket_N: list[int], chunk: int) -> list[int]:
    """Return the chunk of each position: positions are sorted by bucket, and cut into chunks.

    Args:
        chunk: m.
    """
    # Python's sort keeps the order of positions in equal buckets.
    positions = range(len(bucket_N))
    in_order = sorted(positions, key=lambda j: bucket_N[j])
    chunk_N = [0 for _ in bucket_N]
    for number, j in enumerate(in_order):
        chunk_N[j] = number // chunk
    return chunk_N


class Lsh(ClusterPattern):
    """H heads that read by hash buckets; see the module. Their memory is linear in N.

    Args:
        heads, size: H and D.
        window: W.
        rounds, buckets: T, and C (even).
        seed: decides, with the number of the head, the random matrices. They are a buffer that is
            not in checkpoints.
        variant: "causal" or "reformer", which sees the future.

    Raises:
        ValueError: an unknown variant, a count below 1 (heads below 0), an odd number of buckets,
            or a seed that torch does not take.
    """

    normalises = False
    may_be_bidirectional = True

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
        # A query may read keys in several rounds: one softmax spans them.
        merge = "lse"
        if rounds == 1:
            merge = "mean"
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
        self.strictly_causal = variant == CAUSAL and self.causal
        self.chunk = max(1, self.window // 2)
        self.slots = self.window
        """The number of a bucket's last members that a query may read at most, its own included."""
        if variant == REFORMER:
            self.slots = 2 * self.chunk
        shape_TDF = (rounds, size, buckets // 2)
        rotation_HTDF = random_rotations(heads, shape_TDF, seed)
        self.register_buffer("rotation_HTDF", rotation_HTDF, persistent=False)
        self.rotation_HTDF: Tensor

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        """Return the queries, and as keys the queries scaled to norm 1.

        1e-6 is added to the squared norm, so queries with norms far below 1e-3 get smaller norms.
        """
        wide_BHND = widened(q_BHND)
        square_BHND = wide_BHND.square()
        square_BHN1 = square_BHND.sum(-1, keepdim=True)
        norm_BHN1 = (square_BHN1 + 1e-6).sqrt()
        k_BHND = wide_BHND / norm_BHN1
        return Prepared(q_BHND, k_BHND)

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        q_ND = qk.q_BHND[0, head]
        rotation_TDF = self.rotation_HTDF[head]
        rounds: list[Tensor] = []
        for rotation_DF in rotation_TDF.to(q_ND.dtype):
            product_NF = q_ND @ rotation_DF
            score_NC = torch.cat([product_NF, -product_NF], dim=-1)
            rounds.append(score_NC.argmax(-1))
        bucket_TN = torch.stack(rounds)
        return hashed(bucket_TN, self.window, self.variant, streaming, self.causal)

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        """Return one part for each round, with holes for the pairs of earlier rounds."""
        bucket_TBHN = hash_positions(qk.q_BHND, self.rotation_HTDF)
        N = bucket_TBHN.shape[-1]
        rounds = [self.hash_round(bucket_BHN, streaming) for bucket_BHN in bucket_TBHN]
        member_TR = torch.stack([hash_round.member_R for hash_round in rounds])
        first_TR = torch.stack([hash_round.first_R() for hash_round in rounds])
        stop_TR = torch.stack([hash_round.stop_R() for hash_round in rounds])
        # A query that reads no other key in any round reads its own in the first round.
        others_TR = stop_TR - first_TR
        if not self.causal:
            others_TR = others_TR - 1
        reads_itself_R = (others_TR == 0).all(0)
        parts: list[Reads] = []
        for t, hash_round in enumerate(rounds):
            lists = hash_round.lists
            reads_itself_M = reads_itself_R[lists.row_M]
            if t > 0:
                reads_itself_M = torch.zeros_like(reads_itself_M)
            holes = holes_of_rounds(member_TR[:t], first_TR[:t], stop_TR[:t], lists)
            parts.append(self.part_of_round(hash_round, holes, reads_itself_M, N, streaming))
        return parts

    def part_of_round(
        self,
        hash_round: HashRound,
        holes: Holes,
        reads_itself_M: Tensor,
        length: int,
        streaming: bool,
    ) -> RangeReads:
        """Return which query reads which keys in a round.

        Args:
            holes: for the pairs of earlier rounds.
            reads_itself_M: whether each member reads its own key.
            length: N.
        """
        lists = hash_round.lists
        start_M = hash_round.first_M
        stop_M = hash_round.stop_M
        if self.causal:
            # The range ends before the own key, or with it.
            stop_M = stop_M + reads_itself_M.long()
        else:
            holes = with_own_keys(holes, lists.row_M, ~reads_itself_M)
        if streaming and self.variant == REFORMER:
            start_M, holes = with_ascending_starts(start_M, holes)
        part = RangeReads(lists, lists, start_M, stop_M, length)
        if len(holes.value_iM):
            part = part._replace(holes=holes)
        return part

    def hash_round(self, bucket_BHN: Tensor, streaming: bool) -> HashRound:
        """Return the buckets of one round, and what their members may read."""
        lists = pack(bucket_BHN, self.buckets, complete=True)
        number_M = torch.arange(len(lists.row_M), device=bucket_BHN.device)
        first_M, stop_M = self.bounds(bucket_BHN, lists, streaming)
        member_R = torch.empty_like(number_M)
        return HashRound(
            lists=lists,
            first_M=first_M,
            stop_M=stop_M,
            member_R=member_R.scatter(0, lists.row_M, number_M),
        )

    def bounds(
        self,
        bucket_BHN: Tensor,
        lists: MemberLists,
        streaming: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return `first_M` and `stop_M` of a round, see `HashRound`."""
        number_M = torch.arange(len(lists.row_M), device=bucket_BHN.device)
        list_M = lists.list_M()
        first_of_list_M = lists.first_L()[list_M]
        stop_of_list_M = first_of_list_M + lists.count_L[list_M]
        if self.variant == CAUSAL and not self.causal:
            start_M = starts_around(number_M, first_of_list_M, stop_of_list_M, self.window)
            return start_M, (start_M + self.window).minimum(stop_of_list_M)
        first_in_reach_M = self.first_in_reach(bucket_BHN, lists.row_M, streaming)
        first_M = first_of_list_M.maximum(first_in_reach_M)
        if self.causal:
            return first_M, number_M
        stop_of_chunk_M = self.stops_of_chunks(number_M, bucket_BHN.shape[2])
        return first_M, stop_of_chunk_M.minimum(stop_of_list_M)

    def stops_of_chunks(self, number_M: Tensor, length: int) -> Tensor:
        """Return the member after the last one of each member's chunk.

        Args:
            number_M: the numbers of the members.
            length: N.
        """
        place_M = number_M % max(1, length)
        first_of_head_M = number_M - place_M
        next_chunk_M = place_M // self.chunk + 1
        return first_of_head_M + next_chunk_M * self.chunk

    def first_in_reach(self, bucket_BHN: Tensor, row_M: Tensor, streaming: bool) -> Tensor:
        """Return the first member that each member could read if its bucket began early enough.

        Args:
            row_M: the rows of the members.
        """
        N = bucket_BHN.shape[2]
        number_M = torch.arange(len(row_M), device=row_M.device)
        if self.variant == CAUSAL:
            return number_M + 1 - self.window
        chunk = self.chunk
        if streaming:
            bucket_XN = bucket_BHN.flatten(0, 1)
            place_XN = sorted_places(bucket_XN, self.buckets)
            place_M = place_XN.flatten()[row_M]
            place_in_chunk_M = place_M % chunk
            return number_M - chunk - place_in_chunk_M
        # Members are numbered in the order that chunks are cut from, N for each head.
        head_M = number_M // max(1, N)
        first_of_head_M = head_M * N
        place_M = number_M - first_of_head_M
        chunk_before_M = place_M // chunk - 1
        return first_of_head_M + chunk_before_M * chunk

    def pairs_of_head(self, length: int) -> float:
        """Return the pairs of all rounds, as if no pair were read in two of them."""
        members_of_bucket = length / self.buckets
        pairs_of_bucket = self.pairs_of_cluster(members_of_bucket)
        return self.rounds * self.buckets * pairs_of_bucket

    def choice_operations(self, length: int, size: int) -> float:
        """Return the operations of one product for each bucket and its opposite together."""
        products = self.rounds * self.buckets * length
        return float(products * size)

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return LshCache(self, self.slots, relative)

    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        """Return the members of all buckets, those of a head round after round."""
        bucket_TBHN = hash_positions(qk.q_BHND, self.rotation_HTDF)
        T, B, H, N = bucket_TBHN.shape
        rounds_of_heads = H * T
        bucket_BHTN = bucket_TBHN.permute(1, 2, 0, 3)
        bucket_BON = bucket_BHTN.reshape(B, rounds_of_heads, N)
        lists = pack(bucket_BON, self.buckets, complete=True)
        # `pack` treated each round of a head as a head, so rows are numbered with H * T heads.
        rows_of_head = T * N
        head_M = lists.row_M // rows_of_head
        position_M = lists.row_M % N
        row_M = head_M * N + position_M
        return [MemberLists(row_M, lists.count_L)]

    def clusters_of_next(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> Joins:
        bucket_TBH1 = hash_positions(qk.q_BHND, self.rotation_HTDF)
        bucket_TBH = bucket_TBH1[..., 0]
        bucket_BHT = bucket_TBH.permute(1, 2, 0)
        joins_BHTC = F.one_hot(bucket_BHT, self.buckets)
        joins_BHL = joins_BHTC.bool().flatten(2)
        return Joins(query_BHC=joins_BHL, key_BHC=joins_BHL)


def random_rotations(heads: int, shape_TDF: tuple[int, int, int], seed: int) -> Tensor:
    """Return normal random matrices for the rounds of each head, `[H, T, D, F]`."""
    generator = torch.Generator().manual_seed(seed)
    rotation_HTDF = torch.empty(heads, *shape_TDF, device="cpu")
    # One draw for each head, so that it does not depend on the number of heads.
    for rotation_TDF in rotation_HTDF:
        rotation_TDF.normal_(generator=generator)
    return rotation_HTDF


class HashRound(NamedTuple):
    """The buckets of one round, as packed lists.

    Member m reads the members first_M[m] to stop_M[m] - 1 besides its own key. The range of a
    causal pattern ends before the own key; with causal=False it includes the own key.
    """

    lists: MemberLists
    first_M: Tensor
    """The number of the first member that each member reads."""
    stop_M: Tensor
    member_R: Tensor
    """The number of the member that belongs to each row."""

    def first_R(self) -> Tensor:
        """Return the first member that each row reads."""
        return self.first_M[self.member_R]

    def stop_R(self) -> Tensor:
        """Return the member before which each row stops reading."""
        return self.stop_M[self.member_R]


def holes_of_rounds(
    member_TR: Tensor,
    first_TR: Tensor,
    stop_TR: Tensor,
    lists: MemberLists,
) -> Holes:
    """Return holes for the pairs that earlier rounds have.

    Args:
        member_TR: the member that belongs to each row in each earlier round.
        first_TR, stop_TR: the first member that each row reads there, and the one after the last.
        lists: the lists of the present round.
    """
    return Holes(
        value_iM=member_TR[:, lists.row_M],
        low_iP=first_TR[:, lists.row_M],
        high_iP=stop_TR[:, lists.row_M],
    )


def with_own_keys(holes: Holes, row_M: Tensor, is_hole_M: Tensor) -> Holes:
    """Return holes that exclude the own keys of some members, too.

    Args:
        row_M: the rows of the members.
        is_hole_M: whose own keys are excluded.
    """
    stop_M = row_M + is_hole_M.long()
    return Holes(
        value_iM=torch.cat([holes.value_iM, row_M[None]]),
        low_iP=torch.cat([holes.low_iP, row_M[None]]),
        high_iP=torch.cat([holes.high_iP, stop_M[None]]),
    )


@torch.no_grad()
def hash_positions(q_BHND: Tensor, rotation_HTDF: Tensor) -> Tensor:
    """Return the bucket of each position in each round, `[T, B, H, N]`; the first of equal ones."""
    B, H, _, _ = q_BHND.shape
    columns = rotation_HTDF.shape[-1]
    positions = piece_size(B * H * columns)
    rotation_HTDF = rotation_HTDF.to(wide_type(q_BHND.dtype))
    rounds: list[Tensor] = []
    with no_autocast(q_BHND):
        for rotation_HDF in rotation_HTDF.unbind(1):
            buckets: list[Tensor] = []
            for q_BHQD in torch.split(q_BHND, positions, dim=2):
                product_BHQF = widened(q_BHQD) @ rotation_HDF
                buckets.append(buckets_of(product_BHQF))
            bucket_BHN = torch.cat(buckets, dim=2)
            rounds.append(bucket_BHN)
    return torch.stack(rounds)


def buckets_of(product_BHQF: Tensor) -> Tensor:
    """Return the buckets by the products with one random matrix, `[B, H, Q]`."""
    score_BHQC = torch.cat([product_BHQF, -product_BHQF], dim=-1)
    return score_BHQC.argmax(-1)


def with_ascending_starts(start_M: Tensor, holes: Holes) -> tuple[Tensor, Holes]:
    """Return starts that never fall, as ranges need them, and holes for the keys that they add.

    Each start becomes the least of itself and all later ones. Example: the starts 0, 3, 2 become
    0, 2, 2, and the second query gets a hole at key 2.
    """
    from_last_M = start_M.flip(0)
    least_from_last_M = from_last_M.cummin(0).values
    least_M = least_from_last_M.flip(0)
    number_M = torch.arange(len(start_M), device=start_M.device)
    longer = Holes(
        value_iM=torch.cat([holes.value_iM, number_M[None]]),
        low_iP=torch.cat([holes.low_iP, least_M[None]]),
        high_iP=torch.cat([holes.high_iP, start_M[None]]),
    )
    return least_M, longer


def sorted_places(bucket_XN: Tensor, buckets: int) -> Tensor:
    """Return the place of each position i in the positions 0 to i, sorted by bucket, `[X, N]`.

    Example: the buckets 1, 0, 1 give the places 0, 0 and 2.

    Args:
        buckets: C.
    """
    X, N = bucket_XN.shape
    count_XC = bucket_XN.new_zeros(X, buckets)
    places = [bucket_XN.new_zeros(X, 0)]
    for positions in pieces(N, X * buckets):
        bucket_XQ = bucket_XN[:, positions]
        is_member_XQC = F.one_hot(bucket_XQ, buckets)
        new_count_XQC = is_member_XQC.cumsum(1)
        count_XQC = count_XC[:, None] + new_count_XQC
        # A position comes last in its bucket.
        up_to_bucket_XQC = count_XQC.cumsum(2)
        bucket_XQ1 = bucket_XQ[..., None]
        count_XQ1 = up_to_bucket_XQC.gather(2, bucket_XQ1)
        place_XQ = count_XQ1[..., 0] - 1
        places.append(place_XQ)
        count_XC = count_XQC[:, -1]
    return torch.cat(places, dim=1)


class LshCache(ClusterCache):
    """The last members of all buckets of all rounds."""

    pattern: Lsh

    def slots_read(self, position_JS: Tensor, list_J: Tensor, position: int) -> Tensor:
        """Return which slots a query reads; it reads a key in the first round that has it."""
        slot_S = torch.arange(self.slots, device=list_J.device)
        newest_J = self.joined_L[list_J] - 1
        steps_JS = newest_J[:, None] - slot_S
        members_since_JS = steps_JS % self.slots
        reach_J = self.reach(list_J)
        is_in_reach_JS = members_since_JS < reach_J[:, None]
        # Empty slots have -1 already.
        readable_JS = position_JS.masked_fill(~is_in_reach_JS, -1)
        # The query is in one list of each round; the rounds of a head follow one another.
        slots_of_head = self.pattern.rounds * self.slots
        readable_XA = readable_JS.view(-1, slots_of_head)
        position_XA = without_repeats(readable_XA)
        is_self_XA = position_XA == position
        is_read_XA = mask_without_self(position_XA >= 0, is_self_XA)
        return is_read_XA.view_as(position_JS)

    def reach(self, list_J: Tensor) -> Tensor:
        """Return how many of a list's last members the query may read, its own key included."""
        pattern = self.pattern
        if pattern.variant == CAUSAL:
            return torch.full_like(list_J, pattern.window)
        # The query comes last in its bucket, among the positions so far.
        joined_OC = self.joined_L.view(-1, pattern.buckets)
        place_OC = joined_OC.cumsum(-1) - 1
        place_J = place_OC.flatten()[list_J]
        place_in_chunk_J = place_J % pattern.chunk
        return pattern.chunk + place_in_chunk_J + 1


def without_repeats(position_XA: Tensor) -> Tensor:
    """Return the positions, with -1 for all repeats of an earlier item."""
    sorted_XA, slot_XA = position_XA.sort(dim=-1, stable=True)
    later_XA = sorted_XA[:, 1:]
    is_repeated_XA = later_XA == sorted_XA[:, :-1]
    later_XA.masked_fill_(is_repeated_XA, -1)
    first_XA = torch.empty_like(sorted_XA)
    return first_XA.scatter_(-1, slot_XA, sorted_XA)
