"""Loss by position in the window, and what the same units gain from farther context.

Shapes: N units of a window.
"""

from __future__ import annotations

from rtx.analysis.spans import Span

LEAST_CONTEXT = 8
"""Units of the shortest context that is tried."""

MOST_LEVELS = 8


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
