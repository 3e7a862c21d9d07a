"""The errors a user may see, of a line or two and without a traceback, and how values and texts stand in them."""

import difflib
from collections.abc import Collection, Iterable
from typing import Any

DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""What is raised upon a record or file whose values cannot be right."""


class UserError(ValueError):
    """A mistake that the user can mend; the command prints it and exits with 2."""


class RunFailed(RuntimeError):
    """A run that cannot go on (NaN loss, full disk); the command prints it and exits with 1."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the nearest of `known`, in capitals or not, or "" where none is near."""
    match = close_matches(word, known, cutoff=0.55)
    return f" (did you mean '{match[0]}'?)" if match else ""


def close_matches(word: str, known: Iterable[str], cutoff: float) -> list[str]:
    """Return the nearest of `known`, whatever is in capitals, in a list that is empty where none is near."""
    by_lower_case = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), list(by_lower_case), n=1, cutoff=cutoff)
    return [by_lower_case[name] for name in found]


def listed(names: Collection[str], width: int = 240) -> str:
    """Return names with commas between, as many whole ones as `width` characters hold, and how many there are."""
    whole = ", ".join(names)
    if len(whole) <= width:
        return whole
    shown = whole[:width].rpartition(", ")[0]
    return f"{shown}, ... ({len(names)} in all)"


def refuse(problems: Iterable[str]) -> None:
    """Raise `UserError` with a line for each problem, told once, if there are any."""
    if lines := dict.fromkeys(problems):
        raise UserError("\n".join(lines))


def written(value: Any) -> str:
    """Return a value of the configuration as one would write it behind its key."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def plural(number: int, word: str) -> str:
    """Return a number and a word, in the plural where there are several or none."""
    return f"{number:,} {word}" + ("" if number == 1 else "es" if word.endswith("s") else "s")


def printable(text: str) -> str:
    """Return text with control characters (all but newline and tab) replaced."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def shorten(text: str, width: int = 100) -> str:
    """Return printable text on one line and no longer than `width`, for an error message."""
    line = " ".join(printable(text).split())
    return line if len(line) <= width else line[: width - 3] + "..."
