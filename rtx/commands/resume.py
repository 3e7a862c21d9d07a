"""`rtx resume RUN [overrides]`: go on exactly where a run stopped."""

from __future__ import annotations

from rtx.compose import load_run_config, merge, with_absolute_path
from rtx.config import Config
from rtx.data.catalog import check_source, data_root
from rtx.options import read_words
from rtx.training.hardware import process_rank
from rtx.training.resumption import on_other_devices, plan_resumption

MICRO_BATCH = "trainer.micro_batch_size"


def changed(before: Config, overrides: list[str]) -> Config:
    """Return a run's configuration with changes; on other devices its micro-batch is chosen anew, unless named."""
    if not any(word.startswith(MICRO_BATCH) for word in overrides):
        config = merge(before, [f"{MICRO_BATCH}=auto", *overrides])  # the old one need not divide a device's share
        if on_other_devices(config, before):
            return with_absolute_path(config)
    return with_absolute_path(merge(before, overrides))


def main(arguments: list[str]) -> int:
    words = read_words("resume", arguments)
    folder = words.runs[0].absolute()
    config = changed(load_run_config(folder), words.overrides)
    plan = plan_resumption(folder, config)
    if plan is None:
        return 0
    if process_rank() == 0:
        check_source(config.data, data_root())

    from rtx.commands.train import run  # imports torch: only after all that can be refused is

    return run(config, folder, plan)
