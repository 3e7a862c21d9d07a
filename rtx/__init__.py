"""rtx: Routing Transformer experiments from the command line, and a library of its patterns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtx.settings.extensions import add_pattern, load_extensions, register_data
from rtx.version import __version__

if TYPE_CHECKING:
    from rtx.training.inference import LoadedRun

__all__ = ["__version__", "load", "register_data", "register_pattern", "train"]


def load(
    run: str | Path,
    checkpoint: str = "best",
    device: str | None = None,
    extensions: str | None = None,
) -> LoadedRun:
    """Load a run, or an exported model: its `model`, `tokenizer` and `config`.

    See `rtx.training.inference.load`. A run that was trained with `extensions=my.py` needs the same
    `extensions` here.
    """
    if extensions:
        load_extensions(extensions)
    import rtx.progress  # noqa: F401  before others import tqdm, which has advice for notebooks
    from rtx.training import inference  # torch takes seconds, and `rtx --help` needs none of it

    return inference.load(run, checkpoint, device)


def register_pattern(name: str, make: Callable[..., Any], *, selection: bool = False) -> None:
    """Make a pattern a value of model.base.

    Args:
        make: returns the `rtx.attention.Pattern` of a group of heads. It is called as
            `make(heads=heads, config=config, layer=layer)`: the number of heads, the resolved
            configuration of the run, and the number of the layer, 0 for the lowest.
        selection: make it a value of routing.selection instead.

    Raises:
        UserError: a name that is taken, or a function that does not take these arguments.
    """
    from rtx.model.heads import attribute_problem  # imports torch

    add_pattern(name, make, selection=selection, problem=attribute_problem(name))


def train(*overrides: str) -> LoadedRun:
    """Train as `rtx train` with these overrides, and load what came of it.

    One device is that of this process. Several (hardware=ddp or fsdp) have a process each, which
    leave this one alone whatever becomes of them. A first signal, such as Ctrl-C, saves at the end
    of the step; a second one does not wait for that. Handlers of signals are put back.

    On one device the lines that it prints go through the logger `rtx`:
    `logging.getLogger("rtx").setLevel("WARNING")` silences all but warnings.

    Raises:
        UserError: an override, or what it asks for, is wrong.
        RunFailed: the run fails, loses a process, or is stopped.
    """
    import rtx.progress  # noqa: F401  before others import tqdm, which has advice for notebooks
    from rtx.commands import train

    return load(train.call(overrides))
