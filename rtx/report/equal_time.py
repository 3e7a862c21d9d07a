"""Scores at equal time: what each row had reached when the first one of them ended.

That needs a learning rate that stays constant after its warm-up: then a validation on the way is the score of a run of
that length. With a schedule that falls, a shorter run would have fallen earlier, and nothing is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rtx.report.cells import Cell
from rtx.report.compared import sight
from rtx.report.names import labels_of
from rtx.report.scores import Protocol, Row, Score, row_key, seed_of, sees_future, standings
from rtx.report.steps import DRAWN, StepRecord, follows_counts
from rtx.report.values import real, whole
from rtx.report.views import Column, Value, View, count, number, text
from rtx.training.progress import clock

SAME = ("data.length", "eval.stride", "trainer.val_windows")
"""What rows share, beside their data, for their validations to be of the same units in the same context."""

COLUMNS = (
    Column("run", "run", brief=True),
    Column("steps_per_second", "steps/s", True, brief=True),
    Column("trained", "steps by then", True, brief=True),
    Column("ours", "bits", True, brief=True),
    Column("error", "± seeds", True, brief=True),
    Column("seeds", "seeds", True, brief=True),
    Column("sees_future", "sees future", brief=True),
    Column("standing", "standing"),
)


def equal_time_views(cells: Sequence[Cell], records: Sequence[StepRecord]) -> list[View]:
    """Return a table for each data set and protocol with several rows that can be compared at equal time.

    Args:
        cells: the runs; only those that are done count.
        records: step times; where some have all rows, the newest gives the paces (they were taken in turn), else the
            runs' own do, if all were on one machine. Ids drawn at random are no measure where the data decide how long
            a step takes.
    """
    groups: dict[tuple[str, ...], dict[object, Row]] = {}
    for cell in cells:
        if cell.state == "done" and cell.config.get("optimizer.schedule") == "constant":
            data = str(cell.data.get("fingerprint") or cell.config.get("data.name"))
            key = (data, *(str(cell.config.get(name)) for name in SAME))
            groups.setdefault(key, {}).setdefault(row_key(cell), Row([])).cells.append(cell)
    views = [equal_time_view(list(rows.values()), records) for rows in groups.values()]
    return [view for view in views if view]


def equal_time_view(rows: Sequence[Row], records: Sequence[StepRecord]) -> View | None:
    """Return the table of some rows; None where they are not several with a pace."""
    paces, source = paces_of(rows, records)
    names = [name.replace(" selection=", " ") for name in labels_of(rows)]
    if len(rows) < 2 or None in paces:
        return None
    timed = {id(row): pace for row, pace in zip(rows, paces, strict=True) if pace is not None}
    first = min(rows, key=lambda row: row.step / timed[id(row)])
    seconds = first.step / timed[id(first)]
    by_then = {id(row): min(seconds * timed[id(row)], row.step) if row is not first else row.step for row in rows}
    for row in rows:
        row.scores = [score for cell in row.cells if (score := score_at(cell, by_then[id(row)]))]
    known = [(row, name) for row, name in zip(rows, names, strict=True) if row.scores]
    if len(known) < 2:
        return None
    words, claim = standings([row for row, _ in known], names=[name for _, name in known])
    view = View("Equal time", COLUMNS, [], lines_above(known, names[rows.index(first)], seconds, source, claim))
    if missing := [name for row, name in zip(rows, names, strict=True) if not row.scores]:
        view.lines.append(f"Left out, for want of a validation by then: {', '.join(missing)}.")
    for (row, name), word in zip(known, words, strict=True):
        steps = by_then[id(row)]
        view.rows.append(
            [
                text(name),
                number(timed[id(row)]),
                Value(f"{steps:,.0f} of {row.step:,}", steps),
                number(row.mean(), 4),
                number(row.error(), 4),
                count(len(row.values())),
                sight(row),
                text(word),
            ]
        )
    return view.without_empty()


def lines_above(known: Sequence[tuple[Row, str]], first: str, seconds: float, source: str, claim: str) -> list[str]:
    """Return the lines above the table: how much time it is, and what the scores are."""
    scores = [score for row, _ in known for score in row.scores]
    protocol, units = scores[0].protocol, {score.units for score in scores}
    scored = f"{units.pop():,} {protocol.unit}s" if len(units) == 1 else f"some {protocol.unit}s"
    return [
        f"{clock(seconds)} of training: {first} ends first, with all its steps; {source}.",
        f"Bits of {scored} of split valid of {protocol.data}, windows of {protocol.length:,}, teacher-forced; between "
        "two validations they are taken to fall in a straight line. The learning rate is constant after its warm-up: "
        "these are scores of runs of that length.",
        claim,
    ]


def paces_of(rows: Sequence[Row], records: Sequence[StepRecord]) -> tuple[list[float | None], str]:
    """Return the steps a second of each row, and where they come from; None for rows that cannot be compared."""
    by_data = any(follows_counts(row.cells[0].config) for row in rows)
    usable = [record for record in records if not (by_data and record.facts.get("ids") == DRAWN)]
    for record in sorted(usable, key=lambda record: str(record.facts.get("time")), reverse=True):
        keys = [row_key(Cell(Path(), row.config)) for row in record.rows]
        timed = {key: row.speed for key, row in zip(keys, record.rows, strict=True) if keys.count(key) == 1}
        paces = [timed.get(row_key(row.cells[0])) for row in rows]
        if None not in paces:
            return paces, f"paces as rtx bench steps measured them in turn ({record.facts.get('device')})"
    one_machine = len({row.machine for row in rows}) == 1
    source = "paces as the runs had them, whatever else ran there"
    if len(usable) < len(records):
        source += " (those of rtx bench steps are of ids drawn at random, which fill clusters more evenly than data do)"
    return [row.speed if one_machine else None for row in rows], source


def score_at(cell: Cell, step: float) -> Score | None:
    """Return the score of a run at some step, between the validations before and after it; None before the first."""
    found = {
        whole(row.get("step")): (bits, whole(row.get("val_units")))
        for row in cell.metrics
        if row.get("kind") == "valid" and (bits := real(row.get("val_bits"))) is not None
    }
    before = max((at for at in found if at <= step), default=None)
    after = min((at for at in found if at >= step), default=None)
    if before is None or after is None:
        return None
    share = (step - before) / (after - before) if after > before else 0.0
    bits = (1 - share) * found[before][0] + share * found[after][0]
    unit, length = str(cell.data.get("unit", "unit")), whole(cell.config.get("data.length"))
    stride = whole(cell.config.get("eval.stride")) or length
    protocol = Protocol("valid", "parallel", unit, str(cell.data.get("name", "")), "", length, stride)
    return Score(protocol, bits, found[before][1], sees_future(cell.config), seed=seed_of(cell))
