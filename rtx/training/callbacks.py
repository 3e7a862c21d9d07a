"""What happens between two optimizer steps: rows, checkpoints, the screen, and the decision to stop."""

import contextlib
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from rtx.analysis.speed import Meter
from rtx.errors import RunFailed
from rtx.progress import PLAIN_SECONDS, clock, peak_memory, say
from rtx.runs.folder import shown
from rtx.runs.signals import Signals, Stopped, state_after
from rtx.runs.status import Status
from rtx.training.first_weights import seed_everything
from rtx.training.module import TrainingModule
from rtx.training.optimizers import learning_rate
from rtx.training.step_clock import StepClock

FINAL_SECONDS = 30.0  # that the closing score may take whatever the training took


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Refuse moments that are not like their weights: a fused step would write beyond them."""
    for weight, state in optimizer.state.items():
        shapes = moment_shapes(weight.shape)
        for name, moment in state.items():
            wanted = shapes.get(name)
            if not torch.is_tensor(moment) or moment.shape != wanted:
                raise ValueError(f"{name} is not like its weight, {[*weight.shape]}")
            if name != "step" and moment.dtype != weight.dtype:
                raise ValueError(f"{name} is not like its weight, of {weight.dtype}")


def moment_shapes(shape: torch.Size) -> dict[str, torch.Size]:
    """Return the shapes of all that Adam, AdamW and Adafactor keep of a weight, by its name."""
    shapes = {"step": torch.Size([])}
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "variance"):
        shapes[name] = shape
    if len(shape) > 1:
        shapes["row_var"] = torch.Size([*shape[:-1], 1])
        shapes["col_var"] = torch.Size([*shape[:-2], 1, shape[-1]])
    return shapes


class Watch(Callback):
    """After each step, alike on all ranks: numbers that are not finite, signals and the time; rows and checkpoints.

    last.ckpt is saved between optimizer steps, upon a signal, and after the validation that ends the run; others follow
    the checkpoint of their step, and a run that goes on from there begins with them. best.ckpt is not Lightning's
    ModelCheckpoint, which forgets the best score of a run whose folder has moved. The first rank alone has a `status`.
    """

    def __init__(
        self,
        folder: Path,
        module: TrainingModule,
        data: Any,
        signals: Signals,
        telemetry: Any,
        status: Status | None,
        meter: Meter | None = None,
    ) -> None:
        self.folder, self.last = folder, folder / "checkpoints" / "last.ckpt"
        self.children: list[Any] = []  # processes that this one has started
        self.module, self.ranks, self.plan, self.data = (
            module,
            module.ranks,
            module.config.trainer,
            data,
        )
        self.signals, self.telemetry, self.status = signals, telemetry, status
        self.say = say if status else lambda line: None
        self.record = status.update if status else lambda **fields: None
        self.streams: dict[str, Any] = {"torch": torch} | (
            {"cuda": torch.cuda} if torch.cuda.is_available() else {}
        )
        self.meter = meter or Meter(0.0, None)
        self.units_per_step = self.plan.batch_size * module.config.data.length
        self.began = time.monotonic()
        self.clock = StepClock(data.step)
        self.row_step, self.waited, self.pace, self.bits = data.step, 0.0, 0.0, math.nan
        self.row_elapsed = 0.0  # of the clock, at the last row
        self.validated = 0.0  # seconds that the last validation took
        self.saved = data.step or None  # step of the checkpoint that a run in need may go back to
        self.kept: dict[str, Any] = {"seconds": 0.0, "ranks": []}
        self.best: dict[str, Any] | None = (
            None  # bits, step, and windows: scores of other windows are not compared
        )

    @property
    def seconds(self) -> float:
        """Seconds since the first step, validations and checkpoints included, and those of earlier processes."""
        return self.kept["seconds"] + time.monotonic() - self.began

    def state_dict(self) -> dict[str, Any]:
        """Return time, best score, and the random streams, sums and memories of all ranks, which all call this."""
        states = {name: stream.get_rng_state() for name, stream in self.streams.items()}
        sums, memory = self.module.sums.tolist(), self.module.kept_memory()
        ranks = self.ranks.gather({"rng": states, "sums": sums, "memory": memory})
        clock = self.clock.state(self.module.global_step)
        return {"seconds": self.seconds, "clock": clock, "best": self.best, "ranks": ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        match state_dict:
            case {
                "seconds": float(),
                "best": None | {"bits": float(), "windows": int()} as best,
                "ranks": list(),
            }:
                self.kept, self.best = state_dict, best
            case _:
                raise TypeError("its time, best score or random streams")
        if "clock" in state_dict:  # checkpoints of earlier versions have none
            self.clock.restore(state_dict["clock"])

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Restore streams, sums and memories, hold signals from here on, and validate where that is still due."""
        rank, world, step = self.ranks.rank, self.ranks.world, trainer.global_step
        for optimizer in trainer.optimizers:
            check_moments(optimizer)
        self.module.restore_memory([own["memory"] for own in self.kept["ranks"]])
        if len(self.kept["ranks"]) == world:
            own = self.kept["ranks"][rank]
            self.module.sums = torch.tensor(own["sums"], dtype=torch.float64).view_as(
                self.module.sums
            )
            for name in self.streams.keys() & own["rng"].keys():
                self.streams[name].set_rng_state(own["rng"][name])
        else:
            seed_everything(self.module.config.seed, 1 + rank + world * step)
        self.signals.hold()
        trainer.should_stop = step >= self.plan.steps
        if not trainer.should_stop and (
            line := self.module.passes.prepare(self.module.first_micro_batch())
        ):
            self.say(line)
        self.began = (
            time.monotonic()
        )  # to compile is not to train: trainer.max_minutes are the same for all models
        if step and (trainer.should_stop or step % self.plan.val_every == 0):
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True
        self.clock.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look around, if due, and write what is; `RunFailed` where a number is not finite, `Stopped` by a signal."""
        step, plan = trainer.global_step, self.plan
        units = (step - self.row_step) * self.units_per_step
        look = (
            8 if pl_module.device.type == "cuda" else 1
        )  # each look at numbers makes the CPU wait for the device
        steps = plan.log_every, plan.val_every, plan.checkpoint_every, look
        due = math.isnan(self.bits) or any(
            step % every == 0 for every in steps
        )  # a run's first step has no bits yet
        stop = self.agree(trainer) if due or step >= plan.steps else 0
        self.clock.end_of_step()
        self.pace = units / max(1e-9, self.clock.elapsed - self.row_elapsed)
        if step % plan.log_every == 0 or trainer.should_stop:
            self.write_train_row(trainer)
        self.leave_if(stop, trainer)
        if step % plan.checkpoint_every == 0 and not trainer.should_stop:
            self.save(trainer)

    def agree(self, trainer: Trainer) -> int:
        """Return the exit code that a signal to any rank asks for, or 0; end training after its last step or minute."""
        (nats, _, passes), norm, step = (
            self.module.sums.tolist(),
            float(self.module.norm),
            trainer.global_step,
        )
        for line in self.module.passes.make_room():
            self.say(f"step {step}: {line}")
        self.bits, limit = nats / passes / math.log(2), self.plan.max_minutes
        up = step >= self.plan.steps or (limit is not None and self.seconds >= 60 * limit)
        failed = not (math.isfinite(nats) and math.isfinite(norm))
        stop, up, failed = self.ranks.largest(self.signals.requested, int(up), int(failed))
        trainer.should_stop = bool(up)
        if failed:
            what = f"norm of the gradient is {norm}" if math.isfinite(nats) else f"loss is {nats}"
            raise RunFailed(
                f"step {step}: the {what} at learning rate {learning_rate(self.module.config, step):g}"
            )
        return stop

    def leave_if(self, stop: int, trainer: Trainer) -> None:
        """Upon a signal save what is not saved yet, and raise `Stopped`."""
        if stop:
            if self.saved != (step := trainer.global_step) and step:
                self.save(trainer)
            saved = f"saved in {self.last}" if self.saved == step else self.last_good()
            raise Stopped(stop, f"stopped by {self.signals.name} at step {step:,}; {saved}")

    def save(self, trainer: Trainer) -> None:
        """Replace last.ckpt; `RunFailed` where the disk is full: the old one stays."""
        with self.clock.stopped():
            trainer.save_checkpoint(self.last)
        self.saved = trainer.global_step
        self.record(step=self.saved, saved=self.saved, write=True)

    def last_good(self) -> str:
        if self.saved is None:
            return "no checkpoint had been written yet"
        return f"the last good checkpoint is {self.last} (step {self.saved:,})"

    def leave_at_once(self, how: str, code: int = 1) -> None:
        """End the process in the middle of a step, and its children: by a second signal, or as one of them is gone."""
        reason = f"{how}; {self.last_good()}"
        with contextlib.suppress(
            OSError
        ):  # by print: the main thread may be about to write, and never come round
            print("rtx: " * (code == 1) + reason, flush=True)
            if self.saved is not None:
                print(f"continue with: rtx resume {shown(self.folder)}", flush=True)
        if self.status:
            self.status.end(state_after(code), reason)
        for child in self.children:
            child.kill()
        os._exit(code)

    def final_windows(self) -> int:
        """Return how many windows the closing score takes, alike on all ranks: a sample is a power of two of them."""
        asked, every, scored = (
            self.plan.final_windows,
            len(self.data.windows),
            len(self.module.score.units_K),
        )
        if asked != "auto":
            return min(int(asked or every), every)
        budget = max(FINAL_SECONDS, self.seconds / 10)
        (count,) = self.ranks.largest(int(scored * budget / max(1e-6, self.validated)))
        return every if count >= every else max(scored, 1 << count.bit_length() >> 1)

    def write_train_row(self, trainer: Trainer) -> None:
        nats, right, passes = self.ranks.total(*self.module.sums.tolist())
        share = (self.data.seconds - self.waited) / max(1e-9, self.clock.elapsed - self.row_elapsed)
        self.clock.stop()
        rate, norm = learning_rate(self.module.config, trainer.global_step), float(self.module.norm)
        values = {
            "bits": nats / passes / math.log(2),
            "lr": rate,
            "grad_norm": norm,
            "tokens_per_second": self.pace,
        }
        values |= {"data_share": share, "seconds": self.seconds, "memory_bytes": peak_memory()}
        values |= self.train_seconds(trainer)
        values |= {} if self.module.answers is None else {"accuracy": right / passes}
        speed: dict[str, Any] = (
            {} if (share := self.meter.share(self.pace)) is None else {"mfu": share}
        )
        self.write_row(trainer, "train/", values | speed | self.telemetry(self.module.model))
        self.record(step=trainer.global_step, steps=self.plan.steps, **speed)
        self.module.sums.zero_()
        self.row_step, self.waited, self.row_elapsed = (
            trainer.global_step,
            self.data.seconds,
            self.clock.elapsed,
        )
        self.clock.start()

    def train_seconds(self, trainer: Trainer) -> dict[str, float]:
        """Return the seconds of optimizer steps alone, by the name of their field; nothing where they are not known."""
        seconds = self.clock.seconds(trainer.global_step)
        return {} if seconds is None else {"train_seconds": seconds}

    def write_score(self, trainer: Trainer, prefix: str) -> None:
        score: Any = self.module.score
        values = {
            "bits": score.bits,
            "units": score.units,
            "standard_error": score.standard_error,
            **self.train_seconds(trainer),
        }
        self.write_row(
            trainer,
            prefix,
            values | ({} if score.accuracy is None else {"accuracy": score.accuracy}),
        )

    def write_row(self, trainer: Trainer, prefix: str, values: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(
                {f"{prefix}{key}": value for key, value in values.items()}, trainer.global_step
            )

    def on_validation_start(self, *_: Any) -> None:
        self.signals.hold()  # in the closing score Lightning has set a handler again
        self.clock.stop()
        self.validated = time.monotonic()

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.leave_if(self.ranks.largest(self.signals.requested)[0], trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the score of a validation during training, and keep the weights if it is the best so far."""
        self.validated = time.monotonic() - self.validated
        if trainer.state.fn != "fit":
            return
        score, step, windows = pl_module.score, trainer.global_step, len(pl_module.score.units_K)
        self.write_score(trainer, "valid/")
        if not math.isfinite(score.bits):
            raise RunFailed(f"step {step}: the validation loss is {score.bits}")
        share = "" if score.accuracy is None else f", accuracy {score.accuracy:.2%}"
        self.say(f"step {step:,}: validation {score.bits:.4f} bits ({score.units:,} units){share}")
        if self.best is None or self.best["windows"] != windows or score.bits < self.best["bits"]:
            self.best = {"bits": score.bits, "step": step, "windows": windows}
            trainer.save_checkpoint(self.last.with_name("best.ckpt"), weights_only=True)
        self.record(step=step, best=self.best)
        if trainer.should_stop:
            self.save(trainer)
        else:
            self.clock.start()


class Progress(TQDMProgressBar):
    """One bar on a terminal, of steps instead of batches, with the numbers that matter; elsewhere a line at times."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.train_progress_bar = Tqdm(disable=True)  # until training begins
        self.watch, self.plain, self.said_at = watch, not sys.stdout.isatty(), -math.inf
        if self.plain:
            self.disable()

    def init_train_tqdm(self) -> Tqdm:
        steps, done, form = self.watch.plan.steps, self.trainer.global_step, "{desc} |{bar}|"
        return Tqdm(
            total=steps, initial=done, file=sys.stdout, bar_format=form, disable=self.is_disabled
        )

    def on_train_epoch_start(self, *_: Any) -> None:
        """Do nothing: a run is one epoch."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, last = trainer.global_step, trainer.global_step >= self.watch.plan.steps
        if not self.plain:
            self.train_progress_bar.set_description_str(self.line(step), refresh=last)
            self.train_progress_bar.update(
                step - self.train_progress_bar.n
            )  # drawn ten times a second at the most
        elif last or time.monotonic() - self.said_at >= PLAIN_SECONDS:
            self.said_at = time.monotonic()
            self.watch.say(self.line(step))

    def line(self, step: int) -> str:
        """Return `step 1,200/4,000, 2.713 bits, lr 2.9e-03, 84,210 units/s, 03:21 left, 1.2 GB`."""
        watch, plan, rate = (
            self.watch,
            self.watch.plan,
            learning_rate(self.watch.module.config, step),
        )
        left = (plan.steps - step) * watch.units_per_step / max(1e-9, watch.pace)
        if plan.max_minutes:
            left = max(0.0, min(left, 60 * plan.max_minutes - watch.seconds))
        told = f"step {step:,}/{plan.steps:,}, {watch.bits:.3f} bits, lr {rate:.1e}, {watch.pace:,.0f} units/s"
        if (share := watch.meter.share(watch.pace)) is not None:
            told += f" ({share:.0%} of the peak)"
        return f"{told}, {clock(left)} left, {peak_memory() / 1e9:.1f} GB"

    def on_exception(self, *_: Any) -> None:
        self.train_progress_bar.close()  # leaves the line to the message
