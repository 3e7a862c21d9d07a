"""The runs that lie in a folder, and what a user may call one: its folder, the beginning of its id, or `last`."""

from __future__ import annotations

import os
from pathlib import Path

from rtx.compose import RUN_CONFIG
from rtx.errors import UserError, nearest, plural, shorten
from rtx.training.run_folder import is_export, outputs_root, read_status, shown

NAMED = 5  # runs that a message lists


def runs_below(folder: Path) -> list[Path]:
    """Return the runs that a folder is, or holds at most two levels down, the one last at work first; no exports."""
    found = {path.parent for depth in ("", "*/", "*/*/") for path in folder.glob(depth + RUN_CONFIG)}
    runs = [run for run in sorted(found) if run.parent not in found and not is_export(run)]
    return sorted(runs, key=lambda run: (read_status(run) or {}).get("heartbeat", ""), reverse=True)


def find_run(folder: Path) -> Path:
    """Return the run that `folder` is or alone holds, or of outputs/ the one of this name; else `UserError`.

    Names are `last`, and what a run's id, its random digits or `<name>/<id>` begin with; a whole one comes first.
    """
    if os.path.isfile(folder / RUN_CONFIG):
        return folder
    every, word = runs_below(outputs_root()), str(folder)
    if os.path.isdir(folder):
        found = runs_below(folder)
    elif word == "last":
        found = every[:1]
    else:
        found = called(f"{word}/", every) or called(word, every)
    if len(found) == 1:
        return Path(os.path.relpath(found[0])) if found[0].is_relative_to(Path.cwd()) else found[0]
    said = shorten(word)
    if found:
        raise UserError(f"{said}: {plural(len(found), 'run')}; name one: {listed(found)}")
    if os.path.isdir(folder):
        raise UserError(f"{said}: has no config.yaml; a run is a folder such as outputs/<name>/<run>")
    near = nearest(word, [name for run in every for name in names_of(run)])
    newest = f"the newest in {shown(outputs_root())}: {listed(every)}" if every else "there is none yet"
    raise UserError(f"{said}: no such folder, and no run of this name{near}; {newest}")


def called(start: str, runs: list[Path]) -> list[Path]:
    """Return the runs of which a name begins so; a whole name ends in a slash."""
    return [run for run in runs if any(f"{name}/".startswith(start) for name in names_of(run))]


def names_of(run: Path) -> list[str]:
    """Return what a run may be called: <id>, <name>/<id>, outputs/<name>/<id>, and the random digits of the id."""
    return [*("/".join(run.parts[-n:]) for n in (1, 2, 3)), run.name.rpartition("-")[2]]


def listed(runs: list[Path]) -> str:
    """Return the names of the first runs, for a message."""
    return shorten(", ".join(names_of(run)[1] for run in runs[:NAMED]), 240) + ", ..." * (len(runs) > NAMED)
