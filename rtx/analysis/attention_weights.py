"""What attention heads read of one sequence: their weights, how far apart two heads read, and telemetry of training.

With unit vectors as values a head's output is its weight on each key (with routing.compressed of the branch that
selects). Shapes: B sequences, N positions, P of them looked at, K keys of a block, H heads of a group, L lists.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rtx.attention.adaptive_span import AdaptiveSpan
from rtx.attention.engine import attend
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.pattern import Pattern
from rtx.attention.reads import Holes, IndexReads, MemberLists, QueriesKeys, RangeReads, Reads
from rtx.attention.routing import Routing
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer
from rtx.sharded import whole

KEYS = 256  # keys whose weights are worked out at once

Heads = tuple[Pattern, QueriesKeys, list[Reads], RelativeTables | None]
"""The heads of a group, what they are given, what they read, and Shaw's tables."""
Pair = tuple[
    tuple[str, int], tuple[str, int]
]  # two heads of a layer: the group of each, and its number in it


@torch.no_grad()
def layer_inputs(
    model: Transformer, tokens_BN: Tensor
) -> Iterator[tuple[MultiheadAttention, Tensor]]:
    """Yield the attention of every layer, the lowest first, with what it reads of the sequences, `[B, N, E]`."""
    x_BNE = model.embedding(tokens_BN)
    for block in model.blocks:
        yield block.attention, block.attention_norm(x_BNE) if block.pre else x_BNE  # type: ignore[misc, operator]
        x_BNE, _ = block(x_BNE)


@torch.no_grad()
def groups_of(attention: MultiheadAttention, x_1NE: Tensor) -> dict[str, Heads]:
    """Return the groups of a layer's heads, with what they read of one sequence."""
    heads = {}
    for group, (q_1HND, k_1HND, _) in zip(
        attention.head_groups(), attention.project(x_1NE), strict=True
    ):
        qk = group.inputs(q_1HND, k_1HND)
        heads[group.name] = group.pattern, qk, group.pattern.reads(qk, False), group.relative()
    return heads


def read_by(part: Reads, kept_R: Tensor) -> Reads:
    """Return what is left of a part when only some rows ask."""
    if isinstance(part, IndexReads):
        return part._replace(index_RK=part.index_RK.masked_fill(~kept_R[:, None], -1))
    kept_P = kept_R[part.query.row_M]
    hidden = part.holes and Holes(
        part.holes.value_XM, part.holes.low_XP[:, kept_P], part.holes.high_XP[:, kept_P]
    )
    return RangeReads(
        part.query.keep(kept_R),
        part.key,
        part.start_P[kept_P],
        part.stop_P[kept_P],
        part.length,
        hidden,
    )


@torch.no_grad()
def weight_blocks(heads: Heads, at_P: Tensor) -> Iterator[Tensor]:
    """Yield the weights of some positions of one sequence on its keys, `[H, P, K]`, the first keys first.

    They are float32 or wider; over all keys a position's sum to 1, or to 0 where it reads nothing.
    """
    pattern, given, parts, relative = heads
    _, H, N, D = given.q_BHND.shape
    wide, device = torch.promote_types(given.q_BHND.dtype, torch.float32), given.q_BHND.device
    at_P = at_P.to(device)
    parts = [
        read_by(part, torch.isin(torch.arange(N, device=device), at_P).repeat(H)) for part in parts
    ]
    for first in range(0, N, KEYS):
        unit_NK = torch.eye(N, min(KEYS, N - first), dtype=wide, device=device).roll(first, dims=0)
        relative = None if relative is None else relative._replace(values_MD=None)
        with torch.autocast(device.type, enabled=False):
            q, k = given.rotated_q_BHND.to(wide), given.rotated_k_BHND.to(wide)
            terms = pattern.terms(D, relative)
            yield attend(q, k, unit_NK.expand(1, H, N, -1), parts, terms, "torch", pattern.merge)[
                0
            ][:, at_P]


def summary(weight_PN: Tensor, at_P: Tensor) -> dict[str, Any]:
    """Return what a head reads on average over the positions at which it reads anything, which are `reads_share`.

    `keys` read, `distance` by weight and the `farthest` one, and the weight that a position puts on itself.
    """
    reads_P = weight_PN.sum(1) > 0.5
    weight_PN, at_P1 = weight_PN[reads_P], at_P[reads_P, None]
    if not len(weight_PN):
        return {"reads_share": 0.0}
    distance_PN = at_P1 - torch.arange(weight_PN.shape[1])
    return {
        "reads_share": float(reads_P.float().mean()),
        "keys": float((weight_PN > 0).sum(1).float().mean()),
        "distance": float((weight_PN * distance_PN).sum(1).mean()),
        "farthest": int(distance_PN[weight_PN > 0].max()),
        "self_weight": float(weight_PN.gather(1, at_P1).mean()),
    }


@torch.no_grad()
def divergences(
    model: Transformer,
    tokens_BN: Tensor,
    *,
    draws: int = 10,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Return the Jensen-Shannon divergence between random heads of each layer (the paper's Table 6), at most ln 2.

    For each layer and kind of pair, within a group or across two, `draws` pairs are drawn; draw r reads sequence r mod
    B. A row for each layer, 0 the lowest, and kind (the groups of the two heads, `routed` last) has the nats of each
    draw, a mean over the positions where both heads read something, with their mean and standard deviation; and the
    share of these positions. `on_progress` is called with layers done and layers in all.
    """
    rows, B = [], len(tokens_BN)
    for layer, (attention, x_BNE) in enumerate(layer_inputs(model, tokens_BN)):
        drawn = drawn_pairs(attention, draws, np.random.default_rng([seed, layer]))
        found = {kind: np.zeros((2, draws)) for kind in drawn}  # nats, and the share of positions
        for b in range(min(B, draws)):
            places = [(kind, r) for kind in drawn for r in range(b, draws, B)]
            nats = pair_divergences(
                attention, x_BNE[b : b + 1], [drawn[kind][r] for kind, r in places]
            )
            for (kind, r), nats_X in zip(places, nats, strict=True):
                found[kind][:, r] = float(nats_X.mean()), len(nats_X) / x_BNE.shape[1]
        for kind, (nats_R, share_R) in found.items():
            rows.append(
                {
                    "layer": layer,
                    "kind": list(kind),
                    **spread(nats_R),
                    "share": float(share_R.mean()),
                }
            )
        on_progress(layer + 1, len(model.blocks))
    return rows


def over_layers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each kind of pair: its divergence as mean over the layers, draw by draw."""
    kinds = dict.fromkeys(tuple(row["kind"]) for row in rows)
    nats = {
        kind: np.mean([row["nats_R"] for row in rows if tuple(row["kind"]) == kind], axis=0)
        for kind in kinds
    }
    return [{"kind": list(kind), **spread(nats_R)} for kind, nats_R in nats.items()]


def spread(nats_R: np.ndarray) -> dict[str, Any]:
    """Return draws with their mean and standard deviation, which is 0 for a single one."""
    deviation = float(nats_R.std(ddof=1)) if len(nats_R) > 1 else 0.0
    return {"nats_R": nats_R.tolist(), "mean": float(nats_R.mean()), "deviation": deviation}


def drawn_pairs(
    attention: MultiheadAttention, draws: int, generator: np.random.Generator
) -> dict[tuple[str, str], list[Pair]]:
    """Return `draws` pairs of different heads for every kind of pair that a layer has."""
    heads = []
    for group in attention.head_groups():
        heads += [(group.name, head) for head in range(group.heads)]
    every: dict[tuple[str, str], list[Pair]] = {}
    for first, second in itertools.combinations(heads, 2):
        every.setdefault((first[0], second[0]), []).append((first, second))
    return {
        kind: [of[int(k)] for k in generator.integers(len(of), size=draws)]
        for kind, of in every.items()
    }


def pair_divergences(
    attention: MultiheadAttention, x_1NE: Tensor, pairs: Sequence[Pair]
) -> list[Tensor]:
    """Return the divergence of each pair of heads at the positions of a sequence where both read something.

    With m = (p + q) / 2 a key adds (p ln p + q ln q) / 2 - m ln m.
    """
    groups, at_N = groups_of(attention, x_1NE), torch.arange(x_1NE.shape[1])
    nats_XN = torch.zeros(len(pairs), len(at_N), dtype=torch.float64, device=x_1NE.device)
    reads_X2N = nats_XN.new_zeros(len(pairs), 2, len(at_N))
    for blocks in zip(*(weight_blocks(heads, at_N) for heads in groups.values()), strict=True):
        weights = dict(zip(groups, blocks, strict=True))
        for x, ((a, i), (b, j)) in enumerate(pairs):
            both_2NK = torch.stack([weights[a][i], weights[b][j]]).double()
            mean_NK = both_2NK.mean(0)
            reads_X2N[x] += both_2NK.sum(-1)
            nats_XN[x] += (
                torch.xlogy(both_2NK, both_2NK).mean(0) - torch.xlogy(mean_NK, mean_NK)
            ).sum(-1)
    return [
        nats_N[(reads_2N > 0.5).all(0)].clamp(min=0)
        for nats_N, reads_2N in zip(nats_XN, reads_X2N, strict=True)
    ]


@torch.no_grad()
def read_telemetry(model: nn.Module) -> dict[str, float]:
    """Return means over the routing layers, for the last training batch (`Routing.seen`); empty without any.

    `empty_share`: clusters without members; `member_share` and `member_most`: members of a cluster (with keys of their
    own, keys) over W, the mean and the largest; `in_none`, `in_one`, `in_many`: share of positions whose queries belong
    to 0, 1 or more clusters. `span/*`: of heads that learn their span, in positions, the ramp left out.
    """
    spans = [whole(heads.spans()) for heads in model.modules() if isinstance(heads, AdaptiveSpan)]
    told = (
        {"span/mean": float(torch.cat(spans).mean()), "span/max": float(torch.cat(spans).max())}
        if spans
        else {}
    )
    routing = [heads for heads in model.modules() if isinstance(heads, Routing)]
    layers = [layer_telemetry(*heads.seen, heads.window) for heads in routing if heads.seen]
    for name in layers[0] if layers else ():
        told[f"routing/{name}"] = float(torch.stack([layer[name] for layer in layers]).nanmean())
    return told


def layer_telemetry(lists: list[MemberLists], rows: int, window: int) -> dict[str, Tensor]:
    """Return the figures of one layer as scalars."""
    times_R = torch.bincount(lists[0].row_M, minlength=rows)
    filled_L = lists[-1].count_L.double() / window
    return {
        "empty_share": (filled_L == 0).double().mean(),
        "in_none": (times_R == 0).double().mean(),
        "in_one": (times_R == 1).double().mean(),
        "in_many": (times_R > 1).double().mean(),
        "member_share": filled_L.mean(),
        "member_most": filled_L.max(),
    }
