"""Attention by locality-sensitive hashing (Reformer, Kitaev et al. 2020): a position reads what hashes as it does.

Queries stand for keys: a key is its query scaled to unit norm. In each round a fixed random rotation R puts a position
into the bucket argmax [xR, -xR] of its unturned query x. What the rounds let a position see is joined: one softmax over
the union, in which a pair that several rounds show counts once (the effect of Reformer's correction by the logarithm of
the count). A position reads itself only where it sees nothing else.

Shapes: B sequences, H heads, N positions, D head size, T hash rounds, C buckets, F = C / 2 directions, R = B * H * N
rows, G blocks, Q query and K key slots of a block, S slots of all blocks, W slots of a bucket.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rtx.attention import by_reference
from rtx.attention.arguments import (
    check_attention,
    check_finite_values,
    check_numbers,
    check_positive,
    check_rotations,
)
from rtx.attention.backends import Call, check_backend, choose
from rtx.attention.clusters import attend_members, take
from rtx.attention.hashing import (
    LONGEST,
    Round,
    candidates,
    chunk_size,
    hash_positions,
    make_round,
    new_pairs,
    rotations,
    sort_by_bucket,
)
from rtx.attention.heads import Heads, HeadState, Rotate, RotateFrom, turn, turn_step
from rtx.attention.weights import Distances, attend, in_graph, logit_scale, without_padding

MAX_SCORES = 1 << 21
"""Attention scores held at once where several rounds are joined; about what a CPU's cache holds."""


def lsh(
    q_BHND: Tensor,
    v_BHND: Tensor,
    rotation_HTDF: Tensor,
    *,
    window: int,
    variant: str = "causal",
    scale: float | None = None,
    dropout: float = 0.0,
    relative: Distances | None = None,
    rotate: Rotate | None = None,
    streaming: bool = False,
    mask_BN: Tensor | None = None,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """Return LSH attention with shared queries and keys, `[B, H, N, D]`; memory linear in N.

    Args:
        q_BHND: queries; keys are the same vectors scaled to unit norm.
        rotation_HTDF: T rotations for each head, see `rotations`.
        window: W, as each variant says.
        variant: "causal" (ours): in each round a position sees the last W members of its bucket, its own place among
            them; strictly causal. "reformer", as published: in each round the positions are sorted by bucket, then
            position, and cut into chunks of m = W // 2 (at least 1); a position sees the members of its bucket before
            it in its own chunk and the chunk before, less than 2 m. **It sees the future**: later positions push
            earlier ones across the borders of chunks, so that they change which past keys share a chunk with a query.
        scale: multiplies the logits (default 1 / sqrt(D); the released code takes 1 with keys of unit norm).
        dropout: on attention weights.
        relative: Shaw's terms by true distance.
        rotate: applied to queries and keys after hashing (rotary positions).
        streaming: with "reformer", cut the chunks for each position from the prefix that ends with it.
        mask_BN: true at real positions; padding is not read, and its own output is zero.
        backend: "auto", "reference" or "torch", see `rtx.attention.backends`; the same result from each.
        check_finite: refuse inputs that hold NaN or infinity (padding may). Without it such a value may spread inside
            one tile of a fast path; by backend="reference" it never reaches an earlier position ("causal").

    Raises:
        ValueError: an unknown variant, a window below 1, or rotations, values or a mask that do not fit the queries.
    """
    given = {"mask_BN": mask_BN, "scale": scale, "dropout": dropout, "relative": relative}
    check_attention(q_BHND, None, v_BHND, **given, finite=check_finite)
    check_variant(variant)
    check_positive("window", window)
    check_rotations(rotation_HTDF, q_BHND)
    if check_finite:
        check_finite_values(rotation_HTDF=rotation_HTDF)
    rule = "prefix" if streaming and variant == "reformer" else variant
    if choose(backend, Call("lsh", q_BHND, None, v_BHND, dropout, relative)) == "reference":
        options = {"scale": scale, "relative": relative, "mask_BN": mask_BN, "window": window, "rotate": rotate}
        return by_reference.lsh(q_BHND, v_BHND, rotation_HTDF, variant=rule, **options)
    q_BHND, v_BHND = without_padding(q_BHND, mask_BN), without_padding(v_BHND, mask_BN)
    bucket_TBHN = hash_positions(q_BHND, rotation_HTDF)
    buckets = 2 * rotation_HTDF.shape[-1]
    if mask_BN is not None:
        # Padding shares a bucket of its own, behind all others.
        bucket_TBHN = bucket_TBHN.masked_fill(~mask_BN[:, None], buckets)
    q_BHND, k_BHND = turn(q_BHND, rotate), turn(unit(q_BHND), rotate)
    q_BHND, k_BHND = q_BHND.to(v_BHND.dtype), k_BHND.to(v_BHND.dtype)
    rounds = [make_round(bucket_BHN.flatten(0, 1), buckets + 1, window, rule) for bucket_BHN in bucket_TBHN]
    options = {"scale": logit_scale(scale, q_BHND.shape[-1]), "dropout": dropout, "relative": relative}
    if not v_BHND.numel():
        out_BHND = in_graph(torch.zeros_like(v_BHND), q_BHND, v_BHND, *(relative or ()))
    elif rule == "causal" and len(rounds) == 1:
        members = rounds[0].members
        out_BHND = attend_members(q_BHND, k_BHND, v_BHND, members, window=window, attend_self=False, **options)
    else:
        q_RD, k_RD, v_RD = (x.reshape(-1, x.shape[-1]) for x in (q_BHND, k_BHND, v_BHND))
        out_BHND = attend_rounds(q_RD, k_RD, v_RD, rounds, **options).view(v_BHND.shape)
    return without_padding(out_BHND, mask_BN)


def check_variant(variant: str) -> None:
    """Refuse an unknown variant."""
    if variant not in ("causal", "reformer"):
        raise ValueError(f"variant={variant!r}: must be one of causal, reformer")


def unit(x_BHND: Tensor) -> Tensor:
    """Return vectors scaled to unit norm, at least in float32; those far shorter than 1e-3 stay short."""
    wide_BHND = x_BHND.to(torch.promote_types(x_BHND.dtype, torch.float32))
    return wide_BHND / (wide_BHND.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def attend_rounds(
    q_RD: Tensor,
    k_RD: Tensor,
    v_RD: Tensor,
    rounds: list[Round],
    *,
    scale: float,
    dropout: float,
    relative: Distances | None,
) -> Tensor:
    """Return softmax attention over the union of what the rounds show, `[R, D]`.

    Each round gives what only it shows; outputs of rounds are joined by their logarithms of summed exponentials. In
    training the blocks' scores are computed again in the backward pass, so that memory stays linear in N.
    """
    outs, sums = [], []
    for t, one in enumerate(rounds):
        forms = list(candidates(one))
        queries, keys = [form.query_GQ for form in forms], [form.key_GK for form in forms]
        parts: list[tuple[Tensor, Tensor]] = []
        for form, q_GQD, k_GKD, v_GKD in zip(
            forms, take(q_RD, queries), take(k_RD, keys), take(v_RD, keys), strict=True
        ):
            piece = max(1, MAX_SCORES // (form.query_GQ.shape[1] * form.key_GK.shape[1]))
            pieces = (x.split(piece) for x in (q_GQD, k_GKD, v_GKD, form.query_GQ, form.key_GK))
            for q, k, v, query, key in zip(*pieces, strict=True):
                parts.append(
                    checkpoint(read, q, k, v, rounds, t, query, key, scale, dropout, relative, use_reentrant=False)
                )
        real_S = torch.cat([form.real_GQ.flatten() for form in forms])
        row_S = torch.cat([row_GQ.flatten() for row_GQ in queries])[real_S]
        out_SD = torch.cat([out_GQD.flatten(0, 1) for out_GQD, _ in parts])[real_S]
        sum_S = torch.cat([sum_GQ.flatten() for _, sum_GQ in parts])[real_S]
        outs.append(torch.zeros_like(v_RD).index_copy(0, row_S, out_SD))
        sums.append(sum_S.new_zeros(len(v_RD)).index_copy(0, row_S, sum_S))
    share_TR1 = torch.stack(sums).softmax(0).to(v_RD.dtype)[..., None]
    return (share_TR1 * torch.stack(outs)).sum(0)


def read(
    q_GQD: Tensor,
    k_GKD: Tensor,
    v_GKD: Tensor,
    rounds: list[Round],
    t: int,
    query_GQ: Tensor,
    key_GK: Tensor,
    scale: float,
    dropout: float,
    relative: Distances | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[G, Q, D]` of blocks of round t, and the logarithms of their summed exponentials `[G, Q]`.

    A row that sees nothing new gets a sum that is nothing beside any other.
    """
    mask_GQK = new_pairs(rounds, t, query_GQ, key_GK)
    # Rows of one block differ as its positions do, since a block never leaves its sequence and head.
    distance_GQK = query_GQ[:, :, None] - key_GK[:, None]
    if len(rounds) == 1:
        shared = {"mask_QK": mask_GQK[:, None], "dropout": dropout, "relative": relative}
        q, k, v = q_GQD[:, None], k_GKD[:, None], v_GKD[:, None]
        out_GQD = attend(q, k, v, scale, distance_QK=distance_GQK[:, None], **shared)[:, 0]
        return out_GQD, out_GQD.new_zeros(out_GQD.shape[:-1])
    logits_GQK = q_GQD @ k_GKD.transpose(-1, -2)
    if relative is not None:
        row_GQK = distance_GQK.clamp(0, len(relative.keys_MD) - 1)
        logits_GQK = logits_GQK + (q_GQD @ relative.keys_MD.to(q_GQD.dtype).T).gather(-1, row_GQK)
    logits_GQK = logits_GQK.to(torch.promote_types(logits_GQK.dtype, torch.float32)) * scale
    lowest = torch.finfo(logits_GQK.dtype).min / 2
    hidden_GQK = ~mask_GQK
    top_GQ1 = logits_GQK.detach().masked_fill(hidden_GQK, lowest).amax(-1, keepdim=True)
    # Hidden keys are taken out behind the exponential: that of what underflows costs many times any other.
    terms_GQK = (logits_GQK - top_GQ1).clamp(max=0).exp().masked_fill(hidden_GQK, 0)
    # The largest term is 1, so that the sum of a row with keys is at least that.
    sum_GQ1 = terms_GQK.sum(-1, keepdim=True).clamp(min=1)
    weights_GQK = F.dropout(terms_GQK.to(v_GKD.dtype), dropout, training=dropout > 0)
    out_GQD = weights_GQK @ v_GKD
    if relative is not None:
        spread_GQM = weights_GQK.new_zeros(*weights_GQK.shape[:-1], len(relative.values_MD))
        out_GQD = out_GQD + spread_GQM.scatter_add(-1, row_GQK, weights_GQK) @ relative.values_MD.to(v_GKD.dtype)
    return out_GQD / sum_GQ1.to(out_GQD.dtype), (top_GQ1 + sum_GQ1.log())[..., 0]


class LshHeads(Heads):
    """Heads of `lsh`; `window`, `variant`, `scale`, `dropout` (in training) and `backend` as there.

    Args:
        heads, size: H and D.
        rounds, buckets: T, and C (even).
        seed: a number made of the run's seed and the layer. With the head's number it fixes the rotations for the
            whole run: they are a buffer that is made anew from the seed, not saved with the weights.
    """

    rotation_HTDF: Tensor

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
        scale: float | None = None,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_variant(variant)
        check_positive("window", window)
        check_numbers(scale, dropout)
        check_backend(backend)
        self.backend = backend
        self.window, self.variant, self.scale, self.dropout = window, variant, scale, dropout
        self.register_buffer("rotation_HTDF", rotations(heads, rounds, size, buckets, seed), persistent=False)

    def forward(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor | None,
        v_BHND: Tensor,
        *,
        rotate: Rotate | None = None,
        relative: Distances | None = None,
        streaming: bool = False,
        mask_BN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Heads.forward`; the loss is zero."""
        if k_BHND is not None:
            raise ValueError("k_BHND is given: must be None, as the queries of hashing heads stand for keys")
        out_BHND = lsh(
            q_BHND,
            v_BHND,
            self.rotation_HTDF,
            window=self.window,
            variant=self.variant,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            relative=relative,
            rotate=rotate,
            streaming=streaming,
            mask_BN=mask_BN,
            backend=self.backend,
        )
        return out_BHND, q_BHND.new_zeros(())

    def start(self, relative: Distances | None = None) -> LshState:
        """See `Heads.start`."""
        return LshState(self, relative)


class LshState(HeadState):
    """What streaming heads keep: for every round and bucket its count and its last members, at most the window.

    With variant="reformer" each position reads what the chunks of the prefix that ends with it give, as `streaming`
    does in `lsh`; earlier outputs are never revised.
    """

    def __init__(self, heads: LshHeads, relative: Distances | None = None) -> None:
        self.heads, self.relative = heads, relative
        self.half = chunk_size(heads.window) if heads.variant == "reformer" else None
        self.slots = heads.window if self.half is None else 2 * self.half
        self.keys_BHTCWD: Tensor | None = None

    def allocate(self, k_BHD: Tensor, v_BHD: Tensor) -> None:
        """Make room for all streams; empty slots have position -1."""
        (B, H, D), (_, T, _, directions) = k_BHD.shape, self.heads.rotation_HTDF.shape
        shape, device = (B, H, T, 2 * directions, self.slots), k_BHD.device
        self.keys_BHTCWD, self.values_BHTCWD = k_BHD.new_zeros(*shape, D), v_BHD.new_zeros(*shape, D)
        self.position_BHTCW = torch.full(shape, -1, device=device)
        self.code_BHTCWT = torch.zeros(*shape, T, dtype=torch.int64, device=device)
        self.count_BHTC = torch.zeros(shape[:-1], dtype=torch.int64, device=device)

    def fill(self, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor, rotate: RotateFrom | None = None) -> None:
        """See `HeadState`."""
        B, H, N, _ = q_BHND.shape
        if not B * H * N:
            return
        bucket_BHTN = hash_positions(q_BHND, self.heads.rotation_HTDF).permute(1, 2, 0, 3)
        key_BHND = turn(unit(q_BHND), rotate).to(v_BHND.dtype)
        self.allocate(key_BHND[:, :, 0], v_BHND[:, :, 0])
        assert self.keys_BHTCWD is not None
        places = sort_by_bucket(bucket_BHTN.flatten(0, 2), self.count_BHTC.shape[-1])
        self.count_BHTC = places.count_XC.view(self.count_BHTC.shape)
        rank_BHTN = places.rank_XN.view(bucket_BHTN.shape)
        kept_BHTN = rank_BHTN >= self.count_BHTC.gather(-1, bucket_BHTN) - self.slots
        b, h, t, n = kept_BHTN.nonzero(as_tuple=True)
        here = b, h, t, bucket_BHTN[kept_BHTN], rank_BHTN[kept_BHTN] % self.slots
        self.keys_BHTCWD[here], self.values_BHTCWD[here] = key_BHND[b, h, n], v_BHND[b, h, n]
        self.position_BHTCW[here] = n
        self.code_BHTCWT[here] = (bucket_BHTN * LONGEST + rank_BHTN)[b, h, :, n]

    def step(
        self, q_BHD: Tensor, k_BHD: Tensor | None, v_BHD: Tensor, position: int, rotate: Rotate | None = None
    ) -> Tensor:
        """Take in the next position of each stream and return its output `[B, H, D]`."""
        bucket_BHT = hash_positions(q_BHD[:, :, None], self.heads.rotation_HTDF)[..., 0].permute(1, 2, 0)
        k_BHD = turn_step(unit(q_BHD), rotate).to(v_BHD.dtype)
        q_BHD = turn_step(q_BHD, rotate).to(v_BHD.dtype)
        if self.keys_BHTCWD is None:
            self.allocate(k_BHD, v_BHD)
        assert self.keys_BHTCWD is not None
        rank_BHT = self.count_BHTC.gather(-1, bucket_BHT[..., None])[..., 0]
        code_BHT, reach_BHT = bucket_BHT * LONGEST + rank_BHT, self.reach(bucket_BHT, rank_BHT)
        b, h, t = torch.meshgrid(*(torch.arange(n, device=q_BHD.device) for n in bucket_BHT.shape), indexing="ij")
        here, slot_BHT = (b, h, t, bucket_BHT), rank_BHT % self.slots
        self.keys_BHTCWD[(*here, slot_BHT)] = k_BHD[:, :, None]
        self.values_BHTCWD[(*here, slot_BHT)] = v_BHD[:, :, None]
        self.position_BHTCW[(*here, slot_BHT)] = position
        self.code_BHTCWT[(*here, slot_BHT)] = code_BHT[:, :, None]
        self.count_BHTC[here] += 1
        position_BHTW = self.position_BHTCW[here]
        mask_BHTW = seen_slots(code_BHT, reach_BHT, self.code_BHTCWT[here], position_BHTW, position)
        return attend(
            q_BHD[:, :, None],
            self.keys_BHTCWD[here].flatten(2, 3),
            self.values_BHTCWD[here].flatten(2, 3),
            logit_scale(self.heads.scale, q_BHD.shape[-1]),
            mask_QK=mask_BHTW.flatten(2)[:, :, None],
            relative=self.relative,
            distance_QK=(position - position_BHTW).flatten(2)[:, :, None],
        )[:, :, 0]

    def reach(self, bucket_BHT: Tensor, rank_BHT: Tensor) -> Tensor:
        """Return how many members of its bucket, its own place included, the position looks back over."""
        if self.half is None:
            return torch.full_like(rank_BHT, self.heads.window)
        lower_BHTC = self.count_BHTC.cumsum(-1) - self.count_BHTC
        place_BHT = lower_BHTC.gather(-1, bucket_BHT[..., None])[..., 0] + rank_BHT
        return self.half + place_BHT % self.half + 1


def seen_slots(code_BHT: Tensor, reach_BHT: Tensor, code_BHTWT: Tensor, position_BHTW: Tensor, position: int) -> Tensor:
    """Return which slots of its buckets a position reads, each earlier position once; itself where it is alone."""
    ahead_BHTWT = code_BHT[:, :, None, None] - code_BHTWT
    shown_BHTWT = (ahead_BHTWT >= 0) & (ahead_BHTWT < reach_BHT[:, :, None, None])
    T = code_BHT.shape[-1]
    round_T = torch.arange(T, device=code_BHT.device)
    own_T1T, before_T1T = (round_T[:, None] == round_T)[:, None], (round_T[:, None] > round_T)[:, None]
    new_BHTW = (shown_BHTWT & own_T1T).any(-1) & ~(shown_BHTWT & before_T1T).any(-1)
    new_BHTW &= (position_BHTW >= 0) & (position_BHTW < position)
    itself_BHTW = position_BHTW == position
    itself_BHTW[:, :, 1:] = False
    return new_BHTW | (itself_BHTW & ~new_BHTW.any(-1, keepdim=True).any(-2, keepdim=True))
