"""`rtx analyze patterns RUN`: which positions the heads of a run read in one sequence, as pages, pictures and maps."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rtx.analysis.reading import Head, Reading, heads_of, layer_inputs, read_heads
from rtx.commands.analyze import keep, save
from rtx.commands.eval import check_fingerprint
from rtx.commands.sample import tokenizer_of
from rtx.config import Config
from rtx.data.catalog import data_root, open_data
from rtx.data.imageset import image_shape
from rtx.data.tokenizers import encode_text
from rtx.data.windows import windows
from rtx.errors import UserError
from rtx.identity import short_hash
from rtx.model.multihead import MultiheadAttention
from rtx.model.patterns import ROUTED
from rtx.options import PatternsOptions, read_words
from rtx.report.attention_page import Sheet, Text, attention_page
from rtx.report.maps import SIDE, attention_map, png, read_on_image, shades, sheet
from rtx.report.patterns import patterns_table, row_of, shown_units
from rtx.sets import IMAGE_SETS
from rtx.training.metrics import utc_now
from rtx.training.progress import Progress
from rtx.training.trained import Trained, load_trained, run_config

IMAGE_POSITIONS = 4


@dataclass(frozen=True)
class Sequence:
    """What is looked at."""

    units_N: np.ndarray
    said: str
    """Where it is from, in words."""
    name: str
    """The same for names of files; what follows it there tells texts of the user's apart."""


def main(arguments: list[str]) -> int:
    """Run `rtx analyze patterns RUN [overrides]`; everything it draws stands in a folder of the run's `analysis/`.

    Raises:
        UserError: no such run, layer, head, position or image, or a wrong option.
        RunFailed: no checkpoint is whole, or the pictures cannot be written.
    """
    words = read_words("analyze patterns", arguments)
    folder, wish = words.runs[0], words.options
    config = run_config(folder, words.overrides)
    layers = numbers(wish, "layer", config.model.layers) or [config.model.layers - 1]
    heads = numbers(wish, "head", config.model.heads) or list(range(config.model.heads))
    if wish.text and wish.start is not None:
        raise UserError("start chooses a place in the split, text a text of its own: say one of them")
    trained, sequence = opened(folder, config, wish)
    at = numbers(wish, "at", len(sequence.units_N))
    begin = time.monotonic()
    is_image = config.data.name in IMAGE_SETS
    asked_P = asked_positions(config, wish.asked, at, len(sequence.units_N))
    asked = {"layers": layers, "heads": heads, "at": at, "positions": asked_P.tolist()}
    place = result_folder(folder, trained, sequence, asked)
    rows, sheets = [], []
    for layer, readings in read(trained, sequence, layers, heads, asked_P):
        for (group, head), reading in readings.items():
            rows.append(row_of(layer, group, head, reading.weight_PN.numpy(), reading.at_P.numpy()))
            save(place / f"map-layer{layer}-head{head}.png", png(map_of(reading, len(sequence.units_N))))
            kind = f"routing, {config.routing.selection}" if group == ROUTED else group
            sheets.append(sheet_of(layer, f"head {head}: {kind}", reading, asked_P))
        if is_image:
            image = image_shape(config.data, trained.checkpoint["data"])
            save(place / f"image-layer{layer}.png", png(on_image(readings, sequence, image, asked_P)))
    print("\n".join(patterns_table(rows)))
    print(f"{place}/map-layer*-head*.png: rows are queries, columns keys")
    if is_image:
        print(f"{place}/image-layer*.png: a row for each head")
        print(f"columns for positions {', '.join(map(str, asked_P))}; the framed pixel is predicted")
    else:
        write_page(place / "page.html", folder, trained, sheets, sequence, asked_P, at)
    keep(place / "patterns.json", record(trained, wish, sequence, rows) | {"seconds": time.monotonic() - begin})
    return 0


def result_folder(folder: Path, trained: Trained, sequence: Sequence, asked: dict[str, Any]) -> Path:
    """Return where everything is kept: of another checkpoint or sequence, and asked otherwise, elsewhere."""
    wish = short_hash({**asked, "units": sequence.units_N.tolist()})
    return folder / "analysis" / f"patterns-{trained.name}-step{trained.checkpoint['step']}-{sequence.name}-{wish}"


def record(trained: Trained, wish: PatternsOptions, sequence: Sequence, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures with how they came about."""
    return {
        "what": "patterns",
        "sequence": sequence.said,
        "positions": len(sequence.units_N),
        "heads": rows,
        "checkpoint": {"name": trained.name, "step": trained.checkpoint["step"]},
        "data": trained.checkpoint["data"],
        "analyze": dataclasses.asdict(wish),
        "time": utc_now(),
    }


def numbers(wish: PatternsOptions, name: str, count: int) -> list[int]:
    """Return the numbers, ascending, that `name` joins by +; none where it is unset.

    Raises:
        UserError: something else, or a number that is not below `count`.
    """
    value = getattr(wish, name)
    if value is None:
        return []
    parts = str(value).split("+")
    if not all(part.isdecimal() and int(part) < count for part in parts):
        raise UserError(f"{name}={value}: must be numbers from 0 to {count - 1}, joined by +")
    found = list(dict.fromkeys(int(part) for part in parts))
    return found if name == "at" else sorted(found)


def opened(folder: Path, config: Config, wish: PatternsOptions) -> tuple[Trained, Sequence]:
    """Return the trained model and the sequence that is looked at."""
    length = config.data.length
    if wish.text:
        if config.data.name in IMAGE_SETS or config.data.name == "recall":
            raise UserError(f"text has no place in a run on data={config.data.name}, which has no text")
        trained = load_trained(folder, config, wish.checkpoint)
        units_N = encode_text(tokenizer_of(folder, trained), wish.text)
        if not 2 <= len(units_N) <= length:
            raise UserError(f"text has {len(units_N)} units: must have from 2 to data.length={length}")
        return trained, Sequence(units_N, "a text of the user's", "text")
    store = open_data(config.data, data_root())
    trained = load_trained(folder, config, wish.checkpoint, store.vocabulary)
    check_fingerprint(store, trained)
    split = wish.split
    tokens = store.split(split)
    images = config.data.name in IMAGE_SETS
    last = len(tokens) // length - 1 if images else max(0, len(tokens) - length)
    start = wish.start
    if start is None:
        drawn = np.random.default_rng(wish.seed).integers(len(windows(len(tokens), length)))
        start = int(drawn) if images else windows(len(tokens), length)[int(drawn)].start
    if start > last:
        what = f"image of split {split}" if images else f"unit that {length:,} units of split {split} can begin with"
        raise UserError(f"start={start}: the last {what} is {last}")
    first = start * length if images else start
    units_N = np.asarray(tokens[first : first + length]).astype(np.int64)
    said = f"image {start} of split {split}" if images else f"split {split} from unit {start:,} on"
    return trained, Sequence(units_N, said, f"{split}{start}")


def asked_positions(config: Config, asked: int, at: list[int], length: int) -> np.ndarray:
    """Return the positions that are looked at: around one of a text, those asked for of an image; int64, ascending."""
    if config.data.name in IMAGE_SETS:
        spread = [length * part // (IMAGE_POSITIONS + 1) for part in range(1, IMAGE_POSITIONS + 1)]
        return np.array(sorted(at) or spread)
    count = min(asked, length)
    middle = at[0] if at else length - 1
    first = min(max(0, middle - count // 2), length - count)
    return np.arange(first, first + count)


def read(
    trained: Trained, sequence: Sequence, layers: list[int], heads: list[int], asked_P: np.ndarray
) -> Iterator[tuple[int, dict[Head, Reading]]]:
    """Yield each chosen layer with what its chosen heads read: by group, and number among the heads of the layer.

    They are read at the positions asked for, and at those that the rows of a map show.
    """
    length = len(sequence.units_N)
    at_P = torch.from_numpy(np.union1d(asked_P, map_rows(length)))
    tokens_1N = torch.from_numpy(sequence.units_N)[None].to(trained.model.output_VS.device)
    progress = Progress(sys.stderr)
    with trained.arithmetic(), torch.no_grad():
        for layer, (attention, x_1NE) in enumerate(layer_inputs(trained.model, tokens_1N)):
            if layer in layers:
                progress.show(f"{layers.index(layer)}/{len(layers)} layers", force=True)
                named = names(attention, heads)
                readings = read_heads(attention, x_1NE, at_P, set(named))
                yield layer, {(name[0], number): readings[name] for name, number in named.items()}
            if layer == max(layers):
                break
    progress.clear()


def map_rows(length: int) -> np.ndarray:
    """Return the positions that the rows of a map show, evenly spaced."""
    return np.linspace(0, length - 1, min(SIDE, length)).round().astype(np.int64)


def names(attention: MultiheadAttention, heads: list[int]) -> dict[Head, int]:
    """Return the chosen heads of a layer in order, each with its number in the layer."""
    every = [(name, head) for name, count in heads_of(attention).items() for head in range(count)]
    return {name: number for number, name in enumerate(every) if number in heads}


def map_of(reading: Reading, length: int) -> np.ndarray:
    """Return a head's map, of evenly spaced positions of the whole sequence."""
    rows_P = map_rows(length)
    at = np.searchsorted(reading.at_P.numpy(), rows_P)
    return attention_map(reading.weight_PN.numpy()[at], reading.cluster_PN.numpy()[at], rows_P, reading.clusters)


def sheet_of(layer: int, name: str, reading: Reading, asked_P: np.ndarray) -> Sheet:
    """Return what the page shows of a head."""
    at = np.searchsorted(reading.at_P.numpy(), asked_P)
    shade_PN = shades(reading.weight_PN.numpy()[at])
    return Sheet(layer, name, shade_PN, reading.cluster_PN.numpy()[at], reading.clusters)


def on_image(
    readings: dict[Head, Reading], sequence: Sequence, image: tuple[int, int], asked_P: np.ndarray
) -> np.ndarray:
    """Return a picture of a layer: a row for each head, a column for each position asked for."""
    rows = []
    for reading in readings.values():
        cells = []
        for position in asked_P:
            p = int(np.searchsorted(reading.at_P.numpy(), position))
            weight_N, cluster_N = reading.weight_PN[p].numpy(), reading.cluster_PN[p].numpy()
            given = (sequence.units_N, image, weight_N, cluster_N, int(position), reading.clusters)
            cells.append(read_on_image(*given))
        rows.append(cells)
    return sheet(rows)


def write_page(
    path: Path,
    folder: Path,
    trained: Trained,
    sheets: list[Sheet],
    sequence: Sequence,
    asked_P: np.ndarray,
    at: list[int],
) -> None:
    """Write the page that answers for each of the positions asked for."""
    config, length = trained.config, len(sequence.units_N)
    if config.data.name == "recall":  # its units are numbers; those of an answer are what is scored
        unit, units = "unit", [f"{number} " for number in sequence.units_N]
    else:
        unit = trained.checkpoint["data"]["unit"]
        units = shown_units(tokenizer_of(folder, trained), sequence.units_N)
    text = Text(units, int(asked_P[0]), at[0] if at else length - 1, unit)
    lines = [
        f"{folder.name}, {trained.name}.ckpt, step {trained.checkpoint['step']:,}; {sequence.said}, {length:,} "
        f"{text.unit}s, one teacher-forced pass.",
        "Tap a unit: marked is what the position that predicts it reads, in the colour of the cluster; the stronger "
        "the colour, the more weight (each shade doubles it). A position holds the unit before the one it predicts, "
        "the first one ⊢. Units in full ink can be asked about.",
    ]
    page, answered = attention_page(
        f"What the heads of {folder.resolve().parent.name}/{folder.resolve().name} read", lines, text, sheets
    )
    save(path, page.encode())
    print(f"{path}: answers for positions {answered[0]:,} to {answered[-1]:,}")
    if len(answered) < len(asked_P):
        print(f"{len(asked_P):,} positions of {len(sheets)} heads would be too much for a page; head= chooses fewer")
