"""Paths as users and the environment name them. No torch."""

import os
from pathlib import Path

from rtx.errors import UserError, shorten


def expand_path(text: str, option: str) -> Path:
    """Return a path in which ~ and ~name stand for home folders.

    Args:
        option: what the user has set to this path, for the message.

    Raises:
        UserError: this machine knows no such home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        home = shorten(text.partition("/")[0])
        problem = f"this machine knows no home folder {home}"
        raise UserError(f"{option}={shorten(text)}: {problem}; write the whole path") from error


def refuse_non_utf8(option: str, text: str) -> None:
    """Raise `UserError` for a text that is not UTF-8, as a name of a file may be."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = "is not UTF-8, in which options are recorded"
        raise UserError(f"{option}={shorten(text)}: {problem}; rename it") from error


def cache_folder() -> Path | None:
    """Return the folder for cached files: XDG_CACHE_HOME, or ~/.cache.

    None if the user has no home folder, as in some containers.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    # A path that is not absolute is invalid by the XDG specification.
    if os.path.isabs(named):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None
