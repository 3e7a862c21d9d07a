"""`rtx analyze pretrained`: what selections cost in a model of transformers, and what they keep.

Shapes: N tokens of a window, B windows, Y layers, H heads.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtx.analysis.loss_by_position import estimate
from rtx.analysis.pretrained import Compared, Coverage, Scores, memory_needed, pairs_scored
from rtx.cli.options import PretrainedOptions
from rtx.cli.request import Request
from rtx.commands.analyses.common import Result
from rtx.data.catalog import data_root, open_data
from rtx.data.store import Store
from rtx.errors import UserError, listed, nearest, plural
from rtx.hf.choice import NAMES, PER, ROTARY, Choice
from rtx.hf.loading import (
    Origin,
    count_parameters,
    load_model,
    load_tokenizer,
    origin_of,
    read_config,
)
from rtx.machine import memory_bytes
from rtx.progress import clock, progress_bar, say
from rtx.report import drawing
from rtx.runs.folder import outputs_root, save, unwritable
from rtx.runs.status import utc_now
from rtx.settings.identity import short_hash
from rtx.settings.requirements import precision_on
from rtx.tables import Column, print_table
from rtx.training.inference import prepare_device
from rtx.training.passes import WEIGHT_TYPES

SPLITS = ("train", "valid", "test")
"""The order in which the splits of a data set make its text."""
BYTES_OF_TOKEN = 16
"""Bytes of text, or tokens of the data set, that are read for a token of the model."""
TIMED = 256
"""Tokens of the pass that is timed before the analysis."""
GIB = 2**30
SELECTIONS = tuple(name for name in NAMES if name not in ("none", "next"))
"""What `selection` may name; the others are in every table."""
COLOURS = {
    "exact": "#000000",
    "probed": "#d55e00",
    "blocks": "#7d4fa3",
    "next": "#0072b2",
    "causal": "#009e73",
    "lsh": "#e69f00",
    "random": "#cc79a7",
}
"""Of the lines of the plot; others are grey."""

COLUMNS = (
    Column("label", "further keys"),
    Column("k", "k"),
    Column("above", "bits above dense", 4, "error"),
    Column("late", "second half", 4, "late_error"),
    Column("kept", "far weight kept", 3, "kept_error"),
    Column("keys", "keys read", 1),
    Column("pairs", "pairs scored", 0),
)


def main(request: Request) -> int:
    """Run the analysis, print its table, and write its record and its plot."""
    options: PretrainedOptions = request.options
    choices = choices_of(options)
    device = prepare_device(request.config)
    precision = precision_on(request.config.hardware, device.type == "cuda")
    origin = origin_of(options.model)
    folder = result_folder(origin)
    cost = cost_before_loading(origin, device, options, choices)
    tokenizer = load_tokenizer(origin)
    store = open_data(request.config.data, data_root())
    tokens_BN = measured_windows(store, tokenizer, options).to(device)
    fit_BN = fitted_windows(store, tokenizer, options, choices)
    model = load_model(origin, device, WEIGHT_TYPES.get(precision, torch.float32))
    compared = Compared(model, choices)
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        say_cost(compared, tokens_BN, cost)
        if fit_BN is not None:
            compared.fit(fit_BN.to(device), options.fit_steps)
        measured = measure(compared, tokens_BN)
    result = result_of(measured, choices, options, bytes_of(tokens_BN, tokenizer))
    print_result(result)
    write_result({**result, **cost, "precision": precision}, request, store, folder)
    return 0


# What is compared.


def choices_of(options: PretrainedOptions) -> list[Choice]:
    """Return everything that is compared: local heads, longer windows, and each selection.

    Raises:
        UserError: a list with something else in it.
    """
    names = words("selection", options.selection, SELECTIONS)
    sizes = numbers("keys", options.keys, 1)
    pers = words("per", options.per, PER)
    rotaries = words("rotary", options.rotary, ROTARY)
    dense = numbers("dense_layers", options.dense_layers, 0)
    choices = [make_choice(options, selection="none")]
    choices += [make_choice(options, selection="next", keys=keys) for keys in sizes]
    for name, per, rotary, layers, keys in itertools.product(names, pers, rotaries, dense, sizes):
        choice = make_choice(
            options,
            selection=name,
            per=per,
            rotary=rotary,
            dense_layers=layers,
            keys=keys,
        )
        choices.append(choice)
    return choices


def make_choice(options: PretrainedOptions, **some: Any) -> Choice:
    """Return a choice by the options of the command and some others."""
    try:
        return Choice(
            window=options.window,
            sinks=options.sinks,
            clusters=options.clusters,
            candidates=options.candidates,
            block=options.block,
            rounds=options.rounds,
            buckets=options.buckets,
            length=options.length,
            seed=options.seed,
            **some,
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def words(name: str, text: str, allowed: Sequence[str]) -> list[str]:
    """Return the words of a list such as `exact,probed`."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in found:
        if word not in allowed:
            rule = f"must be one of {listed(allowed)}, or several with commas"
            raise UserError(f"{name}={text}: {word or 'nothing'!r} {rule}{nearest(word, allowed)}")
    return found


def numbers(name: str, text: str, least: int) -> list[int]:
    """Return the numbers of a list such as `32,64`, ascending."""
    found = set()
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < least:
            rule = f"must be numbers from {least} on, separated by commas"
            raise UserError(f"{name}={text}: {rule}")
        found.add(int(word))
    return sorted(found)


# What fits.


def cost_before_loading(
    origin: Origin,
    device: torch.device,
    options: PretrainedOptions,
    choices: Sequence[Choice],
) -> dict[str, int]:
    """Return the `parameters` of a model, and the bytes of `memory` that the analysis needs.

    Raises:
        UserError: the model does not fit the memory, its positions are fewer than a window has, or
            it is no causal decoder.
    """
    config = read_config(origin)
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is not None and options.length > most:
        raise UserError(f"length={options.length}: the model has {most} positions")
    parameters = count_parameters(origin, config)
    memory = memory_needed(config, parameters, options.length, options.fit_windows, choices)
    check_memory(memory, device, options)
    return {"parameters": parameters, "memory": memory}


def check_memory(needed: int, device: torch.device, options: PretrainedOptions) -> None:
    """Raise UserError where the machine or the GPU has less memory than is needed."""
    available = memory_bytes()
    what = "this machine"
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
        what = "the GPU"
    if needed > available:
        count = f"needs up to {needed / GIB:.1f} GiB in float32"
        less = f"length={options.length // 2} needs less"
        has = f"{what} has {available / GIB:.1f}"
        raise UserError(f"model={options.model}: {count}, and {has}; {less}")


def say_cost(compared: Compared, tokens_BN: Tensor, cost: dict[str, int]) -> None:
    """Print what the analysis will take."""
    B, N = tokens_BN.shape
    passes = B * (1 + len(compared.choices))
    seconds = passes * pass_seconds(compared, tokens_BN[:1])
    time_and_memory = f"at least about {clock(seconds)}, at most {cost['memory'] / GIB:.1f} GiB"
    model = f"{type(compared.model).__name__}, {cost['parameters']:,} parameters"
    say(f"{model}; {passes:,} passes over {N:,} tokens: {time_and_memory}")


def pass_seconds(compared: Compared, tokens_1N: Tensor) -> float:
    """Return about how long a pass over a window takes at least, by one over its start.

    It is one with local heads: other selections take time to choose.
    """
    start_1N = tokens_1N[:, :TIMED]
    local = compared.choices[0]
    began = time.monotonic()
    compared.score(start_1N, local)
    seconds = time.monotonic() - began
    return seconds * tokens_1N.shape[1] / start_1N.shape[1]


# The text.


def measured_windows(store: Store, tokenizer: Any, options: PretrainedOptions) -> Tensor:
    """Return windows of the second half of the text, `[B, N]`."""
    total = text_length(store)
    half = total // 2
    texts = spread_texts(partial_text(store), (half, total), options.windows, options.length)
    return tokens_of(texts, tokenizer, options.length, f"data={store.name}")


def fitted_windows(
    store: Store,
    tokenizer: Any,
    options: PretrainedOptions,
    choices: Sequence[Choice],
) -> Tensor | None:
    """Return windows of the text that centroids are fitted to, `[B, N]`; None: none are.

    They are of the first half of the text, or of the file that `fit` names.
    """
    if not any(choice.is_fitted for choice in choices):
        return None
    count = options.fit_windows
    length = options.length
    if options.fit is None:
        half = text_length(store) // 2
        texts = spread_texts(partial_text(store), (0, half), count, length)
        return tokens_of(texts, tokenizer, length, f"data={store.name}")
    content = Path(options.fit).expanduser().read_bytes()
    texts = spread_texts(lambda start, stop: content[start:stop], (0, len(content)), count, length)
    return tokens_of(texts, tokenizer, length, f"fit={options.fit}")


def text_length(store: Store) -> int:
    """Return the number of tokens of all splits of a data set."""
    return sum(len(split) for split in splits_of(store))


def splits_of(store: Store) -> list[np.ndarray]:
    """Return the tokens of the splits that a data set has."""
    splits = []
    for name in SPLITS:
        with contextlib.suppress(UserError):
            splits.append(store.split(name))
    return splits


def partial_text(store: Store) -> Callable[[int, int], bytes]:
    """Return a function that returns the text between two tokens of a data set."""

    def read(start: int, stop: int) -> bytes:
        pieces = []
        for split in splits_of(store):
            pieces.append(split[max(0, start) : max(0, stop)])
            start -= len(split)
            stop -= len(split)
        assert store.tokenizer is not None
        return store.tokenizer.decode(np.concatenate(pieces).tolist())

    return read


def spread_texts(
    read: Callable[[int, int], bytes],
    span: tuple[int, int],
    count: int,
    length: int,
) -> Iterator[str]:
    """Yield texts that begin evenly in a span, each at the start of a line, and do not overlap.

    Args:
        read: returns the text between two places.
        count: how many.
        length: N; a text has enough for that many tokens, if the span has.
    """
    first, last = span
    step = (last - first) // count
    size = min(step, BYTES_OF_TOKEN * length)
    for number in range(count):
        start = first + number * step
        text = read(start, start + size).decode("utf-8", "replace")
        rest_of_line, newline, lines = text.partition("\n")
        yield lines if newline else rest_of_line


def tokens_of(texts: Iterator[str], tokenizer: Any, length: int, source: str) -> Tensor:
    """Return the first N tokens of each text, `[B, N]`.

    Raises:
        UserError: a text is too short.
    """
    windows = []
    for text in texts:
        ids = tokenizer(text).input_ids[:length]
        if len(ids) < length:
            few = (
                f"a part of its text for one window has {len(ids):,} tokens, fewer than {length:,}"
            )
            raise UserError(f"{source}: {few}; give more text, fewer windows, or a smaller length")
        windows.append(torch.tensor(ids))
    return torch.stack(windows)


def bytes_of(tokens_BN: Tensor, tokenizer: Any) -> float:
    """Return how many bytes of text a token stands for, of those that are scored."""
    total = 0
    for tokens_N in tokens_BN:
        text = tokenizer.decode(tokens_N[1:], skip_special_tokens=True)
        total += len(text.encode("utf-8", "replace"))
    return total / tokens_BN[:, 1:].numel()


# The measurement.


@dataclasses.dataclass
class Measured:
    """What was measured, window by window."""

    dense: list[Scores] = dataclasses.field(default_factory=list)
    coverage: list[Coverage] = dataclasses.field(default_factory=list)
    scores: dict[Choice, list[Scores]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


def measure(compared: Compared, tokens_BN: Tensor) -> Measured:
    """Return the scores of all windows, dense and with each choice."""
    measured = Measured(scores={choice: [] for choice in compared.choices})
    total = len(tokens_BN) * (1 + len(compared.choices))
    began = time.monotonic()
    done = 0
    with progress_bar("passes") as show:
        for tokens_1N in tokens_BN.split(1):
            dense, coverage = compared.measure(tokens_1N)
            measured.dense.append(dense)
            measured.coverage.append(coverage)
            done += 1
            show(done, total)
            for choice in compared.choices:
                measured.scores[choice].append(compared.score(tokens_1N, choice))
                done += 1
                show(done, total)
    measured.seconds = time.monotonic() - began
    return measured


def result_of(
    measured: Measured,
    choices: Sequence[Choice],
    options: PretrainedOptions,
    bytes_of_token: float,
) -> Result:
    """Return what is recorded of a measurement."""
    bits_B = np.array([score.bits for score in measured.dense])
    bits, error = estimate(bits_B)
    far_BYH = stacked([coverage.far for coverage in measured.coverage])
    sinks_BYH = stacked([coverage.sinks for coverage in measured.coverage])
    far, far_error = estimate(far_BYH.mean((1, 2)))
    sinks, sinks_error = estimate(sinks_BYH.mean((1, 2)))
    rows = [row_of(choice, measured, options) for choice in choices]
    return {
        "dense": {
            "bits": bits,
            "error": error,
            "bits_per_byte": bits / bytes_of_token,
            "bits_of_windows": bits_B.tolist(),
            "keys": (options.length + 1) / 2,
        },
        "weight": {
            "sinks": sinks,
            "sinks_error": sinks_error,
            "far": far,
            "far_error": far_error,
            "sinks_of_heads": sinks_BYH.mean(0).tolist(),
            "far_of_heads": far_BYH.mean(0).tolist(),
        },
        "rows": rows,
        "seconds": measured.seconds,
    }


def stacked(of_windows: Sequence[Sequence[Tensor]]) -> np.ndarray:
    """Return what was measured of each window, layer and head, `[B, Y, H]`."""
    layers = [torch.stack(list(of_layers)) for of_layers in of_windows]
    return torch.stack(layers).numpy()


def row_of(choice: Choice, measured: Measured, options: PretrainedOptions) -> Result:
    """Return what is recorded of one choice; its errors are of paired differences."""
    scores = measured.scores[choice]
    above_B = differences(scores, measured.dense, "bits")
    late_B = differences(scores, measured.dense, "late_bits")
    above, error = estimate(above_B)
    late, late_error = estimate(late_B)
    keys = float(np.mean([score.keys for score in scores]))
    row: Result = {
        "label": label_of(choice),
        "choice": dataclasses.asdict(choice),
        "k": 0 if choice.selection == "none" else choice.keys,
        "above": above,
        "error": error,
        "above_of_windows": above_B.tolist(),
        "late": late,
        "late_error": late_error,
        "keys": keys,
        "pairs": pairs_scored(choice, options.length, keys),
    }
    if choice.dense_layers == 0:
        row |= kept_by(choice, measured.coverage)
    return row


def differences(scores: Sequence[Scores], dense: Sequence[Scores], name: str) -> np.ndarray:
    """Return how far scores are above the dense ones, of each window."""
    pairs = zip(scores, dense, strict=True)
    return np.array([getattr(score, name) - getattr(other, name) for score, other in pairs])


def kept_by(choice: Choice, coverage: Sequence[Coverage]) -> Result:
    """Return the share of the far weight that a choice keeps: of all, by layer and by head."""
    far_BYH = stacked([one.far for one in coverage])
    kept_BYH = stacked([one.kept[choice] for one in coverage])
    share_B = kept_BYH.sum((1, 2)) / far_BYH.sum((1, 2))
    share, error = estimate(share_B)
    kept_YH = kept_BYH.sum(0)
    far_YH = far_BYH.sum(0)
    return {
        "kept": share,
        "kept_error": error,
        "kept_of_layers": (kept_YH.sum(1) / far_YH.sum(1)).tolist(),
        "kept_of_heads": (kept_YH / far_YH).tolist(),
    }


def label_of(choice: Choice) -> str:
    """Return what a table calls a choice."""
    if choice.selection == "none":
        return "none (local)"
    if choice.selection == "next":
        return "next (longer window)"
    label = choice.selection
    if choice.per == "group":
        label += ", one choice per group"
    if choice.rotary == "before":
        label += ", before rotary"
    if choice.dense_layers:
        label += f", {plural(choice.dense_layers, 'first layer')} dense"
    return label


# What is printed and written.


def print_result(result: Result) -> None:
    """Print the dense score, where attention lies, and a row for each choice."""
    dense = result["dense"]
    weight = result["weight"]
    windows = plural(len(dense["bits_of_windows"]), "window")
    bits = f"{dense['bits']:.4f} bits/token, {dense['bits_per_byte']:.4f} bits/byte"
    print(f"dense: {bits} ({dense['keys']:.1f} keys read)")
    print(f"attention on sinks {weight['sinks']:.3f}, on far keys {weight['far']:.3f}")
    print(f"± standard errors over {windows}, of paired differences to dense")
    print_table(result["rows"], COLUMNS)
    print(f"measured in {clock(result['seconds'])}")


def result_folder(origin: Origin) -> Path:
    """Return the folder for results of a model, which exists then, below the folder of runs.

    Raises:
        UserError: it cannot be written to.
    """
    name = Path(origin.gguf or origin.name).name
    folder = outputs_root() / "pretrained" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(unwritable(folder, error)) from error
    return folder


def write_result(result: Result, request: Request, store: Store, folder: Path) -> None:
    """Write the record and the plot into a folder."""
    settings = {
        "analyze": dataclasses.asdict(request.options),
        "data": store.fingerprint,
    }
    file_name = f"{store.name}-N{request.options.length}-{short_hash(settings)}"
    save(folder / f"{file_name}.png", draw(result))
    record = {
        "what": "pretrained",
        **result,
        **settings,
        "data": store.describe(),
        "time": utc_now(),
    }
    save(folder / f"{file_name}.json", record)


def draw(result: Result) -> bytes:
    """Return a PNG of the loss beside the keys read, and beside the pairs scored."""
    figure, panels = drawing.axes("keys that a query reads", "bits/token above dense", 2)
    panels[1].set_xlabel("pairs scored for a query")
    by_label: dict[str, list[Result]] = {}
    for row in result["rows"]:
        by_label.setdefault(row["label"], []).append(row)
    for panel, key in zip(panels, ("keys", "pairs"), strict=True):
        for label, rows in by_label.items():
            draw_line(panel, label, rows, key)
        panel.axhline(0, color=drawing.GREY, linewidth=0.8)
        # Ticks at 64, 128, ... and at 0.01, 0.1, ..., as plain numbers.
        panel.set_xscale("log", base=2)
        panel.set_yscale("symlog", linthresh=0.01)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
    place: Any = "outside right"  # the stubs do not know places outside the panels
    figure.legend(*panels[0].get_legend_handles_labels(), loc=place, fontsize="small")
    return drawing.plot_of("pretrained", "", figure).png


def draw_line(panel: Any, label: str, rows: Sequence[Result], key: str) -> None:
    """Draw the losses of one choice at several numbers of keys."""
    selection = rows[0]["choice"]["selection"]
    x = [row[key] for row in rows]
    y = [row["above"] for row in rows]
    errors = [row["error"] or math.nan for row in rows]
    style: dict[str, Any] = {"color": COLOURS.get(selection, drawing.GREY), "marker": "."}
    if label != selection and selection not in ("none", "next"):
        style["linestyle"] = "--"
    panel.errorbar(x, y, errors, label=label, **style)
