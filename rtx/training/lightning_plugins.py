"""Plug-ins of Lightning's Trainer: how it writes checkpoints, and the precision of forward passes.

Importing Lightning takes seconds, so only the modules that train import this one.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from rtx.training.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from rtx.training.precision import WEIGHT_TYPES, default_dtype


class CheckpointFiles(TorchCheckpointIO):
    """Writes and reads the checkpoints of a run.

    Lightning's own class builds the whole file in memory, and does not sync it.
    """

    def save_checkpoint(
        self, checkpoint: Checkpoint, path: Any, storage_options: Any = None
    ) -> None:
        save_checkpoint(checkpoint, Path(path))

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> Checkpoint:
        return read_checkpoint(Path(path))


class ForwardPrecision(Precision):
    """The plug-in for hardware.precision. It sets no context around the training step.

    Lightning would enter the context for the whole step. Backward pass, clipping and optimizer must
    not run in it, so `Passes` enters it for each forward pass. Validation has it from Lightning.

    With bf16-true, the weights, the gradients and the residual stream are in bfloat16. Lightning's
    plugin for that makes bfloat16 the type of every new tensor as well: random heads would draw
    other numbers.

    Args:
        name: fp32, tf32, bf16, bf16-true or fp64.
        device: cpu or cuda.
    """

    def __init__(self, name: str, device: str) -> None:
        super().__init__()
        self.name = name
        self.device = device

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return a module whose weights and buffers have their type; it is changed in place."""
        if self.name in WEIGHT_TYPES:
            return module.to(WEIGHT_TYPES[self.name])
        return module

    def forward_context(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of a forward pass."""
        if self.name == "bf16":
            return torch.autocast(self.device, torch.bfloat16)
        if self.name == "fp64":
            return default_dtype(torch.float64)
        return contextlib.nullcontext()

    # Lightning declares the context of a generator, but only enters it.
    def train_step_context(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
    ) -> contextlib.AbstractContextManager[object]:
        """Return a context that does nothing: `forward_context` takes its place."""
        return contextlib.nullcontext()
