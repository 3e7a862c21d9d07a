"""`rtx audit`: change the future and see what of the past moves; of runs, also what that is worth in bits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rtx.analysis.causality import Audit, audit_model, choice_gradients
from rtx.analysis.loss_by_position import DIFFERENCES, STREAMING, TEACHER_FORCED, differences, estimate, price
from rtx.analysis.output import print_table, save
from rtx.compose import compose, to_dict
from rtx.config import Config
from rtx.data.catalog import Store, vocabulary_size
from rtx.errors import UserError, plural
from rtx.evaluation.protocols import windows
from rtx.evaluation.scores import sample_windows
from rtx.model.transformer import Transformer
from rtx.options import AuditOptions, read_words
from rtx.progress import progress_bar
from rtx.training.inference import LoadedRun, load_run, on_one_device, open_run, prepare_device, run_config
from rtx.training.run_folder import utc_now

Result = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Run `rtx audit RUN ... [overrides]` or `rtx audit [overrides]`."""
    words = read_words("audit", arguments)
    folders, options = words.runs, words.options
    if folders and options.output is not None:
        raise UserError(f"audit.output={options.output}: a run's result is written to audit.json in its folder")
    configs = [run_config(folder, words.overrides) for folder in folders] or [on_one_device(compose(words.overrides))]
    for config in configs:
        if (options.length or 0) > config.data.length:
            raise UserError(f"audit.length={options.length} must be at most data.length={config.data.length}")
    if not folders:
        result = audit_configuration(configs[0], options)
        if options.output is not None:
            save(Path(options.output), result)
    results = [audit_run(folder, config, options) for folder, config in zip(folders, configs, strict=False)]
    together = {"over_runs": over_runs(results)} if len(results) > 1 and options.windows else {}
    for folder, result in zip(folders, results, strict=True):
        save(folder / "audit.json", {**result, **together})
    return 0


def audit_configuration(config: Config, options: AuditOptions) -> Result:
    """Audit a fresh model of a configuration."""
    size, device = vocabulary_size(config.data), prepare_device(config)
    torch.manual_seed(config.seed)
    model = Transformer(config, size).eval().to(device)
    if not bool(model.output_VS.any()):
        nn.init.normal_(model.output_VS)  # as initialised, zero, it hides all that moves
    print(f"{config.model.name}: a fresh model, {plural(model.count_parameters(), 'parameter')}, seed {config.seed}")
    return {"config": to_dict(config), **what_moves(model, config, options)}


def audit_run(folder: Path, config: Config, options: AuditOptions) -> Result:
    """Audit one run, and price it on its data; with windows=0 no data are read."""
    if options.windows:
        run, store = open_run(folder, config, options.checkpoint)
    else:
        run, store = load_run(folder, config, options.checkpoint, prepare_device(config)), None
    result = {"run": str(folder), "checkpoint": run.facts(), "seed": config.seed}
    result |= what_moves(run.model, config, options)
    return result if store is None else {**result, "price": price_run(run, options, store)}


def what_moves(model: Transformer, config: Config, options: AuditOptions) -> Result:
    """Audit a model in every reading on random units, and what trains its choices; print both, return the record."""
    B, N = options.sequences, options.length or config.data.length
    ids_BN = torch.randint(model.vocabulary, (B, N), generator=torch.Generator().manual_seed(options.seed))
    ids_BN = ids_BN.to(model.output_VS.device)
    changed = copy.deepcopy(model).double() if options.double else model
    prefixes = np.unique(np.geomspace(1, N - 1, options.prefixes).astype(int)).tolist()
    changes: Result = {"sequences": B, "length": N, "prefixes": prefixes}
    for mode in (TEACHER_FORCED, STREAMING) if options.streaming else (TEACHER_FORCED,):
        with progress_bar("prefixes") as show:
            asked = {"tolerance": options.tolerance, "seed": options.seed, "on_progress": show}
            audit = audit_model(changed, ids_BN, prefixes, streaming=mode == STREAMING, **asked)
        rows = []
        for (layer, heads), change_P in audit.changes.items():
            moved = float((change_P > options.tolerance).double().mean())
            rows.append({"layer": layer, "heads": heads, "largest": float(change_P.max()), "moved": moved})
        changes[mode] = {"sees_future": audit.sees_future, "arises_in": audit.origins, "rows": rows}
        changes[mode] |= {"repeat": audit.repeat, "tolerance": options.tolerance}
        print(f"\n{mode}: {verdict(audit)}")
        print_table(rows)
    if choices := choice_gradients(model, ids_BN[:1].roll(-1, dims=1)):
        print("\nwhat trains each choice of keys; one whose gradient is missing stays as it is")
        print_table(choices)
    return {"changes": changes, "choices": choices, "time": utc_now()}


def verdict(audit: Audit) -> str:
    """Return whether a reading of a model sees the future, and where that arises."""
    if audit.repeat > audit.tolerance:
        return f"not decided: the logits move by {audit.repeat:.1e} when nothing changes"
    if not audit.sees_future:
        return f"sees no future: nothing in the past moved by more than {audit.tolerance:.0e}"
    arises = ", ".join(f"layer {layer} {heads}" for layer, heads in audit.origins)
    return f"sees the future; arises in {arises or 'no group of heads'}"


def price_run(run: LoadedRun, options: AuditOptions, store: Store) -> Result:
    """Price a run on its data, print the table and return the record."""
    tokens = store.split(options.split)
    every = windows(len(tokens), run.config.data.length)
    chosen = [one._replace(first=one.start) for one in sample_windows(every, options.windows, options.seed)]
    length = chosen[0].stop - chosen[0].start
    candidates = range(length) if store.answers is None else store.answers.tolist()
    positions_P = np.array(sample_windows(candidates, options.positions, options.seed))
    with run.autocast(), progress_bar("prefixes") as show:
        bits = price(run.model, tokens, chosen, positions_P, show)
    means, found = {mode: float(bits_KP.mean()) for mode, bits_KP in bits.items()}, differences(bits)
    places = f"{plural(len(positions_P), 'position')} in each of {plural(len(chosen), 'window')} of {length:,}"
    print(f"\nbits/{store.unit} on {options.split}, {places}")
    print_table([means])
    print_differences(found)
    facts = {"unit": store.unit, "split": options.split, "windows": len(chosen), "positions": positions_P.tolist()}
    facts |= {"length": length, "precision": run.precision, "data": store.describe(), "bits": means}
    return {**facts, **found}


def over_runs(results: Sequence[Result]) -> Result:
    """Return the mean of each difference over runs, with its standard error over them; print the table."""
    of_runs = {name: np.array([result["price"][name]["bits"] for result in results]) for name in DIFFERENCES}
    found = {name: dict(zip(("bits", "standard_error"), estimate(bits), strict=True)) for name, bits in of_runs.items()}
    print(f"\nover {len(results)} runs:")
    print_differences(found)
    return {"runs": [result["run"] for result in results], "seeds": [result["seed"] for result in results], **found}


def print_differences(found: Result) -> None:
    """Print differences in bits with their standard errors."""
    print_table([{"": f"{name} ({' - '.join(DIFFERENCES[name])})", **figures} for name, figures in found.items()])
