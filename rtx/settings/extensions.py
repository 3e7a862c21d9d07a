"""Patterns and data sets of the user: Python files and modules that `extensions=` names.

Code runs only where its user names it on the command line. A run records each name with the sha256
of the code, and commands on that run take only code with that sha256. Code in a run's folder is a
copy for the record, which nothing runs.
"""

import hashlib
import importlib.util
import os
import re
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx.disk import read_named
from rtx.errors import UserError, shorten
from rtx.paths import expand_path
from rtx.processes import started_by_another
from rtx.settings.data_sets import SETS, DataSet
from rtx.settings.fields import unknown
from rtx.settings.names import BASES, REGISTERED, SELECTIONS, maker_problem, name_problem
from rtx.settings.presets import CONFIG_DIRS, forget
from rtx.settings.schema import all_fields

PART = re.compile(r"(?P<source>.*?)(?:@(?P<sha256>[0-9a-f]{64}))?")
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
LARGEST_CODE = 1 << 24
"""The most bytes of an extension."""
USAGE = "name a Python file, my.py, a module, my.module, or several, one.py:other.py"


@dataclass(frozen=True)
class Extension:
    """Code that this process has run: a file, or an installed module."""

    name: str
    """Name of the file, or dotted name of the module."""
    path: Path
    content: bytes
    is_file: bool


LOADED: dict[str, Extension] = {}
"""The code that this process has run, by its sha256."""


def add_pattern(
    name: str, make: Callable[..., Any], *, selection: bool = False, problem: str = ""
) -> None:
    """Make a pattern a value of model.base, or of routing.selection; see `rtx.register_pattern`.

    `problem`: why the name cannot be used, if the caller has found a reason.
    """
    problem = name_problem(name, pattern=True) or problem
    if not problem and (wrong_maker := maker_problem(make)):
        problem = f"{name!r}: {wrong_maker}"
    table = SELECTIONS if selection else BASES
    table[registered(name, problem)] = make


def register_data(
    name: str, source: Callable[..., Any], *, side: int | None = None, **defaults: Any
) -> None:
    """Make a data set a value of data=.

    Args:
        source: as `own_files` in `rtx.data.text`: `source(data, root, report)` returns a
            `rtx.data.sets.Source`.
        side: height and width of every image; unset: a set of text.
        defaults: keys of the group data, such as `length=64`.

    Raises:
        UserError: a name that is taken, or a default that is no value of its key.
    """
    for key, value in defaults.items():
        field = all_fields().get(f"data.{key}")
        if field is None:
            raise UserError(f"register_data({name!r}): {unknown(f'data.{key}', all_fields())}")
        field.read(value)
    name = registered(name, name_problem(name, pattern=False))
    values = {**defaults, "name": name}
    SETS[name] = DataSet(source, image=side is not None, side=side, defaults=values)
    forget()


def registered(name: str, problem: str) -> str:
    """Register the name of an extension, and return it; UserError if there is a problem."""
    if problem:
        raise UserError(f"cannot be registered: {problem}")
    REGISTERED[name] = ""
    return name


def add_config_dir(path: str) -> None:
    """Add a folder of presets, in which `model/mine.yaml` is model=mine."""
    folder = expand_path(path, "--config-dir").absolute()
    if not path or not any(folder.glob("*/*.yaml")):
        problem = "holds no preset, a file such as model/mine.yaml"
        raise UserError(f"--config-dir {shorten(path)}: {problem}")
    CONFIG_DIRS[:] = [folder]
    forget()


def load_extensions(text: str) -> str:
    """Run the files and modules that the user names, with : between.

    Returns:
        Their absolute paths or dotted names, each with @ and its sha256.

    Raises:
        UserError: there is no such code, it fails, or its sha256 is not the one in the text.
    """
    loaded: dict[str, str] = {}
    for part in text.split(os.pathsep):
        source, expected = split_part(part)
        extension = find(source, text)
        if extension.name in loaded:
            raise UserError(f"extensions={shorten(text)}: {USAGE}")
        sha256 = run(extension, expected)
        place = str(extension.path) if extension.is_file else extension.name
        loaded[extension.name] = f"{place}@{sha256}"
    return os.pathsep.join(loaded.values())


def split_part(part: str) -> tuple[str, str]:
    """Return a file or module, and the sha256 after its @, or ""."""
    match = PART.fullmatch(part)
    if match is None:
        return part, ""
    return match["source"], match["sha256"] or ""


def find(source: str, text: str) -> Extension:
    """Return the code that a part of `text` names, without running it."""
    path = expand_path(source, "extensions").absolute()
    is_file = source.endswith(".py")
    if not is_file:
        path = module_path(source, text)
    try:
        content = read_named(path, LARGEST_CODE)
    except OSError as error:
        raise UserError(f"extensions: {path}: {error.strerror}") from error
    return Extension(path.name if is_file else source, path, content, is_file)


def module_path(name: str, text: str) -> Path:
    """Return the file of an installed module."""
    if not MODULE.fullmatch(name):
        raise UserError(f"extensions={shorten(text)}: {USAGE}")
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise UserError(f"extensions={shorten(text)}: no installed module {name}; {USAGE}")
    if not spec.has_location or spec.origin is None:
        raise UserError(f"extensions={shorten(text)}: {name} has no file of Python code")
    return Path(spec.origin)


def run(extension: Extension, expected: str) -> str:
    """Run code once in this process, and return its sha256, which is to be the expected one."""
    sha256 = hashlib.sha256(extension.content).hexdigest()
    if expected and expected != sha256:
        problem = f"is other code: expected sha256 {expected}, found {sha256}"
        raise UserError(f"extensions: {extension.path} {problem}")
    if sha256 in LOADED:
        return sha256
    if not started_by_another():
        message = f"extensions: running the code of {extension.path} (sha256 {sha256[:12]})"
        print(message, file=sys.stderr, flush=True)
    if extension.is_file:
        execute(extension.path, extension.content, f"rtx_extension_{sha256[:12]}")
    else:
        with_place(extension.path, lambda: importlib.import_module(extension.name))
    LOADED[sha256] = extension
    return sha256


def execute(path: Path, content: bytes, name: str) -> None:
    """Run the code of a file as the module `name`: the bytes that were hashed."""
    # pickle, as in a data loader, finds the definitions by this entry.
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    with_place(path, lambda: exec(compile(content, path, "exec"), module.__dict__))


def with_place(path: Path, act: Callable[[], object]) -> None:
    """Run code of a file; UserError with the line of its error."""
    try:
        act()
    # An exit with code 0 would look like a run that is done.
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = getattr(error, "lineno", None) or (lines or ["?"])[-1]
        raise UserError(f"{path}, line {line}: {type(error).__name__}: {error}") from error


def recorded(text: str) -> str:
    """Return loaded extensions as a run records them: names without folders, and sha256.

    So a file may be moved without changing the identity of a run.
    """
    names: list[str] = []
    for part in text.split(os.pathsep):
        source, sha256 = split_part(part)
        names.append(f"{Path(source).name}@{sha256}")
    return os.pathsep.join(names)


def refuse_unloaded(text: str) -> None:
    """Raise UserError unless the code that a run records has been loaded."""
    for part in text.split(os.pathsep):
        source, sha256 = split_part(part)
        if sha256 in LOADED:
            continue
        name = shorten(source)
        needed = f"it was trained with the code of {name} (sha256 {sha256[:12] or 'unknown'})"
        others = [other for other in LOADED.values() if other.name == source]
        if others:
            raise UserError(f"{needed}, and {others[0].path} is other code")
        raise UserError(f"{needed}; name that code: extensions=<path of {name}>")


def code_of(text: str | None) -> dict[str, Extension]:
    """Return the loaded code of a configuration by its names."""
    if not text:
        return {}
    loaded: dict[str, Extension] = {}
    for part in text.split(os.pathsep):
        source, sha256 = split_part(part)
        loaded[source] = LOADED[sha256]
    return loaded


def copies(text: str | None) -> dict[str, bytes]:
    """Return the content of each file among the extensions of a configuration by its name."""
    return {name: code.content for name, code in code_of(text).items() if code.is_file}
