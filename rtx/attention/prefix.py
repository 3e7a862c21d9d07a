"""Streaming top-w over a whole sequence in one pass: what Algorithm 1 gives when every decision reads the prefix alone.

At position i a cluster holds the best W positions of 0..i; position i gets an output from each cluster that it joins on
arrival, and that output is never revised.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.choice import MAX_SCORES_CPU, MAX_SCORES_GPU
from rtx.attention.clusters import add_share, take
from rtx.attention.lists import Members, padded
from rtx.attention.selection import centroid_scores, prefix_members, tie_margin
from rtx.attention.separate import without_self
from rtx.attention.weights import Distances, attend, in_graph

MAX_SCORES = 1 << 24
"""Attention scores held at once."""


class Arrivals(NamedTuple):
    """Who is among the best W of its own prefix."""

    members: Members
    leaves_M: Tensor
    """The position at which each is no longer among the best; N: never."""


@torch.no_grad()
def arrivals(centroid_HCD: Tensor, x_BHND: Tensor, mask_BN: Tensor | None, window: int) -> Arrivals:
    """Return who joins each cluster on arrival; padding (false in the mask) never does."""
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    most = MAX_SCORES_CPU if x_BHND.device.type == "cpu" else MAX_SCORES_GPU
    step = max(1, most // max(1, B * H * C))

    def scores(start: int) -> Tensor:
        score_BHCT = centroid_scores(centroid_HCD, x_BHND[:, :, start : start + step])
        if mask_BN is not None:
            score_BHCT.masked_fill_(~mask_BN[:, None, None, start : start + step], float("-inf"))
        return score_BHCT.flatten(0, 2)

    margin_L = tie_margin(centroid_HCD, x_BHND.dtype).repeat(B, 1, 1).flatten()
    list_M, position_M, leaves_M = prefix_members(map(scores, range(0, max(1, N), step)), window, margin_L)
    count_L = torch.bincount(list_M, minlength=B * H * C)
    return Arrivals(Members(list_M // C * N + position_M, count_L, N, B * H * N), leaves_M)


def attend_prefix_topk(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    queries: Arrivals,
    keys: Arrivals,
    *,
    window: int,
    scale: float,
    attend_self: bool = True,
    relative: Distances | None = None,
    slot_distance: bool = False,
) -> Tensor:
    """Return streaming top-w attention, `[B, H, N, D]`; for evaluation only.

    A cluster keeps the best W queries and, where they are chosen apart, the best W keys of the prefix: position i gets
    an output from each cluster whose best queries it joins, and reads its best keys of 0..i there.
    """
    readers, (members, leaves_M) = queries.members, keys
    q_RD, k_RD, v_RD = (x.flatten(0, 2) for x in (q_BHND, k_BHND, v_BHND))
    total_RD, times_R = torch.zeros_like(v_RD), readers.times()
    for (query_GQ, real_GQ), (key_GK, real_GK) in padded_lists(readers, members):
        row_GQ, row_GK = readers.row_M[query_GQ], members.row_M[key_GK]
        position_GQ1 = (row_GQ % readers.length)[..., None]
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
