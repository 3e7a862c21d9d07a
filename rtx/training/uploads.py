"""What commands add to a run at Weights & Biases after its training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rtx.progress import say
from rtx.runs.folder import logged_to_wandb


def add_to_wandb(
    folder: Path, kind: str, figures: Mapping[str, Any], files: Sequence[Path], step: int = 0
) -> None:
    """Add figures and files to the run at W&B to which a run was logged, if it was.

    If `folder` has several runs, of which one was logged, they are added to a new run at W&B. A run
    that was logged offline gets them offline. An error is printed in a line.
    """
    logged = logged_to_wandb(folder)
    if not logged:
        return
    try:
        # Importing Lightning takes seconds.
        from rtx.training.loggers import upload
    # Memory may run out, and a package may be broken.
    except Exception as error:
        say(f"W&B: {error}; nothing is added there")
        return
    upload(folder, logged[0], kind, figures, files, step)
