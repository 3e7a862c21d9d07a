"""Rows of metrics."""

import math
from typing import Any

from lightning.pytorch import Callback, Trainer

from rtx.analysis.speed import Meter
from rtx.analysis.telemetry import read_telemetry
from rtx.evaluation.scores import Score
from rtx.progress import peak_memory
from rtx.training.module import TrainingModule
from rtx.training.optimizers import learning_rate
from rtx.training.session import Session


class MetricsRows(Callback):
    """Writes a row every `trainer.log_every` steps, and one for each validation, to all loggers."""

    def __init__(self, session: Session, meter: Meter) -> None:
        self.session = session
        self.meter = meter
        self.waited = 0.0
        """Seconds that training had waited for batches at the last row."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step % self.session.config.trainer.log_every and not trainer.should_stop:
            return
        with self.session.clock.steps.stopped():
            write_row(trainer, "train/", self.training_row(trainer, module))
            module.sums.zero_()
        self.session.clock.mark_row()

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.state.fn == "fit":
            with self.session.clock.steps.stopped():
                write_score(trainer, "valid/", module.score, self.session)

    def training_row(self, trainer: Trainer, module: TrainingModule) -> dict[str, float]:
        """Return the metrics of the steps since the last row, of all ranks together."""
        clock = self.session.clock
        step = trainer.global_step
        nats, right, passes = self.session.ranks.total(*module.sums.tolist())
        row = {
            "bits": nats / passes / math.log(2),
            "lr": learning_rate(self.session.config, step),
            "grad_norm": float(module.norm),
            "tokens_per_second": clock.tokens_per_second,
            "data_share": self.data_share(trainer),
            "seconds": clock.seconds,
            "memory_bytes": peak_memory(),
        }
        row |= training_seconds(self.session)
        if module.answers is not None:
            row["accuracy"] = right / passes
        utilisation = self.meter.share(clock.tokens_per_second)
        speed: dict[str, Any] = {} if utilisation is None else {"mfu": utilisation}
        self.session.record(step=step, steps=self.session.config.trainer.steps, **speed)
        return row | speed | read_telemetry(module.model)

    def data_share(self, trainer: Trainer) -> float:
        """Return the share of the time since the last row that was spent waiting for batches."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        waited = data.seconds - self.waited
        self.waited = data.seconds
        return waited / max(1e-9, self.session.clock.seconds_since_row)


def write_score(trainer: Trainer, prefix: str, score: Score, session: Session) -> None:
    """Write the row of a validation (`valid/`) or of the closing score (`valid/final_`)."""
    row = {
        "bits": score.bits,
        "units": score.units,
        "standard_error": score.standard_error,
    }
    row |= training_seconds(session)
    if score.accuracy is not None:
        row["accuracy"] = score.accuracy
    write_row(trainer, prefix, row)


def training_seconds(session: Session) -> dict[str, float]:
    """Return the seconds of optimizer steps alone as part of a row; {} before they are known."""
    seconds = session.clock.training_seconds
    return {} if seconds is None else {"train_seconds": seconds}


def write_row(trainer: Trainer, prefix: str, row: dict[str, Any]) -> None:
    """Give a row to all loggers, with a prefix before each name."""
    metrics = {f"{prefix}{name}": value for name, value in row.items()}
    for logger in trainer.loggers:
        logger.log_metrics(metrics, trainer.global_step)
