"""Scores at equal time: what each row had reached when the first one of them ended.

That needs a learning rate that stays constant after its warm-up: then a validation on the way is the score of a run of
that length. With a schedule that falls, a shorter run would have fallen earlier, and nothing is shown.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rtx.report.cells import Cell
from rtx.report.compared import sight
from rtx.report.names import labels_of
from rtx.report.scores import Protocol, Row, Score, row_key, seed_of, sees_future, standings
from rtx.report.steps import DRAWN, FOLLOWS_COUNTS, StepRecord, follows_counts
from rtx.report.values import real, whole
from rtx.report.views import Column, Value, View, count, number, text
from rtx.training.progress import clock

Course = Sequence[tuple[float, int]]
"""Seconds of training steps, and how many steps had been taken by then; from the beginning on."""

SAME = ("data.length", "trainer.val_stride", "trainer.val_windows")
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


@dataclass(frozen=True)
class Timed:
    """A row with how far each of its runs had come after how much time."""

    row: Row
    name: str
    courses: Mapping[int, Course]
    """By the number of the run's object."""
    doubtful: bool = False
    """Whether the data might slow it down, where the pace is of drawn ids."""

    @property
    def end(self) -> float:
        """Seconds after which all of its runs have taken all their steps."""
        return max(course[-1][0] for course in self.courses.values())

    def steps_by(self, seconds: float) -> dict[int, float]:
        """Return how many steps each of its runs had taken, by the number of the run's object."""
        return {key: step_by(course, seconds) for key, course in self.courses.items()}


def equal_time_views(cells: Sequence[Cell], records: Sequence[StepRecord]) -> list[View]:
    """Return a table for each data set, unit and context whose runs have a constant learning rate.

    Args:
        cells: the runs; only those that are done count.
        records: step times; where some have all rows, the newest gives the paces (they were taken in turn), else the
            runs' own steps do, if all were on one machine. Time in validations and checkpoints does not count.
    """
    groups: dict[tuple[str, ...], dict[object, Row]] = {}
    for cell in cells:
        if cell.state == "done" and cell.step and cell.config.get("optimizer.schedule") == "constant":
            data = str(cell.data.get("fingerprint") or cell.config.get("data.name"))
            key = (data, *(str(cell.config.get(name)) for name in SAME))
            groups.setdefault(key, {}).setdefault(row_key(cell), Row([])).cells.append(cell)
    views = [equal_time_view(list(rows.values()), records) for rows in groups.values()]
    return [view for view in views if view]


def equal_time_view(rows: Sequence[Row], records: Sequence[StepRecord]) -> View | None:
    """Return the table of some rows; None where they are not several with a pace."""
    timed, source = timed_rows(rows, records)
    if len(timed) < 2:
        return None
    first = min([each for each in timed if not each.doubtful] or timed, key=lambda each: each.end)
    for each in timed:
        by_then = each.steps_by(first.end)
        each.row.scores = [score for cell in each.row.cells if (score := score_at(cell, by_then[id(cell)]))]
    known = [each for each in timed if each.row.scores]
    if len(known) < 2:
        return None
    sure = [each for each in known if not each.doubtful]
    words, claim = standings([each.row for each in sure], names=[each.name for each in sure])
    standing = {id(each): word for each, word in zip(sure, words, strict=True)}
    view = View("Equal time", COLUMNS, [], lines_above(known, first, source, claim))
    if any(each.doubtful for each in known):
        view.lines.append(f"{FOLLOWS_COUNTS}: such rows are not ranked, and their steps by then are at the most.")
    if missing := [each.name for each in timed if not each.row.scores]:
        view.lines.append(f"Left out, for want of a validation by then: {', '.join(missing)}.")
    for each in known:
        row, steps = each.row, statistics.fmean(each.steps_by(first.end).values())
        view.rows.append(
            [
                text(each.name),
                number(row.step / each.end),
                Value(f"{steps:,.0f} of {row.step:,}", steps),
                number(row.mean(), 4),
                number(row.error(), 4),
                count(len(row.values())),
                sight(row),
                text(standing.get(id(each), "not ranked")),
            ]
        )
    return view.without_empty()


def lines_above(known: Sequence[Timed], first: Timed, source: str, claim: str) -> list[str]:
    """Return the lines above the table: how much time it is, and what the scores are."""
    scores = [score for each in known for score in each.row.scores]
    protocol, units = scores[0].protocol, {score.units for score in scores}
    scored = f"{units.pop():,} {protocol.unit}s" if len(units) == 1 else f"some {protocol.unit}s"
    return [
        f"{clock(first.end)} of training steps: {first.name} ends first, with all its steps; {source}. Standard errors "
        "are over seeds; that of the paces is not in them.",
        f"Bits of {scored} of split valid of {protocol.data}, windows of {protocol.length:,}, teacher-forced; between "
        "two validations they are taken to fall in a straight line. The learning rate is constant after its warm-up: "
        "these are scores of runs of that length.",
        claim,
    ]


def timed_rows(rows: Sequence[Row], records: Sequence[StepRecord]) -> tuple[list[Timed], str]:
    """Return the rows with the time that their steps take, and where that comes from; none if it cannot be compared."""
    names = labels_of(rows)
    for record in sorted(records, key=lambda record: str(record.facts.get("time")), reverse=True):
        keys = [row_key(Cell(Path(), row.config)) for row in record.rows]
        paces = {key: row.speed for key, row in zip(keys, record.rows, strict=True) if row.speed}
        if all(row_key(row.cells[0]) in paces for row in rows):
            drawn = record.facts.get("ids") == DRAWN
            timed = []
            for row, name in zip(rows, names, strict=True):
                pace = paces[row_key(row.cells[0])]
                courses = {id(cell): [(0.0, 0), (cell.step / pace, cell.step)] for cell in row.cells}
                timed.append(Timed(row, name, courses, drawn and follows_counts(row.config)))
            return timed, f"paces as rtx bench steps measured them in turn ({record.facts.get('device')})"
    own = [Timed(row, name, own_courses(row)) for row, name in zip(rows, names, strict=True)]
    one_machine = len({row.machine for row in rows}) == 1 and all(each.courses for each in own)
    return own if one_machine else [], "paces as the runs had them, whatever else ran there"


def own_courses(row: Row) -> dict[int, Course]:
    """Return how far each run of a row had come in how much time, by its own rows; empty where one of them has none."""
    units = whole(row.config.get("trainer.batch_size")) * whole(row.config.get("data.length"))
    courses = {}
    for cell in row.cells:
        paces = {
            whole(each.get("step")): pace
            for each in cell.metrics
            if each.get("kind") == "train" and (pace := real(each.get("tokens_per_second"))) and pace > 0
        }
        course, seconds = [(0.0, 0)], 0.0
        for step, pace in sorted(paces.items()):
            seconds += (step - course[-1][1]) * units / pace
            course.append((seconds, step))
        courses[id(cell)] = course
    return courses if units and all(len(course) > 1 for course in courses.values()) else {}


def step_by(course: Course, seconds: float) -> float:
    """Return how many steps had been taken by some time."""
    for (before, done), (after, step) in itertools.pairwise(course):
        if seconds < after:
            return done + (step - done) * (seconds - before) / (after - before)
    return course[-1][1]


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
    stride = whole(cell.config.get("trainer.val_stride")) or length
    protocol = Protocol("valid", "parallel", unit, str(cell.data.get("name", "")), "", length, stride)
    return Score(protocol, bits, found[before][1], sees_future(cell.config), seed=seed_of(cell))
