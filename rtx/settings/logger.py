"""What `logger` needs beside the configuration: packages, and the variable WANDB_MODE."""

import importlib.util
import os

from rtx.errors import UserError, nearest, shorten
from rtx.settings.schema import Config

WANDB_MODES = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
"""The words of WANDB_MODE, and what they mean.

W&B has one more, `shared`, for several processes that write one run.
"""


def check_logger(config: Config) -> None:
    """Raise UserError for a logger without its package, or a wrong WANDB_MODE.

    For a run that is to start or to be resumed.
    """
    logger = config.logger
    if logger.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError("logger=tensorboard needs TensorBoard: pip install 'rtx[tensorboard]'")
    if logger.wandb:
        wandb_mode()


def wandb_mode() -> str:
    """Return the mode that WANDB_MODE sets, "" if it is unset; UserError for another value."""
    word = os.environ.get("WANDB_MODE")
    if word is None:
        return ""
    if word not in WANDB_MODES:
        modes = ", ".join(WANDB_MODES)
        near = nearest(word, WANDB_MODES)
        raise UserError(f"WANDB_MODE={shorten(repr(word))}: must be one of {modes}{near}")
    return WANDB_MODES[word]
