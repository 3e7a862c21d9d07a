"""Do routing heads read elsewhere than local ones? The Jensen-Shannon divergence of their attention (paper, Table 6).

Natural logarithm: at most ln 2 = 0.6931. Shapes: B sequences, N positions, K keys of a block, E hidden width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtx.analysis.attention_weights import groups_of, layer_inputs, weight_blocks
from rtx.model.layer_heads import ROUTED
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer

Head = tuple[str, int]
"""A head of a layer: its group, and its number in it."""

Pair = tuple[Head, Head]


@torch.no_grad()
def divergences(
    model: Transformer,
    tokens_BN: Tensor,
    *,
    draws: int = 10,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Return the divergence between random heads of each layer, by kind of pair: within a group and across two.

    Args:
        model: in evaluation mode.
        tokens_BN: unit ids; draw r reads sequence r mod B.
        draws: pairs of heads drawn for each layer and kind; a kind with a single pair is still drawn that often.
        seed: of the draws.
        on_progress: called with layers done and layers in all.

    Returns:
        A row for each layer, 0 the lowest, and kind (the groups of the two heads, `routed` last): the nats of each
        draw, a mean over positions, with their mean and standard deviation; and the share of the positions where both
        heads read something, which are those that count.
    """
    rows, B = [], len(tokens_BN)
    for layer, (attention, x_BNE) in enumerate(layer_inputs(model, tokens_BN)):
        drawn = drawn_pairs(attention, draws, np.random.default_rng([seed, layer]))
        pairs = [(r % B, pair) for of_kind in drawn.values() for r, pair in enumerate(of_kind)]
        found: dict[tuple[int, Pair], Tensor] = {}
        for sequence in sorted({sequence for sequence, _ in pairs}):
            mine = sorted({pair for of, pair in pairs if of == sequence})
            nats = pair_divergences(attention, x_BNE[sequence : sequence + 1], mine)
            found |= {(sequence, pair): nats_X for pair, nats_X in zip(mine, nats, strict=True)}
        for kind, of_kind in drawn.items():
            draws_X = [found[r % B, pair] for r, pair in enumerate(of_kind)]
            share = float(np.mean([len(nats_X) for nats_X in draws_X])) / x_BNE.shape[1]
            nats_R = [float(nats_X.mean()) for nats_X in draws_X]
            rows.append({"layer": layer, "kind": list(kind), **spread(nats_R), "share": share})
        on_progress(layer + 1, len(model.blocks))
    return rows


def over_layers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each kind of pair: its divergence as mean over the layers, draw by draw."""
    kinds = dict.fromkeys(tuple(row["kind"]) for row in rows)
    of_kind = {kind: [row["nats_R"] for row in rows if tuple(row["kind"]) == kind] for kind in kinds}
    return [{"kind": list(kind), **spread(np.mean(nats_LR, axis=0).tolist())} for kind, nats_LR in of_kind.items()]


def spread(nats_R: Sequence[float]) -> dict[str, Any]:
    """Return draws with their mean and standard deviation, which is 0 for a single one."""
    deviation = float(np.std(nats_R, ddof=1)) if len(nats_R) > 1 else 0.0
    return {"nats_R": nats_R, "mean": float(np.mean(nats_R)), "deviation": deviation}


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
    reads_N: dict[Head, Tensor] = {}
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
