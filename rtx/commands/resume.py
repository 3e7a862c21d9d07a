"""`rtx resume RUN [overrides]`: go on exactly where a run stopped."""

from collections.abc import Sequence

from rtx.cli.request import Request
from rtx.runs.resumption import as_chosen
from rtx.settings.identity import with_absolute_path
from rtx.settings.overrides import Override
from rtx.settings.run_config import merge_checked
from rtx.settings.schema import Config


def changed(before: Config, overrides: Sequence[Override]) -> Config:
    """Return a run's configuration with changes.

    Where its devices change, the micro-batch is chosen anew: the old one need not fit.
    """
    auto = Override("trainer.micro_batch_size", ("auto",))
    return as_chosen(with_absolute_path(merge_checked(before, [auto, *overrides])), before)


def main(request: Request) -> int:
    """Go on with the run that a command line names, and return the exit code."""
    # It imports torch, which takes seconds, so only after all that can be refused before.
    from rtx.commands.train import run

    return run(request.config, request.run, reason=request.state)
