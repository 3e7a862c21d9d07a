"""A report on a terminal."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

from rtx.report.tables import Table

STRIP = 17
"""Letters of the picture of the intervals beside a ranked table."""


def terminal(table: Table, width: int = 80, brief: bool = True, strip: bool = False) -> str:
    """Return the brief columns of a table, the lines above it wrapped.

    Args:
        table: the table.
        width: columns of the terminal.
        brief: whether to leave out what only a page has room for.
        strip: whether to draw the interval of each row beside it.
    """
    from rich import box
    from rich import table as rich_table
    from rich.console import Console

    shown, texts = table.shown(brief), table.texts(brief)
    grid = rich_table.Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for column in shown:
        number = table.is_number(column)
        grid.add_column(column.title, justify="right" if number else "left", no_wrap=number, overflow="fold")
    strips = interval_strips(table.rows) if strip else [[] for _ in table.rows]
    for _ in strips[0] if strips else ():
        grid.add_column("intervals", no_wrap=True)
    for entries, drawn in zip(texts.itertuples(index=False), strips, strict=True):
        grid.add_row(*map(plain, entries), *drawn)
    out = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    out.print(grid)
    assert isinstance(out.file, io.StringIO)
    above = [part for line in (table.title, *table.lines) for part in textwrap.wrap(line, width)]
    return "\n".join([*above, "", *(line.rstrip() for line in out.file.getvalue().splitlines())])


def plain(text: str) -> Any:
    """Return text that is no markup to rich."""
    from rich.text import Text

    return Text(str(text))


def interval_strips(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a picture of each row's score and interval on a common scale."""
    spans = [
        (row["ours"] - (row["half"] or 0), row["ours"], row["ours"] + (row["half"] or 0)) for row in rows if row["ours"]
    ]
    if not spans:
        return [[] for _ in rows]
    low, high = min(first for first, _, _ in spans), max(last for _, _, last in spans)
    pictures = []
    for row in rows:
        half = row["half"] or 0
        places = [row["ours"] - half, row["ours"], row["ours"] + half] if row["ours"] else []
        first, middle, last = [round((value - low) / ((high - low) or 1) * (STRIP - 1)) for value in places] or (
            1,
            0,
            0,
        )
        line = ["─" if first <= at <= last else " " for at in range(STRIP)]
        line[middle] = "●" if places else " "
        pictures.append(["".join(line)])
    return pictures


def tables_list(table: Table, width: int = 80) -> str:
    """Return the list of the paper's tables: for each how much of it was run, and below it what to type for it."""
    lines = []
    for row in table.rows:
        said = f"{row['table']}  {row['about']}: {row['run']}"
        lines += textwrap.wrap(said, width, break_on_hyphens=False, subsequent_indent="    ")
        lines += [f"    {command}" for command in row["command"].split("; ")]
    return "\n".join([table.title, "", *lines])
