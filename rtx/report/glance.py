"""The few rows that answer a long table's question: full, local and random heads beside the best that route."""

from __future__ import annotations

from collections.abc import Sequence

from rtx.report.compared import obstacles, own_digits, speeds, trained
from rtx.report.local import local_speed
from rtx.report.matching import kind_of, paper_row
from rtx.report.names import label_of, labels_of, printed_label
from rtx.report.paper import PaperTable
from rtx.report.scores import Protocol, Row, standings
from rtx.report.views import Column, View, count, number, text

KINDS = {"full": "full attention", "local": "local heads", "random": "random heads", "routing": "routing heads"}

FEWEST = 6
"""Rows from which on a table is long."""


def glance(table: PaperTable, protocol: Protocol | None, rows: Sequence[Row]) -> View | None:
    """Return the row of each kind of heads, of several the one with the fewest bits; None for a short table."""
    scored = [row for row in rows if row.mean(table.metric) is not None]
    if protocol is None or len(scored) < FEWEST:
        return None
    columns = [
        Column("heads", "heads", brief=True),
        Column("ours", f"ours ({table.metric})", True, brief=True),
        Column("error", "± seeds", True, brief=True),
        Column("seeds", "seeds", True, brief=True),
        Column("paper", "paper, same row", True, brief=True),
        Column("speed_ratio", "speed x local", True, brief=True),
        Column("paper_speed_ratio", "paper x local", True, brief=True),
        Column("trained", "steps done", True),
    ]
    view = View("At a glance", columns, [], lines(table, protocol, scored))
    reasons: list[str] = []
    for kind, name in KINDS.items():
        mine = [row for row in scored if kind_of(row.config) == kind]
        if not mine:
            continue
        best = min(mine, key=lambda row: row.mean(table.metric) or 0.0)
        printed = paper_row(best.config, table)
        reasons += obstacles(best, table)
        which = f"{name}: best of {len(mine)}, {label_of(best.config).partition(' ')[2]}" if len(mine) > 1 else name
        view.rows.append(
            [
                text(which),
                number(best.mean(table.metric), own_digits(table)),
                number(best.error(table.metric), 4),
                count(len(best.values(table.metric))),
                number(printed.value if printed else None, table.digits),
                speeds(best.speed, local_speed(best, rows))[1],
                speeds(printed.steps_per_second if printed else None, table.local_speed())[1],
                trained(best, table.steps),
            ]
        )
    view.lines += [f"Not comparable with the paper: {'; '.join(dict.fromkeys(reasons))}."] if reasons else []
    return view.without_empty() if len(view.rows) > 1 else None


def lines(table: PaperTable, protocol: Protocol, rows: Sequence[Row]) -> list[str]:
    """Return what the rows are of, what ordering is claimed, and the paper's best."""
    routing = [printed for printed in table.rows if printed.kind == "routing" and printed.value is not None]
    best = min(routing, key=lambda printed: printed.value or 0.0, default=None)
    said = [
        f"{table.name}, {protocol.split} split of {protocol.data}. {standings(rows, table.metric, labels_of(rows))[1]}"
    ]
    return [*said, f"The paper's best: {printed_label(best)}, {best.value:.3f} {table.metric}."] if best else said
