"""The devices that a run is planned for: whether they are GPUs, how many, and their numbers."""

from typing import NamedTuple

import torch

from rtx.settings.requirements import precision_on
from rtx.settings.schema import Config


class Widths(NamedTuple):
    """Bytes of a number."""

    wide: int
    """Of weights, gradients and the residual stream."""
    narrow: int
    """Of what matrix products read."""


def on_gpu(config: Config) -> bool:
    """Return whether a run would compute on a GPU.

    It does if hardware asks for one, or leaves it open and this machine has one.
    """
    if config.hardware.name == "gpu":
        return True
    return config.hardware.name != "cpu" and torch.cuda.device_count() > 0


def widths_of(config: Config) -> Widths:
    """Return the bytes of the numbers of a run."""
    precision = precision_on(config.hardware, on_gpu(config))
    if precision == "bf16":
        return Widths(wide=4, narrow=2)
    wide = {"fp64": 8, "bf16-true": 2}.get(precision, 4)
    return Widths(wide, narrow=wide)


def devices(config: Config) -> int:
    """Return how many devices share a step."""
    return (config.hardware.devices or 1) * config.hardware.nodes
