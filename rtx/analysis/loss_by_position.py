"""Loss by position: what farther context gains, and what seeing the future is worth in bits.

Shapes: K windows, N units of a window, B spans of a batch, P positions scored in each window, L
levels of context.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rtx.data.windows import (
    Window,
    batches_by_length,
    read_windows,
    tokens_and_documents,
)
from rtx.errors import RunFailed

CONTEXTS = 8
"""The most contexts that are tried, each half of the one before."""
LEAST_CONTEXT = 8
"""The shortest context that is tried."""

TEACHER_FORCED = "teacher-forced"
RERUN = "prefix rerun"
STREAMING = "streaming"
DIFFERENCES = {
    "leak_gives": (RERUN, TEACHER_FORCED),
    "competing_costs": (STREAMING, RERUN),
    "together": (STREAMING, TEACHER_FORCED),
}
"""The first minus the second, in bits: what teacher-forcing gains by the future, and what a stream
loses to a rerun."""

Progress = Callable[[int, int], None]
"""Is called with the number of spans done, and of all spans."""

Scorer = Callable[[Sequence[Window]], list[np.ndarray]]
"""Returns the bits of every scored unit of each span."""


@torch.no_grad()
def unit_bits(
    model: nn.Module,
    tokens: np.ndarray,
    spans: Sequence[Window],
    *,
    streaming: bool = False,
    starts: np.ndarray | None = None,
    on_progress: Progress = lambda done, total: None,
) -> list[np.ndarray]:
    """Return the bits of every scored unit of each span, float64.

    Args:
        model: in evaluation mode; has `loss(tokens_BN, streaming=...) -> (nats_BN, auxiliary)`.
        tokens: the split, unsigned integers `[units]`.
        streaming: every selection of keys is made from the prefix alone.
        starts: where documents start, if units are predicted from their document alone.
        on_progress: is called with the number of spans done, and of all spans.

    Raises:
        RunFailed: the bits are no numbers.
    """
    device = next(model.parameters()).device
    ordered = sorted(spans, key=lambda span: span.stop - span.start)
    bits_of_spans: dict[Window, np.ndarray] = {}
    for numbers in batches_by_length(ordered, None):
        batch = [ordered[number] for number in numbers]
        units, skipped_B = read_windows(tokens, batch, starts)
        tokens_BN, first_BN = tokens_and_documents(units.to(device))
        documents = {} if first_BN is None else {"first_BN": first_BN}
        nats_BN, _ = model.loss(  # type: ignore[operator]
            tokens_BN, streaming=streaming, **documents
        )
        if not bool(nats_BN.isfinite().all()):
            raise RunFailed("the model gives nats that are no numbers: the run has diverged")
        bits_BN = (nats_BN.double() / math.log(2)).cpu().numpy()
        for span, bits_N, skipped in zip(batch, bits_BN, skipped_B.tolist(), strict=True):
            bits_of_spans[span] = bits_N[skipped:]
        on_progress(numbers[-1] + 1, len(spans))
    return [bits_of_spans[span] for span in spans]


def estimate(values: np.ndarray) -> tuple[float, float | None]:
    """Return the mean of independent values and its standard error, None for a single value."""
    mean = float(values.mean())
    if len(values) == 1:
        return mean, None
    return mean, float(values.std(ddof=1)) / math.sqrt(len(values))


def by_position(bits_KN: np.ndarray, bins: int) -> list[dict[str, Any]]:
    """Return the mean bits of ranges of position, with standard errors over windows.

    Args:
        bins: the most ranges, of about equal size.
    """
    N = bits_KN.shape[1]
    rows = []
    for position in np.array_split(np.arange(N), min(bins, N)):
        bits, error = estimate(bits_KN[:, position].mean(1))
        first = int(position[0])
        last = int(position[-1])
        rows.append({"first": first, "last": last, "bits": bits, "error": error})
    return rows


def by_context(score: Scorer, windows_K: Sequence[Window]) -> list[dict[str, Any]]:
    """Return the bits of the second half of windows with ever less context.

    At each level a unit has from `context` to 2 * `context` - 1 units before it. Earlier ones are
    left out, so the selection must not see the future. A row also has the `gain` of half a window
    of context over this level, paired by window. Windows that are too short have no row.
    """
    half = (windows_K[0].stop - windows_K[0].start) // 2
    contexts = contexts_of(half)
    if len(contexts) < 2:
        return []
    bits_LK: list[np.ndarray] = []
    rows = []
    for context in contexts:
        spans = spans_with_context(windows_K, half, context)
        bits_KN = np.concatenate(score(spans)).reshape(len(windows_K), half)
        bits_LK.append(bits_KN.mean(1))
        bits, error = estimate(bits_LK[-1])
        gain, gain_error = estimate(bits_LK[-1] - bits_LK[0])
        row = {"context": [context, 2 * context - 1], "bits": bits, "error": error}
        rows.append({**row, "gain": gain, "gain_error": gain_error})
    return rows


def contexts_of(half: int) -> list[int]:
    """Return the contexts that are tried: half a window, a quarter, and so on."""
    contexts = []
    for halvings in range(CONTEXTS):
        context = half >> halvings
        if context >= LEAST_CONTEXT:
            contexts.append(context)
    return contexts


def spans_with_context(windows_K: Sequence[Window], half: int, context: int) -> list[Window]:
    """Return spans that together score the second half of each window.

    Each scores up to `context` units, and starts `context` units before them.
    """
    spans = []
    for window in windows_K:
        for first in range(window.stop - half, window.stop, context):
            stop = min(first + context, window.stop)
            spans.append(Window(first - context, stop, first))
    return spans


def price(
    model: nn.Module,
    tokens: np.ndarray,
    windows_K: Sequence[Window],
    positions: np.ndarray,
    on_progress: Progress = lambda done, total: None,
    starts: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Return the bits of windows at some positions in three readings, float64 `[K, P]` each.

    - Teacher-forced: one pass over the whole window, as published scores are.
    - Prefix rerun: the model runs on the units up to each position alone, so that no later unit
      exists.
    - Streaming: every selection is made when a unit arrives, and never revised.

    For patterns that see no future all agree. The gain of teacher-forcing is net: later positions
    also take places from earlier ones, which a rerun's prefix does not share.

    Args:
        positions: `[K, P]`, or `[P]` for the same ones in all windows.
        starts: where documents start, if units are predicted from their document alone.
    """
    bits_of = partial(unit_bits, model, tokens, starts=starts)
    positions_KP = np.broadcast_to(positions, (len(windows_K), positions.shape[-1]))
    prefixes = []
    for window, positions_P in zip(windows_K, positions_KP.tolist(), strict=True):
        for position in positions_P:
            last = window.start + position
            prefixes.append(Window(window.start, last + 1, last))
    rerun = np.concatenate(bits_of(prefixes, on_progress=on_progress))
    whole_KN = np.stack(bits_of(windows_K))
    streamed_KN = np.stack(bits_of(windows_K, streaming=True))
    return {
        TEACHER_FORCED: np.take_along_axis(whole_KN, positions_KP, axis=1),
        RERUN: rerun.reshape(positions_KP.shape),
        STREAMING: np.take_along_axis(streamed_KN, positions_KP, axis=1),
    }


def differences(bits_of: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Return `DIFFERENCES` in bits, paired by position, with standard errors.

    `over_positions` takes positions as independent; `over_windows` takes the means of windows,
    whose positions may move together. An error over a single value is None.

    Args:
        bits_of: what `price` returns.
    """
    results = {}
    for name, (more, less) in DIFFERENCES.items():
        bits_KP = bits_of[more] - bits_of[less]
        bits, over_positions = estimate(bits_KP.ravel())
        _, over_windows = estimate(bits_KP.mean(axis=1))
        results[name] = {
            "bits": bits,
            "over_positions": over_positions,
            "over_windows": over_windows,
        }
    return results
