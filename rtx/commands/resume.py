"""`rtx resume RUN [overrides]`: go on exactly where a run stopped."""

from collections.abc import Sequence

from rtx.cli.request import Request
from rtx.runs.resumption import as_chosen
from rtx.settings.identity import with_absolute_path
from rtx.settings.overrides import Override
from rtx.settings.run_config import merge_checked
from rtx.settings.schema import Config


def changed(before: Config, overrides: Sequence[Override]) -> Config:
    """Return a run's configuration with changes; its micro-batch is chosen anew where its devices change."""
    # The old one need not divide the share of a device.
    auto = Override("trainer.micro_batch_size", ("auto",))
    return as_chosen(with_absolute_path(merge_checked(before, [auto, *overrides])), before)


def main(request: Request) -> int:
    # It imports torch: only after all that can be refused is.
    from rtx.commands.train import run

    return run(request.config, request.run, request.state)
