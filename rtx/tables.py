"""Tables and lists, and how every command prints them on a terminal, with rich.

A `Table` has raw values by key; its columns say how they are shown. `table_text` fits one to a
terminal, `print_table` prints a plain one, `aligned` lines up a list of texts.
"""

from __future__ import annotations

import io
import shutil
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rtx.errors import printable

if TYPE_CHECKING:
    from rich.table import Table as Grid

Entry = dict[str, Any]
"""The values of a row by the keys of columns."""

DASH = "\N{EN DASH}"
"""Shown where a row has no value."""
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
"""At the end of a text that was cut."""
MINUS = "\N{MINUS SIGN}"

GAP = 2
"""Spaces between two columns."""
LEAST_WIDTH = 80
"""Characters of a line that a table takes at least, even in a narrower terminal."""
INTERVALS_FROM = 96
"""The least width of a terminal in which intervals are drawn beside a table."""
INTERVAL_WIDTH = 13
"""Characters of the drawing of an interval."""
OTHERS_WIDTH = 30
"""Characters that unbroken names in the first column leave to the other columns."""
LONGEST_WORD = 16
"""Longer words may be broken."""
NO_TERMINAL = 10_000
"""The width of a line, in characters, where output is no terminal."""


@dataclass(frozen=True)
class Column:
    """How the values of a key are shown.

    Args:
        key: the key of the values in a row.
        digits: digits behind the point; None: a text, or a whole number.
        error: the key of the numbers behind ±; empty: none.
        brief: whether terminals show the column, too.
        remark: the key of remarks behind a comma; empty: none.
    """

    key: str
    title: str
    digits: int | None = None
    error: str = ""
    brief: bool = True
    remark: str = ""


@dataclass
class Table:
    """A table with the lines above and the notes below it.

    Keys of `rows` without a column are in exported files alone.
    """

    title: str
    columns: Sequence[Column]
    rows: list[Entry]
    lines: list[str] = field(default_factory=list)
    notes: Sequence[str] = ()

    def shown(self, brief: bool = False) -> list[Column]:
        """Return the columns that have a value in some row; `brief`: those for a terminal."""
        columns = []
        for column in self.columns:
            has_value = any(row.get(column.key) not in (None, "") for row in self.rows)
            if has_value and (column.brief or not brief):
                columns.append(column)
        return columns

    def is_number(self, column: Column) -> bool:
        """Tell whether a column has a number in some row."""
        return any(isinstance(row.get(column.key), int | float) for row in self.rows)


def text_of(row: Entry, column: Column) -> str:
    """Return the value of a row in a column as text, such as `2.10 ± 0.05, which chose it`."""
    value = row.get(column.key)
    if value is None or value == "":
        return DASH
    if isinstance(value, str):
        return value
    text = number_text(value, column.digits)
    error = row.get(column.error)
    if error is not None:
        text += f" ± {error:,.{column.digits or 0}f}"
    remark = row.get(column.remark)
    return f"{text}, {remark}" if remark else text


def number_text(value: float, digits: int | None) -> str:
    """Return a number with commas between thousands; a rounded zero has no sign."""
    text = f"{value:,}" if digits is None else f"{value:,.{digits}f}"
    is_zero = not text.strip("-0.,")
    if is_zero:
        return text.removeprefix("-")
    return text.replace("-", MINUS)


@dataclass(frozen=True)
class TextColumn:
    """A column as it is printed: numbers at the right and never broken, texts at the left.

    Args:
        heading: on several lines where numbers are narrower than it.
    """

    heading: str
    texts: Sequence[str]
    is_number: bool = False

    @property
    def longest_text(self) -> int:
        return longest(self.texts)

    @property
    def full_width(self) -> int:
        """The width in which nothing is broken."""
        return max(self.longest_text, longest(self.heading.splitlines()))

    @property
    def least_width(self) -> int:
        """The width in which no number is broken, and no word of at most `LONGEST_WORD` letters."""
        if self.is_number:
            return self.full_width
        words = " ".join([*self.texts, self.heading]).split()
        return min(LONGEST_WORD, longest(words))


def table_text(table: Table, width: int = LEAST_WIDTH, intervals: bool = False) -> str:
    """Return a table for a terminal: its title and lines, wrapped, then its brief columns.

    The last columns are left out where they do not fit, but never the first one.

    Args:
        width: the characters of a line; the columns take `LEAST_WIDTH` at least.
        intervals: whether to draw the interval of each row beside it, where there is room.
    """
    room = max(width, LEAST_WIDTH)
    columns = [text_column(table, column) for column in table.shown(brief=True)]
    widths = column_widths(columns, room)
    while len(columns) > 1 and total_width(widths) > room:
        columns = columns[:-1]
        widths = column_widths(columns, room)
    if intervals and width >= INTERVALS_FROM:
        rest = room - INTERVAL_WIDTH - GAP
        narrower = column_widths(columns, rest)
        if total_width(narrower) <= rest:
            columns.append(TextColumn("intervals", interval_drawings(table.rows)))
            widths = [*narrower, INTERVAL_WIDTH]
    lines: list[str] = []
    for text in (table.title, *table.lines):
        lines += textwrap.wrap(text, width)
    return printable("\n".join([*lines, "", *ruled_lines(columns, widths)]))


def text_column(table: Table, column: Column) -> TextColumn:
    """Return a column of a table as it is printed."""
    texts = [text_of(row, column) for row in table.rows]
    if not table.is_number(column):
        return TextColumn(column.title, texts)
    heading_width = max(longest(texts), longest(column.title.split()))
    heading = textwrap.fill(column.title, heading_width, break_on_hyphens=False)
    return TextColumn(heading, texts, is_number=True)


def longest(texts: Collection[str]) -> int:
    """Return the width of the widest text in columns of a terminal; 0 without texts."""
    from rich.cells import cell_len  # here: most commands print no table

    return max(map(cell_len, texts), default=0)


def total_width(widths: Sequence[int]) -> int:
    """Return the width of columns with the gaps between them."""
    return sum(widths) + GAP * (len(widths) - 1)


def column_widths(columns: Sequence[TextColumn], room: int) -> list[int]:
    """Return the widths of columns in `room`, or their least widths, where these do not fit.

    Names in the first column are unbroken where they leave `OTHERS_WIDTH` to the others. What is
    left over goes to texts, the first column first.
    """
    widths = [column.least_width for column in columns]
    first = columns[0]
    if first.longest_text <= room - OTHERS_WIDTH:
        widths[0] = first.full_width
    spare = room - total_width(widths)
    for number, column in enumerate(columns):
        more = min(spare, column.full_width - widths[number])
        if more > 0:
            widths[number] += more
            spare -= more
    return widths


def ruled_lines(columns: Sequence[TextColumn], widths: Sequence[int]) -> list[str]:
    """Return the lines of a table with a rule below its headings; longer texts are broken."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )
    for column, width in zip(columns, widths, strict=True):
        justify = "right" if column.is_number else "left"
        grid.add_column(Text(column.heading), justify=justify, overflow="fold", width=width)
    for texts in zip(*(column.texts for column in columns), strict=True):
        grid.add_row(*map(Text, texts))
    return drawn(grid, total_width(widths))


def drawn(grid: Grid, width: int) -> list[str]:
    """Return the lines of a table of rich's, without spaces at their ends."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=max(1, width), color_system=None, highlight=False)
    console.print(grid)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def interval_drawings(rows: Sequence[Entry]) -> list[str]:
    """Return a drawing of each row's score and interval, all on one scale.

    A row without seeds has an empty one.
    """
    spans = [interval_of(row) for row in rows]
    ends: list[float] = []
    for span in spans:
        if span:
            ends += [span[0], span[-1]]
    if not ends:
        return ["" for _ in rows]
    scale = (INTERVAL_WIDTH - 1) / ((max(ends) - min(ends)) or 1)
    drawings = []
    for span in spans:
        places = [round((value - min(ends)) * scale) for value in span]
        drawings.append(interval_drawing(*places) if places else "")
    return drawings


def interval_of(row: Entry) -> list[float]:
    """Return the low end, the middle and the high end of a row's interval; empty without seeds."""
    if not row.get("seeds"):
        return []
    half = row.get("half") or 0
    return [row["ours"] - half, row["ours"], row["ours"] + half]


def interval_drawing(low: int, middle: int, high: int) -> str:
    """Return a line from `low` to `high` with a point at `middle`, all counted from the left."""
    return " " * low + "─" * (middle - low) + "●" + "─" * (high - middle)


def print_table(rows: list[Entry], columns: Sequence[Column]) -> None:
    """Print rows; in a narrow terminal in parts below each other, each with the first column."""
    width = shutil.get_terminal_size(fallback=(NO_TERMINAL, 24)).columns
    table = Table("", columns, rows)
    name, *others = [plain_column(table, column) for column in table.shown()]
    part = [name]
    for column in others:
        widths = [one.full_width for one in (*part, column)]
        if len(part) > 1 and total_width(widths) > width:
            print_part(part)
            print()
            part = [name]
        part.append(column)
    print_part(part)


def plain_column(table: Table, column: Column) -> TextColumn:
    """Return a column of a table with its heading on one line."""
    texts = [text_of(row, column) for row in table.rows]
    return TextColumn(column.title, texts, table.is_number(column))


def print_part(columns: Sequence[TextColumn]) -> None:
    """Print columns without a rule."""
    rows = zip(*([column.heading, *column.texts] for column in columns), strict=True)
    right = {number for number, column in enumerate(columns) if column.is_number}
    print("\n".join(aligned(list(rows), right)))


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return a line for each row of texts, in columns as wide as they need.

    `right`: the numbers of the columns that are aligned at their right edge.
    """
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=None, show_header=False, pad_edge=False, padding=(0, GAP, 0, 0))
    widths = [longest(texts) for texts in zip(*rows, strict=True)]
    for number, width in enumerate(widths):
        justify = "right" if number in right else "left"
        grid.add_column(justify=justify, no_wrap=True, width=width)
    for row in rows:
        grid.add_row(*map(Text, row))
    return drawn(grid, total_width(widths))


def room_for(column: int, rows: Sequence[Sequence[str]], width: int) -> int:
    """Return how many of `width` characters the other columns of a list leave to one of them."""
    room = width
    for number, texts in enumerate(zip(*rows, strict=True)):
        if number != column:
            room -= longest(texts) + GAP
    return room


def shortened(texts: Sequence[str], room: int) -> list[str]:
    """Return overrides (`key=value key=value`, a text for each run) in at most `room` letters.

    Where one is longer, keys are named by their last part in all texts, if no other key has that
    part. What is still longer is cut.
    """
    if longest(texts) <= room:
        return list(texts)
    keys = set()
    for text in texts:
        keys |= {word.partition("=")[0] for word in text.split() if "=" in word}
    last_parts = Counter(key.rpartition(".")[2] for key in keys)
    short_texts = []
    for text in texts:
        line = " ".join(short_override(word, last_parts) for word in text.split())
        if len(line) > room:
            line = line[: max(0, room - 1)] + ELLIPSIS
        short_texts.append(line)
    return short_texts


def short_override(word: str, last_parts: Mapping[str, int]) -> str:
    """Return an override with the last part of its key, if that part is of one key alone."""
    key, equals, value = word.partition("=")
    last_part = key.rpartition(".")[2]
    return f"{last_part}={value}" if equals and last_parts[last_part] == 1 else word
