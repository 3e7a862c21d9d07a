"""What happens between two optimizer steps: rows, validation, checkpoints, and the decision to stop.

Everything here happens on all ranks alike; only the first one writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from rtx.errors import RunFailed
from rtx.evaluation.scores import Score, Window, sample_windows, score_windows
from rtx.training.alike import check_alike
from rtx.training.checkpoints import Checkpoint, save_best, save_last
from rtx.training.finite import not_finite
from rtx.training.job import Job
from rtx.training.module import NotFinite, TrainingModule
from rtx.training.pace import Clock, Fetches
from rtx.training.progress import peak_memory, training_line
from rtx.training.ranks import Ranks
from rtx.training.rng import restore_rng, rng_state, seed_everything
from rtx.training.signals import Stopped

RUNNING_SUMS = ("nats_sum", "right_sum", "passes")
"""What the training module has summed up since the last row."""


class Loop(pl.Callback):
    """Drives a fit from step to step. After it: `stopped_by` (an exit code, or 0), `time_up`, `best` and `final`."""

    def __init__(self, job: Job, module: TrainingModule, fetches: Fetches) -> None:
        progress = job.start["progress"] if job.start else {}
        self.job, self.module, self.fetches = job, module, fetches
        self.plan = job.config.trainer
        self.ranks = Ranks(job.hardware.rank, job.hardware.world)
        self.checkpoints = job.folder / "checkpoints"
        self.few_windows = sample_windows(job.validation.windows, self.plan.val_windows)
        self.clock = Clock(progress.get("seconds", 0.0))
        self.best: dict[str, Any] | None = progress.get("best")
        self.grad_norm: float = progress.get("grad_norm", 0.0)
        self.saved = job.start["step"] if job.start else None
        self.saved_at = time.monotonic()
        """When the last checkpoint was written, or this process began to step."""
        self.row_step = job.first_step
        self.stopped_by = 0
        self.time_up = self.save_up = False
        self.final: Score | None = None
        self.streams_set = False
        self.fetched_before = 0.0
        self.shown_bits = self.shown_pace = math.nan

    # The hooks of Lightning, in the order of a fit

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Compare what the ranks begin with, before Lightning makes one model of theirs."""
        self.ranks.connect()
        check_alike(self.ranks, self.job)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Load the checkpoint onto the devices; where no step is left to take, do what comes after the last."""
        if self.job.start:
            self.load(trainer, self.job.start)
        if self.job.nothing_left:
            self.hold_signals(trainer)
            self.make_up(trainer)
            self.conclude(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, and make up for a validation that a signal cut short."""
        self.hold_signals(trainer)
        self.clock.start()
        self.saved_at = time.monotonic()
        self.make_up(trainer)
        if self.stopped_by:
            raise self.stopped()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the random streams, once, when nothing but training draws from them any more."""
        if not self.streams_set:
            self.set_streams()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look around, if this micro-batch ended an optimizer step."""
        if not self.module.in_step:
            self.after_step(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Score the whole split, unless a signal ended the training."""
        self.conclude(trainer)

    # Between two steps

    def hold_signals(self, trainer: pl.Trainer) -> None:
        """From here on a signal waits for the end of the step. (Lightning has set a handler for SIGTERM by now.)"""
        self.job.signals.install()
        trainer._signal_connector.received_sigterm = False
        self.job.signals.holding = True

    def after_step(self, trainer: pl.Trainer) -> None:
        """Log, validate, save and stop, each where it is due."""
        step, plan = self.module.step, self.plan
        log_due, validation_due, save_due = (
            step % every == 0 for every in (plan.log_every, plan.val_every, plan.checkpoint_every)
        )
        last = step >= plan.steps
        look = log_due or validation_due or save_due or last or reading_is_free(self.module.device)
        self.agree(look)
        ending = last or self.time_up
        if (ending or self.stopped_by or self.save_up) and not look:
            self.agree(look=True)
        if log_due or ending:
            self.write_row()
        self.show()
        pending = validation_due or ending
        if pending and not self.stopped_by:
            pending = not self.validate(trainer)
        if save_due or self.save_up or ending or self.stopped_by:
            self.save(trainer, pending)
        trainer.should_stop = bool(ending or self.stopped_by)

    def agree(self, look: bool) -> None:
        """Learn whether any rank is to stop or to save, or has failed; `look` first reads numbers from the device.

        Raises:
            RunFailed: the loss or the gradient is not finite on some rank.
        """
        problem = ""
        if look:
            try:
                self.read_numbers()
            except NotFinite as error:
                problem = str(error)
        limit = self.plan.max_minutes
        left = self.module.step < self.plan.steps  # the last score takes time, too
        time_up = left and limit is not None and self.clock.seconds >= 60 * limit
        pause = self.plan.checkpoint_minutes
        save_up = pause is not None and time.monotonic() - self.saved_at >= 60 * pause
        self.stopped_by, up, save, failed = self.ranks.largest(
            self.job.signals.requested, int(time_up), int(save_up), int(bool(problem))
        )
        self.time_up, self.save_up = bool(up), bool(save)
        if failed:
            raise RunFailed(f"{problem or 'the loss of another rank is not finite'}; {self.last_good()}")

    def read_numbers(self) -> None:
        """Read the unread steps, and keep the norm of the last gradient and a smoothed loss for the screen."""
        record = self.module.read_back()
        if record:
            bits = float(record.losses.mean()) / math.log(2)
            self.shown_bits = bits if math.isnan(self.shown_bits) else 0.9 * self.shown_bits + 0.1 * bits
            self.grad_norm = float(record.norm)

    def write_row(self) -> None:
        """Write the row of the steps since the last one, and begin the next."""
        module, step = self.module, self.module.step
        nats, right, passes = self.ranks.total(module.nats_sum, module.right_sum, module.passes)
        accuracy = {} if self.job.answers is None else {"accuracy": right / passes}
        seconds = self.clock.lap
        self.shown_pace = (step - self.row_step) * self.units_per_step / seconds
        self.job.records.row(
            "train",
            step,
            bits=nats / passes / math.log(2),
            **accuracy,
            lr=module.rate,
            grad_norm=self.grad_norm,
            tokens_per_second=self.shown_pace,
            data_share=(self.fetches.seconds - self.fetched_before) / seconds,
            seconds=self.clock.seconds,
            memory_bytes=peak_memory(),
            **self.job.telemetry(module.model),
        )
        self.job.records.update(step=step, steps=self.plan.steps)
        module.nats_sum, module.right_sum, module.passes = 0.0, 0.0, 0
        self.row_step, self.fetched_before = step, self.fetches.seconds
        self.clock.next_lap()

    @property
    def units_per_step(self) -> int:
        """Units of an optimizer step over all ranks."""
        return self.plan.batch_size * self.job.config.data.length

    def show(self) -> None:
        """Refresh the progress line."""
        step, steps, pace = self.module.step, self.plan.steps, self.shown_pace
        if math.isnan(pace):
            pace = (step - self.job.first_step) * self.units_per_step / self.clock.lap
        left = (steps - step) * self.units_per_step / pace
        if self.plan.max_minutes:
            left = min(left, 60 * self.plan.max_minutes - self.clock.seconds)
        line = training_line(step, steps, self.shown_bits, self.module.rate, pace, left, peak_memory())
        self.job.records.progress.show(line, force=step >= steps)

    # Scores

    def validate(self, trainer: pl.Trainer) -> bool:
        """Score the few windows and keep the best weights; False if a signal came first.

        Raises:
            RunFailed: the loss or the best weights are not finite, or these cannot be written.
        """
        with self.clock:
            score = self.score(trainer, self.few_windows, "validating")
            if score is None:
                return False
            step = self.module.step
            self.write_score("valid", score)
            if not math.isfinite(score.bits):
                raise RunFailed(f"step {step}: the validation loss is {score.bits}; {self.last_good()}")
            if len(self.few_windows) == len(self.job.validation.windows):
                self.final = score
            if self.best is None or score.bits < self.best["bits"]:
                self.best = {"bits": score.bits, "step": step}
                self.check_finite()
                content = self.content(trainer)
                self.write(lambda: save_best(self.checkpoints, content))
            self.job.records.update(step=step, best=self.best)
            share = "" if score.accuracy is None else f", accuracy {score.accuracy:.2%}"
            self.job.records.progress.say(
                f"step {step:,}: validation {score.bits:.4f} bits ({score.units:,} units){share}"
            )
            return True

    def make_up(self, trainer: pl.Trainer) -> None:
        """Do the validation that was due when a signal stopped the run."""
        start = self.job.start
        if start and start["progress"]["pending_validation"]:
            self.validate(trainer)

    def conclude(self, trainer: pl.Trainer) -> None:
        """After the last step: score the whole split with the last weights."""
        if self.stopped_by:
            return
        if self.final is None:
            self.final = self.score(trainer, self.job.validation.windows, "scoring the whole split:")
        if self.final:
            self.write_score("final", self.final)

    def score(self, trainer: pl.Trainer, windows: Sequence[Window], what: str) -> Score | None:
        """Score windows in the arithmetic of the run; None if a signal came first."""

        def stop() -> bool:
            self.agree(look=False)
            return bool(self.stopped_by)

        def show(done: int, total: int) -> None:
            self.job.records.progress.show(f"step {self.module.step:,}: {what} {done:,}/{total:,} windows")

        with trainer.precision_plugin.val_step_context():
            return score_windows(
                self.module.model,
                self.job.validation.tokens,
                windows,
                answers=self.job.answers,
                rank=self.ranks.rank,
                world=self.ranks.world,
                should_stop=stop,
                on_progress=show,
            )

    def write_score(self, kind: str, score: Score) -> None:
        """Keep the row of a score."""
        values = {"val_bits": score.bits, "val_units": score.units, "val_se": score.standard_error}
        if score.accuracy is not None:
            values["val_accuracy"] = score.accuracy
        self.job.records.row(kind, self.module.step, **values)

    # Checkpoints

    def save(self, trainer: pl.Trainer, pending: bool) -> None:
        """Replace `last.ckpt`; only ever called between optimizer steps.

        Args:
            trainer: of this fit.
            pending: whether the validation of this step is still to be done.

        Raises:
            RunFailed: the disk is full, or what is to be saved is not finite; the old checkpoints are as they were.
        """
        with self.clock:
            self.check_finite(trainer.optimizers[0])
            content = self.content(trainer)
            content["optimizer"] = trainer.strategy.optimizer_state(trainer.optimizers[0])
            sums = {name: getattr(self.module, name) for name in RUNNING_SUMS}
            own = {"rng": rng_state(), **sums}
            content["ranks"] = self.ranks.gather(own)
            content["progress"]["pending_validation"] = pending
            self.write(lambda: save_last(self.checkpoints, content, self.plan.keep_checkpoints))
            self.saved, self.saved_at, self.save_up = self.module.step, time.monotonic(), False
            self.job.records.update(step=self.module.step, write=True)

    def check_finite(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Refuse to save weights, buffers or an optimizer's state that are not finite; all ranks call it.

        Raises:
            RunFailed: on all ranks.
        """
        problem = not_finite(self.module.model, optimizer)
        if self.ranks.largest(int(bool(problem)))[0]:
            problem = problem or "the weights of another rank are not finite"
            raise RunFailed(f"step {self.module.step}: {problem}; {self.last_good()}")

    def content(self, trainer: pl.Trainer) -> Checkpoint:
        """Return what every checkpoint holds; all ranks call it."""
        weights = trainer.strategy.lightning_module_state_dict()
        progress = {"seconds": self.clock.seconds, "best": self.best, "grad_norm": self.grad_norm}
        return {
            "step": self.module.step,
            "config": self.job.plain_config,
            "data": self.job.data,
            "model": {name.removeprefix("model."): tensor for name, tensor in weights.items()},
            "progress": progress,
        }

    def write(self, save: Callable[[], None]) -> None:
        """Write a checkpoint on the first rank.

        Raises:
            RunFailed: on all ranks, if it could not be written.
        """
        try:
            self.ranks.first_only(save)
        except RunFailed as error:
            raise RunFailed(f"{error}; {self.last_good()}") from error

    def last_good(self) -> str:
        """Say which checkpoint is left."""
        if self.saved is None:
            return "no checkpoint had been written yet"
        return f"the last good checkpoint is {self.checkpoints / 'last.ckpt'} (step {self.saved:,})"

    def stopped(self) -> Stopped:
        """Return what ends a run that a signal has stopped."""
        step = self.module.step
        saved = f"saved in {self.checkpoints / 'last.ckpt'}" if self.saved == step else self.last_good()
        return Stopped(self.stopped_by, f"stopped by {self.job.signals.name} at step {step:,}; {saved}")

    def load(self, trainer: pl.Trainer, start: Checkpoint) -> None:
        """Put weights, optimizer and the step back, in place."""
        weights = {f"model.{name}": tensor for name, tensor in start["model"].items()}
        trainer.strategy.load_model_state_dict({"state_dict": weights})
        trainer.strategy.load_optimizer_state_dict({"optimizer_states": [start["optimizer"]]})
        self.module.step = start["step"]

    def set_streams(self) -> None:
        """Restore this rank's random streams and running sums; without a checkpoint of as many ranks, seed them."""
        self.streams_set = True
        start, rank, world = self.job.start, self.ranks.rank, self.ranks.world
        if start and len(start["ranks"]) == world:
            own = start["ranks"][rank]
            restore_rng(own["rng"])
            for name in RUNNING_SUMS:
                setattr(self.module, name, own.get(name, 0.0))
        else:
            seed_everything(self.job.config.seed, 1 + rank + world * self.job.first_step)
        self.fetched_before = self.fetches.seconds
        self.clock.next_lap()


def reading_is_free(device: torch.device) -> bool:
    """Tell whether numbers can be read back after each step; a GPU would make the CPU wait for it."""
    return device.type == "cpu"
