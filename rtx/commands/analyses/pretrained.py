"""`rtx analyze pretrained`: the loss and the attention that selections cost a pretrained model.

In the model as it is, every query reads all keys up to its position: it is *dense*. The analysis
replaces its attention by each of several choices in turn. With a choice a query reads the keys of a
*window* that ends with it, the *sinks* (the first keys), and some of the *far* keys, those in
between. The *selection* of the choice is the rule that chooses them. Loss is measured in bits per
token, over windows of text.

Shapes: N tokens of a window of text, B windows of text, Y layers, H heads.
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
from rtx.disk import make_folder, read_named
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
"""The text of a data set is that of its splits, in this order."""
UNITS_PER_TOKEN = 16
"""Bytes of a file, or tokens of a data set, that are read for each token of the model.

That is more than a token of the model has, so that a text fills its window.
"""
TIMED_TOKENS = 256
"""The most tokens of the pass that is timed before the analysis."""
GIB = 2**30
SELECTIONS = tuple(name for name in NAMES if name not in ("none", "next"))
"""The selections that the option `selection` may name; every table has "none" and "next"."""
COLOURS = {
    "exact": "#000000",
    "probed": "#d55e00",
    "blocks": "#7d4fa3",
    "next": "#0072b2",
    "causal": "#009e73",
    "lsh": "#e69f00",
    "random": "#cc79a7",
}
"""The colours of selections in the plot; the lines of all others are grey."""

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
    result = result_of(measured, choices, options, mean_bytes(tokens_BN, tokenizer))
    print_result(result)
    write_result({**result, **cost, "precision": precision}, request, store, folder)
    return 0


def choices_of(options: PretrainedOptions) -> list[Choice]:
    """Return all choices that are compared.

    These are the window and sinks alone, longer windows, and each selection with each combination
    of the options that are lists.

    Raises:
        UserError: a list has a value that is not allowed.
    """
    selections = parse_words("selection", options.selection, SELECTIONS)
    key_counts = parse_numbers("keys", options.keys, 1)
    pers = parse_words("per", options.per, PER)
    rotaries = parse_words("rotary", options.rotary, ROTARY)
    dense_layers = parse_numbers("dense_layers", options.dense_layers, 0)
    choices = [make_choice(options, selection="none")]
    for keys in key_counts:
        choices.append(make_choice(options, selection="next", keys=keys))
    combinations = itertools.product(selections, pers, rotaries, dense_layers, key_counts)
    for selection, per, rotary, layers, keys in combinations:
        choice = make_choice(
            options,
            selection=selection,
            per=per,
            rotary=rotary,
            dense_layers=layers,
            keys=keys,
        )
        choices.append(choice)
    return choices


def make_choice(options: PretrainedOptions, **listed_options: Any) -> Choice:
    """Return a choice.

    Args:
        listed_options: one value for each option of which the command takes a list. All other
            values are those of `options`.

    Raises:
        UserError: a value is out of range.
    """
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
            **listed_options,
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def parse_words(option: str, text: str, allowed: Sequence[str]) -> list[str]:
    """Return the words of a list such as `exact,probed`, each once, in their order.

    Raises:
        UserError: a word is not allowed.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in allowed:
            rule = f"must be one of {listed(allowed)}, or several with commas"
            shown = repr(word or "nothing")
            raise UserError(f"{option}={text}: {shown} {rule}{nearest(word, allowed)}")
    return list(dict.fromkeys(words))


def parse_numbers(option: str, text: str, least: int) -> list[int]:
    """Return the numbers of a list such as `32,64`, each once, ascending.

    Raises:
        UserError: a word is no whole number, or one below `least`.
    """
    numbers = set()
    for word in text.split(","):
        is_number = word.strip().isdecimal()
        if not is_number or int(word) < least:
            rule = f"must be numbers from {least} on, separated by commas"
            raise UserError(f"{option}={text}: {rule}")
        numbers.add(int(word))
    return sorted(numbers)


def cost_before_loading(
    origin: Origin,
    device: torch.device,
    options: PretrainedOptions,
    choices: Sequence[Choice],
) -> dict[str, int]:
    """Return the `parameters` of a model, and the bytes of `memory` that the analysis needs.

    Raises:
        UserError: the analysis needs more memory than there is, the model has fewer positions than
            a window of text, or it is no causal decoder.
    """
    config = read_config(origin)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and options.length > positions:
        raise UserError(f"length={options.length}: the model has {positions} positions")
    parameters = count_parameters(origin, config)
    memory = memory_needed(config, parameters, options.length, options.fit_windows, choices)
    check_memory(memory, device, options)
    return {"parameters": parameters, "memory": memory}


def check_memory(needed: int, device: torch.device, options: PretrainedOptions) -> None:
    """Raise UserError if the analysis needs more bytes than the machine or its GPU has."""
    available = memory_bytes()
    owner = "this machine"
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
        owner = "the GPU"
    if needed > available:
        need = f"needs up to {needed / GIB:.1f} GiB in float32"
        limit = f"{owner} has {available / GIB:.1f}"
        advice = f"length={options.length // 2} needs less"
        raise UserError(f"model={options.model}: {need}, and {limit}; {advice}")


def say_cost(compared: Compared, tokens_BN: Tensor, cost: dict[str, int]) -> None:
    """Print how long the analysis takes at least, and how much memory it needs at most."""
    B, N = tokens_BN.shape
    passes_per_window = 1 + len(compared.choices)  # one is dense
    passes = B * passes_per_window
    seconds = passes * pass_seconds(compared, tokens_BN[:1])
    model = f"{type(compared.model).__name__}, {cost['parameters']:,} parameters"
    time_and_memory = f"at least about {clock(seconds)}, at most {cost['memory'] / GIB:.1f} GiB"
    say(f"{model}; {passes:,} passes over {N:,} tokens: {time_and_memory}")


def pass_seconds(compared: Compared, tokens_1N: Tensor) -> float:
    """Return about how many seconds a pass over a window of text takes at least.

    This times a pass over the start of the window, with the choice "none". Other choices take
    longer, because they select keys.
    """
    start_1N = tokens_1N[:, :TIMED_TOKENS]
    none = compared.choices[0]
    began = time.monotonic()
    compared.score(start_1N, none)
    seconds = time.monotonic() - began
    return seconds * tokens_1N.shape[1] / start_1N.shape[1]


def measured_windows(store: Store, tokenizer: Any, options: PretrainedOptions) -> Tensor:
    """Return windows of the second half of the text of a data set, `[B, N]`."""
    total = text_length(store)
    second_half = (total // 2, total)
    texts = spread_texts(text_reader(store), second_half, options.windows, options.length)
    return first_tokens(texts, tokenizer, options.length, f"data={store.name}")


def fitted_windows(
    store: Store,
    tokenizer: Any,
    options: PretrainedOptions,
    choices: Sequence[Choice],
) -> Tensor | None:
    """Return the windows of text to which centroids are fitted, `[B, N]`.

    They are from the file that the option `fit` names, else from the first half of the text of the
    data set. None if no choice has centroids.
    """
    if not any(choice.is_fitted for choice in choices):
        return None
    if options.fit is None:
        source = f"data={store.name}"
        read = text_reader(store)
        span = (0, text_length(store) // 2)
    else:
        source = f"fit={options.fit}"
        content = read_named(Path(options.fit).expanduser())
        read = bytes_reader(content)
        span = (0, len(content))
    texts = spread_texts(read, span, options.fit_windows, options.length)
    return first_tokens(texts, tokenizer, options.length, source)


def text_length(store: Store) -> int:
    """Return the number of tokens of all splits of a data set."""
    return sum(len(split) for split in splits_of(store))


def splits_of(store: Store) -> list[np.ndarray]:
    """Return the tokens of each split that a data set has, in the order of `SPLITS`."""
    splits = []
    for name in SPLITS:
        # A data set without this split raises UserError.
        with contextlib.suppress(UserError):
            splits.append(store.split(name))
    return splits


def text_reader(store: Store) -> Callable[[int, int], bytes]:
    """Return a function from two token numbers to the text between them.

    Tokens are numbered through all splits of the data set.
    """

    def read(start: int, stop: int) -> bytes:
        pieces = []
        offset = 0  # the number of the first token of the split
        for split in splits_of(store):
            first = max(0, start - offset)
            end = max(0, stop - offset)
            pieces.append(split[first:end])
            offset += len(split)
        tokens = np.concatenate(pieces).tolist()
        assert store.tokenizer is not None
        return store.tokenizer.decode(tokens)

    return read


def bytes_reader(content: bytes) -> Callable[[int, int], bytes]:
    """Return a function from two byte numbers to the content between them."""

    def read(start: int, stop: int) -> bytes:
        return content[start:stop]

    return read


def spread_texts(
    read: Callable[[int, int], bytes],
    span: tuple[int, int],
    count: int,
    length: int,
) -> Iterator[str]:
    """Yield texts that are spread evenly over a span and do not overlap.

    Each begins with the first whole line after its place, if it has one.

    Args:
        read: returns the text between two units (bytes of a file, or tokens of a data set).
        span: the first unit, and the one after the last.
        count: the number of texts.
        length: N. A text has enough units for N tokens of the model, if the span has.
    """
    first, end = span
    step = (end - first) // count
    size = min(step, UNITS_PER_TOKEN * length)
    for number in range(count):
        start = first + number * step
        text = read(start, start + size).decode("utf-8", "replace")
        rest_of_line, newline, whole_lines = text.partition("\n")
        yield whole_lines if newline else rest_of_line


def first_tokens(texts: Iterator[str], tokenizer: Any, length: int, source: str) -> Tensor:
    """Return the first N tokens of each text, `[B, N]`.

    Args:
        length: N.
        source: the option that names the text, and its value, for the error message.

    Raises:
        UserError: a text has fewer than N tokens.
    """
    windows = []
    for text in texts:
        ids = tokenizer(text).input_ids[:length]
        if len(ids) < length:
            shortage = f"has {len(ids):,} tokens, fewer than {length:,}"
            advice = "give more text, fewer windows, or a smaller length"
            raise UserError(f"{source}: a part of its text for one window {shortage}; {advice}")
        windows.append(torch.tensor(ids))
    return torch.stack(windows)


def mean_bytes(tokens_BN: Tensor, tokenizer: Any) -> float:
    """Return the mean number of bytes of a scored token: any but the first of a window."""
    scored_BN = tokens_BN[:, 1:]
    total = 0
    for scored_N in scored_BN:
        text = tokenizer.decode(scored_N, skip_special_tokens=True)
        total += len(text.encode("utf-8", "replace"))
    return total / scored_BN.numel()


@dataclasses.dataclass
class Measured:
    """What was measured, with one item of each list for each window of text."""

    dense: list[Scores] = dataclasses.field(default_factory=list)
    """The scores of the dense model."""
    coverage: list[Coverage] = dataclasses.field(default_factory=list)
    """Where the attention weight of the dense model is, and how much of it each choice keeps."""
    scores: dict[Choice, list[Scores]] = dataclasses.field(default_factory=dict)
    """The scores of the model with each choice."""
    seconds: float = 0.0
    """The duration of the measurement."""


def measure(compared: Compared, tokens_BN: Tensor) -> Measured:
    """Return the scores of all windows of text, by the dense model and with each choice."""
    measured = Measured(scores={choice: [] for choice in compared.choices})
    passes_per_window = 1 + len(compared.choices)  # one is dense
    passes = len(tokens_BN) * passes_per_window
    done = 0
    began = time.monotonic()
    with progress_bar("passes") as show:
        for tokens_1N in tokens_BN.split(1):
            dense, coverage = compared.measure(tokens_1N)
            measured.dense.append(dense)
            measured.coverage.append(coverage)
            done += 1
            show(done, passes)
            for choice in compared.choices:
                scores = compared.score(tokens_1N, choice)
                measured.scores[choice].append(scores)
                done += 1
                show(done, passes)
    measured.seconds = time.monotonic() - began
    return measured


def result_of(
    measured: Measured,
    choices: Sequence[Choice],
    options: PretrainedOptions,
    bytes_per_token: float,
) -> Result:
    """Return the record of a measurement: the dense model, then a row for each choice."""
    return {
        "dense": dense_record(measured.dense, options.length, bytes_per_token),
        "weight": weight_record(measured.coverage),
        "rows": [row_of(choice, measured, options) for choice in choices],
        "seconds": measured.seconds,
    }


def dense_record(dense: Sequence[Scores], length: int, bytes_per_token: float) -> Result:
    """Return the record of the dense model's loss."""
    bits_B = np.array([scores.bits for scores in dense])
    bits, error = estimate(bits_B)
    # The query at position n, from 0, reads n + 1 keys.
    mean_keys = (length + 1) / 2
    return {
        "bits": bits,
        "error": error,
        "bits_per_byte": bits / bytes_per_token,
        "bits_of_windows": bits_B.tolist(),
        "keys": mean_keys,
    }


def weight_record(coverage: Sequence[Coverage]) -> Result:
    """Return the record of the dense model's attention weight on sinks and on far keys."""
    sinks_BYH = stacked([window.sinks for window in coverage])
    far_BYH = stacked([window.far for window in coverage])
    sinks, sinks_error = estimate(sinks_BYH.mean((1, 2)))
    far, far_error = estimate(far_BYH.mean((1, 2)))
    return {
        "sinks": sinks,
        "sinks_error": sinks_error,
        "far": far,
        "far_error": far_error,
        "sinks_of_heads": sinks_BYH.mean(0).tolist(),
        "far_of_heads": far_BYH.mean(0).tolist(),
    }


def stacked(weights: Sequence[Sequence[Tensor]]) -> np.ndarray:
    """Return weights `[B, Y, H]` from those of each window and layer, `[H]`."""
    windows = []
    for layers in weights:
        weight_YH = torch.stack(list(layers))
        windows.append(weight_YH)
    return torch.stack(windows).numpy()


def row_of(choice: Choice, measured: Measured, options: PretrainedOptions) -> Result:
    """Return the record of a choice, a row of the table.

    `above` and `late` are bits per token more than the dense model's, in whole windows and in their
    second halves. Each window gives one difference, and errors are standard errors of their mean.
    """
    scores = measured.scores[choice]
    above_B = differences(scores, measured.dense, "bits")
    late_B = differences(scores, measured.dense, "late_bits")
    above, error = estimate(above_B)
    late, late_error = estimate(late_B)
    mean_keys = float(np.mean([score.keys for score in scores]))
    row: Result = {
        "label": label_of(choice),
        "choice": dataclasses.asdict(choice),
        "k": 0 if choice.selection == "none" else choice.keys,
        "above": above,
        "error": error,
        "above_of_windows": above_B.tolist(),
        "late": late,
        "late_error": late_error,
        "keys": mean_keys,
        "pairs": pairs_scored(choice, options.length, mean_keys),
    }
    # Coverage is measured in all layers, as if none stayed dense.
    if choice.dense_layers == 0:
        row |= kept_record(choice, measured.coverage)
    return row


def differences(scores: Sequence[Scores], dense: Sequence[Scores], field: str) -> np.ndarray:
    """Return a field of scores minus that of the dense scores, for each window, `[B]`."""
    score_B = np.array([getattr(score, field) for score in scores])
    dense_B = np.array([getattr(score, field) for score in dense])
    return score_B - dense_B


def kept_record(choice: Choice, coverage: Sequence[Coverage]) -> Result:
    """Return the share of the weight on far keys that a choice keeps.

    It is recorded for the whole model, with its standard error over windows, for each layer, and
    for each head.
    """
    far_BYH = stacked([window.far for window in coverage])
    kept_BYH = stacked([window.kept[choice] for window in coverage])
    share_B = kept_BYH.sum((1, 2)) / far_BYH.sum((1, 2))
    share, error = estimate(share_B)
    far_YH = far_BYH.sum(0)
    kept_YH = kept_BYH.sum(0)
    share_Y = kept_YH.sum(1) / far_YH.sum(1)
    share_YH = kept_YH / far_YH
    return {
        "kept": share,
        "kept_error": error,
        "kept_of_layers": share_Y.tolist(),
        "kept_of_heads": share_YH.tolist(),
    }


def label_of(choice: Choice) -> str:
    """Return the label of a choice in the table and the plot, which leaves out its `keys`."""
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


def print_result(result: Result) -> None:
    """Print the dense model's loss and attention weights, then a table of the choices."""
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
    """Create the folder for results of a model, below the folder of runs, and return it.

    Raises:
        UserError: it cannot be created.
    """
    model_path = Path(origin.gguf or origin.name)
    folder = outputs_root() / "pretrained" / model_path.name
    try:
        make_folder(folder)
    except OSError as error:
        raise UserError(unwritable(folder, error)) from error
    return folder


def write_result(result: Result, request: Request, store: Store, folder: Path) -> None:
    """Write the plot and the record into a folder; their names have a hash of the settings."""
    options = dataclasses.asdict(request.options)
    settings_hash = short_hash({"analyze": options, "data": store.fingerprint})
    file_name = f"{store.name}-N{request.options.length}-{settings_hash}"
    save(folder, f"{file_name}.png", draw(result))
    record = {
        "what": "pretrained",
        **result,
        "analyze": options,
        "data": store.describe(),
        "time": utc_now(),
    }
    save(folder, f"{file_name}.json", record)


def draw(result: Result) -> bytes:
    """Return a plot as a PNG: bits above dense over the keys read, and over the pairs scored."""
    figure, panels = drawing.axes("keys that a query reads", "bits/token above dense", 2)
    panels[1].set_xlabel("pairs scored for a query")
    rows_by_label: dict[str, list[Result]] = {}
    for row in result["rows"]:
        rows_by_label.setdefault(row["label"], []).append(row)
    for panel, x_key in zip(panels, ("keys", "pairs"), strict=True):
        for label, rows in rows_by_label.items():
            draw_line(panel, label, rows, x_key)
        panel.axhline(0, color=drawing.GREY, linewidth=0.8)
        # Ticks are at powers of 2 and of 10, with labels such as 64 and 0.01.
        panel.set_xscale("log", base=2)
        panel.set_yscale("symlog", linthresh=0.01)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
    handles, labels = panels[0].get_legend_handles_labels()
    # Any, because matplotlib's type stubs lack the locations outside of panels.
    location: Any = "outside right"
    figure.legend(handles, labels, loc=location, fontsize="small")
    return drawing.plot_of("pretrained", "", figure).png


def draw_line(panel: Any, label: str, rows: Sequence[Result], x_key: str) -> None:
    """Draw the bits above dense of the rows with one label, which differ in their `keys`.

    The line of a variant of a selection, such as "exact, before rotary", is dashed.
    """
    selection = rows[0]["choice"]["selection"]
    x = [row[x_key] for row in rows]
    y = [row["above"] for row in rows]
    # A row of a single window has no error; NaN draws no bar.
    errors = [math.nan if row["error"] is None else row["error"] for row in rows]
    style: dict[str, Any] = {"color": COLOURS.get(selection, drawing.GREY), "marker": "."}
    is_variant = label != selection and selection not in ("none", "next")
    if is_variant:
        style["linestyle"] = "--"
    panel.errorbar(x, y, errors, label=label, **style)
