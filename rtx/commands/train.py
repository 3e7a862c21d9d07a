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
from rtx.compose import RUN_CONFIG, compose, load_run_config, to_dict, to_yaml, with_absolute_path
from rtx.config import Config
from rtx.data.catalog import Store, data_root, open_data
from rtx.data.datamodule import RtxDataModule
from rtx.data.store import TokenStore
from rtx.disk import replace_file
from rtx.errors import RunFailed, UserError
from rtx.evaluation.baselines import baselines
from rtx.evaluation.measures import further_lines, stamp_phrases
from rtx.evaluation.protocols import Reading
from rtx.evaluation.scores import measured
from rtx.model.transformer import Transformer
from rtx.options import SampleOptions
from rtx.report.summary import answers_line, closing_lines, protocol_line
from rtx.training.checkpoint import Checkpoint, newest_checkpoint
from rtx.training.config_diff import differences
from rtx.training.distributed import Ranks
from rtx.training.hardware import Hardware, prepare_torch, resolve_hardware, with_micro_batches
from rtx.training.inference import LoadedRun, load_run, on_one_device
from rtx.training.loggers import logging_to
from rtx.training.memory import OUT_OF_MEMORY, device_memory, out_of_memory
from rtx.training.module import TrainingModule, build_model
from rtx.training.progress import say
from rtx.training.resumption import Resumption, as_chosen, plan_resumption, refuse_changes
from rtx.training.run_folder import Status, given_folder, new_run_folder, read_status, record_start, shown, working_in
from rtx.training.samples import draw, save_images, save_sample
from rtx.training.signals import Signals, Stopped, started_by_another, state_after
from rtx.training.trainer import Outcome, Run
from rtx.wording import printable

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
                place = (hardware, folder, store, signals, Ranks(0, hardware.world), status)
                outcome, measures = within_memory(fitted, config, resumption, *place)
                finish(fitted, hardware, folder, store, outcome, measures)
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
) -> tuple[Outcome, dict[str, Any]]:
    """Train; where memory runs out, go on from the newest checkpoint with smaller micro-batches, or begin again.

    The other processes of a run would wait for one whose memory has run out: of several, none tries again. Nor does it
    help where a score had too little (`RunFailed`). Of `asked`, as composed, only what is `auto` may change.
    """
    while True:
        less = with_less_memory(config, asked) if hardware.world == 1 else None
        try:
            return train(config, resumption, hardware, *place)
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
    code, child, ranks = 0, started_by_another(), Ranks(hardware.rank, hardware.world)
    try:
        with Signals() as signals:
            store = open_data(config.data, data_root(), nothing)
            config, _ = fitted_to(hardware, config, store)
            train(config, resumption, hardware, folder, store, signals, ranks, None)
    except Stopped as stop:
        code = stop.code
    except (RunFailed, UserError) as error:
        code = 2 if isinstance(error, UserError) else 1
        if not ranks.connected:
            print("\n".join(f"rtx: {line}" for line in str(error).splitlines()), file=sys.stderr)
    return 0 if child and ranks.connected else code


def train(
    config: Config,
    resumption: Resumption | None,
    hardware: Hardware,
    folder: Path,
    store: Store,
    signals: Signals,
    ranks: Ranks,
    status: Status | None,
) -> tuple[Outcome, dict[str, Any]]:
    """Build the model, fit it and return what came of it, in every measure; ranks without a `status` write nothing."""
    signals.release()
    tell, hardware, plain = say if status else nothing, with_micro_batches(hardware, config), to_dict(config)
    start, changed = None, {}
    if resumption:
        start = newest_checkpoint(folder / "checkpoints", set_aside=bool(status), report=tell)
        # An editor, or a disk, may have changed config.yaml: it is compared with the checkpoint as well.
        changed = {**(differences(start["config"], plain, shared=True) if start else {}), **resumption.changed}
        if status:  # the others are compared with the first one
            refuse_changes(changed)
            check_start(config, folder, store, start, changed, status)
    tell("\n".join([beginning(folder, resumption, start), *(f"  {k}: {a} -> {b}" for k, (a, b) in changed.items())]))
    data = RtxDataModule(config, hardware, store)
    model = build_model(config, store.vocabulary, None if start else lambda: data.items.item(0, 0))
    data.step = start["step"] if start else 0
    if status:
        facts = {"hardware": vars(hardware), "data": store.describe(), "parameters": model.count_parameters()}
        if moved := record_start(folder, facts, changed if resumption else None, anew=start is None):
            say(f"no longer exact: {', '.join(moved)}")
        if resumption:  # only now: it is known to fit the checkpoint
            write_config(config, folder)
        if isinstance(store, TokenStore) and (name := store.tokenizer.describe().get("file")):
            content = (store.folder / name).read_bytes()  # so that sampling needs no data
            replace_file(folder / name, lambda file: file.write(content))
        say(opening_line(config, hardware, store, model))
    module = TrainingModule(model, config, store.answers, ranks, {"config": plain, "data": store.describe()})
    with logging_to(folder if status else None, config, plain, tell) as loggers:
        work = Run(folder, module, data, signals, read_telemetry, loggers, status, tell)
        outcome, measures = work.fit(start["path"] if start else None), {}
        if status:
            measures = measured(store, "valid", Reading(data.held_out), data.windows, outcome.final, partial=False)
            record_end(status, outcome, store.unit, measures)
            signals.end()
    signals.release()
    return outcome, measures


def check_start(
    config: Config, folder: Path, store: Store, start: Checkpoint | None, changed: dict[str, Any], status: Status
) -> None:
    if start is None:
        if (saved := status.fields.get("saved")) and (folder / "checkpoints" / "best.ckpt").exists():
            raise UserError(
                f"{folder / 'checkpoints'} holds best.ckpt alone, last.ckpt (step {saved:,}) is gone: the run cannot "
                "go on (rtx eval and rtx sample take best.ckpt as it is); to begin anew, move best.ckpt away"
            )
        return
    steps, step = config.trainer.steps, start["step"]
    if "trainer.steps" in changed and steps <= step:
        raise UserError(
            f"trainer.steps={steps}: the newest checkpoint of the run is of step {step}; give more than that"
        )
    if start["data"]["fingerprint"] != store.fingerprint:
        raise UserError(f"the data of {store.name} are not those that the run began with")


def beginning(folder: Path, resumption: Resumption | None, start: Checkpoint | None) -> str:
    if resumption is None:
        return f"run: {shown(folder)}"
    where = f"from step {start['step']:,}" if start else "from the beginning: it has no checkpoint"
    return f"resuming {shown(folder)} ({resumption.state}) {where}"


def write_config(config: Config, folder: Path) -> None:
    replace_file(folder / RUN_CONFIG, lambda file: file.write(to_yaml(config).encode()))


def opening_line(config: Config, hardware: Hardware, store: Store, model: Transformer) -> str:
    trainer = config.trainer
    size = f"{len(store.split('train')):,} {store.unit}s" if isinstance(store, TokenStore) else "made on the fly"
    where = f"{hardware.world} x {hardware.accelerator}" if hardware.world > 1 else hardware.accelerator
    return (
        f"{model.count_parameters():,} parameters ({config.model.name}), {store.name} ({size}), "
        f"{trainer.steps:,} steps of {trainer.batch_size} x {config.data.length:,}, {where}"
    )


def record_end(status: Status, outcome: Outcome, unit: str, measures: dict[str, Any]) -> None:
    score = outcome.final
    error = score.standard_error if math.isfinite(score.standard_error) else None  # of one window there is none
    final = {"bits": score.bits, "unit": unit, "units": score.units, "se": error, **measures}
    if score.accuracy is not None:
        final["accuracy"] = score.accuracy
    status.update(step=outcome.step, seconds=outcome.seconds, best=outcome.best, final=final)
    status.end("done", "trainer.max_minutes is up" if outcome.time_up else None)


def finish(
    config: Config, hardware: Hardware, folder: Path, store: Store, outcome: Outcome, measures: dict[str, Any]
) -> None:
    """Print the score of a finished run beside baselines on the same split, and a sample, where memory is left."""
    try:
        say(closing(config, folder, store, outcome, measures))
        if isinstance(store, TokenStore):
            device = torch.device("cuda" if hardware.accelerator == "gpu" else "cpu")
            print_sample(load_run(folder, on_one_device(config), "last", device, say=nothing), store.image)
    except (RuntimeError, MemoryError) as error:  # the run is done, whatever becomes of these
        if not (reason := str(error) if isinstance(error, RunFailed) else out_of_memory(error)):
            raise
        say(f"no sample: {reason}")


def closing(config: Config, folder: Path, store: Store, outcome: Outcome, measures: dict[str, Any]) -> str:
    score, stamps = outcome.final, stamp_phrases(store.stamps, "valid")
    return closing_lines(
        run=shown(folder),
        step=outcome.step,
        time_up=outcome.time_up,
        bits=score.bits,
        unit=store.unit,
        protocol=protocol_line(config, "valid", store.unit, score.units, stamps=stamps),
        baselines=baselines(store.split("train"), store.split("valid")) if store.unit == "byte" else {},
        further=further_lines(store.unit, measures),
        answers="" if score.accuracy is None else answers_line(score.accuracy, 1 / config.data.values),
    )


def print_sample(run: LoadedRun, image: tuple[int, int] | None) -> None:
    """Print and keep a short text that the model writes from nothing; of a model of images, keep an image."""
    length, options = SAMPLE_LENGTH, SampleOptions(temperature=SAMPLE_TEMPERATURE)
    rows = min(image[0], max(1, SAMPLE_UNITS // (3 * image[1]))) if image else 0
    if image:
        length = rows * 3 * image[1]
    elif run.model.embedding.positions is not None:
        length = min(length, run.model.embedding.positions.length)
    units = list(draw(run, options, torch.empty(1, 0, dtype=torch.int64), length))
    if image:
        part = "" if rows == image[0] else f", the first {rows} of its {image[0]} rows"
        path = save_images(run, options.seed, units, 1)
        say(f"a sample image (temperature {SAMPLE_TEMPERATURE}{part}): {shown(path)}")
        return
    text = run.tokenizer.decode([int(unit_B) for unit_B in units])
    say(f"a sample (temperature {SAMPLE_TEMPERATURE}):")
    say(printable(text.decode("utf-8", "replace")))
    say(shown(save_sample(run, options.seed, text)))


def nothing(*_: object) -> None:
    """Do nothing."""
