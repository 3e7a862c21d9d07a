"""The line on each validation during training, and best.ckpt."""

import math
from typing import Any

from lightning.pytorch import Callback, Trainer

from rtx.errors import RunFailed
from rtx.evaluation.scores import Score
from rtx.progress import say
from rtx.training.session import Session


class Validations(Callback):
    """Prints the score of each validation, and writes best.ckpt with the weights of the best.

    Lightning's ModelCheckpoint would forget the best score of a run whose folder has moved.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.session.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        match state_dict["best"]:
            case None | {"bits": float(), "windows": int()}:
                self.session.best = state_dict["best"]
            case _:
                raise TypeError("its best score")

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.state.fn != "fit":
            return
        score: Score = module.score
        step = trainer.global_step
        if not math.isfinite(score.bits):
            raise RunFailed(f"step {step}: the validation loss is {score.bits}")
        say(line_on(score, step))
        if self.is_best(score):
            windows = len(score.units_K)
            self.session.best = {"bits": score.bits, "step": step, "windows": windows}
            path = self.session.folder / "checkpoints" / "best.ckpt"
            with self.session.clock.steps.stopped():
                trainer.save_checkpoint(path, weights_only=True)
        self.session.record(step=step, best=self.session.best)

    def is_best(self, score: Score) -> bool:
        """Return whether a score is the best so far.

        Scores of different numbers of windows are not compared: the later one counts as the best.
        """
        best = self.session.best
        if best is None or best["windows"] != len(score.units_K):
            return True
        return score.bits < best["bits"]


def line_on(score: Score, step: int) -> str:
    """Return the line that tells the score of a validation."""
    line = f"step {step:,}: validation {score.bits:.4f} bits ({score.units:,} units)"
    if score.accuracy is None:
        return line
    return f"{line}, accuracy {score.accuracy:.2%}"
