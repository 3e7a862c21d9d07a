"""The folder `conf/` and folders of the user: groups, their options, and the file of each option."""

import functools
from collections.abc import Callable
from pathlib import Path

CONFIG_DIRS: list[Path] = []
"""Folders with presets of the user, as `--config-dir` names them."""
CACHES: list[Callable[[], None]] = []
"""Functions that clear what was computed from these folders and from registered names."""


def forget() -> None:
    """Clear what was computed from presets and names, for there are others now."""
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
    """Return the options of a group in alphabetical order."""
    names = set()
    for folder in (conf_dir(), *CONFIG_DIRS):
        names |= {path.stem for path in (folder / group).glob("*.yaml")}
    return tuple(sorted(names))


CACHES.append(options.cache_clear)


def preset(group: str, option: str) -> Path | None:
    """Return the file of a group's option, None if it has none; ours comes before one of the user."""
    for folder in (conf_dir(), *CONFIG_DIRS):
        path = folder / group / f"{option}.yaml"
        if path.is_file():
            return path
    return None
