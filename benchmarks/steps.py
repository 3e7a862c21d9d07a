"""The training steps of several rows, timed in turn on this machine, beside the paper's.

Run `python benchmarks/steps.py [turns=5] [per_turn=2] [warmup=2] [overrides]`. Overrides are those
of `rtx train -m`: lists of values, and what an experiment lays out, are rows. It writes
outputs/<name>/bench/steps-<key>.json, which `rtx report` shows beside the scores. After Ctrl-C,
too, what was measured is printed and kept.

Times on a shared machine drift; where every row steps in every turn, drift reaches all alike, and
their ratios mean something. Exit codes: 0 if every row was timed, 1 if some failed, 2 a mistake of
the user, 130 after Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from rtx.analysis.micro_batch import fit_to_device
from rtx.cli.main import complain
from rtx.data.batches import MicroBatches, token_ids
from rtx.data.catalog import data_root, open_data
from rtx.data.store import Store
from rtx.errors import RunFailed, UserError, plural
from rtx.machine import out_of_memory
from rtx.progress import progress_bar
from rtx.report.steps import timed_records, views
from rtx.runs.environment import environment
from rtx.runs.folder import outputs_root, save, unwritable
from rtx.runs.records import TIMED_STEPS, StepsRecord
from rtx.settings.identity import config_hash, short_hash
from rtx.settings.overrides import LAUNCHED, check_overrides
from rtx.settings.schema import SPREAD, Config, to_dict
from rtx.sweeps.cells import lay_out
from rtx.tables import table_text
from rtx.training.hardware import device_memory, resolve_hardware
from rtx.training.inference import prepare_device
from rtx.training.module import TrainingModule
from rtx.training.optimizers import build_optimizer
from rtx.training.start import build_model

DEFAULTS = {"turns": 5, "per_turn": 2, "warmup": 2}
"""Turns; timed steps of a row in each, whose mean counts; steps of a row that are not timed, in its
first turn.
"""


@dataclasses.dataclass
class Row:
    """A configuration, and what is known of its steps so far."""

    config: Config
    ms_turns: list[float] = dataclasses.field(default_factory=list)
    """Milliseconds of a step, the mean of each turn."""
    parameters: int | None = None
    reason: str | None = None
    """Why it takes no more steps."""


def main(words: Sequence[str]) -> int:
    """Time the rows that words lay out, print and keep the record; returns the exit code."""
    asked, overrides = options_of(words)
    rows = lay_out_rows(overrides)
    folder = outputs_root() / rows[0].config.name
    try:  # before hours are spent on what could not be kept
        (folder / "bench").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(unwritable(folder, error)) from None
    stores = [open_data(row.config.data, data_root()) for row in rows]
    print(
        f"{plural(len(rows), 'row')}, {plural(asked['turns'], 'turn')} of "
        f"{plural(asked['per_turn'], 'step')}"
    )
    try:
        measure(rows, stores, asked)
    finally:
        if any(row.ms_turns for row in rows):
            finish(rows, asked, words, folder)
    if not any(row.ms_turns for row in rows):
        raise RunFailed(f"no row could be timed: {rows[0].reason}")
    return 1 if any(row.reason for row in rows) else 0


def options_of(words: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Take our own options out of the words; returns them, and the words that are left."""
    asked = dict(DEFAULTS)
    rest: list[str] = []
    for word in words:
        key, _, text = word.partition("=")
        if key not in DEFAULTS:
            rest.append(word)
        elif not text.isdecimal() or int(text) < (key != "warmup"):
            raise UserError(f"{word}: must be an integer, at least {int(key != 'warmup')}")
        else:
            asked[key] = int(text)
    return asked, rest


def lay_out_rows(overrides: Sequence[str]) -> list[Row]:
    """Return the rows that overrides lay out, composed and checked; of those that differ by their
    seed the first.
    """
    checked = check_overrides(overrides, sweep=True)
    for entry in checked:
        many = entry.key in ("hardware", "hardware.name") and {*entry.values} & {*SPREAD, *LAUNCHED}
        if many or entry.key.startswith("hydra"):
            raise UserError(
                f"{entry}: rows are timed in turn on one device; hardware takes auto, cpu or gpu"
            )
    rows: dict[str, Row] = {}
    for cell in lay_out(checked):
        rows.setdefault(config_hash(dataclasses.replace(cell.config, seed=0)), Row(cell.config))
    return list(rows.values())


def measure(rows: Sequence[Row], stores: Sequence[Store], asked: Mapping[str, int]) -> None:
    """Let every row take its steps in every turn; one that fails is left out from then on."""
    timed = [turns_of(row, store, asked) for row, store in zip(rows, stores, strict=True)]
    with progress_bar("turns of rows") as show:
        for done in range(asked["turns"] * len(rows)):
            place = done % len(rows)
            row = rows[place]
            try:
                row.ms_turns.extend(itertools.islice(timed[place], 1))
            except Exception as error:  # which ends its turns, and frees its memory for the others
                row.reason = (
                    out_of_memory(error) or f"{type(error).__name__}: {error}".splitlines()[0]
                )
            show(done + 1, asked["turns"] * len(rows))


def turns_of(row: Row, store: Store, asked: Mapping[str, int]) -> Iterator[float]:
    """Take the steps of a turn, behind a warm-up in the first, whenever asked to, and yield the
    milliseconds of one.
    """
    device = prepare_device(row.config)
    # What `rtx train` would choose here for `auto`: a report compares the row with runs.
    fitted, _ = fit_to_device(row.config, store.vocabulary, device_memory(row.config) or 0)
    hardware = dataclasses.replace(fitted.hardware, precision=resolve_hardware(fitted).precision)
    row.config = dataclasses.replace(fitted, hardware=hardware)
    module, step = training_step(row.config, store, device)
    row.parameters = module.model.count_parameters()
    for _ in range(asked["warmup"]):
        step()
    while True:
        prepare_device(row.config)  # the threads may be others than of the row before
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(asked["per_turn"]):
            step()
        # To read these waits for the device: so the clock is read once a turn.
        if not bool(torch.stack([module.sums[0], module.norm.double()]).isfinite().all()):
            rate = row.config.optimizer.lr
            raise FloatingPointError(f"the loss is not a number at learning rate {rate:g}")
        yield 1e3 * (time.perf_counter() - began) / asked["per_turn"]


def training_step(
    config: Config, store: Store, device: torch.device
) -> tuple[TrainingModule, Callable[[], None]]:
    """Return a model in training, and what takes its next optimizer step, that of `rtx train`."""
    hardware = resolve_hardware(config)
    sampler = store.training_sampler(config)
    model = build_model(config, store.vocabulary, lambda: token_ids(sampler, 0))
    model = model.to(device).train()
    module = TrainingModule(model, config, hardware, store.answers)
    module.passes.precision.convert_module(model)
    optimizer = build_optimizer(model, config.optimizer)
    size = hardware.micro_batch_size
    batches = MicroBatches(sampler, size)
    module.passes.prepare(batches[0].to(device).long())
    steps = itertools.count(1)

    def step() -> None:
        number = next(steps)
        first = (number - 1) * config.trainer.batch_size
        firsts = range(first, first + hardware.accumulate * size, size)
        micro_batches = [batches[index].to(device) for index in firsts]
        module.take_step(micro_batches, optimizer, number)

    return module, step


def finish(
    rows: Sequence[Row], asked: Mapping[str, int], words: Sequence[str], folder: Path
) -> None:
    """Print the tables and keep the record, which replaces that of the same rows on this device."""
    command = shlex.join(["python", "benchmarks/steps.py", *words])
    facts = environment({"what": TIMED_STEPS, "command": command, "ids": "training batches"})
    gpu = facts["gpu"] if rows[0].config.hardware.name != "cpu" else None
    facts |= {"bench": dict(asked), "device": gpu or f"CPU, {plural(facts['threads'], 'thread')}"}
    record = {**facts, "rows": [{**vars(row), "config": to_dict(row.config)} for row in rows]}
    for view in views(timed_records([StepsRecord.model_validate(record)])[0]):
        print("\n" + table_text(view))
    key = short_hash(
        {"device": facts["device"], "rows": sorted(config_hash(row.config) for row in rows)}, 12
    )
    save(folder, f"bench/steps-{key}.json", record)


def entry() -> int:
    """Run `main` with the words of the command line; a mistake, or a failure, is told in a line."""
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
        return 0
    try:
        return main(sys.argv[1:])
    except UserError as error:
        return complain(str(error), 2)
    except RunFailed as error:
        return complain(str(error), 1)
    except KeyboardInterrupt:
        return complain("stopped by SIGINT", 130)


if __name__ == "__main__":
    sys.exit(entry())
