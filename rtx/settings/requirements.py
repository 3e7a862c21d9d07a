"""What options need beside the configuration: a GPU, a package, WANDB_MODE. No torch."""

import importlib.util
import os
from collections.abc import Iterator

from rtx.errors import UserError, nearest, refuse, shorten
from rtx.machine import lacks_gpu_driver
from rtx.settings.schema import Config, HardwareConfig

NO_GPU = "hardware=gpu, but torch finds no GPU on this machine; use hardware=cpu or hardware=auto"
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


def precision_on(hardware: HardwareConfig, gpu: bool) -> str:
    """Return the arithmetic: hardware.precision, where auto is bf16 on a GPU and fp32 on a CPU."""
    if hardware.precision != "auto":
        return hardware.precision
    return "bf16" if gpu else "fp32"


def gpu_needs(hardware: HardwareConfig) -> Iterator[str]:
    """Yield a line for each option that needs a GPU, with another option to take."""
    if hardware.precision == "tf32":
        yield "hardware.precision=tf32 needs a GPU; a CPU takes fp32, bf16, bf16-true or fp64"
    if hardware.graphs is True:
        yield "hardware.graphs=true needs a GPU; take hardware.graphs=false"
    if hardware.loss == "liger":
        yield "hardware.loss=liger needs a GPU; take hardware.loss=torch"


def refuse_without_gpu(hardware: HardwareConfig) -> None:
    """Raise `UserError` for options that need a GPU; to be called where torch finds none."""
    if hardware.name == "gpu":
        raise UserError(NO_GPU)
    refuse(f"{line}, for torch finds no GPU on this machine" for line in gpu_needs(hardware))


def refuse_without_driver(hardware: HardwareConfig) -> None:
    """As `refuse_without_gpu`, before torch is imported, where there is no driver of a GPU."""
    is_for_gpu = hardware.name == "gpu" or any(gpu_needs(hardware))
    if is_for_gpu and lacks_gpu_driver():
        refuse_without_gpu(hardware)


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
