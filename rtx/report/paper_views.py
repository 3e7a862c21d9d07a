"""The paper's tables in a report: their numbers, and which of their rows have been run."""

from collections.abc import Sequence

from rtx.report.divergences import PAPER_KINDS
from rtx.report.paper import PaperTable, paper_tables, table_of
from rtx.report.run_records import Cell
from rtx.report.score_rows import Row
from rtx.report.score_tables import departures
from rtx.tables import Column, Entry, Table

COLUMNS = (
    Column("table", "table", brief=False),
    Column("about", "about", brief=False),
    Column("run", "run here", brief=False),
    Column("command", "command", brief=False),
)
"""Of the list of tables."""


def list_of_tables(cells: Sequence[Cell]) -> Table:
    """Return the paper's tables with the number of rows that have been run, and their commands."""
    entries = []
    for table in paper_tables():
        entries.append(
            {
                "table": f"Table {table.number}",
                "about": table.title,
                "run": rows_run(table, cells),
                "command": "; ".join(table.commands),
            }
        )
    return Table("The paper's tables", COLUMNS, entries)


def rows_run(table: PaperTable, cells: Sequence[Cell]) -> str:
    """Return how many rows of a table have been run, in words."""
    with_score = [cell for cell in cells if cell.final or cell.scores]
    rows = [Row(unscored=[cell]) for cell in with_score if table_of(cell.config) == table]
    equal = [row for row in rows if not departures(row, table)]
    count = count_printed(rows, table)
    if not count:
        return "not run"
    equal_count = count_printed(equal, table)
    return f"{count} of {len(table.rows)} rows, {equal_count} of them with the paper's settings"


def count_printed(rows: Sequence[Row], table: PaperTable) -> int:
    """Return how many rows of a table of the paper are among some rows."""
    printed = {table.row_of(row.config) for row in rows}
    return len(printed - {None})


def printed_view(table: PaperTable) -> Table:
    """Return a table of the paper with the numbers that it prints."""
    if table.divergences:
        return divergences_view(table)
    entries = []
    for row in table.rows:
        entries.append(
            {
                "row": row.label,
                "layers": row.layers,
                "heads": row.heads,
                "value": row.value,
                "steps_per_second": row.steps_per_second,
            }
        )
    values = [row.value for row in table.rows]
    speeds = [row.steps_per_second for row in table.rows]
    columns = [
        Column("row", "row"),
        Column("layers", "layers"),
        Column("heads", "heads"),
        Column("value", table.metric, most_decimals(values)),
        Column("steps_per_second", "steps/s", most_decimals(speeds)),
    ]
    return Table("", columns, entries)


def divergences_view(table: PaperTable) -> Table:
    """Return the paper's divergences of heads, by layer and kind of pair."""
    entries = []
    for layer, spreads in enumerate(table.divergences):
        entry: Entry = {"layer": str(layer)}
        for kind, spread in zip(PAPER_KINDS, spreads, strict=True):
            entry[kind] = spread.mean
            entry[f"{kind} deviation"] = spread.deviation
        entries.append(entry)
    columns = [Column("layer", "layer")]
    columns += [Column(kind, kind, 4, f"{kind} deviation") for kind in PAPER_KINDS]
    return Table("", columns, entries)


def most_decimals(values: Sequence[float | None]) -> int:
    """Return the most digits behind the point of some numbers."""
    return max(len(str(value).partition(".")[2]) for value in values)
