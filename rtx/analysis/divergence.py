"""Do routing heads read elsewhere than local ones? The Jensen-Shannon divergence of their attention (paper, Table 6).

A head's weights are asked of the pattern itself: with unit vectors as values, the output of a position is its weight on
each key. Unit vectors of a block of keys at a time give the weights on that block, and the divergence of two heads is a
sum over the keys that both read, so no matrix of N x N is held. Natural logarithm: at most ln 2 = 0.6931.

Shapes: B sequences, N positions, E hidden width, H heads of a group, D head size, M keys of a block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rtx.attention.shaw import Distances
from rtx.model.block import Block
from rtx.model.multihead import MultiheadAttention
from rtx.model.patterns import ROUTED
from rtx.model.transformer import Transformer

MAX_WEIGHTS = 1 << 27
"""Weights of a layer's heads held at once."""

Head = tuple[str, int]
"""A head of a layer: its group, and its number in it."""


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
    x_BNE = model.embedding(tokens_BN)
    results = []
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        read_BNE = block.attention_norm(x_BNE) if block.pre else x_BNE
        pairs = drawn_pairs(block.attention, draws, np.random.default_rng([seed, layer]))
        results += layer_divergences(block.attention, read_BNE, pairs, layer)
        x_BNE, _ = block(x_BNE)
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


def weight_blocks(attention: MultiheadAttention, x_BNE: Tensor, kept: set[Head]) -> Iterator[dict[Head, Tensor]]:
    """Yield, for one block of keys after the other, the weights `[B, N, M]` that each head in `kept` puts on them."""
    B, N, _ = x_BNE.shape
    split = attention.split(x_BNE)
    block = max(1, MAX_WEIGHTS // (B * N * sum(q_BHND.shape[1] for q_BHND, _, _ in split)))
    for first in range(0, N, block):
        size = min(block, N - first)
        unit_NM = x_BNE.new_zeros(N, size)
        unit_NM[first : first + size] = torch.eye(size, dtype=x_BNE.dtype, device=x_BNE.device)
        weights: dict[Head, Tensor] = {}
        groups = zip(attention.groups, attention.each(), attention.relative(), split, strict=True)
        for name, heads, relative, (q_BHND, k_BHND, _) in groups:
            if relative is not None:  # values of distances are no weights
                relative = Distances(relative.keys_MD, relative.keys_MD.new_zeros(len(relative.keys_MD), size))
            unit_BHNM = unit_NM.expand(*q_BHND.shape[:2], N, size)
            out_BHNM, _ = heads(q_BHND, k_BHND, unit_BHNM, rotate=attention.rotary, relative=relative)
            weights |= {(name, h): out_BHNM[:, h] for n, h in kept if n == name}
        yield weights
