"""Loss by position: what farther context gives the same units, and what it is worth in bits to see the future.

Shapes: K windows, B spans of a batch, N units of a window or span, P positions scored in each window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rtx.errors import RunFailed
from rtx.evaluation.scores import equal_batches

CONTEXTS, LEAST_CONTEXT = 8, 8
"""How many contexts are tried, each half of the one before, and the shortest."""
TEACHER_FORCED, RERUN, STREAMING = "teacher-forced", "prefix rerun", "streaming"
DIFFERENCES = {
    "leak_gives": (RERUN, TEACHER_FORCED),
    "competing_costs": (STREAMING, RERUN),
    "together": (STREAMING, TEACHER_FORCED),
}
"""The first minus the second, in bits: what teacher-forcing gains by the future; what a stream loses to a rerun."""

Progress = Callable[[int, int], None]
"""Called with how many are done, and how many there are."""


class Span(NamedTuple):
    """Units `[start, stop)` of a split are read, and of those `[first, last)` are scored."""

    start: int
    stop: int
    first: int
    last: int


@torch.no_grad()
def unit_bits(
    model: nn.Module,
    tokens: np.ndarray,
    spans: Sequence[Span],
    *,
    streaming: bool = False,
    on_progress: Progress = lambda done, total: None,
) -> list[np.ndarray]:
    """Return the bits of every scored unit of each span, float64; spans of equal length are read together.

    Args:
        model: in evaluation mode; has `loss(tokens_BN, prefix=...) -> (nats_BN, auxiliary)`.
        tokens: the split, unsigned integers `[units]`.
        spans: what is read and scored.
        streaming: decisions from the prefix alone, instead of teacher-forced.
        on_progress: called with spans done and spans in all.

    Raises:
        RunFailed: what the model gives are no numbers.
    """
    device, found = next(model.parameters()).device, {}
    ordered = sorted(spans, key=lambda span: span.stop - span.start)
    for batch in equal_batches(ordered, None):  # type: ignore[arg-type]
        rows = np.stack([tokens[ordered[k].start : ordered[k].stop] for k in batch]).astype(np.int64)
        nats_BN, _ = model.loss(torch.from_numpy(rows).to(device), prefix=streaming)  # type: ignore[operator]
        if not bool(nats_BN.isfinite().all()):
            raise RunFailed("the model gives nats that are no numbers: the run has diverged")
        for k, bits_N in zip(batch, (nats_BN.double() / math.log(2)).cpu().numpy(), strict=True):
            start, _, first, last = ordered[k]
            found[ordered[k]] = bits_N[first - start : last - start]
        on_progress(batch[-1] + 1, len(spans))
    return [found[span] for span in spans]


def whole_windows(starts_K: Sequence[int], length: int) -> list[Span]:
    """Return spans that score all of some windows."""
    return [Span(start, start + length, start, start + length) for start in starts_K]


def estimate(values: np.ndarray) -> tuple[float, float | None]:
    """Return the mean of independent values and its standard error, None for a single one."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return float(values.mean()), error


def by_position(bits_KN: np.ndarray, bins: int) -> list[dict[str, Any]]:
    """Return the bits of ranges of position, at most `bins` of about equal size: a mean over windows and its error."""
    N, rows = bits_KN.shape[1], []
    for first, stop in itertools.pairwise(sorted({round(N * part / bins) for part in range(bins + 1)})):
        bits, error = estimate(bits_KN[:, first:stop].mean(1))
        rows.append({"first": first, "last": stop - 1, "bits": bits, "error": error})
    return rows


def spans_with(context: int, start: int, length: int, whole: bool) -> list[Span]:
    """Return spans that score the second half of a window, each unit behind `context` to 2 * `context` - 1 others.

    `whole`: each span reads N units, whatever is scored: where a choice of keys reads the whole sequence, it finds as
    many units as in training. Else what lies behind the scored units is left out, which changes nothing.
    """
    stop, spans = start + length, []
    for first in range(stop - length // 2, stop, context):
        last = min(first + context, stop)
        spans.append(Span(first - context, first - context + length if whole else last, first, last))
    return spans


def by_context(
    score: Callable[[Sequence[Span]], list[np.ndarray]], starts_K: Sequence[int], length: int, units: int, whole: bool
) -> list[dict[str, Any]]:
    """Return the bits of the second half of windows with ever less context, and what half a window gains over it.

    Gains are paired by window. There is no row where windows are too short, or the split has no room behind them.

    Args:
        score: returns the bits of every scored unit of each span.
        starts_K: where the windows of `length` units begin.
        units: of the split.
        whole: as for `spans_with`; a window that has too little behind it is then left out.
    """
    levels, rows = [length // 2 >> halved for halved in range(CONTEXTS) if length // 2 >> halved >= LEAST_CONTEXT], []
    plans = [[spans_with(level, start, length, whole) for level in levels] for start in starts_K]
    plans = [plan for plan in plans if all(span.stop <= units for spans in plan for span in spans)]
    if len(levels) < 2 or not plans:
        return []
    spans = sorted({span for plan in plans for spans in plan for span in spans})
    found = dict(zip(spans, score(spans), strict=True))
    bits_KL = np.array([[np.concatenate([found[one] for one in spans]).mean() for spans in plan] for plan in plans])
    for level, context in enumerate(levels):
        (bits, error), (gain, gain_error) = estimate(bits_KL[:, level]), estimate(bits_KL[:, level] - bits_KL[:, 0])
        row = {"bits": bits, "error": error, "gain": gain, "gain_error": gain_error}
        rows.append({"context": [context, 2 * context - 1], **row, "windows": len(plans)})
    return rows


def price(
    model: nn.Module,
    tokens: np.ndarray,
    starts_K: Sequence[int],
    length: int,
    positions_P: np.ndarray,
    on_progress: Progress = lambda done, total: None,
) -> dict[str, np.ndarray]:
    """Return the bits of `positions_P` of some windows in three ways, float64 `[K, P]`; see `unit_bits`.

    Teacher-forced, in one pass over the whole window, as published scores are; by prefix rerun, the model run on the
    units up to each position alone, so that nothing behind it exists; and streaming, where every decision is made on
    arrival and never revised. For patterns that see no future all agree. What the leak gives is net: later positions
    also take places from earlier ones, which a rerun's prefix has to itself.
    """
    windows = whole_windows(starts_K, length)
    prefixes = [Span(s, s + p + 1, s + p, s + p + 1) for s in starts_K for p in positions_P.tolist()]
    rerun = np.concatenate(unit_bits(model, tokens, prefixes, on_progress=on_progress))
    return {
        TEACHER_FORCED: np.stack(unit_bits(model, tokens, windows))[:, positions_P],
        RERUN: rerun.reshape(len(starts_K), len(positions_P)),
        STREAMING: np.stack(unit_bits(model, tokens, windows, streaming=True))[:, positions_P],
    }


def differences(bits_of: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Return `DIFFERENCES` in bits, paired by position, with standard errors; None where they would be over one value.

    `over_positions` takes positions as independent, `over_windows` the means of windows, which may move together.
    """
    found = {}
    for name, (more, less) in DIFFERENCES.items():
        bits_KP = bits_of[more] - bits_of[less]
        (bits, positions), (_, windows) = estimate(bits_KP.ravel()), estimate(bits_KP.mean(axis=1))
        found[name] = {"bits": bits, "over_positions": positions, "over_windows": windows}
    return found
