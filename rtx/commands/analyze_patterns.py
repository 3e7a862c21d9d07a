"""`rtx analyze patterns RUN`: which positions the heads of a run read in one sequence, as a table and one picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rtx.analysis.reading import Reading, heads_of, layer_inputs, read_heads
from rtx.commands.analyze import keep, save
from rtx.config import Config
from rtx.data.catalog import Store
from rtx.data.windows import windows
from rtx.errors import UserError
from rtx.identity import short_hash
from rtx.options import PatternsOptions, read_words
from rtx.progress_bar import progress_bar
from rtx.report.maps import SIDE, attention_map, png, sheet
from rtx.report.patterns import patterns_table, row_of
from rtx.sets import IMAGE_SETS
from rtx.training.inference import LoadedRun, open_run, run_config
from rtx.training.run_folder import utc_now

Found = dict[tuple[int, int], tuple[str, Reading]]
"""By layer, 0 the lowest, and number of the head in the layer: its group, and what it reads."""


def main(arguments: list[str]) -> int:
    """Run `rtx analyze patterns RUN [overrides]`; picture and figures stand in the run's `analysis/`.

    Raises:
        UserError: no such run, layer, head or place in the split, or a wrong option.
        RunFailed: no checkpoint is whole, or the picture cannot be written.
    """
    words = read_words("analyze patterns", arguments)
    folder, options = words.runs[0], words.options
    config = run_config(folder, words.overrides)
    layers = numbers(options.layer, "layer", config.model.layers) or [config.model.layers - 1]
    heads = numbers(options.head, "head", config.model.heads) or list(range(config.model.heads))
    run, store = open_run(folder, config, options.checkpoint)
    start, units_N = sequence(options, config, store)
    found, at_P = read(run, units_N, layers, heads), map_rows(len(units_N))
    rows = [row_of(*at, group, one.weight_PN.numpy(), at_P) for at, (group, one) in found.items()]
    print("\n".join(patterns_table(rows)))
    asked = short_hash({"layers": layers, "heads": heads, "units": units_N.tolist()})
    name = f"patterns-{run.name}-step{run.checkpoint['step']}-{options.split}{start}-{asked}"
    picture = folder / "analysis" / f"{name}.png"
    save(picture, png(sheet([[map_of(found[layer, head][1], at_P) for head in heads] for layer in layers])))
    print(f"{picture}: a row for each layer, a column for each head; rows of a map are queries, columns keys")
    keep(picture.with_suffix(".json"), record(run, options, start, len(units_N), rows))
    return 0


def numbers(value: str | None, name: str, count: int) -> list[int]:
    """Return the numbers below `count`, ascending, that a key joins by +; none where it is unset, else `UserError`."""
    if value is None:
        return []
    parts = str(value).split("+")
    if not all(part.isdecimal() and int(part) < count for part in parts):
        raise UserError(f"{name}={value}: must be numbers from 0 to {count - 1}, joined by +")
    return sorted({int(part) for part in parts})


def sequence(options: PatternsOptions, config: Config, store: Store) -> tuple[int, np.ndarray]:
    """Return where the sequence begins, the unit of the split or the number of the image, and its units, int64 `[N]`.

    Raises:
        UserError: the split has no such place.
    """
    split, length = options.split, config.data.length
    tokens = store.split(split)
    step = length if config.data.name in IMAGE_SETS else 1
    last = max(0, len(tokens) - length) // step
    start = options.start
    if start is None:
        every = windows(len(tokens), length)
        start = every[int(np.random.default_rng(options.seed).integers(len(every)))].start // step
    if start > last:
        what = "image" if step > 1 else f"unit that {length:,} units can begin with"
        raise UserError(f"start={start}: in split {split} the last {what} is {last}")
    return start, np.asarray(tokens[start * step : start * step + length]).astype(np.int64)


def map_rows(length: int) -> np.ndarray:
    """Return the positions that the rows of a map show, evenly spaced."""
    return np.linspace(0, length - 1, min(SIDE, length)).round().astype(np.int64)


def read(run: LoadedRun, units_N: np.ndarray, layers: Sequence[int], heads: Sequence[int]) -> Found:
    """Return what the chosen heads of the chosen layers read at the positions that the rows of a map show."""
    at_P, found = torch.from_numpy(map_rows(len(units_N))), {}
    ids_1N = torch.from_numpy(units_N)[None].to(run.device)
    with run.autocast(), torch.no_grad(), progress_bar("layers") as show:
        for layer, (attention, x_1NE) in enumerate(layer_inputs(run.model, ids_1N)):
            if layer in layers:
                every = [(group, head) for group, count in heads_of(attention).items() for head in range(count)]
                readings = read_heads(attention, x_1NE, at_P, {every[number] for number in heads})
                found |= {(layer, number): (every[number][0], readings[every[number]]) for number in heads}
            show(layer + 1, max(layers) + 1)
            if layer == max(layers):
                break
    return found


def map_of(reading: Reading, at_P: np.ndarray) -> np.ndarray:
    """Return the picture of what a head reads."""
    return attention_map(reading.weight_PN.numpy(), reading.cluster_PN.numpy(), at_P, reading.clusters)


def record(
    run: LoadedRun, options: PatternsOptions, start: int, positions: int, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the figures with how they came about."""
    return {
        "what": "patterns",
        "start": start,
        "positions": positions,
        "heads": rows,
        "checkpoint": run.facts(),
        "data": run.checkpoint["data"],
        "analyze": dataclasses.asdict(options),
        "time": utc_now(),
    }
