"""Where the numbers of a run go: metrics.jsonl, status.json, W&B and the screen."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from rtx.config import Config
from rtx.training.metrics import MetricsFile, utc_now
from rtx.training.progress import Progress
from rtx.training.status import Status
from rtx.training.tracker import Tracker


class Records:
    """The records of a run as a context, or of a rank that keeps none.

    Args:
        folder: of the run.
        config: the resolved configuration.
        plain_config: the same as plain values, for W&B.
        status: the run's status.json; None on a rank that keeps no records.
    """

    def __init__(self, folder: Path, config: Config, plain_config: dict[str, Any], status: Status | None) -> None:
        self.status = status
        self.progress = Progress(quiet=status is None)
        self.metrics = MetricsFile(folder / "metrics.jsonl") if status else None
        name = f"{config.name}-{folder.name}"
        self.tracker = Tracker(config.logger, folder, plain_config, name) if status else None

    def row(self, kind: str, step: int, **values: Any) -> None:
        """Keep a row: kind is train, valid or final."""
        row = {"kind": kind, "step": step, "time": utc_now(), **values}
        if self.metrics:
            self.metrics.write(row)
        if self.tracker:
            self.tracker.log(row)

    def update(self, *, write: bool = False, **fields: Any) -> None:
        """Change fields of status.json."""
        if self.status:
            self.status.update(write=write, **fields)

    def __enter__(self) -> Records:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.progress.clear()
        if self.metrics:
            self.metrics.close()
        if self.tracker:
            self.tracker.finish(exit_code=0 if kind is None else 1)
