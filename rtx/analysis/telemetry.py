"""What the routing heads do: read after a training batch, from a snapshot of its first sequence.

Shapes: H heads, C clusters, N positions, P probed positions, D head size, W attention window.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rtx.attention.routing import RoutingHeads, Snapshot
from rtx.attention.span import SpanHeads

PROBES = 32
"""Positions whose attention weights are worked out."""


@torch.no_grad()
def read_telemetry(model: nn.Module) -> dict[str, float]:
    """Return means over the routing layers, for the first sequence of the last training batch; empty without any.

    `routing/empty_share`: clusters that are nearest to no position; `usage_entropy`: of the positions' nearest
    clusters, 1 for even use; `in_none`, `in_one`, `in_many`: share of positions that belong to 0, 1 or more clusters;
    `member_share`: members of a cluster over W (top-w: 1); `self_weight` and `distance`: mean weight that a position
    puts on itself, and mean distance it reads at, inside a cluster. `span/mean` and `span/max`: of the spans of all
    heads that learn one, in positions, the ramp left out.
    """
    spans = [heads.spans() for heads in model.modules() if isinstance(heads, SpanHeads)]
    told = {"span/mean": float(torch.cat(spans).mean()), "span/max": float(torch.cat(spans).max())} if spans else {}
    layers = [layer_telemetry(heads) for heads in model.modules() if isinstance(heads, RoutingHeads) and heads.snapshot]
    if not layers:
        return told
    means = torch.stack([torch.stack(list(layer.values())) for layer in layers]).nanmean(0).tolist()
    return told | {f"routing/{name}": value for name, value in zip(layers[0], means, strict=True)}


def layer_telemetry(heads: RoutingHeads) -> dict[str, Tensor]:
    """Return the figures of one layer as scalars."""
    assert heads.snapshot is not None
    member_HCN, nearest_HN = heads.snapshot.member_HCN, heads.snapshot.nearest_HN
    H, C, _ = member_HCN.shape
    used_HC = torch.stack([torch.bincount(nearest_N, minlength=C) for nearest_N in nearest_HN]).double()
    share_HC = used_HC / used_HC.sum(-1, keepdim=True)
    entropy_H = -torch.xlogy(share_HC, share_HC).sum(-1)
    times_HN = member_HCN.sum(1)
    self_weight, distance = probe(heads.snapshot, heads)
    return {
        "empty_share": (used_HC == 0).double().mean(),
        "usage_entropy": entropy_H.mean() / math.log(C) if C > 1 else entropy_H.new_ones(()),
        "in_none": (times_HN == 0).double().mean(),
        "in_one": (times_HN == 1).double().mean(),
        "in_many": (times_HN > 1).double().mean(),
        "member_share": member_HCN.sum().double() / (H * C * heads.centroids.window),
        "self_weight": self_weight,
        "distance": distance,
    }


def probe(snapshot: Snapshot, heads: RoutingHeads) -> tuple[Tensor, Tensor]:
    """Return the mean weight on self and the mean distance read, over evenly spaced positions and their clusters.

    Shaw's terms are left out of the weights; NaN where no probed position belongs to a cluster.
    """
    N = snapshot.member_HCN.shape[-1]
    position_P = torch.linspace(0, N - 1, min(PROBES, N), device=snapshot.member_HCN.device).long()
    rank_HCN = snapshot.key_member_HCN.cumsum(-1)
    distance_PN = position_P[:, None] - torch.arange(N, device=position_P.device)
    recent_HCPN = rank_HCN[..., position_P][..., None] - rank_HCN[..., None, :] < heads.centroids.window
    seen_HCPN = snapshot.key_member_HCN[..., None, :] & recent_HCPN & (distance_PN >= 0)
    if not heads.attend_self:
        others_HCPN = seen_HCPN & (distance_PN != 0)
        seen_HCPN = torch.where(others_HCPN.any(-1, keepdim=True), others_HCPN, seen_HCPN)
    logits_H1PN = (snapshot.query_HND.float()[:, position_P] @ snapshot.key_HND.float().transpose(-1, -2))[:, None]
    weights_HCPN = (logits_H1PN * heads.scale).masked_fill(~seen_HCPN, float("-inf")).softmax(-1)
    reads_HCP = snapshot.member_HCN[..., position_P] & seen_HCPN.any(-1)
    # What remains has one row for each pair of a probed position and a cluster that shows it a key.
    weights_XN = weights_HCPN[reads_HCP].double()
    distance_XN = distance_PN.expand(*reads_HCP.shape, N)[reads_HCP]
    return weights_XN[distance_XN == 0].mean(), (weights_XN * distance_XN).sum(-1).mean()
