"""`rtx eval RUN [overrides]`: score a run on a split, every unit exactly once, and say by which protocol."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rtx.data.catalog import Store
from rtx.disk import write_json
from rtx.errors import RunFailed
from rtx.evaluation.baselines import baselines
from rtx.evaluation.protocols import Window, further_lines, measures, read_as_released, stamp_phrases, windows
from rtx.evaluation.scores import Score, sample_windows, score_windows
from rtx.model.ablation import ablate, check_ablation
from rtx.options import EvalOptions, read_words
from rtx.progress import clock, progress_bar
from rtx.report.summary import answers_line, protocol_line, sees_future
from rtx.training.inference import LoadedRun, open_run, run_config
from rtx.training.run_folder import utc_now


def main(arguments: list[str]) -> int:
    words = read_words("eval", arguments)
    folder, options = words.runs[0], words.options
    stride = [f"trainer.val_stride={options.stride or 'null'}"] if "stride" in words.given else []
    config = run_config(folder, [*words.overrides, *stride])
    check_ablation(config, options.ablate)
    run, store = open_run(folder, config, options.checkpoint)
    ablate(run.model, config, options.ablate)
    released, length = options.protocol == "released", config.data.length
    tokens, habits = store.split(options.split), ""
    if released:
        tokens, habits = read_as_released(store, options.split, length)
    every = windows(len(tokens), length, config.trainer.val_stride)
    chosen = sample_windows(every, options.limit, config.seed)
    partial, began = len(chosen) < len(every), time.monotonic()
    print(f"{len(chosen):,} of {len(every):,} windows of split {options.split}")
    score = score_split(run, store, tokens, chosen, options)
    expected = len(tokens) if store.answers is None else len(tokens) // length * len(store.answers)
    assert partial or score.units == expected, f"scored {score.units} units of a split of {expected}"
    result = {**measures(store, options.split, tokens, chosen, score, partial, habits), "split_units": expected}
    result |= {"windows": len(chosen), "partial": partial, "seed": config.seed if partial else None}
    if store.unit == "byte" and not partial and not released and options.split != "train":
        result["baselines"] = baselines(store.split("train"), tokens)
    result |= described(run, store, score, options, habits, partial)
    result |= {"seconds": time.monotonic() - began, "time": utc_now()}
    keep(folder, result)
    return 0


def score_split(
    run: LoadedRun, store: Store, tokens: np.ndarray, chosen: Sequence[Window], options: EvalOptions
) -> Score:
    asked = {"answers": store.answers, "batch_size": options.batch_size, "streaming": options.mode == "streaming"}
    with run.autocast(), progress_bar("windows") as show:
        score = score_windows(run.model, tokens, chosen, **asked, on_progress=show)
    if not math.isfinite(score.nats):
        raise RunFailed(
            f"{run.name}.ckpt of {run.folder} scores {score.nats} nats: the run has diverged, or "
            f"hardware.precision={run.precision} is too narrow for it; nothing is written"
        )
    return score


def described(
    run: LoadedRun, store: Store, score: Score, options: EvalOptions, habits: str, partial: bool
) -> dict[str, Any]:
    """Return the sums of a score and all that it means: which weights, on what data, read how, in what arithmetic."""
    config, own = run.config, run.has_data(store)
    protocol = protocol_line(
        *(config, options.split, store.unit, score.units),
        mode=options.mode,
        partial=partial,
        ablate=options.ablate,
        other_data="" if own else store.name,
        released=habits,
        stamps=stamp_phrases(store.stamps, options.split),
    )
    return {
        "nats": score.nats,
        "units": score.units,
        "standard_error": score.standard_error if math.isfinite(score.standard_error) else None,
        **({} if score.accuracy is None else {"accuracy": score.accuracy, "chance": 1 / config.data.values}),
        "split": options.split,
        "mode": options.mode,
        "read_as": options.protocol,
        "ablate": options.ablate,
        "length": config.data.length,
        "stride": config.trainer.val_stride or config.data.length,
        "selection_sees_future": sees_future(config, options.mode, options.ablate),
        "protocol": protocol,
        "checkpoint": run.facts(),
        "data": store.describe(),
        "own_data": own,
        "precision": run.precision,
        "accelerator": "gpu" if run.device.type == "cuda" else "cpu",
    }


def result_path(folder: Path, result: dict[str, Any]) -> Path:
    """Return where a result is kept: what was scored and how, so that no other protocol or checkpoint replaces it."""
    checkpoint, data = result["checkpoint"], result["data"]
    parts = [result["split"], result["mode"], f"N{result['length']}", f"stride{result['stride']}", result["precision"]]
    parts += [f"{result['windows']}windows-seed{result['seed']}"] if result["partial"] else []
    parts += [] if result["own_data"] else [f"{data['name']}_{data['fingerprint'][:8]}"]
    parts += [result["read_as"]] if result["read_as"] != "whole" else []
    parts += [f"ablate_{result['ablate']}"] if result["ablate"] != "none" else []
    return folder / "eval" / ("-".join([*parts, f"{checkpoint['name']}-step{checkpoint['step']}"]) + ".json")


def keep(folder: Path, result: dict[str, Any]) -> None:
    """Write a result, and print it with its protocol."""
    unit, error, path = result["data"]["unit"], result["standard_error"], result_path(folder, result)
    spread = f" (standard error {error:.5f} over windows)" if error is not None else ""
    share = f"a sample: {result['units']:,} of" if result["partial"] else f"all {result['units']:,} of"
    answers = [answers_line(result["accuracy"], result["chance"])] if "accuracy" in result else []
    for line in [f"{result[f'bits_per_{unit}']:.5f} bits/{unit}{spread}", *further_lines(unit, result), *answers]:
        print(line)
    print(f"{share} the split's {result['split_units']:,} {unit}s scored, in {clock(result['seconds'])}")
    print(result["protocol"])
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, result)
    except OSError as problem:
        raise RunFailed(f"cannot write {path}: {problem.strerror}") from problem
    print(path)
    plain = result_path(folder, {**result, "ablate": "none"})
    if plain != path and plain.exists():
        before = json.loads(plain.read_text())[f"bits_per_{unit}"]
        print(f"the ablation changes {before:.5f} bits/{unit} by {result[f'bits_per_{unit}'] - before:+.5f}")
