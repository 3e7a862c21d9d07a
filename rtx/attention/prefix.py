"""Streaming top-w over a whole sequence in one pass: what Algorithm 1 gives when every decision reads the prefix alone.

At position i a cluster holds the best W positions of 0..i; position i gets an output from each cluster that it joins on
arrival, and that output is never revised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtx.attention.clusters import Members, add_share, pack, take
from rtx.attention.selection import prefix_members
from rtx.attention.separate import without_self
from rtx.attention.weights import Distances, attend, in_graph

MAX_SCORES = 1 << 24
"""Attention scores held at once."""


def attend_prefix_topk(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    score_BHCN: Tensor,
    key_score_BHCN: Tensor | None = None,
    *,
    window: int,
    scale: float,
    attend_self: bool = True,
    relative: Distances | None = None,
    slot_distance: bool = False,
) -> Tensor:
    """Return streaming top-w attention, `[B, H, N, D]`; for evaluation only.

    With `key_score_BHCN` a cluster keeps the best W queries and the best W keys of the prefix apart: position i gets an
    output from each cluster whose best queries it joins, and reads its best keys of 0..i there. A score of -inf
    (padding) never joins.
    """
    joins_LN, leaves_LN = prefix_members(score_BHCN.flatten(0, 2), window)
    queries = keys = pack(joins_LN.view(score_BHCN.shape))
    leaves_M = leaves_LN[joins_LN]
    if key_score_BHCN is not None:
        joins_LN, leaves_LN = prefix_members(key_score_BHCN.flatten(0, 2), window)
        keys, leaves_M = pack(joins_LN.view(score_BHCN.shape)), leaves_LN[joins_LN]
    q_RD, k_RD, v_RD = (x.flatten(0, 2) for x in (q_BHND, k_BHND, v_BHND))
    total_RD, times_R = torch.zeros_like(v_RD), queries.times()
    for (query_GQ, real_GQ), (key_GK, real_GK) in padded_lists(queries, keys):
        row_GQ, row_GK = queries.row_M[query_GQ], keys.row_M[key_GK]
        position_GQ1 = (row_GQ % queries.length)[..., None]
        distance_GQK = row_GQ[..., None] - row_GK[:, None]
        mask_GQK = real_GK[:, None] & (distance_GQK >= 0) & (leaves_M[key_GK][:, None] > position_GQ1)
        # The last of the visible keys has slot distance 0.
        slots_GQK = mask_GQK.flip(-1).cumsum(-1).flip(-1) - 1 if slot_distance else distance_GQK
        if not attend_self:
            mask_GQK = without_self(mask_GQK, distance_GQK == 0)
        (q_GQD,), (k_GKD,), (v_GKD,) = take(q_RD, [row_GQ]), take(k_RD, [row_GK]), take(v_RD, [row_GK])
        out_GQD = attend(
            q_GQD[:, None],
            k_GKD[:, None],
            v_GKD[:, None],
            scale,
            mask_QK=mask_GQK[:, None],
            relative=relative,
            distance_QK=slots_GQK[:, None],
        )[:, 0]
        add_share(total_RD, out_GQD, row_GQ, real_GQ, times_R)
    return in_graph(total_RD.view(v_BHND.shape), q_BHND, k_BHND, v_BHND, *(relative or ()))


def padded_lists(queries: Members, keys: Members) -> list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """Return the lists in groups of like length: numbers of query and of key members `[G, slots]`, and which are real.

    Every list with a query has a key: the first real position of a prefix is one of its best.
    """
    size_L = queries.count_L.maximum(keys.count_L)
    order_L = size_L.argsort(stable=True)
    order_L = order_L[queries.count_L[order_L] > 0]
    groups = []
    while len(order_L):
        group = max(1, MAX_SCORES // int(size_L[order_L[-1]]) ** 2)
        which_G, order_L = order_L[-group:], order_L[:-group]
        groups.append((padded(queries.count_L, which_G), padded(keys.count_L, which_G)))
    return groups


def padded(count_L: Tensor, which_G: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of some lists' members in as many slots as the longest needs, and which slots are real."""
    first_L = count_L.cumsum(0) - count_L
    count_G1 = count_L[which_G][:, None]
    slot_1Q = torch.arange(int(count_G1.max()), device=count_L.device)[None]
    return first_L[which_G][:, None] + slot_1Q.minimum(count_G1 - 1), slot_1Q < count_G1
