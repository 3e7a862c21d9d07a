"""What a fit is given by the command that starts it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from rtx.config import Config
from rtx.evaluation.scores import Window
from rtx.training.checkpoints import Checkpoint
from rtx.training.hardware import Hardware
from rtx.training.records import Records
from rtx.training.signals import Signals


@dataclass
class Validation:
    """The held-out split `[units]` and the windows that cover it."""

    tokens: np.ndarray
    windows: Sequence[Window]


@dataclass
class Job:
    """All that a fit needs: configuration, data, machine, and the run folder with its records."""

    config: Config
    plain_config: dict[str, Any]
    """The configuration as plain values, kept in every checkpoint."""
    data: dict[str, Any]
    """What the data are, kept in every checkpoint."""
    hardware: Hardware
    model: nn.Module
    """Has `loss(tokens_BN) -> (nats_BN, auxiliary)`, and where there are answers what `score_windows` says."""
    batches: Iterable[Tensor]
    """This rank's micro-batches, from the first step that is still to be taken."""
    validation: Validation
    folder: Path
    """The run folder."""
    records: Records
    signals: Signals
    telemetry: Callable[[nn.Module], dict[str, float]]
    """Reads numbers of the last training forward pass, to be logged."""
    answers: np.ndarray | None = None
    """Positions of each sequence whose units alone are trained on and scored; None: all of them."""
    start: Checkpoint | None = None
    """Where to go on from; None: from the beginning."""

    @property
    def first_step(self) -> int:
        """Steps taken already."""
        return self.start["step"] if self.start else 0

    @property
    def nothing_left(self) -> bool:
        """Whether all steps are taken, or all minutes spent."""
        return nothing_left(self.config, self.start)


def nothing_left(config: Config, start: Checkpoint | None) -> bool:
    """Tell whether a run that goes on from `start` has no step left to take."""
    if start is None:
        return False
    limit = config.trainer.max_minutes
    spent = limit is not None and start["progress"]["seconds"] >= 60 * limit
    return spent or start["step"] >= config.trainer.steps
