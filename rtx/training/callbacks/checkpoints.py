"""last.ckpt, from which a run resumes."""

from typing import Any

from lightning.pytorch import Callback, Trainer

from rtx.training.session import Session


class Checkpoints(Callback):
    """Writes last.ckpt every `trainer.checkpoint_every` steps, and after the last validation.

    A checkpoint precedes the validation of its step; a run that resumes there validates first
    (`PendingValidation`).
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.path = session.folder / "checkpoints" / "last.ckpt"

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        is_due = trainer.global_step % self.session.config.trainer.checkpoint_every == 0
        if is_due and not trainer.should_stop:
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.state.fn == "fit" and trainer.should_stop:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Replace last.ckpt; on a full disk the old one stays, and `RunFailed` is raised."""
        with self.session.clock.steps.stopped():
            trainer.save_checkpoint(self.path)
        self.session.saved_step = trainer.global_step
        self.session.record(step=trainer.global_step, saved=trainer.global_step, write=True)
