"""The process of one row of `rtx bench steps`: training steps as a fit takes them, as many as it is asked for.

Through its pipe it gets a number of steps, and answers with what they took; so the rows of a table can take turns.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rtx.config import Config
from rtx.errors import UserError
from rtx.training.fit import make_trainer, quiet, silence_lightning
from rtx.training.fresh import fresh_model
from rtx.training.hardware import Hardware, prepare_torch, resolve_hardware
from rtx.training.memory import out_of_memory
from rtx.training.module import NotFinite, TrainingModule
from rtx.training.pace import Fetches
from rtx.training.progress import peak_memory
from rtx.training.signals import go_with_parent, ignore_signals

ENDLESS = 10**12
"""Batches that the fit is told of; it ends when nobody asks for more."""


@dataclass(frozen=True)
class Work:
    """What the process of a row needs to know."""

    config: Config
    vocabulary: int
    answers: np.ndarray | None = None
    """Positions of each sequence whose units alone are trained on; None: all of them."""
    sequence: Callable[[int, int], np.ndarray] | None = None
    """Makes a training sequence `[N]` from the seed and its number; None: ids are drawn at random."""


@dataclass(frozen=True)
class Turn:
    """What the steps of a turn took."""

    milliseconds: float
    """Of a step: forward, backward, clipping, optimizer and centroids; the mean of the turn."""
    peak_bytes: int
    """The most memory that the process, or its GPU, has held so far."""
    parameters: int
    device: str
    threads: int


@dataclass(frozen=True)
class Failure:
    """Why a row takes no more steps."""

    reason: str


def serve(door: Connection, work: Work) -> None:
    """Be the process of a row: for each number of steps that comes, send a `Turn`, or the `Failure` that ends it.

    It leaves when the pipe is closed or its parent is gone; signals are left to the process that asks.
    """
    ignore_signals()
    go_with_parent(os.getppid())
    be_killed_first()
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            take_turns(door, work)
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            door.send(Failure(reason_of(error)))


def take_turns(door: Connection, work: Work) -> None:
    """Fit a fresh model, with the Trainer of `rtx train`, for as long as steps are asked for.

    Raises:
        EOFError: nobody asks any more.
    """
    config = work.config
    hardware = resolve_hardware(config)
    prepare_torch(config, hardware)
    silence_lightning()
    sequences = endless(work)
    model = fresh_model(config, work.vocabulary, lambda: next(sequences))
    module = TrainingModule(model, config, work.answers)
    batches = Fetches(asked_for(door, sequences, module, hardware), ENDLESS)
    trainer = make_trainer(config, hardware, Path.cwd(), [])
    with quiet():
        trainer.fit(module, train_dataloaders=batches)


def endless(work: Work) -> Iterator[Tensor]:
    """Yield training sequences, ids `[N]`: made where the task makes them, else drawn at random."""
    generator = torch.Generator().manual_seed(work.config.seed)
    for number in itertools.count():
        if work.sequence:
            yield torch.from_numpy(work.sequence(work.config.seed, number).astype(np.int64))
        else:
            yield torch.randint(0, work.vocabulary, (work.config.data.length,), generator=generator)


def asked_for(
    door: Connection, sequences: Iterator[Tensor], module: TrainingModule, hardware: Hardware
) -> Iterator[Tensor]:
    """Yield the micro-batches of as many steps as are asked for; when the fit comes for more, their time is taken.

    The clock is read once a turn: a GPU works on while the next step is prepared, as it does in training.

    Raises:
        NotFinite: the loss or the gradient of a step is not a number.
    """
    device = torch.cuda.get_device_name() if hardware.accelerator == "gpu" else "CPU"
    parameters = sum(parameter.numel() for parameter in module.model.parameters())
    while True:
        steps = door.recv()
        began = time.perf_counter()
        for _ in range(steps * hardware.accumulate):
            yield torch.stack([next(sequences) for _ in range(hardware.micro_batch_size)])
        module.read_back()  # waits for the device
        if hardware.accelerator == "gpu":
            torch.cuda.synchronize()
        milliseconds = 1e3 * (time.perf_counter() - began) / steps
        door.send(Turn(milliseconds, peak_memory(), parameters, device, torch.get_num_threads()))


def be_killed_first() -> None:
    """Ask Linux to end this process before others where memory runs out: its row fails, and nothing else does."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def reason_of(error: Exception) -> str:
    """Return why a row failed, in a line."""
    if reason := out_of_memory(error):
        return reason
    lines = str(error).strip().splitlines()
    said = lines[0].strip() if lines else type(error).__name__
    return said if isinstance(error, UserError | NotFinite) else f"{type(error).__name__}: {said}"
