"""rtx: Routing Transformer experiments from the command line, and its attention patterns as a library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rtx.extensions import register_data, register_pattern

if TYPE_CHECKING:
    from rtx.training.inference import LoadedRun

__all__ = ["load", "register_data", "register_pattern", "train"]
__version__ = "0.3.0"


def load(run: str | Path, checkpoint: str = "best", device: str | None = None) -> LoadedRun:
    """Load a run, or an exported model: its `model`, `tokenizer` and `config`; see `rtx.training.inference.load`."""
    from rtx.training import inference  # torch takes seconds, and `rtx --help` needs none of it

    return inference.load(run, checkpoint, device)


def train(*overrides: str) -> LoadedRun:
    """Train as `rtx train` with these overrides, in this process, and load what came of it.

    `UserError` where an override, or what it asks for, is wrong; `RunFailed` where the run fails, or is stopped.
    """
    from rtx.commands import train
    from rtx.errors import RunFailed

    config = train.with_absolute_path(train.compose(overrides))
    folder = train.run_folder.new_run_folder(config.name)
    if train.run(config, folder):
        raise RunFailed(f"{folder}: stopped before its end; rtx resume goes on")
    return load(folder)
