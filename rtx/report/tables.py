"""A table as it is printed, exported and put into the page: raw values by key, and what is shown of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

DASH = "\N{EN DASH}"
"""What stands where there is nothing to say."""


@dataclass(frozen=True)
class Column:
    """A column that is shown: the key of its values, and of what stands behind their ±."""

    key: str
    title: str
    digits: int | None = None
    """Digits behind the point; None: a text, or a whole number."""
    error: str = ""
    brief: bool = True
    """Whether it is also printed to the terminal."""


@dataclass
class Table:
    """A table with the lines above and the notes below it; keys of its rows without a column are exported alone."""

    title: str
    columns: Sequence[Column]
    rows: list[dict[str, Any]]
    lines: list[str] = field(default_factory=list)
    notes: Sequence[str] = ()

    def shown(self, brief: bool = False) -> list[Column]:
        """Return the columns that hold anything, or those of them for a terminal."""
        kept = [column for column in self.columns if column.brief or not brief]
        return [column for column in kept if any(row.get(column.key) not in (None, "") for row in self.rows)]

    def texts(self, brief: bool = False) -> pandas.DataFrame:
        """Return what is shown, by the titles of the columns."""
        import pandas

        columns = self.shown(brief)
        entries = [[text_of(row, column) for column in columns] for row in self.rows]
        return pandas.DataFrame(entries, columns=pandas.Index([column.title for column in columns]))

    def frame(self) -> pandas.DataFrame:
        """Return the raw values, not rounded; whole numbers stay whole."""
        import pandas

        return pandas.DataFrame(self.rows).convert_dtypes()

    def is_number(self, column: Column) -> bool:
        """Tell whether a column holds numbers."""
        return any(isinstance(row.get(column.key), int | float) for row in self.rows)


def text_of(row: dict[str, Any], column: Column) -> str:
    """Return an entry as it is shown."""
    value, error = row.get(column.key), row.get(column.error)
    if value is None or value == "":
        return DASH
    if isinstance(value, str):
        return value
    said = f"{value:,}" if column.digits is None else f"{value:,.{column.digits}f}"
    behind = "" if error is None else f" ± {error:,.{column.digits or 0}f}"
    return said.replace("-", "\N{MINUS SIGN}") + behind


def signed(value: float, digits: int) -> str:
    """Return a number with its sign."""
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")
