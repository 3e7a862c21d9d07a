"""What commands add to a run at Weights & Biases after its training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rtx.runs.folder import logged_to_wandb


def add_to_wandb(
    folder: Path, kind: str, figures: Mapping[str, Any], files: Sequence[Path], step: int = 0
) -> None:
    """Add figures and files to a run at W&B, if it was logged there: see `upload`."""
    if not logged_to_wandb(folder):
        return
    # Importing Lightning takes seconds.
    from rtx.training.loggers import upload

    upload(folder, kind, figures, files, step)
