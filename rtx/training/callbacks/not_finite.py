"""Losses and gradients that are not numbers."""

import math
from typing import Any

from lightning.pytorch import Callback, Trainer

from rtx.errors import RunFailed
from rtx.training.optimizers import learning_rate
from rtx.training.session import Session


class NotFinite(Callback):
    """Ends the run with `RunFailed` if the loss or the gradient of any rank is not finite."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        step = trainer.global_step
        if not self.session.looks_at(step):
            return
        nats, _, passes = module.sums.tolist()
        norm = float(module.norm)
        self.session.bits = nats / passes / math.log(2)
        is_finite = math.isfinite(nats) and math.isfinite(norm)
        (is_anywhere,) = self.session.ranks.largest(int(not is_finite))
        if is_anywhere:
            problem = f"loss is {nats}"
            if math.isfinite(nats):
                problem = f"norm of the gradient is {norm}"
            rate = learning_rate(self.session.config, step)
            raise RunFailed(f"step {step}: the {problem} at learning rate {rate:g}")
