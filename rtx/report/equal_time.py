"""Scores at equal time: what each row had reached when the fastest one had taken its last step.

That needs a learning rate that stays constant after its warm-up: then a validation on the way is the score of a run of
that length. With a schedule that falls, a shorter run would have fallen earlier, and nothing is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rtx.report.cells import Cell
from rtx.report.names import labels_of
from rtx.report.scores import Protocol, Row, Score, row_key, seed_of, sees_future, standings
from rtx.report.steps import StepRecord
from rtx.report.values import real, whole
from rtx.report.views import Column, Value, View, count, number, text
from rtx.training.progress import clock

COLUMNS = (
    Column("run", "run", brief=True),
    Column("steps_per_second", "steps/s", True, brief=True),
    Column("trained", "steps by then", True, brief=True),
    Column("ours", "bits", True, brief=True),
    Column("error", "± seeds", True, brief=True),
    Column("seeds", "seeds", True, brief=True),
    Column("standing", "standing"),
)


def equal_time_views(cells: Sequence[Cell], records: Sequence[StepRecord]) -> list[View]:
    """Return a table for each data set with several rows that can be compared at equal time.

    Args:
        cells: the runs; only those that are done count.
        records: step times; where one has all rows, its paces count (they were taken in turn), else the runs' own.
    """
    groups: dict[str, dict[object, Row]] = {}
    for cell in cells:
        if cell.state == "done" and cell.config.get("optimizer.schedule") == "constant":
            rows = groups.setdefault(str(cell.data.get("fingerprint") or cell.config.get("data.name")), {})
            rows.setdefault(row_key(cell), Row([])).cells.append(cell)
    views = [equal_time_view(list(rows.values()), records) for rows in groups.values()]
    return [view for view in views if view]


def equal_time_view(rows: Sequence[Row], records: Sequence[StepRecord]) -> View | None:
    """Return the table of some rows; None where they are not several with a pace and a validation in time."""
    paces, source = paces_of(rows, records)
    if len(rows) < 2 or None in paces:
        return None
    known = [pace for pace in paces if pace is not None]
    budgets = [row.step / pace for row, pace in zip(rows, known, strict=True)]
    seconds = min(budgets)
    for row, pace in zip(rows, known, strict=True):
        row.scores = [score for cell in row.cells if (score := score_by(cell, seconds * pace))]
    if not all(row.scores for row in rows):
        return None
    names = labels_of(rows)
    words, claim = standings(rows, names=names)
    unit, units = rows[0].scores[0].protocol.unit, {score.units for row in rows for score in row.scores}
    scored = f"{units.pop():,} {unit}s" if len(units) == 1 else f"the {unit}s"
    lines = [
        f"{clock(seconds)} of training, in which {names[budgets.index(seconds)]} took all its steps; {source}.",
        f"Each row's last validation by then: {scored} of split valid, teacher-forced. The learning rate is constant "
        "after its warm-up, so that these are scores of runs of that length.",
        claim,
    ]
    view = View("Equal time", COLUMNS, [], lines)
    for row, pace, name, word in zip(rows, known, names, words, strict=True):
        steps = min(row.step, int(seconds * pace))
        view.rows.append(
            [
                text(name),
                number(pace),
                trained_by(row, steps),
                number(row.mean(), 4),
                number(row.error(), 4),
                count(len(row.values())),
                text(word),
            ]
        )
    return view.without_empty()


def paces_of(rows: Sequence[Row], records: Sequence[StepRecord]) -> tuple[list[float | None], str]:
    """Return the steps a second of each row, and where they come from."""
    for record in records:
        timed = {row_key(Cell(Path(), row.config)): row.speed for row in record.rows}
        paces = [timed.get(row_key(row.cells[0])) for row in rows]
        if None not in paces:
            return paces, "paces as measured in turn by rtx bench steps"
    return [row.speed for row in rows], "paces as the runs had them, whatever else their machine did"


def score_by(cell: Cell, steps: float) -> Score | None:
    """Return the last validation of a run by some step."""
    found = [
        (whole(row.get("step")), bits, whole(row.get("val_units")))
        for row in cell.metrics
        if row.get("kind") == "valid" and (bits := real(row.get("val_bits"))) is not None
    ]
    in_time = [one for one in found if one[0] <= steps]
    if not in_time:
        return None
    _, bits, units = max(in_time)
    unit, length = str(cell.data.get("unit", "unit")), whole(cell.config.get("data.length"))
    protocol = Protocol("valid", "parallel", unit, str(cell.data.get("name", "")), "", length, length)
    return Score(protocol, bits, units, sees_future(cell.config), seed=seed_of(cell))


def trained_by(row: Row, steps: int) -> Value:
    """Return how many steps a row had taken, and the share of its own."""
    return Value(f"{steps:,} of {row.step:,}", steps)
