"""The last step of a run."""

from typing import Any

from lightning.pytorch import Callback, Trainer

from rtx.training.session import Session


class EndOfRun(Callback):
    """Ends training after `trainer.steps` or `trainer.max_minutes`, on all ranks at once."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.session.config.trainer.steps

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        step = trainer.global_step
        if self.session.looks_at(step):
            (is_over,) = self.session.ranks.largest(int(self.is_over(step)))
            trainer.should_stop = bool(is_over)

    def is_over(self, step: int) -> bool:
        """Return whether this rank has taken the last step, or has no time left."""
        limits = self.session.config.trainer
        if step >= limits.steps:
            return True
        if limits.max_minutes is None:
            return False
        return self.session.clock.seconds >= 60 * limits.max_minutes
