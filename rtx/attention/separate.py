"""Attention inside clusters whose queries and keys are chosen apart: two packed lists for each cluster.

A query of a cluster reads the cluster's last W keys at or before its own position, or all of them where no mask is
asked for. Queries are grouped by how many keys they may read: up to W, they share a block with the first W keys of the
list; beyond, a block holds a band of keys and the queries whose windows end in its last quarter of W. The work follows
the counts.

Shapes: B sequences, H heads, N query and M key positions, D head size, L = B * H * C lists, P query members of all
lists together, Y groups of queries, X rows cut from them, G blocks of one form, Q query and K key slots of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.clusters import add_share, take
from rtx.attention.lists import Members
from rtx.attention.weights import Distances, attend, in_graph


class Block(NamedTuple):
    """Blocks of one form: query members and key members (by number) in their slots."""

    query_GQ: Tensor
    real_GQ: Tensor
    """False for query slots behind the end of a row; they repeat a member and their output is thrown away."""
    key_GK: Tensor
    slot_GK: Tensor
    """Slot of each key inside its list; slots behind the list's end are seen by no query."""


class Readers(NamedTuple):
    """The query members that see at least one key, in order of list and position."""

    row_P: Tensor
    list_P: Tensor
    rank_P: Tensor
    """How many keys of its list a query may read but for the window: those at or before it, or all."""


class Rows(NamedTuple):
    """Runs of readers that one block's query slots hold."""

    begin_X: Tensor
    """The first reader."""
    left_X: Tensor
    """How many there are."""
    list_X: Tensor
    tail_X: Tensor
    """0: they read from the first `window` keys; t: their windows end within the t-th `step` keys behind those."""


def readers(queries: Members, keys: Members, causal: bool) -> Readers:
    """Return the queries that see a key, with the number of keys at or before each (all keys without a mask)."""
    list_P = queries.list_M()
    if causal:
        length = max(queries.length, keys.length)
        query_P = list_P * length + queries.position_M()
        key_order = keys.list_M() * length + keys.position_M()
        rank_P = torch.searchsorted(key_order, query_P, right=True) - keys.first_L()[list_P]
    else:
        rank_P = keys.count_L[list_P]
    sees_P = rank_P > 0
    return Readers(queries.row_M[sees_P], list_P[sees_P], rank_P[sees_P])


def cut_rows(read: Readers, window: int, step: int) -> Rows:
    """Cut each list's readers into rows of one tail each, of at most `window` queries in tail 0, else `step`."""
    tail_P = (-(-(read.rank_P - window) // step)).clamp(min=0)
    tails = int(tail_P.max()) + 1
    group_Y, count_Y = (read.list_P * tails + tail_P).unique_consecutive(return_counts=True)
    limit_Y = torch.where(group_Y % tails == 0, window, step)
    rows_Y = -(-count_Y // limit_Y)
    of_X = torch.repeat_interleave(torch.arange(len(rows_Y), device=rows_Y.device), rows_Y)
    done_X = (torch.arange(len(of_X), device=of_X.device) - (rows_Y.cumsum(0) - rows_Y)[of_X]) * limit_Y[of_X]
    begin_X = (count_Y.cumsum(0) - count_Y)[of_X] + done_X
    left_X = (count_Y[of_X] - done_X).minimum(limit_Y[of_X])
    return Rows(begin_X, left_X, group_Y[of_X] // tails, group_Y[of_X] % tails)


def blocks(read: Readers, count_L: Tensor, window: int) -> Iterator[Block]:
    """Cut the readers into blocks over the key lists: at most four sizes of heads, and one of tails."""
    if not len(read.row_P):
        return
    step = max(1, -(-window // 4))
    rows = cut_rows(read, window, step)
    first_L = count_L.cumsum(0) - count_L
    size_X = (-(-rows.left_X // step) * step).clamp(max=window)
    longest = min(window, int(count_L.max()))
    for size in sorted({min(step * quarter, window) for quarter in (1, 2, 3, 4)}):
        which_G = ((rows.tail_X == 0) & (size_X == size)).nonzero()[:, 0]
        if len(which_G):
            yield make_block(Rows(*(x[which_G] for x in rows)), first_L, count_L, size, longest, step)
    which_G = (rows.tail_X > 0).nonzero()[:, 0]
    if len(which_G):
        yield make_block(Rows(*(x[which_G] for x in rows)), first_L, count_L, step, window + step, step)


def make_block(rows: Rows, first_L: Tensor, count_L: Tensor, size: int, key_slots: int, step: int) -> Block:
    """Return blocks of `size` query slots, each over `key_slots` slots of its key list."""
    slot_Q = torch.arange(size, device=first_L.device)
    slot_K = torch.arange(key_slots, device=first_L.device)
    begin_G1, left_G1, list_G1, tail_G1 = (x[:, None] for x in rows)
    slot_GK = (tail_G1 - 1).clamp(min=0) * step + slot_K
    key_GK = first_L[list_G1] + slot_GK.minimum(count_L[list_G1] - 1)
    return Block(begin_G1 + slot_Q.minimum(left_G1 - 1), slot_Q < left_G1, key_GK, slot_GK)


def without_self(mask_GQK: Tensor, self_GQK: Tensor) -> Tensor:
    """Return the mask without each query's own position, but where it is all that the query sees."""
    others_GQK = mask_GQK & ~self_GQK
    return others_GQK | (mask_GQK & ~others_GQK.any(-1, keepdim=True))


def attend_lists(
    q_BHND: Tensor,
    k_BHMD: Tensor,
    v_BHMD: Tensor,
    queries: Members,
    keys: Members,
    *,
    window: int,
    scale: float,
    causal: bool = True,
    attend_self: bool = True,
    dropout: float = 0.0,
    relative: Distances | None = None,
    slot_distance: bool = False,
) -> Tensor:
    """Return the mean of each query's outputs over the clusters in which it sees a key, else zero, `[B, H, N, D]`.

    Without a mask (`causal` false) a list must hold at most `window` keys, and `relative` must be None. Keys may be of
    another sequence, of any length, where neither `causal` nor `attend_self=False` compares positions.
    `slot_distance`: the distance of a key is the number of keys of its list behind it that the query may read.
    """
    q_RD, k_SD, v_SD = (x.flatten(0, 2) for x in (q_BHND, k_BHMD, v_BHMD))
    read = readers(queries, keys, causal)
    forms = list(blocks(read, keys.count_L, window))
    total_RD = v_SD.new_zeros(len(q_RD), v_SD.shape[-1])
    if not forms:
        out_BHND = total_RD.view(*q_BHND.shape[:3], v_BHMD.shape[-1])
        return in_graph(out_BHND, q_BHND, k_BHMD, v_BHMD, *(relative or ()))
    query_rows = [read.row_P[block.query_GQ] for block in forms]
    key_rows = [keys.row_M[block.key_GK] for block in forms]
    times_R = torch.bincount(read.row_P, minlength=len(q_RD))
    taken = take(q_RD, query_rows), take(k_SD, key_rows), take(v_SD, key_rows)
    for block, row_GQ, row_GK, q_GQD, k_GKD, v_GKD in zip(forms, query_rows, key_rows, *taken, strict=True):
        rank_GQ1 = read.rank_P[block.query_GQ][..., None]
        mask_GQK = (block.slot_GK[:, None] < rank_GQ1) & (block.slot_GK[:, None] >= rank_GQ1 - window)
        distance_GQK = row_GQ[..., None] - row_GK[:, None]
        if not attend_self:
            mask_GQK = without_self(mask_GQK, distance_GQK == 0)
        if slot_distance:
            distance_GQK = rank_GQ1 - 1 - block.slot_GK[:, None]
        out_GQD = attend(
            q_GQD[:, None],
            k_GKD[:, None],
            v_GKD[:, None],
            scale,
            mask_QK=mask_GQK[:, None],
            dropout=dropout,
            relative=relative,
            distance_QK=distance_GQK[:, None],
        )[:, 0]
        add_share(total_RD, out_GQD, row_GQ, block.real_GQ, times_R)
    return total_RD.view(*q_BHND.shape[:3], v_BHMD.shape[-1])
