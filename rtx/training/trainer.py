"""The Trainer of a run, and one fit with its closing score."""

import logging
import warnings
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.loggers import Logger

from rtx.analysis.speed import Meter
from rtx.data.datamodule import RtxDataModule
from rtx.errors import DAMAGED, RunFailed, UserError
from rtx.evaluation.scores import Score
from rtx.training.callbacks import run_callbacks
from rtx.training.callbacks.rows import write_score
from rtx.training.distributed import cluster_environment, lost_process, start_ranks, strategy
from rtx.training.lightning_plugins import CheckpointFiles
from rtx.training.module import TrainingModule
from rtx.training.session import Session

HARMLESS_WARNINGS = (
    # The argument that replaces it is missing in some supported versions of torch.
    ".*`broadcast_buffers` is deprecated",
    # Lightning uses a deprecated name of torch.
    r".*isinstance\(treespec, LeafSpec\)",
    # Slurm starts sweeps here, not runs.
    "The `srun` command is available",
    # Passes that are replayed as CUDA graphs run on a stream of their own.
    "The AccumulateGrad node's stream does not match",
)
CLOSING_SECONDS = 30.0
"""Seconds that the closing score may take after even the shortest training."""


class Outcome(NamedTuple):
    """How a fit has ended."""

    step: int
    seconds: float
    """Of training, that of earlier processes included."""
    time_up: bool
    """Whether trainer.max_minutes ended it."""
    best: dict[str, Any] | None
    """Bits, step and windows of the best validation."""
    final: Score
    sample: dict[str, int]
    """`windows`, the number of scored windows, if the closing score is of a sample; else empty."""


def build_trainer(
    session: Session, module: TrainingModule, loggers: list[Logger], meter: Meter
) -> pl.Trainer:
    """Return the Trainer of a run; add callbacks of your own to `run_callbacks`."""
    # Lightning logs banners and tips at the level INFO.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    hardware = session.hardware
    limits = session.config.trainer
    return pl.Trainer(
        accelerator=hardware.accelerator,
        devices=hardware.devices,
        num_nodes=hardware.nodes,
        strategy=strategy(hardware),
        plugins=[cluster_environment(hardware), CheckpointFiles(), module.passes.precision],
        callbacks=run_callbacks(session, module, meter),
        enable_checkpointing=False,  # by Lightning's own callback
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=loggers or False,
        # With no step left Lightning would not even start the callbacks.
        max_steps=max(limits.steps, session.first_step + 1),
        val_check_interval=limits.val_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        # Tensors that a model makes in a validation and keeps are read by training as well.
        inference_mode=False,
        default_root_dir=session.folder,
    )


def fit(
    session: Session,
    module: TrainingModule,
    data: RtxDataModule,
    loggers: list[Logger],
    meter: Meter,
) -> Outcome:
    """Train to the last step, and score the validation split; signals are still held on return.

    Raises `Stopped` upon a signal, once the checkpoint is saved; `RunFailed` upon NaN, a full disk
    or a lost process.
    """
    trainer = build_trainer(session, module, loggers, meter)
    session.signals.at_once = partial(session.leave_at_once, "stopped at once")
    session.children = start_ranks(session.hardware, session.folder, session.leave_at_once)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="|".join(HARMLESS_WARNINGS))
            trainer.fit(module, datamodule=data)
            return closing_score(session, trainer, module, data)
    except UserError:
        raise
    except (RuntimeError, *DAMAGED) as error:
        reason = str(error) if isinstance(error, RunFailed) else lost_process(error)
        if reason:
            raise RunFailed(f"{reason}; {session.last_good()}") from error
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def closing_score(
    session: Session, trainer: pl.Trainer, module: TrainingModule, data: RtxDataModule
) -> Outcome:
    """Score the trained model on the validation split, and return how the fit has ended."""
    step = trainer.global_step
    count = closing_windows(session, module, data)
    # The last validation may have scored other windows.
    if count != len(module.score.units_K):
        trainer.validate(module, data.val_dataloader(count), verbose=False)
    write_score(trainer, "valid/final_", module.score, session)
    return Outcome(
        step=step,
        seconds=session.clock.seconds,
        time_up=step < session.config.trainer.steps,
        best=session.best,
        final=module.score,
        sample={"windows": count} if count < len(data.windows) else {},
    )


def closing_windows(session: Session, module: TrainingModule, data: RtxDataModule) -> int:
    """Return the number of windows to score at the end, the same on all ranks.

    With trainer.final_windows=auto these are all windows if scoring them takes at most a tenth of
    the training time (or 30 s), else a sample whose size is a power of two.
    """
    requested = session.config.trainer.final_windows
    all_windows = len(data.windows)
    if requested != "auto":
        return min(int(requested or all_windows), all_windows)
    scored = len(module.score.units_K)
    budget = max(CLOSING_SECONDS, session.clock.seconds / 10)
    in_time = int(scored * budget / max(1e-6, session.clock.validation_seconds))
    (count,) = session.ranks.largest(in_time)
    if count >= all_windows:
        return all_windows
    power_of_two = 1 << max(0, count.bit_length() - 1)
    return max(scored, power_of_two)
