"""The runs that lie in a folder, and what a user may call one: its folder, the beginning of its id, or `last`."""

from __future__ import annotations

import itertools
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
    every, word, is_folder = runs_below(outputs_root()), str(folder), os.path.isdir(folder)
    names = {run: [*("/".join(run.parts[-n:]) for n in (1, 2, 3)), run.name.rpartition("-")[2]] for run in every}
    found = runs_below(folder) if is_folder else every[:1] if word == "last" else []
    for end in () if is_folder or found else ("/", ""):
        found = found or [run for run in every if any(f"{name}/".startswith(word + end) for name in names[run])]
    if len(found) == 1:
        return Path(os.path.relpath(found[0])) if found[0].is_relative_to(Path.cwd()) else found[0]
    listed = ", ".join(shown(run) for run in (found or every)[:NAMED]) + ", ..." * (len(found or every) > NAMED)
    said = f"{shorten(word)}: "
    if found:
        raise UserError(f"{said}{plural(len(found), 'run')}; name one: {listed}")
    if is_folder:
        raise UserError(f"{said}has no config.yaml; a run is a folder such as outputs/<name>/<run>")
    near = nearest(word, itertools.chain(["last"] * bool(every), *names.values()))
    raise UserError(f"{said}no such folder, and no run of this name{near}; the newest: {listed or 'there is none'}")
