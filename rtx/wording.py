"""Values and numbers as one would print them."""

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


def shorten(text: str, width: int = 100) -> str:
    """Return `text` on one line and no longer than `width`, for an error message."""
    line = "".join(letter if letter.isprintable() else "?" for letter in text)
    return line if len(line) <= width else line[: width - 3] + "..."


def printable(text: str) -> str:
    """Return text with control characters (all but newline and tab) replaced."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
