"""The folder `conf/` and folders of the user: groups, options, and the file of each option."""

import functools
from collections.abc import Callable
from pathlib import Path

from rtx.disk import read_named
from rtx.errors import UserError

CONFIG_DIRS: list[Path] = []
"""Folders with presets of the user, as `--config-dir` names them."""
CACHES: list[Callable[[], None]] = []
"""Functions that clear what was computed from these folders and from registered names."""


def forget() -> None:
    """Clear the caches of presets and names after some were added."""
    for clear in CACHES:
        clear()


@functools.cache
def conf_dir() -> Path:
    """Return the folder of the Hydra groups: in the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


@functools.cache
def options(group: str) -> tuple[str, ...]:
    """Return the options of a group in alphabetical order; `pg19/local` is one in a folder."""
    names: set[str] = set()
    for folder in (conf_dir(), *CONFIG_DIRS):
        paths = [path.relative_to(folder / group) for path in (folder / group).rglob("*.yaml")]
        names |= {path.with_suffix("").as_posix() for path in paths}
    return tuple(sorted(names))


CACHES.append(options.cache_clear)


def option_words(group: str) -> tuple[str, ...]:
    """Return the words that choose an option of a group.

    `heads=local` is short for `heads=pg19/local` where the experiment is pg19.
    """
    names = options(group)
    if group != "heads":
        return names
    short = [name.rpartition("/")[2] for name in names]
    return tuple(dict.fromkeys([*names, *short]))


MODES_OF_WANDB = ("auto", "online", "offline")
"""Modes of W&B that were options of the group logger in earlier versions."""


def replacement(group: str, option: str) -> str:
    """Return the words that replace a former option, such as `cifar10_full`, or ""."""
    if group == "logger" and option in MODES_OF_WANDB:
        return f"logger=wandb logger.mode={option}"
    if group != "experiment" or option in options(group):
        return ""
    for experiment in options(group):
        heads = option.removeprefix(f"{experiment}_")
        if heads != option and heads in option_words("heads"):
            return f"experiment={experiment} heads={heads}"
    return ""


def about(group: str, option: str) -> str:
    """Return the first line of the comment in an option's file, with its continuation lines."""
    path = preset(group, option)
    if path is None:
        return "of an extension"
    parts: list[str] = []
    for line in read_text(path).splitlines():
        # Hydra's directive is no description.
        if line.startswith("# @"):
            continue
        is_continued = line.startswith("#  ")
        if not line.startswith("#") or (parts and not is_continued):
            break
        parts.append(line.removeprefix("#").strip())
    return " ".join(parts)


def read_text(path: Path) -> str:
    """Return the text of a preset's file; `UserError` where it cannot be read or is not UTF-8."""
    try:
        return read_named(path).decode()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: is not UTF-8") from error


def preset(group: str, option: str) -> Path | None:
    """Return the file of a group's option, None if it has none; ours comes before the user's."""
    for folder in (conf_dir(), *CONFIG_DIRS):
        path = folder / group / f"{option}.yaml"
        if path.is_file():
            return path
    return None
