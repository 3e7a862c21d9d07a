"""`rtx train`: from a configuration to a trained model, its score beside simple baselines, and a sample.

Where RTX_RUN names the folder of a run, the command goes on with it, and does nothing where it is done.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rtx.analysis.attention_weights import read_telemetry
from rtx.analysis.footprint import fit_to_device, with_less_memory
from rtx.commands.sample import draw_images, write_text
from rtx.compose import RUN_CONFIG, compose, load_run_config, to_dict, to_yaml, with_absolute_path
from rtx.config import Config
from rtx.data.catalog import Store, data_root, open_data
from rtx.data.datamodule import RtxDataModule
from rtx.data.store import TokenStore
from rtx.disk import replace_file
from rtx.errors import RunFailed, UserError
from rtx.evaluation.baselines import baselines
from rtx.evaluation.protocols import further_lines, measures, stamp_phrases
from rtx.options import SampleOptions
from rtx.progress import say
from rtx.report.summary import answers_line, closing_lines, protocol_line
from rtx.training.callbacks import Watch
from rtx.training.checkpoint import Checkpoint, newest_checkpoint
from rtx.training.distributed import Ranks
from rtx.training.hardware import Hardware, prepare_torch, resolve_hardware
from rtx.training.inference import load_run, on_one_device
from rtx.training.loggers import logging_to
from rtx.training.memory import OUT_OF_MEMORY, device_memory, out_of_memory
from rtx.training.module import TrainingModule, build_model
from rtx.training.resumption import Resumption, as_chosen, differences, plan_resumption, refuse_changes
from rtx.training.run_folder import Status, given_folder, new_run_folder, read_status, record_start, shown, working_in
from rtx.training.signals import Signals, Stopped, ignore_signals, started_by_another, state_after
from rtx.training.trainer import Outcome, fit

SAMPLE_LENGTH, SAMPLE_TEMPERATURE = 240, 0.8
SAMPLE_UNITS = 3072
"""Sub-pixels of a sample image: all of one of 32 x 32, the upper rows of a larger one."""


def main(arguments: list[str]) -> int:
    config, folder = with_absolute_path(compose(arguments)), given_folder()
    if folder is None or not (folder / RUN_CONFIG).exists():
        return run(config)
    config = as_chosen(config, load_run_config(folder))
    plan = plan_resumption(folder, config)
    return 0 if plan is None else run(config, folder, plan)


def run(config: Config, folder: Path | None = None, resumption: Resumption | None = None) -> int:
    """Train in a new folder, or go on in that of a run, and return the exit code; also the work of `rtx resume`.

    Raises:
        UserError: the configuration does not fit the data, the machine or the checkpoint.
        RunFailed: NaN, a full disk, a lost process.
    """
    hardware = resolve_hardware(config)
    prepare_torch(config, hardware)
    if hardware.rank > 0:
        # Only the first process writes; the others, whoever started them, need no folder of their own.
        return follow(config, hardware, folder or Path(os.devnull), resumption)
    with Signals() as signals:
        try:
            store = open_data(config.data, data_root())  # before there is a folder for a mistake to leave behind
            fitted, choice = fitted_to(hardware, config, store)
            signals.holding = True  # until the run has a status to tell about it
            folder = folder or new_run_folder(config.name)
            begin = nothing if resumption else partial(write_config, fitted, folder)
            with working_in(folder, begin) as status:
                signals.at_once = lambda code: status.end(state_after(code), "stopped at once")
                if choice:
                    say(choice)
                place = (folder, store, signals, Ranks(0, hardware.world), status)
                outcome = within_memory(fitted, config, resumption, hardware, *place)
                finish(fitted, hardware, folder, store, outcome, status)
            return 0
        except Stopped as stop:
            print(stop, file=sys.stderr)
            if folder and (read_status(folder) or {}).get("state") == "done":
                return 0  # only an upload, or the closing lines, were cut short
            if folder:
                print(f"continue with: rtx resume {shown(folder)}", file=sys.stderr)
            return stop.code


def fitted_to(hardware: Hardware, config: Config, store: Store) -> tuple[Config, str]:
    return fit_to_device(config, store.vocabulary, device_memory(config, hardware.devices) or 0, hardware.world)


def within_memory(
    config: Config, asked: Config, resumption: Resumption | None, hardware: Hardware, *place: Any
) -> Outcome:
    """Train; where memory runs out, go on from the newest checkpoint with smaller micro-batches, or begin again.

    The other processes of a run would wait for one whose memory has run out: of several, none tries again. Nor does it
    help where a score had too little (`RunFailed`). Of `asked`, as composed, only what is `auto` may change.
    """
    while True:
        less = with_less_memory(config, asked) if hardware.world == 1 else None
        try:
            return train(config, resumption, *place)
        except (RuntimeError, MemoryError) as error:
            reason = out_of_memory(error)
            if isinstance(error, RunFailed) or less is None or not reason.startswith(f"{OUT_OF_MEMORY}: "):
                raise
        say(reason)
        config, resumption = less, Resumption(OUT_OF_MEMORY, differences(to_dict(config), to_dict(less)))
        gc.collect()  # what the error held of model and step; only now may there be room for others
        torch.cuda.empty_cache()


def follow(config: Config, hardware: Hardware, folder: Path, resumption: Resumption | None) -> int:
    """Do the work of a rank that writes nothing; how a run ends that has begun is for the first rank to say.

    A child that the first process of its machine started has nothing to do with signals, goes when its parent goes, and
    then leaves with 0: any other end is one that the parent does not know of.
    """
    code, ranks = 0, Ranks(hardware.rank, hardware.world)
    try:
        with Signals() as signals:
            store = open_data(config.data, data_root(), nothing)
            config, _ = fitted_to(hardware, config, store)
            train(config, resumption, folder, store, signals, ranks, None)
    except Stopped as stop:
        code = stop.code
    except (RunFailed, UserError) as error:
        code = 2 if isinstance(error, UserError) else 1
        if not ranks.connected:
            print("\n".join(f"rtx: {line}" for line in str(error).splitlines()), file=sys.stderr)
    return 0 if started_by_another() and ranks.connected else code


def train(
    config: Config,
    resumption: Resumption | None,
    folder: Path,
    store: Store,
    signals: Signals,
    ranks: Ranks,
    status: Status | None,
) -> Outcome:
    """Build the model, fit it and return what came of it; ranks without a `status` write nothing."""
    signals.release()
    tell, hardware, facts = say if status else nothing, resolve_hardware(config), {"config": to_dict(config)}
    start, changed = find_start(config, resumption, folder, store, status)
    facts["data"] = store.describe()
    share = {"rank": hardware.rank, "world": hardware.world, "micro_batch": hardware.micro_batch_size}
    loader: dict[str, Any] = {"pin_memory": hardware.accelerator == "gpu", "worker_init_fn": ignore_signals}
    data = RtxDataModule(config, store, step=start["step"] if start else 0, **share, **loader)
    model = build_model(config, store.vocabulary, None if start else lambda: data.items[0])
    if status:
        known = {"hardware": vars(hardware), "data": facts["data"], "parameters": model.count_parameters()}
        if moved := record_start(folder, known, changed if resumption else None, anew=start is None):
            say(f"no longer exact: {', '.join(moved)}")
        if resumption:  # only now: it is known to fit the checkpoint
            write_config(config, folder)
        if isinstance(store, TokenStore) and (name := store.tokenizer.describe().get("file")):
            content = (store.folder / name).read_bytes()  # so that sampling needs no data
            replace_file(folder / name, lambda file: file.write(content))
        say(opening_line(config, hardware, store, known["parameters"]))
    module = TrainingModule(model, config, store.answers, ranks, facts)
    with logging_to(folder if status else None, config, facts["config"], tell) as loggers:
        watch = Watch(folder, module, data, signals, read_telemetry, status)
        outcome = fit(watch, loggers, start["path"] if start else None)
        if status:
            final = measures(store, "valid", data.held_out, data.windows, outcome.final)
            record_end(status, outcome, store.unit, final)
            signals.end()
    signals.release()
    return outcome


def find_start(
    config: Config, resumption: Resumption | None, folder: Path, store: Store, status: Status | None
) -> tuple[Checkpoint | None, dict[str, Any]]:
    """Return the checkpoint to go on from, if any, and the fields that change; `UserError` where they do not fit."""
    tell, where = say if status else nothing, shown(folder)
    if resumption is None:
        tell(f"run: {where}")
        return None, {}
    start = newest_checkpoint(folder / "checkpoints", set_aside=bool(status), report=tell)
    # An editor, or a disk, may have changed config.yaml: it is compared with the checkpoint as well.
    was = differences(start["config"], to_dict(config), shared=True) if start else {}
    changed, step, steps = {**was, **resumption.changed}, start["step"] if start else 0, config.trainer.steps
    if status:  # the others are compared with the first one
        refuse_changes(changed)
        saved, checkpoints = status.fields.get("saved"), folder / "checkpoints"
        if start is None and saved and (checkpoints / "best.ckpt").exists():
            raise UserError(
                f"{checkpoints} holds best.ckpt alone, last.ckpt (step {saved:,}) is gone: the run cannot go on "
                "(rtx eval and rtx sample take best.ckpt as it is); to begin anew, move best.ckpt away"
            )
        if start and "trainer.steps" in changed and steps <= step:
            raise UserError(f"trainer.steps={steps}: the newest checkpoint is of step {step}; give more than that")
        if start and start["data"]["fingerprint"] != store.fingerprint:
            raise UserError(f"the data of {store.name} are not those that the run began with")
    begins = f"from step {step:,}" if start else "from the beginning: it has no checkpoint"
    lines = [f"  {key}: {old} -> {new}" for key, (old, new) in changed.items()]
    tell("\n".join([f"resuming {where} ({resumption.state}) {begins}", *lines]))
    return start, changed


def write_config(config: Config, folder: Path) -> None:
    replace_file(folder / RUN_CONFIG, lambda file: file.write(to_yaml(config).encode()))


def opening_line(config: Config, hardware: Hardware, store: Store, parameters: int) -> str:
    trainer, length = config.trainer, config.data.length
    size = f"{len(store.split('train')):,} {store.unit}s" if isinstance(store, TokenStore) else "made on the fly"
    where = f"{hardware.world} x {hardware.accelerator}" if hardware.world > 1 else hardware.accelerator
    told = f"{parameters:,} parameters ({config.model.name}), {store.name} ({size})"
    return f"{told}, {trainer.steps:,} steps of {trainer.batch_size} x {length:,}, {where}"


def record_end(status: Status, outcome: Outcome, unit: str, final: dict[str, Any]) -> None:
    score = outcome.final
    error = score.standard_error if math.isfinite(score.standard_error) else None  # of one window there is none
    final = {"bits": score.bits, "unit": unit, "units": score.units, "se": error, **final}
    if score.accuracy is not None:
        final["accuracy"] = score.accuracy
    status.update(step=outcome.step, seconds=outcome.seconds, best=outcome.best, final=final)
    status.end("done", "trainer.max_minutes is up" if outcome.time_up else None)


def finish(config: Config, hardware: Hardware, folder: Path, store: Store, outcome: Outcome, status: Status) -> None:
    """Print the score of a finished run beside baselines on the same split, and a sample, where memory is left."""
    score, final = outcome.final, status.fields["final"]
    try:
        if store.unit == "byte":
            final["baselines"] = baselines(store.split("train"), store.split("valid"))
            status.update(write=True)
        lines = closing_lines(
            run=shown(folder),
            step=outcome.step,
            time_up=outcome.time_up,
            bits=score.bits,
            unit=store.unit,
            protocol=protocol_line(
                *(config, "valid", store.unit, score.units), stamps=stamp_phrases(store.stamps, "valid")
            ),
            baselines=final.get("baselines", {}),
            further=further_lines(store.unit, final),
            answers="" if score.accuracy is None else answers_line(score.accuracy, 1 / config.data.values),
        )
        say(lines)
        if isinstance(store, TokenStore):
            device = torch.device("cuda" if hardware.accelerator == "gpu" else "cpu")
            work = load_run(folder, on_one_device(config), "last", device, say=nothing)
            length = min(SAMPLE_UNITS if store.image else SAMPLE_LENGTH, config.data.length)
            say(f"a sample (temperature {SAMPLE_TEMPERATURE}):")
            (draw_images if store.image else write_text)(work, SampleOptions(length, temperature=SAMPLE_TEMPERATURE))
    except (RuntimeError, MemoryError) as error:  # the run is done, whatever becomes of these
        if not (reason := str(error) if isinstance(error, RunFailed) else out_of_memory(error)):
            raise
        say(f"no sample: {reason}")


def nothing(*_: object) -> None:
    """Do nothing."""
