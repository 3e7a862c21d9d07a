"""A table, its raw values by key and what is shown of them, also on a terminal."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

DASH = "\N{EN DASH}"
"""What stands where there is nothing to say."""

MINUS = "\N{MINUS SIGN}"

STRIP = 17
"""Letters of the picture of the intervals beside a ranked table."""


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
    return said.replace("-", MINUS) + ("" if error is None else f" ± {error:,.{column.digits or 0}f}")


def terminal(table: Table, width: int = 80, strip: bool = False) -> str:
    """Return the brief columns of a table for a terminal of so many columns, the lines above it wrapped.

    `strip`: whether to draw the interval of each row beside it.
    """
    from rich import box
    from rich import table as rich_table
    from rich.console import Console
    from rich.text import Text

    grid = rich_table.Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for column in table.shown(brief=True):
        number = table.is_number(column)
        grid.add_column(column.title, justify="right" if number else "left", no_wrap=number, overflow="fold")
    if strip:
        grid.add_column("intervals", no_wrap=True)
    pictures = interval_strips(table.rows) if strip else [() for _ in table.rows]
    for entries, picture in zip(table.texts(brief=True).itertuples(index=False), pictures, strict=True):
        grid.add_row(*map(Text, entries), *picture)
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, highlight=False).print(grid)
    above = [part for line in (table.title, *table.lines) for part in textwrap.wrap(line, width)]
    return "\n".join([*above, "", *(line.rstrip() for line in out.getvalue().splitlines())])


def interval_strips(rows: Sequence[dict[str, Any]]) -> list[tuple[str]]:
    """Return a picture of each row's score and interval, on a scale common to all rows with seeds."""
    spans = [
        [row["ours"] + sign * (row.get("half") or 0) for sign in (-1, 0, 1)] if row.get("seeds") else [] for row in rows
    ]
    every = [value for span in spans for value in span]
    scale = (STRIP - 1) / ((max(every) - min(every)) or 1) if every else 0
    pictures = []
    for span in spans:
        low, middle, high = [round((value - min(every)) * scale) for value in span] or (0, 0, 0)
        line = " " * low + "─" * (middle - low) + "●" + "─" * (high - middle)
        pictures.append((line if span else "",))
    return pictures
