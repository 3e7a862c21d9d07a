"""`rtx eval RUN [overrides]`: score a run on a split, every unit exactly once, and say by which protocol."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rtx.config import Config
from rtx.data.catalog import Store, data_root, open_data
from rtx.data.recall import RecallStore
from rtx.data.released import Reading, read_as_released
from rtx.data.windows import Window, windows
from rtx.data.wordcount import bytes_scored, words_scored
from rtx.errors import RunFailed, UserError
from rtx.evaluation.scores import Score, equal_batches, sample_windows, score_windows
from rtx.model.ablation import ablate, check_ablation
from rtx.options import EvalOptions, read_words
from rtx.report.measures import Words, further_lines, measures, stamp_phrases
from rtx.report.summary import answers_line, protocol_line, sees_future
from rtx.training.files import write_json
from rtx.training.metrics import utc_now
from rtx.training.progress import Progress, clock
from rtx.training.signals import INTERRUPTED, Signals
from rtx.training.trained import Trained, load_trained, run_config
from rtx.wording import written


def main(arguments: list[str]) -> int:
    """Run `rtx eval RUN [overrides]`.

    Raises:
        UserError: no such run, a wrong option, other data than the run's, an ablation of what is not there.
        RunFailed: no checkpoint is whole, or the result cannot be written.
    """
    words = read_words("eval", arguments)
    folder, options = words.runs[0], words.options
    stride = [f"trainer.val_stride={written(options.stride)}"] if "stride" in words.given else []
    config = run_config(folder, [*words.overrides, *stride])
    check_ablation(config, options.ablate)
    store = open_data(config.data, data_root())
    trained = load_trained(folder, config, options.checkpoint, store.vocabulary)
    ablate(trained.model, config, options.ablate)
    check_fingerprint(store, trained)
    reading = reading_of(store, config, options)
    tokens = reading.tokens
    every = windows(len(tokens), config.data.length, config.trainer.val_stride)
    chosen = sample_windows(every, options.limit, config.seed)
    begin = time.monotonic()
    with Signals("before the first window; nothing is written") as signals, trained.arithmetic():
        seconds = estimate(trained, store, tokens, chosen, options)
        print(f"{len(chosen):,} of {len(every):,} windows; estimated time {clock(seconds)}")
        signals.holding = True
        score = scored(trained, store, tokens, chosen, options, lambda: bool(signals.requested))
    if score is None:
        print("stopped; nothing is written", file=sys.stderr)
        return signals.requested or INTERRUPTED
    partial = len(chosen) < len(every)
    units = len(tokens) if store.answers is None else store.count(options.split)
    if not partial and score.units != units:
        raise AssertionError(f"scored {score.units} units of a split of {units}")
    values = measured(store, options.split, reading, chosen, score, partial)
    result = record(trained, store, options, score, reading, values, len(chosen), partial, time.monotonic() - begin)
    path = result_path(folder, result)
    keep(result, path, score)
    print_result(result, path)
    if options.ablate != "none":
        print(comparison(result, result_path(folder, {**result, "ablate": "none"})))
    return 0


def is_own(store: Store, trained: Trained) -> bool:
    """Tell whether the data are those that the run was trained on."""
    return trained.checkpoint["data"]["fingerprint"] == store.fingerprint


def check_fingerprint(store: Store, trained: Trained) -> None:
    """Say so where the data are not those of the run (the standard library of another Python, say).

    Raises:
        UserError: their units are of another tokenizer: each id would stand for something else than in training.
    """
    theirs, ours = (data.get("tokenizer") or {} for data in (trained.checkpoint["data"], store.describe()))
    if any(theirs.get(key) != ours.get(key) for key in ("name", "sha256")):
        raise UserError(
            f"{store.name}: expected the run's tokenizer ({_named(theirs)}), found a store of another one "
            f"({_named(ours)}); score the data and the settings of data.* that the run was trained with"
        )
    if not is_own(store, trained):
        print(
            f"note: these are not the data of the run: {store.name} has fingerprint {store.fingerprint}, the run "
            f"{trained.checkpoint['data']['fingerprint']}; parts of this split may have been trained on"
        )


def _named(tokenizer: dict[str, Any]) -> str:
    """Return a tokenizer's name and, of a trained one, the start of its sha256."""
    return " ".join([str(tokenizer.get("name")), tokenizer.get("sha256", "")[:12]]).strip()


def scored(
    trained: Trained, store: Store, tokens: np.ndarray, chosen: Sequence[Window], options: EvalOptions, should_stop: Any
) -> Score | None:
    """Score the windows behind a progress line; None if stopped."""
    progress, begin = Progress(), time.monotonic()

    def show(done: int, total: int) -> None:
        seconds = time.monotonic() - begin
        left = clock(seconds / done * (total - done))
        bar = "#" * (30 * done // total)
        progress.show(f"[{bar:<30}] {done:,}/{total:,} windows | {left} left", force=done == total)

    score = score_windows(
        trained.model,
        tokens,
        chosen,
        answers=store.answers,
        batch_size=options.batch_size,
        streaming=options.mode == "streaming",
        should_stop=should_stop,
        on_progress=show,
    )
    progress.clear()
    return score


def estimate(
    trained: Trained, store: Store, tokens: np.ndarray, chosen: Sequence[Window], options: EvalOptions
) -> float:
    """Return the seconds that the windows should take, from one run over some of them.

    From the first batch, twice, where there are many: the first run pays for what is loaded and allocated once. Where
    there are few batches, an eighth of the windows is timed: nobody waits for the score twice.
    """
    batches = equal_batches(chosen, options.batch_size)
    many = len(batches) > 8
    count = len(batches[0]) if many else min(len(batches[0]), -(-len(chosen) // 8))
    first = [chosen[k] for k in range(count)]
    seconds = 0.0
    for _ in range(2 if many else 1):
        begin = time.monotonic()
        score_windows(
            trained.model,
            tokens,
            first,
            answers=store.answers,
            batch_size=options.batch_size,
            streaming=options.mode == "streaming",
        )
        seconds = time.monotonic() - begin
    return seconds / len(first) * len(chosen)


def reading_of(store: Store, config: Config, options: EvalOptions) -> Reading:
    """Return the split as eval.protocol has it read.

    Raises:
        UserError: it is not known how the released code reads such data.
    """
    if options.protocol == "whole":
        return Reading(store.split(options.split))
    if isinstance(store, RecallStore):
        raise UserError("eval.protocol=released: data=recall is ours, no released code reads it")
    return read_as_released(store, options.split, config.data.length)


def measured(
    store: Store, split: str, reading: Reading, chosen: Sequence[Window], score: Score, partial: bool
) -> dict[str, Any]:
    """Return the score in every measure that its text has; words are no account of the bytes between and in them."""
    if isinstance(store, RecallStore) or store.image is not None:
        return measures(store.unit, score.nats, score.units)
    words = words_scored(store, split, reading, chosen, partial)
    return measures(
        store.unit,
        score.nats,
        score.units,
        text_bytes=bytes_scored(store, split, reading, chosen, partial) if store.unit == "subword" else None,
        words=None if words is None else Words(*words),
    )


def record(
    trained: Trained,
    store: Store,
    wish: EvalOptions,
    score: Score,
    reading: Reading,
    values: dict[str, Any],
    count: int,
    partial: bool,
    seconds: float,
) -> dict[str, Any]:
    """Return everything that the number means."""
    context = facts(trained, store)
    config = trained.config
    protocol = protocol_line(
        *(config, wish.split, store.unit, score.units),
        mode=wish.mode,
        partial=partial,
        ablate=wish.ablate,
        other_data="" if context["own_data"] else store.name,
        released=reading.habits,
        stamps=stamp_phrases(context["data"].get("stamps", {}), wish.split),
    )
    answers = {} if score.accuracy is None else {"accuracy": score.accuracy, "chance": 1 / config.data.values}
    return {
        **values,
        **answers,
        "standard_error": score.standard_error if math.isfinite(score.standard_error) else None,
        "nats": score.nats,
        "units": score.units,
        "split_units": store.count(wish.split) if store.answers is not None else len(reading.tokens),
        "windows": count,
        "partial": partial,
        "seed": config.seed if partial else None,
        "split": wish.split,
        "mode": wish.mode,
        "read_as": wish.protocol,
        "ablate": wish.ablate,
        "length": config.data.length,
        "stride": config.trainer.val_stride or config.data.length,
        "selection_sees_future": sees_future(config, wish.mode, wish.ablate),
        "protocol": protocol,
        **context,
        "seconds": seconds,
        "time": utc_now(),
    }


def facts(trained: Trained, store: Store) -> dict[str, Any]:
    """Return which weights were scored, on what data, in what arithmetic."""
    return {
        "checkpoint": {"name": trained.name, "step": trained.checkpoint["step"]},
        "data": store.describe(),
        "own_data": is_own(store, trained),
        "precision": trained.config.hardware.precision,
        "own_precision": trained.checkpoint["config"]["hardware"]["precision"],
        "accelerator": trained.hardware.accelerator,
    }


def result_path(folder: Path, result: dict[str, Any]) -> Path:
    """Return where a result is kept: what was scored and how, so that no other protocol or checkpoint replaces it.

    What is not the run's own (data, precision) stands in the name, and so does the seed of a sample of the windows.
    """
    checkpoint = result["checkpoint"]
    parts = [result["split"], result["mode"], f"N{result['length']}", f"stride{result['stride']}"]
    parts += [f"{result['windows']}windows-seed{result['seed']}"] if result["partial"] else []
    parts += [] if result["own_data"] else [f"{result['data']['name']}_{result['data']['fingerprint'][:8]}"]
    parts += [result["precision"]] if result["precision"] != result["own_precision"] else []
    parts += [result["read_as"]] if result["read_as"] != "whole" else []
    parts += [f"ablate_{result['ablate']}"] if result["ablate"] != "none" else []
    parts += [f"{checkpoint['name']}-step{checkpoint['step']}"]
    return folder / "eval" / ("-".join(parts) + ".json")


def keep(result: dict[str, Any], path: Path, score: Score) -> None:
    """Write the result.

    Raises:
        RunFailed: it cannot be written; the message says the score.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, result)
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}; the score is {score.bits:.5f} bits") from error


def print_result(result: dict[str, Any], path: Path) -> None:
    """Print the score, the count and the protocol."""
    unit = result["data"]["unit"]
    share = f"a sample: {result['units']:,} of" if result["partial"] else f"all {result['units']:,} of"
    error = result["standard_error"]
    spread = f" (standard error {error:.5f} over windows)" if error is not None else ""
    print(f"{result[f'bits_per_{unit}']:.5f} bits/{unit}{spread}")
    for line in further_lines(unit, result):
        print(line)
    if "accuracy" in result:
        print(answers_line(result["accuracy"], result["chance"]))
    print(f"{share} the split's {result['split_units']:,} {unit}s scored, in {clock(result['seconds'])}")
    print(result["protocol"])
    print(path)


def comparison(result: dict[str, Any], plain: Path) -> str:
    """Return what the ablation costs where the model as it is has been scored alike; else how to learn it."""
    unit = result["data"]["unit"]
    try:
        before = json.loads(plain.read_text())[f"bits_per_{unit}"]
    except (OSError, ValueError, KeyError):
        return "for the difference, score the model as it is by the same command without ablate="
    change = result[f"bits_per_{unit}"] - before
    return f"the model as it is: {before:.5f} bits/{unit}; the ablation changes that by {change:+.5f}"
