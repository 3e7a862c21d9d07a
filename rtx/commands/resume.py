"""`rtx resume RUN [overrides]`: go on exactly where a run stopped."""

from collections.abc import Sequence

from rtx.cli.options import read_words
from rtx.runs.resumption import as_chosen, plan_resumption
from rtx.settings.identity import with_absolute_path
from rtx.settings.run_config import load_run_config, merge
from rtx.settings.schema import Config


def changed(before: Config, overrides: Sequence[str]) -> Config:
    """Return a run's configuration with changes; its micro-batch is chosen anew where its devices change."""
    auto = "trainer.micro_batch_size=auto"  # the old one need not divide a device's share
    return as_chosen(with_absolute_path(merge(before, [auto, *overrides])), before)


def main(arguments: list[str]) -> int:
    words = read_words("resume", arguments)
    folder = words.runs[0].absolute()
    config = changed(load_run_config(folder), words.overrides)
    if not (before := plan_resumption(folder, config)):
        return 0

    from rtx.commands.train import run  # imports torch: only after all that can be refused is

    return run(config, folder, before)
