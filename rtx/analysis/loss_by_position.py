"""Loss by position in the window, and what the same units gain from farther context.

Shapes: K windows, B spans of a batch, N units of a window or span.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rtx.errors import RunFailed
from rtx.evaluation.scores import equal_batches

LEAST_CONTEXT, MOST_LEVELS = 8, 8
"""Units of the shortest context that is tried, and how often it may be halved."""


class Span(NamedTuple):
    """Units `[start, stop)` of a split are read, and of those `[first, last)` are scored."""

    start: int
    stop: int
    first: int
    last: int


@torch.no_grad()
def unit_nats(
    model: nn.Module,
    tokens: np.ndarray,
    spans: Sequence[Span],
    *,
    streaming: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[np.ndarray]:
    """Return the nats of every scored unit of each span, float64.

    Args:
        model: in evaluation mode; has `loss(tokens_BN, prefix=...) -> (nats_BN, auxiliary)`.
        tokens: the split, unsigned integers `[units]`.
        spans: spans of equal length that follow each other are read together.
        streaming: decisions from the prefix alone, instead of teacher-forced.
        on_progress: called with spans done and spans in all.

    Raises:
        RunFailed: what the model gives are no numbers.
    """
    device = next(model.parameters()).device
    found: list[np.ndarray] = []
    for batch in equal_batches(spans, None):  # type: ignore[arg-type]
        chosen = [spans[k] for k in batch]
        rows = np.stack([tokens[span.start : span.stop] for span in chosen]).astype(np.int64)
        nats_BN, _ = model.loss(torch.from_numpy(rows).to(device), prefix=streaming)  # type: ignore[operator]
        if not bool(nats_BN.isfinite().all()):
            raise RunFailed("the model gives nats that are no numbers: the run has diverged")
        for span, nats_N in zip(chosen, nats_BN.double().cpu().numpy(), strict=True):
            found.append(nats_N[span.first - span.start : span.last - span.start])
        on_progress(len(found), len(spans))
    return found


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


def contexts(length: int) -> list[int]:
    """Return how much context a unit has at the least at each level, from half a window down by halves."""
    half = length // 2
    return [half >> level for level in range(MOST_LEVELS) if half >> level >= LEAST_CONTEXT] or [half]


def spans_with(context: int, start: int, length: int, whole: bool) -> list[Span]:
    """Return spans that score the second half of a window, each unit behind `context` to 2 * `context` - 1 others.

    `whole`: each span reads N units, whatever is scored: where a choice of keys reads the whole sequence, it finds as
    many units as in training. Else what lies behind the scored units is left out, which changes nothing.
    """
    stop = start + length
    spans = []
    for first in range(stop - length // 2, stop, context):
        last = min(first + context, stop)
        spans.append(Span(first - context, first - context + length if whole else last, first, last))
    return spans


def by_context(
    score: Callable[[Sequence[Span]], list[np.ndarray]], starts_K: Sequence[int], length: int, units: int, whole: bool
) -> list[dict[str, Any]]:
    """Return the bits of the second half of windows for each level of context, and what half a window gains over it.

    Gains are paired, window by window. There is no row where windows are too short to leave context out, or where the
    split has no room behind them.

    Args:
        score: returns the bits of every scored unit of each span.
        starts_K: where the windows of `length` units begin.
        units: of the split.
        whole: as for `spans_with`; a window that has too little behind it is then left out.
    """
    levels = contexts(length)
    plans = [[spans_with(level, start, length, whole) for start in starts_K] for level in levels]
    fits = [k for k in range(len(starts_K)) if all(span.stop <= units for plan in plans for span in plan[k])]
    if len(levels) < 2 or not fits:
        return []
    spans = sorted({span for plan in plans for k in fits for span in plan[k]}, key=lambda span: span.stop - span.start)
    found = dict(zip(spans, score(spans), strict=True))
    rows, bits_LK = (
        [],
        [np.array([np.concatenate([found[one] for one in plan[k]]).mean() for k in fits]) for plan in plans],
    )
    for context, bits_K in zip(levels, bits_LK, strict=True):
        (bits, error), (gain, gain_error) = estimate(bits_K), estimate(bits_K - bits_LK[0])
        row = {"bits": bits, "error": error, "gain": gain, "gain_error": gain_error}
        rows.append({"context": [context, 2 * context - 1], **row, "windows": len(fits)})
    return rows
