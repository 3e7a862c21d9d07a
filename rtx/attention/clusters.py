"""Attention inside clusters of any size: each member reads the last W members up to and including itself.

Memberships are packed lists of positions (`lists.py`), one for each sequence, head and cluster. A list is cut into
blocks: a head of up to W members, where every earlier member is visible and the mask is a triangle, and tails,
which read the W members before each query through a band. The work follows the counts; nothing is dropped but by the
window.

Shapes: B sequences, H heads, C clusters, N positions, D head size, L = B * H * C lists, M members of all lists
together, G blocks of one form, Q query and K key slots of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.lists import Members
from rtx.attention.shaw import Distances, Sorted
from rtx.attention.weights import attend, in_graph


class Block(NamedTuple):
    """Blocks of one form: the members (numbers into M) in their query and key slots."""

    query_GQ: Tensor
    key_GK: Tensor
    real_GQ: Tensor
    """False for query slots behind the end of a list; they repeat a member and their output is thrown away."""
    distance_QK: Tensor
    """Query slot minus key slot inside the list."""


def blocks(count_L: Tensor, window: int) -> Iterator[Block]:
    """Cut lists into blocks, at most four sizes of heads and one of tails."""
    first_L = count_L.cumsum(0) - count_L
    step = max(1, -(-window // 4))
    head_L = (-(-count_L.clamp(max=window) // step) * step).clamp(max=window)
    for size in sorted({min(step * quarter, window) for quarter in (1, 2, 3, 4)}):
        which_G = (head_L == size).nonzero()[:, 0]
        if len(which_G):
            yield make_block(first_L[which_G], count_L[which_G], torch.zeros_like(which_G), size, 0)
    tails_L = (-(-(count_L - window) // step)).clamp(min=0)
    which_G = torch.repeat_interleave(torch.arange(len(count_L), device=count_L.device), tails_L)
    if len(which_G):
        tail_G = torch.arange(len(which_G), device=count_L.device) - (tails_L.cumsum(0) - tails_L)[which_G]
        yield make_block(first_L[which_G], count_L[which_G], window + tail_G * step, step, window)


def make_block(first_G: Tensor, count_G: Tensor, start_G: Tensor, size: int, before: int) -> Block:
    """Return blocks whose queries are `size` slots from `start_G` on and whose keys begin `before` slots earlier."""
    slot_Q = torch.arange(size, device=first_G.device)
    slot_K = torch.arange(before + size, device=first_G.device)
    last_G1 = count_G[:, None] - 1
    query_GQ = start_G[:, None] + slot_Q
    key_GK = (start_G[:, None] - before + slot_K).minimum(last_G1)
    return Block(
        first_G[:, None] + query_GQ.minimum(last_G1),
        first_G[:, None] + key_GK,
        query_GQ <= last_G1,
        slot_Q[:, None] + before - slot_K[None],
    )


def visible(block: Block, window: int, attend_self: bool) -> Tensor | None:
    """Return the mask `[Q, K]` of a block, None where it is the plain triangle of a head that may read itself."""
    distance_QK = block.distance_QK
    attend_self = attend_self or window == 1
    is_head = distance_QK.shape[0] == distance_QK.shape[1]
    if is_head and attend_self:
        return None
    mask_QK = (distance_QK >= (0 if attend_self else 1)) & (distance_QK < window)
    if is_head:
        # The first member of a list has nothing else to read.
        mask_QK[0, 0] = True
    return mask_QK


def attend_members(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    members: Members,
    *,
    window: int,
    scale: float,
    attend_self: bool = True,
    dropout: float = 0.0,
    relative: Distances | None = None,
    slot_distance: bool = False,
) -> Tensor:
    """Return the mean of each position's outputs over its clusters, zero where it has none, `[B, H, N, D]`.

    `slot_distance`: Shaw's terms count the members between two positions, not the positions.
    """
    q_RD, k_RD, v_RD = (x.flatten(0, 2) for x in (q_BHND, k_BHND, v_BHND))
    forms = list(blocks(members.count_L, window))
    query_rows = [members.row_M[block.query_GQ] for block in forms]
    key_rows = [members.row_M[block.key_GK] for block in forms]
    total_RD, times_R = v_RD.new_zeros(v_RD.shape), members.times()
    if forms:
        queries, keys = take_queries_and_keys(q_RD, None if k_BHND is q_BHND else k_RD, query_rows, key_rows)
        for block, row_GQ, row_GK, q_GQD, k_GKD, v_GKD in zip(
            forms, query_rows, key_rows, queries, keys, take(v_RD, key_rows), strict=True
        ):
            mask_QK = visible(block, window, attend_self)
            distance_QK = None
            if relative is not None:
                mask_QK = block.distance_QK >= 0 if mask_QK is None else mask_QK
                # Rows of one list differ as its positions do, since a list never leaves its sequence and head.
                distance_QK = block.distance_QK if slot_distance else Sorted(row_GQ, row_GK)
            out_GQD = attend(
                q_GQD[:, None],
                k_GKD[:, None],
                v_GKD[:, None],
                scale,
                mask_QK=mask_QK,
                dropout=dropout,
                relative=relative,
                distance_QK=distance_QK,
            )[:, 0]
            add_share(total_RD, out_GQD, row_GQ, block.real_GQ, times_R)
    return in_graph(total_RD.view(v_BHND.shape), q_BHND, k_BHND, v_BHND, *(relative or ()))


def take(x_RD: Tensor, rows: list[Tensor]) -> list[Tensor]:
    """Return for each `[G, Q]` of row numbers the rows `[G, Q, D]`, by one gather, so that they share one gradient."""
    taken_SD = x_RD.index_select(0, torch.cat([row_GQ.flatten() for row_GQ in rows]))
    parts = taken_SD.split([row_GQ.numel() for row_GQ in rows])
    return [part_SD.view(*row_GQ.shape, x_RD.shape[-1]) for part_SD, row_GQ in zip(parts, rows, strict=True)]


def take_queries_and_keys(
    q_RD: Tensor, k_RD: Tensor | None, query_rows: list[Tensor], key_rows: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the queries and keys of every block; without `k_RD` the keys are the queries, which heads gather once."""
    if k_RD is not None:
        return take(q_RD, query_rows), take(k_RD, key_rows)
    is_head = [row_GQ.shape == row_GK.shape for row_GQ, row_GK in zip(query_rows, key_rows, strict=True)]
    taken = take(q_RD, query_rows + [row_GK for row_GK, head in zip(key_rows, is_head, strict=True) if not head])
    queries, others = taken[: len(query_rows)], iter(taken[len(query_rows) :])
    return queries, [q_GQD if head else next(others) for q_GQD, head in zip(queries, is_head, strict=True)]


def add_share(total_RD: Tensor, out_GQD: Tensor, row_GQ: Tensor, real_GQ: Tensor, times_R: Tensor) -> None:
    """Add the real slots' outputs, divided by the number of clusters of their position, onto the rows `[R, D]`."""
    share_GQ = real_GQ.to(out_GQD.dtype) / times_R[row_GQ]
    shares_SD = (out_GQD * share_GQ[..., None]).flatten(0, 1)
    # Under autocast the outputs are of another type than the values.
    total_RD.index_add_(0, row_GQ.flatten(), shares_SD.to(total_RD.dtype))
