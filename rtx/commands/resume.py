"""`rtx resume RUN [overrides]`: go on exactly where a run stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtx.compose import load_run_config, merge, to_dict, with_absolute_path
from rtx.config import Config
from rtx.data.catalog import check_source, data_root
from rtx.errors import RunFailed, UserError
from rtx.options import read_words
from rtx.training.changes import FREE, differences, makes_another
from rtx.training.checksums import any_whole, is_whole
from rtx.training.launchers import is_first
from rtx.training.status import busy, is_running, read_status, run_state

REFUSED = ("model.", "routing.", "data.", "seed")
"""What makes another model, or other data, of a run."""


def main(arguments: list[str]) -> int:
    """Run `rtx resume RUN [overrides]` and return the exit code."""
    words = read_words("resume", arguments)
    folder, force = words.runs[0].absolute(), words.options.force
    before = load_run_config(folder)
    config = with_absolute_path(merge(before, words.overrides))
    changed = differences(to_dict(before), to_dict(config))
    refuse_changes(changed, force)
    first = is_first(config.hardware.nodes)
    if first:  # the others find the run in use: by the first one
        refuse_running(folder)
    if (line := already_done(folder, config)) is not None:  # all leave: nobody is to wait for the first one
        if first:
            print(line)
        return 0
    if first:
        check_source(config.data, data_root())

    from rtx.commands.train import Resumption, run  # imports torch: only after all that can be refused is
    from rtx.training.hardware import resolve_hardware

    resumption = Resumption(run_state(folder), change_lines(changed, config), changed, force)
    return run(config, resolve_hardware(config), folder, resumption)


def refuse_running(folder: Path) -> None:
    """Refuse a run that some process is working on.

    Raises:
        UserError: it names the process.
    """
    status = read_status(folder)
    if is_running(folder, status):
        raise UserError(busy(folder, status))


def refuse_changes(changed: dict[str, tuple[Any, Any]], force: bool) -> None:
    """Refuse overrides that would make another model, or other data, of the run.

    Raises:
        UserError: names each such field with its old and new value.
    """
    refused = [
        f"{key}: {old} -> {new} is refused: it would change the run's shapes, data or seed (force=true insists)"
        for key, (old, new) in changed.items()
        if makes_another(key, REFUSED)
    ]
    if refused and not force:
        raise UserError("\n".join(refused))


def change_lines(changed: dict[str, tuple[Any, Any]], config: Config) -> list[str]:
    """Return a line for each change, and one more if the run is no longer that of the original configuration."""
    lines = [f"  {key}: {old} -> {new}" for key, (old, new) in changed.items()]
    free = FREE - {"trainer.steps"} if config.optimizer.schedule == "cosine" else FREE
    bending = [key for key in changed if key not in free and not key.startswith("logger.")]
    if bending:
        lines.append(f"  no longer exact: {', '.join(bending)} changed on the way")
    return lines


def drifted(saved: Mapping[str, Any], config: Config, changed: Mapping[str, Any], force: bool) -> list[str]:
    """Return a line for each field that differs from the checkpoint's without being among the `changed` ones.

    It was changed by a resume that saved nothing yet, by an editor, or by a disk.

    Raises:
        UserError: such a field would make another model, or other data, of the run, and nobody insists.
    """
    found = {
        key: (old, new)
        for key, (old, new) in differences(saved, to_dict(config), shared=True).items()
        if key not in changed
    }
    refuse_changes(found, force)
    return change_lines(found, config)


def already_done(folder: Path, config: Config) -> str | None:
    """Return the line for a run that has nothing left to do, or None.

    One that is done and whose last checkpoint is damaged has: it makes it anew from the one before.

    Raises:
        UserError: trainer.steps asks for less than is done.
        RunFailed: nothing is left of what was done.
    """
    status = read_status(folder)
    if not status or status["state"] != "done" or not status.get("final") or "step" not in status:
        return None
    limit, step, steps = config.trainer.max_minutes, status["step"], config.trainer.steps
    if not any_whole(folder / "checkpoints"):
        raise RunFailed(f"{folder} was done after {step:,} steps, but no whole checkpoint is left in it")
    if step > steps:
        raise UserError(f"trainer.steps={steps}: the run is done with {step} steps; give more than that")
    last = folder / "checkpoints" / "last.ckpt"
    if not is_whole(last) and (step == steps or last.exists()):  # (time that was up left no new one: nothing is lost)
        return None  # the last steps are lost, and taken again from the checkpoint before
    if step == steps:
        longer = f"trainer.steps=N with N above {step:,} continues it"
    elif limit is not None and status.get("seconds", 0.0) >= 60 * limit:
        longer = f"trainer.max_minutes=M with M above {limit:g} continues it"
    else:
        return None
    final = status["final"]
    score = f"{final['bits']:.4f} bits/{final.get('unit', 'unit')}"
    return f"{folder} is done: {step:,} steps, {score} on the validation split; {longer}"
