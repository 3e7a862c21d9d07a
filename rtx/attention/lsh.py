"""Attention by locality-sensitive hashing (Reformer, Kitaev et al. 2020): a position reads what hashes as it does.

Queries stand for keys: a key is its query scaled to unit norm. In each round a fixed random rotation R puts a position
into the bucket argmax [xR, -xR] of its unturned query x. What the rounds let a position see is joined: one softmax over
the union, in which a pair that several rounds show counts once (the effect of Reformer's correction by the logarithm of
the count). A position reads itself only where it sees nothing else.

Shapes: B sequences, H heads, N positions, D head size, T hash rounds, C buckets, F = C / 2 directions, X = B * H,
S slots of a bucket, K = T * S.
"""

from typing import Any, Self

import torch
from torch import Tensor

from rtx.attention import oracle
from rtx.attention.arguments import check_choice, check_positive, check_seed
from rtx.attention.cache import Cache, ClusterCache, attend_step, mask_without_self
from rtx.attention.packed import Hidden, Packed, Part, Reads, pack
from rtx.attention.pattern import Inputs, Pattern, options
from rtx.attention.selection import MAX_SCORES
from rtx.attention.softmax import Relative
from rtx.config import Config, hash_buckets


@torch.no_grad()
def hash_positions(q_BHND: Tensor, rotation_HTDF: Tensor) -> Tensor:
    """Return the bucket of every position in every round, `[T, B, H, N]`; of equals the first direction wins."""
    B, H, _, _ = q_BHND.shape
    directions = rotation_HTDF.shape[-1]
    dtype = torch.promote_types(q_BHND.dtype, torch.float32)
    piece = max(1, MAX_SCORES // max(1, B * H * directions))
    rounds = []
    with torch.autocast(q_BHND.device.type, enabled=False):
        for rotation_HDF in rotation_HTDF.to(dtype).unbind(1):
            scores = (x_BHPD.to(dtype) @ rotation_HDF for x_BHPD in q_BHND.split(piece, dim=2))
            rounds.append(torch.cat([torch.cat([x, -x], dim=-1).argmax(-1) for x in scores], dim=2))
    return torch.stack(rounds)


class Lsh(Pattern):
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
            the borders of chunks. With `prefix` the chunks are cut for each position from the prefix that ends with it.
    """

    has_keys = False
    attend_self = False

    def __init__(
        self,
        heads: int,
        size: int,
        *,
        window: int,
        rounds: int,
        buckets: int,
        seed: int,
        variant: str = "causal",
        **given: Any,
    ) -> None:
        super().__init__(**given)
        check_choice("variant", variant, ("causal", "reformer"))
        check_positive("heads", heads, least=0)
        for name, count in {"size": size, "window": window, "rounds": rounds, "buckets": buckets}.items():
            check_positive(name, count)
        check_seed(seed)
        if buckets % 2:
            raise ValueError(f"buckets={buckets}: must be even, at least 2")
        self.heads, self.size, self.window, self.buckets = heads, size, window, buckets
        self.variant, self.strictly_causal = variant, variant == "causal"
        self.chunk = max(1, window // 2)
        self.slots = window if self.strictly_causal else 2 * self.chunk
        """How many members of a bucket a position may look back over, its own place included."""
        generator = torch.Generator().manual_seed(seed)
        rotation_HTDF = torch.empty(heads, rounds, size, buckets // 2, device="cpu")
        for rotation_TDF in rotation_HTDF:  # one draw for each head, however many there are
            rotation_TDF.normal_(generator=generator)
        self.register_buffer("rotation_HTDF", rotation_HTDF, persistent=False)
        self.rotation_HTDF: Tensor

    @classmethod
    def from_config(cls, config: Config, heads: int, layer: int) -> Self:
        model = config.model
        own = {"window": model.window, "rounds": model.hash_rounds, "buckets": hash_buckets(config)}
        drawn = {"seed": config.seed * 1_000 + layer}
        return cls(heads, model.hidden // model.heads, variant=model.lsh, **own, **drawn, **options(config))

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the queries, and as keys the same at unit norm; those far shorter than 1e-3 stay short."""
        wide_BHND = q_BHND.to(torch.promote_types(q_BHND.dtype, torch.float32))
        return q_BHND, wide_BHND / (wide_BHND.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    def reads(self, given: Inputs, prefix: bool) -> list[Part]:
        """See `Pattern.reads`: a list for each bucket of every round, which hides what an earlier round shows."""
        B, H, N, _ = given.q_BHND.shape
        bucket_TBHN = hash_positions(given.q_BHND, self.rotation_HTDF)
        if given.real_BN is not None:  # padding shares a bucket of its own, behind all others
            bucket_TBHN = bucket_TBHN.masked_fill(~given.real_BN[:, None], self.buckets)
        rule = "prefix" if prefix and self.variant == "reformer" else self.variant
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
            hidden = Hidden(number_TM, start_TR[:turn, lists.row_M], number_TM)
            if rule == "prefix":  # the first keys of a prefix's chunks may fall along a list, those of ranges may not
                low_M = start_M.flip(0).cummin(0).values.flip(0)
                more = own_M[None], low_M[None], start_M[None]
                hidden = Hidden(*map(torch.cat, zip(hidden, more, strict=True)))
            stop_M = own_M if turn else own_M + alone_R[lists.row_M]
            parts.append(Reads(lists, lists, low_M, stop_M, N, hidden if len(hidden.value_XM) else None))
        return parts

    def sorted_round(self, bucket_BHN: Tensor, rule: str) -> tuple[Packed, Tensor]:
        """Return the buckets' lists, and for every member the first that it sees; it sees those before itself."""
        N = bucket_BHN.shape[2]
        lists = pack(bucket_BHN, self.buckets + 1)
        number_M = torch.arange(len(lists.row_M), device=bucket_BHN.device)
        first_M = lists.first_L()[lists.list_M()]
        if rule == "causal":
            start_M = number_M + 1 - self.window
        elif rule == "reformer":  # the chunk before the own one; N positions of each sequence and head are sorted
            begin_M = number_M // max(1, N) * N
            start_M = begin_M + ((number_M - begin_M) // self.chunk - 1) * self.chunk
        else:
            place_M = sorted_places(bucket_BHN.flatten(0, 1), self.buckets + 1).flatten()[lists.row_M]
            start_M = number_M - self.chunk - place_M % self.chunk
        return lists, first_M.maximum(start_M)

    def rule(self, given: Inputs, head: int, prefix: bool) -> Tensor:
        score_TNF = torch.stack([given.q_BHND[0, head] @ r.to(given.q_BHND.dtype) for r in self.rotation_HTDF[head]])
        bucket_TN = torch.cat([score_TNF, -score_TNF], dim=-1).argmax(-1)
        return oracle.hashed(bucket_TN, self.window, "prefix" if prefix and not self.strictly_causal else self.variant)

    def start(self, relative: Relative | None = None) -> Cache:
        return LshCache(self, self.slots, relative)

    def lists_kept(self, given: Inputs, cache: Cache) -> Packed:
        """Return what a prompt leaves in a stream's cache: list (b, h, t, c) is bucket c of round t."""
        T, B, H, N = (bucket_TBHN := hash_positions(given.q_BHND, self.rotation_HTDF)).shape
        lists = pack(bucket_TBHN.permute(1, 2, 0, 3).reshape(B, H * T, N), self.buckets)
        return Packed(lists.row_M // (T * N) * N + lists.row_M % N, lists.count_L)


class LshCache(ClusterCache):
    """The last members of every bucket of every round."""

    pattern: Lsh

    def decode(self, given: Inputs, v_BH1D: Tensor, position: int) -> Tensor:
        pattern, dtype = self.pattern, v_BH1D.dtype
        bucket_BHT = hash_positions(given.q_BHND, pattern.rotation_HTDF)[..., 0].permute(1, 2, 0)
        B, H, T = bucket_BHT.shape
        round_T = torch.arange(T, device=bucket_BHT.device)
        joins_BHC = torch.zeros(B, H, T * pattern.buckets, dtype=torch.bool, device=bucket_BHT.device)
        joins_BHC.scatter_(2, round_T * pattern.buckets + bucket_BHT, True)
        self.put(given, v_BH1D, joins_BHC, None, position)
        assert self.key_LSD is not None
        reach_BHT = self.reach(bucket_BHT)
        list_J = joins_BHC.flatten().nonzero()[:, 0]
        at_BHTS = self.position_LS[list_J].view(B, H, T, self.slots)
        # How many members of the bucket have come since, its own place included.
        place_S = torch.arange(self.slots, device=list_J.device)
        back_BHTS = (self.joined_L[list_J].view(B, H, T, 1) - 1 - place_S) % self.slots
        seen_BHTS = (at_BHTS >= 0) & (back_BHTS < reach_BHT[..., None])
        value_BHK, order_BHK = torch.where(seen_BHTS, at_BHTS, -1).flatten(2).sort(dim=-1, stable=True)
        value_BHK[..., 1:].masked_fill_(value_BHK[..., 1:] == value_BHK[..., :-1], -1)  # once, whatever rounds show it
        at_BHK = torch.empty_like(value_BHK).scatter_(-1, order_BHK, value_BHK)
        seen_BHK = mask_without_self(at_BHK >= 0, at_BHK == position)
        return attend_step(
            given.turned_q_BHND.to(dtype),
            self.key_LSD[list_J].view(B, H, T * self.slots, self.key_LSD.shape[-1]),
            self.value_LSD[list_J].view(B, H, T * self.slots, self.value_LSD.shape[-1]),
            seen_BHK[:, :, None],
            (position - at_BHTS.flatten(2))[:, :, None],
            pattern.terms(given.q_BHND.shape[-1], self.relative),
        )

    def reach(self, bucket_BHT: Tensor) -> Tensor:
        """Return how many members of its bucket, its own place included, the newest position looks back over."""
        pattern = self.pattern
        if pattern.variant == "causal":
            return torch.full_like(bucket_BHT, pattern.window)
        # Its place among the positions so far, sorted by bucket.
        place_BHTC = self.joined_L.view(*bucket_BHT.shape, pattern.buckets).cumsum(-1) - 1
        return pattern.chunk + place_BHTC.gather(-1, bucket_BHT[..., None])[..., 0] % pattern.chunk + 1


def sorted_places(bucket_XN: Tensor, buckets: int) -> Tensor:
    """Return the place of each position among itself and those before it, sorted by bucket, then position."""
    places = torch.empty_like(bucket_XN)
    count_XC = torch.zeros(len(bucket_XN), buckets, dtype=torch.int64, device=bucket_XN.device)
    piece = max(1, MAX_SCORES // max(1, count_XC.numel()))
    for place_XP, bucket_XP in zip(places.split(piece, 1), bucket_XN.split(piece, 1), strict=True):
        upto_XPC = count_XC[:, None] + torch.nn.functional.one_hot(bucket_XP, buckets).cumsum(1)
        place_XP.copy_(upto_XPC.cumsum(2).gather(2, bucket_XP[..., None])[..., 0] - 1)
        count_XC = upto_XPC[:, -1] if upto_XPC.shape[1] else count_XC
    return places
