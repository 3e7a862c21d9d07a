"""A fit: Lightning's Trainer with everything switched off that this project does itself."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.plugins.precision import DoublePrecision

from rtx.config import Config
from rtx.errors import RunFailed
from rtx.evaluation.scores import Score
from rtx.training.children import Launcher
from rtx.training.hardware import Hardware
from rtx.training.job import Job
from rtx.training.loop import Loop
from rtx.training.module import TrainingModule
from rtx.training.pace import Fetches
from rtx.training.runs import shown
from rtx.training.signals import ignore_signals, state_after
from rtx.training.strategies import Replicated, Shared

PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp64": "64-true"}
"""Our word for each arithmetic, and Lightning's."""

KNOWN_WARNINGS = (
    r".*`broadcast_buffers` is deprecated.*",  # its successor is not in all versions of torch that we take
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning's use of a torch name that is to change
    r"The `srun` command is available on your system but is not used.*",  # Slurm starts sweeps here, not runs
    r".*Total length of .* across ranks is zero.*",  # a resumed run that only has its last score to compute
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


def fit(job: Job) -> Outcome:
    """Train to the last step, and score the whole validation split.

    Signals are held from the first step on, and still are when it returns.

    Raises:
        Stopped: a signal ended it; the checkpoint is saved.
        RunFailed: NaN, a full disk, or a lost process; the message names the last good checkpoint.
    """
    silence_lightning()
    module = TrainingModule(job.model, job.config, job.answers)
    steps = 0 if job.nothing_left else job.config.trainer.steps - job.first_step
    fetches = Fetches(job.batches, steps * job.hardware.accumulate)
    loop = Loop(job, module, fetches)
    trainer = make_trainer(job.config, job.hardware, job.folder, [loop])
    job.signals.at_once = lambda code: leave_at_once(code, job, loop, trainer)
    job.signals.acknowledge = job.records.progress.say
    if isinstance(trainer.strategy.launcher, Launcher):
        trainer.strategy.launcher.lost = lambda how: end_without(how, job, loop, trainer)
    try:
        with quiet():
            trainer.fit(module, train_dataloaders=fetches)
    except RuntimeError as error:
        if is_lost_peer(error):
            raise RunFailed(f"another process of the run is gone; {loop.last_good()}") from error
        raise
    finally:
        job.records.progress.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
    if loop.stopped_by or loop.final is None:
        raise loop.stopped()
    return Outcome(module.step, loop.clock.seconds, loop.time_up, loop.best, loop.final)


def make_trainer(config: Config, hardware: Hardware, folder: Path, callbacks: list[pl.Callback]) -> pl.Trainer:
    """Return a Trainer that only steps: no loggers, checkpoints, bars, summaries, samplers or validation of its own."""
    strategy: Any = "auto"
    if hardware.distributed:
        strategy = Shared(hardware.world) if hardware.sharded else Replicated()
    precision: Any = PRECISIONS[config.hardware.precision]
    plugins: list[Any] = [cluster_environment(hardware)]
    if hardware.sharded and precision == "64-true":  # Lightning refuses the word, and takes the plugin
        precision, plugins = None, [*plugins, DoublePrecision()]
    return pl.Trainer(
        accelerator=hardware.accelerator,
        devices=hardware.devices,
        num_nodes=hardware.nodes,
        strategy=strategy,
        precision=precision,
        plugins=plugins,
        callbacks=callbacks,
        accumulate_grad_batches=hardware.accumulate,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        inference_mode=False,
        default_root_dir=folder,
    )


def cluster_environment(hardware: Hardware) -> ClusterEnvironment:
    """Return Lightning's view of who started the processes; never its guess, which reads more of the system."""
    if hardware.launcher == "torchrun":
        return TorchElasticEnvironment()
    if hardware.launcher == "srun":
        # Lightning insists on the tasks of each machine, which srun tells of only where they were asked for.
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(hardware.devices))
        return SLURMEnvironment(auto_requeue=False)
    return LightningEnvironment()


def leave_at_once(code: int, job: Job, loop: Loop, trainer: pl.Trainer) -> None:
    """Before the process ends in the middle of a step: say so, and take the children along."""
    job.records.progress.say(f"stopped at once; {loop.last_good()}")
    if loop.saved is not None:
        job.records.progress.say(f"continue with: rtx resume {shown(job.folder)}")
    if job.records.status:
        job.records.status.end(state_after(code), f"stopped at once; {loop.last_good()}")
    end_children(trainer)


def end_without(how: str, job: Job, loop: Loop, trainer: pl.Trainer) -> None:
    """End the process where it is, because one that it started is gone and it has not noticed; say so."""
    reason = f"{how}; {loop.last_good()}"
    job.records.progress.clear()
    print(f"rtx: {reason}", file=sys.stderr, flush=True)
    if job.records.status:
        job.records.status.end("failed", reason)
    end_children(trainer)
    os._exit(1)


def end_children(trainer: pl.Trainer) -> None:
    """Kill the processes that this one has started."""
    for child in getattr(trainer.strategy.launcher, "procs", []):
        child.kill()


def loader_process_starts(worker: int) -> None:
    """Prepare a loader process (`worker_init_fn`): one thread, and deaf to signals meant for the training process."""
    ignore_signals()
    torch.set_num_threads(1)


def is_lost_peer(error: RuntimeError) -> bool:
    """Tell whether an error means that another process of the run has gone."""
    signs = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "ProcessGroup")
    return isinstance(error, dist.DistError) or (dist.is_initialized() and any(s in str(error) for s in signs))


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
