"""`rtx train`: from a configuration to a trained model, its score and a sample.

From `main` down it follows a run. One optimizer step is `TrainingModule.take_step`; what happens
around the steps is in `rtx.training.callbacks`.
"""

import dataclasses
import gc
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger

from rtx.analysis.cost import Cost, cost
from rtx.analysis.engines import attention_line, gpu_here
from rtx.analysis.micro_batch import fit_to_device, with_less_memory
from rtx.analysis.speed import Meter, meter
from rtx.attention.engine.packed_attention import device_refusal
from rtx.cli.options import SampleOptions
from rtx.cli.request import Request
from rtx.commands.sample import draw_image, write_text
from rtx.data.catalog import open_data
from rtx.data.datamodule import RtxDataModule
from rtx.data.store import Store
from rtx.errors import RunFailed, UserError
from rtx.evaluation.measures import (
    baselines,
    measures,
)
from rtx.evaluation.protocol import further_lines, protocol_of, score_record
from rtx.machine import OUT_OF_MEMORY, out_of_memory
from rtx.processes import check_launch, started_by_another
from rtx.progress import say, warn
from rtx.report.summary import closing_lines, routing_lines
from rtx.runs.environment import code_commit
from rtx.runs.folder import new_run_folder, shown
from rtx.runs.lock import working_in
from rtx.runs.records import DataRecord, ScoreRecord
from rtx.runs.resumption import place_of
from rtx.runs.signals import Signals, Stopped, ignore_signals, state_after
from rtx.runs.status import Status, run_state
from rtx.settings.compose import compose_checked
from rtx.settings.identity import with_absolute_path
from rtx.settings.overrides import check_overrides
from rtx.settings.requirements import check_logger
from rtx.settings.run_values import RUN_CONFIG
from rtx.settings.schema import Config, to_dict
from rtx.sweeps.cells import refuse_sweep
from rtx.training.apart import stopped, train_apart
from rtx.training.distributed import Ranks
from rtx.training.hardware import Hardware, device_memory, prepare_torch, resolve_hardware
from rtx.training.inference import load, stores_of
from rtx.training.loggers import GuardedWandbLogger, logging_to
from rtx.training.module import TrainingModule
from rtx.training.optimizers import learning_rate
from rtx.training.session import Session
from rtx.training.start import build_model, find_start, record_beginning, write_config
from rtx.training.trainer import Outcome, fit
from rtx.version import __version__

SAMPLE_LENGTH = 240
SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOKENS = 3072
"""Tokens of a sample image: a whole image of 32 x 32, the upper rows of a larger one."""


def main(request: Request) -> int:
    """Train what a command line asks for, and return the exit code."""
    folder = request.run if request.runs else None
    # The state of a run that goes on is the reason why it had stopped.
    return run(request.config, folder, reason=request.state)


def call(overrides: Sequence[str]) -> Path:
    """Train as `rtx train` with these overrides for Python code, and return the run's folder.

    The caller's process does not end, and its signal handlers are put back. Raises `UserError` for
    wrong overrides, `RunFailed` for a run that fails, loses a process or is stopped.
    """
    check_launch()
    checked = check_overrides(overrides)
    refuse_sweep(checked)
    config, folder, state = place_of(with_absolute_path(compose_checked(checked)))
    folder = folder or new_run_folder(config.name)
    if state is None:
        return folder
    command = shlex.join(["rtx", "train", *overrides])
    hardware = resolve_hardware(config)
    if hardware.world == 1:
        if run(config, folder, reason=state, command=command):
            raise RunFailed(stopped(folder))
        return folder
    if hardware.launcher != "rtx":
        several = f"{hardware.launcher} has started several processes"
        instead = f"let it start `{command}`"
        raise UserError(f"rtx.train is called by one process, and {several}: {instead}")
    train_apart(overrides, folder)
    return folder


def run(config: Config, folder: Path | None = None, reason: str = "", command: str = "") -> int:
    """Train one process of a run, and return the exit code.

    Args:
        folder: of a run, or for one; None: a new folder.
        reason: why the run in the folder had stopped; empty: a new run.
        command: a command line that does the same, if Python code called `rtx.train`, whose process
            must not be ended.
    """
    check_logger(config)
    hardware = resolve_hardware(config)
    check_attention(config, hardware)
    prepare_torch(config, hardware)
    if hardware.rank > 0:
        # This process writes nothing, and its launcher may not have set RTX_RUN.
        return run_other_rank(config, hardware, folder or Path(os.devnull), reason)
    folder = folder or new_run_folder(config.name)
    with Signals(in_a_call=bool(command)) as signals:
        try:
            run_first_rank(config, hardware, folder, signals, reason, command)
        except Stopped as stop:
            return report_stop(stop, folder)
    return 0


def check_attention(config: Config, hardware: Hardware) -> None:
    """Raise `UserError` for kernels that cannot run here.

    If hardware.attention=auto finds no fast kernels for a GPU, print a line.
    """
    kernels = config.hardware.attention
    if kernels == "flex" and not hardware.on_gpu:
        lack = "on a CPU FlexAttention has no backward pass"
        raise UserError(f"hardware.attention=flex is for a GPU: {lack}")
    problem = device_refusal(torch.device(hardware.torch_device))
    if not problem:
        return
    if kernels == "triton":
        raise UserError(f"hardware.attention=triton: {problem}; take hardware.attention=auto")
    if kernels == "auto" and hardware.on_gpu:
        slower = (
            "torch's operations compute sparse attention, in several times the time of our kernels"
        )
        warn(f"{problem}: {slower}")


def run_first_rank(
    config: Config, hardware: Hardware, folder: Path, signals: Signals, reason: str, command: str
) -> None:
    """Train in the first process of a run, which alone writes to its folder."""
    # The data are opened first: an error in them must leave no folder of a run.
    store = open_data(config.data, stores_of(folder, config.data))
    store.training_sampler(config)
    total = cost(config, store.vocabulary)
    fitted, choice = fitted_to_device(config, hardware, store, total)
    # A signal waits until the run has a status in which it can be recorded.
    signals.holding = True
    begin = (lambda: None) if reason else partial(write_config, fitted, folder)
    with working_in(folder, begin) as status:
        signals.at_once = lambda code: status.end(state_after(code), "stopped at once")
        if choice:
            say(choice)
        session = Session(
            config=fitted,
            requested=config,
            hardware=resolve_hardware(fitted),
            folder=folder,
            store=store,
            cost=total,
            signals=signals,
            ranks=Ranks(0, hardware.world),
            status=status,
            resumed=bool(reason),
            reason=reason,
            command=command,
        )
        train_within_memory(session)


def run_other_rank(config: Config, hardware: Hardware, folder: Path, reason: str) -> int:
    """Train in another process of a run, which writes nothing, and return its exit code.

    Once the processes are connected, the first one prints why the run ends.
    """
    code = 0
    ranks = Ranks(hardware.rank, hardware.world)
    try:
        with Signals() as signals:
            store = open_data(config.data, stores_of(folder, config.data), say)
            total = cost(config, store.vocabulary)
            fitted, _ = fitted_to_device(config, hardware, store, total)
            session = Session(
                config=fitted,
                requested=config,
                hardware=resolve_hardware(fitted),
                folder=folder,
                store=store,
                cost=total,
                signals=signals,
                ranks=ranks,
                resumed=bool(reason),
                reason=reason,
            )
            train(session)
    except Stopped as stop:
        code = stop.code
    except (RunFailed, UserError) as error:
        code = 2 if isinstance(error, UserError) else 1
        if not ranks.connected:
            lines = [f"rtx: {line}" for line in str(error).splitlines()]
            print("\n".join(lines), file=sys.stderr)
    # The first rank takes any other exit code of a process that it started for a crash.
    if started_by_another() and ranks.connected:
        return 0
    return code


def report_stop(stop: Stopped, folder: Path) -> int:
    """Print why a run was stopped and how it goes on, and return the exit code."""
    print(stop, file=sys.stderr)
    if run_state(folder) == "done":
        # Only an upload, or the closing lines, were cut short.
        return 0
    if (folder / RUN_CONFIG).exists():
        print(f"continue with: rtx resume {shown(folder)}", file=sys.stderr)
    return stop.code


def fitted_to_device(
    config: Config, hardware: Hardware, store: Store, total: Cost
) -> tuple[Config, str]:
    """Return the configuration with a micro-batch that fits the device, and a line that says so."""
    device_bytes = device_memory(config, hardware.devices) or 0
    return fit_to_device(config, store.vocabulary, device_bytes, hardware.world, total)


def train_within_memory(session: Session) -> None:
    """Train; when memory runs out, go on with a smaller micro-batch.

    Only keys that are `auto` in `session.requested` are changed.
    """
    while True:
        less = None
        # One of several processes cannot try again: the others would wait for it.
        if session.hardware.world == 1:
            less = with_less_memory(session.config, session.requested)
        try:
            train(session)
            return
        except (RuntimeError, MemoryError) as error:
            reason = out_of_memory(error)
            if isinstance(error, RunFailed) or less is None or not reason:
                raise
        warn(reason)
        session = dataclasses.replace(
            session,
            config=less,
            hardware=resolve_hardware(less),
            resumed=True,
            reason=OUT_OF_MEMORY,
        )
        # After the except block nothing refers to the error, whose traceback held the model.
        gc.collect()
        torch.cuda.empty_cache()


def train(session: Session) -> None:
    """Build the model, train it, and print its score and a sample.

    Every rank comes here. Only the first one has a status, and only it writes and prints.
    """
    session.signals.release()
    start, changed = find_start(session)
    session.begin(start)
    config = session.config
    data = data_module(session)
    first_sequence = None if start else data.first_sequence
    model = build_model(config, session.store.vocabulary, first_sequence)
    if session.status:
        parameters = model.count_parameters()
        session.status.begin()
        record_beginning(session, parameters, changed)
        for line in opening_lines(session, parameters):
            say(line)
    metadata = {"config": to_dict(config), "data": session.store.describe()}
    answers = session.store.answers
    module = TrainingModule(model, config, session.hardware, answers, session.ranks, metadata)
    folder = session.folder if session.status else None
    logged = {**metadata["config"], "facts": logged_facts(session)}
    with logging_to(folder, config, logged, say, session.first_step) as loggers:
        outcome = fit(session, module, data, loggers, run_meter(session))
        if session.status:
            record_end(session, session.status, outcome)
            session.signals.end()
            # Free their memory: the sample loads the model again, from its checkpoint.
            del model, module
            finish(session, session.status, outcome, loggers)
    session.signals.release()


def data_module(session: Session) -> RtxDataModule:
    """Return the training and validation batches, from the next step on."""
    hardware = session.hardware
    return RtxDataModule(
        session.config,
        session.store,
        step=session.first_step,
        rank=hardware.rank,
        world=hardware.world,
        micro_batch=hardware.micro_batch_size,
        num_workers=hardware.workers,
        pin_memory=hardware.on_gpu,
        worker_init_fn=ignore_signals,
    )


def opening_lines(session: Session, parameters: int) -> list[str]:
    """Return the lines before the first step: sizes, routing heads and, on a GPU, kernels."""
    config = session.config
    trainer = config.trainer
    size = f"{trainer.steps:,} steps of {trainer.batch_size} x {config.data.length:,}"
    devices = f"{session.hardware.world} x {session.hardware.accelerator}"
    model = f"{parameters:,} parameters ({config.model.name})"
    lines = [f"{model}, {session.store.name}, {size}, {devices}"]
    lines += routing_lines(config)
    if session.hardware.on_gpu:
        lines.append(f"attention: {attention_line(config, gpu_here())}")
    return lines


def run_meter(session: Session) -> Meter:
    """Return the `Meter` that computes the MFU; print a line if the peak of a GPU is unknown."""
    config = session.config
    hardware = session.hardware
    name = torch.cuda.get_device_name() if hardware.on_gpu else None
    result = meter(config, session.cost, name, hardware.precision, hardware.world)
    if name and result.peak is None:
        say(f"MFU is not computed: rtx does not know the peak of {name} in {hardware.precision}")
    return result


def logged_facts(session: Session) -> dict[str, Any]:
    """Return what is logged beside the configuration: sizes, costs, versions of code and data."""
    return {
        "parameters": session.cost.parameters,
        "teraflop_per_step": session.cost.step(session.config) / 1e12,
        "rtx": __version__,
        "rtx_commit": code_commit(),
        "data_fingerprint": session.store.fingerprint,
    }


def record_end(session: Session, status: Status, outcome: Outcome) -> None:
    """Write the closing score and the state `done` to the status."""
    store = session.store
    score = outcome.final
    data = DataRecord.model_validate(store.describe())
    sample = outcome.sample.get("windows")
    protocol = protocol_of(session.config, data, "valid", sample=sample)
    further = measures(store, "valid", score, is_sample=sample is not None)
    final = score_record(session.config, protocol, score, further)
    status.update(step=outcome.step, seconds=outcome.seconds, best=outcome.best, final=final)
    status.end("done", "trainer.max_minutes is up" if outcome.time_up else None)


def finish(session: Session, status: Status, outcome: Outcome, loggers: list[Logger]) -> None:
    """Print the score of a finished run beside baselines on the same split, and a sample."""
    last = loggers[-1]
    wandb = last if isinstance(last, GuardedWandbLogger) else None
    # The run stays done if the sample fails.
    try:
        print_score(session, status, outcome, wandb)
        if session.store.tokenizer:
            print_sample(session, outcome.step, wandb)
    except (RuntimeError, MemoryError, OSError) as error:
        has_reason = isinstance(error, RunFailed | OSError)
        reason = str(error) if has_reason else out_of_memory(error)
        if not reason:
            raise
        warn(f"no sample: {reason}")


def print_score(
    session: Session, status: Status, outcome: Outcome, wandb: GuardedWandbLogger | None
) -> None:
    """Print the closing score with its protocol and, if all bytes are scored, baselines."""
    store = session.store
    final = status.record.final
    assert isinstance(final, ScoreRecord)
    if store.unit == "byte" and not outcome.sample:
        final = final.model_copy(update={"baselines": baselines(store.split("valid"))})
        status.update(final=final, write=True)
    steps = f"{outcome.step:,} steps"
    if outcome.time_up:
        steps += " (trainer.max_minutes is up)"
    further = further_lines(final)
    if outcome.step < session.config.optimizer.steps:
        further += short_run(session.config, outcome.step)
    say(closing_lines(shown(session.folder), steps, final, further))
    if wandb:
        wandb.summarize(protocol=final.line())


def print_sample(session: Session, step: int, wandb: GuardedWandbLogger | None) -> None:
    """Draw a text or an image from the last checkpoint, print or save it, and add it to W&B."""
    trained = load(session.folder, "last", session.hardware.torch_device)
    is_image = session.store.image is not None
    length = min(SAMPLE_TOKENS if is_image else SAMPLE_LENGTH, session.config.data.length)
    options = SampleOptions(length, temperature=SAMPLE_TEMPERATURE)
    say(f"a sample (temperature {SAMPLE_TEMPERATURE}):")
    if is_image:
        draw_image(trained, options)
    else:
        write_text(trained, options)
    if wandb:
        samples = (session.folder / "samples").iterdir()
        newest = max(samples, key=lambda path: path.stat().st_mtime_ns)
        wandb.guarded(wandb.add, "sample", {}, [newest], step)


def short_run(config: Config, step: int) -> list[str]:
    """Return lines on a run with fewer steps than its optimizer's preset is made for."""
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
