"""A fit is the plain loop it looks like: the same bits, centroids once per step, and no step after a NaN."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import counted_rows, read_metrics
from torch import Tensor, nn

import rtx.training.module as module_room
from rtx.compose import to_dict
from rtx.config import Config, DataConfig, LoggerConfig, OptimizerConfig, TrainerConfig
from rtx.data.datamodule import RtxDataModule, TrainingItems
from rtx.training.callbacks import Watch
from rtx.training.checkpoint import CheckpointFiles, newest_checkpoint, read_checkpoint, resumable
from rtx.training.hardware import has_compiler, resolve_hardware
from rtx.training.loggers import logging_to
from rtx.training.module import TrainingModule, build_optimizer, learning_rate, seed_everything
from rtx.training.run_folder import working_in
from rtx.training.signals import PREEMPTED, Signals, Stopped
from rtx.training.trainer import Outcome, fit

LENGTH = 8
TOKENS = torch.randint(0, 16, (400,), generator=torch.Generator().manual_seed(0)).numpy().astype("uint8")


class Bigram(nn.Module):
    """A stand-in for the transformer: each unit from the one before, with dropout and an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table_VS = nn.Parameter(torch.randn(17, 6))
        self.output = nn.Linear(6, 16)
        self.dropout = 0.2
        self.spoil: Callable[[], bool] = lambda: False

    def loss(self, tokens_BN: Tensor, prefix: bool = False) -> tuple[Tensor, Tensor]:
        before_BN = nn.functional.pad(tokens_BN + 1, (1, -1))
        x_BNS = nn.functional.dropout(self.table_VS[before_BN], self.dropout, self.training)
        logits_BNV = self.output(x_BNS)
        if self.training and self.spoil():
            logits_BNV = logits_BNV * math.nan
        nats_BN = nn.functional.cross_entropy(logits_BNV.mT, tokens_BN, reduction="none")
        return nats_BN, 1e-3 * self.table_VS.square().sum()


def small_config(**changed: Any) -> Config:
    trainer = TrainerConfig(
        steps=6, batch_size=4, micro_batch_size=2, clip=0.5, val_every=3, val_windows=3, checkpoint_every=2, log_every=2
    )
    return Config(
        data=DataConfig(length=LENGTH),
        optimizer=OptimizerConfig(name="adamw", lr=0.1, warmup=3, weight_decay=0.1, schedule="rsqrt"),
        trainer=dataclasses.replace(trainer, **changed),
        logger=LoggerConfig(name="jsonl"),
        seed=3,
    )


def run_fit(folder: Path, config: Config, model: nn.Module, signals: Signals | None = None, **parts: Any) -> Outcome:
    """Fit a model in a run folder of its own, from its checkpoint if there is one."""
    (folder / "checkpoints").mkdir(exist_ok=True)
    store: Any = SimpleNamespace(split=lambda name: TOKENS, image=None)
    start = newest_checkpoint(folder / "checkpoints", set_aside=True) if parts.pop("resume", False) else None
    size = resolve_hardware(config).micro_batch_size
    data = RtxDataModule(config, store, step=start["step"] if start else 0, micro_batch=size)
    plain = to_dict(config)
    module = TrainingModule(model, config, facts={"config": plain, "data": {"fingerprint": "x"}})
    with working_in(folder) as status, logging_to(folder, config, plain, print) as loggers:
        watch = Watch(folder, module, data, signals or Signals(), lambda model: {"routing/x": 1.0}, status)
        return fit(watch, loggers, start["path"] if start else None)


def plain_loop(config: Config) -> nn.Module:
    """Return a model trained by the loop that a fit stands for."""
    seed_everything(config.seed)
    model = Bigram()
    optimizer = build_optimizer(model, config.optimizer)
    items = TrainingItems(TOKENS, LENGTH, config.seed, config.trainer.batch_size)
    seed_everything(config.seed, 1)
    for step in range(config.trainer.steps):
        optimizer.zero_grad()
        for first in range(0, config.trainer.batch_size, 2):
            nats_BN, auxiliary = model.loss(torch.stack([items[step * items.batch_size + first + i] for i in range(2)]))
            ((nats_BN.mean() + auxiliary) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.trainer.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step + 1)
        optimizer.step()
    return model


def drawn() -> Bigram:
    """Return the model that every run here begins with."""
    seed_everything(3)
    return Bigram()


@pytest.fixture
def model() -> Bigram:
    return drawn()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_fit_is_the_plain_loop_bit_for_bit(tmp_path: Path, model: Bigram, monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[nn.Module] = []
    monkeypatch.setattr(module_room, "after_step", updates.append)
    config = small_config()
    outcome = run_fit(tmp_path, config, model)
    assert_equal(model, plain_loop(config))
    assert updates == [model] * 6  # once per optimizer step, not per micro-batch
    assert all(parameter.grad is None for parameter in model.parameters()), "held no longer than they are read"
    assert (outcome.step, outcome.time_up, outcome.final.units) == (6, False, len(TOKENS))


def test_what_a_run_writes(tmp_path: Path, model: Bigram) -> None:
    outcome = run_fit(tmp_path, small_config(), model)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["kind"], row["step"]) for row in rows] == [
        *[("train", 2), ("valid", 3), ("train", 4), ("train", 6), ("valid", 6), ("final", 6)],
    ]
    train = rows[3]
    assert {"bits", "lr", "grad_norm", "tokens_per_second", "data_share", "memory_bytes", "time"} <= train.keys()
    assert train["routing/x"] == 1.0
    assert train["lr"] == pytest.approx(0.1 * math.sqrt(3 / 6))
    assert rows[1]["val_units"] == 3 * LENGTH
    assert rows[-1]["val_bits"] == outcome.final.bits
    last, previous = (read_checkpoint(tmp_path / "checkpoints" / f"{name}.ckpt") for name in ("last", "previous"))
    assert (last["step"], previous["step"]) == (6, 4)
    for name, tensor in model.state_dict().items():
        assert torch.equal(last["model"][name], tensor)
    best = read_checkpoint(tmp_path / "checkpoints" / "best.ckpt")
    scores = {row["step"]: row["val_bits"] for row in rows if row["kind"] == "valid"}
    assert best["step"] == min(scores, key=lambda step: scores[step])
    assert outcome.best == {"step": best["step"], "bits": min(scores.values()), "windows": 3}


def test_a_terminal_has_a_bar(
    tmp_path: Path, model: Bigram, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    run_fit(tmp_path, small_config(), model)
    shown = capsys.readouterr().out
    assert re.search(r"\rstep 6/6, \d\S+ bits, lr \S+, \S+ units/s, 00:00 left, \S+ GB \|", shown)
    assert re.search(r"step 3: validation \S+ bits \(24 units\)\n", shown)


def test_scores_of_other_windows_are_not_compared(tmp_path: Path, model: Bigram) -> None:
    first = run_fit(tmp_path, small_config(steps=3), model).best
    path = tmp_path / "checkpoints" / "last.ckpt"
    better = read_checkpoint(path)
    better["callbacks"]["Watch"]["best"]["bits"] = 0.1  # as if the few windows had been easy ones
    CheckpointFiles().save_checkpoint(better, path)
    again = run_fit(tmp_path, small_config(steps=6, val_windows=None), Bigram(), resume=True)
    assert first is not None and first["windows"] == 3
    assert again.best == {"bits": again.final.bits, "step": 6, "windows": 50}


def saved_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoints that a run may go on from, the newest first."""
    return [read_checkpoint(path)["step"] for path in resumable(run / "checkpoints") if path.exists()]


def test_minutes_that_are_up_end_the_run_validated_and_saved(tmp_path: Path, model: Bigram) -> None:
    outcome = run_fit(tmp_path, small_config(steps=10_000, max_minutes=1e-9), model)
    assert outcome.time_up and outcome.step == 1
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["kind"], row["step"]) for row in rows] == [("train", 1), ("valid", 1), ("final", 1)]
    assert saved_steps(tmp_path) == [1]


@pytest.mark.parametrize("at", [23, 25], ids=["in step 8", "in its validation"])
def test_a_run_stopped_where_a_validation_is_due_does_that_when_it_goes_on_and_comes_to_the_same_bits(
    tmp_path: Path, model: Bigram, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr("rtx.evaluation.scores.BATCH_UNITS", 8 * LENGTH)  # seven batches to a validation
    config = small_config(steps=12, checkpoint_every=5, val_every=4, log_every=3, val_windows=None)
    (whole := tmp_path / "whole").mkdir()
    (run := tmp_path / "run").mkdir()
    run_fit(whole, config, model)

    def going_wrong(call: int, happen: Callable[[], object]) -> Bigram:
        """Return a model in whose forward pass of this number something happens."""
        spoilt, passes = drawn(), iter(range(1, 1000))
        real = spoilt.loss

        def loss(tokens_BN: Tensor, prefix: bool = False) -> tuple[Tensor, Tensor]:
            if next(passes) == call:
                happen()
            return real(tokens_BN, prefix)

        spoilt.loss = loss  # type: ignore[method-assign]
        return spoilt

    signals = Signals()
    with pytest.raises(Stopped, match="at step 8; saved in"):
        run_fit(run, config, going_wrong(at, lambda: setattr(signals, "requested", PREEMPTED)), signals)
    with pytest.raises(ZeroDivisionError):  # behind the validation
        run_fit(run, config, going_wrong(9, lambda: 1 / 0), resume=True)
    assert saved_steps(run)[0] == 8
    run_fit(run, config, resumed := drawn(), resume=True)
    assert_equal(model, resumed)
    assert counted_rows(whole) == counted_rows(run)


@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own, while it compiles
def test_a_compiled_fit_takes_the_same_steps(tmp_path: Path) -> None:
    config = small_config(steps=2, val_every=100)
    scores = []
    for compiled in (False, True):
        seed_everything(3)
        model = Bigram()
        model.dropout = 0.0
        hardware = dataclasses.replace(config.hardware, compile=compiled)
        scores.append(run_fit(tmp_path, dataclasses.replace(config, hardware=hardware), model).final.bits)
    assert scores[1] == pytest.approx(scores[0], rel=1e-6)
