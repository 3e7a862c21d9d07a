"""Do routing heads read elsewhere than local ones? The Jensen-Shannon divergence of their attention (paper, Table 6).

A head's weights are asked of the pattern itself, a block of keys at a time (`rtx.analysis.weights`), and the divergence
of two heads is a sum over the keys that both read, so no matrix of N x N is held. Natural logarithm: at most
ln 2 = 0.6931.

Shapes: B sequences, N positions, E hidden width, H heads of a group, D head size, M keys of a block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rtx.analysis.weights import Head, layer_inputs, weight_blocks
from rtx.model.multihead import MultiheadAttention
from rtx.model.patterns import ROUTED
from rtx.model.transformer import Transformer


@dataclass(frozen=True)
class Divergence:
    """The divergences of the drawn pairs of one layer and kind, each the mean over positions."""

    layer: int
    kind: tuple[str, str]
    """The groups that the pair's heads are from, `routed` last."""
    nats_R: list[float]
    """One for each draw."""
    share: float
    """Positions where both heads read something; the others are left out."""

    @property
    def mean(self) -> float:
        """Mean over the draws."""
        return float(np.mean(self.nats_R))

    @property
    def deviation(self) -> float:
        """Standard deviation over the draws; 0 for a single one."""
        return float(np.std(self.nats_R, ddof=1)) if len(self.nats_R) > 1 else 0.0


@torch.no_grad()
def divergences(
    model: Transformer,
    tokens_BN: Tensor,
    *,
    draws: int = 10,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Divergence]:
    """Return the divergence between random heads of each layer, by kind of pair: within a group and across two.

    Args:
        model: in evaluation mode.
        tokens_BN: unit ids; draw r reads sequence r mod B.
        draws: pairs of heads drawn for each layer and kind; a kind with a single pair is still drawn that often.
        seed: of the draws.
        on_progress: called with layers done and layers in all.
    """
    results = []
    for layer, (attention, read_BNE) in enumerate(layer_inputs(model, tokens_BN)):
        pairs = drawn_pairs(attention, draws, np.random.default_rng([seed, layer]))
        results += layer_divergences(attention, read_BNE, pairs, layer)
        on_progress(layer + 1, len(model.blocks))
    return results


def drawn_pairs(
    attention: MultiheadAttention, draws: int, generator: np.random.Generator
) -> dict[tuple[str, str], list[tuple[Head, Head]]]:
    """Return `draws` pairs of different heads for every kind of pair that a layer has."""
    sizes = {name: width // attention.size for name, width in zip(attention.groups, attention.widths, strict=False)}
    heads = {name: [(name, head) for head in range(count)] for name, count in sizes.items()}
    names = sorted(sizes, key=lambda name: name == ROUTED)
    drawn = {}
    for first, second in itertools.combinations_with_replacement(names, 2):
        every = (
            list(itertools.combinations(heads[first], 2))
            if first == second
            else list(itertools.product(heads[first], heads[second]))
        )
        if every:
            drawn[first, second] = [every[int(k)] for k in generator.integers(len(every), size=draws)]
    return drawn


def layer_divergences(
    attention: MultiheadAttention, x_BNE: Tensor, pairs: dict[tuple[str, str], list[tuple[Head, Head]]], layer: int
) -> list[Divergence]:
    """Return the divergences of the drawn pairs of a layer that reads `x_BNE`."""
    B, N, _ = x_BNE.shape
    drawn = [(kind, r, pair) for kind, of_kind in pairs.items() for r, pair in enumerate(of_kind)]
    jobs = sorted({(*pair, r % B) for _, r, pair in drawn})
    kept = {head for *pair, _ in jobs for head in pair}
    shared_N = {job: x_BNE.new_zeros(N, dtype=torch.float64) for job in jobs}
    read_BN = {head: x_BNE.new_zeros(B, N, dtype=torch.float64) for head in kept}
    for weights in weight_blocks(attention, x_BNE, kept):
        for head, weight_BNM in weights.items():
            read_BN[head] += weight_BNM.sum(-1)
        for a, b, sequence in jobs:
            add_shared(shared_N[a, b, sequence], weights[a][sequence], weights[b][sequence])
    nats: dict[tuple[str, str], list[float]] = {kind: [] for kind in pairs}
    shares: dict[tuple[str, str], list[float]] = {kind: [] for kind in pairs}
    for kind, r, (a, b) in drawn:
        sequence = r % B
        both_N = (read_BN[a][sequence] > 0.5) & (read_BN[b][sequence] > 0.5)
        nats[kind].append(math.log(2) + float(shared_N[a, b, sequence][both_N].mean()))
        shares[kind].append(float(both_N.double().mean()))
    return [Divergence(layer, kind, nats[kind], float(np.mean(shares[kind]))) for kind in pairs]


def add_shared(sum_N: Tensor, p_NM: Tensor, q_NM: Tensor) -> None:
    """Add to each position what a block's keys change of ln 2, the divergence of weights that share no key.

    With m = (p + q) / 2 a key adds (p ln(p / m) + q ln(q / m)) / 2: of a key that one head alone reads that is half its
    weight times ln 2, together ln 2; of a shared one it is p ln(p / (p + q)) / 2 + q ln(q / (p + q)) / 2 on top.
    """
    row_X, key_X = torch.nonzero((p_NM > 0) & (q_NM > 0), as_tuple=True)
    p_X, q_X = p_NM[row_X, key_X].double(), q_NM[row_X, key_X].double()
    sum_X = p_X + q_X
    sum_N.index_add_(0, row_X, (p_X * torch.log(p_X / sum_X) + q_X * torch.log(q_X / sum_X)) / 2)
