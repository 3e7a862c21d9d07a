"""Hash rounds: which bucket a position falls into, and which pairs of positions a round then shows (see `lsh`).

Shapes: B sequences, H heads, N positions, D head size, T hash rounds, C buckets, F = C / 2 directions, R = B * H * N
rows, X = B * H, L = X * C lists, G blocks, Q query and K key slots of a block, P positions of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.arguments import check_positive, check_seed
from rtx.attention.clusters import blocks
from rtx.attention.lists import Members

MAX_SCORES = 1 << 24
"""Scores of hashes held at once."""
LONGEST = 1 << 40
"""More positions than a stream will have: codes of different buckets are at least this far apart, less the window."""


def rotations(heads: int, rounds: int, size: int, buckets: int, seed: int) -> Tensor:
    """Return the rotations `[H, T, D, F]` in float32, a function of the arguments alone.

    Raises:
        ValueError: an odd number of buckets, or none; heads, a size or a number of rounds below 1; a seed that torch's
            generators do not take.
    """
    check_positive("heads", heads)
    check_seed(seed)
    check_positive("rounds", rounds)
    check_positive("size", size)
    check_positive("buckets", buckets)
    if buckets % 2:
        raise ValueError(f"buckets={buckets}: must be even, at least 2")
    generator = torch.Generator().manual_seed(seed)
    # One draw for each head, so that it does not depend on how many heads there are.
    draws = [torch.randn(rounds, size, buckets // 2, generator=generator, device="cpu") for _ in range(heads)]
    return torch.stack(draws)


@torch.no_grad()
def hash_positions(q_BHND: Tensor, rotation_HTDF: Tensor) -> Tensor:
    """Return the bucket of every position in every round, `[T, B, H, N]`; of equals the first direction wins."""
    B, H, N, _ = q_BHND.shape
    T, directions = rotation_HTDF.shape[1], rotation_HTDF.shape[-1]
    bucket_TBHN = torch.empty(T, B, H, N, dtype=torch.int64, device=q_BHND.device)
    dtype = torch.promote_types(q_BHND.dtype, torch.float32)
    piece = max(1, MAX_SCORES // max(1, B * H * directions))
    with torch.autocast(q_BHND.device.type, enabled=False):
        for first in range(0, N, piece):
            x_BHPD = q_BHND[:, :, first : first + piece].to(dtype)
            for t in range(T):
                score_BHPF = x_BHPD @ rotation_HTDF[:, t].to(dtype)
                (high_BHP, up_BHP), (low_BHP, down_BHP) = score_BHPF.max(-1), score_BHPF.min(-1)
                found = torch.where(high_BHP >= -low_BHP, up_BHP, down_BHP + directions)
                bucket_TBHN[t, :, :, first : first + piece] = found
    return bucket_TBHN


def chunk_size(window: int) -> int:
    """Return m, the positions of a chunk: two chunks together are the window."""
    return max(1, window // 2)


class Round(NamedTuple):
    """What one round shows: i sees an earlier j of its sequence and head where 0 <= code_i - code_j < reach_i."""

    code_R: Tensor
    reach_R: Tensor
    first_R: Tensor
    """Whether the row is the first of its bucket, and so sees nothing in this round."""
    members: Members
    """The buckets' lists."""
    chunk: int | None
    """Rows of a chunk where keys are looked up by chunks, None where by lists."""


class Places(NamedTuple):
    """Where positions stand when each of X sequences is sorted by bucket, then position."""

    order_XN: Tensor
    """The positions in that order."""
    slot_XN: Tensor
    """The slot of each position in that order."""
    rank_XN: Tensor
    """How many earlier positions share its bucket."""
    count_XC: Tensor
    """Positions of each bucket."""


def sort_by_bucket(bucket_XN: Tensor, buckets: int) -> Places:
    """Return the places of positions."""
    X, N = bucket_XN.shape
    order_XN = bucket_XN.argsort(dim=-1, stable=True)
    list_XN = bucket_XN + torch.arange(X, device=bucket_XN.device)[:, None] * buckets
    count_XC = torch.bincount(list_XN.flatten(), minlength=X * buckets).view(X, buckets)
    slot_XN = torch.empty_like(order_XN).scatter_(1, order_XN, torch.arange(N, device=order_XN.device).expand(X, N))
    before_XC = count_XC.cumsum(-1) - count_XC
    return Places(order_XN, slot_XN, slot_XN - before_XC.gather(1, bucket_XN), count_XC)


@torch.no_grad()
def make_round(bucket_XN: Tensor, buckets: int, window: int, rule: str) -> Round:
    """Return one round of a rule: "causal", "reformer", or "prefix" (reformer, with chunks cut from each prefix)."""
    X, N = bucket_XN.shape
    order_XN, slot_XN, rank_XN, count_XC = sort_by_bucket(bucket_XN, buckets)
    row_XN = order_XN + torch.arange(X, device=bucket_XN.device)[:, None] * N
    half = chunk_size(window)
    place_XN = slot_XN // half if rule == "reformer" else rank_XN
    if rule == "prefix":
        reach_XN = half + (earlier_in_lower_buckets(bucket_XN, buckets) + rank_XN) % half + 1
    else:
        reach_XN = torch.full_like(rank_XN, 2 if rule == "reformer" else window)
    return Round(
        (bucket_XN * LONGEST + place_XN).flatten(),
        reach_XN.flatten(),
        (rank_XN == 0).flatten(),
        Members(row_XN.flatten(), count_XC.flatten(), N, X * N),
        half if rule == "reformer" else None,
    )


def earlier_in_lower_buckets(bucket_XN: Tensor, buckets: int) -> Tensor:
    """Return for each position how many before it lie in buckets of lower number."""
    total_XC = torch.zeros(len(bucket_XN), buckets, dtype=torch.int64, device=bucket_XN.device)
    pieces = []
    for bucket_XP in bucket_XN.split(max(1, MAX_SCORES // max(1, total_XC.numel())), dim=1):
        one_XPC = F.one_hot(bucket_XP, buckets)
        before_XPC = total_XC[:, None] + one_XPC.cumsum(1) - one_XPC
        pieces.append((before_XPC.cumsum(-1) - before_XPC).gather(-1, bucket_XP[..., None])[..., 0])
        total_XC += one_XPC.sum(1)
    return torch.cat(pieces, dim=1) if pieces else bucket_XN


class Rows(NamedTuple):
    """Blocks of one form: the rows in their query and key slots; slots that are not real repeat another's row."""

    query_GQ: Tensor
    key_GK: Tensor
    real_GQ: Tensor


def candidates(one: Round) -> Iterator[Rows]:
    """Yield blocks that hold every pair that the round shows, each key that any of their queries sees once."""
    row_M = one.members.row_M
    if one.chunk is None:
        for block in blocks(one.members.count_L, int(one.reach_R.max())):
            yield Rows(row_M[block.query_GQ], row_M[block.key_GK], block.real_GQ)
        return
    N = one.members.length
    chunk = min(one.chunk, N)
    slot_S = torch.arange(-(-N // chunk) * chunk, device=row_M.device)
    # What fills the last chunk up is the last row, which nobody but itself can see.
    row_XGQ = row_M.view(-1, N)[:, slot_S.clamp(max=N - 1)].unflatten(1, (-1, chunk))
    real_XGQ = (slot_S < N).view(1, -1, chunk).expand(row_XGQ.shape)
    yield Rows(row_XGQ[:, 0], row_XGQ[:, 0], real_XGQ[:, 0])
    if row_XGQ.shape[1] > 1:
        key_XGK = torch.cat([row_XGQ[:, :-1], row_XGQ[:, 1:]], dim=2)
        yield Rows(row_XGQ[:, 1:].flatten(0, 1), key_XGK.flatten(0, 1), real_XGQ[:, 1:].flatten(0, 1))


def shows(one: Round, query_GQ: Tensor, key_GK: Tensor) -> Tensor:
    """Return `[G, Q, K]`: which earlier keys the round shows."""
    code_GQ, code_GK = one.code_R[query_GQ], one.code_R[key_GK]
    above_GQ = code_GQ - one.reach_R[query_GQ]
    return (code_GK[:, None] <= code_GQ[:, :, None]) & (code_GK[:, None] > above_GQ[:, :, None])


def new_pairs(rounds: list[Round], t: int, query_GQ: Tensor, key_GK: Tensor) -> Tensor:
    """Return `[G, Q, K]`: what round t shows and no round before it, and (in the first) a lonely position itself."""
    seen_GQK = (key_GK[:, None] < query_GQ[:, :, None]) & shows(rounds[t], query_GQ, key_GK)
    for earlier in rounds[:t]:
        seen_GQK &= ~shows(earlier, query_GQ, key_GK)
    if t == 0:
        lonely_GQ = torch.stack([one.first_R[query_GQ] | (one.reach_R[query_GQ] == 1) for one in rounds]).all(0)
        seen_GQK |= lonely_GQ[:, :, None] & (key_GK[:, None] == query_GQ[:, :, None])
    return seen_GQK
