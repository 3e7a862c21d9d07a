"""`rtx train`: from a configuration to a trained model, its score and a sample; it goes on with the run of RTX_RUN."""

import gc
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rtx import __version__
from rtx.analysis.attention_weights import read_telemetry
from rtx.analysis.cost import cost
from rtx.analysis.engines import attention_line, gpu_here
from rtx.analysis.footprint import fit_to_device, with_less_memory
from rtx.analysis.speed import Meter, meter
from rtx.attention.engine.packed_attention import device_refusal
from rtx.cli.options import SampleOptions
from rtx.commands.sample import draw_image, write_text
from rtx.data.catalog import open_data
from rtx.data.datamodule import RtxDataModule
from rtx.data.store import Store
from rtx.disk import replace_file
from rtx.errors import RunFailed, UserError
from rtx.evaluation.protocol import further_lines, protocol_of, score_record
from rtx.evaluation.protocols import baselines, measures
from rtx.machine import OUT_OF_MEMORY, out_of_memory
from rtx.progress import say
from rtx.report.summary import closing_lines, routing_lines
from rtx.runs.environment import code_commit, record_start
from rtx.runs.folder import new_run_folder, shown
from rtx.runs.lock import working_in
from rtx.runs.records import DataRecord, ScoreRecord
from rtx.runs.resumption import Differences, differences, place_of, refuse_changes
from rtx.runs.signals import Signals, Stopped, ignore_signals, state_after
from rtx.runs.status import Status, run_state
from rtx.settings.compose import compose
from rtx.settings.extensions import copies
from rtx.settings.identity import with_absolute_path
from rtx.settings.logger import check_logger
from rtx.settings.run_config import RUN_CONFIG, load_run_config, to_yaml
from rtx.settings.schema import Config, to_dict
from rtx.sweeps.cells import refuse_sweep
from rtx.training.apart import stopped, train_apart
from rtx.training.callbacks import Watch
from rtx.training.checkpoint import Checkpoint, newest_checkpoint
from rtx.training.distributed import Ranks
from rtx.training.first_weights import build_model
from rtx.training.hardware import (
    Hardware,
    device_memory,
    prepare_torch,
    resolve_hardware,
)
from rtx.training.inference import load, stores_of
from rtx.training.loggers import GuardedWandbLogger, logging_to
from rtx.training.module import TrainingModule
from rtx.training.optimizers import learning_rate
from rtx.training.trainer import Outcome, fit
from rtx.variables import started_by_another

SAMPLE_LENGTH, SAMPLE_TEMPERATURE = 240, 0.8
SAMPLE_UNITS = 3072  # of a sample image: all of one of 32 x 32, the upper rows of a larger one


def main(arguments: list[str]) -> int:
    config, folder, before = place_of(with_absolute_path(compose(arguments)))
    return 0 if before is None else run(config, folder, before)


def call(overrides: Sequence[str]) -> Path:
    """Train for a caller from Python as `rtx train` with these overrides, and return the folder of the run.

    Whatever happens is raised: `UserError` for what is wrong with the overrides, `RunFailed` where the run fails, loses
    one of its processes, or is stopped. The caller's process does not end, and its signal handlers are put back.
    """
    refuse_sweep(overrides)
    config, folder, before = place_of(with_absolute_path(compose(overrides)))
    folder = folder or new_run_folder(config.name)
    if before is None:
        return folder
    command, hardware = shlex.join(["rtx", "train", *overrides]), resolve_hardware(config)
    if hardware.world > 1 and hardware.launcher != "rtx":
        several = f"{hardware.launcher} has started several processes"
        raise UserError(
            f"rtx.train is called by one process, and {several}: let it start `{command}`"
        )
    if hardware.world > 1:
        train_apart(overrides, folder)
    elif run(config, folder, before, command):
        raise RunFailed(stopped(folder))
    return folder


def check_attention(config: Config, hardware: Hardware) -> None:
    """Raise `UserError` for kernels that cannot run here; say on a GPU what `auto` lacks there."""
    wish, on_gpu = config.hardware.attention, hardware.accelerator == "gpu"
    if wish == "flex" and not on_gpu:
        raise UserError(
            "hardware.attention=flex is for a GPU: on a CPU FlexAttention has no backward pass"
        )
    problem = device_refusal(torch.device("cuda" if on_gpu else "cpu"))
    if wish == "triton" and problem:
        raise UserError(f"hardware.attention=triton: {problem}; take hardware.attention=auto")
    if wish == "auto" and on_gpu and problem and hardware.rank == 0:
        say(
            f"{problem}: torch's operations compute sparse attention, in several times the time of our kernels"
        )


def run(config: Config, folder: Path | None = None, before: str = "", call: str = "") -> int:
    """Train in a new folder, or go on in that of a run by its state `before`, and return the exit code.

    `call`: the same as a command line, if Python code called `rtx.train`, whose process must not be ended.
    """
    check_logger(config)
    hardware = resolve_hardware(config)
    check_attention(config, hardware)
    prepare_torch(config, hardware)
    if hardware.rank > 0:
        # Only the first process writes; the others, whoever started them, need no folder of their own.
        return follow(config, hardware, folder or Path(os.devnull), before)
    with Signals(in_a_call=bool(call)) as signals:
        try:
            root = stores_of(folder, config.data)
            store = open_data(
                config.data, root
            )  # before there is a folder for a mistake to leave behind
            store.training_sampler(config)
            fitted, choice = fitted_to(hardware, config, store)
            signals.holding = True  # until the run has a status to tell about it
            folder = folder or new_run_folder(config.name)
            begin = (lambda: None) if before else partial(write_config, fitted, folder)
            with working_in(folder, begin) as status:
                signals.at_once = lambda code: status.end(state_after(code), "stopped at once")
                if choice:
                    say(choice)
                place = (folder, store, signals, Ranks(0, hardware.world), status, call)
                within_memory(fitted, config, before, hardware, *place)
            return 0
        except Stopped as stop:
            print(stop, file=sys.stderr)
            if folder and run_state(folder) == "done":
                return 0  # only an upload, or the closing lines, were cut short
            if folder:
                print(f"continue with: rtx resume {shown(folder)}", file=sys.stderr)
            return stop.code


def fitted_to(hardware: Hardware, config: Config, store: Store) -> tuple[Config, str]:
    return fit_to_device(
        config, store.vocabulary, device_memory(config, hardware.devices) or 0, hardware.world
    )


def within_memory(
    config: Config, asked: Config, before: str, hardware: Hardware, *place: Any
) -> None:
    """Train; where memory runs out, go on with smaller micro-batches, if `asked` leaves them to us."""
    while True:  # of several processes none tries again: the others would wait
        less = with_less_memory(config, asked) if hardware.world == 1 else None
        try:
            return train(config, before, *place)
        except (RuntimeError, MemoryError) as error:
            reason = out_of_memory(error)
            if isinstance(error, RunFailed) or less is None or not reason:
                raise
        say(reason)
        config, before = less, OUT_OF_MEMORY
        gc.collect()  # what the error held of model and step; only now may there be room for others
        torch.cuda.empty_cache()


def follow(config: Config, hardware: Hardware, folder: Path, before: str) -> int:
    """Do the work of a rank that writes nothing; how a run ends that has begun is for the first rank to say."""
    code, ranks = 0, Ranks(hardware.rank, hardware.world)
    try:
        with Signals() as signals:
            store = open_data(config.data, stores_of(folder, config.data), lambda line: None)
            train(
                fitted_to(hardware, config, store)[0], before, folder, store, signals, ranks, None
            )
    except Stopped as stop:
        code = stop.code
    except (RunFailed, UserError) as error:
        code = 2 if isinstance(error, UserError) else 1
        if not ranks.connected:
            print("\n".join(f"rtx: {line}" for line in str(error).splitlines()), file=sys.stderr)
    # To the parent of a child any other end than 0 is one that it does not know of.
    return 0 if started_by_another() and ranks.connected else code


def train(
    config: Config,
    before: str,
    folder: Path,
    store: Store,
    signals: Signals,
    ranks: Ranks,
    status: Status | None,
    call: str = "",
) -> None:
    """Build the model, fit it and tell what came of it; ranks without a `status` write nothing."""
    signals.release()
    tell, hardware = say if status else (lambda line: None), resolve_hardware(config)
    facts = {"config": to_dict(config), "data": store.describe()}
    start, changed = find_start(config, before, folder, store, status)
    share = {
        "rank": hardware.rank,
        "world": hardware.world,
        "micro_batch": hardware.micro_batch_size,
    }
    loader: dict[str, Any] = {
        "pin_memory": hardware.accelerator == "gpu",
        "worker_init_fn": ignore_signals,
    }
    loader["num_workers"] = hardware.workers
    data = RtxDataModule(config, store, step=start["step"] if start else 0, **share, **loader)
    model = build_model(config, store.vocabulary, None if start else data.first_sequence)
    if status:
        known = {
            "hardware": vars(hardware),
            "data": facts["data"],
            "parameters": model.count_parameters(),
        }
        known["extensions"] = {
            str(code.path): name for name, code in copies(config.extensions).items()
        }
        if call:
            known["command"] = call
        if moved := record_start(folder, known, changed, anew=start is None):
            say(f"no longer exact: {', '.join(moved)}")
        write_config(config, folder)  # only now: it is known to fit the checkpoint
        if store.tokenizer_file:
            # Sampling then needs no data.
            content = store.tokenizer_file.read_bytes()
            replace_file(folder / store.tokenizer_file.name, lambda file: file.write(content))
        size = f"{config.trainer.steps:,} steps of {config.trainer.batch_size} x {config.data.length:,}"
        where = f"{hardware.world} x {hardware.accelerator}"
        say(
            f"{known['parameters']:,} parameters ({config.model.name}), {store.name}, {size}, {where}"
        )
        for line in opening_lines(config, hardware):
            say(line)
    module = TrainingModule(model, config, hardware, store.answers, ranks, facts)
    hyperparameters = {**facts["config"], "facts": logged_facts(config, store)}
    with logging_to(
        folder if status else None, config, hyperparameters, tell, data.step
    ) as loggers:
        speed = run_meter(config, store, hardware, tell)
        watch = Watch(folder, module, data, signals, read_telemetry, status, speed)
        outcome = fit(watch, loggers, start["path"] if start else None)
        if status:
            record_end(status, outcome, config, store)
            signals.end()
            del watch, module, model  # the sample is by the checkpoint, and may need their memory
            finish(config, hardware, folder, store, outcome, status, loggers)
    signals.release()


def opening_lines(config: Config, hardware: Hardware) -> list[str]:
    """Return what a run says of its attention before it begins: of its routing heads and, on a GPU, of its engines."""
    lines = routing_lines(config)
    if hardware.accelerator == "gpu":
        lines.append(f"attention: {attention_line(config, gpu_here())}")
    return lines


def run_meter(
    config: Config, store: Store, hardware: Hardware, tell: Callable[[str], object]
) -> Meter:
    """Return what tells the share of the chip's peak that a run uses, and say so where no peak is known of a GPU."""
    name = torch.cuda.get_device_name() if hardware.accelerator == "gpu" else None
    found = meter(config, cost(config, store.vocabulary), name, hardware.precision, hardware.world)
    if name and found.peak is None:
        tell(
            f"no share of the peak is told: rtx does not know that of {name} in {hardware.precision}"
        )
    return found


def logged_facts(config: Config, store: Store) -> dict[str, Any]:
    """Return what loggers keep beside the configuration: size and cost of the model, code and data by fingerprints."""
    costs = cost(config, store.vocabulary)
    return {
        "parameters": costs.parameters,
        "teraflop_per_step": costs.step(config) / 1e12,
        "rtx": __version__,
        "rtx_commit": code_commit(),
        "data_fingerprint": store.fingerprint,
    }


def find_start(
    config: Config, before: str, folder: Path, store: Store, status: Status | None
) -> tuple[Checkpoint | None, Differences | None]:
    """Return the checkpoint to go on from, if any, and the fields that change; `UserError` where they do not fit."""
    tell, begins = (
        say if status else (lambda line: None),
        "from the beginning: it has no checkpoint",
    )
    if not before:
        tell(f"run: {shown(folder)}")
        return None, None
    start = newest_checkpoint(folder / "checkpoints", set_aside=bool(status), report=tell)
    if not status:  # the others are compared with the first one
        return start, None
    # An editor, or a disk, may have changed config.yaml: it is compared with the checkpoint as well.
    was, now, steps = start["config"] if start else {}, to_dict(config), config.trainer.steps
    changed = differences(was, now, shared=True)
    changed |= differences(to_dict(load_run_config(folder)), now)
    refuse_changes(changed)
    if start:
        begins = f"from step {start['step']:,}"
        if "trainer.steps" in changed and steps <= (step := start["step"]):
            raise UserError(
                f"trainer.steps={steps}: the newest checkpoint is of step {step}; give more than that"
            )
        if start["data"]["fingerprint"] != store.fingerprint:
            raise UserError(f"the data of {store.name} are not those that the run began with")
    elif (
        best := folder / "checkpoints" / "best.ckpt"
    ).exists():  # a run from the beginning would write its own there
        aside = best.rename(best.with_name(f"best-{time.time_ns()}.ckpt"))
        say(f"{best} is kept as {aside.name}")
    lines = [f"  {key}: {old} -> {new}" for key, (old, new) in changed.items()]
    say("\n".join([f"resuming {shown(folder)} ({before}) {begins}", *lines]))
    return start, changed


def write_config(config: Config, folder: Path) -> None:
    for name, code in copies(config.extensions).items():
        replace_file(folder / name, lambda file, code=code: file.write(code.content))
    replace_file(folder / RUN_CONFIG, lambda file: file.write(to_yaml(config).encode()))


def record_end(status: Status, outcome: Outcome, config: Config, store: Store) -> None:
    """Write the closing score to the status, and that the run is done."""
    is_sample = bool(outcome.sample)
    score = outcome.final
    further = measures(store, "valid", score, is_sample=is_sample)
    data = DataRecord.model_validate(store.describe())
    protocol = protocol_of(config, data, "valid", sample=outcome.sample.get("windows"))
    final = score_record(config, protocol, score, further)
    status.update(step=outcome.step, seconds=outcome.seconds, best=outcome.best, final=final)
    status.end("done", "trainer.max_minutes is up" if outcome.time_up else None)


def finish(
    config: Config,
    hardware: Hardware,
    folder: Path,
    store: Store,
    outcome: Outcome,
    status: Status,
    loggers: list[Any],
) -> None:
    """Print the score of a finished run beside baselines, and a sample, where memory is left."""
    steps = f"{outcome.step:,} steps"
    if outcome.time_up:
        steps += " (trainer.max_minutes is up)"
    wandb = loggers[-1] if isinstance(loggers[-1], GuardedWandbLogger) else None
    try:
        final = with_baselines(status, store)
        further = further_lines(final)
        if outcome.step < config.optimizer.steps:
            further += short_run(config, outcome.step)
        say(closing_lines(shown(folder), steps, final, further))
        if wandb:
            wandb.summarize(protocol=final.line())
        if store.tokenizer:
            path = closing_sample(config, hardware, folder, store)
            if wandb:
                wandb.guarded(wandb.add, "sample", {}, [path], outcome.step)
    except (RuntimeError, MemoryError, OSError) as error:
        # The run is done, whatever becomes of these.
        reason = out_of_memory(error)
        if isinstance(error, RunFailed | OSError):
            reason = str(error)
        if not reason:
            raise
        say(f"no sample: {reason}")


def with_baselines(status: Status, store: Store) -> ScoreRecord:
    """Return the closing score with the bits of simple compressors, which the status gets, too."""
    final = status.record.final
    assert isinstance(final, ScoreRecord)
    if store.unit == "byte" and not final.sample:
        final = final.model_copy(update={"baselines": baselines(store.split("valid"))})
        status.update(final=final, write=True)
    return final


def closing_sample(config: Config, hardware: Hardware, folder: Path, store: Store) -> Path:
    """Let a finished run write or draw, and return the file with its sample."""
    run = load(folder, "last", "cuda" if hardware.accelerator == "gpu" else "cpu")
    longest = SAMPLE_UNITS if store.image else SAMPLE_LENGTH
    options = SampleOptions(min(longest, config.data.length), temperature=SAMPLE_TEMPERATURE)
    say(f"a sample (temperature {SAMPLE_TEMPERATURE}):")
    if store.image:
        draw_image(run, options)
    else:
        write_text(run, options)
    return max((folder / "samples").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def short_run(config: Config, step: int) -> list[str]:
    """Return the lines on a run that ends before the steps that its optimizer's preset is made for."""
    optimizer = config.optimizer
    share = learning_rate(config, step) / optimizer.lr
    if step < optimizer.warmup:
        rate = f"was still rising, at {share:.0%} of optimizer.lr={optimizer.lr:g}"
    elif optimizer.schedule == "constant":
        rate = f"stayed at optimizer.lr={optimizer.lr:g}"
    else:
        rate = f"ended at {share:.0%} of optimizer.lr={optimizer.lr:g}"
    return [
        f"a short run: optimizer={optimizer.name} is made for {optimizer.steps:,} steps",
        f"the learning rate (optimizer.schedule={optimizer.schedule}) {rate}",
    ]
