"""Loss by position in the window, and what the same units gain from farther context.

Shapes: K windows, N units of a window, L levels of context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rtx.model.transformer import Transformer
from rtx.training.evaluate import equal_batches

LEAST_CONTEXT = 8
"""Units of the shortest context that is tried."""

MOST_LEVELS = 8


class Span(NamedTuple):
    """Units `[start, stop)` of a split are read, and of those `[first, last)` are scored."""

    start: int
    stop: int
    first: int
    last: int


def unit_nats(
    model: Transformer,
    tokens: np.ndarray,
    spans: Sequence[Span],
    *,
    streaming: bool = False,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[np.ndarray]:
    """Return the nats of every scored unit of each span, float64.

    Args:
        model: in evaluation mode.
        tokens: the split, unsigned integers `[units]`.
        spans: spans of equal length that follow each other are read together.
        streaming: decisions from the prefix alone, instead of teacher-forced.
        on_progress: called with the spans done.
    """
    device = next(model.parameters()).device
    found: list[np.ndarray] = []
    with torch.no_grad():
        for batch in equal_batches(spans, None):
            chosen = [spans[k] for k in batch]
            rows = np.stack([tokens[span.start : span.stop] for span in chosen]).astype(np.int64)
            nats_BN, _ = model.loss(torch.from_numpy(rows).to(device), streaming=streaming)
            for span, nats_N in zip(chosen, nats_BN.double().cpu().numpy(), strict=True):
                found.append(nats_N[span.first - span.start : span.last - span.start])
            on_progress(len(found))
    return found


def contexts(length: int) -> list[int]:
    """Return how much context a unit has at the least at each level, from half a window down by halves."""
    half = length // 2
    found = [half >> level for level in range(MOST_LEVELS) if half >> level >= LEAST_CONTEXT]
    return found or [half]


def spans_with(context: int, start: int, length: int, whole: bool) -> list[Span]:
    """Return spans that score the second half of a window, each unit behind `context` to 2 * `context` - 1 others.

    Args:
        context: at most half a window.
        start: of the window.
        length: N.
        whole: read N units in each span, whatever is scored: where a choice of keys reads the whole sequence, it finds
            as many units as in training. Else what lies behind the scored units is left out, which changes nothing.
    """
    stop = start + length
    blocks = range(stop - length // 2, stop, context)
    return [
        Span(
            first - context,
            first - context + length if whole else min(first + context, stop),
            first,
            min(first + context, stop),
        )
        for first in blocks
    ]


def bin_edges(length: int, bins: int) -> list[int]:
    """Return where ranges of position begin, and the end: at most `bins` of about equal size."""
    return sorted({round(length * part / bins) for part in range(bins + 1)})


def mean_and_error(values_K: np.ndarray) -> tuple[float, float | None]:
    """Return the mean of values of windows and its standard error, None for a single window."""
    error = float(values_K.std(ddof=1) / np.sqrt(len(values_K))) if len(values_K) > 1 else None
    return float(values_K.mean()), error
