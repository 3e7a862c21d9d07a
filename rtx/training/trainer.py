"""The Trainer of a run: callbacks, loggers, plugins and strategy put together; and one fit with its closing score."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from rtx.data.datamodule import RtxDataModule
from rtx.errors import RunFailed
from rtx.evaluation.scores import Score
from rtx.progress import say
from rtx.training.callbacks import Progress, Watch
from rtx.training.checkpoint import CheckpointFiles
from rtx.training.distributed import cluster_environment, lost_process, start_ranks, strategy
from rtx.training.hardware import resolve_hardware
from rtx.training.module import TrainingModule
from rtx.training.run_folder import Status, shown
from rtx.training.signals import PREEMPTED, Signals, Stopped, state_after

PRECISIONS: dict[str, Any] = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp64": "64-true"}
"""Our word for each arithmetic, and Lightning's."""
KNOWN_WARNINGS = (
    ".*`broadcast_buffers` is deprecated",  # its successor is not in all versions of torch that we take
    r".*isinstance\(treespec, LeafSpec\)",  # Lightning's use of a torch name that is to change
    "The `srun` command is available",  # Slurm starts sweeps here, not runs
)


class Outcome(NamedTuple):
    """How a fit ended: after its last step or minute, with the score of the whole split."""

    step: int
    seconds: float  # of training, that of earlier processes included
    time_up: bool
    best: dict[str, Any] | None  # bits and step of the best validation
    final: Score


class Run:
    """A run that is ready to be fitted; a rank that keeps no records has no `loggers` and no `status`."""

    def __init__(
        self,
        folder: Path,
        module: TrainingModule,
        data: RtxDataModule,
        signals: Signals,
        telemetry: Callable[[nn.Module], dict[str, float]] = lambda model: {},
        loggers: Sequence[Logger] = (),
        status: Status | None = None,
        say: Callable[[str], object] = say,
    ) -> None:
        config, hardware = module.config, resolve_hardware(module.config)
        self.folder, self.module, self.data, self.signals, self.status = folder, module, data, signals, status
        self.children: list[Any] = []
        self.watch = Watch(folder, module, data, signals, telemetry, status, say)
        precision = PRECISIONS[hardware.precision]
        plugins: list[Any] = [cluster_environment(hardware), CheckpointFiles()]
        if hardware.sharded and precision == "64-true":  # Lightning refuses the word, and takes the plugin
            precision, plugins = None, [*plugins, DoublePrecision()]
        for name in ("lightning.pytorch", "lightning.fabric"):  # their banners, tips and advice
            logging.getLogger(name).setLevel(logging.WARNING)
        self.trainer = pl.Trainer(
            accelerator=hardware.accelerator,
            devices=hardware.devices,
            num_nodes=hardware.nodes,
            strategy=strategy(hardware),
            precision=precision,
            plugins=plugins,
            callbacks=[self.watch, Progress(self.watch)],
            enable_checkpointing=False,  # by Lightning's own callback
            logger=list(loggers) or False,
            max_steps=max(config.trainer.steps, data.step + 1),  # with no step left Lightning would not even begin
            accumulate_grad_batches=hardware.accumulate,
            val_check_interval=config.trainer.val_every * hardware.accumulate,
            check_val_every_n_epoch=None,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            inference_mode=False,
            default_root_dir=folder,
        )

    def fit(self, checkpoint: Path | None) -> Outcome:
        """Train to the last step, and score the whole validation split; signals are still held when it returns.

        Raises:
            Stopped: a signal ended it; the checkpoint is saved.
            RunFailed: NaN, a full disk, or a lost process; the message names the last good checkpoint.
        """
        self.signals.at_once = lambda code: self.leave_at_once(state_after(code), "stopped at once")
        self.children = start_ranks(resolve_hardware(self.module.config), self.folder, self.end_without)
        try:
            with warnings.catch_warnings():
                for message in KNOWN_WARNINGS:
                    warnings.filterwarnings("ignore", message=message)
                self.trainer.fit(self.module, datamodule=self.data, ckpt_path=checkpoint, weights_only=True)
                step, final = self.trainer.global_step, self.final_score()
                return Outcome(step, self.watch.seconds, step < self.watch.plan.steps, self.watch.best, final)
        except SIGTERMException as error:  # it came before we had set our handlers again
            raise Stopped(PREEMPTED, f"stopped by SIGTERM; {self.watch.last_good()}") from error
        except RuntimeError as error:
            if reason := str(error) if isinstance(error, RunFailed) else lost_process(error):
                raise RunFailed(f"{reason}; {self.watch.last_good()}") from error
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def final_score(self) -> Score:
        """Score the whole split with the last weights; where the last validation was of all of it, that is it."""
        assert self.module.score is not None
        if len(self.module.score.units_K) < len(self.data.windows):
            self.trainer.validate(self.module, self.data.whole_split(), verbose=False)
        self.watch.write_score(self.trainer, "final")
        return self.module.score

    def leave_at_once(self, state: str, how: str) -> None:
        """Before the process ends in the middle of a step: say so, and take the children along."""
        reason = f"{how}; {self.watch.last_good()}"
        with contextlib.suppress(OSError):  # by print: the main thread may be about to write, and never come round
            print(reason, flush=True)
            if self.watch.saved is not None:
                print(f"continue with: rtx resume {shown(self.folder)}", flush=True)
        if self.status:
            self.status.end(state, reason.removeprefix("rtx: "))
        for child in self.children:
            child.kill()

    def end_without(self, how: str) -> None:
        """End the process where it is, because one that it started is gone and it has not noticed."""
        self.leave_at_once("failed", f"rtx: {how}")
        os._exit(1)
