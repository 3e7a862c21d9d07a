"""What training reports of its heads: how clusters are filled, and how far spans reach.

Shapes: R rows, L lists.
"""

import torch
from torch import Tensor, nn

from rtx.attention.adaptive_span import AdaptiveSpan
from rtx.attention.clusters import Routing
from rtx.attention.reads import MemberLists
from rtx.sharded import whole


@torch.no_grad()
def read_telemetry(model: nn.Module) -> dict[str, float]:
    """Return means over layers for the last training batch; empty if no head has any.

    `routing/*` are from `Routing.last_members`. `empty_share` is the share of clusters without
    members. `member_share` and `member_most` are the mean and the largest number of members of a
    cluster, divided by W; of key members if keys have separate memberships. `in_none`, `in_one` and
    `in_many` are the shares of positions whose queries belong to 0, 1 or more clusters.

    `span/*` are the learned spans of heads in positions, without the ramp.
    """
    return {**span_telemetry(model), **routing_telemetry(model)}


def span_telemetry(model: nn.Module) -> dict[str, float]:
    """Return the mean and the largest learned span."""
    spans = []
    for heads in model.modules():
        if isinstance(heads, AdaptiveSpan):
            spans.append(whole(heads.spans()))
    if not spans:
        return {}
    all_spans = torch.cat(spans)
    return {"span/mean": float(all_spans.mean()), "span/max": float(all_spans.max())}


def routing_telemetry(model: nn.Module) -> dict[str, float]:
    """Return how clusters were filled, as means over layers."""
    layers = []
    for heads in model.modules():
        if isinstance(heads, Routing) and heads.last_members:
            lists, rows = heads.last_members
            layers.append(layer_telemetry(lists, rows, heads.window))
    if not layers:
        return {}
    means = {}
    for name in layers[0]:
        value_L = torch.stack([layer[name] for layer in layers])
        means[f"routing/{name}"] = float(value_L.nanmean())
    return means


def layer_telemetry(lists: list[MemberLists], rows: int, window: int) -> dict[str, Tensor]:
    """Return the figures of one layer as scalars.

    Args:
        lists: of queries and of keys, or of both together.
        rows: R.
    """
    clusters_R = torch.bincount(lists[0].row_M, minlength=rows)
    filled_L = lists[-1].count_L.double() / window
    return {
        "empty_share": (filled_L == 0).double().mean(),
        "in_none": (clusters_R == 0).double().mean(),
        "in_one": (clusters_R == 1).double().mean(),
        "in_many": (clusters_R > 1).double().mean(),
        "member_share": filled_L.mean(),
        "member_most": filled_L.max(),
    }
