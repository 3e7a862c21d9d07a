"""Step times that `benchmarks/steps.py` recorded, beside the paper's.

Nothing here imports torch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rtx.errors import plural
from rtx.report.paper import (
    Config,
    PaperTable,
    kind_of,
    numbered,
    setting_lines,
    table_of,
)
from rtx.report.ranking import Error, half_interval, mean
from rtx.report.run_records import Cell
from rtx.report.score_rows import Row, RowKey, name_rows, row_key
from rtx.runs.records import StepsRecord
from rtx.settings.schema import all_fields, flat
from rtx.tables import Column, Table

OTHER = 99
"""In place of the number of a table, for rows that are in none of the paper's."""

PAPER_KEYS = ("paper_steps_per_second", "paper_speed_ratio")

EQUAL_KEYS = (
    "data.length",
    "trainer.batch_size",
    "hardware.threads",
    "hardware.precision",
    "hardware.compile",
)
"""Keys of equal values in two rows whose speeds are compared."""


@dataclass(frozen=True)
class TimedRow:
    """The timed steps of a configuration.

    Args:
        turns: milliseconds of a step in each turn.
        reason: why it was left out, or why its times are not those of training.
    """

    config: Config
    turns: Sequence[float]
    reason: str = ""
    parameters: int | None = None

    @property
    def speed(self) -> float:
        """Steps a second, of the geometric mean over turns, whose errors are multiples.

        0 where there are no turns.
        """
        return 1e3 / math.exp(mean(np.log(self.turns))) if self.turns else 0.0

    @property
    def log_error(self) -> Error | None:
        """The error of the logarithm of the speed; None of a single turn."""
        count = len(self.turns)
        if count < 2:
            return None
        deviation = float(np.std(np.log(self.turns), ddof=1))
        return Error(deviation / math.sqrt(count), freedom=count - 1.0)

    @property
    def half(self) -> float | None:
        """Half the 95% interval of the speed, from the turns."""
        return half_around(self.speed, self.turns)


@dataclass(frozen=True)
class StepRecord:
    rows: Sequence[TimedRow]
    facts: StepsRecord


def half_around(middle: float, turns: Sequence[float]) -> float | None:
    """Return half the 95% interval of a geometric mean over turns."""
    half = half_interval(list(np.log(turns)))
    return None if half is None else middle * math.sinh(half)


def timed_records(records: Iterable[StepsRecord]) -> list[StepRecord]:
    """Return records of timed steps with whole configurations: newer keys have their defaults."""
    defaults = {key: one.default for key, one in all_fields().items()}
    timed = []
    for record in records:
        rows = []
        for row in record.rows:
            config = {**defaults, **flat(row.config)}
            rows.append(TimedRow(config, row.ms_turns, row.reason or "", row.parameters))
        timed.append(StepRecord(rows, record))
    return timed


def newest_rows(records: Sequence[StepRecord]) -> dict[RowKey, TimedRow]:
    """Return the timed rows of records, of each row the newest. `records`: the newest first."""
    timed = {}
    for record in reversed(records):
        for row in record.rows:
            if row.turns:
                timed[row_key(row.config)] = row
    return timed


def views(record: StepRecord) -> list[Table]:
    """Return a table for each of the paper's that has rows here, and one for all other rows."""
    groups: dict[int, list[TimedRow]] = {}
    for row in record.rows:
        table = table_of(row.config, timed=True)
        number = table.number if table and table.row_of(row.config) else OTHER
        groups.setdefault(number, []).append(row)
    tables = []
    for number, rows in sorted(groups.items()):
        table = None if number == OTHER else numbered(number)
        tables.append(steps_table(record, table, rows))
    return tables


def steps_table(record: StepRecord, table: PaperTable | None, rows: Sequence[TimedRow]) -> Table:
    """Return a table of step times: ours, their ratio to the local row's, and the paper's."""
    ordered = sorted(rows, key=lambda row: place_in(table, row)) if table else rows
    entries = []
    for row, name in zip(ordered, names_of(ordered), strict=True):
        timed = {"row": name, **timed_entry(row, local_row(row, record.rows))}
        paper = paper_entry(row, table) if table else dict.fromkeys(PAPER_KEYS)
        entries.append(timed | paper | {"parameters": row.parameters, "note": row.reason})
    columns = [
        Column("row", "row"),
        Column("milliseconds", "ms", 1),
        Column("steps_per_second", "steps/s", 3, "pace_half"),
        Column("speed_ratio", "x local", 2, "ratio_half"),
        Column("paper_steps_per_second", "paper", 3),
        Column("paper_speed_ratio", "paper x", 2),
        Column("parameters", "parameters", brief=False),
    ]
    lines = [how_timed(record, rows)]
    if table:
        lines.append(f"Paper: {table.speed}; paper x: over its local row's.")
    lines += [f"{entry['row']}: {entry['note']}." for entry in entries if entry["note"]]
    title = "Measured training steps"
    footnotes: Sequence[str] = ()
    if table:
        lines += settings_of(rows, table)
        title = f"Table {table.number}. {table.title}: measured training steps"
        footnotes = () if table.split else table.footnotes
    return Table(title, columns, entries, lines, footnotes)


def place_in(table: PaperTable, row: TimedRow) -> int:
    """Return the place of a row among the paper's, which it must be one of."""
    printed = table.row_of(row.config)
    assert printed is not None
    return table.rows.index(printed)


def names_of(rows: Sequence[TimedRow]) -> list[str]:
    """Return the name of each row: its kind of heads, and by what it differs from others of it."""
    named = [Row(unscored=[Cell(Path(), row.config)]) for row in rows]
    name_rows(named)
    return [row.name for row in named]


def timed_entry(row: TimedRow, local: TimedRow | None) -> dict[str, Any]:
    """Return the times of a row, and their ratio to those of its local row, if it has one."""
    ratio = None
    paired: list[float] = []
    if row.turns and local:
        ratio = row.speed / local.speed
    if local and local is not row:
        turns = zip(local.turns, row.turns, strict=False)
        paired = [ms_of_local / ms for ms_of_local, ms in turns]
    return {
        "milliseconds": 1e3 / row.speed if row.turns else row.reason,
        "steps_per_second": row.speed or None,
        "pace_half": row.half,
        "speed_ratio": ratio,
        "ratio_half": half_around(ratio or 0.0, paired),
    }


def paper_entry(row: TimedRow, table: PaperTable) -> dict[str, float | None]:
    """Return the paper's steps a second of a row, and their ratio to those of its local row."""
    printed = table.row_of(row.config)
    paces_of_local = [one.steps_per_second for one in table.rows if one.kind == "local"]
    pace = printed.steps_per_second if printed else None
    ratio = None
    if pace and paces_of_local and paces_of_local[0]:
        ratio = pace / paces_of_local[0]
    return dict(zip(PAPER_KEYS, (pace, ratio), strict=True))


def how_timed(record: StepRecord, rows: Sequence[TimedRow]) -> str:
    """Return how often, where and when rows were timed."""
    facts = record.facts
    turns = plural(max(len(row.turns) for row in rows), "turn")
    steps = plural(facts.bench.per_turn, "step")
    timed = f"Rows in turn, {turns} of {steps}, after {facts.bench.warmup} of warm-up"
    where = f"{facts.ids}; {facts.device}, {facts.time[:10]}"
    return f"{timed}; {where}. ± are 95% intervals over turns."


def settings_of(rows: Sequence[TimedRow], table: PaperTable) -> list[str]:
    """Return lines on the settings that rows have otherwise than the paper."""
    departures: list[str] = []
    differences: list[str] = []
    for row in rows:
        departures += table.departures(row.config)
        differences += table.differences(row.config)
    return setting_lines(list(dict.fromkeys(departures)), list(dict.fromkeys(differences)))


def local_row(row: TimedRow, rows: Sequence[TimedRow]) -> TimedRow | None:
    """Return the timed local row to compare a row with: same N, batch and hardware."""
    for other in rows:
        is_local = kind_of(other.config) == "local" and other.turns
        if is_local and all(row.config[key] == other.config[key] for key in EQUAL_KEYS):
            return other
    return None
