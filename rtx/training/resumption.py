"""Whether a run may go on, with what, and whether there is anything left to do: told without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rtx.compose import flat, load_run_config, to_dict, with_values
from rtx.config import Config
from rtx.errors import RunFailed, UserError
from rtx.training.hardware import process_rank
from rtx.training.run_folder import is_export, read_status, run_state

ALLOWED = {
    *("trainer.steps", "trainer.max_minutes", "trainer.micro_batch_size", "trainer.log_every"),
    *("trainer.val_every", "trainer.val_windows", "trainer.val_stride"),
    *("trainer.checkpoint_every", "optimizer.steps", "model.recompute", "model.ffn_parts"),
    *("name", "model.name", "data.path", "data.verify", "data.processes"),
}
"""What `rtx resume` may change: how long, where, how often; the rest would make another run of it."""
Differences = dict[str, tuple[Any, Any]]


class Resumption(NamedTuple):
    """How a run had ended, and which fields of its configuration change, from what to what."""

    state: str
    changed: Differences


def may_change(key: str) -> bool:
    """Tell whether a run may go on with another value of a field."""
    return key in ALLOWED or key.startswith(("hardware.", "logger."))


def makes_another(key: str) -> bool:
    """Tell whether a change of a field makes another model, or other data."""
    return key.startswith(("model.", "routing.", "data.")) and not may_change(key)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, shared: bool = False) -> Differences:
    """Return the fields (dotted names) whose values differ between two configurations, with both values.

    `shared`: leave out fields that only one of them has, which is of another version of rtx.
    """
    old, new = flat(old), flat(new)
    keys = sorted(old.keys() & new.keys() if shared else old.keys() | new.keys())
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def refuse_changes(changed: Differences) -> None:
    """Raise `UserError` for changes that would make another run, with a line for each such field."""
    refused = [
        f"{key}: {old} -> {new} is refused: it would make another run (a run that goes on may change trainer.steps, "
        "max_minutes, micro_batch_size, the intervals, hardware and logger)"
        for key, (old, new) in changed.items()
        if not may_change(key)
    ]
    if refused:
        raise UserError("\n".join(refused))


def plan_resumption(folder: Path, config: Config) -> Resumption | None:
    """Return how a run goes on with a configuration; None where nothing is left to do, which the first process says."""
    if is_export(folder):
        raise UserError(f"{folder} is an exported model; resume the run it came from")
    changed = differences(to_dict(load_run_config(folder)), to_dict(config))
    if process_rank() == 0:  # the others find the run in use by the first one, and compare with that
        refuse_changes(changed)
    if (line := already_done(folder, config)) is None:
        return Resumption(run_state(folder), changed)
    if process_rank() == 0:
        print(line, flush=True)
    return None


def already_done(folder: Path, config: Config) -> str | None:
    """Return the line for a run that has nothing left to do, or None.

    One that is done and whose last checkpoint is damaged has: it makes it anew from the one before.
    """
    status = read_status(folder)
    if not status or status["state"] != "done" or not (final := status.get("final")) or "step" not in status:
        return None
    from rtx.training.checkpoint import is_whole, resumable  # imports torch

    limit, step, steps = config.trainer.max_minutes, status["step"], config.trainer.steps
    last, *others = resumable(folder / "checkpoints")
    if not (last_is_whole := is_whole(last)) and not any(is_whole(path) for path in others):
        raise RunFailed(f"{folder} was done after {step:,} steps, but no whole checkpoint is left in it")
    if step > steps:
        raise UserError(f"trainer.steps={steps}: the run is done with {step} steps; give more than that")
    time_up = limit is not None and status.get("seconds", 0.0) >= 60 * limit
    if not (step == steps or time_up) or (not last_is_whole and (step == steps or last.exists())):
        return None  # of steps that are lost, the last are taken again; where time was up none may have been saved
    longer = f"trainer.steps=N with N above {step:,}"
    longer = longer if step == steps else f"trainer.max_minutes=M with M above {limit:g}"
    score = f"{final['bits']:.4f} bits/{final.get('unit', 'unit')} on the validation split"
    return f"{folder} is done: {step:,} steps, {score}; {longer} continues it"


def on_other_devices(config: Config, before: Config) -> bool:
    """Tell whether a run goes on with another number of devices, so that its micro-batch may not divide their share."""
    return any(getattr(config.hardware, key) != getattr(before.hardware, key) for key in ("name", "devices", "nodes"))


def as_chosen(config: Config, before: Config) -> Config:
    """Return a configuration in which what is `auto` is as a run has chosen it, by the run's own configuration."""
    if on_other_devices(config, before):
        return config
    wished, chosen = flat(to_dict(config)), flat(to_dict(before))
    keys = [key for key in ("trainer.micro_batch_size", "model.recompute") if wished[key] == "auto"]
    return with_values(config, {key: chosen[key] for key in keys})
