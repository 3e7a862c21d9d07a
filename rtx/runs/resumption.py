"""Whether and how a run goes on: which values may change, and whether anything is left to do."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rtx.errors import RunFailed, UserError, printable
from rtx.processes import launch
from rtx.runs.checksum import is_whole, resumable
from rtx.runs.folder import access_errors, is_export, requested_folder
from rtx.runs.records import OlderFinal, ScoreRecord
from rtx.runs.status import read_status, run_state
from rtx.settings.identity import may_change, with_absolute_path
from rtx.settings.overrides import Override
from rtx.settings.run_config import load_run_config, merge_checked
from rtx.settings.run_values import RUN_CONFIG
from rtx.settings.schema import Config, flat, to_dict, with_values

MEMORY_KEYS = ("trainer.micro_batch_size", "model.recompute")
"""Keys whose `auto` a run resolves by the memory of its device."""
Differences = dict[str, tuple[Any, Any]]
"""Old and new values by dotted keys."""


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], *, shared: bool = False
) -> Differences:
    """Return the keys whose values differ; with `shared` only those that both have."""
    old_values = flat(old)
    new_values = flat(new)
    keys = old_values.keys() | new_values.keys()
    if shared:
        keys = old_values.keys() & new_values.keys()
    changed: Differences = {}
    for key in sorted(keys):
        pair = (old_values.get(key), new_values.get(key))
        if pair[0] != pair[1]:
            changed[key] = pair
    return changed


def refuse_changes(changed: Differences) -> None:
    """Raise `UserError` for a change that would make another run."""
    may = "trainer.steps, max_minutes, micro_batch_size, the intervals, hardware and logger"
    for key, (old, new) in changed.items():
        if not may_change(key):
            rule = f"a run that goes on may change {may}"
            raise UserError(f"{key}: {old} -> {new} is refused: {rule}")


def place_of(config: Config) -> tuple[Config, Path | None, str | None]:
    """Return what `rtx train` trains, in which folder, and the state of the run there that goes on.

    A new run has no folder yet, and an empty state. The state is None where nothing is left to do;
    then a line is printed.
    """
    folder = requested_folder()
    if folder is None:
        return config, None, ""
    with access_errors(folder):
        is_run = (folder / RUN_CONFIG).exists()
    if not is_run:
        return config, None, ""
    config = as_chosen(config, load_run_config(folder))
    return config, folder, plan_resumption(folder, config) or None


def plan_resumption(folder: Path, config: Config) -> str:
    """Return the state of a run that goes on; empty, with a line printed, where nothing is left."""
    if is_export(folder):
        raise UserError(f"{folder} is an exported model; resume the run it came from")
    is_first = launch().rank == 0  # the other ranks are compared with the first one
    if is_first:
        refuse_changes(differences(to_dict(load_run_config(folder)), to_dict(config)))
    line = printable(already_done(folder, config))
    if not line:
        return run_state(folder)
    if is_first:
        print(line, flush=True)
    return ""


def already_done(folder: Path, config: Config) -> str:
    """Return the line for a run that has nothing left to do, else an empty text.

    It is empty, too, where last.ckpt is damaged. `RunFailed` where no checkpoint is whole.
    """
    status = read_status(folder)
    if status is None or status.state != "done" or status.final is None:
        return ""
    step = status.step
    steps = config.trainer.steps
    limit = config.trainer.max_minutes or math.inf
    if step < steps and status.seconds < 60 * limit:
        return ""
    if step > steps:
        longer = "give more than that"
        raise UserError(f"trainer.steps={steps}: the run is done with {step} steps; {longer}")
    whole = [is_whole(path) for path in resumable(folder / "checkpoints")]
    if not any(whole):
        lost = "no whole checkpoint is left in it"
        raise RunFailed(f"{folder} was done after {step:,} steps, but {lost}")
    if not whole[0]:
        return ""
    longer = f"max_minutes=M with M above {limit:g}"
    if step == steps:
        longer = f"steps=N with N above {step:,}"
    score = closing_score(status.final)
    return f"{folder} is done: {step:,} steps, {score}; trainer.{longer} continues it"


def closing_score(final: ScoreRecord | OlderFinal) -> str:
    """Return the closing score of a run in words."""
    sample = f"{final.sample:,} windows of " if final.sample else ""
    return f"{final.bits:.4f} bits/{final.unit} on {sample}the validation split"


def changed_config(before: Config, overrides: Sequence[Override]) -> Config:
    """Return a run's configuration with the overrides of `rtx resume`.

    Where its devices change, the micro-batch is chosen anew: the old one need not fit.
    """
    auto = Override("trainer.micro_batch_size", ("auto",))
    return as_chosen(with_absolute_path(merge_checked(before, [auto, *overrides])), before)


def as_chosen(config: Config, before: Config) -> Config:
    """Return a configuration with the choices of an earlier start for what is `auto`.

    Only where it is on the same hardware and as many devices.
    """
    wanted = flat(to_dict(config))
    chosen = flat(to_dict(before))
    for key in ("hardware.name", "hardware.devices", "hardware.nodes"):
        if wanted[key] != chosen[key]:
            return config
    keys = [key for key in MEMORY_KEYS if wanted[key] == "auto"]
    return with_values(config, {key: chosen[key] for key in keys})
