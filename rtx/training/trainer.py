"""The Trainer of a run: callbacks, loggers, plugins and strategy put together; and one fit with its closing score."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from rtx.compose import flat
from rtx.config import Config
from rtx.errors import RunFailed
from rtx.evaluation.scores import Score
from rtx.training.callbacks import Bar, Best, Last, Metrics, PlainLines, RandomState, Watch
from rtx.training.checkpoint import CheckpointFiles
from rtx.training.datamodule import DataModule
from rtx.training.distributed import (
    Ranks,
    check_ranks_agree,
    cluster_environment,
    lost_process,
    start_ranks,
    strategy,
    watch_ranks,
)
from rtx.training.hardware import Hardware
from rtx.training.module import TrainingModule
from rtx.training.progress import say
from rtx.training.run_folder import Status, shown
from rtx.training.signals import PREEMPTED, Signals, Stopped, state_after

PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp64": "64-true"}
"""Our word for each arithmetic, and Lightning's."""

OWN_PLACES = ("data.path", "data.verify", "data.processes", "hardware.workers", "logger.", "name")
"""What may differ between the processes of a run."""

KNOWN_WARNINGS = (
    r".*`broadcast_buffers` is deprecated.*",  # its successor is not in all versions of torch that we take
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning's use of a torch name that is to change
    r"The `srun` command is available on your system but is not used.*",  # Slurm starts sweeps here, not runs
)
"""Warnings that mean nothing here."""


@dataclass(frozen=True)
class Outcome:
    """How a fit ended: after its last step or minute, with the score of the whole split."""

    step: int
    seconds: float
    """Training time, that of earlier processes included."""
    time_up: bool
    best: dict[str, Any] | None
    """Bits and step of the best validation."""
    final: Score


def make_trainer(
    config: Config,
    hardware: Hardware,
    folder: Path,
    callbacks: Sequence[Callback],
    loggers: Sequence[Logger],
    max_steps: int,
) -> pl.Trainer:
    """Return the Trainer of a run; what it does by itself that this project does otherwise is turned off."""
    precision: Any = PRECISIONS[hardware.precision]
    plugins: list[Any] = [cluster_environment(hardware), CheckpointFiles(config.trainer.keep_checkpoints)]
    if hardware.sharded and precision == "64-true":  # Lightning refuses the word, and takes the plugin
        precision, plugins = None, [*plugins, DoublePrecision()]
    return pl.Trainer(
        accelerator=hardware.accelerator,
        devices=hardware.devices,
        num_nodes=hardware.nodes,
        strategy=strategy(hardware),
        precision=precision,
        plugins=plugins,
        callbacks=list(callbacks),
        logger=list(loggers) or False,
        max_steps=max_steps,
        accumulate_grad_batches=hardware.accumulate,
        val_check_interval=config.trainer.val_every * hardware.accumulate,
        check_val_every_n_epoch=None,
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        inference_mode=False,
        default_root_dir=folder,
    )


class Run:
    """A run that is ready to be fitted.

    Args:
        config: the resolved configuration.
        hardware: what it means on this machine.
        folder: of the run.
        module: the model with its optimizer.
        data: its batches.
        signals: what tells it to stop.
        telemetry: reads numbers of the last training forward pass, to be logged.
        loggers: where rows go; none on a rank that keeps no records.
        status: the run's status.json; None on such a rank.
        say: prints a line.
    """

    def __init__(
        self,
        config: Config,
        hardware: Hardware,
        folder: Path,
        module: TrainingModule,
        data: DataModule,
        signals: Signals,
        telemetry: Callable[[nn.Module], dict[str, float]] = lambda model: {},
        loggers: Sequence[Logger] = (),
        status: Status | None = None,
        say: Callable[[str], object] = say,
    ) -> None:
        silence_lightning()
        self.hardware, self.folder, self.module, self.data = hardware, folder, module, data
        self.signals, self.status, self.say = signals, status, say
        self.children: list[Any] = []
        checkpoints = folder / "checkpoints"
        self.metrics = Metrics(config, module.ranks, telemetry, lambda: data.seconds, status, say)
        self.watch = Watch(signals, self.metrics)
        self.best = Best(checkpoints / "best.ckpt", status)
        self.last = Last(checkpoints / "last.ckpt", self.watch, status)
        callbacks = [
            Together(module.ranks, begins_with(module, data.step)),
            RandomState(config.seed, module),
            *(self.watch, self.metrics),
            Bar(self.metrics) if status and sys.stdout.isatty() else PlainLines(self.metrics),
            *(self.best, self.last),
        ]
        steps = max(config.trainer.steps, data.step + 1)  # with no step left Lightning would not even begin
        self.trainer = make_trainer(config, hardware, folder, callbacks, loggers, steps)

    def fit(self, checkpoint: Path | None) -> Outcome:
        """Train to the last step, and score the whole validation split.

        Signals are held from the first step on, and still are when it returns.

        Raises:
            Stopped: a signal ended it; the checkpoint is saved.
            RunFailed: NaN, a full disk, or a lost process; the message names the last good checkpoint.
        """
        self.last.saved = self.data.step or None
        self.signals.at_once, self.signals.acknowledge = self.leave_at_once, self.say
        self.children = start_ranks(self.hardware, self.folder)
        watch_ranks(self.children, self.end_without)
        try:
            with quiet():
                self.trainer.fit(self.module, datamodule=self.data, ckpt_path=checkpoint, weights_only=True)
                return self.outcome(self.final_score())
        except SIGTERMException as error:  # it came before we had set our handlers again
            raise Stopped(PREEMPTED, f"stopped by SIGTERM; {self.last.last_good()}") from error
        except RunFailed as error:
            raise RunFailed(f"{error}; {self.last.last_good()}") from error
        except RuntimeError as error:
            if lost := lost_process(error):
                raise RunFailed(f"{lost}; {self.last.last_good()}") from error
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def final_score(self) -> Score:
        """Score the whole split with the last weights; where the last validation was of all of it, that is it."""
        score, whole = self.module.score, self.data.windows
        if score is None or len(score.units_K) < len(whole) or self.last.validated != self.data.state_dict()["step"]:
            self.trainer.validate(self.module, self.data.whole_split(), verbose=False)
            score = self.module.score
        assert score is not None
        self.metrics.log_score(self.trainer, "final")
        return score

    def outcome(self, final: Score) -> Outcome:
        """Return how the fit ended."""
        step = self.trainer.global_step
        return Outcome(step, self.metrics.seconds, self.watch.time_up, self.best.best, final)

    def leave_at_once(self, code: int) -> None:
        """Before the process ends in the middle of a step: say so, and take the children along."""
        with contextlib.suppress(OSError):  # by print: the main thread may be about to write, and never come round
            print(f"stopped at once; {self.last.last_good()}", flush=True)
            if self.last.saved is not None:
                print(f"continue with: rtx resume {shown(self.folder)}", flush=True)
        if self.status:
            self.status.end(state_after(code), f"stopped at once; {self.last.last_good()}")
        self.end_children()

    def end_without(self, how: str) -> None:
        """End the process where it is, because one that it started is gone and it has not noticed; say so."""
        reason = f"{how}; {self.last.last_good()}"
        print(f"rtx: {reason}", file=sys.stderr, flush=True)
        if self.status:
            self.status.end("failed", reason)
        self.end_children()
        os._exit(1)

    def end_children(self) -> None:
        """Kill the processes that this one has started."""
        for child in self.children:
            child.kill()


class Together(Callback):
    """Opens the channel between the ranks, and compares what they begin with, before they have one model."""

    def __init__(self, ranks: Ranks, begins_with: dict[str, Any]) -> None:
        self.ranks, self.begins_with = ranks, begins_with

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Connect and compare.

        Raises:
            UserError: they differ.
        """
        self.ranks.connect()
        check_ranks_agree(self.ranks, self.begins_with)


def begins_with(module: TrainingModule, step: int) -> dict[str, Any]:
    """Return what all processes of a run must have alike, by name."""
    values = flat(module.facts.get("config", {}))
    kept = {key: value for key, value in values.items() if not key.startswith(OWN_PLACES)}
    data = module.facts.get("data", {})
    return {"the checkpoint's step": step, "the data's fingerprint": data.get("fingerprint"), **kept}


def silence_lightning() -> None:
    """Keep Lightning's banners, tips and advice off the screen; its warnings of our own making stay."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop the warnings that are known to mean nothing here, and no others."""
    with warnings.catch_warnings():
        for message in KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield
