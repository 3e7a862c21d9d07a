"""The list of the paper's tables: how much of each has been run, and what to type for it."""

from __future__ import annotations

from collections.abc import Sequence

from rtx.report.cells import Cell
from rtx.report.divergence import newest_divergence
from rtx.report.matching import paper_row
from rtx.report.paper import PaperTable, paper_tables, table_of
from rtx.report.views import Column, View, count, text

NOT_RUN = "not run"


def tables_view(cells: Sequence[Cell]) -> View:
    """Return the paper's tables: how many rows of each have a score here, and the commands for the rest."""
    columns = [
        Column("table", "table", brief=True),
        Column("title", "about", brief=True),
        Column("rows", "rows", True),
        Column("run", "run here", brief=True),
        Column("command", "command", brief=True),
    ]
    rows = [
        [
            text(table.name),
            text(table.title),
            count(len(table.rows) or len(table.divergences)),
            text(run_of(table, cells)),
            text("; ".join(table.commands)),
        ]
        for table in paper_tables()
    ]
    return View("The paper's tables", columns, rows)


def run_of(table: PaperTable, cells: Sequence[Cell]) -> str:
    """Return how much of a table there is among these runs."""
    mine = [cell for cell in cells if cell.config and belongs(cell, table)]
    if table.divergences:
        runs = sum(newest_divergence(cell) is not None for cell in mine)
        return f"{runs} run{'s' * (runs > 1)}" if runs else NOT_RUN
    scored = [cell for cell in mine if cell.final is not None or cell.evals]
    done = {paper_row(cell.config, table) for cell in scored} - {None}
    return f"{len(done)} of {len(table.rows)} rows" if done else NOT_RUN


def belongs(cell: Cell, table: PaperTable) -> bool:
    """Tell whether a run can be in a table: Table 6 is about the models of Table 2."""
    own = table_of(cell.config)
    return own is not None and own.number == {6: 2}.get(table.number, table.number)
