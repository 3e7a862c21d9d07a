"""Loss by position: what farther context gives the same units, and what it is worth in bits to see the future.

Shapes: K windows, B spans of a batch, N units of a window or span, P positions scored in each window.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rtx.errors import RunFailed
from rtx.evaluation.protocols import Window
from rtx.evaluation.scores import equal_batches, read_windows

CONTEXTS, LEAST_CONTEXT = (
    8,
    8,
)  # how many contexts are tried, each half of the one before, and the shortest
TEACHER_FORCED, RERUN, STREAMING = "teacher-forced", "prefix rerun", "streaming"
DIFFERENCES = {
    "leak_gives": (RERUN, TEACHER_FORCED),
    "competing_costs": (STREAMING, RERUN),
    "together": (STREAMING, TEACHER_FORCED),
}
"""The first minus the second, in bits: what teacher-forcing gains by the future; what a stream loses to a rerun."""

Progress = Callable[[int, int], None]  # called with how many are done, and how many there are


@torch.no_grad()
def unit_bits(
    model: nn.Module,
    tokens: np.ndarray,
    spans: Sequence[Window],
    *,
    streaming: bool = False,
    on_progress: Progress = lambda done, total: None,
) -> list[np.ndarray]:
    """Return the bits of every scored unit of each span, float64; `RunFailed` where they are no numbers.

    The `model`, in evaluation mode, has `loss(tokens_BN, prefix=...) -> (nats_BN, auxiliary)`. `tokens`: the split,
    unsigned integers `[units]`; `streaming`: decisions from the prefix alone, instead of teacher-forced.
    """
    device, found = next(model.parameters()).device, {}
    ordered = sorted(spans, key=lambda span: span.stop - span.start)
    for batch in equal_batches(ordered, None):
        tokens_BN, skipped_B = read_windows(tokens, [ordered[k] for k in batch])
        nats_BN, _ = model.loss(tokens_BN.to(device), streaming=streaming)  # type: ignore[operator]
        if not bool(nats_BN.isfinite().all()):
            raise RunFailed("the model gives nats that are no numbers: the run has diverged")
        bits_BN = (nats_BN.double() / math.log(2)).cpu().numpy()
        found |= {
            ordered[k]: bits_N[skipped:]
            for k, bits_N, skipped in zip(batch, bits_BN, skipped_B.tolist(), strict=True)
        }
        on_progress(batch[-1] + 1, len(spans))
    return [found[span] for span in spans]


def estimate(values: np.ndarray) -> tuple[float, float | None]:
    """Return the mean of independent values and its standard error, None for a single one."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return float(values.mean()), error


def by_position(bits_KN: np.ndarray, bins: int) -> list[dict[str, Any]]:
    """Return the bits of ranges of position, at most `bins` of about equal size: a mean over windows and its error."""
    rows = []
    for part in np.array_split(np.arange(bits_KN.shape[1]), min(bins, bits_KN.shape[1])):
        bits, error = estimate(bits_KN[:, part].mean(1))
        rows.append({"first": int(part[0]), "last": int(part[-1]), "bits": bits, "error": error})
    return rows


def by_context(
    score: Callable[[Sequence[Window]], list[np.ndarray]], windows_K: Sequence[Window]
) -> list[dict[str, Any]]:
    """Return the bits of the second half of windows with ever less context, and what half a window gains over it.

    At each level a unit has from `context` to 2 * `context` - 1 others before it. What lies behind it is left out, so
    the selection must not see the future. Gains are paired by window. Windows that are too short have no row.

    `score` returns the bits of every scored unit of each span.
    """
    half, bits_LK, rows = (windows_K[0].stop - windows_K[0].start) // 2, [], []
    levels = [half >> halved for halved in range(CONTEXTS) if half >> halved >= LEAST_CONTEXT]
    for context in levels if len(levels) > 1 else ():
        firsts = [range(stop - half, stop, context) for _, stop, _ in windows_K]
        spans = [Window(n - context, min(n + context, of.stop), n) for of in firsts for n in of]
        bits_LK.append(np.concatenate(score(spans)).reshape(len(windows_K), half).mean(1))
        (bits, error), (gain, gain_error) = (
            estimate(bits_LK[-1]),
            estimate(bits_LK[-1] - bits_LK[0]),
        )
        row = {"context": [context, 2 * context - 1], "bits": bits, "error": error}
        rows.append({**row, "gain": gain, "gain_error": gain_error})
    return rows


def price(
    model: nn.Module,
    tokens: np.ndarray,
    windows_K: Sequence[Window],
    positions: np.ndarray,
    on_progress: Progress = lambda done, total: None,
) -> dict[str, np.ndarray]:
    """Return the bits of some windows at positions, `[K, P]` or for all alike `[P]`, in three ways, float64 `[K, P]`.

    Teacher-forced, in one pass over the whole window, as published scores are; by prefix rerun, the model run on the
    units up to each position alone, so that nothing behind it exists; and streaming, where every decision is made on
    arrival and never revised. For patterns that see no future all agree. What the leak gives is net: later positions
    also take places from earlier ones, which a rerun's prefix has to itself.
    """
    positions_KP = np.broadcast_to(positions, (len(windows_K), positions.shape[-1]))
    pairs = zip(windows_K, positions_KP.tolist(), strict=True)
    prefixes = [
        Window(start, start + p + 1, start + p) for (start, _, _), of_one in pairs for p in of_one
    ]
    rerun = np.concatenate(unit_bits(model, tokens, prefixes, on_progress=on_progress))
    whole, streamed = (
        np.stack(unit_bits(model, tokens, windows_K, streaming=how)) for how in (False, True)
    )
    return {
        TEACHER_FORCED: np.take_along_axis(whole, positions_KP, axis=1),
        RERUN: rerun.reshape(positions_KP.shape),
        STREAMING: np.take_along_axis(streamed, positions_KP, axis=1),
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
