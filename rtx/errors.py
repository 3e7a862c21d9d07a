"""Errors that a user sees in a line or two, without a traceback, and the texts in them."""

import difflib
from collections.abc import Collection, Iterable
from typing import Any

DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""Errors that reading a damaged record or file may raise."""


class UserError(ValueError):
    """A mistake that the user can correct; the command prints it and exits with 2."""


class RunFailed(RuntimeError):
    """A run that cannot go on (NaN loss, full disk); the command prints it and exits with 1."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the nearest of `known`, or "" where none is near.

    Capital letters do not matter.
    """
    match = close_matches(word, known, cutoff=0.55)
    return f" (did you mean '{match[0]}'?)" if match else ""


def close_matches(word: str, known: Iterable[str], cutoff: float) -> list[str]:
    """Return the nearest of `known` in a list, or an empty list where none is near.

    Capital letters do not matter.
    """
    by_lower_case = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), list(by_lower_case), n=1, cutoff=cutoff)
    return [by_lower_case[name] for name in matches]


def listed(names: Collection[str], width: int = 240) -> str:
    """Return names joined by commas, as many as fit in `width` characters.

    If some are left out, their total number follows.
    """
    whole = ", ".join(names)
    if len(whole) <= width:
        return whole
    shown = whole[:width].rpartition(", ")[0]
    return f"{shown}, ... ({len(names)} in all)"


def refuse(problems: Iterable[str]) -> None:
    """Raise `UserError` with a line for each different problem, if there are any."""
    if lines := dict.fromkeys(problems):
        raise UserError("\n".join(lines))


def written(value: Any) -> str:
    """Return a value of the configuration as one would write it after `key=`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def plural(number: int, word: str) -> str:
    """Return a number and a word, in the plural where there are several or none."""
    ending = "es" if word.endswith("s") else "s"
    if number == 1:
        ending = ""
    return f"{number:,} {word}{ending}"


def printable(text: str) -> str:
    """Return text with control characters (all but newline and tab) replaced."""
    characters = []
    for character in text:
        is_kept = character.isprintable() or character in "\n\t"
        characters.append(character if is_kept else "\N{REPLACEMENT CHARACTER}")
    return "".join(characters)


def shorten(text: str, width: int = 100) -> str:
    """Return printable text on one line and no longer than `width`, for an error message."""
    line = " ".join(printable(text).split())
    return line if len(line) <= width else line[: width - 3] + "..."
