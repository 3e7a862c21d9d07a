"""`rtx audit`: change the future and see what of the past moves; of runs, also what that is worth in bits."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rtx.analysis.causality import audit_model, audit_outputs, prefix_lengths
from rtx.analysis.choice_gradients import choice_gradients
from rtx.analysis.foreign import NextUnit, build_module, logits_of, told
from rtx.analysis.price import DIFFERENCES, PARALLEL, STREAMING, price, sample_positions
from rtx.analysis.spans import standard_error
from rtx.commandline.overrides import check_overrides
from rtx.commands.eval import check_fingerprint
from rtx.commands.plan import vocabulary
from rtx.compose import compose, to_dict
from rtx.config import Config
from rtx.data.catalog import Store, data_root, open_data
from rtx.data.windows import Window, windows
from rtx.errors import RunFailed, UserError
from rtx.evaluation.scores import sample_windows
from rtx.model.patterns import layer_patterns
from rtx.model.transformer import Transformer
from rtx.options import AuditOptions, read_words
from rtx.report.causality import audit_record, audit_table, over_runs_table, price_record, price_table, unlike, verdict
from rtx.training.changes import differences
from rtx.training.files import write_json
from rtx.training.hardware import prepare_torch, resolve_hardware
from rtx.training.metrics import utc_now
from rtx.training.progress import Progress, clock
from rtx.training.trained import load_trained, on_one_device, run_config
from rtx.wording import plural

MODULE_LENGTH, MODULE_VOCABULARY = 256, 256
"""Positions and token ids of somebody else's module where the user does not say."""

OF_MODULE = ("hardware", "seed", "data")
"""What keys begin with that mean something behind audit.module."""

OF_RESULTS = ("model.", "routing.", "data.", "optimizer.", "trainer.")
"""What keys begin with that runs share if they differ by their seed alone."""

QUIET = 3.0
"""Seconds after which it is said how far the work is."""

Result = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Run `rtx audit RUN ... [overrides]` or `rtx audit [overrides]`.

    Raises:
        UserError: no such run, a wrong option, a module that cannot be imported, called, or read as logits.
        RunFailed: no checkpoint is whole, or the result cannot be written.
    """
    words = read_words("audit", arguments)
    folders, wish = words.runs, words.options
    if folders:
        configs = [run_config(folder, words.overrides) for folder in folders]
        audit_runs(folders, configs, wish)
        return 0
    config = on_one_device(compose(words.overrides))
    result = audit_module(config, wish, words.overrides) if wish.module else audit_configuration(config, wish)
    if wish.output is not None:
        save(Path(wish.output), result)
    return 0


def audit_runs(folders: Sequence[Path], configs: Sequence[Config], wish: AuditOptions) -> None:
    """Audit runs one after the other, then the differences over them; writes audit.json beside each."""
    refuse(wish, "module", "a run is a model already")
    refuse(wish, "output", "the result of a run is written to audit.json in its folder")
    for config in configs:
        check_own(config, wish)
    results = [audit_run(folder, config, wish) for folder, config in zip(folders, configs, strict=True)]
    if len(results) > 1 and all("price" in result for result in results):
        together = over_runs(folders, results)
        print("\n".join(["", *over_runs_table(len(folders), together)]))
        changed = {key for config in configs for key in differences(to_dict(configs[0]), to_dict(config))}
        if note := unlike(sorted(key for key in changed if key.startswith(OF_RESULTS))):
            print(note)
        results = [{**result, "over_runs": together} for result in results]
    for folder, result in zip(folders, results, strict=True):
        save(folder / "audit.json", result)


def audit_run(folder: Path, config: Config, wish: AuditOptions) -> Result:
    """Audit one run, and price it on its data."""
    store = open_data(config.data, data_root()) if wish.windows else None
    size = store.vocabulary if store else vocabulary(config.data)
    trained = load_trained(folder, config, wish.checkpoint, size)
    result: Result = {
        "run": str(folder),
        "checkpoint": {"name": trained.name, "step": trained.checkpoint["step"]},
        "seed": config.seed,
    }
    if store is None:
        ids_BN = random_ids(wish, wish.length or config.data.length, size)
    else:
        check_fingerprint(store, trained)
        ids_BN = real_ids(config, wish, store)
    # A copy: it may become float64, and the price is paid in the arithmetic of the run.
    result["changes"] = change_futures(copy.deepcopy(trained.model), config, wish, ids_BN)
    result["choices"] = train_choices(trained.model, ids_BN)
    if store is not None:
        with trained.arithmetic():
            result["price"] = price_model(trained.model, config, wish, store)
    return {**result, "time": utc_now()}


def audit_configuration(config: Config, wish: AuditOptions) -> Result:
    """Audit a fresh model of a configuration on random units."""
    check_own(config, wish)
    size = vocabulary(config.data)
    device = prepare(config)
    model = Transformer(config, size).eval().to(device)
    if not bool(model.output_VS.any()):
        nn.init.normal_(model.output_VS)  # as initialised, zero, it hides all that moves
    print(f"{config.model.name}: a fresh model, {plural(model.count_parameters(), 'parameter')}, seed {config.seed}")
    ids_BN = random_ids(wish, wish.length or config.data.length, size)
    changes = change_futures(model, config, wish, ids_BN)
    return {"config": to_dict(config), "changes": changes, "choices": train_choices(model, ids_BN), "time": utc_now()}


def audit_module(config: Config, wish: AuditOptions, overrides: list[str]) -> Result:
    """Audit the module that audit.module names on random ids; where data are named, price it on them."""
    assert wish.module is not None
    keys = [override.key for override in check_overrides(overrides)]
    for override, key in zip(overrides, keys, strict=True):
        if not key.startswith(OF_MODULE) or key == "data.length":
            reads = "audit.* (audit.length, too), data, hardware.* and seed"
            raise UserError(f"{override}: means nothing to audit.module, which reads {reads}")
    store = open_data(config.data, data_root()) if any(key.startswith("data") for key in keys) else None
    if store and store.answers is not None:
        raise UserError(f"data={store.name}: audit.module is priced on text or images, all units of a window")
    device = prepare(config)
    module = build_module(wish.module).eval().to(device)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    print(f"{wish.module}: {type(module).__name__}, {plural(parameters, 'parameter')}")
    size = wish.vocabulary or (store.vocabulary if store else MODULE_VOCABULARY)
    result: Result = {"module": wish.module}
    try:
        result["changes"] = change_futures_of(copy.deepcopy(module), wish, size, device)
        if store and wish.windows:
            result["price"] = price_model(NextUnit(module, store.vocabulary), config, wish, store, streams=False)
    except UserError:
        raise
    except Exception as error:
        hint = "; audit.double=false keeps its own types" if wish.double and not isinstance(error, ValueError) else ""
        if store and "changes" in result:
            hint = f"; the data have {store.vocabulary:,} ids"
        raise UserError(f"audit.module={wish.module}: {told(error)}{hint}") from error
    return {**result, "time": utc_now()}


def change_futures_of(module: nn.Module, wish: AuditOptions, size: int, device: str) -> Result:
    """Audit somebody else's module on random ids, print the table and return the record; it may become float64."""
    module = module.double() if wish.double else module
    length = wish.length or MODULE_LENGTH
    prefixes = prefix_lengths(length, wish.prefixes)
    ids_BN = random_ids(wish, length, size).to(device)
    print(changes_line(ids_BN, prefixes, module))
    audit = audit_outputs(
        lambda ids: logits_of(module(ids)),
        ids_BN,
        size,
        prefixes,
        tolerance=wish.tolerance,
        seed=wish.seed,
        on_progress=progress("prefixes"),
    )
    print("\n".join([*audit_table({PARALLEL: audit}, {}), verdict(PARALLEL, audit, wish.tolerance)]))
    return {**changes_facts(ids_BN, prefixes, module), PARALLEL: audit_record(audit, wish.tolerance)}


def prepare(config: Config) -> str:
    """Set up torch as the configuration says, seed it, and return the device for a model that is not loaded."""
    hardware = resolve_hardware(config)
    prepare_torch(config, hardware)
    torch.manual_seed(config.seed)
    return "cuda" if hardware.accelerator == "gpu" else "cpu"


def refuse(wish: AuditOptions, key: str, why: str) -> None:
    """Refuse a key of audit that would have no effect."""
    value = getattr(wish, key)
    if value is not None:
        raise UserError(f"audit.{key}={value}: {why}")


def check_own(config: Config, wish: AuditOptions) -> None:
    """Refuse what is for audit.module alone, and sequences longer than the model's."""
    refuse(wish, "vocabulary", "is for audit.module; our own models know theirs")
    if (wish.length or 0) > config.data.length:
        raise UserError(f"audit.length={wish.length} must be at most data.length={config.data.length}")


def random_ids(wish: AuditOptions, length: int, size: int) -> Tensor:
    """Return random token ids `[B, N]`."""
    generator = torch.Generator().manual_seed(wish.seed)
    return torch.randint(size, (wish.sequences, length), generator=generator)


def real_ids(config: Config, wish: AuditOptions, store: Store) -> Tensor:
    """Return windows of a run's data as the ids that positions read: each unit one position behind its own."""
    tokens = store.split(wish.split)
    chosen = chosen_windows(len(tokens), config.data.length, wish.seed, wish.sequences)
    rows = np.stack([tokens[window.start : window.stop][: wish.length] for window in chosen]).astype(np.int64)
    return torch.from_numpy(rows).roll(1, dims=1)


def chosen_windows(units: int, length: int, seed: int, number: int) -> list[Window]:
    """Return a seeded sample of the windows of a split, the same ones for every run."""
    return list(sample_windows(windows(units, length), number, seed))


def change_futures(model: Transformer, config: Config, wish: AuditOptions, ids_BN: Tensor) -> Result:
    """Audit a model of ours in every reading, print the table and return the record; the model may become float64."""
    model = model.double() if wish.double else model
    ids_BN = ids_BN.to(model.output_VS.device)
    prefixes = prefix_lengths(ids_BN.shape[1], wish.prefixes)
    print(changes_line(ids_BN, prefixes, model))
    audits = {
        mode: audit_model(
            model,
            ids_BN,
            prefixes,
            streaming=mode == STREAMING,
            tolerance=wish.tolerance,
            seed=wish.seed,
            on_progress=progress("prefixes"),
        )
        for mode in ((PARALLEL, STREAMING) if wish.streaming else (PARALLEL,))
    }
    layers = range(config.model.layers)
    heads = {(layer, name): n for layer in layers for name, n in layer_patterns(config, layer).items()}
    print("\n".join(audit_table(audits, heads)))
    print("\n".join(verdict(mode, audit, wish.tolerance) for mode, audit in audits.items()))
    records = {mode: audit_record(audit, wish.tolerance) for mode, audit in audits.items()}
    return {**changes_facts(ids_BN, prefixes, model), **records}


def train_choices(model: Transformer, ids_BN: Tensor) -> list[Result]:
    """Say of every choice by content what trains it, by one training pass over one sequence; return the record."""
    found = choice_gradients(model, ids_BN[:1].roll(-1, dims=1).to(model.output_VS.device))
    for choice in found:
        print(choice.line())
    return [choice.record() for choice in found]


def changes_line(ids_BN: Tensor, prefixes: list[int], model: nn.Module) -> str:
    """Return the line that says what is changed."""
    sequences, length = ids_BN.shape
    return (
        f"changing all behind a prefix: {plural(len(prefixes), 'length')} from {prefixes[0]} to {prefixes[-1]:,}, "
        f"{plural(sequences, 'sequence')} of {length:,}, {arithmetic(model)}"
    )


def changes_facts(ids_BN: Tensor, prefixes: list[int], model: nn.Module) -> Result:
    """Return how the future was changed as JSON values."""
    sequences, length = ids_BN.shape
    return {"sequences": sequences, "length": length, "prefixes": prefixes, "type": arithmetic(model)}


def arithmetic(model: nn.Module) -> str:
    """Return the type that a model computes in."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return str(parameter.dtype).removeprefix("torch.")


def price_model(model: nn.Module, config: Config, wish: AuditOptions, store: Store, streams: bool = True) -> Result:
    """Price a model on data, print the table and return the record; one that does not stream scores no first unit."""
    tokens = store.split(wish.split)
    size = config.data.length if streams else wish.length or MODULE_LENGTH
    chosen = chosen_windows(len(tokens), size, wish.seed, wish.windows)
    length = chosen[0].stop - chosen[0].start
    candidates = np.arange(0 if streams else 1, length) if store.answers is None else store.answers
    positions_P = sample_positions(candidates, wish.positions, wish.seed)
    starts_K = [window.start for window in chosen]
    print(
        f"the price on {wish.split}: {plural(len(positions_P), 'position')} in each of {plural(len(chosen), 'window')} "
        f"of {length:,}, each scored {'three' if streams else 'two'} ways"
    )
    shown = progress("prefixes rerun")
    paid = price(model, tokens, starts_K, length, positions_P, streams=streams, on_progress=shown)
    record = price_record(
        paid,
        unit=store.unit,
        split=wish.split,
        windows=len(starts_K),
        positions=positions_P.tolist(),
        length=length,
        precision=config.hardware.precision,
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


def progress(what: str) -> Callable[[int, int], None]:
    """Return what shows how many are done, and clears its line behind the last one."""
    line, begin = Progress(sys.stderr), time.monotonic()

    def show(done: int, total: int) -> None:
        seconds = time.monotonic() - begin
        if done == total:
            line.clear()
        elif seconds > QUIET:
            line.show(f"{done:,}/{total:,} {what} | {clock(seconds / done * (total - done))} left")

    return show


def save(path: Path, result: Result) -> None:
    """Write a result and say where.

    Raises:
        RunFailed: it cannot be written.
    """
    try:
        write_json(path, result)
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error
    print(path)
