"""The clock of a run."""

from typing import Any

from lightning.pytorch import Callback, Trainer

from rtx.training.session import Session


class Timing(Callback):
    """Starts and stops the clock of the session, and saves it in checkpoints."""

    def __init__(self, session: Session) -> None:
        self.clock = session.clock

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.clock.seconds, "clock": self.clock.steps.state(self.clock.step)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not isinstance(state_dict["seconds"], float):
            raise TypeError("its seconds")
        self.clock.earlier_seconds = state_dict["seconds"]
        # Checkpoints of earlier versions have none.
        if "clock" in state_dict:
            self.clock.steps.restore(state_dict["clock"])

    def on_train_start(self, *_: Any) -> None:
        # Not earlier: compiling does not count towards trainer.max_minutes.
        self.clock.start()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.clock.end_of_step(trainer.global_step)

    def on_validation_start(self, *_: Any) -> None:
        self.clock.start_of_validation()

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.clock.end_of_validation()
        is_closing_score = trainer.state.fn != "fit"
        if not is_closing_score and not trainer.should_stop:
            self.clock.steps.start()
