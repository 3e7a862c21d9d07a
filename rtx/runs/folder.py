"""The folder of a run: its name, how it is found, and how results are written into it. No torch."""

import contextlib
import datetime
import itertools
import os
import secrets
import shlex
from collections.abc import Generator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rtx.disk import make_folder, names_inside, status_inside, write_inside, write_json
from rtx.errors import RunFailed, UserError, nearest, plural, printable, shorten
from rtx.paths import expand_path
from rtx.runs.status import STATUS, read_status
from rtx.settings.run_values import RUN_CONFIG

MOST_LISTED = 5
"""Runs that a message lists."""
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
RESUMES = "resumes.jsonl"
SWEEPS = "sweeps.jsonl"
FILES_OF_A_RUN = (RUN_CONFIG, STATUS, ENVIRONMENT, METRICS)
"""A folder is a run if it has at least one of them."""
FOLDERS_OF_A_RUN = (
    "checkpoints",
    "samples",
    "eval",
    "analysis",
    "report",
    "wandb",
    "tensorboard",
    "csv",
)
LOCK = "lock"
WANDB_RECORD = "wandb.json"
"""The file that names the run at Weights & Biases to which a run was logged."""
OTHERS_OF_A_RUN = (RESUMES, LOCK, "output.log", "audit.json", WANDB_RECORD)
EXPORT_FACTS = "export.json"
"""In the folder of an exported model: from which run and checkpoint it is."""


def outputs_root() -> Path:
    """Return the folder of all runs: RTX_OUTPUTS, or outputs/ in the current folder."""
    name = os.environ.get("RTX_OUTPUTS") or "outputs"
    return expand_path(name, "RTX_OUTPUTS").absolute()


def requested_folder() -> Path | None:
    """Return the folder that RTX_RUN names, None where it is not set."""
    name = os.environ.get("RTX_RUN")
    return expand_path(name, "RTX_RUN").absolute() if name else None


def new_run_folder(name: str) -> Path:
    """Return the folder of a new run: RTX_RUN, or outputs/<name>/<UTC time and random digits>."""
    folder = requested_folder()
    if folder is None:
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        folder = outputs_root() / name / f"{stamp}-{secrets.token_hex(4)}"
    with access_errors(folder):
        checkpoints = names_inside(folder, "checkpoints", "*.ckpt")
    if checkpoints:
        problem = "holds checkpoints but no config.yaml"
        raise UserError(f"RTX_RUN={folder} {problem}: take them out, or name another folder")
    return folder


def unwritable(folder: Path, error: OSError) -> str:
    """Return the message for a folder that cannot be written to."""
    variable = "RTX_RUN" if requested_folder() == folder else "RTX_OUTPUTS"
    remedy = f"set {variable} to a folder that you can write"
    return f"cannot write to {folder}: {error.strerror}; {remedy}"


@contextlib.contextmanager
def access_errors(folder: Path) -> Generator[None]:
    """Raise `UserError` where the user has no right to enter the folder for a run."""
    try:
        yield
    except PermissionError as error:
        raise UserError(unwritable(folder, error)) from error


def is_export(folder: Path) -> bool:
    """Return whether a folder is an exported model."""
    return (folder / EXPORT_FACTS).is_file()


def refuse_links(folder: Path) -> None:
    """Raise `UserError` if what rtx reads or writes in a run or an export is a link.

    Whatever opens it refuses that, too; this comes before any work.
    """
    for name in (*FILES_OF_A_RUN, *OTHERS_OF_A_RUN, *FOLDERS_OF_A_RUN, EXPORT_FACTS):
        status_inside(folder, name)


def run_folders(folder: Path) -> list[Path]:
    """Return the runs that a folder is, or has at most two levels down, in order of their paths.

    A folder is a run if it has one of the files of a run. Exported models, and folders inside a
    run, are none.
    """
    candidates = [folder, *folder.glob("*/"), *folder.glob("*/*/")]
    folders = {candidate for candidate in candidates if has_file_of_a_run(candidate)}
    runs: list[Path] = []
    for run in sorted(folders):
        # The parent of "." is "." again.
        is_inside = run.parent in folders and run.parent != run
        if not is_inside and not is_export(run):
            runs.append(run)
    return runs


def has_file_of_a_run(folder: Path) -> bool:
    """Return whether a folder has one of the files of a run."""
    return any(os.path.exists(folder / name) for name in FILES_OF_A_RUN)


def refuse_unreadable(folder: Path) -> None:
    """Raise `UserError` for a folder that may not be read: it would seem to be empty."""
    try:
        names_inside(folder)
    except OSError as error:
        place = shorten(str(folder), 300)
        raise UserError(f"{place}: cannot be read ({error.strerror})") from error


def refuse_unreachable(path: Path) -> None:
    """Raise `UserError` for a path in a folder that may not be read: else it would seem missing."""
    try:
        os.stat(path)
    except PermissionError as error:
        raise UserError(f"{shorten(str(path), 300)}: cannot be read ({error.strerror})") from error
    except (OSError, ValueError):
        # It is missing, or no path: the caller says so.
        return


def runs_below(folder: Path) -> list[Path]:
    """Return the runs of `run_folders`, the last active one first.

    `UserError` for a folder that may not be read.
    """
    refuse_unreadable(folder)
    return sorted(run_folders(folder), key=last_active, reverse=True)


def logged_to_wandb(folder: Path) -> list[Path]:
    """Return the folders with a WANDB_RECORD: this one first, then those directly in it."""
    records = [folder / WANDB_RECORD, *sorted(folder.glob(f"*/{WANDB_RECORD}"))]
    return [path.parent for path in records if path.is_file()]


def last_active(run: Path) -> str:
    """Return the time of a run's last heartbeat, empty without one."""
    status = read_status(run)
    return status.heartbeat if status else ""


def find_run(folder: Path) -> Path:
    """Return the run that a folder, a name or `last` means.

    A folder means itself, or the only run in it. A name is the start of a run's id, of its random
    digits, or of `<name>/<id>`; a whole name comes before the start of another. Raises `UserError`
    unless exactly one run matches.
    """
    if os.path.isfile(folder / RUN_CONFIG):
        return folder
    all_runs = runs_below(outputs_root())
    matches = matching_runs(folder, all_runs)
    if not matches:
        refuse_unreachable(folder)
    if len(matches) != 1:
        raise UserError(no_single_run(folder, matches, all_runs))
    run = matches[0]
    if run.is_relative_to(Path.cwd()):
        return Path(os.path.relpath(run))
    return run


def matching_runs(folder: Path, all_runs: list[Path]) -> list[Path]:
    """Return the runs that a folder, a name or `last` may mean."""
    if os.path.isdir(folder):
        return runs_below(folder)
    word = str(folder)
    if word == "last" and all_runs:
        return all_runs[:1]
    for start in (f"{word}/", word):
        matches: list[Path] = []
        for run in all_runs:
            if any(f"{name}/".startswith(start) for name in names_of(run)):
                matches.append(run)
        if matches:
            return matches
    return []


def names_of(run: Path) -> list[str]:
    """Return the names of a run: its id, `<name>/<id>`, `outputs/<name>/<id>`, random digits."""
    names = ["/".join(run.parts[-depth:]) for depth in (1, 2, 3)]
    return [*names, run.name.rpartition("-")[2]]


def no_single_run(folder: Path, matches: list[Path], all_runs: list[Path]) -> str:
    """Return the message for a word that means no run, or several."""
    word = str(folder)
    candidates = matches or all_runs
    listed = ", ".join(shown(run) for run in candidates[:MOST_LISTED])
    if len(candidates) > MOST_LISTED:
        listed += ", ..."
    start = shorten(word)
    if matches:
        return f"{start}: {plural(len(matches), 'run')}; name one: {listed}"
    if os.path.isdir(folder):
        return f"{start}: has no config.yaml; a run is a folder such as outputs/<name>/<run>"
    names = list(itertools.chain(*map(names_of, all_runs)))
    if all_runs:
        names.insert(0, "last")
    near = nearest(word, names)
    newest = listed or "there is none"
    return f"{start}: no such folder, and no run of this name{near}; the newest: {newest}"


def shown(folder: Path) -> str:
    """Return a folder as the user would type it."""
    try:
        short = os.path.relpath(folder)
    except FileNotFoundError:
        # The current folder was deleted.
        short = str(folder)
    if short.startswith(".."):
        short = str(folder)
    elif short.startswith("-"):
        # Otherwise a command would read it as a flag.
        short = f"./{short}"
    return printable(shlex.quote(short))


def save(folder: Path, name: str, content: bytes | Mapping[str, Any]) -> Path:
    """Write a result into the folder of a run, print its path, and return it.

    A mapping is written as JSON. `RunFailed` where the result cannot be written.
    """
    path = folder / name
    try:
        make_folder(folder, PurePosixPath(name).parent)
        if isinstance(content, bytes):
            write_inside(folder, name, content)
        else:
            write_json(folder, name, content)
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error
    print(printable(str(path)))
    return path
