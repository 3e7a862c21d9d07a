"""Streaming top-w over a whole sequence in one pass: what Algorithm 1 gives when every decision reads the prefix alone.

At position i a cluster holds the best W positions of 0..i; position i gets an output from each cluster that it joins on
arrival, and that output is never revised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtx.attention.clusters import Members, add_share, pack, take
from rtx.attention.selection import prefix_members
from rtx.attention.weights import Distances, attend

MAX_SCORES = 1 << 24
"""Attention scores held at once."""


def attend_prefix_topk(
    q_BHND: Tensor,
    v_BHND: Tensor,
    score_BHCN: Tensor,
    *,
    window: int,
    scale: float,
    attend_self: bool = True,
    relative: Distances | None = None,
) -> Tensor:
    """Return streaming top-w attention with shared queries and keys, `[B, H, N, D]`; for evaluation only."""
    joins_LN, leaves_LN = prefix_members(score_BHCN.flatten(0, 2), window)
    members = pack(joins_LN.view(score_BHCN.shape))
    leaves_M = leaves_LN[joins_LN]
    q_RD, v_RD = (x.reshape(-1, x.shape[-1]) for x in (q_BHND, v_BHND))
    total_RD, times_R = torch.zeros_like(v_RD), members.times()
    for query_GQ, real_GQ in padded_lists(members):
        row_GQ = members.row_M[query_GQ]
        position_GQ = row_GQ % members.length
        distance_GQQ = position_GQ[:, :, None] - position_GQ[:, None]
        slot_Q = torch.arange(query_GQ.shape[1], device=query_GQ.device)
        mask_GQQ = (slot_Q[:, None] >= slot_Q[None]) & (leaves_M[query_GQ][:, None] > position_GQ[:, :, None])
        if not attend_self:
            self_QQ = slot_Q[:, None] == slot_Q[None]
            others_GQQ = mask_GQQ & ~self_QQ
            mask_GQQ = others_GQQ | (self_QQ & ~others_GQQ.any(-1, keepdim=True))
        (q_GQD,), (v_GQD,) = take(q_RD, [row_GQ]), take(v_RD, [row_GQ])
        out_GQD = attend(
            q_GQD[:, None],
            q_GQD[:, None],
            v_GQD[:, None],
            scale,
            mask_QK=mask_GQQ[:, None],
            relative=relative,
            distance_QK=distance_GQQ[:, None],
        )[:, 0]
        add_share(total_RD, out_GQD, row_GQ, real_GQ, times_R)
    return total_RD.view(v_BHND.shape)


def padded_lists(members: Members) -> list[tuple[Tensor, Tensor]]:
    """Return the lists in groups of like length: numbers into M `[G, Q]`, and which slots are real."""
    first_L = members.count_L.cumsum(0) - members.count_L
    order_L = members.count_L.argsort(stable=True)
    order_L = order_L[members.count_L[order_L] > 0]
    groups = []
    while len(order_L):
        longest = int(members.count_L[order_L[-1]])
        group = max(1, MAX_SCORES // longest**2)
        which_G, order_L = order_L[-group:], order_L[:-group]
        slot_GQ = torch.arange(longest, device=order_L.device).expand(len(which_G), -1)
        last_G1 = members.count_L[which_G][:, None] - 1
        groups.append((first_L[which_G][:, None] + slot_GQ.minimum(last_G1), slot_GQ <= last_G1))
    return groups
