"""What the routing heads do: read after a training batch, from a snapshot of its first sequence.

Shapes: H heads, C clusters, N positions, P probed positions, W attention window, L lists.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rtx.analysis.attention_weights import read_by
from rtx.attention.engine import attend
from rtx.attention.packed import Reads
from rtx.attention.patterns import AdaptiveSpan
from rtx.attention.routing import Routing, Snapshot
from rtx.training.sharding import whole

PROBES = 32
"""Positions whose attention weights are worked out."""


@torch.no_grad()
def read_telemetry(model: nn.Module) -> dict[str, float]:
    """Return means over the routing layers, for the first sequence of the last training batch; empty without any.

    `empty_share`: clusters without members; `member_share` and `member_most`: members of a cluster (with keys of their
    own, keys) over W, the mean and the largest; `in_none`, `in_one`, `in_many`: share of positions whose queries belong
    to 0, 1 or more clusters; `self_weight` and `distance`: mean weight that a position puts on itself, and mean
    distance it reads at. `span/*`: of heads that learn their span, in positions, the ramp left out.
    """
    spans = [whole(heads.spans()) for heads in model.modules() if isinstance(heads, AdaptiveSpan)]
    told = {"span/mean": float(torch.cat(spans).mean()), "span/max": float(torch.cat(spans).max())} if spans else {}
    routing = [heads for heads in model.modules() if isinstance(heads, Routing) and heads.snapshot]
    layers = [layer_telemetry(heads, heads.snapshot) for heads in routing if heads.snapshot]
    if not layers:
        return told
    means = torch.stack([torch.stack(list(layer.values())) for layer in layers]).nanmean(0).tolist()
    return told | {f"routing/{name}": value for name, value in zip(layers[0], means, strict=True)}


def layer_telemetry(heads: Routing, snapshot: Snapshot) -> dict[str, Tensor]:
    """Return the figures of one layer as scalars."""
    H, N, _ = snapshot.q_HND.shape
    reads, real_N = heads.read_lists(snapshot.lists, N), snapshot.real_N
    times_HN = torch.bincount(reads.query.row_M, minlength=H * N).view(H, N)
    times_HN = times_HN if real_N is None else times_HN[:, real_N]  # padding is in no cluster
    filled_L = reads.key.count_L.double() / heads.centroids.window
    shares = {"empty_share": filled_L == 0, "in_none": times_HN == 0, "in_one": times_HN == 1, "in_many": times_HN > 1}
    self_weight, distance = probe(heads, snapshot, reads)
    return {name: these.double().mean() for name, these in shares.items()} | {
        "member_share": filled_L.mean(),
        "member_most": filled_L.max(),
        "self_weight": self_weight,
        "distance": distance,
    }


def probe(heads: Routing, snapshot: Snapshot, reads: Reads) -> tuple[Tensor, Tensor]:
    """Return the mean weight on self and the mean distance read, over evenly spaced positions that read anything.

    Values that hold a key's position, and 1 at one of the probed, make outputs that hold just that. Shaw's terms are
    left out; NaN where no probed position reads anything.
    """
    (H, N, D), device = snapshot.q_HND.shape, snapshot.q_HND.device
    at_P = torch.linspace(0, N - 1, min(PROBES, N), device=device).long()
    position_N = torch.arange(N, device=device)
    v_NX = torch.cat([position_N[:, None], torch.ones(N, 1, device=device), position_N[:, None] == at_P], dim=1).float()
    asks_R = torch.isin(position_N, at_P).repeat(H)
    q, k = snapshot.q_HND[None].float(), snapshot.k_HND[None].float()
    terms = heads.terms(D, None)._replace(dropout=0.0)  # nothing is drawn: training goes on with the same bits
    with torch.autocast(device.type, enabled=False):
        out_BHNX = attend(q, k, v_NX.expand(1, H, N, -1), [read_by(reads, asks_R)], terms, "torch")
    out_HPX = out_BHNX[0][:, at_P].double()
    reads_HP = out_HPX[..., 1] > 0.5
    self_HP = out_HPX[..., 2:].diagonal(dim1=1, dim2=2)
    return self_HP[reads_HP].mean(), (at_P - out_HPX[..., 0])[reads_HP].mean()
