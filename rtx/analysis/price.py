"""What it is worth in bits to see the future, and what deciding from the prefix alone costs.

The same positions are scored three ways: teacher-forced, in one pass over the whole window, as published scores are;
by prefix rerun, the model run on the units up to each position alone, so that nothing behind it exists; and streaming,
where every decision is made on arrival and never revised, as in generation. For patterns that see no future all agree.
What the leak gives is net: later positions also take places from earlier ones, which a rerun's prefix has to itself.

Shapes: K windows, N units of a window, P positions scored in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from rtx.analysis.loss_by_position import Span, estimate, unit_nats, whole_windows

TEACHER_FORCED, RERUN, STREAMING = "teacher_forced", "prefix_rerun", "streaming"
DIFFERENCES = {
    "leak_gives": (RERUN, TEACHER_FORCED),
    "competing_costs": (STREAMING, RERUN),
    "together": (STREAMING, TEACHER_FORCED),
}
"""The first minus the second, in bits: what teacher-forcing gains by the future; what a stream loses to a rerun."""


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
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, np.ndarray]:
    """Return the nats of `positions_P` of the windows, float64 `[K, P]`, in each of the three ways; see `unit_nats`."""
    # Behind one another by position, so that prefixes of one length share a batch.
    ends = [(start, start + int(p)) for p in positions_P for start in starts_K]
    prefixes = [Span(start, end + 1, end, end + 1) for start, end in ends]
    rerun = np.concatenate(unit_nats(model, tokens, prefixes, on_progress=on_progress))
    windows = whole_windows(starts_K, length)
    return {
        TEACHER_FORCED: np.stack(unit_nats(model, tokens, windows))[:, positions_P],
        RERUN: rerun.reshape(len(positions_P), len(starts_K)).T,
        STREAMING: np.stack(unit_nats(model, tokens, windows, streaming=True))[:, positions_P],
    }


def differences(nats: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Return `DIFFERENCES` in bits, paired by position, with standard errors; None where they would be over one value.

    `over_positions` takes all positions as independent; `over_windows` the means of windows, whose positions may move
    together.
    """
    found = {}
    for name, (more, less) in DIFFERENCES.items():
        bits_KP = (nats[more] - nats[less]) / math.log(2)
        (bits, positions), (_, windows) = estimate(bits_KP.ravel()), estimate(bits_KP.mean(axis=1))
        found[name] = {"bits": bits, "over_positions": positions, "over_windows": windows}
    return found
