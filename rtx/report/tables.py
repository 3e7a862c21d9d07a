"""A table, its raw values by key and what is shown of them, also on a terminal; and pages filled from templates."""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtx.errors import printable

DASH = "\N{EN DASH}"  # what stands where there is nothing to say
MINUS = "\N{MINUS SIGN}"
STRIP = 13  # letters of the picture of the intervals beside a ranked table
WORD = 16  # letters of a word that a terminal breaks at the earliest
LEAST, ROOMY = 80, 96  # columns that a table takes at least, and with that picture
LETTERS = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "-": "{-}"}
LETTERS |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''", "[": "{[}", "*": "{*}"}
LETTERS |= {DASH: r"\textendash{}", MINUS: "$-$", "±": r"$\pm$", **{mark: f"\\{mark}" for mark in "&%$#_{}"}}
"""Of LaTeX, for what it would take for a command."""


@dataclass(frozen=True)
class Column:
    """A column that is shown: the key of its values, and of what stands behind their ±."""

    key: str
    title: str
    digits: int | None = None  # digits behind the point; None: a text, or a whole number
    error: str = ""
    brief: bool = True  # whether it is also printed to the terminal


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

    def is_number(self, column: Column) -> bool:
        return any(isinstance(row.get(column.key), int | float) for row in self.rows)


def text_of(row: dict[str, Any], column: Column) -> str:
    value, error = row.get(column.key), row.get(column.error)
    if value is None or value == "":
        return DASH
    if isinstance(value, str):
        return value
    said = f"{value:,}" if column.digits is None else f"{value:,.{column.digits}f}"
    return said.replace("-", MINUS) + ("" if error is None else f" ± {error:,.{column.digits or 0}f}")


def terminal(table: Table, width: int = 80, strip: bool = False) -> str:
    """Return the brief columns of a table for a terminal of so many columns, the lines above it wrapped.

    The table takes `LEAST` at least. `strip`: whether to draw the interval of each row beside it, where there is room.
    """
    from rich.console import Console

    out, columns = io.StringIO(), table.shown(brief=True)
    console = Console(file=out, width=max(width, LEAST), color_system=None, highlight=False)
    grid, wide = grid_of(table, columns), console.options.update(max_width=10_000)
    while console.measure(grid, options=wide).minimum > console.width:  # the files of the report have all columns
        columns = columns[:-1]
        grid = grid_of(table, columns)
    if strip and width >= ROOMY and console.measure(grid, options=wide).minimum + STRIP + 1 <= width:
        grid = grid_of(table, columns, interval_strips(table.rows))
    console.print(grid)
    above = [part for line in (table.title, *table.lines) for part in textwrap.wrap(line, width)]
    return printable("\n".join([*above, "", *(line.rstrip() for line in out.getvalue().splitlines())]))


def grid_of(table: Table, columns: Sequence[Column], pictures: Sequence[str] = ()) -> Any:
    """Return columns of a table as one of rich's, and a last one of `pictures`, if there are."""
    from rich import box
    from rich import table as rich_table
    from rich.text import Text

    grid = rich_table.Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), collapse_padding=True)
    for column in columns:
        number, texts = table.is_number(column), [text_of(row, column) for row in table.rows]
        parts = [*(texts if number else " ".join(texts).split()), *column.title.split()]
        options: Any = {"justify": "right" if number else "left", "no_wrap": number, "overflow": "fold"}
        grid.add_column(column.title, **options, min_width=min(WORD, max(map(len, parts))))
    if pictures:
        grid.add_column("intervals", no_wrap=True, min_width=STRIP)
    for row, picture in zip(table.rows, pictures or [""] * len(table.rows), strict=True):
        grid.add_row(*(Text(text_of(row, column)) for column in columns), *([picture] if pictures else []))
    return grid


def interval_strips(rows: Sequence[dict[str, Any]]) -> list[str]:
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
        pictures.append(line if span else "")
    return pictures


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of figures, their keys as the heads of the columns."""
    import pandas

    print(pandas.DataFrame(rows).to_string(index=False, na_rep="-", float_format="{:.4g}".format))


def filled(template: str, report: Any = None, **facts: Any) -> str:
    """Return a template of this folder, filled; in one of HTML nothing that is filled in is markup."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    html, loader = ".html." in template, FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=loader, autoescape=html, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {"escaped": escaped, "tex": tex}
    return page.get_template(template).render(facts, report=report, text_of=text_of).rstrip() + "\n"


def escaped(text: object) -> str:
    """Return text on one line that is no markup of Markdown: no column, tag, link, picture or code."""
    return re.sub(r"([\\|\[`])", r"\\\1", printable(" ".join(str(text).split()))).replace("<", "&lt;")


def tex(text: str) -> str:
    """Return text in which nothing is a command of LaTeX; what its usual fonts lack is a question mark."""
    return "".join(LETTERS.get(letter, letter if " " <= letter <= "~" else "?") for letter in text)
