"""Fields of the schema with what they allow: the metadata that `rtx.checks.violated` and the help pages read."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def one_of(default: str, *choices: str) -> Any:
    """A text field with a closed list of values."""
    return field(default=default, metadata={"choices": (default, *choices)})


def parts_of(default: str, *choices: str) -> Any:
    """A text field with one or more of a closed list of values, joined by +; one may stand there twice."""
    return field(default=default, metadata={"parts": (default, *choices)})


def ranged(default: Any, low: float | None = None, high: float | None = None, *, above: float | None = None) -> Any:
    """A number with `low <= value <= high` and `value > above`, each where given; None passes where allowed."""
    return field(default=default, metadata={"low": low, "high": high, "above": above})


MOST_WHOLE = 2**53
"""The largest whole number that a key without a range of its own takes; a float beyond it stands for several."""
