"""`rtx audit`: change the future and see what of the past moves; of runs, also what that is worth in bits."""

from __future__ import annotations

import copy
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rtx.analysis.causality import Audit, Moves, audit_model, prefix_lengths
from rtx.analysis.choice_gradients import choice_gradients
from rtx.analysis.loss_by_position import estimate
from rtx.analysis.output import print_table, save
from rtx.analysis.price import DIFFERENCES, STREAMING, TEACHER_FORCED, differences, price, sample_positions
from rtx.compose import compose, to_dict
from rtx.config import Config
from rtx.data.catalog import Store, vocabulary_size
from rtx.errors import UserError
from rtx.evaluation.protocols import Window, windows
from rtx.evaluation.scores import sample_windows
from rtx.model.transformer import Transformer
from rtx.options import AuditOptions, read_words
from rtx.progress_bar import progress_bar
from rtx.training import config_diff
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
        return 0
    results = [audit_run(folder, config, options) for folder, config in zip(folders, configs, strict=True)]
    together = {"over_runs": over_runs(folders, configs, results)} if len(results) > 1 and options.windows else {}
    for folder, result in zip(folders, results, strict=True):
        save(folder / "audit.json", {**result, **together})
    return 0


def audit_configuration(config: Config, options: AuditOptions) -> Result:
    """Audit a fresh model of a configuration on random units."""
    size, device = vocabulary_size(config.data), prepare_device(config)
    torch.manual_seed(config.seed)
    model = Transformer(config, size).eval().to(device)
    if not bool(model.output_VS.any()):
        nn.init.normal_(model.output_VS)  # as initialised, zero, it hides all that moves
    print(f"{config.model.name}: a fresh model, {plural(model.count_parameters(), 'parameter')}, seed {config.seed}")
    return {"config": to_dict(config), **what_moves(model, random_ids(config, options, size), options)}


def audit_run(folder: Path, config: Config, options: AuditOptions) -> Result:
    """Audit one run, and price it on its data; with windows=0 no data are read."""
    if options.windows:
        run, store = open_run(folder, config, options.checkpoint)
        tokens = store.split(options.split)
        chosen = chosen_windows(config, options, len(tokens), options.sequences)
        rows = np.stack([tokens[window.start : window.stop][: options.length] for window in chosen]).astype(np.int64)
        ids_BN = torch.from_numpy(rows).roll(1, dims=1)  # what positions read: each unit one behind its own
    else:
        run, store = load_run(folder, config, options.checkpoint, prepare_device(config)), None
        ids_BN = random_ids(config, options, run.model.vocabulary)
    result = {"run": str(folder), "checkpoint": run.facts(), "seed": config.seed}
    result |= what_moves(run.model, ids_BN, options)
    return result if store is None else {**result, "price": price_run(run, options, store)}


def random_ids(config: Config, options: AuditOptions, size: int) -> Tensor:
    """Return random token ids `[B, N]`."""
    generator = torch.Generator().manual_seed(options.seed)
    return torch.randint(size, (options.sequences, options.length or config.data.length), generator=generator)


def chosen_windows(config: Config, options: AuditOptions, units: int, number: int) -> Sequence[Window]:
    """Return a seeded sample of the windows of a split, the same ones for every run."""
    return sample_windows(windows(units, config.data.length), number, options.seed)


def what_moves(model: Transformer, ids_BN: Tensor, options: AuditOptions) -> Result:
    """Audit a model in every reading, and what trains its choices; print both and return the record."""
    ids_BN = ids_BN.to(model.output_VS.device)
    changed = copy.deepcopy(model).double() if options.double else model
    (sequences, length), dtype = ids_BN.shape, str(changed.output_VS.dtype).removeprefix("torch.")
    prefixes = prefix_lengths(length, options.prefixes)
    print(
        f"changing all behind a prefix: {plural(len(prefixes), 'length')} up to {prefixes[-1]:,}, "
        f"{plural(sequences, 'sequence')} of {length:,}, {dtype}"
    )
    changes: Result = {"sequences": sequences, "length": length, "prefixes": prefixes, "type": dtype}
    for mode in (TEACHER_FORCED, STREAMING) if options.streaming else (TEACHER_FORCED,):
        with progress_bar("prefixes") as show:
            asked = {"tolerance": options.tolerance, "seed": options.seed, "on_progress": show}
            audit = audit_model(changed, ids_BN, prefixes, streaming=mode == STREAMING, **asked)
        rows = [{"layer": layer, "heads": name, **moved(moves)} for (layer, name), moves in audit.groups.items()]
        changes[mode] = {
            "sees_future": audit.sees_future,
            "arises_in": [{"layer": layer, "heads": name} for layer, name in audit.origins],
            "tolerance": options.tolerance,
            "repeat": audit.repeat,
            "logits": moved(audit.logits),
            "groups": rows,
        }
        print(f"\n{mode.replace('_', '-')}: {verdict(audit, options.tolerance)}")
        print_table([*rows, {"layer": "", "heads": "logits", **moved(audit.logits)}])
    choices = choice_gradients(model, ids_BN[:1].roll(-1, dims=1))
    for row in choices:
        norm = "" if row["gradient"] is None else f"; gradient {row['gradient']:.1e}"
        norm += " BUT GETS NONE: it stays as it is" if row["missing"] else ""
        line = f"layer {row['layer']} {row['heads']}: the choice is trained by {row['trained_by']}{norm}"
        print(textwrap.fill(line, 100, subsequent_indent="  "))
    return {"changes": changes, "choices": choices, "time": utc_now()}


def moved(moves: Moves) -> Result:
    """Return the largest relative change, and the share of past positions that moved."""
    return {"largest": moves.largest, "moved": moves.moved / max(1, moves.past)}


def verdict(audit: Audit, tolerance: float) -> str:
    """Return whether a reading of a model sees the future, and where that arises."""
    if audit.repeat > tolerance:
        return f"not decided: the logits move by {audit.repeat:.1e} when nothing changes"
    if not audit.sees_future:
        return f"sees no future: nothing in the past moved by more than {tolerance:.0e}"
    arises = ", ".join(f"layer {layer} {name}" for layer, name in audit.origins)
    return "sees the future" + (f"; arises in {arises}" if arises else "")


def price_run(run: LoadedRun, options: AuditOptions, store: Store) -> Result:
    """Price a run on its data, print the table and return the record."""
    tokens = store.split(options.split)
    chosen = chosen_windows(run.config, options, len(tokens), options.windows)
    length = chosen[0].stop - chosen[0].start
    candidates = np.arange(length) if store.answers is None else store.answers
    positions_P = sample_positions(candidates, options.positions, options.seed)
    with run.autocast(), progress_bar("prefixes") as show:
        nats = price(run.model, tokens, [one.start for one in chosen], length, positions_P, on_progress=show)
    bits = {mode: float(nats_KP.mean()) / math.log(2) for mode, nats_KP in nats.items()}
    print(
        f"\nbits/{store.unit} on {options.split}, {plural(len(positions_P), 'position')} in each of "
        f"{plural(len(chosen), 'window')} of {length:,}:",
        ", ".join(f"{mode.replace('_', '-')} {value:.5f}" for mode, value in bits.items()),
    )
    print_differences(found := differences(nats))
    return {
        "unit": store.unit,
        "split": options.split,
        "windows": len(chosen),
        "positions": positions_P.tolist(),
        "length": length,
        "precision": run.precision,
        "data": store.describe(),
        "bits": bits,
        **found,
    }


def over_runs(folders: Sequence[Path], configs: Sequence[Config], results: Sequence[Result]) -> Result:
    """Return the mean of each difference over runs, with its standard error over them; print the table."""
    found = {}
    for name in DIFFERENCES:
        bits, error = estimate(np.array([result["price"][name]["bits"] for result in results]))
        found[name] = {"bits": bits, "standard_error": error}
    print(f"\nover {len(folders)} runs:")
    print_differences(found)
    changed = {key for config in configs for key in config_diff.differences(to_dict(configs[0]), to_dict(config))}
    if told := sorted(key for key in changed if key.startswith(OF_RESULTS)):
        print(f"note: these runs differ by more than their seed: {', '.join(told)}")
    return {"runs": [str(folder) for folder in folders], "seeds": [result["seed"] for result in results], **found}


def print_differences(found: Mapping[str, Mapping[str, float | None]]) -> None:
    """Print differences in bits with their standard errors."""
    rows = []
    for name, figures in found.items():
        more, less = (mode.replace("_", "-") for mode in DIFFERENCES[name])
        told = {key.replace("_", " "): "-" if value is None else f"{value:+.5f}" for key, value in figures.items()}
        rows.append({"": f"{name.replace('_', ' ')} ({more} - {less})", **told})
    print_table(rows)
