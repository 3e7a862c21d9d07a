"""What the routing heads do: read after a training batch, from a snapshot of its first sequence.

Shapes: H heads, C clusters, N positions, P probed positions, D head size, W attention window.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rtx.attention.routing import RoutingHeads, Snapshot
from rtx.attention.separate import readers, without_self
from rtx.attention.span import SpanHeads
from rtx.training.sharding import whole

PROBES = 32
"""Positions whose attention weights are worked out."""


@torch.no_grad()
def read_telemetry(model: nn.Module) -> dict[str, float]:
    """Return means over the routing layers, for the first sequence of the last training batch; empty without any.

    Padding is not counted. `routing/empty_share`: clusters that are nearest to no position; `usage_entropy`: of the
    positions' nearest clusters, 1 for even use; `in_none`, `in_one`, `in_many`: share of positions that belong to 0, 1
    or more clusters; `member_share`: members of a cluster over W (top-w: 1); `self_weight` and `distance`: mean weight
    that a position puts on itself, and mean distance it reads at, inside a cluster. `span/mean` and `span/max`: of the
    spans of all heads that learn one, in positions, the ramp left out.
    """
    spans = [whole(heads.spans()) for heads in model.modules() if isinstance(heads, SpanHeads)]
    told = {"span/mean": float(torch.cat(spans).mean()), "span/max": float(torch.cat(spans).max())} if spans else {}
    layers = [layer_telemetry(heads) for heads in model.modules() if isinstance(heads, RoutingHeads) and heads.snapshot]
    if not layers:
        return told
    means = torch.stack([torch.stack(list(layer.values())) for layer in layers]).nanmean(0).tolist()
    return told | {f"routing/{name}": value for name, value in zip(layers[0], means, strict=True)}


def layer_telemetry(heads: RoutingHeads) -> dict[str, Tensor]:
    """Return the figures of one layer as scalars."""
    assert heads.snapshot is not None
    members, nearest_HN, real_N = heads.snapshot.members, heads.snapshot.nearest_HN, heads.snapshot.real_N
    H, C, _ = heads.centroids.centroid_HCD.shape
    times_HN = members.times().view(H, -1)
    if real_N is not None:  # padding is in no cluster, and near to none
        nearest_HN, times_HN = nearest_HN[:, real_N], times_HN[:, real_N]
    used_HC = torch.stack([torch.bincount(nearest_N, minlength=C) for nearest_N in nearest_HN]).double()
    share_HC = used_HC / used_HC.sum(-1, keepdim=True)
    entropy_H = -torch.xlogy(share_HC, share_HC).sum(-1)
    self_weight, distance = probe(heads.snapshot, heads)
    return {
        "empty_share": (used_HC == 0).double().mean(),
        "usage_entropy": entropy_H.mean() / math.log(C) if C > 1 else entropy_H.new_ones(()),
        "in_none": (times_HN == 0).double().mean(),
        "in_one": (times_HN == 1).double().mean(),
        "in_many": (times_HN > 1).double().mean(),
        "member_share": members.count_L.sum().double() / (H * C * heads.centroids.window),
        "self_weight": self_weight,
        "distance": distance,
    }


def probe(snapshot: Snapshot, heads: RoutingHeads) -> tuple[Tensor, Tensor]:
    """Return the mean weight on self and the mean distance read, over evenly spaced positions and their clusters.

    Shaw's terms are left out of the weights; NaN where no probed position belongs to a cluster.
    """
    N, device = snapshot.members.length, snapshot.nearest_HN.device
    position_P = torch.linspace(0, N - 1, min(PROBES, N), device=device).long()
    probe_N = torch.full((N,), -1, device=device)
    probe_N[position_P] = torch.arange(len(position_P), device=device)
    # One row for each pair of a probed position and a cluster that shows it a key: its last W keys there.
    read = readers(snapshot.members, snapshot.key_members, causal=True)
    row_X, list_X, rank_X = (x[probe_N[read.row_P % N] >= 0] for x in read)
    slot_XW = rank_X[:, None] - 1 - torch.arange(min(heads.centroids.window, N), device=device)
    seen_XW = slot_XW >= 0
    key_XW = snapshot.key_members.row_M[snapshot.key_members.first_L()[list_X][:, None] + slot_XW.clamp(min=0)]
    distance_XW = row_X[:, None] - key_XW
    if not heads.attend_self:
        seen_XW = without_self(seen_XW, distance_XW == 0)
    logits_HPN = snapshot.query_HND.float()[:, position_P] @ snapshot.key_HND.float().transpose(-1, -2)
    logits_XW = logits_HPN[(row_X // N)[:, None], probe_N[row_X % N][:, None], key_XW % N]
    weights_XW = (logits_XW * heads.scale).masked_fill(~seen_XW, float("-inf")).softmax(-1).double()
    return weights_XW[distance_XW == 0].sum() / len(row_X), (weights_XW * distance_XW).sum(-1).mean()
