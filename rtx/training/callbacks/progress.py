"""The progress of a run on the screen."""

import math
import sys
import time
from typing import Any

from lightning.pytorch import Callback, Trainer

from rtx.analysis.speed import Meter
from rtx.progress import PLAIN_SECONDS, clock, peak_memory, say, tqdm
from rtx.training.optimizers import learning_rate
from rtx.training.session import Session


class Progress(Callback):
    """Shows bars of steps and validations on a terminal, else a line every `PLAIN_SECONDS`."""

    def __init__(self, session: Session, meter: Meter) -> None:
        self.session = session
        self.meter = meter
        self.on_terminal = sys.stdout.isatty() and session.status is not None
        self.printed_at = -math.inf
        self.bars: list[tqdm] = []
        """The bar of steps and, on top of it, that of a validation under way."""

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        if self.on_terminal:
            steps = self.session.config.trainer.steps
            self.open_bar(steps, trainer.global_step, bar_format="{desc} |{bar}|")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step = trainer.global_step
        is_last = step >= self.session.config.trainer.steps
        if self.on_terminal:
            bar = self.bars[0]
            bar.set_description_str(self.line(step), refresh=is_last)
            # It draws the bar at most ten times a second.
            bar.update(step - bar.n)
        elif is_last or time.monotonic() - self.printed_at >= PLAIN_SECONDS:
            self.printed_at = time.monotonic()
            say(self.line(step))

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        if self.on_terminal:
            (batches,) = trainer.num_val_batches
            self.open_bar(int(batches), 0, desc="validation", leave=False)

    def on_validation_batch_end(self, *_: Any) -> None:
        if self.on_terminal:
            self.bars[-1].update()

    def on_validation_end(self, *_: Any) -> None:
        if self.on_terminal:
            self.bars.pop().close()

    def on_train_end(self, *_: Any) -> None:
        self.close_bars()

    def on_exception(self, *_: Any) -> None:
        # The message of the error gets a line of its own.
        self.close_bars()

    def open_bar(self, total: int, done: int, **options: Any) -> None:
        self.bars.append(tqdm(total=total, initial=done, file=sys.stdout, **options))

    def close_bars(self) -> None:
        while self.bars:
            self.bars.pop().close()

    def line(self, step: int) -> str:
        """Return `step 1,200/4,000, 2.713 bits, lr 2.9e-03, 84,210 units/s, 03:21 left, 1.2 GB`."""
        config = self.session.config
        pace = self.session.clock.tokens_per_second
        parts = [
            f"step {step:,}/{config.trainer.steps:,}",
            f"{self.session.bits:.3f} bits",
            f"lr {learning_rate(config, step):.1e}",
            f"{pace:,.0f} units/s",
            f"{clock(self.seconds_left(step))} left",
            f"{peak_memory() / 1e9:.1f} GB",
        ]
        utilisation = self.meter.share(pace)
        if utilisation is not None:
            parts[3] += f" ({utilisation:.0%} of the peak)"
        return ", ".join(parts)

    def seconds_left(self, step: int) -> float:
        """Return the seconds that the remaining steps take, or that the time limit leaves."""
        trainer = self.session.config.trainer
        run = self.session.clock
        tokens = (trainer.steps - step) * run.tokens_per_step
        seconds = tokens / max(1e-9, run.tokens_per_second)
        if trainer.max_minutes:
            seconds = max(0.0, min(seconds, 60 * trainer.max_minutes - run.seconds))
        return seconds
