"""Attention by locality-sensitive hashing (Reformer, Kitaev et al. 2020): a position reads what hashes as it does.

Queries stand for keys: a key is its query scaled to unit norm. In each round a fixed random rotation R puts a position
into the bucket argmax [xR, -xR] of its unturned query x. What the rounds let a position see is joined: one softmax over
the union, in which a pair that several rounds show counts once (the effect of Reformer's correction by the logarithm of
the count). A position reads itself only where it sees nothing else.

Shapes: B sequences, H heads, N positions, D head size, T hash rounds, C buckets, F = C / 2 directions, X = B * H,
S slots of a bucket, K = T * S.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention import oracle
from rtx.attention.arguments import check_choice, check_positive, check_seed
from rtx.attention.autocast import no_autocast
from rtx.attention.cache import Cache, mask_without_self
from rtx.attention.clusters import ClusterCache, ClusterPattern
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.pattern import Prepared
from rtx.attention.pieces import MAX_SCORES
from rtx.attention.reads import Holes, MemberLists, QueriesKeys, RangeReads, Reads, pack


@torch.no_grad()
def hash_positions(q_BHND: Tensor, rotation_HTDF: Tensor) -> Tensor:
    """Return the bucket of every position in every round, `[T, B, H, N]`; of equals the first direction wins."""
    B, H, _, _ = q_BHND.shape
    directions = rotation_HTDF.shape[-1]
    dtype = torch.promote_types(q_BHND.dtype, torch.float32)
    piece = max(1, MAX_SCORES // max(1, B * H * directions))
    rounds = []
    with no_autocast(q_BHND):
        for rotation_HDF in rotation_HTDF.to(dtype).unbind(1):
            scores = (x_BHPD.to(dtype) @ rotation_HDF for x_BHPD in q_BHND.split(piece, dim=2))
            rounds.append(torch.cat([torch.cat([x, -x], dim=-1).argmax(-1) for x in scores], dim=2))
    return torch.stack(rounds)


class Lsh(ClusterPattern):
    """H hashing heads with shared queries and keys; memory linear in N.

    Args:
        heads, size: H and D.
        window: W, as each variant says.
        rounds, buckets: T, and C (even).
        seed: fixes the rotations, with the head's number; they are a buffer that is made anew, not saved.
        variant: "causal" (ours): in each round a position sees the last W members of its bucket, its own place among
            them; strictly causal. "reformer", as published: in each round the positions are sorted by bucket, then
            position, and cut into chunks of m = W // 2 (at least 1); a position sees the members of its bucket before
            it in its own chunk and the chunk before. **It sees the future**: later positions push earlier ones across
            the borders of chunks. With `streaming` the chunks of each position are cut from the prefix up to it.
    """

    def __init__(
        self, heads: int, size: int, *, rounds: int, buckets: int, seed: int, variant: str = "causal", **options: Any
    ) -> None:
        super().__init__(has_keys=False, attend_self=False, merge="mean" if rounds == 1 else "lse", **options)
        check_choice("variant", variant, ("causal", "reformer"))
        check_positive(0, heads=heads)
        check_positive(size=size, rounds=rounds, buckets=buckets)
        check_seed(seed)
        if buckets % 2:
            raise ValueError(f"buckets={buckets}: must be even, at least 2")
        self.heads, self.size, self.rounds, self.buckets = heads, size, rounds, buckets
        self.variant, self.strictly_causal = variant, variant == "causal"
        self.chunk = max(1, self.window // 2)
        self.slots = self.window if self.strictly_causal else 2 * self.chunk
        """How many members of a bucket a position may look back over, its own place included."""
        generator = torch.Generator().manual_seed(seed)
        rotation_HTDF = torch.empty(heads, rounds, size, buckets // 2, device="cpu")
        for rotation_TDF in rotation_HTDF:  # one draw for each head, however many there are
            rotation_TDF.normal_(generator=generator)
        self.register_buffer("rotation_HTDF", rotation_HTDF, persistent=False)
        self.rotation_HTDF: Tensor

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        """Return the queries, and as keys the same at unit norm; those far shorter than 1e-3 stay short."""
        wide_BHND = q_BHND.to(torch.promote_types(q_BHND.dtype, torch.float32))
        return Prepared(q_BHND, wide_BHND / (wide_BHND.square().sum(-1, keepdim=True) + 1e-6).sqrt())

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        """See `Pattern.reads`: a list for each bucket of every round, which hides what an earlier round shows."""
        B, H, N, _ = qk.q_BHND.shape
        bucket_TBHN = hash_positions(qk.q_BHND, self.rotation_HTDF)
        rule = "prefix" if streaming and self.variant == "reformer" else self.variant
        rounds = [self.sorted_round(bucket_BHN, rule) for bucket_BHN in bucket_TBHN]
        own_M = torch.arange(B * H * N, device=bucket_TBHN.device)
        number_TR = own_M.new_empty(len(rounds), len(own_M))  # where each row stands in the lists
        for number_R, (lists, _) in zip(number_TR, rounds, strict=True):
            number_R[lists.row_M] = own_M
        start_TR = torch.stack([start_M[number_R] for (_, start_M), number_R in zip(rounds, number_TR, strict=True)])
        alone_R, parts = (start_TR == number_TR).all(0), []
        for turn, (lists, start_M) in enumerate(rounds):
            # What earlier rounds show lies from a first member to the own place there.
            number_TM, low_M = number_TR[:turn, lists.row_M], start_M
            hidden = Holes(number_TM, start_TR[:turn, lists.row_M], number_TM)
            if rule == "prefix":  # the first keys of a prefix's chunks may fall along a list, those of ranges may not
                low_M = start_M.flip(0).cummin(0).values.flip(0)
                more = own_M[None], low_M[None], start_M[None]
                hidden = Holes(*map(torch.cat, zip(hidden, more, strict=True)))
            stop_M = own_M if turn else own_M + alone_R[lists.row_M]
            parts.append(RangeReads(lists, lists, low_M, stop_M, N, hidden if len(hidden.value_XM) else None))
        return parts

    def sorted_round(self, bucket_BHN: Tensor, rule: str) -> tuple[MemberLists, Tensor]:
        """Return the buckets' lists, and for every member the first that it sees; it sees those before itself."""
        N = bucket_BHN.shape[2]
        lists = pack(bucket_BHN, self.buckets, complete=True)
        number_M = torch.arange(len(lists.row_M), device=bucket_BHN.device)
        first_M = lists.first_L()[lists.list_M()]
        if rule == "causal":
            start_M = number_M + 1 - self.window
        elif rule == "reformer":  # the chunk before the own one; N positions of each sequence and head are sorted
            begin_M = number_M // max(1, N) * N
            start_M = begin_M + ((number_M - begin_M) // self.chunk - 1) * self.chunk
        else:
            place_M = sorted_places(bucket_BHN.flatten(0, 1), self.buckets).flatten()[lists.row_M]
            start_M = number_M - self.chunk - place_M % self.chunk
        return lists, first_M.maximum(start_M)

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        score_TNF = torch.stack([qk.q_BHND[0, head] @ r.to(qk.q_BHND.dtype) for r in self.rotation_HTDF[head]])
        bucket_TN = torch.cat([score_TNF, -score_TNF], dim=-1).argmax(-1)
        return oracle.hashed(
            bucket_TN, self.window, "prefix" if streaming and not self.strictly_causal else self.variant
        )

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return LshCache(self, self.slots, relative)

    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        """Return the members of every bucket: list (b, h, t, c) is bucket c of round t."""
        T, B, H, N = (bucket_TBHN := hash_positions(qk.q_BHND, self.rotation_HTDF)).shape
        lists = pack(bucket_TBHN.permute(1, 2, 0, 3).reshape(B, H * T, N), self.buckets, complete=True)
        return [MemberLists(lists.row_M // (T * N) * N + lists.row_M % N, lists.count_L)]

    def join(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> tuple[Tensor, Tensor, None]:
        bucket_BHT = hash_positions(qk.q_BHND, self.rotation_HTDF)[..., 0].permute(1, 2, 0)
        joins_BHC = F.one_hot(bucket_BHT, self.buckets).bool().flatten(2)
        return joins_BHC, joins_BHC, None


class LshCache(ClusterCache):
    """The last members of every bucket of every round."""

    pattern: Lsh

    def seen(self, at_JS: Tensor, list_J: Tensor, position: int) -> Tensor:
        """See `ClusterCache.seen`; what several rounds show is seen in the first of them."""
        pattern, reach_J = self.pattern, torch.full_like(list_J, self.pattern.window)
        if pattern.variant == "reformer":  # by the place among the positions so far, sorted by bucket
            place_L = self.joined_L.view(-1, pattern.buckets).cumsum(-1).flatten() - 1
            reach_J = pattern.chunk + place_L[list_J] % pattern.chunk + 1
        # How many members of the bucket have come since, its own place included.
        back_JS = (self.joined_L[list_J, None] - 1 - torch.arange(self.slots, device=list_J.device)) % self.slots
        shown_JS = torch.where((at_JS >= 0) & (back_JS < reach_J[:, None]), at_JS, -1)
        value_XK, order_XK = shown_JS.view(-1, pattern.rounds * self.slots).sort(dim=-1, stable=True)
        value_XK[:, 1:].masked_fill_(value_XK[:, 1:] == value_XK[:, :-1], -1)
        at_XK = torch.empty_like(value_XK).scatter_(-1, order_XK, value_XK)
        return mask_without_self(at_XK >= 0, at_XK == position).view_as(at_JS)


def sorted_places(bucket_XN: Tensor, buckets: int) -> Tensor:
    """Return the place of each position among itself and those before it, sorted by bucket, then position."""
    places = torch.empty_like(bucket_XN)
    count_XC = torch.zeros(len(bucket_XN), buckets, dtype=torch.int64, device=bucket_XN.device)
    piece = max(1, MAX_SCORES // max(1, count_XC.numel()))
    for place_XP, bucket_XP in zip(places.split(piece, 1), bucket_XN.split(piece, 1), strict=True):
        upto_XPC = count_XC[:, None] + F.one_hot(bucket_XP, buckets).cumsum(1)
        place_XP.copy_(upto_XPC.cumsum(2).gather(2, bucket_XP[..., None])[..., 0] - 1)
        count_XC = upto_XPC[:, -1] if upto_XPC.shape[1] else count_XC
    return places
