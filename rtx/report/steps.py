"""Step times that `benchmarks/steps.py` recorded, beside the paper's, and what rows score after equal time.

A record is outputs/<name>/bench/steps-<key>.json; nothing here imports torch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rtx.compose import flat
from rtx.errors import plural
from rtx.report.paper import (
    Config,
    PaperTable,
    heads_label,
    kind_of,
    numbered,
    setting_lines,
    table_of,
)
from rtx.report.ranking import half_interval, mean
from rtx.report.run_records import Cell, Collection, Score, read_object
from rtx.report.score_rows import Row, name_rows, row_key
from rtx.report.score_tables import kinds_table
from rtx.report.tables import Column, Table

WHAT = "training steps in turn"  # what a record says it is
SAME = ("data.length", "trainer.val_stride", "trainer.val_windows")
"""What rows share, beside their data, for their validations to be of the same units in the same context."""


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
    def half(self) -> float | None:
        """Half the 95% interval of the speed, from the turns."""
        return half_around(self.speed, self.turns)


@dataclass(frozen=True)
class StepRecord:
    rows: Sequence[TimedRow]
    facts: Mapping[str, Any]


def half_around(middle: float, turns: Sequence[float]) -> float | None:
    """Return half the 95% interval of a geometric mean over turns."""
    half = half_interval(list(np.log(turns)))
    return None if half is None else middle * math.sinh(half)


def recorded(folder: Path) -> list[Path]:
    return sorted([*folder.glob("bench/steps-*.json"), *folder.glob("*/bench/steps-*.json")])


def read_records(folders: Iterable[Path], found: Collection) -> list[StepRecord]:
    """Return the records below folders, the newest first; one that cannot be read is told in a line."""
    records = []
    for path in dict.fromkeys(path for folder in folders for path in recorded(folder)):
        content = read_object(path, found)
        try:
            records += [read_record(content)] if content else []
        except (KeyError, TypeError, ValueError, AttributeError):
            found.problems.append(f"{path}: is not a record of benchmarks/steps.py")
    return sorted(records, key=lambda record: record.facts["time"], reverse=True)


def read_record(content: Mapping[str, Any]) -> StepRecord:
    """Return a record from its JSON; one of the errors that `read_records` knows where it is none."""
    if content["what"] != WHAT:
        raise ValueError(content["what"])
    rows = [
        TimedRow(flat(row["config"]), row["ms_turns"], row["reason"] or "", row["parameters"])
        for row in content["rows"]
    ]
    facts = {key: content[key] for key in ("bench", "device", "ids", "time")}
    return StepRecord(rows, {**facts, "command": content.get("command")})


def paces_of(records: Sequence[StepRecord]) -> dict[Any, tuple[float, float | None, str]]:
    """Return steps a second, half their interval and a reason by the key of a row; the newest record counts."""
    timed = [row for record in reversed(records) for row in record.rows if row.turns]
    return {row_key(row.config): (row.speed, row.half, row.reason) for row in timed}


def views(record: StepRecord) -> list[Table]:
    """Return a table for each of the paper's that has rows here, and one for all other rows."""
    groups: dict[int, list[TimedRow]] = {}
    for row in record.rows:
        table = table_of(row.config, timed=True)
        groups.setdefault(table.number if table and table.row_of(row.config) else 99, []).append(row)
    return [
        steps_table(record, None if number == 99 else numbered(number), rows) for number, rows in sorted(groups.items())
    ]


def steps_table(record: StepRecord, table: PaperTable | None, rows: Sequence[TimedRow]) -> Table:
    """Return a table of step times: ours, their ratio to the local row's, and the paper's."""
    printed = [table.row_of(row.config) if table else None for row in rows]
    base = next((row.steps_per_second for row in table.rows if row.kind == "local"), None) if table else None
    named, entries = [Row([Cell(Path(), row.config)]) for row in rows], []
    name_rows(named)
    for row, name, theirs in zip(rows, named, printed, strict=True):
        local = local_row(row, record.rows)
        paper = theirs.steps_per_second if theirs else None
        ratio = row.speed / local.speed if row.turns and local else None
        paired = [a / b for a, b in zip(local.turns, row.turns, strict=False)] if local and local is not row else []
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
        entries = [entry for _, entry in sorted(zip(places, entries, strict=True), key=lambda pair: pair[0])]
    columns = [
        Column("row", "row"),
        Column("milliseconds", "ms", 1),
        Column("steps_per_second", "steps/s", 3, "pace_half"),
        Column("speed_ratio", "x local", 2, "ratio_half"),
        Column("paper_steps_per_second", "paper", 3),
        Column("paper_speed_ratio", "paper x", 2),
        Column("parameters", "parameters", brief=False),
    ]
    bench, facts = record.facts["bench"], record.facts
    turns = f"{plural(max(len(row.turns) for row in rows), 'turn')} of {plural(bench['per_turn'], 'step')}"
    where = f"{facts['ids']}; {facts['device']}, {facts['time'][:10]}"
    lines = [f"Rows in turn, {turns}, after {bench['warmup']} of warm-up; {where}. ± are 95% intervals over turns."]
    lines += [f"Paper: {table.speed}; paper x: over its local row's."] if table else []
    lines += [f"{entry['row']}: {entry['note']}." for entry in entries if entry["note"]]
    if table:
        departures = [one for row in rows for one in table.departures(row.config)]
        differences = [one for row in rows for one in table.differences(row.config)]
        lines += setting_lines(list(dict.fromkeys(departures)), list(dict.fromkeys(differences)))
    title = f"Table {table.number}. {table.title}: measured training steps" if table else "Measured training steps"
    return Table(title, columns, entries, lines, table.footnotes if table and not table.split else ())


def local_row(row: TimedRow, rows: Sequence[TimedRow]) -> TimedRow | None:
    """Return the timed local row to compare a row with: same N, batch and hardware."""
    same = ("data.length", "trainer.batch_size", "hardware.threads", "hardware.precision", "hardware.compile")
    able = (other for other in rows if kind_of(other.config) == "local" and other.turns)
    return next((other for other in able if all(row.config[key] == other.config[key] for key in same)), None)


def equal_time_tables(cells: Sequence[Cell], records: Sequence[StepRecord]) -> list[tuple[Table, str]]:
    """Return what each kind had reached when the first had taken all its steps, with the error of paces in verdicts.

    That needs a learning rate that stays constant after its warm-up: then a validation on the way is the score of a run
    of that length. Paces are those of the newest record that has all rows, which were timed in turn.
    """
    groups: dict[Any, dict[Any, Row]] = {}
    for cell in cells:
        if cell.state == "done" and cell.final and cell.curve and cell.config["optimizer.schedule"] == "constant":
            terms = (cell.final.protocol.fingerprint, *(cell.config[key] for key in SAME))
            groups.setdefault(terms, {}).setdefault(row_key(cell.config), Row([])).cells.append(cell)
    return [made for rows in groups.values() if (made := equal_time(list(rows.values()), records))]


def equal_time(rows: Sequence[Row], records: Sequence[StepRecord]) -> tuple[Table, str] | None:
    """Return the table of some rows, and what it allows to say; None where they are not several with a pace."""
    keys = [row_key(row.config) for row in rows]
    timed = [(record, {row_key(row.config): row for row in record.rows if row.turns}) for record in records]
    record, speeds = next(((one, found) for one, found in timed if found.keys() >= set(keys)), (None, {}))
    sure = [(row, speeds[key]) for key, row in zip(keys, rows, strict=True) if record and not speeds[key].reason]
    if not record or len(sure) < 2:
        return None
    seconds = min(row.step / pace.speed for row, pace in sure)
    errors = {row_key(row.config): score_after(seconds, row, pace) for row, pace in sure}
    scored = [row for row, _ in sure if row.scores]
    if len(scored) < 2:
        return None
    name_rows(scored)
    table, said = kinds_table(scored[0].scores[0].protocol, scored, paces_of([record]), errors=errors)
    table.title = f"Equal time: {seconds / 60:,.1f} minutes of training steps"
    table.lines[0] += (
        f" Paces as timed in turn ({record.facts['device']}); their error is in the verdicts. "
        "Between two validations bits are taken to fall in a straight line; the learning rate is constant."
    )
    table.lines += [f"Left out: {heads_label(row.config)} ({row.reason})." for row in speeds.values() if row.reason]
    return table, said


def score_after(seconds: float, row: Row, pace: TimedRow) -> tuple[float, float]:
    """Score the runs of a row as they were after so long; return what the error of its pace makes of that in bits.

    The error is a standard error with its degrees of freedom, as `compare` has it.
    """
    steps, logs = min(seconds * pace.speed, row.step), np.log(pace.turns)
    row.cells = [cell for cell in row.cells if min(cell.curve) <= steps]
    row.scores = [score_at(cell, steps) for cell in row.cells]
    if len(logs) < 2 or not row.cells:
        return 0.0, 1.0
    fewer = steps * math.exp(-float(np.std(logs, ddof=1)) / math.sqrt(len(logs)))
    return mean(score_at(cell, fewer).bits - score_at(cell, steps).bits for cell in row.cells), len(logs) - 1.0


def score_at(cell: Cell, step: float) -> Score:
    """Return the score of a run at some step, on a straight line between the validations before and after it."""
    assert cell.final
    steps = sorted(cell.curve)
    bits = float(np.interp(step, steps, [cell.curve[at][0] for at in steps]))
    protocol = replace(cell.final.protocol, fingerprint="", stamps=(), windows=cell.config["trainer.val_windows"])
    units = cell.curve[steps[0]][1]
    unknown: dict[str, Any] = {"figures": {}, "error": None, "windows": None}  # those of the closing score
    return replace(cell.final, protocol=protocol, bits=bits, units=units, **unknown)
