"""rtx: Routing Transformer experiments from the command line, and its attention patterns as a library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rtx.settings.extensions import register_data, register_pattern

if TYPE_CHECKING:
    from rtx.training.inference import LoadedRun

__all__ = ["load", "register_data", "register_pattern", "train"]
__version__ = "0.4.0"


def load(run: str | Path, checkpoint: str = "best", device: str | None = None) -> LoadedRun:
    """Load a run, or an exported model: its `model`, `tokenizer` and `config`; see `rtx.training.inference.load`."""
    import rtx.progress  # noqa: F401  before others import tqdm, which has advice for notebooks
    from rtx.training import inference  # torch takes seconds, and `rtx --help` needs none of it

    return inference.load(run, checkpoint, device)


def train(*overrides: str) -> LoadedRun:
    """Train as `rtx train` with these overrides, and load what came of it.

    One device is this process's own; several (hardware=ddp or fsdp) have processes of their own, which leave this one
    alone whatever becomes of them. A first signal, such as Ctrl-C, saves at the end of the step, a second one does not
    wait for that. Handlers of signals are put back.

    Raises:
        UserError: an override, or what it asks for, is wrong.
        RunFailed: the run fails, loses a process, or is stopped.
    """
    import rtx.progress  # noqa: F401  before others import tqdm, which has advice for notebooks
    from rtx.commands import train

    return load(train.call(overrides))
