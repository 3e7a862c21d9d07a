"""The Trainer of a run: callbacks, loggers, plugins and strategy put together; and one fit with its closing score."""

import logging
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.loggers import Logger

from rtx.errors import DAMAGED, RunFailed, UserError
from rtx.evaluation.scores import Score
from rtx.machine import out_of_memory
from rtx.training.callbacks import Progress, Watch
from rtx.training.checkpoint import CheckpointFiles
from rtx.training.distributed import cluster_environment, lost_process, start_ranks, strategy
from rtx.training.hardware import Hardware, resolve_hardware
from rtx.training.profiling import Profile

KNOWN_WARNINGS = (
    ".*`broadcast_buffers` is deprecated"  # its successor is not in all versions of torch that we take
    r"|.*isinstance\(treespec, LeafSpec\)"  # Lightning's use of a torch name that is to change
    "|The `srun` command is available"  # Slurm starts sweeps here, not runs
    "|The AccumulateGrad node's stream does not match"  # of passes that are replayed: CUDA graphs run on their own
)


class Outcome(NamedTuple):
    """How a fit ended: after its last step or minute, with the closing score."""

    step: int
    seconds: float  # of training, that of earlier processes included
    time_up: bool
    best: dict[str, Any] | None  # bits and step of the best validation
    final: Score
    sample: dict[str, int]  # how many windows were scored where not all were


def build_trainer(watch: Watch, loggers: list[Logger], hardware: Hardware) -> pl.Trainer:
    """Return the Trainer of a run: what a callback of your own would be added to."""
    recorders = []
    if watch.plan.profile and watch.status:  # the first process alone
        recorders = [Profile(watch.folder, watch.plan.profile, watch.say)]
    for name in ("lightning.pytorch", "lightning.fabric"):  # their banners, tips and advice
        logging.getLogger(name).setLevel(logging.WARNING)
    return pl.Trainer(
        accelerator=hardware.accelerator,
        devices=hardware.devices,
        num_nodes=hardware.nodes,
        strategy=strategy(hardware),
        plugins=[
            cluster_environment(hardware),
            CheckpointFiles(),
            watch.module.passes.arithmetic,
        ],
        callbacks=[watch, Progress(watch), *recorders],
        enable_checkpointing=False,  # by Lightning's own callback
        logger=loggers or False,
        max_steps=max(
            watch.plan.steps, watch.data.step + 1
        ),  # with no step left Lightning would not even begin
        val_check_interval=watch.plan.val_every,
        check_val_every_n_epoch=None,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        inference_mode=False,
        default_root_dir=watch.folder,
    )


def fit(watch: Watch, loggers: list[Logger], checkpoint: Path | None) -> Outcome:
    """Train to the last step, and score the whole validation split; signals are still held when it returns.

    `Stopped` upon a signal, once the checkpoint is saved; `RunFailed` upon NaN, a full disk, or a lost process.
    """
    hardware = resolve_hardware(watch.module.config)
    trainer = build_trainer(watch, loggers, hardware)
    watch.signals.at_once = partial(watch.leave_at_once, "stopped at once")
    watch.children = start_ranks(hardware, watch.folder, watch.leave_at_once)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=KNOWN_WARNINGS)
            trainer.fit(
                watch.module, datamodule=watch.data, ckpt_path=checkpoint, weights_only=True
            )
            step = trainer.global_step
            if (count := watch.final_windows()) != len(
                watch.module.score.units_K
            ):  # of the last validation
                trainer.validate(watch.module, watch.data.val_dataloader(count), verbose=False)
            watch.write_score(trainer, "valid/final_")
            sample = {"windows": count} if count < len(watch.data.windows) else {}
            return Outcome(
                step, watch.seconds, step < watch.plan.steps, watch.best, watch.module.score, sample
            )
    except (RuntimeError, *DAMAGED) as error:
        if reason := str(error) if isinstance(error, RunFailed) else lost_process(error):
            raise RunFailed(f"{reason}; {watch.last_good()}") from error
        if checkpoint and not isinstance(error, UserError) and not out_of_memory(error):
            last = traceback.extract_tb(error.__traceback__)[
                -1
            ]  # nothing is held yet while a checkpoint is restored
            if not watch.signals.holding or (not watch.pace and "/torch/optim/" in last.filename):
                raise UserError(f"{checkpoint} is none to go on from: {error!r}") from error
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
