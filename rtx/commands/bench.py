"""`rtx bench steps`: the training steps of a table's rows, timed in turn on this machine, beside the paper's.

Times on a shared machine drift; where every row steps in every turn, drift reaches all alike, and their ratios mean
something. torch takes seconds, so it is imported once all that can be refused is.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtx.commandline.overrides import check_overrides
from rtx.compose import config_hash, to_dict
from rtx.config import SPREAD, Config, DataConfig
from rtx.data.catalog import Store, data_root, make_recipe, open_data, vocabulary_size
from rtx.data.recall import RecallStore
from rtx.disk import write_json
from rtx.errors import RunFailed, UserError
from rtx.options import LAUNCHED, BenchOptions, read_words, what_to_do
from rtx.report.steps import DRAWN, READ, WHAT, read_record, record_path, views
from rtx.report.terminal import terminal
from rtx.sweep.cells import lay_out
from rtx.training.run_folder import environment, outputs_root, shown, unwritable
from rtx.training.signals import Stopped
from rtx.wording import plural

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WIDTH = 80
"""Columns of what is printed."""


@dataclass
class Row:
    """A configuration, and what is known of its steps so far."""

    config: Config
    overrides: Sequence[str]
    store: Store | None
    """Its data, where they are prepared."""
    vocabulary: int
    parameters: int | None = None
    step: Callable[[], Tensor] | None = None
    """Takes a step and returns its loss; None before the first, and behind a failure."""
    ms_turns: list[float] = field(default_factory=list)
    """Milliseconds of a step, the mean of each turn."""
    reason: str = ""
    """Why it takes no more steps."""


def main(arguments: list[str]) -> int:
    """Run `rtx bench steps [overrides]`; lists of values, and what an experiment lays out, are rows, as in a sweep.

    Returns:
        0 if every row was timed, 1 if some failed.

    Raises:
        UserError: an override or a row is wrong; nothing has been started.
        RunFailed: no row could be timed, or the record cannot be written.
        KeyboardInterrupt, Stopped: a signal came; what was measured by then is printed, and kept.
    """
    words = read_words("bench steps", what_to_do("bench", arguments)[1])
    rows, options = lay_out_rows(words.overrides), words.options
    folder = outputs_root() / rows[0].config.name
    try:  # before hours are spent on what could not be kept
        (folder / "bench").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(unwritable(folder, error)) from None
    print(
        f"{plural(len(rows), 'row')}, {plural(options.turns, 'turn')} of {plural(options.per_turn, 'step')}", flush=True
    )
    try:
        measure(rows, options)
    except (KeyboardInterrupt, Stopped):
        finish(rows, options, arguments, folder, whole=False)
        raise
    finish(rows, options, arguments, folder, whole=True)
    if not any(row.ms_turns for row in rows):
        raise RunFailed("no row could be timed")
    return 1 if any(row.reason for row in rows) else 0


def lay_out_rows(words: Sequence[str]) -> list[Row]:
    """Return the rows that words lay out, composed and checked; of those that differ by their seed alone the first.

    Raises:
        UserError: one of them is wrong, or asks for more than one device or for jobs.
    """
    if "LOCAL_RANK" in os.environ:
        raise UserError("rtx bench times one device; run it without torchrun")
    checked = check_overrides(words, sweep=True)
    for entry in checked:
        if entry.key.startswith(("hydra.", "hydra/")) or (
            entry.key == "hardware" and set(entry.values) & set(LAUNCHED)
        ):
            raise UserError(f"{entry}: has no effect; rtx bench takes its rows in turn, on this machine")
    cells, _ = lay_out(checked)
    rows: dict[str, Row] = {}
    for cell in cells:
        if cell.config.hardware.name in SPREAD:
            name = cell.config.hardware.name
            raise UserError(f"hardware={name}: rtx bench times a row on one device; hardware takes auto, cpu or gpu")
        key = config_hash(dataclasses.replace(cell.config, seed=0))
        if key not in rows:
            store, data = prepared_data(cell.config.data), cell.config.data
            rows[key] = Row(cell.config, cell.overrides, store, store.vocabulary if store else vocabulary_size(data))
    if len(rows) < len(cells):
        print(f"of {plural(len(cells), 'cell')} those that differ by their seed alone are one row")
    return list(rows.values())


def prepared_data(data: DataConfig) -> Store | None:
    """Return the data of a row where they are at hand: nothing is downloaded or prepared for a benchmark."""
    if data.name == "recall":
        return RecallStore(data)
    try:
        there = make_recipe(data, data_root()).folder(data_root()).exists()
    except UserError:
        return None
    return open_data(data, data_root()) if there else None


def measure(rows: Sequence[Row], options: BenchOptions) -> None:
    """Let every row take its steps in every turn; one that fails is left out from then on."""
    from rtx.progress_bar import progress_bar
    from rtx.training.memory import out_of_memory

    with progress_bar("turns of rows") as show:
        for turn in range(options.turns):
            for number, row in enumerate(rows):
                try:
                    if not row.reason:
                        take_turn(row, options)
                except Exception as error:
                    said = (str(error).strip().splitlines() or [""])[0]
                    row.reason = out_of_memory(error) or f"{type(error).__name__}: {said}"
                    row.step = None  # its memory is for the others
                show(turn * len(rows) + number + 1, options.turns * len(rows))


def take_turn(row: Row, options: BenchOptions) -> None:
    """Take the steps of a turn, behind a warm-up in the first; the clock is read once, so that a GPU works on."""
    import torch

    from rtx.training.inference import prepare_device

    device = prepare_device(row.config)
    if row.step is None:
        row.config = as_trained(row.config, row.vocabulary)
        row.step, row.parameters = training_step(
            row.config, row.vocabulary, device, training_ids(row.config, row.store, row.vocabulary)
        )
        for _ in range(options.warmup):
            row.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    losses = torch.stack([row.step() for _ in range(options.per_turn)])
    if not bool(losses.isfinite().all()):  # which waits for the device
        raise FloatingPointError(f"the loss is not a number at learning rate {row.config.optimizer.lr:g}")
    if device.type == "cuda":
        torch.cuda.synchronize()
    row.ms_turns.append(1e3 * (time.perf_counter() - began) / options.per_turn)


def as_trained(config: Config, vocabulary: int) -> Config:
    """Return a configuration with what `rtx train` would choose for `auto` here: a report compares it with runs."""
    from rtx.analysis.fitting import fit_to_device
    from rtx.training.hardware import resolve_hardware
    from rtx.training.memory import device_memory

    fitted, _ = fit_to_device(config, vocabulary, device_memory(config) or 0)
    hardware = dataclasses.replace(fitted.hardware, precision=resolve_hardware(fitted).precision)
    return dataclasses.replace(fitted, hardware=hardware)


def training_ids(config: Config, store: Store | None, vocabulary: int) -> Callable[[int], Tensor]:
    """Return what makes so many training sequences: those of `rtx train`, or without data ids drawn at random."""
    import torch

    from rtx.training.datamodule import training_items

    if store is None:
        generator = torch.Generator().manual_seed(config.seed)
        return lambda rows: torch.randint(0, vocabulary, (rows, config.data.length), generator=generator)
    items, numbers = training_items(config, store), itertools.count()
    return lambda rows: torch.stack([items[next(numbers)] for _ in range(rows)])


def training_step(
    config: Config, vocabulary: int, device: torch.device, ids: Callable[[int], Tensor]
) -> tuple[Callable[[], Tensor], int]:
    """Return what takes one optimizer step, as `rtx train` does, and returns its loss; and the number of parameters."""
    import torch

    from rtx.attention.centroids import after_step
    from rtx.model.transformer import compile_loss
    from rtx.training.hardware import resolve_hardware
    from rtx.training.module import build_model
    from rtx.training.optimizers import build_optimizer, learning_rate, set_learning_rate

    hardware, numbers = resolve_hardware(config), itertools.count(1)
    model = build_model(config, vocabulary, lambda: ids(1)[0])
    model = (model.double() if config.hardware.precision == "fp64" else model).to(device).train()
    optimizer = build_optimizer(model, config.optimizer)
    loss: Callable[..., Any] = model.loss
    at: list[Tensor] = []
    if config.data.name == "recall":
        loss, at = model.answers, [torch.from_numpy(RecallStore(config.data).answers).to(device)]
    if config.hardware.compile:
        loss = compile_loss(model, loss)

    def step() -> Tensor:
        for _ in range(hardware.accumulate):
            tokens_BN = ids(hardware.micro_batch_size).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=hardware.precision == "bf16"):
                nats, *_, auxiliary = loss(tokens_BN, *at)
                mean = nats.mean() + auxiliary
            (mean / hardware.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.clip or float("inf"))
        set_learning_rate(optimizer, learning_rate(config, next(numbers)))
        optimizer.step()
        optimizer.zero_grad()
        after_step(model)
        return mean.detach()

    return step, model.count_parameters()


def finish(rows: Sequence[Row], options: BenchOptions, arguments: Sequence[str], folder: Path, whole: bool) -> None:
    """Print the tables and keep the record; one that a signal cut short replaces none.

    Raises:
        RunFailed: the record cannot be written.
    """
    record = record_of(rows, options, arguments)
    for view in views(read_record(record)):
        print("\n" + terminal(view, WIDTH))
    path = record_path(folder, [row["hash"] for row in record["rows"]], record["device"])
    if not any(row.ms_turns for row in rows):
        return
    if path.exists() and not whole:
        print(f"\n{shown(path)} stays as it was")
        return
    try:
        write_json(path, record)
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error
    print(f"\n{shown(path)}\nin a report: rtx report {shown(folder)}")


def record_of(rows: Sequence[Row], options: BenchOptions, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what is kept: settings, machine, versions, and each row with its configuration and all its times."""
    facts = environment(
        {
            "what": WHAT,
            "command": shlex.join(["rtx", "bench", *arguments]),
            "bench": dataclasses.asdict(options),
            "ids": READ if all(row.store for row in rows) else DRAWN,
        }
    )
    gpu = facts["gpu"] if rows[0].config.hardware.name != "cpu" else None
    return {
        **facts,
        "device": gpu or f"CPU, {plural(facts['threads'], 'thread')}",
        "rows": [row_record(row) for row in rows],
    }


def row_record(row: Row) -> dict[str, Any]:
    """Return what is kept of a row: the median over turns counts, with the standard error of their mean beside it."""
    ms, turns = statistics.median(row.ms_turns) if row.ms_turns else None, len(row.ms_turns)
    return {
        "hash": config_hash(row.config),
        "overrides": list(row.overrides),
        "ms": ms,
        "ms_error": statistics.stdev(row.ms_turns) / turns**0.5 if turns > 1 else None,
        "ms_turns": row.ms_turns,
        "steps_per_second": 1e3 / ms if ms else None,
        "parameters": row.parameters,
        "reason": row.reason or None,
        "config": to_dict(row.config),
    }
