"""`rtx train`: from a configuration to a trained model, its score beside simple baselines, and a sample.

Where RTX_RUN names the folder of a run, the command goes on with it, and does nothing where it is done.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rtx.analysis.fitting import fit_to_device, with_less_memory
from rtx.analysis.telemetry import read_telemetry
from rtx.compose import RUN_CONFIG, compose, load_run_config, to_dict, to_yaml, with_absolute_path
from rtx.config import Config
from rtx.data.baselines import baselines
from rtx.data.catalog import Store, data_root, open_data
from rtx.data.released import Reading
from rtx.data.sheet import png_grid
from rtx.data.store import TokenStore
from rtx.disk import replace_file, write_json
from rtx.errors import RunFailed, UserError
from rtx.evaluation.measures import further_lines, stamp_phrases
from rtx.evaluation.scores import measured
from rtx.model.decoding import generate
from rtx.model.transformer import Transformer
from rtx.report.summary import answers_line, closing_lines, protocol_line
from rtx.report.text import printable
from rtx.training.checkpoint import Checkpoint, check_shapes, newest_checkpoint
from rtx.training.config_diff import differences
from rtx.training.datamodule import DataModule
from rtx.training.distributed import Ranks
from rtx.training.hardware import Hardware, prepare_torch, resolve_hardware, with_micro_batches
from rtx.training.inference import LoadedRun, load_run, on_one_device
from rtx.training.launchers import is_first
from rtx.training.loggers import logging_to
from rtx.training.memory import OUT_OF_MEMORY, as_chosen, device_memory, out_of_memory
from rtx.training.module import TrainingModule, build_model
from rtx.training.progress import say
from rtx.training.resumption import Resumption, plan_resumption, refuse_changes
from rtx.training.run_folder import (
    Status,
    environment,
    given_folder,
    machine_changes,
    new_run_folder,
    read_status,
    record_resumption,
    shown,
    working_in,
)
from rtx.training.samples import save_sample
from rtx.training.signals import (
    Signals,
    Stopped,
    announce_parent,
    go_with_parent,
    ignore_signals,
    started_by_another,
    state_after,
    stop_with_sweep,
)
from rtx.training.trainer import Outcome, Run

Result = TypeVar("Result")

SAMPLE_LENGTH, SAMPLE_TEMPERATURE, SAMPLE_SEED = 240, 0.8, 0
SAMPLE_UNITS = 3072
"""Sub-pixels of a sample image: all of one of 32 x 32, the upper rows of a larger one."""


def main(arguments: list[str]) -> int:
    """Run `rtx train <overrides>` and return the exit code."""
    config, folder = with_absolute_path(compose(arguments)), given_folder()
    if folder is None or not (folder / RUN_CONFIG).exists():
        return run(config, resolve_hardware(config))
    config = as_chosen(config, load_run_config(folder))
    plan = plan_resumption(folder, config)
    if isinstance(plan, str):  # all processes leave: nobody is to wait for the first one
        if is_first():
            say(plan)
        return 0
    return run(config, resolve_hardware(config), folder, plan)


def run(config: Config, hardware: Hardware, folder: Path | None = None, resumption: Resumption | None = None) -> int:
    """Train in a run folder and return the exit code; also the work of `rtx resume`.

    Args:
        config: the resolved configuration.
        hardware: what it means on this machine.
        folder: of the run to go on with; None: a new one.
        resumption: go on from the newest checkpoint; None: from the beginning.

    Raises:
        UserError: the configuration does not fit the data, the machine or the checkpoint.
        RunFailed: NaN, a full disk, a lost process.
    """
    prepare_torch(config, hardware)
    if hardware.rank > 0:
        # Only the first process writes; the others, whoever started them, need no folder of their own.
        return follow(config, hardware, folder or Path(os.devnull), resumption)
    announce_parent()
    with Signals() as signals:
        try:
            stop_with_sweep()
            store = open_data(config.data, data_root())  # before there is a folder for a mistake to leave behind
            fitted, choice = fit_to_device(config, store.vocabulary, memory_of(config, hardware), hardware.world)
            signals.holding = True  # until the run has a status to tell about it
            folder = folder or new_run_folder(config.name)
            begin = nothing if resumption else partial(write_config, fitted, folder)
            with working_in(folder, begin) as status:
                signals.at_once = lambda code: status.end(state_after(code), "stopped at once")
                if choice:
                    say(choice)

                def attempt(fitted: Config, again: Resumption | None) -> Callable[[], object]:
                    machine, ranks = with_micro_batches(hardware, fitted), Ranks(0, hardware.world)
                    return train(fitted, machine, folder, store, signals, again or resumption, ranks, status)

                tell_end = within_memory(attempt, fitted, config, hardware.world)
                tell_end()
            return 0
        except Stopped as stop:
            print(stop, file=sys.stderr)
            if folder and (read_status(folder) or {}).get("state") == "done":
                return 0  # only an upload, or the closing lines, were cut short
            if folder:
                print(f"continue with: rtx resume {shown(folder)}", file=sys.stderr)
            return stop.code


def memory_of(config: Config, hardware: Hardware) -> int:
    """Return the bytes that this process may fill: of a GPU, where the run is for one."""
    return device_memory(config, hardware.devices) or 0


def within_memory(
    attempt: Callable[[Config, Resumption | None], Result], config: Config, asked: Config, world: int
) -> Result:
    """Train; where memory runs out, go on from the newest checkpoint with smaller micro-batches, or begin again.

    The other processes of a run would wait for one whose memory has run out: of several, none tries again. Nor does it
    help where a score had too little (`RunFailed`).

    Args:
        attempt: trains with a configuration; with a resumption, in a folder where a run has begun.
        config: in which the micro-batch is chosen.
        asked: as composed: what is `auto` there may change.
        world: processes of the run.

    Raises:
        Exception: of the attempt that is the last.
    """
    again: Resumption | None = None
    while True:
        try:
            return attempt(config, again)
        except (RuntimeError, MemoryError) as error:
            reason, less = out_of_memory(error), with_less_memory(config, asked)
            if isinstance(error, RunFailed) or world > 1 or less is None or not reason.startswith(f"{OUT_OF_MEMORY}: "):
                raise
        say(reason)
        config, again = less, Resumption(OUT_OF_MEMORY, differences(to_dict(config), to_dict(less)))
        gc.collect()  # what the error held of model and step; only now may there be room for others
        torch.cuda.empty_cache()


def follow(config: Config, hardware: Hardware, folder: Path, resumption: Resumption | None) -> int:
    """Do the work of a rank that writes nothing; how a run ends that has begun is for the first rank to say.

    A child that the first process of its machine started has nothing to do with signals, goes when its parent goes, and
    then leaves with 0: any other end is one that the parent does not know of.
    """
    code, child, ranks = 0, started_by_another(), Ranks(hardware.rank, hardware.world)
    try:
        with Signals() as signals:
            if child:
                ignore_signals()
                go_with_parent()
            store = open_data(config.data, data_root(), nothing)
            config, _ = fit_to_device(config, store.vocabulary, memory_of(config, hardware), hardware.world)
            hardware = with_micro_batches(hardware, config)
            train(config, hardware, folder, store, signals, resumption, ranks, None)
    except Stopped as stop:
        code = stop.code
    except (RunFailed, UserError) as error:
        code = 2 if isinstance(error, UserError) else 1
        if not ranks.connected:
            print("\n".join(f"rtx: {line}" for line in str(error).splitlines()), file=sys.stderr)
    return 0 if child and ranks.connected else code


def train(
    config: Config,
    hardware: Hardware,
    folder: Path,
    store: Store,
    signals: Signals,
    resumption: Resumption | None,
    ranks: Ranks,
    status: Status | None,
) -> Callable[[], object]:
    """Build the model, fit it and return what prints what came of it; ranks without a `status` write nothing."""
    signals.release()
    tell = say if status else nothing
    start = newest_checkpoint(folder / "checkpoints", set_aside=bool(status), report=tell) if resumption else None
    changed = changes(config, start, resumption)
    if status:  # the others are compared with the first one
        refuse_changes(changed)
    if start:
        check_start(config, store, start, changed)
    tell("\n".join([beginning(folder, resumption, start), *(f"  {k}: {a} -> {b}" for k, (a, b) in changed.items())]))
    data = DataModule(config, hardware, store)
    model = build_model(config, store.vocabulary, None if start else lambda: data.items.item(0, 0))
    if start:
        check_shapes(model, start, to_dict(config))
        data.step = start["step"]
    if status:
        facts = {"hardware": hardware.describe(), "data": store.describe(), "parameters": model.count_parameters()}
        record_start(config, folder, start, changed if resumption else None, facts)
        if isinstance(store, TokenStore):
            keep_tokenizer(store, folder)
        say(opening_line(config, hardware, store, model))
    facts = {"config": to_dict(config), "data": store.describe()}
    module = TrainingModule(model, config, store.answers, ranks, facts)
    with logging_to(folder if status else None, config, facts["config"], tell) as loggers:
        work = Run(config, hardware, folder, module, data, signals, read_telemetry, loggers, status, tell)
        outcome = work.fit(start["path"] if start else None)
        measures: dict[str, Any] = {}
        if status:
            measures = final_measures(config, store, outcome)
            record_end(status, outcome, store.unit, measures)
            signals.end()
    signals.release()
    return partial(finish, config, hardware, folder, store, outcome, measures) if status else nothing


def finish(
    config: Config, hardware: Hardware, folder: Path, store: Store, outcome: Outcome, measures: dict[str, Any]
) -> None:
    """Print the summary of a finished run, and a sample of its text."""
    say(closing(config, store, outcome, folder, measures))
    if isinstance(store, TokenStore):
        device = torch.device("cuda" if hardware.accelerator == "gpu" else "cpu")
        print_sample(load_run(folder, on_one_device(config), "last", device, say=nothing), store)


def changes(config: Config, start: Checkpoint | None, resumption: Resumption | None) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which a run goes on otherwise than its config.yaml or its checkpoint says, with both values.

    They may differ: an editor, or a disk, may have changed config.yaml.
    """
    found = dict(resumption.changed) if resumption else {}
    return {**differences(start["config"], to_dict(config), shared=True), **found} if start else found


def check_start(config: Config, store: Store, start: Checkpoint, changed: dict[str, tuple[Any, Any]]) -> None:
    """Refuse to go on with other data, or towards a length that the run has reached already.

    Raises:
        UserError: names what is wrong.
    """
    steps, step = config.trainer.steps, start["step"]
    if "trainer.steps" in changed and steps <= step:
        raise UserError(
            f"trainer.steps={steps}: the newest checkpoint of the run is of step {step}; give more than that"
        )
    if start["data"]["fingerprint"] != store.fingerprint:
        raise UserError(f"the data of {store.name} are not those that the run began with")


def beginning(folder: Path, resumption: Resumption | None, start: Checkpoint | None) -> str:
    """Return the line that names the run, and from where it goes on."""
    if resumption is None:
        return f"run: {shown(folder)}"
    where = f"from step {start['step']:,}" if start else "from the beginning: it has no checkpoint"
    return f"resuming {shown(folder)} ({resumption.state}) {where}"


def record_start(
    config: Config,
    folder: Path,
    start: Checkpoint | None,
    changed: dict[str, tuple[Any, Any]] | None,
    facts: dict[str, Any],
) -> None:
    """Record machine and software, and what a resumed run changes; say where the machine may change its bits.

    Only now is the configuration of a resumed run written: it is known to fit the checkpoint.
    """
    if start is None or not (folder / "environment.json").exists():
        write_json(folder / "environment.json", environment(facts))
    if changed is not None:
        if moved := machine_changes(folder, facts):
            say(f"no longer exact: {', '.join(moved)}")
        record_resumption(folder, changed, facts)
        write_config(config, folder)


def keep_tokenizer(store: TokenStore, folder: Path) -> None:
    """Keep the file of a trained tokenizer with the run, so that sampling needs no data."""
    if name := store.tokenizer.describe().get("file"):
        content = (store.folder / name).read_bytes()
        replace_file(folder / name, lambda file: file.write(content))


def record_end(status: Status, outcome: Outcome, unit: str, measures: dict[str, Any]) -> None:
    """Write the status of a finished run."""
    score = outcome.final
    error = score.standard_error if math.isfinite(score.standard_error) else None  # of one window there is none
    final = {"bits": score.bits, "unit": unit, "units": score.units, "se": error, **measures}
    if score.accuracy is not None:
        final["accuracy"] = score.accuracy
    status.update(step=outcome.step, seconds=outcome.seconds, best=outcome.best, final=final)
    status.end("done", "trainer.max_minutes is up" if outcome.time_up else None)


def write_config(config: Config, folder: Path) -> None:
    """Write config.yaml."""
    replace_file(folder / RUN_CONFIG, lambda file: file.write(to_yaml(config).encode()))


def opening_line(config: Config, hardware: Hardware, store: Store, model: Transformer) -> str:
    """Return what is about to run, in a line."""
    trainer = config.trainer
    size = f"{len(store.split('train')):,} {store.unit}s" if isinstance(store, TokenStore) else "made on the fly"
    where = f"{hardware.world} x {hardware.accelerator}" if hardware.world > 1 else hardware.accelerator
    return (
        f"{model.count_parameters():,} parameters ({config.model.name}), {store.name} ({size}), "
        f"{trainer.steps:,} steps of {trainer.batch_size} x {config.data.length:,}, {where}"
    )


def closing(config: Config, store: Store, outcome: Outcome, folder: Path, measures: dict[str, Any]) -> str:
    """Return the summary of a finished run, its score beside baselines on the same split."""
    others = baselines(store.split("train"), store.split("valid")) if store.unit == "byte" else {}
    accuracy = outcome.final.accuracy
    return closing_lines(
        run=shown(folder),
        step=outcome.step,
        time_up=outcome.time_up,
        bits=outcome.final.bits,
        unit=store.unit,
        protocol=protocol_line(
            config, "valid", store.unit, outcome.final.units, stamps=stamp_phrases(store.stamps, "valid")
        ),
        baselines=others,
        further=further_lines(store.unit, measures),
        answers="" if accuracy is None else answers_line(accuracy, 1 / config.data.values),
    )


def final_measures(config: Config, store: Store, outcome: Outcome) -> dict[str, Any]:
    """Return the validation score of a finished run in every measure that its text has."""
    reading = Reading(store.split("valid"))
    every = DataModule.every_window(config, reading.tokens)
    return measured(store, "valid", reading, every, outcome.final, partial=False)


def print_sample(run: LoadedRun, store: TokenStore) -> None:
    """Print and keep a short text that the model writes from nothing; of a model of images, keep an image.

    Raises:
        RunFailed: it cannot be kept.
    """
    length, image = SAMPLE_LENGTH, store.image
    if image:
        rows = min(image[0], max(1, SAMPLE_UNITS // (3 * image[1])))
        length = rows * 3 * image[1]
    elif run.model.embedding.positions is not None:
        length = min(length, run.model.embedding.positions.length)
    generator, empty = torch.Generator().manual_seed(SAMPLE_SEED), torch.empty(1, 0, dtype=torch.int64)
    draws = generate(run.model, empty, length, temperature=SAMPLE_TEMPERATURE, generator=generator)
    units, keep = [int(unit) for unit in draws], partial(save_sample, run.folder, run.checkpoint["step"], SAMPLE_SEED)
    if image:
        canvas = np.zeros(image[0] * image[1] * 3, dtype=np.uint8)
        canvas[:length] = units
        part = "" if rows == image[0] else f", the first {rows} of its {image[0]} rows"
        path = keep(png_grid([canvas], image), "png")
        say(f"a sample image (temperature {SAMPLE_TEMPERATURE}{part}): {shown(path)}")
        return
    text = store.tokenizer.decode(units)
    say(f"a sample (temperature {SAMPLE_TEMPERATURE}):")
    say(printable(text.decode("utf-8", "replace")))
    say(shown(keep(text)))


def nothing(*_: object) -> None:
    """Do nothing."""
