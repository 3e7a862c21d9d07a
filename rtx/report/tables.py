"""A table, its raw values by key and what is shown of them, also on a terminal; and pages filled from templates."""

import io
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rtx.errors import printable

DASH = "\N{EN DASH}"  # what stands where there is nothing to say
CUT = "\N{HORIZONTAL ELLIPSIS}"  # what stands where a text was cut
MINUS = "\N{MINUS SIGN}"
STRIP = 13  # letters of the picture of the intervals beside a ranked table
GAP = 2  # columns between two columns of a table
BESIDE = 30  # columns that names in the first column leave to the others, or else they are broken
WORD = 16  # letters of a word that a terminal breaks at the earliest
LEAST, ROOMY = 80, 96  # columns that a table takes at least, and with that picture
LETTERS = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "-": "{-}",
}
LETTERS |= {
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "[": "{[}",
    "*": "{*}",
}
LETTERS |= {
    DASH: r"\textendash{}",
    MINUS: "$-$",
    "±": r"$\pm$",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}
"""Of LaTeX, for what it would take for a command."""


@dataclass(frozen=True)
class Column:
    """A column that is shown: the key of its values, of what stands behind their ±, and of a remark behind a comma."""

    key: str
    title: str
    digits: int | None = None  # digits behind the point; None: a text, or a whole number
    error: str = ""
    brief: bool = True  # whether it is also printed to the terminal
    remark: str = ""


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
        return [
            column
            for column in kept
            if any(row.get(column.key) not in (None, "") for row in self.rows)
        ]

    def is_number(self, column: Column) -> bool:
        return any(isinstance(row.get(column.key), int | float) for row in self.rows)


def text_of(row: dict[str, Any], column: Column) -> str:
    value, error = row.get(column.key), row.get(column.error)
    if value is None or value == "":
        return DASH
    if isinstance(value, str):
        return value
    said = f"{value:,}" if column.digits is None else f"{value:,.{column.digits}f}"
    if not said.strip("-0.,"):
        said = said.removeprefix("-")  # of a zero
    remark = row.get(column.remark)
    said = said.replace("-", MINUS) + (
        "" if error is None else f" ± {error:,.{column.digits or 0}f}"
    )
    return f"{said}, {remark}" if remark else said


def terminal(table: Table, width: int = 80, strip: bool = False) -> str:
    """Return the brief columns of a table for a terminal of so many columns, the lines above it wrapped.

    The table takes `LEAST` at least. `strip`: whether to draw the interval of each row beside it, where there is room.
    """
    from rich.console import Console

    out, columns, room = io.StringIO(), table.shown(brief=True), max(width, LEAST)
    widths = column_widths(table, columns, room)
    while len(columns) > 1 and not fits(widths, room):  # the files of the report have all columns
        columns = columns[:-1]
        widths = column_widths(table, columns, room)
    pictures: Sequence[str] = ()
    narrower = room - STRIP - GAP
    if strip and width >= ROOMY and fits(column_widths(table, columns, narrower), narrower):
        pictures = interval_strips(table.rows)
        widths = column_widths(table, columns, narrower)
    console = Console(file=out, width=room, color_system=None, highlight=False)
    console.print(grid_of(table, columns, widths, pictures))
    above = [part for line in (table.title, *table.lines) for part in textwrap.wrap(line, width)]
    return printable(
        "\n".join([*above, "", *(line.rstrip() for line in out.getvalue().splitlines())])
    )


def fits(widths: Sequence[int], room: int) -> bool:
    """Tell whether columns of these widths, with gaps between them, leave the terminal's right edge alone."""
    return sum(widths) + GAP * (len(widths) - 1) <= room


def column_widths(table: Table, columns: Sequence[Column], room: int) -> list[int]:
    """Return the width of each column in a terminal of `room` columns; more than fit where their least do not.

    Numbers are never broken, nor are the names in the first column where they leave `BESIDE` columns to the others.
    What is left over goes to texts, the first column first.
    """
    least, most = [], []
    for column in columns:
        texts = [text_of(row, column) for row in table.rows]
        longest = max(map(len, texts), default=0)
        longest_word = max(map(len, " ".join([*texts, column.title]).split()))
        of_title = max(map(len, heading(table, column).splitlines()))
        is_name = column == columns[0] and longest <= room - BESIDE
        unbroken = table.is_number(column) or is_name
        least.append(max(longest, of_title) if unbroken else min(WORD, longest_word))
        most.append(max(longest, of_title))
    spare = room - sum(least) - GAP * (len(columns) - 1)
    for at, wish in enumerate(most):
        more = max(0, min(spare, wish - least[at]))
        least[at] += more
        spare -= more
    return least


def heading(table: Table, column: Column) -> str:
    """Return the title of a column, on several lines where its numbers are narrower than it."""
    if not table.is_number(column):
        return column.title
    longest = max((len(text_of(row, column)) for row in table.rows), default=0)
    words = map(len, column.title.split())
    return textwrap.fill(column.title, max(longest, *words), break_on_hyphens=False)


def grid_of(
    table: Table, columns: Sequence[Column], widths: Sequence[int], pictures: Sequence[str] = ()
) -> Any:
    """Return columns of a table as one of rich's, and a last one of `pictures`, if there are."""
    from rich import box
    from rich import table as rich_table
    from rich.text import Text

    grid = rich_table.Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), collapse_padding=True
    )
    for column, width in zip(columns, widths, strict=True):
        justify: Any = "right" if table.is_number(column) else "left"
        grid.add_column(heading(table, column), justify=justify, overflow="fold", width=width)
    if pictures:
        grid.add_column("intervals", no_wrap=True, width=STRIP)
    for row, picture in zip(table.rows, pictures or [""] * len(table.rows), strict=True):
        grid.add_row(
            *(Text(text_of(row, column)) for column in columns), *([picture] if pictures else [])
        )
    return grid


def interval_strips(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a picture of each row's score and interval, on a scale common to all rows with seeds."""
    spans = [
        [row["ours"] + sign * (row.get("half") or 0) for sign in (-1, 0, 1)]
        if row.get("seeds")
        else []
        for row in rows
    ]
    every = [value for span in spans for value in span]
    scale = (STRIP - 1) / ((max(every) - min(every)) or 1) if every else 0
    pictures = []
    for span in spans:
        low, middle, high = [round((value - min(every)) * scale) for value in span] or (0, 0, 0)
        line = " " * low + "─" * (middle - low) + "●" + "─" * (high - middle)
        pictures.append(line if span else "")
    return pictures


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows of texts as lines of columns, those at the places in `right` flush right; nothing is broken."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        places = enumerate(zip(row, widths, strict=True))
        texts = [
            text.rjust(width) if at in right else text.ljust(width) for at, (text, width) in places
        ]
        lines.append((" " * GAP).join(texts).rstrip())
    return lines


def shortened(texts: Sequence[str], room: int) -> list[str]:
    """Return overrides (`key=value key=value`, a text for each run) in at most `room` letters, all in the same way.

    Where one is longer, keys are called by their last part, if that names one key alone; what is still longer is cut.
    """
    if max(map(len, texts), default=0) <= room:
        return list(texts)
    keys = {word.partition("=")[0] for text in texts for word in text.split() if "=" in word}
    leaves = Counter(key.rpartition(".")[2] for key in keys)
    found = []
    for text in texts:
        words = [short_key(word, leaves) for word in text.split()]
        line = " ".join(words)
        found.append(line if len(line) <= room else line[: max(0, room - 1)] + CUT)
    return found


def short_key(word: str, leaves: Mapping[str, int]) -> str:
    """Return an override with the last part of its key, where `leaves` counts one key with that part."""
    key, equals, value = word.partition("=")
    leaf = key.rpartition(".")[2]
    return f"{leaf}={value}" if equals and leaves[leaf] == 1 else word


def print_table(rows: list[dict[str, Any]], columns: Sequence[Column]) -> None:
    """Print columns of rows; where the terminal is too narrow, in parts below each other, each with the first column.

    Without a terminal they are as wide as they are.
    """
    width = shutil.get_terminal_size(fallback=(10_000, 24)).columns
    table = Table("", columns, rows)
    name, *others = table.shown()
    part = [name]
    for column in others:
        if len(part) > 1 and not fits(
            list(map(partial(text_width, table), [*part, column])), width
        ):
            print("\n".join([*plain(table, part), ""]))
            part = [name]
        part.append(column)
    print("\n".join(plain(table, part)))


def text_width(table: Table, column: Column) -> int:
    """Return the columns of a terminal that a column takes unbroken."""
    return max(len(column.title), *(len(text_of(row, column)) for row in table.rows))


def plain(table: Table, columns: Sequence[Column]) -> list[str]:
    """Return lines with columns of a table."""
    rows = [[text_of(row, column) for column in columns] for row in table.rows]
    numbers = {at for at, column in enumerate(columns) if table.is_number(column)}
    return aligned([[column.title for column in columns], *rows], numbers)


def filled(template: str, report: Any = None, **facts: Any) -> str:
    """Return a template of this folder, filled; in one of HTML nothing that is filled in is markup."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    html, loader = ".html." in template, FileSystemLoader(Path(__file__).parent)
    page = Environment(
        loader=loader,
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters |= {"escaped": escaped, "tex": tex}
    return page.get_template(template).render(facts, report=report, text_of=text_of).rstrip() + "\n"


def escaped(text: object) -> str:
    """Return text on one line that is no markup of Markdown: no column, tag, link, picture or code."""
    return re.sub(r"([\\|\[`])", r"\\\1", printable(" ".join(str(text).split()))).replace(
        "<", "&lt;"
    )


def tex(text: str) -> str:
    """Return text in which nothing is a command of LaTeX; what its usual fonts lack is a question mark."""
    return "".join(LETTERS.get(letter, letter if " " <= letter <= "~" else "?") for letter in text)
