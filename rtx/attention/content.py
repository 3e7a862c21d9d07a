"""What routing heads read of queries and keys: normalised vectors, scores of centroids, and memberships.

Shapes: B sequences, H routing heads, C clusters, N positions, D head size, W attention window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.backends import attend_packed
from rtx.attention.clusters import pack
from rtx.attention.heads import Rotate, turn
from rtx.attention.selection import centroid_scores, nearest_members, threshold_members, topk_members
from rtx.attention.separate import attend_lists
from rtx.attention.weights import Distances, without_padding


def normalise(q_BHND: Tensor) -> Tensor:
    """Return LayerNorm(q) without scale or bias, at least in float32 (Algorithm 1, line 7)."""
    return F.layer_norm(q_BHND.to(torch.promote_types(q_BHND.dtype, torch.float32)), q_BHND.shape[-1:], eps=1e-6)


class Content(NamedTuple):
    """What a sequence offers to routing heads."""

    q_BHND: Tensor
    """Normalised queries."""
    k_BHND: Tensor | None
    """Normalised keys; None: the queries."""
    routed_BHND: Tensor
    """What the memberships of queries are chosen by: the queries, or W_R (q + k)."""
    score_BHCN: Tensor
    """Dot products of centroids with `routed_BHND`; -inf at padding."""
    key_score_BHCN: Tensor | None
    """The same of keys with memberships of their own; None: a position's key belongs where its query does."""

    def logits(self, rotate: Rotate | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return queries and keys as the logits use them (the same tensor where keys are shared)."""
        q_BHND = turn(self.q_BHND, rotate).to(dtype)
        if self.k_BHND is None:
            return q_BHND, q_BHND
        return q_BHND, turn(self.k_BHND, rotate).to(dtype)


def read_content(
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    centroid_HCD: Tensor,
    projection_HDD: Tensor | None = None,
    mask_BN: Tensor | None = None,
) -> Content:
    """Return normalised queries and keys with their scores.

    Without keys the queries stand for them. With keys and `projection_HDD` (W_R) each position has one routing vector
    W_R (q + k), which is not normalised again; with keys alone, queries and keys are scored apart.
    """
    q_BHND = normalise(without_padding(q_BHND, mask_BN))
    k_BHND = None if k_BHND is None else normalise(without_padding(k_BHND, mask_BN))
    routed_BHND, key_score_BHCN = q_BHND, None
    if k_BHND is not None and projection_HDD is not None:
        with torch.autocast(q_BHND.device.type, enabled=False):
            routed_BHND = (q_BHND + k_BHND) @ projection_HDD.to(q_BHND.dtype).transpose(-1, -2)
    elif k_BHND is not None:
        key_score_BHCN = masked_scores(centroid_HCD, k_BHND, mask_BN)
    return Content(q_BHND, k_BHND, routed_BHND, masked_scores(centroid_HCD, routed_BHND, mask_BN), key_score_BHCN)


def masked_scores(centroid_HCD: Tensor, x_BHND: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return the scores of centroids, -inf at padding."""
    score_BHCN = centroid_scores(centroid_HCD, x_BHND)
    return score_BHCN if mask_BN is None else score_BHCN.masked_fill(~mask_BN[:, None, None], float("-inf"))


@torch.no_grad()
def members(
    score_BHCN: Tensor, window: int, selection: str, threshold_HC: Tensor | None, mask_BN: Tensor | None = None
) -> Tensor:
    """Return the membership mask `[B, H, C, N]` of a selection; padding belongs nowhere."""
    if selection == "topk":
        member_BHCN = topk_members(score_BHCN, window)
    elif selection == "nearest":
        member_BHCN = nearest_members(score_BHCN)
    else:
        assert threshold_HC is not None
        member_BHCN = threshold_members(score_BHCN, threshold_HC)
    return member_BHCN if mask_BN is None else member_BHCN & mask_BN[:, None, None]


def attend_content(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    member_BHCN: Tensor,
    key_member_BHCN: Tensor | None,
    *,
    window: int,
    scale: float,
    causal: bool = True,
    attend_self: bool = True,
    dropout: float = 0.0,
    relative: Distances | None = None,
    slot_distance: bool = False,
    backend: str = "torch",
) -> Tensor:
    """Return attention inside the clusters; `key_member_BHCN` is None where the members' keys are what they read."""
    options = {
        "window": window,
        "scale": scale,
        "attend_self": attend_self,
        "dropout": dropout,
        "relative": relative,
        "slot_distance": slot_distance,
    }
    queries = pack(member_BHCN)
    if causal and key_member_BHCN is None:
        return attend_packed(backend)(q_BHND, k_BHND, v_BHND, queries, **options)
    keys = queries if key_member_BHCN is None else pack(key_member_BHCN)
    return attend_lists(q_BHND, k_BHND, v_BHND, queries, keys, causal=causal, **options)
