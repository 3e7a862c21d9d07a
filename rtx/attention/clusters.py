"""Attention inside clusters of any size: each member reads the last W members up to and including itself.

A membership mask is turned into packed lists of positions, one list for each sequence, head and cluster. A list is cut
into blocks: a head of up to W members, where every earlier member is visible and the mask is a triangle, and tails,
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

from rtx.attention.weights import Distances, attend


class Members(NamedTuple):
    """All lists, packed one behind the other, each in order of position."""

    row_M: Tensor
    """Which row of the flattened `[B * H * N]` positions each member is."""
    count_L: Tensor
    """Members of each list."""
    length: int
    """N."""


class Block(NamedTuple):
    """Blocks of one form: the members (numbers into M) in their query and key slots."""

    query_GQ: Tensor
    key_GK: Tensor
    real_GQ: Tensor
    """False for query slots behind the end of a list; they repeat a member and their output is thrown away."""
    distance_QK: Tensor
    """Query slot minus key slot inside the list."""


def pack(member_BHCN: Tensor) -> Members:
    """Return the packed lists of a membership mask."""
    C, N = member_BHCN.shape[-2:]
    list_M, position_M = member_BHCN.flatten(0, 2).nonzero(as_tuple=True)
    return Members(list_M // C * N + position_M, member_BHCN.sum(-1).flatten(), N)


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
) -> Tensor:
    """Return the mean of each position's outputs over its clusters, zero where it has none, `[B, H, N, D]`."""
    q_RD, k_RD, v_RD = (x.reshape(-1, x.shape[-1]) for x in (q_BHND, k_BHND, v_BHND))
    outputs, rows = [], []
    for block in blocks(members.count_L, window):
        row_GQ, row_GK = members.row_M[block.query_GQ], members.row_M[block.key_GK]
        mask_QK = visible(block, window, attend_self)
        distance_QK = None
        if relative is not None:
            # Rows of one list differ as its positions do, since a list never leaves its sequence and head.
            distance_QK = (row_GQ[:, :, None] - row_GK[:, None])[:, None]
            mask_QK = block.distance_QK >= 0 if mask_QK is None else mask_QK
        q_GQD = take(q_RD, row_GQ)
        # Shared queries and keys: a head block gathers them once.
        k_GKD = q_GQD if k_BHND is q_BHND and row_GQ.shape == row_GK.shape else take(k_RD, row_GK)
        out_GQD = attend(
            q_GQD[:, None],
            k_GKD[:, None],
            take(v_RD, row_GK)[:, None],
            scale,
            mask_QK=mask_QK,
            dropout=dropout,
            relative=relative,
            distance_QK=distance_QK,
        )[:, 0]
        outputs.append(out_GQD[block.real_GQ])
        rows.append(row_GQ[block.real_GQ])
    return mean_over_clusters(outputs, rows, v_BHND)


def take(x_RD: Tensor, row_GQ: Tensor) -> Tensor:
    """Return the rows `[G, Q, D]`."""
    return x_RD.index_select(0, row_GQ.flatten()).view(*row_GQ.shape, x_RD.shape[-1])


def mean_over_clusters(outputs: list[Tensor], rows: list[Tensor], like_BHND: Tensor) -> Tensor:
    """Add outputs `[M, D]` onto the rows `[M]` they belong to, divided by how many each row receives."""
    total_RD = like_BHND.new_zeros(like_BHND.shape[:-1].numel(), like_BHND.shape[-1])
    if not outputs:
        return total_RD.view(like_BHND.shape)
    row_M = torch.cat(rows)
    times_R = torch.bincount(row_M, minlength=total_RD.shape[0])
    share_M1 = times_R[row_M].to(total_RD.dtype).reciprocal()[:, None]
    total_RD = total_RD.index_add(0, row_M, torch.cat(outputs) * share_M1)
    return total_RD.view(like_BHND.shape)
