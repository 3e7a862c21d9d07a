"""`rtx bench steps`: the training steps of several rows, timed in turn on this machine, beside the paper's.

Times on a shared machine drift; where every row steps in every turn, drift reaches all alike, and their ratios mean
something. torch takes seconds, so it is imported once all that can be refused is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtx.analysis.output import save
from rtx.commandline.overrides import check_overrides
from rtx.compose import config_hash, to_dict
from rtx.config import SPREAD, Config
from rtx.data.catalog import Store, data_root, open_data
from rtx.errors import RunFailed, UserError
from rtx.options import LAUNCHED, BenchOptions, read_words, what_to_do
from rtx.report.steps import WHAT, read_record, views
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
    store: Store | None = None
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
        RunFailed: data are not to be had, no row could be timed, or the record cannot be written.
        KeyboardInterrupt, Stopped: a signal came; what was measured by then is printed, and kept.
    """
    words = read_words("bench steps", what_to_do("bench", arguments)[1])
    rows, options = lay_out_rows(words.overrides), words.options
    folder = outputs_root() / rows[0].config.name
    try:  # before hours are spent on what could not be kept
        (folder / "bench").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(unwritable(folder, error)) from None
    for row in rows:
        row.store = open_data(row.config.data, data_root())
    print(f"{plural(len(rows), 'row')}, {plural(options.turns, 'turn')} of {plural(options.per_turn, 'step')}")
    try:
        measure(rows, options)
    except (KeyboardInterrupt, Stopped):
        finish(rows, options, arguments, folder, whole=False)
        raise
    finish(rows, options, arguments, folder, whole=True)
    return 1 if any(row.reason for row in rows) else 0


def lay_out_rows(words: Sequence[str]) -> list[Row]:
    """Return the rows that words lay out, composed and checked; of those that differ by their seed alone the first.

    Raises:
        UserError: one of them is wrong, or asks for more than one device or for jobs.
    """
    checked = check_overrides(words, sweep=True)
    for entry in checked:
        if entry.key.startswith(("hydra.", "hydra/")):
            raise UserError(f"{entry}: has no effect; rtx bench takes its rows in turn, on this machine")
        if entry.key in ("hardware", "hardware.name") and {*entry.values} & {*SPREAD, *LAUNCHED}:
            raise UserError(f"{entry}: rtx bench times a row on one device; hardware takes auto, cpu or gpu")
    cells, _ = lay_out(checked)
    rows: dict[str, Row] = {}
    for cell in cells:
        rows.setdefault(config_hash(dataclasses.replace(cell.config, seed=0)), Row(cell.config, cell.overrides))
    if len(rows) < len(cells):
        print(f"of {plural(len(cells), 'cell')} those that differ by their seed alone are one row")
    return list(rows.values())


def measure(rows: Sequence[Row], options: BenchOptions) -> None:
    """Let every row take its steps in every turn; one that fails is left out from then on."""
    from rtx.progress_bar import progress_bar
    from rtx.training.memory import out_of_memory

    with progress_bar("turns of rows") as show:
        for done, (_, row) in enumerate(itertools.product(range(options.turns), rows), 1):
            try:
                if not row.reason:
                    take_turn(row, options)
            except Exception as error:
                said = (str(error).strip().splitlines() or [""])[0]
                row.reason = out_of_memory(error) or f"{type(error).__name__}: {said}"
                row.step = None  # its memory is for the others
            show(done, options.turns * len(rows))


def take_turn(row: Row, options: BenchOptions) -> None:
    """Take the steps of a turn, behind a warm-up in the first; the clock is read once, so that a GPU works on."""
    import torch

    from rtx.training.inference import prepare_device

    assert row.store is not None
    device = prepare_device(row.config)
    if row.step is None:
        row.config = as_trained(row.config, row.store.vocabulary)
        row.step, row.parameters = training_step(row.config, row.store, device)
        for _ in range(options.warmup):
            row.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    losses = torch.stack([row.step() for _ in range(options.per_turn)])
    if not bool(losses.isfinite().all()):  # which waits for the device
        raise FloatingPointError(f"the loss is not a number at learning rate {row.config.optimizer.lr:g}")
    row.ms_turns.append(1e3 * (time.perf_counter() - began) / options.per_turn)


def as_trained(config: Config, vocabulary: int) -> Config:
    """Return a configuration with what `rtx train` would choose for `auto` here: a report compares it with runs."""
    from rtx.analysis.fitting import fit_to_device
    from rtx.training.hardware import resolve_hardware
    from rtx.training.memory import device_memory

    fitted, _ = fit_to_device(config, vocabulary, device_memory(config) or 0)
    hardware = dataclasses.replace(fitted.hardware, precision=resolve_hardware(fitted).precision)
    return dataclasses.replace(fitted, hardware=hardware)


def training_step(config: Config, store: Store, device: torch.device) -> tuple[Callable[[], Tensor], int]:
    """Return what takes one optimizer step as `rtx train` does, and returns its loss; and the number of parameters."""
    import torch

    from rtx.attention.centroids import after_step
    from rtx.data.datamodule import training_items
    from rtx.model.transformer import compile_loss
    from rtx.training.hardware import resolve_hardware
    from rtx.training.module import build_model
    from rtx.training.optimizers import build_optimizer, learning_rate, set_learning_rate

    hardware, items = resolve_hardware(config), training_items(config, store)
    steps, numbers = itertools.count(1), itertools.count()
    model = build_model(config, store.vocabulary, lambda: items[0])
    model = (model.double() if config.hardware.precision == "fp64" else model).to(device).train()
    optimizer = build_optimizer(model, config.optimizer)
    answers = [] if store.answers is None else [torch.from_numpy(store.answers).to(device)]
    loss: Callable[..., Any] = model.answers if answers else model.loss
    if config.hardware.compile:
        loss = compile_loss(model, loss)

    def step() -> Tensor:
        for _ in range(hardware.accumulate):
            tokens_BN = torch.stack([items[next(numbers)] for _ in range(hardware.micro_batch_size)]).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=hardware.precision == "bf16"):
                nats, *_, auxiliary = loss(tokens_BN, *answers)
                mean = nats.mean() + auxiliary
            (mean / hardware.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.clip or float("inf"))
        set_learning_rate(optimizer, learning_rate(config, next(steps)))
        optimizer.step()
        optimizer.zero_grad()
        after_step(model)
        return mean.detach()

    return step, model.count_parameters()


def finish(rows: Sequence[Row], options: BenchOptions, arguments: Sequence[str], folder: Path, whole: bool) -> None:
    """Print the tables and keep the record; one that a signal cut short replaces none.

    Raises:
        RunFailed: no row could be timed, or the record cannot be written.
    """
    facts = environment({"what": WHAT, "command": shlex.join(["rtx", "bench", *arguments]), "ids": "training batches"})
    gpu = facts["gpu"] if rows[0].config.hardware.name != "cpu" else None
    device = gpu or f"CPU, {plural(facts['threads'], 'thread')}"
    kept = [
        {
            "hash": config_hash(row.config),
            "overrides": list(row.overrides),
            "ms_turns": row.ms_turns,
            "parameters": row.parameters,
            "reason": row.reason or None,
            "config": to_dict(row.config),
        }
        for row in rows
    ]
    record = {**facts, "bench": dataclasses.asdict(options), "device": device, "rows": kept}
    for view in views(read_record(record)):
        print("\n" + terminal(view, WIDTH))
    if not any(row.ms_turns for row in rows):
        raise RunFailed("no row could be timed")
    same = "\n".join([device, *sorted(row["hash"] for row in kept)])  # these rows on this device replace a record
    path = folder / "bench" / f"steps-{hashlib.sha256(same.encode()).hexdigest()[:12]}.json"
    if path.exists() and not whole:
        print(f"\n{shown(path)} stays as it was")
        return
    save(path, record)
    print(f"in a report: rtx report {shown(folder)}")
