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

from rtx.data.datamodule import RtxDataModule
from rtx.errors import RunFailed
from rtx.training.module import TrainingModule
from rtx.training.optimizers import learning_rate
from rtx.training.progress import clock, peak_memory
from rtx.training.rng import restore_rng, rng_state, seed_everything
from rtx.training.run_folder import Status
from rtx.training.sharding import local
from rtx.training.signals import Signals, Stopped

LOOK_STEPS = {"cpu": 1, "cuda": 8}
"""Steps between two looks at a device's numbers, where nothing else asks for one: each makes the CPU wait for it."""
PLAIN_SECONDS = 15.0
"""Shortest time between two lines where the output is not a terminal."""

Telemetry = Callable[[nn.Module], dict[str, float]]
"""Reads numbers of the last training forward pass, to be logged."""
Say = Callable[[str], object]


class StepCallback(Callback):
    """Acts after each optimizer step; Lightning's hook is called after each micro-batch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.on_step_end(trainer, pl_module)

    def on_step_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Do what is due."""


def is_fitting(trainer: Trainer) -> bool:
    return trainer.state.fn == "fit"


class RandomState(Callback):
    """Keeps the random streams and the running sums of every rank in the checkpoint.

    They are set when the first batch is there: nothing but training draws from them any more.
    """

    def __init__(self, module: TrainingModule) -> None:
        self.module, self.ranks = module, module.ranks
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
            seed_everything(self.module.config.seed, 1 + rank + world * trainer.global_step)


class Watch(StepCallback):
    """Looks around after each step, with all ranks: numbers that are not finite, signals, the time; writes the rows.

    After it: `stop` (exit code that a signal asks for, or 0), `time_up`, `save_up`. The last step, and time that is up,
    end the training by `trainer.should_stop`, upon which Lightning validates.
    """

    def __init__(
        self,
        module: TrainingModule,
        data: RtxDataModule,
        signals: Signals,
        telemetry: Telemetry,
        status: Status | None,
        say: Say,
    ) -> None:
        self.config, self.plan, self.ranks = module.config, module.config.trainer, module.ranks
        self.data, self.signals, self.telemetry, self.status, self.say = data, signals, telemetry, status, say
        self.units_per_step = self.plan.batch_size * self.config.data.length
        self.stop, self.time_up, self.save_up = 0, False, False
        self.row_step: int | None = None
        self.began: float | None = None
        self.mark = self.saved_at = self.validation_began = time.monotonic()
        self.seconds_before = self.waited_before = self.pace = 0.0
        self.bits = math.nan  # for the screen: smoothed

    @property
    def seconds(self) -> float:
        """Seconds since the first step, validation and checkpoints included, and those of earlier processes."""
        return self.seconds_before + (0.0 if self.began is None else time.monotonic() - self.began)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds_before = float(state_dict["seconds"])

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Hold signals from here on, and end at once where nothing is left to do."""
        self.signals.hold()
        self.saved_at = time.monotonic()
        self.agree(trainer, "")
        self.began = time.monotonic()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self.row_step is None:  # the first batch is there
            self.begin_row(trainer.global_step)

    def begin_row(self, step: int) -> None:
        self.row_step, self.waited_before, self.mark = step, self.data.seconds, time.monotonic()

    def on_step_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Look around, if it is due; write a row where one is due, and after the last step; `RunFailed` as `agree`."""
        step, plan, look = trainer.global_step, self.plan, LOOK_STEPS.get(module.device.type, 1)
        due = any(step % every == 0 for every in (plan.log_every, plan.val_every, plan.checkpoint_every, look))
        asked = self.ranks.world == 1 and self.signals.requested  # of several ranks, others may not know of it yet
        if due or asked or step >= plan.steps:
            problem = module.read_back()
            self.bits = module.bits if math.isnan(self.bits) else 0.9 * self.bits + 0.1 * module.bits
            self.agree(trainer, problem)
        self.pace = (step - (self.row_step or 0)) * self.units_per_step / max(1e-9, time.monotonic() - self.mark)
        if step % plan.log_every == 0 or trainer.should_stop:
            self.write_train_row(trainer, module)

    def agree(self, trainer: Trainer, problem: str) -> None:
        """Learn whether any rank is to stop or to save; `RunFailed` where the numbers of one are not finite."""
        limit, pause = self.plan.max_minutes, self.plan.checkpoint_minutes
        last = trainer.global_step >= self.plan.steps  # the last score takes time, too
        up = not last and limit is not None and self.seconds >= 60 * limit
        save = pause is not None and time.monotonic() - self.saved_at >= 60 * pause
        asked = (self.signals.requested, int(up), int(save), int(bool(problem)))
        self.stop, time_up, save_up, failed = self.ranks.largest(*asked)
        self.time_up, self.save_up = bool(time_up), bool(save_up)
        trainer.should_stop = last or self.time_up
        if failed:
            raise RunFailed(problem or "the loss of another rank is not finite")

    def write_train_row(self, trainer: Trainer, module: TrainingModule) -> None:
        step, (nats, right, passes) = trainer.global_step, self.ranks.total(*module.sums.values())
        values = {
            "bits": nats / passes / math.log(2),
            **({} if module.at_A is None else {"accuracy": right / passes}),
            "lr": learning_rate(self.config, step),
            "grad_norm": module.norm,
            "tokens_per_second": self.pace,
            "data_share": (self.data.seconds - self.waited_before) / max(1e-9, time.monotonic() - self.mark),
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
        for logger in trainer.loggers:
            logger.log_metrics({"kind": kind, **values}, trainer.global_step)  # type: ignore[dict-item]

    def write_score(self, trainer: Trainer, kind: str) -> None:
        score: Any = trainer.lightning_module.score
        values = {"val_bits": score.bits, "val_units": score.units, "val_se": score.standard_error}
        self.write_row(trainer, kind, values | ({} if score.accuracy is None else {"val_accuracy": score.accuracy}))

    def on_validation_start(self, *_: Any) -> None:
        self.validation_began = time.monotonic()
        self.signals.hold()  # in the closing score Lightning has set a handler again

    def on_validation_batch_start(self, *_: Any) -> None:
        self.stop = self.ranks.largest(self.signals.requested)[0]

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write and print the score of a validation during training; `RunFailed` where it is not finite."""
        if not is_fitting(trainer):
            return
        score, step = pl_module.score, trainer.global_step
        self.mark += time.monotonic() - self.validation_began  # which was no stepping
        self.write_score(trainer, "valid")
        if not math.isfinite(score.bits):
            raise RunFailed(f"step {step}: the validation loss is {score.bits}")
        share = "" if score.accuracy is None else f", accuracy {score.accuracy:.2%}"
        self.say(f"step {step:,}: validation {score.bits:.4f} bits ({score.units:,} units){share}")

    def line(self, step: int) -> str:
        """Return `step 1,200/4,000 | 2.713 bits | lr 2.9e-03 | 84,210 units/s | 3:21 left | 1.2 GB`."""
        plan, rate = self.plan, learning_rate(self.config, max(1, step))
        left = (plan.steps - step) * self.units_per_step / max(1e-9, self.pace)
        if plan.max_minutes:
            left = min(left, 60 * plan.max_minutes - self.seconds)
        bits = "" if math.isnan(self.bits) else f"{self.bits:.3f} bits | "  # before the first look at a GPU's numbers
        told = f"step {step:,}/{plan.steps:,} | {bits}lr {rate:.1e} | {self.pace:,.0f} units/s"
        return f"{told} | {clock(left)} left | {peak_memory() / 1e9:.1f} GB"


class Checkpoints(StepCallback, Checkpoint):
    """Keeps the weights of the best validation in best.ckpt, and all that a resume needs in last.ckpt.

    That is saved between optimizer steps, after the validation of a step where one is due, and upon a signal. A
    validation that a signal cuts short is done when the run goes on. Lightning's ModelCheckpoint forgets the best score
    of a run whose folder has moved, and does not know when it was.
    """

    def __init__(self, folder: Path, watch: Watch, step: int) -> None:
        self.last, self.best_path = folder / "last.ckpt", folder / "best.ckpt"
        self.plan, self.watch, self.status = watch.plan, watch, watch.status
        self.best: dict[str, Any] | None = None  # bits, step, and windows: scores of other windows are not compared
        self.saved = step or None  # step of the checkpoint that a run in need may go back to
        self.validated = 0  # the last step that was

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "validated": self.validated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.validated = state_dict["best"], state_dict["validated"]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Do the validation that was due when a signal stopped the run."""
        step = trainer.global_step
        self.leave_if_asked(trainer)
        if step and self.validated != step and (trainer.should_stop or step % self.plan.val_every == 0):
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True

    def on_step_end(self, trainer: Trainer, module: TrainingModule) -> None:
        self.leave_if_asked(trainer)
        if trainer.global_step % self.plan.val_every and not trainer.should_stop:  # else after the validation
            self.save_if_due(trainer)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.leave_if_asked(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save the weights, if the score is better, and what else is due."""
        if not is_fitting(trainer):
            return
        step, bits, windows = trainer.global_step, pl_module.score.bits, len(pl_module.score.units_K)
        if self.best is None or self.best["windows"] != windows or bits < self.best["bits"]:
            check_finite(step, pl_module)
            self.best = {"bits": bits, "step": step, "windows": windows}
            trainer.save_checkpoint(self.best_path, weights_only=True)
        if self.status:
            self.status.update(step=step, best=self.best)
        self.validated = step
        self.save_if_due(trainer)

    def save_if_due(self, trainer: Trainer) -> None:
        if trainer.global_step % self.plan.checkpoint_every == 0 or self.watch.save_up or trainer.should_stop:
            self.save(trainer)

    def leave_if_asked(self, trainer: Trainer) -> None:
        """Upon a signal save what is not saved yet, and raise `Stopped`."""
        if not self.watch.stop:
            return
        step = trainer.global_step
        if is_fitting(trainer) and self.saved != step and step:
            self.save(trainer)
        saved = f"saved in {self.last}" if self.saved == step else self.last_good()
        raise Stopped(self.watch.stop, f"stopped by {self.watch.signals.name} at step {step:,}; {saved}")

    def save(self, trainer: Trainer) -> None:
        """Replace last.ckpt; `RunFailed` where the disk is full, or something is not finite: the old one stays."""
        watch, began = self.watch, time.monotonic()
        check_finite(trainer.global_step, trainer.lightning_module, trainer.optimizers[0])  # type: ignore[arg-type]
        trainer.save_checkpoint(self.last)
        self.saved, watch.saved_at, watch.save_up = trainer.global_step, time.monotonic(), False
        watch.mark += watch.saved_at - began  # which was no stepping
        if self.status:
            self.status.update(step=self.saved, saved=self.saved, write=True)

    def last_good(self) -> str:
        if self.saved is None:
            return "no checkpoint had been written yet"
        return f"the last good checkpoint is {self.last} (step {self.saved:,})"


def check_finite(step: int, module: TrainingModule, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Raise `RunFailed` on all ranks, which all call it, where weights, buffers or an optimizer's state are not finite.

    Thresholds alone may be -inf: a cluster that takes every position. Each rank looks at what it has.
    """
    tensors = {f"the weights are not finite ({name})": tensor for name, tensor in module.model.state_dict().items()}
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.model.named_parameters()}
    for parameter, state in optimizer.state.items() if optimizer else ():
        name = names[parameter]
        tensors |= {f"the optimizer's state is not finite ({key} of {name})": value for key, value in state.items()}
    flags: dict[str, torch.Tensor] = {}
    for problem, tensor in tensors.items():
        part = local(tensor) if isinstance(tensor, torch.Tensor) else torch.empty(0)
        if part.is_floating_point() and part.numel():
            low, high = part.aminmax()  # NaN where there is one; on a CPU 25 times as fast as isfinite
            flags[problem] = (high < math.inf) & ((low > -math.inf) | ("threshold" in problem))
    fine = torch.stack([flag.to(module.device) for flag in flags.values()]).tolist()  # waits for the device once
    problem = next((problem for problem, is_fine in zip(flags, fine, strict=True) if not is_fine), "")
    if module.ranks.largest(int(bool(problem)))[0]:
        raise RunFailed(f"step {step}: {problem or 'the weights of another rank are not finite'}")


class Progress(StepCallback, TQDMProgressBar):
    """One bar on a terminal, of steps instead of batches, with the numbers that matter; elsewhere a line at times."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch, self.plain, self.said_at = watch, not (watch.status and sys.stdout.isatty()), -math.inf

    def init_train_tqdm(self) -> Tqdm:
        steps, done, form = self.watch.plan.steps, self.trainer.global_step, "{bar:12}| {desc}"
        return Tqdm(total=steps, initial=done, file=sys.stdout, bar_format=form, disable=self.plain)

    def init_validation_tqdm(self) -> Tqdm:
        form = "{bar:12}| validating {n_fmt}/{total_fmt}"
        return Tqdm(file=sys.stdout, leave=False, bar_format=form, disable=self.plain)

    def on_train_epoch_start(self, *_: Any) -> None:
        """Do nothing: a run is one epoch."""

    on_train_epoch_end = on_train_epoch_start  # type: ignore[assignment]

    def on_step_end(self, trainer: Trainer, module: TrainingModule) -> None:
        step, last = trainer.global_step, trainer.global_step >= self.watch.plan.steps
        if self.plain:
            self.say_now_and_then(lambda: self.watch.line(step), force=last)
        else:
            self.train_progress_bar.set_description_str(self.watch.line(step), refresh=last)
            self.train_progress_bar.update(step - self.train_progress_bar.n)  # drawn ten times a second at the most

    def on_validation_batch_end(self, trainer: Trainer, pl_module: Any, *hook: Any) -> None:
        super().on_validation_batch_end(trainer, pl_module, *hook)
        step, done, total = trainer.global_step, hook[2] + 1, trainer.num_val_batches[0]
        if self.plain:
            self.say_now_and_then(lambda: f"step {step:,}: validating {done:,}/{total:,} batches")

    def say_now_and_then(self, line: Callable[[], str], *, force: bool = False) -> None:
        if force or time.monotonic() - self.said_at >= PLAIN_SECONDS:
            self.said_at = time.monotonic()
            self.watch.say(line())

    def on_exception(self, *_: Any) -> None:
        """Leave the line to the message."""
        with contextlib.suppress(TypeError):  # there is none yet
            self.train_progress_bar.close()
            self.val_progress_bar.close()
