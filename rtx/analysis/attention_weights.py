"""What attention heads read of one sequence: their weights on every key, and how far apart two heads read.

With unit vectors as values a head's output is its weight on each key (with routing.compressed of the branch that
selects). Shapes: B sequences, N positions, P of them looked at, K keys of a block, H heads of a group, C clusters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtx.attention.engine import attend
from rtx.attention.packed import Indexed, Part, Reads
from rtx.attention.pattern import Inputs, Pattern
from rtx.attention.patterns import Random
from rtx.attention.routing import Routing
from rtx.attention.softmax import Relative
from rtx.model.layer_heads import ROUTED
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer

KEYS = 256
"""Keys whose weights are worked out at once."""

Heads = tuple[Pattern, Inputs, list[Part], Relative | None]
"""The heads of a group, what they are given, what they read, and Shaw's tables."""
Pair = tuple[tuple[str, int], tuple[str, int]]
"""Two heads of a layer: the group of each, and its number in it."""


@torch.no_grad()
def layer_inputs(model: Transformer, tokens_BN: Tensor) -> Iterator[tuple[MultiheadAttention, Tensor]]:
    """Yield the attention of every layer, the lowest first, with what it reads of the sequences, `[B, N, E]`."""
    x_BNE = model.embedding(tokens_BN)
    for block in model.blocks:
        yield block.attention, block.attention_norm(x_BNE) if block.pre else x_BNE  # type: ignore[misc, operator]
        x_BNE, _ = block(x_BNE)


@torch.no_grad()
def groups_of(attention: MultiheadAttention, x_1NE: Tensor) -> dict[str, Heads]:
    """Return the groups of a layer's heads, with what they read of one sequence."""
    groups = {}
    every = zip(attention.groups, attention.each(), attention.relative(), attention.split(x_1NE), strict=True)
    for name, pattern, relative, (q_1HND, k_1HND, _) in every:
        given = pattern.inputs(q_1HND, k_1HND, attention.rotary)
        groups[name] = pattern, given, pattern.reads(given, None, False), relative
    return groups


def read_by(part: Part, kept_R: Tensor) -> Part:
    """Return what is left of a part when only some rows ask."""
    if isinstance(part, Indexed):
        kept_P = kept_R[part.query_row_P]
        return Indexed(part.query_row_P[kept_P], part.index_PK[kept_P], part.length)
    kept_P = kept_R[part.query.row_M]
    return Reads(part.query.keep(kept_R), part.key, part.start_P[kept_P], part.stop_P[kept_P], part.length)


@torch.no_grad()
def weight_blocks(heads: Heads, at_P: Tensor) -> Iterator[Tensor]:
    """Yield the weights of some positions of one sequence on its keys, `[H, P, K]`, the first keys first.

    They are float32 or wider; over all keys a position's sum to 1, or to 0 where it reads nothing.
    """
    pattern, given, parts, relative = heads
    _, H, N, D = given.q_BHND.shape
    wide, device = torch.promote_types(given.q_BHND.dtype, torch.float32), given.q_BHND.device
    at_P = at_P.to(device)
    parts = [read_by(part, torch.isin(torch.arange(N, device=device), at_P).repeat(H)) for part in parts]
    for first in range(0, N, KEYS):
        unit_NK = torch.eye(N, min(KEYS, N - first), dtype=wide, device=device).roll(first, dims=0)
        if relative is not None:
            relative = Relative(relative.keys_MD, unit_NK.new_zeros(len(relative.keys_MD), unit_NK.shape[1]))
        with torch.autocast(device.type, enabled=False):
            q, k = given.turned_q_BHND.to(wide), given.turned_k_BHND.to(wide)
            terms = pattern.terms(D, relative)
            yield attend(q, k, unit_NK.expand(1, H, N, -1), parts, terms, "torch")[0][:, at_P]


def clusters_of(heads: Heads, head: int, at_P: Tensor) -> Tensor | None:
    """Return the first cluster that holds a position and a key, `[P, N]`; None without clusters."""
    pattern, given, (part, *_), _ = heads
    if not isinstance(pattern, Routing | Random) or isinstance(part, Indexed):
        return None
    H, N = given.q_BHND.shape[1:3]
    members = []
    for lists in (part.query, part.key):
        member_LN = torch.zeros(len(lists.count_L), N, dtype=torch.uint8)
        member_LN[lists.list_M().cpu(), lists.row_M.cpu() % N] = 1
        members.append(member_LN.view(H, -1, N)[head])
    return (members[0][:, at_P, None] * members[1][:, None]).argmax(0)


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

    Args:
        model: in evaluation mode.
        tokens_BN: unit ids; draw r reads sequence r mod B.
        draws: pairs of heads drawn for each layer and kind of pair: within a group, or across two.
        seed: of the draws.
        on_progress: called with layers done and layers in all.

    Returns:
        A row for each layer, 0 the lowest, and kind (the groups of the two heads, `routed` last): the nats of each
        draw, a mean over the positions where both heads read something, with their mean and standard deviation; and
        the share of these positions.
    """
    rows, B = [], len(tokens_BN)
    for layer, (attention, x_BNE) in enumerate(layer_inputs(model, tokens_BN)):
        drawn = drawn_pairs(attention, draws, np.random.default_rng([seed, layer]))
        found = {kind: np.zeros((2, draws)) for kind in drawn}  # nats, and the share of positions
        for b in range(min(B, draws)):
            places = [(kind, r) for kind in drawn for r in range(b, draws, B)]
            nats = pair_divergences(attention, x_BNE[b : b + 1], [drawn[kind][r] for kind, r in places])
            for (kind, r), nats_X in zip(places, nats, strict=True):
                found[kind][:, r] = float(nats_X.mean()), len(nats_X) / x_BNE.shape[1]
        for kind, (nats_R, share_R) in found.items():
            rows.append({"layer": layer, "kind": list(kind), **spread(nats_R), "share": float(share_R.mean())})
        on_progress(layer + 1, len(model.blocks))
    return rows


def over_layers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each kind of pair: its divergence as mean over the layers, draw by draw."""
    kinds = dict.fromkeys(tuple(row["kind"]) for row in rows)
    nats = {kind: np.mean([row["nats_R"] for row in rows if tuple(row["kind"]) == kind], axis=0) for kind in kinds}
    return [{"kind": list(kind), **spread(nats_R)} for kind, nats_R in nats.items()]


def spread(nats_R: np.ndarray) -> dict[str, Any]:
    """Return draws with their mean and standard deviation, which is 0 for a single one."""
    deviation = float(nats_R.std(ddof=1)) if len(nats_R) > 1 else 0.0
    return {"nats_R": nats_R.tolist(), "mean": float(nats_R.mean()), "deviation": deviation}


def drawn_pairs(
    attention: MultiheadAttention, draws: int, generator: np.random.Generator
) -> dict[tuple[str, str], list[Pair]]:
    """Return `draws` pairs of different heads for every kind of pair that a layer has."""
    widths = zip(attention.groups, attention.widths, strict=False)
    heads = {name: [(name, head) for head in range(width // attention.size)] for name, width in widths}
    drawn = {}
    for kind in itertools.combinations_with_replacement(sorted(heads, key=lambda name: name == ROUTED), 2):
        first, second = (heads[name] for name in kind)
        every = list(itertools.combinations(first, 2) if first is second else itertools.product(first, second))
        if every:
            drawn[kind] = [every[int(k)] for k in generator.integers(len(every), size=draws)]
    return drawn


def pair_divergences(attention: MultiheadAttention, x_1NE: Tensor, pairs: Sequence[Pair]) -> list[Tensor]:
    """Return the divergence of each pair of heads at the positions of a sequence where both read something.

    With m = (p + q) / 2 a key adds (p ln(p / m) + q ln(q / m)) / 2: of a key that one head alone reads that is half its
    weight times ln 2, together ln 2; of a shared one it is p ln(p / (p + q)) / 2 + q ln(q / (p + q)) / 2 on top.
    """
    groups, at_N = groups_of(attention, x_1NE), torch.arange(x_1NE.shape[1])
    reads_N: dict[tuple[str, int], Tensor] = {}
    nats_N = [torch.full(at_N.shape, math.log(2), dtype=torch.float64, device=x_1NE.device) for _ in pairs]
    for blocks in zip(*(weight_blocks(heads, at_N) for heads in groups.values()), strict=True):
        weights = dict(zip(groups, blocks, strict=True))
        for name, head in {head for pair in pairs for head in pair}:
            reads_N[name, head] = reads_N.get((name, head), 0) + weights[name][head].sum(-1)
        for nats, ((a, i), (b, j)) in zip(nats_N, pairs, strict=True):
            p_NK, q_NK = weights[a][i].double(), weights[b][j].double()
            both_NK = p_NK + q_NK
            more_NK = torch.xlogy(p_NK, p_NK / both_NK) + torch.xlogy(q_NK, q_NK / both_NK)
            nats += torch.where((p_NK > 0) & (q_NK > 0), more_NK, 0.0).sum(-1) / 2
    return [nats[(reads_N[a] > 0.5) & (reads_N[b] > 0.5)] for nats, (a, b) in zip(nats_N, pairs, strict=True)]
