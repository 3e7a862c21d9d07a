"""`rtx analyze context RUN`: loss by position in the window, and what the same units gain from farther context."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from rtx.analysis.context import bin_edges, contexts, spans_with
from rtx.analysis.spans import Span, standard_error, unit_nats
from rtx.commands.analyze import keep, save
from rtx.commands.eval import check_fingerprint, is_own
from rtx.config import Config
from rtx.data.catalog import Store, data_root, open_data
from rtx.data.windows import Window, windows
from rtx.errors import UserError
from rtx.evaluation.scores import sample_windows
from rtx.identity import short_hash
from rtx.options import ContextOptions, read_words
from rtx.report.context import context_chart, context_table
from rtx.report.summary import protocol_line, sees_future
from rtx.sets import IMAGE_SETS
from rtx.training.metrics import utc_now
from rtx.training.progress import Progress, clock
from rtx.training.trained import Trained, load_trained, run_config


def main(arguments: list[str]) -> int:
    """Run `rtx analyze context RUN [overrides]`; table, chart and figures stand in the run's `analysis/`.

    Raises:
        UserError: no such run, a wrong option, a run on data=recall, a split shorter than a window.
        RunFailed: no checkpoint is whole, or the result cannot be written.
    """
    words = read_words("analyze context", arguments)
    folder, wish = words.runs[0], words.options
    config = run_config(folder, words.overrides)
    if config.data.name == "recall":
        raise UserError("a run on data=recall scores its answers alone; there is no loss by position")
    store = open_data(config.data, data_root())
    trained = load_trained(folder, config, wish.checkpoint, store.vocabulary)
    check_fingerprint(store, trained)
    tokens, length = store.split(wish.split), config.data.length
    if len(tokens) < length:
        raise UserError(f"split {wish.split} has {len(tokens):,} units: fewer than data.length={length:,}")
    # Whole windows alone: one that ends with the split would score again what the one before it scored.
    every = windows(len(tokens) // length * length, length)
    chosen = list(sample_windows(every, wish.windows, wish.seed))
    begin = time.monotonic()
    bits_KN, gains = scored(trained, config, wish.mode, tokens, chosen)
    coverage = {"partial": len(chosen) < len(every), "left_out": len(tokens) - every.units}
    result = record(trained, store, wish, bits_KN, gains, **coverage) | {
        "seconds": time.monotonic() - begin,
        "time": utc_now(),
    }
    print("\n".join(context_table(result)))
    path = result_path(folder, result, store.fingerprint)
    save(path.with_suffix(".svg"), context_chart(result).encode())
    print(path.with_suffix(".svg"))
    keep(path, result)
    return 0


def record(
    trained: Trained,
    store: Store,
    wish: ContextOptions,
    bits_KN: np.ndarray,
    gains: list[dict[str, Any]],
    *,
    partial: bool,
    left_out: int,
) -> dict[str, Any]:
    """Return all that the figures mean.

    Args:
        bits_KN: of every unit of the windows.
        gains: a row for each level of context.
        partial: whether the windows are a sample of the split's whole windows.
        left_out: units at the split's end that make no whole window.
    """
    config = trained.config
    split, mode = wish.split, wish.mode
    tiled = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, val_stride=None))
    other = "" if is_own(store, trained) else store.name
    stamps = [f"the split's last {left_out:,} left out"] if left_out and not partial else []
    protocol = {"mode": mode, "partial": partial, "other_data": other, "stamps": stamps}
    return {
        "what": "context",
        "unit": store.unit,
        "positions": by_position(bits_KN, wish.bins),
        "gains": gains,
        "no_gains": "" if gains else why_none(config),
        "windows": len(bits_KN),
        "partial": partial,
        "left_out": left_out,
        "length": config.data.length,
        "split": split,
        "mode": mode,
        "selection_sees_future": sees_future(config, mode),
        "protocol": protocol_line(tiled, split, store.unit, int(bits_KN.size), **protocol),
        "checkpoint": {"name": trained.name, "step": trained.checkpoint["step"]},
        "data": store.describe(),
        "analyze": dataclasses.asdict(wish),
    }


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


def result_path(folder: Path, result: dict[str, Any], data: str) -> Path:
    """Return where a result is kept: of another split, mode or checkpoint, and asked otherwise, elsewhere."""
    checkpoint = result["checkpoint"]
    parts = ["context", result["split"], result["mode"], f"N{result['length']}", f"{result['windows']}windows"]
    parts += [checkpoint["name"], f"step{checkpoint['step']}"]
    wish = short_hash({"analyze": result["analyze"], "bins": len(result["positions"]), "data": data})
    return folder / "analysis" / f"{'-'.join(parts)}-{wish}.json"


def scored(
    trained: Trained, config: Config, mode: str, tokens: np.ndarray, chosen: list[Window]
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Return the bits of every unit of the windows `[K, N]`, and a row for each level of context; none of images."""
    length, streaming = config.data.length, mode == "streaming"
    whole = sees_future(config, mode)
    levels = contexts(length)[1:] if config.data.name not in IMAGE_SETS else []
    starts = [window.start for window in chosen]
    plans = [[spans_with(level, start, length, whole) for start in starts] for level in levels]
    # A window at the end of the split has nothing behind it to make shifted windows whole.
    fits = [all(span.stop <= len(tokens) for plan in plans for span in plan[k]) for k in range(len(starts))]
    first = [Span(start, start + length, start, start + length) for start in starts]
    kept = [[spans for spans, fit in zip(plan, fits, strict=True) if fit] for plan in plans if any(fits)]
    total = sum(span.stop - span.start for span in first)
    total += sum(span.stop - span.start for plan in kept for spans in plan for span in spans)
    meter = Meter(total)
    with trained.arithmetic():
        bits_KN = np.stack(unit_nats(trained.model, tokens, first, streaming=streaming, on_progress=meter.of(first)))
        bits_KN /= math.log(2)
        near = [bits_KN[k, -(length // 2) :].mean() for k, fit in enumerate(fits) if fit]
        rows = [np.array(near)] if near and levels else []
        for plan in kept:
            flat = sorted((span for spans in plan for span in spans), key=lambda span: span.stop - span.start)
            nats = unit_nats(trained.model, tokens, flat, streaming=streaming, on_progress=meter.of(flat))
            by_span = dict(zip(flat, nats, strict=True))
            bits = [np.concatenate([by_span[span] for span in spans]).mean() / math.log(2) for spans in plan]
            rows.append(np.array(bits))
    meter.line.clear()
    return bits_KN, [gain_row(level, bits_K, rows[0]) for level, bits_K in zip(contexts(length), rows, strict=False)]


class Meter:
    """A progress line that counts units read."""

    def __init__(self, total: int) -> None:
        self.line, self.total, self.before, self.begin = Progress(sys.stderr), total, 0, time.monotonic()

    def of(self, spans: list[Span]) -> Any:
        """Return what shows the progress of some spans behind those before."""
        start, sizes = self.before, np.cumsum([span.stop - span.start for span in spans])
        self.before += int(sizes[-1])

        def show(done: int) -> None:
            share = (start + int(sizes[done - 1])) / self.total
            left = (time.monotonic() - self.begin) * (1 / share - 1)
            self.line.show(f"{share:.0%} | {clock(left)} left")

        return show


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
        figures = {"bits": float(bits_K.mean()), "error": standard_error(bits_K)}
        rows.append({"first": first, "last": stop - 1, **figures})
    return rows
