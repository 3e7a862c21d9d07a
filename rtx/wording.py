"""Values and numbers as one would write them."""

from __future__ import annotations

from typing import Any


def written(value: Any) -> str:
    """Return a value of the configuration as one would write it behind its key."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def plural(number: int, word: str) -> str:
    """Return a number and a word, in the plural where there are several or none."""
    return f"{number:,} {word}" + ("" if number == 1 else "es" if word.endswith("s") else "s")
