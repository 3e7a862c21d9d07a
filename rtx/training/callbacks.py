"""What happens between two optimizer steps: rows, checkpoints, the screen, and the decision to stop.

All callbacks act on all ranks alike; only the first one writes and speaks. Lightning calls them in the order in which
they are given, those that save (`Checkpoint`) after all others.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from torch import nn

from rtx.config import Config
from rtx.errors import RunFailed
from rtx.training.distributed import Ranks
from rtx.training.module import NotFinite, StepRecord, TrainingModule
from rtx.training.optimizers import learning_rate
from rtx.training.progress import PLAIN_SECONDS, peak_memory, training_line
from rtx.training.rng import restore_rng, rng_state, seed_everything
from rtx.training.run_folder import Status
from rtx.training.sharding import local
from rtx.training.signals import Signals, Stopped

LOOK_STEPS = 8
"""Steps between two looks at a GPU's numbers, where nothing else asks for one: each makes the CPU wait for it."""

Say = Callable[[str], object]


class StepCallback(Callback):
    """Acts after each optimizer step; Lightning's hook is called after each micro-batch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.on_step_end(trainer, pl_module)

    def on_step_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Do what is due."""


def is_fitting(trainer: Trainer) -> bool:
    """Tell whether a validation belongs to the training, or is the closing score."""
    return trainer.state.fn == "fit"


class RandomState(Callback):
    """Keeps the random streams and the running sums of every rank in the checkpoint.

    They are set when the first batch is there: nothing but training draws from them any more.
    """

    def __init__(self, seed: int, module: TrainingModule) -> None:
        self.seed, self.module, self.ranks = seed, module, module.ranks
        self.kept: list[dict[str, Any]] = []
        self.are_set = False

    def state_dict(self) -> dict[str, Any]:
        """Return the streams and sums of all ranks, which all call this; before the first batch those of before."""
        if self.kept and not self.are_set:
            return {"ranks": self.kept}
        return {"ranks": self.ranks.gather({"rng": rng_state(), "sums": dict(self.module.sums)})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["ranks"]

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Restore streams and sums, once; without those of as many ranks, seed them."""
        if self.are_set:
            return
        self.are_set, rank, world = True, self.ranks.rank, self.ranks.world
        if len(self.kept) == world:
            restore_rng(self.kept[rank]["rng"])
            self.module.sums.update(self.kept[rank]["sums"])
        else:
            seed_everything(self.seed, 1 + rank + world * trainer.global_step)


class Metrics(StepCallback):
    """Writes the rows of training and of validations; knows the time, and the numbers for the screen.

    Args:
        config: the resolved configuration.
        ranks: the processes of the run.
        telemetry: reads numbers of the last training forward pass, to be logged.
        waited: returns the seconds spent waiting for batches so far.
        status: the run's status.json; None on a rank that keeps no records.
        say: prints a line.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        telemetry: Callable[[nn.Module], dict[str, float]],
        waited: Callable[[], float],
        status: Status | None,
        say: Say,
    ) -> None:
        self.plan, self.config, self.ranks = config.trainer, config, ranks
        self.telemetry, self.waited, self.status, self.say = telemetry, waited, status, say
        self.units_per_step = config.trainer.batch_size * config.data.length
        self.row_step: int | None = None
        self.waited_before = self.grad_norm = self.seconds_before = 0.0
        self.began: float | None = None
        self.mark = self.validation_began = time.monotonic()
        self.bits = self.pace = math.nan
        """For the screen: smoothed bits, and units per second."""

    @property
    def seconds(self) -> float:
        """Seconds since the first step, validation and checkpoints included, and those of earlier processes."""
        return self.seconds_before + (0.0 if self.began is None else time.monotonic() - self.began)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds_before = float(state_dict["seconds"])

    def on_train_start(self, *_: Any) -> None:
        self.began = time.monotonic()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin the first row when the first batch is there."""
        if self.row_step is None:
            self.begin_row(trainer.global_step)

    def begin_row(self, step: int) -> None:
        """Begin a row."""
        self.row_step, self.waited_before, self.mark = step, self.waited(), time.monotonic()

    def leave_out(self, began: float) -> None:
        """Leave the time since `began` out of the row: it was no stepping."""
        self.mark += time.monotonic() - began

    def see(self, record: StepRecord | None) -> None:
        """Take in the numbers of a step."""
        if record:
            bits = float(record.losses.mean()) / math.log(2)
            self.bits = bits if math.isnan(self.bits) else 0.9 * self.bits + 0.1 * bits
            self.grad_norm = float(record.norm)

    def on_step_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Write a row where one is due, and after the last step."""
        step = trainer.global_step
        if step % self.plan.log_every and not trainer.should_stop:
            return
        assert self.row_step is not None
        nats, right, passes = self.ranks.total(*module.sums.values())
        seconds = max(1e-9, time.monotonic() - self.mark)
        self.pace = (step - self.row_step) * self.units_per_step / seconds
        values = {
            "bits": nats / passes / math.log(2),
            **({} if module.at_A is None else {"accuracy": right / passes}),
            "lr": learning_rate(self.config, step),
            "grad_norm": self.grad_norm,
            "tokens_per_second": self.pace,
            "data_share": (self.waited() - self.waited_before) / seconds,
            "seconds": self.seconds,
            "memory_bytes": peak_memory(),
            **self.telemetry(module.model),
        }
        self.write_row(trainer, "train", values)
        if self.status:
            self.status.update(step=step, steps=self.plan.steps)
        module.sums.update(nats=0.0, right=0.0, passes=0)
        self.begin_row(step)

    def write_row(self, trainer: Trainer, kind: str, values: dict[str, Any]) -> None:
        """Hand a row to all loggers."""
        for logger in trainer.loggers:
            logger.log_metrics({"kind": kind, **values}, trainer.global_step)  # type: ignore[dict-item]

    def log_score(self, trainer: Trainer, kind: str) -> None:
        """Hand the row of the last score to all loggers."""
        score: Any = trainer.lightning_module.score
        values = {"val_bits": score.bits, "val_units": score.units, "val_se": score.standard_error}
        self.write_row(trainer, kind, values | ({} if score.accuracy is None else {"val_accuracy": score.accuracy}))

    def on_validation_start(self, *_: Any) -> None:
        self.validation_began = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write and print the score of a validation during training.

        Raises:
            RunFailed: it is not finite.
        """
        if not is_fitting(trainer):
            return
        score, step = pl_module.score, trainer.global_step
        self.leave_out(self.validation_began)
        self.log_score(trainer, "valid")
        if not math.isfinite(score.bits):
            raise RunFailed(f"step {step}: the validation loss is {score.bits}")
        share = "" if score.accuracy is None else f", accuracy {score.accuracy:.2%}"
        self.say(f"step {step:,}: validation {score.bits:.4f} bits ({score.units:,} units){share}")

    def line(self, step: int) -> str:
        """Return the progress line."""
        pace = self.pace
        if math.isnan(pace):
            stepping = max(1e-9, time.monotonic() - self.mark)
            pace = max(1, step - (self.row_step or 0)) * self.units_per_step / stepping
        left = (self.plan.steps - step) * self.units_per_step / pace
        if self.plan.max_minutes:
            left = min(left, 60 * self.plan.max_minutes - self.seconds)
        rate = learning_rate(self.config, max(1, step))
        return training_line(step, self.plan.steps, self.bits, rate, pace, left, peak_memory())


class Watch(StepCallback):
    """Looks around after each step, with all ranks: numbers that are not finite, signals, the time.

    After it: `stop` (exit code that a signal asks for, or 0), `time_up`, `save_up`. The last step, and time that is up,
    end the training by `trainer.should_stop`, upon which Lightning validates.
    """

    def __init__(self, signals: Signals, metrics: Metrics) -> None:
        self.plan, self.ranks, self.signals, self.metrics = metrics.plan, metrics.ranks, signals, metrics
        self.stop = 0
        self.time_up = self.save_up = False
        self.saved_at = time.monotonic()
        """When the last checkpoint was written, or this process began to step."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Hold signals from here on, and end at once where nothing is left to do."""
        self.hold_signals()
        self.saved_at = time.monotonic()
        self.agree(trainer, "")

    def hold_signals(self) -> None:
        """From here on a signal waits for the end of the step. (Lightning has set a handler for SIGTERM by now.)"""
        self.signals.install()
        self.signals.holding = True

    def on_step_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Look around, if it is due.

        Raises:
            RunFailed: the loss or the gradient is not finite on some rank.
        """
        step, plan = trainer.global_step, self.plan
        due = any(step % every == 0 for every in (plan.log_every, plan.val_every, plan.checkpoint_every))
        asked = self.ranks.world == 1 and self.signals.requested  # of several ranks, others may not know of it yet
        if due or asked or step >= plan.steps or step % look_steps(module.device) == 0:
            problem = ""
            try:
                self.metrics.see(module.read_back())
            except NotFinite as error:
                problem = str(error)
            self.agree(trainer, problem)

    def agree(self, trainer: Trainer, problem: str) -> None:
        """Learn whether any rank is to stop or to save, or has failed.

        Raises:
            RunFailed: one has.
        """
        limit, pause = self.plan.max_minutes, self.plan.checkpoint_minutes
        last = trainer.global_step >= self.plan.steps  # the last score takes time, too
        up = not last and limit is not None and self.metrics.seconds >= 60 * limit
        save = pause is not None and time.monotonic() - self.saved_at >= 60 * pause
        asked = (self.signals.requested, int(up), int(save), int(bool(problem)))
        self.stop, time_up, save_up, failed = self.ranks.largest(*asked)
        self.time_up, self.save_up = bool(time_up), bool(save_up)
        trainer.should_stop = last or self.time_up
        if failed:
            raise RunFailed(problem or "the loss of another rank is not finite")

    def on_validation_start(self, *_: Any) -> None:
        self.hold_signals()  # in the closing score Lightning has set a handler again

    def on_validation_batch_start(self, *_: Any) -> None:
        """Learn whether a signal has come to any rank."""
        self.stop = self.ranks.largest(self.signals.requested)[0]


def look_steps(device: torch.device) -> int:
    """Return the steps between two looks at the numbers."""
    return 1 if device.type == "cpu" else LOOK_STEPS


class Best(Checkpoint):
    """Keeps the weights of the best validation in best.ckpt.

    Lightning's ModelCheckpoint forgets the best score of a run whose folder has moved, and does not know when it was.
    """

    def __init__(self, path: Path, status: Status | None) -> None:
        self.path, self.status = path, status
        self.best: dict[str, Any] | None = None
        """Bits, step, and the number of windows: scores of other windows are not compared."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save the weights, if the score is better.

        Raises:
            RunFailed: they are not finite, or cannot be written.
        """
        if not is_fitting(trainer):
            return
        bits, windows = pl_module.score.bits, len(pl_module.score.units_K)
        if self.best is None or self.best["windows"] != windows or bits < self.best["bits"]:
            check_finite(trainer.global_step, pl_module)
            self.best = {"bits": bits, "step": trainer.global_step, "windows": windows}
            trainer.save_checkpoint(self.path, weights_only=True)
        if self.status:
            self.status.update(step=trainer.global_step, best=self.best)


class Last(StepCallback, Checkpoint):
    """Saves last.ckpt between optimizer steps, after the validation of a step where one is due, and upon a signal.

    A validation that a signal cuts short is done when the run goes on.
    """

    def __init__(self, path: Path, watch: Watch, status: Status | None) -> None:
        self.path, self.plan, self.watch, self.status = path, watch.plan, watch, status
        self.saved: int | None = None
        """Step of the checkpoint that a run in need may go back to."""
        self.validated = 0
        """The last step that was validated."""

    def state_dict(self) -> dict[str, Any]:
        return {"validated": self.validated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validated = state_dict["validated"]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Do the validation that was due when a signal stopped the run."""
        step = trainer.global_step
        self.leave_if_asked(trainer)
        if step and self.validation_is_due(trainer) and self.validated != step:
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True

    def validation_is_due(self, trainer: Trainer) -> bool:
        """Tell whether this step is validated."""
        return trainer.should_stop or trainer.global_step % self.plan.val_every == 0

    def on_step_end(self, trainer: Trainer, module: TrainingModule) -> None:
        self.leave_if_asked(trainer)
        if not self.validation_is_due(trainer):
            self.save_if_due(trainer)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.leave_if_asked(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if is_fitting(trainer):
            self.validated = trainer.global_step
            self.save_if_due(trainer)

    def save_if_due(self, trainer: Trainer) -> None:
        """Save where steps, minutes or the end of the training ask for it."""
        if trainer.global_step % self.plan.checkpoint_every == 0 or self.watch.save_up or trainer.should_stop:
            self.save(trainer)

    def leave_if_asked(self, trainer: Trainer) -> None:
        """Upon a signal: save what is not saved yet.

        Raises:
            Stopped: a signal has come.
        """
        if not self.watch.stop:
            return
        step = trainer.global_step
        if is_fitting(trainer) and self.saved != step and step:
            self.save(trainer)
        saved = f"saved in {self.path}" if self.saved == step else self.last_good()
        raise Stopped(self.watch.stop, f"stopped by {self.watch.signals.name} at step {step:,}; {saved}")

    def save(self, trainer: Trainer) -> None:
        """Replace last.ckpt.

        Raises:
            RunFailed: the disk is full, or what is to be saved is not finite; the old checkpoints are as they were.
        """
        began = time.monotonic()
        check_finite(trainer.global_step, trainer.lightning_module, trainer.optimizers[0])  # type: ignore[arg-type]
        trainer.save_checkpoint(self.path)
        self.saved, self.watch.saved_at, self.watch.save_up = trainer.global_step, time.monotonic(), False
        self.watch.metrics.leave_out(began)
        if self.status:
            self.status.update(step=self.saved, write=True)

    def last_good(self) -> str:
        """Say which checkpoint is left."""
        if self.saved is None:
            return "no checkpoint had been written yet"
        return f"the last good checkpoint is {self.path} (step {self.saved:,})"


def check_finite(step: int, module: TrainingModule, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Refuse to save weights, buffers or an optimizer's state that are not finite; all ranks call it.

    Raises:
        RunFailed: on all ranks.
    """
    problem = not_finite(module.model, optimizer)
    if module.ranks.largest(int(bool(problem)))[0]:
        raise RunFailed(f"step {step}: {problem or 'the weights of another rank are not finite'}")


def not_finite(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Return words for what of a model and an optimizer is not finite (of what this process has), or an empty string.

    Thresholds alone may be -inf: a cluster that takes every position. Waits for each device once.
    """
    saved = [(f"the weights are not finite ({name})", tensor) for name, tensor in model.state_dict().items()]
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items() if optimizer else ():
        found = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        saved += [(f"the optimizer's state is not finite ({k} of {names[parameter]})", v) for k, v in found.items()]
    flags: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in saved:
        part = local(tensor)
        if part.is_floating_point() and part.numel():
            low, high = part.aminmax()  # NaN where there is one; on a CPU 25 times as fast as isfinite
            fine = high < math.inf if "threshold" in name else (high < math.inf) & (low > -math.inf)
            flags.setdefault(part.device, []).append((name, fine))
    for of_device in flags.values():
        fine = torch.stack([flag for _, flag in of_device]).tolist()
        if not all(fine):
            return of_device[fine.index(False)][0]
    return ""


class Bar(TQDMProgressBar, StepCallback):
    """One bar on a terminal, of steps instead of batches, with the numbers that matter."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self.metrics = metrics

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin at the step that a checkpoint has reached."""
        plan, step = self.metrics.plan, trainer.global_step
        self.train_progress_bar = Tqdm(total=plan.steps, initial=step, file=sys.stdout, bar_format="{bar:12}| {desc}")

    def init_validation_tqdm(self) -> Tqdm:
        """Return the bar of a validation, which goes away."""
        return Tqdm(file=sys.stdout, leave=False, bar_format="{bar:12}| validating {n_fmt}/{total_fmt}")

    def on_train_epoch_start(self, *_: Any) -> None:
        """Do nothing: a run is one epoch."""

    def on_train_epoch_end(self, *_: Any) -> None:
        """Do nothing."""

    def on_train_batch_end(self, *hook: Any) -> None:
        StepCallback.on_train_batch_end(self, *hook)

    def on_step_end(self, trainer: Trainer, module: TrainingModule) -> None:
        bar, step = self.train_progress_bar, trainer.global_step
        bar.set_description_str(self.metrics.line(step), refresh=step >= self.metrics.plan.steps)
        bar.update(step - bar.n)  # tqdm draws no more than ten times a second

    def on_validation_end(self, *_: Any) -> None:
        self.val_progress_bar.close()
        self.reset_dataloader_idx_tracker()

    def on_exception(self, *_: Any) -> None:
        """Leave the line to the message."""
        with contextlib.suppress(TypeError):  # there is none yet
            self.train_progress_bar.close()
            self.val_progress_bar.close()


class PlainLines(StepCallback):
    """A line now and then, where the output is not a terminal."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics, self.said_at = metrics, -math.inf

    def on_step_end(self, trainer: Trainer, module: TrainingModule) -> None:
        step = trainer.global_step
        self.say_now_and_then(lambda: self.metrics.line(step), force=step >= self.metrics.plan.steps)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        total = trainer.num_val_batches[0]
        self.say_now_and_then(lambda: f"step {trainer.global_step:,}: validating {batch_idx + 1:,}/{total:,} batches")

    def say_now_and_then(self, line: Callable[[], str], *, force: bool = False) -> None:
        """Say a line, unless the last one is too fresh."""
        if force or time.monotonic() - self.said_at >= PLAIN_SECONDS:
            self.said_at = time.monotonic()
            self.metrics.say(line())
