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
from rtx.training.checkpoint import CheckpointFiles
from rtx.training.distributed import cluster_environment, lost_process, start_ranks, strategy
from rtx.training.module import TrainingModule
from rtx.training.session import Session

HARMLESS_WARNINGS = (
    # Its successor is not in all versions of torch that we take.
    ".*`broadcast_buffers` is deprecated",
    # Lightning uses a name of torch that is to change.
    r".*isinstance\(treespec, LeafSpec\)",
    # Slurm starts sweeps here, not runs.
    "The `srun` command is available",
    # Passes that are replayed as CUDA graphs run on a stream of their own.
    "The AccumulateGrad node's stream does not match",
)
CLOSING_SECONDS = 30.0
"""The closing score may take so long whatever the training took."""


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
    """The number of windows that the closing score is of, where these are not all."""


def build_trainer(
    session: Session, module: TrainingModule, loggers: list[Logger], meter: Meter
) -> pl.Trainer:
    """Return the Trainer of a run; a callback of your own is added to `run_callbacks`."""
    for name in ("lightning.pytorch", "lightning.fabric"):  # their banners, tips and advice
        logging.getLogger(name).setLevel(logging.WARNING)
    hardware = session.hardware
    limits = session.config.trainer
    return pl.Trainer(
        accelerator=hardware.accelerator,
        devices=hardware.devices,
        num_nodes=hardware.nodes,
        strategy=strategy(hardware),
        plugins=[cluster_environment(hardware), CheckpointFiles(), module.passes.arithmetic],
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
    if count != len(module.score.units_K):  # the windows of the last validation were others
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
    """Return how many windows the closing score is of, alike on all ranks.

    With trainer.final_windows=auto these are all windows if they take a tenth of the time of
    training at the most, else a sample whose size is a power of two.
    """
    wanted = session.config.trainer.final_windows
    all_windows = len(data.windows)
    if wanted != "auto":
        return min(int(wanted or all_windows), all_windows)
    scored = len(module.score.units_K)
    budget = max(CLOSING_SECONDS, session.clock.seconds / 10)
    in_time = int(scored * budget / max(1e-6, session.clock.validation_seconds))
    (count,) = session.ranks.largest(in_time)
    if count >= all_windows:
        return all_windows
    power_of_two = 1 << max(0, count.bit_length() - 1)
    return max(scored, power_of_two)
