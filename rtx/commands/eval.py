"""`rtx eval RUN [overrides]`: score a run on a split, every unit exactly once, and say by which protocol."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rtx.data.catalog import Store
from rtx.data.recall import RecallStore
from rtx.disk import write_json
from rtx.errors import RunFailed, UserError
from rtx.evaluation.measures import further_lines, stamp_phrases
from rtx.evaluation.protocols import Reading, Window, read_as_released, windows
from rtx.evaluation.scores import Score, measured, sample_windows, score_windows
from rtx.model.ablation import ablate, check_ablation
from rtx.options import EvalOptions, read_words
from rtx.progress_bar import progress_bar
from rtx.report.summary import answers_line, protocol_line, sees_future
from rtx.training.inference import LoadedRun, open_run, run_config
from rtx.training.progress import clock
from rtx.training.run_folder import utc_now


def main(arguments: list[str]) -> int:
    """Run `rtx eval RUN [overrides]`.

    Raises:
        UserError: no such run, a wrong option, other data than the run's, an ablation of what is not there.
        RunFailed: no checkpoint is whole, the score is not a number, or the result cannot be written.
    """
    words = read_words("eval", arguments)
    folder, options = words.runs[0], words.options
    stride = [f"trainer.val_stride={options.stride or 'null'}"] if "stride" in words.given else []
    config = run_config(folder, [*words.overrides, *stride])
    check_ablation(config, options.ablate)
    run, store = open_run(folder, config, options.checkpoint)
    ablate(run.model, config, options.ablate)
    reading = Reading(store.split(options.split))
    if options.protocol == "released":
        if isinstance(store, RecallStore):
            raise UserError("eval.protocol=released: data=recall is ours, no released code reads it")
        reading = read_as_released(store, options.split, config.data.length)
    every = windows(len(reading.tokens), config.data.length, config.trainer.val_stride)
    chosen = sample_windows(every, options.limit, config.seed)
    print(f"{len(chosen):,} of {len(every):,} windows of split {options.split}")
    began = time.monotonic()
    score = score_split(run, store, reading, chosen, options)
    expected = len(reading.tokens) if store.answers is None else store.count(options.split)
    if len(chosen) == len(every) and score.units != expected:
        raise AssertionError(f"scored {score.units} units of a split of {expected}")
    result = described(run, store, reading, score, options, chosen, partial=len(chosen) < len(every))
    result |= {"split_units": expected, "seconds": time.monotonic() - began, "time": utc_now()}
    path = result_path(folder, result)
    keep(result, path)
    print_result(result)
    print(path)
    if options.ablate != "none":
        print(comparison(result, result_path(folder, {**result, "ablate": "none"})))
    return 0


def score_split(
    run: LoadedRun, store: Store, reading: Reading, chosen: Sequence[Window], options: EvalOptions
) -> Score:
    with run.autocast(), progress_bar("windows") as show:
        score = score_windows(
            run.model,
            reading.tokens,
            chosen,
            answers=store.answers,
            batch_size=options.batch_size,
            streaming=options.mode == "streaming",
            on_progress=show,
        )
    if not math.isfinite(score.nats):
        raise RunFailed(
            f"{run.name}.ckpt of {run.folder} scores {score.nats} nats: the run has diverged, or "
            f"hardware.precision={run.precision} is too narrow for it; nothing is written"
        )
    return score


def described(
    run: LoadedRun,
    store: Store,
    reading: Reading,
    score: Score,
    options: EvalOptions,
    chosen: Sequence[Window],
    partial: bool,
) -> dict[str, Any]:
    """Return the score and all that it means: its sums, which weights, on what data, read how, in what arithmetic."""
    config, data, own = run.config, store.describe(), run.has_data(store)
    answers = {} if score.accuracy is None else {"accuracy": score.accuracy, "chance": 1 / config.data.values}
    protocol = protocol_line(
        *(config, options.split, store.unit, score.units),
        mode=options.mode,
        partial=partial,
        ablate=options.ablate,
        other_data="" if own else store.name,
        released=reading.habits,
        stamps=stamp_phrases(data.get("stamps", {}), options.split),
    )
    return {
        **measured(store, options.split, reading, chosen, score, partial),
        "nats": score.nats,
        "units": score.units,
        "standard_error": score.standard_error if math.isfinite(score.standard_error) else None,
        **answers,
        "partial": partial,
        "windows": len(chosen),
        "seed": config.seed if partial else None,
        "split": options.split,
        "mode": options.mode,
        "read_as": options.protocol,
        "ablate": options.ablate,
        "length": config.data.length,
        "stride": config.trainer.val_stride or config.data.length,
        "selection_sees_future": sees_future(config, options.mode, options.ablate),
        "protocol": protocol,
        "checkpoint": run.facts(),
        "data": data,
        "own_data": own,
        "precision": run.precision,
        "own_precision": run.own_precision,
        "accelerator": "gpu" if run.device.type == "cuda" else "cpu",
    }


def result_path(folder: Path, result: dict[str, Any]) -> Path:
    """Return where a result is kept: what was scored and how, so that no other protocol or checkpoint replaces it."""
    checkpoint = result["checkpoint"]
    parts = [result["split"], result["mode"], f"N{result['length']}", f"stride{result['stride']}"]
    parts += [f"{result['windows']}windows-seed{result['seed']}"] if result["partial"] else []
    parts += [] if result["own_data"] else [f"{result['data']['name']}_{result['data']['fingerprint'][:8]}"]
    parts += [result["precision"]] if result["precision"] != result["own_precision"] else []
    parts += [result["read_as"]] if result["read_as"] != "whole" else []
    parts += [f"ablate_{result['ablate']}"] if result["ablate"] != "none" else []
    parts += [f"{checkpoint['name']}-step{checkpoint['step']}"]
    return folder / "eval" / ("-".join(parts) + ".json")


def keep(result: dict[str, Any], path: Path) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, result)
    except OSError as error:
        bits = result[f"bits_per_{result['data']['unit']}"]
        raise RunFailed(f"cannot write {path}: {error.strerror}; the score is {bits:.5f} bits") from error


def print_result(result: dict[str, Any]) -> None:
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


def comparison(result: dict[str, Any], plain: Path) -> str:
    """Return what the ablation costs where the model as it is has been scored alike; else how to learn it."""
    unit = result["data"]["unit"]
    try:
        before = json.loads(plain.read_text())[f"bits_per_{unit}"]
    except (OSError, ValueError, KeyError):
        return "for the difference, score the model as it is by the same command without ablate="
    change = result[f"bits_per_{unit}"] - before
    return f"the model as it is: {before:.5f} bits/{unit}; the ablation changes that by {change:+.5f}"
