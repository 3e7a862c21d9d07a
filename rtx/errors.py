"""The errors a user may see: one or two lines, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class UserError(ValueError):
    """A mistake that the user can mend; the command prints it and exits with 2."""


class RunFailed(RuntimeError):
    """A run that cannot go on (NaN loss, full disk); the command prints it and exits with 1."""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.55) -> str:
    """Return " (did you mean 'x'?)" for the nearest of `known` that is at least `cutoff` alike (1: the same), or ""."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" (did you mean '{match[0]}'?)" if match else ""


def refuse(problems: Iterable[str]) -> None:
    """Raise `UserError` with a line for each problem, told once, if there are any."""
    if lines := dict.fromkeys(problems):
        raise UserError("\n".join(lines))


def collect(check: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return what `check` gives for each item, or raise `UserError` with the problems of them all."""
    found, problems = [], []
    for item in items:
        try:
            found.append(check(item))
        except UserError as error:
            problems += str(error).splitlines()
    refuse(problems)
    return found
