"""`rtx audit`: change the future and see what of the past moves; of runs, also what that is worth in bits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rtx.analysis.causality import audit_model, prefix_lengths
from rtx.analysis.choice_gradients import choice_gradients
from rtx.analysis.price import DIFFERENCES, PARALLEL, STREAMING, price, sample_positions
from rtx.analysis.spans import standard_error
from rtx.compose import compose, to_dict
from rtx.config import Config
from rtx.data.catalog import Store, vocabulary_size
from rtx.data.windows import Window, windows
from rtx.disk import write_json
from rtx.errors import RunFailed, UserError
from rtx.evaluation.scores import sample_windows
from rtx.model.patterns import layer_patterns
from rtx.model.transformer import Transformer
from rtx.options import AuditOptions, read_words
from rtx.progress_bar import progress_bar
from rtx.report.causality import audit_record, audit_table, over_runs_table, price_record, price_table, unlike, verdict
from rtx.training.config_diff import differences
from rtx.training.inference import LoadedRun, load_run, on_one_device, open_run, prepare_device, run_config
from rtx.training.run_folder import utc_now
from rtx.wording import plural

OF_RESULTS = ("model.", "routing.", "data.", "optimizer.", "trainer.")
"""What keys begin with that runs share if they differ by their seed alone."""

Result = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Run `rtx audit RUN ... [overrides]` or `rtx audit [overrides]`.

    Raises:
        UserError: no such run, or a wrong option.
        RunFailed: no checkpoint is whole, or the result cannot be written.
    """
    words = read_words("audit", arguments)
    folders, options = words.runs, words.options
    if not folders:
        result = audit_configuration(on_one_device(compose(words.overrides)), options)
        if options.output is not None:
            save(Path(options.output), result)
        return 0
    if options.output is not None:
        raise UserError(f"audit.output={options.output}: a run's result is written to audit.json in its folder")
    configs = [run_config(folder, words.overrides) for folder in folders]
    for config in configs:
        check_length(options, config)
    results = [audit_run(folder, config, options) for folder, config in zip(folders, configs, strict=True)]
    if len(results) > 1 and all("price" in result for result in results):
        together = over_runs(folders, results)
        print("\n".join(["", *over_runs_table(len(folders), together)]))
        changed = {key for config in configs for key in differences(to_dict(configs[0]), to_dict(config))}
        if note := unlike(sorted(key for key in changed if key.startswith(OF_RESULTS))):
            print(note)
        results = [{**result, "over_runs": together} for result in results]
    for folder, result in zip(folders, results, strict=True):
        save(folder / "audit.json", result)
    return 0


def check_length(options: AuditOptions, config: Config) -> None:
    """Raise `UserError` for sequences longer than the model's."""
    if (options.length or 0) > config.data.length:
        raise UserError(f"audit.length={options.length} must be at most data.length={config.data.length}")


def audit_configuration(config: Config, options: AuditOptions) -> Result:
    """Audit a fresh model of a configuration on random units."""
    check_length(options, config)
    size = vocabulary_size(config.data)
    device = prepare_device(config)
    torch.manual_seed(config.seed)
    model = Transformer(config, size).eval().to(device)
    if not bool(model.output_VS.any()):
        nn.init.normal_(model.output_VS)  # as initialised, zero, it hides all that moves
    print(f"{config.model.name}: a fresh model, {plural(model.count_parameters(), 'parameter')}, seed {config.seed}")
    ids_BN = random_ids(options, options.length or config.data.length, size)
    changes = change_futures(model, config, options, ids_BN)
    return {"config": to_dict(config), "changes": changes, "choices": train_choices(model, ids_BN), "time": utc_now()}


def audit_run(folder: Path, config: Config, options: AuditOptions) -> Result:
    """Audit one run, and price it on its data; with windows=0 no data are read."""
    if options.windows:
        run, store = open_run(folder, config, options.checkpoint)
        ids_BN = real_ids(options, config, store)
    else:
        run, store = load_run(folder, config, options.checkpoint, prepare_device(config)), None
        ids_BN = random_ids(options, options.length or config.data.length, run.checkpoint["data"]["vocabulary"])
    result: Result = {"run": str(folder), "checkpoint": run.facts(), "seed": config.seed}
    # A copy: it may become float64, and the price is paid in the arithmetic of the run.
    result["changes"] = change_futures(copy.deepcopy(run.model), config, options, ids_BN)
    result["choices"] = train_choices(run.model, ids_BN)
    if store is not None:
        result["price"] = price_run(run, options, store)
    return {**result, "time": utc_now()}


def random_ids(options: AuditOptions, length: int, size: int) -> Tensor:
    """Return random token ids `[B, N]`."""
    generator = torch.Generator().manual_seed(options.seed)
    return torch.randint(size, (options.sequences, length), generator=generator)


def real_ids(options: AuditOptions, config: Config, store: Store) -> Tensor:
    """Return windows of a run's data as the ids that positions read: each unit one position behind its own."""
    tokens = store.split(options.split)
    chosen = chosen_windows(options, len(tokens), config.data.length, options.sequences)
    rows = np.stack([tokens[window.start : window.stop][: options.length] for window in chosen]).astype(np.int64)
    return torch.from_numpy(rows).roll(1, dims=1)


def chosen_windows(options: AuditOptions, units: int, length: int, number: int) -> list[Window]:
    """Return a seeded sample of the windows of a split, the same ones for every run."""
    return list(sample_windows(windows(units, length), number, options.seed))


def change_futures(model: Transformer, config: Config, options: AuditOptions, ids_BN: Tensor) -> Result:
    """Audit a model in every reading, print the table and return the record; the model may become float64."""
    model = model.double() if options.double else model
    sequences, length = ids_BN.shape
    prefixes = prefix_lengths(length, options.prefixes)
    arithmetic = str(model.output_VS.dtype).removeprefix("torch.")
    print(
        f"changing all behind a prefix: {plural(len(prefixes), 'length')} from {prefixes[0]} to {prefixes[-1]:,}, "
        f"{plural(sequences, 'sequence')} of {length:,}, {arithmetic}"
    )
    audits = {}
    for mode in (PARALLEL, STREAMING) if options.streaming else (PARALLEL,):
        with progress_bar("prefixes") as show:
            audits[mode] = audit_model(
                model,
                ids_BN.to(model.output_VS.device),
                prefixes,
                streaming=mode == STREAMING,
                tolerance=options.tolerance,
                seed=options.seed,
                on_progress=show,
            )
    layers = range(config.model.layers)
    heads = {(layer, name): n for layer in layers for name, n in layer_patterns(config, layer).items()}
    print("\n".join(audit_table(audits, heads)))
    print("\n".join(verdict(mode, audit, options.tolerance) for mode, audit in audits.items()))
    facts = {"sequences": sequences, "length": length, "prefixes": prefixes, "type": arithmetic}
    return {**facts, **{mode: audit_record(audit, options.tolerance) for mode, audit in audits.items()}}


def train_choices(model: Transformer, ids_BN: Tensor) -> list[Result]:
    """Say of every choice by content what trains it, by one training pass over one sequence; return the record."""
    found = choice_gradients(model, ids_BN[:1].roll(-1, dims=1).to(model.output_VS.device))
    for choice in found:
        print(choice.line())
    return [choice.record() for choice in found]


def price_run(run: LoadedRun, options: AuditOptions, store: Store) -> Result:
    """Price a run on its data, print the table and return the record."""
    tokens = store.split(options.split)
    chosen = chosen_windows(options, len(tokens), run.config.data.length, options.windows)
    length = chosen[0].stop - chosen[0].start
    candidates = np.arange(length) if store.answers is None else store.answers
    positions_P = sample_positions(candidates, options.positions, options.seed)
    print(
        f"the price on {options.split}: {plural(len(positions_P), 'position')} in each of "
        f"{plural(len(chosen), 'window')} of {length:,}, each scored three ways"
    )
    with run.autocast(), progress_bar("prefixes") as show:
        paid = price(run.model, tokens, [one.start for one in chosen], length, positions_P, on_progress=show)
    record = price_record(
        paid,
        unit=store.unit,
        split=options.split,
        windows=len(chosen),
        positions=positions_P.tolist(),
        length=length,
        precision=run.precision,
        data=store.describe(),
    )
    print("\n".join(price_table(record)))
    return record


def over_runs(folders: Sequence[Path], results: Sequence[Result]) -> Result:
    """Return the mean of each difference over runs, with its standard error over them."""
    together: Result = {"runs": [str(folder) for folder in folders], "seeds": [result["seed"] for result in results]}
    for name in DIFFERENCES:
        bits_R = np.array([result["price"][name]["bits"] for result in results])
        together[name] = {"bits": float(bits_R.mean()), "standard_error": standard_error(bits_R)}
    return together


def save(path: Path, result: Result) -> None:
    """Write a result and say where; `RunFailed` where it cannot be written."""
    try:
        write_json(path, result)
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error
    print(path)
