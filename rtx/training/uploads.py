"""What commands add to a run at Weights & Biases after its training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rtx.progress import say
from rtx.runs.folder import logged_to_wandb
from rtx.training.wandb_errors import NOTHING_ADDED, trouble


def add_to_wandb(
    folder: Path, kind: str, figures: Mapping[str, Any], files: Sequence[Path], step: int = 0
) -> None:
    """Add figures and files to the W&B run of a folder; do nothing if it was not logged to W&B.

    If only runs in the folder were logged, they are added to a new W&B run with the settings of the
    first of these. A run that was logged offline gets them offline. An error is printed in a line.
    """
    logged = logged_to_wandb(folder)
    if not logged:
        return
    try:
        # Imported only here, because importing Lightning takes seconds.
        from rtx.training.loggers import upload
    # The import can fail in any way: too little memory, a broken package.
    except Exception as error:
        say(trouble(error, NOTHING_ADDED))
        return
    upload(folder, logged[0], kind, figures, files, step)
