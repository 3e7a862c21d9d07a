"""A report on a terminal: the columns that there is room for, notes below their rows."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rtx.report.views import DASH, Column, View

INDENT, GAP = "    ", "  "

WIDEST = 24
"""Letters of the longest entry."""


def terminal(view: View, width: int = 80) -> str:
    """Return the brief columns of a table in even columns, titles in several lines; what was not run is counted.

    Args:
        view: the table.
        width: columns of the terminal; what is named by the table itself may be wider.
    """
    left_out = view.absent | view.waiting
    present = [row for at, row in enumerate(view.rows) if at not in left_out]
    columns = [at for at, one in enumerate(view.columns) if one.brief and one.key != "notes"]
    columns = [at for at in columns if any(row[at].text != DASH for row in present)]
    notes = [own for at, own in enumerate(view.own_notes()) if at not in left_out]
    shared = [note for note in notes[0] if all(note in other for other in notes)] if len(notes) > 1 else []
    heads = [view.columns[at] for at in columns]
    heads, entries = narrowed(heads, [[shortened(row[at].text) for at in columns] for row in present], width)
    own_lines = ["; ".join(note for note in own if note not in shared) for own in notes]
    lines = []
    for block in blocks(heads, entries, width):
        some, sizes = (
            [heads[at] for at in block],
            sizes_of([heads[at] for at in block], [[r[at] for at in block] for r in entries]),
        )
        lines += [*([""] if lines else []), *head_lines(some, sizes)]
        for row, rest in zip(entries, own_lines if block[-1] == len(heads) - 1 else [""] * len(entries), strict=True):
            lines.append(even([row[at] for at in block], some, sizes))
            lines += textwrap.wrap(rest, width, break_on_hyphens=False, initial_indent=INDENT, subsequent_indent=INDENT)
    above = [*view.lines, *([f"All rows: {'; '.join(shared)}."] if shared else [])]
    below = [f"{len(view.waiting)} cell{'s' * (len(view.waiting) > 1)} not started"] if view.waiting else []
    below += [f"{len(view.absent)} of the paper's rows not run"] if view.absent else []
    wrapped = [part for line in [view.title, *above] for part in textwrap.wrap(line, width, break_on_hyphens=False)]
    return "\n".join([*wrapped, "", *lines, *below])


def narrowed(heads: list[Column], entries: list[list[str]], width: int) -> tuple[list[Column], list[list[str]]]:
    """Return columns and entries that take less room where there is too little: every model of the paper is a
    Transformer, and how many seeds there are is said above the table.
    """
    if width_of(sizes_of(heads, entries)) > width:
        entries = [[text.removesuffix(" Transformer") for text in row] for row in entries]
    if width_of(sizes_of(heads, entries)) > width:
        kept = [at for at, column in enumerate(heads) if column.key != "seeds"]
        heads, entries = [heads[at] for at in kept], [[row[at] for at in kept] for row in entries]
    return heads, entries


def blocks(heads: Sequence[Column], entries: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Return the columns of each block of a table: those that say what a row is, and as many others as fit."""
    sizes = sizes_of(heads, entries)
    first = [at for at, column in enumerate(heads) if column.label] or [0]
    found = [list(first)]
    for at in (at for at in range(len(heads)) if at not in first):
        if width_of([sizes[one] for one in [*found[-1], at]]) > width and len(found[-1]) > len(first):
            found.append(list(first))
        found[-1].append(at)
    return found


def width_of(sizes: Sequence[int]) -> int:
    """Return how wide a line is."""
    return sum(sizes) + len(GAP) * (len(sizes) - 1)


def shortened(text: str) -> str:
    """Return text that leaves room for the columns beside it."""
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def sizes_of(columns: Sequence[Column], entries: Sequence[Sequence[str]]) -> list[int]:
    """Return how wide each column is: as its widest entry, and the widest word of its title."""
    words = [[*column.title.split(), *(row[at] for row in entries)] for at, column in enumerate(columns)]
    return [max(map(len, some)) for some in words]


def head_lines(columns: Sequence[Column], sizes: Sequence[int]) -> list[str]:
    """Return the titles, each broken into as many lines as its column is narrow, the last lines level."""
    titles = [textwrap.wrap(column.title, size) for column, size in zip(columns, sizes, strict=True)]
    height = max((len(title) for title in titles), default=0)
    titles = [[""] * (height - len(title)) + title for title in titles]
    return [even([title[line] for title in titles], columns, sizes) for line in range(height)]


def even(entries: Sequence[str], columns: Sequence[Column], sizes: Sequence[int]) -> str:
    """Return a line of entries, numbers to the right."""
    padded = (
        text.rjust(size) if column.number else text.ljust(size)
        for text, column, size in zip(entries, columns, sizes, strict=True)
    )
    return GAP.join(padded).rstrip()


def tables_list(view: View, width: int = 80) -> str:
    """Return the list of the paper's tables: for each how much of it was run, and below it what to type for it."""
    places = {column.key: at for at, column in enumerate(view.columns)}
    lines = []
    for row in view.rows:
        name, about, run = (row[places[key]].text for key in ("table", "title", "run"))
        lines += textwrap.wrap(f"{name}  {about}: {run}", width, break_on_hyphens=False, subsequent_indent=INDENT)
        lines += [f"{INDENT}{command}" for command in row[places["command"]].text.split("; ")]
    return "\n".join([view.title, "", *lines])
