"""`rtx analyze context RUN`: loss by position in the window, and what the same units gain from farther context.

Shapes: K windows, N units of a window.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rtx.analysis.context import bin_edges, contexts, spans_with
from rtx.analysis.spans import Span, standard_error, unit_nats
from rtx.commands.analyze import keep
from rtx.config import Config
from rtx.data.windows import windows
from rtx.errors import UserError
from rtx.evaluation.scores import sample_windows
from rtx.identity import short_hash
from rtx.options import read_words
from rtx.progress_bar import progress_bar
from rtx.report.summary import WIDTH, protocol_line, sees_future
from rtx.sets import IMAGE_SETS
from rtx.training.inference import LoadedRun, open_run, run_config
from rtx.training.run_folder import utc_now


def main(arguments: list[str]) -> int:
    """Run `rtx analyze context RUN [overrides]`; the figures stand in the run's `analysis/`.

    Raises:
        UserError: no such run, a wrong option, a run on data=recall, a split shorter than a window.
        RunFailed: no checkpoint is whole, or the result cannot be written.
    """
    words = read_words("analyze context", arguments)
    folder, options = words.runs[0], words.options
    config = run_config(folder, words.overrides)
    mode, length = options.mode, config.data.length
    if config.data.name == "recall":
        raise UserError("a run on data=recall scores its answers alone; there is no loss by position")
    run, store = open_run(folder, config, options.checkpoint)
    tokens = store.split(options.split)
    if len(tokens) < length:
        raise UserError(f"split {options.split} has {len(tokens):,} units: fewer than data.length={length:,}")
    # Whole windows alone: one that ends with the split would score again what the one before it scored.
    every = windows(len(tokens) // length * length, length)
    chosen = sample_windows(every, options.windows, options.seed)
    partial, left_out = len(chosen) < len(every), len(tokens) - every.units
    began = time.monotonic()
    bits_KN, gains = scored(run, tokens, [window.start for window in chosen], mode)
    protocol = protocol_line(
        dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, val_stride=None)),
        *(options.split, store.unit, bits_KN.size),
        mode=mode,
        partial=partial,
        other_data="" if run.has_data(store) else store.name,
        stamps=[f"the split's last {left_out:,} left out"] if left_out and not partial else [],
    )
    result = {
        "what": "context",
        "unit": store.unit,
        "positions": by_position(bits_KN, options.bins),
        "gains": gains,
        "no_gains": "" if gains else why_none(config),
        "windows": len(bits_KN),
        "partial": partial,
        "left_out": left_out,
        "length": length,
        "split": options.split,
        "mode": mode,
        "selection_sees_future": sees_future(config, mode),
        "protocol": protocol,
        "checkpoint": run.facts(),
        "data": store.describe(),
        "analyze": dataclasses.asdict(options),
        "seconds": time.monotonic() - began,
        "time": utc_now(),
    }
    print("\n".join(table(result)))
    asked = {"analyze": result["analyze"], "bins": len(result["positions"]), "data": store.fingerprint}
    name = f"context-{options.split}-{mode}-N{length}-{len(bits_KN)}windows-{run.name}-step{run.checkpoint['step']}"
    keep(folder / "analysis" / f"{name}-{short_hash(asked)}.json", result)
    return 0


def scored(
    run: LoadedRun, tokens: np.ndarray, starts: Sequence[int], mode: str
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Return the bits of every unit of the windows `[K, N]`, and a row for each level of context; none of images."""
    config, length = run.config, run.config.data.length
    whole = sees_future(config, mode)
    levels = contexts(length)[1:] if config.data.name not in IMAGE_SETS else []
    plans = [[spans_with(level, start, length, whole) for start in starts] for level in levels]
    # A window at the end of the split has nothing behind it to make shifted windows whole.
    fits_K = np.array([all(span.stop <= len(tokens) for plan in plans for span in plan[k]) for k in range(len(starts))])
    first = [Span(start, start + length, start, start + length) for start in starts]
    shifted = {span for plan in plans for k in np.flatnonzero(fits_K) for span in plan[k]}
    spans = first + sorted(shifted - set(first), key=lambda span: (span.stop - span.start, span))
    with run.autocast(), progress_bar("spans") as show:
        found = unit_nats(
            run.model, tokens, spans, streaming=mode == "streaming", on_progress=lambda n: show(n, len(spans))
        )
    bits = {span: nats_N / math.log(2) for span, nats_N in zip(spans, found, strict=True)}
    bits_KN = np.stack([bits[span] for span in first])
    if not levels or not fits_K.any():
        return bits_KN, []
    means = [bits_KN[fits_K, -(length // 2) :].mean(1)]
    for plan in plans:
        means.append(
            np.array([np.concatenate([bits[span] for span in plan[k]]).mean() for k in np.flatnonzero(fits_K)])
        )
    return bits_KN, [gain_row(level, bits_K, means[0]) for level, bits_K in zip(contexts(length), means, strict=True)]


def gain_row(context: int, bits_K: np.ndarray, whole_K: np.ndarray) -> dict[str, Any]:
    """Return the bits of one level of context, and what the whole window gains over it."""
    gain_K = bits_K - whole_K
    return {
        "context": [context, 2 * context - 1],
        "bits": float(bits_K.mean()),
        "error": standard_error(bits_K),
        "gain": float(gain_K.mean()),
        "gain_error": standard_error(gain_K),
        "windows": len(bits_K),
    }


def by_position(bits_KN: np.ndarray, bins: int) -> list[dict[str, Any]]:
    """Return the bits of each range of positions."""
    rows = []
    for first, stop in itertools.pairwise(bin_edges(bits_KN.shape[1], bins)):
        bits_K = bits_KN[:, first:stop].mean(1)
        rows.append({"first": first, "last": stop - 1, "bits": float(bits_K.mean()), "error": standard_error(bits_K)})
    return rows


def why_none(config: Config) -> str:
    """Return why nothing can be said of the gain from far context."""
    if config.data.name in IMAGE_SETS:
        return "a part of an image at another place is no image"
    if len(contexts(config.data.length)) < 2:
        return f"windows of {config.data.length} are too short to leave context out"
    return (
        "selection sees the future, so shifted windows must be whole, and the split has no room for them; try another "
        "split, or mode=streaming"
    )


def table(result: Mapping[str, Any]) -> list[str]:
    """Return the lines that are printed."""
    unit = result["unit"]
    lines = [f"bits/{unit} by position, mean ± standard error over {result['windows']:,} windows"]
    lines.append(f"{'positions':>15}  bits")
    for row in result["positions"]:
        lines.append(f"{between(row['first'], row['last']):>15}  {figure(row['bits'], row['error'])}")
    lines.append("")
    if not result["gains"]:
        lines += textwrap.wrap(f"no gain from far context: {result['no_gains']}", WIDTH)
        return lines + textwrap.wrap(result["protocol"], WIDTH)
    said = (
        f"the same {unit}s, those of the second half of {result['gains'][0]['windows']:,} windows, with less context; "
        "gain: what they lose by it, paired"
    )
    lines += [*textwrap.wrap(said, WIDTH), f"{'units before':>15}  {'bits':<17}  gain of the whole window"]
    for row in result["gains"]:
        gain = "-" if row is result["gains"][0] else figure(row["gain"], row["gain_error"], "+")
        lines.append(f"{between(*row['context']):>15}  {figure(row['bits'], row['error']):<17}  {gain}")
    return lines + textwrap.wrap(result["protocol"], WIDTH)


def between(first: int, last: int) -> str:
    """Return a range of whole numbers."""
    return f"{first:,}-{last:,}" if last > first else f"{first:,}"


def figure(value: float, error: float | None, sign: str = "") -> str:
    """Return a value with its standard error."""
    return f"{value:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")
