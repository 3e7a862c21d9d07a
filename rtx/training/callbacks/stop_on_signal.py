"""Signals that stop a run."""

from typing import Any

from lightning.pytorch import Callback, Trainer

from rtx.runs.signals import Stopped
from rtx.training.callbacks.checkpoints import Checkpoints
from rtx.training.session import Session


class StopOnSignal(Callback):
    """Saves and stops the run upon a signal to any rank, after a step or in a validation."""

    def __init__(self, session: Session, checkpoints: Checkpoints) -> None:
        self.session = session
        self.checkpoints = checkpoints

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.session.looks_at(trainer.global_step):
            self.stop_if_asked(trainer)

    def on_validation_start(self, *_: Any) -> None:
        # Before the closing score Lightning has set a handler again.
        self.session.signals.hold()

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.stop_if_asked(trainer)

    def stop_if_asked(self, trainer: Trainer) -> None:
        """Save the last step, and raise `Stopped`, if any rank has received a signal."""
        signals = self.session.signals
        (code,) = self.session.ranks.largest(signals.requested)
        if not code:
            return
        step = trainer.global_step
        if step and self.session.saved_step != step:
            self.checkpoints.save(trainer)
        is_saved = self.session.saved_step == step
        saved = f"saved in {self.checkpoints.path}" if is_saved else self.session.last_good()
        raise Stopped(code, f"stopped by {signals.name} at step {step:,}; {saved}")
