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
from rtx.report.ranking import half_interval, mean
from rtx.report.run_records import Cell
from rtx.report.score_rows import Row, name_rows, row_key
from rtx.report.tables import Column, Table
from rtx.runs.records import StepsRecord
from rtx.settings.schema import all_fields, flat


@dataclass(frozen=True)
class TimedRow:
    config: Config
    turns: Sequence[float]  # milliseconds of a step in each turn
    reason: str = ""  # why it was left out, or why its times are not those of training
    parameters: int | None = None

    @property
    def speed(self) -> float:
        """Steps a second: of the geometric mean over turns, whose errors are multiples; 0 where there are none."""
        return 1e3 / math.exp(mean(np.log(self.turns))) if self.turns else 0.0

    @property
    def log_error(self) -> tuple[float, float] | None:
        """Standard error of the logarithm of the speed, and its degrees of freedom; None of a single turn."""
        if len(self.turns) < 2:
            return None
        return float(np.std(np.log(self.turns), ddof=1)) / math.sqrt(len(self.turns)), len(
            self.turns
        ) - 1.0

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
    defaults = {key: known.default for key, known in all_fields().items()}
    timed = []
    for record in records:
        rows = []
        for row in record.rows:
            config = {**defaults, **flat(row.config)}
            rows.append(TimedRow(config, row.ms_turns, row.reason or "", row.parameters))
        timed.append(StepRecord(rows, record))
    return timed


def paces_of(records: Sequence[StepRecord]) -> dict[Any, tuple[float, float | None, str]]:
    """Return steps a second, half their interval and a reason by the key of a row; the newest record counts."""
    timed = [row for record in reversed(records) for row in record.rows if row.turns]
    return {row_key(row.config): (row.speed, row.half, row.reason) for row in timed}


def views(record: StepRecord) -> list[Table]:
    """Return a table for each of the paper's that has rows here, and one for all other rows."""
    groups: dict[int, list[TimedRow]] = {}
    for row in record.rows:
        table = table_of(row.config, timed=True)
        groups.setdefault(table.number if table and table.row_of(row.config) else 99, []).append(
            row
        )
    return [
        steps_table(record, None if number == 99 else numbered(number), rows)
        for number, rows in sorted(groups.items())
    ]


def steps_table(record: StepRecord, table: PaperTable | None, rows: Sequence[TimedRow]) -> Table:
    """Return a table of step times: ours, their ratio to the local row's, and the paper's."""
    printed = [table.row_of(row.config) if table else None for row in rows]
    base = (
        next((row.steps_per_second for row in table.rows if row.kind == "local"), None)
        if table
        else None
    )
    named, entries = [Row([Cell(Path(), row.config)]) for row in rows], []
    name_rows(named)
    for row, name, theirs in zip(rows, named, printed, strict=True):
        local = local_row(row, record.rows)
        paper = theirs.steps_per_second if theirs else None
        ratio = row.speed / local.speed if row.turns and local else None
        paired = (
            [a / b for a, b in zip(local.turns, row.turns, strict=False)]
            if local and local is not row
            else []
        )
        entries.append(
            {
                "row": name.name,
                "milliseconds": 1e3 / row.speed if row.turns else row.reason,
                "steps_per_second": row.speed or None,
                "pace_half": row.half,
                "speed_ratio": ratio,
                "ratio_half": half_around(ratio or 0.0, paired),
                "paper_steps_per_second": paper,
                "paper_speed_ratio": paper / base if paper and base else None,
                "parameters": row.parameters,
                "note": row.reason,
            }
        )
    if table:
        places = [table.rows.index(one) for one in printed if one]
        entries = [
            entry
            for _, entry in sorted(zip(places, entries, strict=True), key=lambda pair: pair[0])
        ]
    columns = [
        Column("row", "row"),
        Column("milliseconds", "ms", 1),
        Column("steps_per_second", "steps/s", 3, "pace_half"),
        Column("speed_ratio", "x local", 2, "ratio_half"),
        Column("paper_steps_per_second", "paper", 3),
        Column("paper_speed_ratio", "paper x", 2),
        Column("parameters", "parameters", brief=False),
    ]
    bench, facts = record.facts.bench, record.facts
    turns = (
        f"{plural(max(len(row.turns) for row in rows), 'turn')} of {plural(bench.per_turn, 'step')}"
    )
    where = f"{facts.ids}; {facts.device}, {facts.time[:10]}"
    lines = [
        f"Rows in turn, {turns}, after {bench.warmup} of warm-up; {where}. ± are 95% intervals over turns."
    ]
    lines += [f"Paper: {table.speed}; paper x: over its local row's."] if table else []
    lines += [f"{entry['row']}: {entry['note']}." for entry in entries if entry["note"]]
    if table:
        departures = [one for row in rows for one in table.departures(row.config)]
        differences = [one for row in rows for one in table.differences(row.config)]
        lines += setting_lines(list(dict.fromkeys(departures)), list(dict.fromkeys(differences)))
    title = (
        f"Table {table.number}. {table.title}: measured training steps"
        if table
        else "Measured training steps"
    )
    return Table(
        title, columns, entries, lines, table.footnotes if table and not table.split else ()
    )


def local_row(row: TimedRow, rows: Sequence[TimedRow]) -> TimedRow | None:
    """Return the timed local row to compare a row with: same N, batch and hardware."""
    same = (
        "data.length",
        "trainer.batch_size",
        "hardware.threads",
        "hardware.precision",
        "hardware.compile",
    )
    able = (other for other in rows if kind_of(other.config) == "local" and other.turns)
    return next(
        (other for other in able if all(row.config[key] == other.config[key] for key in same)), None
    )
