"""Patterns and data sets of a Python file that `extensions=` names, and presets of a folder of the user's own.

A run keeps a copy of each file, and in its config.yaml `<file>@<sha256>`. The code of a file runs because its user has
named it; that of a run's copy only where the same content has been named on this machine before.
"""

import contextlib
import hashlib
import os
import re
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rtx.data.sets import SETS, DataSet
from rtx.disk import read_file
from rtx.errors import UserError, shorten
from rtx.settings.fields import unknown
from rtx.settings.presets import CONFIG_DIRS, options
from rtx.settings.schema import (
    BASES,
    REGISTERED,
    SELECTIONS,
    all_fields,
    maker_problem,
    name_problem,
    settings,
)
from rtx.variables import started_by_another

FILE = re.compile(r"(.*?([\w.-]+\.py))(?:@([0-9a-f]{64}))?")
LOADED: dict[str, tuple[Path, bytes]] = {}
"""Path and content, by its sha256, of every file whose code this process has run."""


def register_pattern(name: str, make: Callable[..., Any], *, selection: bool = False) -> None:
    """Make a pattern a value of model.base.

    Args:
        make: returns the `rtx.attention.Pattern` of a group of heads. It is called as
            `make(heads=heads, config=config, layer=layer)`: the number of heads, the resolved
            configuration of the run, and the number of the layer, 0 for the lowest.
        selection: make it a value of routing.selection instead.

    Raises:
        UserError: a name that is taken, or a function that does not take these arguments.
    """
    from rtx.model.heads import attribute_problem  # imports torch

    table = SELECTIONS if selection else BASES
    problem = name_problem(name, pattern=True) or attribute_problem(name)
    if not problem and (problem := maker_problem(make)):
        problem = f"{name!r}: {problem}"
    table[registered(name, problem)] = make


def register_data(
    name: str, source: Callable[..., Any], *, side: int | None = None, **defaults: Any
) -> None:
    """Make a data set a value of data=; `UserError` for a name of ours, or a default that is none.

    Args:
        source: as `own_files` in `rtx.data.text`: `source(data, root, report)` returns a `rtx.data.sets.Source`.
        side: height and width of every image; unset: a set of text.
        defaults: keys of the group data, such as `length=64`.
    """
    for key, value in defaults.items():
        if (field := all_fields().get(f"data.{key}")) is None:
            raise UserError(f"register_data({name!r}): {unknown(f'data.{key}', all_fields())}")
        field.read(value)
    name = registered(name, name_problem(name, pattern=False))
    SETS[name] = DataSet(
        source, image=side is not None, side=side, defaults={**defaults, "name": name}
    )
    forget()


def registered(name: str, problem: str) -> str:
    """Note a name as one of an extension, and return it; `UserError` where there is a problem with it."""
    if problem:
        raise UserError(f"cannot be registered: {problem}")
    REGISTERED[name] = ""
    return name


def add_config_dir(path: str) -> None:
    """Take presets from a folder, too, in which `model/mine.yaml` is model=mine."""
    folder = Path(path).expanduser().absolute()
    if not path or not any(folder.glob("*/*.yaml")):
        raise UserError(
            f"--config-dir {shorten(path)}: holds no preset, a file such as model/mine.yaml"
        )
    CONFIG_DIRS[:] = [folder]
    forget()


def forget() -> None:
    """Let what was worked out from the former names and folders be worked out again."""
    from rtx.settings.compose import composed  # imports Hydra

    for known in (options, settings, composed):
        known.cache_clear()


def run_files(text: str, folder: Path | None = None) -> str:
    """Run the files that a user names, with : between, and return their absolute paths, each with @ and its sha256.

    With `folder` those are a run's copies, as its config.yaml names them; `UserError` for other code, or a stranger's.
    """
    found: dict[str, str] = {}
    for part in text.split(os.pathsep):
        if (match := FILE.fullmatch(part)) is None or match[2] in found:
            raise UserError(
                f"extensions={shorten(text)}: name a Python file, my.py, or several, one.py:other.py"
            )
        path = folder / match[2] if folder else Path(match[1]).expanduser().absolute()
        found[match[2]] = (
            f"{path}@{run(path, match[3] or '-' * bool(folder), named=folder is None)}"
        )
    return os.pathsep.join(found.values())


def run(path: Path, expected: str | None, named: bool) -> str:
    """Run a file, once in a process, having said so; returns its sha256. `named`: by the user, who thus allows it."""
    if expected in LOADED:
        return str(expected)
    try:
        sha256 = hashlib.sha256(content := read_file(path)).hexdigest()
    except OSError as error:
        raise UserError(f"extensions: {path}: {error.strerror}") from error
    note = (
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        / "rtx"
        / "extensions"
        / sha256
    )
    if (expected or sha256) != sha256:
        raise UserError(
            f"extensions: {path} is other code: expected sha256 {expected}, found {sha256}"
        )
    if not (named or note.exists()):
        raise UserError(
            f"{path}: never named on this machine: read it, and allow it by rtx plan extensions={path}"
        )
    with contextlib.suppress(OSError):  # then the user names it once more
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
    if sha256 not in LOADED:
        if not started_by_another():
            print(
                f"extensions: running the code of {path} (sha256 {sha256[:12]})",
                file=sys.stderr,
                flush=True,
            )
        execute(path, content, f"rtx_extension_{sha256[:12]}")
        LOADED[sha256] = path, content
    return sha256


def execute(path: Path, content: bytes, name: str) -> None:
    """Run code as the module `name`; `UserError` with the line of an error of its own, or of its own exit."""
    module = sys.modules[name] = types.ModuleType(name)  # by which what it defines is found again
    module.__file__ = str(path)
    try:
        exec(compile(content, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # an exit with 0 would pass for a run
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        line = getattr(error, "lineno", None) or (lines or ["?"])[-1]
        raise UserError(f"{path}, line {line}: {type(error).__name__}: {error}") from error


def copies(text: str | None) -> dict[str, tuple[Path, bytes]]:
    """Return path and content of the files of a configuration, by their names."""
    return {part[:-65]: LOADED[part[-64:]] for part in text.split(os.pathsep)} if text else {}
