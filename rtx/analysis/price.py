"""What it is worth in bits to see the future, and what deciding from the prefix alone costs.

The same positions of the same windows are scored three ways:

- teacher-forced: one pass over the whole window, which the published scores are;
- prefix rerun: for position i the model is run on the units up to i alone, so that nothing behind it exists, and the
  clusters' places are competed for by the prefix alone, afresh for every i and in every layer;
- streaming: every decision is made on arrival and never revised, which is what generation can do.

Differences are paired, position by position. For patterns that see no future all three agree. What the leak gives is
net: in a whole window later positions also take places from earlier ones, which a rerun's prefix has to itself.

Shapes: K windows, N units of a window, P positions scored in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from rtx.analysis.spans import Span, standard_error, unit_nats
from rtx.evaluation.scores import score_windows

PARALLEL, RERUN, STREAMING = "teacher_forced", "prefix_rerun", "streaming"
DIFFERENCES = {
    "leak_gives": (RERUN, PARALLEL),
    "competing_costs": (STREAMING, RERUN),
    "together": (STREAMING, PARALLEL),
}
"""The first minus the second, in bits: what teacher-forcing gains by the future; what a stream loses to a rerun."""


@dataclass(frozen=True)
class Estimate:
    """A mean in bits with standard errors; None where there is but one of what it would be over."""

    bits: float
    over_positions: float | None
    """All positions of all windows taken as independent."""
    over_windows: float | None
    """Means of whole windows taken as independent: holds also where the positions of a window move together."""


@dataclass(frozen=True)
class Price:
    """Nats of every scored position in each of the ways, float64 `[K, P]`."""

    nats: dict[str, np.ndarray]

    def bits(self, mode: str) -> float:
        """Bits per scored unit of one of the ways."""
        return float(self.nats[mode].mean()) / math.log(2)

    def difference(self, name: str) -> Estimate:
        """Return one of `DIFFERENCES`."""
        more, less = DIFFERENCES[name]
        bits_KP = (self.nats[more] - self.nats[less]) / math.log(2)
        return Estimate(float(bits_KP.mean()), standard_error(bits_KP.ravel()), standard_error(bits_KP.mean(axis=1)))


def sample_positions(candidates: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return `count` of the candidates in order, one drawn from each of `count` equal parts; all if they are fewer."""
    if count >= len(candidates):
        return candidates
    edges = np.linspace(0, len(candidates), count + 1)
    draws = np.random.default_rng(seed).uniform(edges[:-1], edges[1:])
    return candidates[np.minimum(draws.astype(np.int64), len(candidates) - 1)]


def price(
    model: nn.Module,
    tokens: np.ndarray,
    starts_K: Sequence[int],
    length: int,
    positions_P: np.ndarray,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Price:
    """Score the positions of the windows in the three ways, in evaluation mode.

    Args:
        model: has `loss(tokens_BN, prefix=...) -> (nats_BN, auxiliary)`.
        tokens: the split, unsigned integers `[units]`.
        starts_K: where the windows of `length` units begin.
        positions_P: what is scored in every window, ascending from 0.
        on_progress: called with prefixes rerun and prefixes in all.
    """
    # Behind one another by position, so that prefixes of one length share a batch.
    ends = [(start, start + int(p)) for p in positions_P for start in starts_K]
    prefixes = [Span(start, end + 1, end, end + 1) for start, end in ends]
    rerun = score_windows(model, tokens, prefixes, on_progress=on_progress)
    whole = [Span(start, start + length, start, start + length) for start in starts_K]
    nats = {
        PARALLEL: np.stack(unit_nats(model, tokens, whole))[:, positions_P],
        RERUN: rerun.nats_K.reshape(len(positions_P), len(starts_K)).T,
        STREAMING: np.stack(unit_nats(model, tokens, whole, streaming=True))[:, positions_P],
    }
    return Price(nats)
