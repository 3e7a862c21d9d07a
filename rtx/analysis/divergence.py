"""How far apart two heads of a layer read: the Jensen-Shannon divergence of their weights.

Shapes: B sequences, N positions, K keys of a piece, R draws, X pairs of heads, E hidden width.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rtx.analysis.attention_weights import groups_of, layer_inputs, weight_blocks
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer

Progress = Callable[[int, int], None]
"""Is called with the number of layers done, and of all layers."""


class Head(NamedTuple):
    """A head of a layer."""

    group: str
    number: int
    """In its group."""


Pair = tuple[Head, Head]
Kind = tuple[str, str]
"""The groups of the two heads of a pair, of which `routed` comes last."""


@torch.no_grad()
def divergences(
    model: Transformer,
    tokens_BN: Tensor,
    *,
    draws: int = 10,
    seed: int = 0,
    on_progress: Progress = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Return the divergence between random heads of each layer, at most ln 2 (paper, Table 6).

    For each layer and kind of pair (heads of one group or of two) `draws` pairs are drawn; draw r
    reads sequence r mod B. The result has a row for each layer and kind: the nats of each draw,
    which are a mean over the positions where both heads read something, their mean and standard
    deviation, and the share of these positions. Layer 0 is the lowest.
    """
    rows = []
    for layer, (attention, x_BNE) in enumerate(layer_inputs(model, tokens_BN)):
        pairs_of_kinds = drawn_pairs(attention, draws, np.random.default_rng([seed, layer]))
        drawn = divergences_of_draws(attention, x_BNE, pairs_of_kinds, draws)
        for kind, (nats_R, share_R) in drawn.items():
            row = {"layer": layer, "kind": list(kind), **spread(nats_R)}
            row["share"] = float(share_R.mean())
            rows.append(row)
        on_progress(layer + 1, len(model.blocks))
    return rows


def divergences_of_draws(
    attention: MultiheadAttention,
    x_BNE: Tensor,
    pairs_of_kinds: dict[Kind, list[Pair]],
    draws: int,
) -> dict[Kind, tuple[np.ndarray, np.ndarray]]:
    """Return the nats of each draw, and its share of positions, by kind; both `[R]`.

    Weights are computed once for all draws of a sequence.
    """
    B, N, _ = x_BNE.shape
    drawn = {kind: (np.zeros(draws), np.zeros(draws)) for kind in pairs_of_kinds}
    for sequence in range(min(B, draws)):
        numbers = range(sequence, draws, B)
        pairs = []
        for pairs_of_kind in pairs_of_kinds.values():
            pairs += [pairs_of_kind[number] for number in numbers]
        nats = iter(pair_divergences(attention, x_BNE[sequence : sequence + 1], pairs))
        for nats_R, share_R in drawn.values():
            for number in numbers:
                nats_P = next(nats)
                nats_R[number] = float(nats_P.mean())
                share_R[number] = len(nats_P) / N
    return drawn


def mean_over_layers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each kind of pair: its divergence as a mean over layers, draw by draw."""
    layers_of_kinds: dict[Kind, list[list[float]]] = {}
    for row in rows:
        layers_of_kinds.setdefault(tuple(row["kind"]), []).append(row["nats_R"])
    means = []
    for kind, nats_LR in layers_of_kinds.items():
        means.append({"kind": list(kind), **spread(np.mean(nats_LR, axis=0))})
    return means


def spread(nats_R: np.ndarray) -> dict[str, Any]:
    """Return draws with their mean and standard deviation, which is 0 for a single draw."""
    deviation = 0.0
    if len(nats_R) > 1:
        deviation = float(nats_R.std(ddof=1))
    return {"nats_R": nats_R.tolist(), "mean": float(nats_R.mean()), "deviation": deviation}


def drawn_pairs(
    attention: MultiheadAttention,
    draws: int,
    generator: np.random.Generator,
) -> dict[Kind, list[Pair]]:
    """Return `draws` pairs of different heads for every kind of pair that a layer has."""
    heads = []
    for group in attention.head_groups():
        heads += [Head(group.name, number) for number in range(group.heads)]
    all_pairs: dict[Kind, list[Pair]] = {}
    for first, second in itertools.combinations(heads, 2):
        all_pairs.setdefault((first.group, second.group), []).append((first, second))
    drawn = {}
    for kind, pairs in all_pairs.items():
        numbers = generator.integers(len(pairs), size=draws)
        drawn[kind] = [pairs[int(number)] for number in numbers]
    return drawn


def pair_divergences(
    attention: MultiheadAttention,
    x_1NE: Tensor,
    pairs: Sequence[Pair],
) -> list[Tensor]:
    """Return the divergence of each pair of heads at the positions where both read something.

    With m = (p + q) / 2 a key adds (p ln p + q ln q) / 2 - m ln m.
    """
    N = x_1NE.shape[1]
    nats_XN = torch.zeros(len(pairs), N, dtype=torch.float64, device=x_1NE.device)
    reads_X2N = nats_XN.new_zeros(len(pairs), 2, N)
    for weights in weights_of_groups(attention, x_1NE):
        for pair, (first, second) in enumerate(pairs):
            first_NK = weights[first.group][first.number]
            second_NK = weights[second.group][second.number]
            both_2NK = torch.stack([first_NK, second_NK]).double()
            mean_NK = both_2NK.mean(0)
            reads_X2N[pair] += both_2NK.sum(-1)
            entropy_NK = torch.xlogy(mean_NK, mean_NK)
            nats_NK = torch.xlogy(both_2NK, both_2NK).mean(0) - entropy_NK
            nats_XN[pair] += nats_NK.sum(-1)
    divergences = []
    for nats_N, reads_2N in zip(nats_XN, reads_X2N, strict=True):
        both_read_N = (reads_2N > 0.5).all(0)
        divergences.append(nats_N[both_read_N].clamp(min=0))
    return divergences


def weights_of_groups(attention: MultiheadAttention, x_1NE: Tensor) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of all positions on a piece of the keys, by group, `[H, N, K]`."""
    groups = groups_of(attention, x_1NE)
    position_N = torch.arange(x_1NE.shape[1])
    pieces = [weight_blocks(heads, position_N) for heads in groups.values()]
    for weights in zip(*pieces, strict=True):
        yield dict(zip(groups, weights, strict=True))
