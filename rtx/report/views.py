"""Tables as they are written out: columns, and cells with a text and a value to sort by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

DASH = "\N{EN DASH}"
"""What stands where there is nothing to say."""


@dataclass(frozen=True)
class Column:
    """A column: its key in the CSV file, its title, and whether it holds numbers."""

    key: str
    title: str
    number: bool = False
    brief: bool = False
    """Whether it is also printed to the terminal."""


@dataclass(frozen=True)
class Value:
    """One entry: what is shown, what is sorted by and exported, and more to say about it."""

    text: str = DASH
    raw: float | str | None = None
    hint: str = ""


@dataclass
class View:
    """A table with the lines above and below it."""

    title: str
    columns: Sequence[Column]
    rows: list[list[Value]]
    lines: list[str] = field(default_factory=list)
    footnotes: Sequence[str] = ()
    absent: set[int] = field(default_factory=set)
    """Rows of the paper that have not been run."""

    def without_empty(self) -> View:
        """Return it without columns that hold nothing."""
        kept = [at for at in range(len(self.columns)) if any(row[at].text not in ("", DASH) for row in self.rows)]
        columns, rows = [self.columns[at] for at in kept], [[row[at] for at in kept] for row in self.rows]
        return View(self.title, columns, rows, self.lines, self.footnotes, self.absent)


def number(value: float | None, digits: int = 3, sign: bool = False) -> Value:
    """Return a number with so many digits behind the point, or a dash."""
    if value is None:
        return Value()
    return Value(f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "\N{MINUS SIGN}"), value)


def count(value: int | None) -> Value:
    """Return a whole number, or a dash."""
    return Value() if value is None else Value(f"{value:,}", value)


def text(value: str) -> Value:
    """Return a text, or a dash where it is empty."""
    return Value(value, value) if value else Value()
