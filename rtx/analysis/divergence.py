"""Do routing heads read elsewhere than local ones? The Jensen-Shannon divergence of their attention (paper, Table 6).

A head's weights are worked out for some positions at a time (`rtx.analysis.reading`), so no matrix of N x N is held.
Natural logarithm: at most ln 2 = 0.6931.

Shapes: B sequences, N positions, P of them, E hidden width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rtx.analysis.reading import MAX_PAIRS, Head, groups_of, heads_of, layer_inputs
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
    heads = {name: [(name, head) for head in range(count)] for name, count in heads_of(attention).items()}
    names = sorted(heads, key=lambda name: name == ROUTED)
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
    drawn = [(kind, *pair, r % B) for kind, of_kind in pairs.items() for r, pair in enumerate(of_kind)]
    of_job: dict[tuple[Head, Head, int], tuple[float, int]] = {}
    for sequence in sorted({sequence for *_, sequence in drawn}):
        jobs = sorted({(a, b) for _, a, b, of in drawn if of == sequence})
        kept = sorted({head for job in jobs for head in job})
        groups = groups_of(attention, x_BNE[sequence : sequence + 1])
        for at_P in torch.arange(N).split(max(1, MAX_PAIRS // (N * len(kept)))):
            weights = {(name, head): groups[name].read(head, at_P)[0] for name, head in kept}
            for a, b in jobs:
                nats_X = divergence(weights[a], weights[b])
                nats, count = of_job.get((a, b, sequence), (0.0, 0))
                of_job[a, b, sequence] = nats + float(nats_X.sum()), count + len(nats_X)
    results = []
    for kind in pairs:
        found = [of_job[a, b, sequence] for of, a, b, sequence in drawn if of == kind]
        means = [nats / count if count else math.nan for nats, count in found]
        results.append(Divergence(layer, kind, means, float(np.mean([count / N for _, count in found]))))
    return results


def divergence(p_PN: Tensor, q_PN: Tensor) -> Tensor:
    """Return the divergence at each position where both heads read something.

    With m = (p + q) / 2 a key adds (p ln(p / m) + q ln(q / m)) / 2: of a key that one head alone reads that is half its
    weight times ln 2, together ln 2; of a shared one it is p ln(p / (p + q)) / 2 + q ln(q / (p + q)) / 2 on top.
    """
    row_X, key_X = torch.nonzero((p_PN > 0) & (q_PN > 0), as_tuple=True)
    p_X, q_X = p_PN[row_X, key_X].double(), q_PN[row_X, key_X].double()
    more_X = (p_X * torch.log(p_X / (p_X + q_X)) + q_X * torch.log(q_X / (p_X + q_X))) / 2
    nats_P = torch.full_like(p_PN[:, 0], math.log(2), dtype=torch.float64).index_add(0, row_X, more_X)
    return nats_P[(p_PN.sum(-1) > 0.5) & (q_PN.sum(-1) > 0.5)]
