"""backend="reference": every public function by the loops of `reference`, one head of one sequence after the other.

The functions take what their namesakes take, checked, and know neither dropout nor backends. They work in float32 or
wider, outside autocast, and return the type of the values. Choices by content may differ from a fast path's where
scores are equal but for rounding.

Shapes: B sequences, H heads, C clusters, N query and M key positions, D head size, T hash rounds, F directions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import ParamSpec

import torch
from torch import Tensor

from rtx.attention import reference
from rtx.attention.heads import Rotate, turn
from rtx.attention.reference import Sets
from rtx.attention.weights import Distances, in_graph, logit_scale, without_padding

HeadSets = Callable[[int, int], Sets]
"""From sequence and head to the sets of one head."""

P = ParamSpec("P")


def without_autocast(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Return the function as it works outside autocast."""

    @functools.wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        q_BHND = args[0]
        assert isinstance(q_BHND, Tensor)
        with torch.autocast(q_BHND.device.type, enabled=False):
            return function(*args, **kwargs)

    return plain


def widened(x_BHND: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return vectors in float32 or wider, with zeros at padding, so that no gradient meets what stands there."""
    return without_padding(x_BHND.to(torch.promote_types(x_BHND.dtype, torch.float32)), mask_BN)


@without_autocast
def read_heads(
    q_BHND: Tensor,
    k_BHMD: Tensor,
    v_BHMD: Tensor,
    sets: HeadSets,
    scale: float | None,
    relative: Distances | None = None,
    distances: HeadSets | None = None,
    mask_BN: Tensor | None = None,
) -> Tensor:
    """Return the outputs `[B, H, N, D]` of all heads; with a mask, padding is read by nobody and gets zero.

    Patterns that choose by position come here with a rule of `reference`.
    """
    B, H, N, D = q_BHND.shape
    if not B * H * N:
        out_BHND = v_BHMD.new_zeros(B, H, N, v_BHMD.shape[-1])
        return in_graph(out_BHND, q_BHND, k_BHMD, v_BHMD, *(relative or ()))
    q, k, v = widened(q_BHND, mask_BN), widened(k_BHMD, mask_BN), widened(v_BHMD, mask_BN)
    tables = None if relative is None else Distances(*(x.to(q.dtype) for x in relative))
    heads = [
        reference.read(
            q[b, h],
            k[b, h],
            v[b, h],
            sets(b, h) if mask_BN is None else without_padded(sets(b, h), mask_BN[b].tolist()),
            logit_scale(scale, D),
            tables,
            None if distances is None else distances(b, h),
        )
        for b in range(B)
        for h in range(H)
    ]
    out_BHND = torch.stack(heads).unflatten(0, (B, H)).to(v_BHMD.dtype)
    return in_graph(out_BHND, q_BHND, k_BHMD, v_BHMD, *(relative or ()))


def turned(q_BHND: Tensor, k_BHND: Tensor, rotate: Rotate | None) -> tuple[Tensor, Tensor]:
    """Return queries and keys as the logits use them."""
    return turn(q_BHND, rotate), turn(k_BHND, rotate)


def without_padded(sets: Sets, real_N: list[bool]) -> Sets:
    """Return the rule that reads no padding, and nothing where it stands itself."""
    return lambda i: [[j for j in keys if real_N[j]] for keys in sets(i)] if real_N[i] else []


@without_autocast
def adaptive_span(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    span_H: Tensor,
    *,
    scale: float | None,
    relative: Distances | None,
    mask_BN: Tensor | None,
    window: int,
    ramp: int,
) -> Tensor:
    """See `rtx.attention.adaptive_span`; the spans must lie in [0, window]."""
    B, H, N, D = q_BHND.shape
    if not B * H * N:
        return in_graph(torch.zeros_like(v_BHND), q_BHND, k_BHND, v_BHND, span_H, *(relative or ()))
    q, k, v = (widened(x, mask_BN) for x in (q_BHND, k_BHND, v_BHND))
    heads = [
        reference.read_span(
            q[b, h],
            k[b, h],
            v[b, h],
            span_H[h].to(q.dtype),
            window=window,
            ramp=ramp,
            scale=logit_scale(scale, D),
            relative=None if relative is None else Distances(*(x.to(q.dtype) for x in relative)),
            real_N=[True] * N if mask_BN is None else mask_BN[b].tolist(),
        )
        for b in range(B)
        for h in range(H)
    ]
    out_BHND = torch.stack(heads).unflatten(0, (B, H)).to(v_BHND.dtype)
    return in_graph(out_BHND, q_BHND, k_BHND, v_BHND, span_H, *(relative or ()))


@without_autocast
def lsh(
    q_BHND: Tensor,
    v_BHND: Tensor,
    rotation_HTDF: Tensor,
    *,
    scale: float | None,
    relative: Distances | None,
    mask_BN: Tensor | None,
    window: int,
    variant: str,
    rotate: Rotate | None,
) -> Tensor:
    """See `rtx.attention.lsh`; variant="prefix" is "reformer" with streaming."""
    q_BHND = widened(q_BHND, mask_BN)
    k_BHND = q_BHND / (q_BHND.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    def sets(b: int, h: int) -> Sets:
        bucket_TN = reference.buckets(q_BHND[b, h].detach(), rotation_HTDF[h].to(q_BHND.dtype)).cpu()
        if mask_BN is not None:  # a bucket of its own, behind all others
            bucket_TN = bucket_TN.masked_fill(~mask_BN[b].cpu(), 2 * rotation_HTDF.shape[-1])
        return partial(reference.lsh_sets, bucket_TN=bucket_TN, window=window, variant=variant)

    return read_heads(*turned(q_BHND, k_BHND, rotate), v_BHND, sets, scale, relative, mask_BN=mask_BN)


@without_autocast
def random(
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHND: Tensor,
    member_HCN: Tensor,
    *,
    scale: float | None,
    relative: Distances | None,
    mask_BN: Tensor | None,
    window: int,
    attend_self: bool,
    slot_distance: bool,
    rotate: Rotate | None,
) -> Tensor:
    """See `rtx.attention.random`, for memberships that are drawn already."""
    q_BHND, k_BHND = normalised(q_BHND, k_BHND, mask_BN)
    options = {"window": window, "attend_self": attend_self}

    def members(b: int, h: int) -> Tensor:
        return member_HCN[h].cpu() if mask_BN is None else (member_HCN[h] & mask_BN[b]).cpu()

    def sets(b: int, h: int) -> Sets:
        return partial(reference.cluster_sets, member_CN=members(b, h), **options)

    def slots(b: int, h: int) -> Sets:
        member_CN = members(b, h)
        return partial(reference.cluster_slots, member_CN=member_CN, key_member_CN=member_CN, **options)

    v_BHND = without_padding(v_BHND, mask_BN)
    return read_heads(*turned(q_BHND, k_BHND, rotate), v_BHND, sets, scale, relative, slots if slot_distance else None)


def normalised(q_BHND: Tensor, k_BHND: Tensor | None, mask_BN: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return normalised queries, and normalised keys (the queries where there are none)."""
    q_BHND = reference.normalise(widened(q_BHND, mask_BN))
    return q_BHND, q_BHND if k_BHND is None else reference.normalise(widened(k_BHND, mask_BN))


def cluster_scores(centroid_HCD: Tensor, x_BHND: Tensor) -> Tensor:
    """Return the dot products of centroids with vectors, `[B, H, C, N]`, for choices that are not differentiated."""
    return (centroid_HCD.detach().to(x_BHND.dtype) @ x_BHND.detach().transpose(-1, -2)).cpu()


def members(score_CN: Tensor, real_N: Tensor, window: int, selection: str, threshold_C: Tensor | None) -> Tensor:
    """Return the memberships of one head of one sequence; padding belongs nowhere."""
    if selection == "topk":
        member_CN = reference.topk_members(score_CN.masked_fill(~real_N, float("-inf")), window)
    elif selection == "nearest":
        member_CN = reference.nearest_members(score_CN)
    else:
        assert threshold_C is not None
        member_CN = reference.threshold_members(score_CN, threshold_C.detach().cpu())
    return member_CN & real_N


@without_autocast
def routing(
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHND: Tensor,
    centroid_HCD: Tensor,
    *,
    scale: float | None,
    relative: Distances | None,
    mask_BN: Tensor | None,
    window: int,
    selection: str,
    threshold_HC: Tensor | None,
    key_threshold_HC: Tensor | None,
    projection_HDD: Tensor | None,
    causal: bool,
    attend_self: bool,
    slot_distance: bool,
    rotate: Rotate | None,
    streaming: bool,
) -> Tensor:
    """See `rtx.attention.routing`."""
    separate = k_BHND is not None and projection_HDD is None
    q_BHND, k_BHND = normalised(q_BHND, k_BHND, mask_BN)
    routed_BHND = q_BHND
    if projection_HDD is not None:
        routed_BHND = (q_BHND + k_BHND) @ projection_HDD.to(q_BHND.dtype).transpose(-1, -2)
    score_BHCN = key_score_BHCN = cluster_scores(centroid_HCD, routed_BHND)
    if separate:
        key_score_BHCN = cluster_scores(centroid_HCD, k_BHND)
    else:
        key_threshold_HC = threshold_HC
    B, _, N, _ = q_BHND.shape
    real_BN = torch.ones(B, N, dtype=torch.bool) if mask_BN is None else mask_BN.cpu()
    chosen = ((score_BHCN, threshold_HC), (key_score_BHCN, key_threshold_HC))

    def clusters(b: int, h: int, seen: int) -> list[Tensor]:
        """Return the memberships of queries and of keys that the first `seen` positions give."""
        return [
            members(x[b, h, :, :seen], real_BN[b, :seen], window, selection, None if t is None else t[h])
            for x, t in chosen
        ]

    def heads(function: Callable[..., list[list[int]]]) -> HeadSets:
        """Return the sets of a rule about memberships."""

        def sets(b: int, h: int) -> Sets:
            whole = [] if streaming else clusters(b, h, N)
            return lambda i: function(i, *(clusters(b, h, i + 1) if streaming else whole), window, attend_self)

        return sets

    slots = heads(reference.cluster_slots) if slot_distance and relative is not None else None
    sets = heads(partial(reference.separate_sets, causal=causal))
    return read_heads(*turned(q_BHND, k_BHND, rotate), without_padding(v_BHND, mask_BN), sets, scale, relative, slots)


@without_autocast
def cross_routing(
    q_BHND: Tensor,
    k_BHMD: Tensor,
    v_BHMD: Tensor,
    centroid_HCD: Tensor,
    *,
    window: int,
    context_window: int,
    scale: float | None,
    mask_BN: Tensor | None,
    context_mask_BM: Tensor | None,
) -> Tensor:
    """See `rtx.attention.cross_routing`."""
    q_BHND = reference.normalise(widened(q_BHND, mask_BN))
    k_BHMD = reference.normalise(widened(k_BHMD, context_mask_BM))

    def members_of(x_BHND: Tensor, mask_BN: Tensor | None, window: int, b: int, h: int) -> Tensor:
        score_CN = cluster_scores(centroid_HCD, x_BHND)[b, h]
        real_N = torch.ones(score_CN.shape[1], dtype=torch.bool) if mask_BN is None else mask_BN[b].cpu()
        return members(score_CN, real_N, window, "topk", None)

    def sets(b: int, h: int) -> Sets:
        return partial(
            reference.separate_sets,
            member_CN=members_of(q_BHND, mask_BN, window, b, h),
            key_member_CM=members_of(k_BHMD, context_mask_BM, context_window, b, h),
            window=context_window,
            attend_self=True,
            causal=False,
        )

    return read_heads(q_BHND, k_BHMD, without_padding(v_BHMD, context_mask_BM), sets, scale)
