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
    """Whether it is also printed to the terminal, and shown on a phone."""
    label: bool = False
    """Whether it says what a row is; on a phone `Value.short` of the first one stands for all."""


@dataclass(frozen=True)
class Value:
    """One entry: what is shown, what is sorted by and exported, and more to say about it."""

    text: str = DASH
    raw: float | str | None = None
    hint: str = ""
    short: str = ""
    """Of a row's first entry: what names the row by itself where there is no room for the columns of labels."""
    error: float | None = None
    """What stands behind the ± of the text; a column of its own in the CSV file."""


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
    waiting: set[int] = field(default_factory=set)
    """Rows of cells that have not been started."""

    def without_empty(self, stated: Sequence[str] = ()) -> View:
        """Return it without columns that hold nothing, and those of the keys `stated` that hold one value alone: it
        stands in the lines above.
        """
        said = [{row[at].text for row in self.rows} - {"", DASH} for at in range(len(self.columns))]
        kept = [at for at, column in enumerate(self.columns) if len(said[at]) > (column.key in stated)]
        columns, rows = [self.columns[at] for at in kept], [[row[at] for at in kept] for row in self.rows]
        return View(self.title, columns, rows, self.lines, self.footnotes, self.absent, self.waiting)

    def own_notes(self) -> list[list[str]]:
        """Return the notes of each row, but for what the lines above the table say of all."""
        said = " ".join(self.lines)
        places = [at for at, column in enumerate(self.columns) if column.key == "notes"]
        texts = [[row[at].text for at in places if row[at].text != DASH] for row in self.rows]
        return [[note for text in own for note in text.split("; ") if note not in said] for own in texts]


def number(value: float | None, digits: int = 3, sign: bool = False) -> Value:
    """Return a number with so many digits behind the point, or a dash."""
    if value is None:
        return Value()
    return Value(f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "\N{MINUS SIGN}"), value)


def count(value: object) -> Value:
    """Return a whole number, or a dash; a record may hold anything else, which is shown as it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Value(f"{value:,}", value)
    return Value() if value is None else text(str(value))


def text(value: str) -> Value:
    """Return a text, or a dash where it is empty."""
    return Value(value, value) if value else Value()
