"""A trained model from its run folder or from an export of it, ready to score or to sample on one device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from rtx.compose import RUN_CONFIG, load_run_config, merge, to_dict
from rtx.config import SPREAD, Config
from rtx.model.transformer import Transformer
from rtx.training.checkpoints import Checkpoint, check_config, load_for_use, load_weights
from rtx.training.exports import KEPT, is_export, read_export
from rtx.training.hardware import Hardware, prepare_torch, resolve_hardware


@dataclass(frozen=True)
class Trained:
    """A model and what is known of it."""

    model: Transformer
    config: Config
    hardware: Hardware
    checkpoint: Checkpoint
    """What is known of it (exports.KEPT), without its tensors: those of the optimizer are twice the model."""

    @property
    def name(self) -> str:
        """Which checkpoint this is: best, last or previous."""
        return self.checkpoint["file"]

    def arithmetic(self) -> contextlib.AbstractContextManager[object]:
        """Return the context that the model computes in: autocast with hardware.precision=bf16."""
        if self.config.hardware.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast("cuda" if self.hardware.accelerator == "gpu" else "cpu", dtype=torch.bfloat16)


def run_config(folder: Path, overrides: list[str]) -> Config:
    """Return a run's configuration with overrides, for work on one device."""
    return on_one_device(merge(load_run_config(folder), overrides))


def on_one_device(config: Config) -> Config:
    """Return a configuration for work on one device, not compiled."""
    hardware = dataclasses.replace(config.hardware, devices=None, nodes=1, compile=False)
    if hardware.name in SPREAD:
        hardware = dataclasses.replace(hardware, name="auto")
    return dataclasses.replace(config, hardware=hardware)


def load_trained(
    folder: Path, config: Config, name: str, vocabulary: int | None = None, say: Callable[[str], None] = print
) -> Trained:
    """Load the checkpoint `name` (best or last) of a run; `vocabulary` of the data that are read, None: the run's own.

    Raises:
        UserError: there is none, it is refused, its shapes differ from the configuration's, or the run's config.yaml
            is not what was trained.
        RunFailed: no checkpoint of the run is whole, or the export is damaged.
    """
    hardware = resolve_hardware(config)
    prepare_torch(config, hardware)
    checkpoint = read_export(folder) if is_export(folder) else load_for_use(folder / "checkpoints", name, say)
    check_config(checkpoint, to_dict(load_run_config(folder)), folder / RUN_CONFIG)
    model = Transformer(config, vocabulary or checkpoint["data"]["vocabulary"])
    load_weights(model, checkpoint, to_dict(config))
    if config.hardware.precision == "fp64":
        model = model.double()
    model = model.to("cuda" if hardware.accelerator == "gpu" else "cpu")
    model.eval()
    say(f"{folder}: {checkpoint['file']}.ckpt, step {checkpoint['step']:,}, {model.count_parameters():,} parameters")
    return Trained(model, config, hardware, {key: checkpoint[key] for key in KEPT})


def load_model(folder: str | Path, checkpoint: str = "best") -> Trained:
    """Load a run (its `best` or `last`) or an exported model, for use from Python; errors as `load_trained`."""
    path = Path(folder)
    return load_trained(path, run_config(path, []), checkpoint, say=lambda line: None)
