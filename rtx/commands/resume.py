"""`rtx resume RUN [overrides]`: go on exactly where a run stopped."""

from collections.abc import Sequence

from rtx.cli.options import read_words
from rtx.runs.resumption import as_chosen, plan_resumption
from rtx.settings.identity import with_absolute_path
from rtx.settings.run_config import load_run_config, merge
from rtx.settings.schema import Config


def changed(before: Config, overrides: Sequence[str]) -> Config:
    """Return a run's configuration with changes.

    Where its devices change, the micro-batch is chosen anew: the old one need not fit.
    """
    merged = merge(before, ["trainer.micro_batch_size=auto", *overrides])
    return as_chosen(with_absolute_path(merged), before)


def main(arguments: list[str]) -> int:
    """Go on with the run that the command line names, and return the exit code."""
    words = read_words("resume", arguments)
    folder = words.runs[0].absolute()
    config = changed(load_run_config(folder), words.overrides)
    state = plan_resumption(folder, config)
    if not state:  # nothing is left to do
        return 0

    # It imports torch, which takes seconds, so only after all that can be refused before.
    from rtx.commands.train import run

    return run(config, folder, reason=state)
