"""Compiling the forward passes, and recording them as CUDA graphs."""

from typing import Any

from lightning.pytorch import Callback, Trainer

from rtx.progress import say
from rtx.training.session import Session


class PreparePasses(Callback):
    """Prepares the passes before the first step; records them again when lists of members grow."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        # From here on a signal waits for the end of a step. Lightning has just set its own handler.
        self.session.signals.hold()
        if trainer.global_step >= self.session.config.trainer.steps:
            return
        line = module.passes.prepare(module.first_micro_batch())
        if line:
            say(line)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        step = trainer.global_step
        if self.session.looks_at(step):
            for line in module.passes.raise_capacities():
                say(f"step {step}: {line}")
