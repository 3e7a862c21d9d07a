"""Step times that `rtx bench steps` recorded, beside the paper's, and what rows score after equal time.

A record is outputs/<name>/bench/steps-<key>.json; nothing here imports torch.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rtx.report.paper import PaperTable, heads_label, kind_of, paper_tables, table_of
from rtx.report.ranking import half_interval, mean
from rtx.report.run_records import Cell, Collection, flat, read_object, real, whole
from rtx.report.score_rows import Protocol, Row, Score, name_rows, row_key, sees_future
from rtx.report.score_tables import kinds_table
from rtx.report.tables import Column, Table
from rtx.wording import plural

WHAT = "training steps in turn"
"""What a record says it is."""

DRAWN = "ids drawn at random, no data read"
"""Where the ids of a record of version 0.1 came from."""

FOLLOWS_COUNTS = (
    "selection=causal and nearest: a step takes the longer the less even clusters are filled, so that real data may "
    "take longer than ids drawn at random"
)
"""What such ids cannot tell."""

PLACES = ("bench/steps-*.json", "*/bench/steps-*.json")
"""Where records are below a folder."""

SAME = ("data.length", "trainer.val_stride", "trainer.val_windows")
"""What rows share, beside their data, for their validations to be of the same units in the same context."""


@dataclass(frozen=True)
class TimedRow:
    """A row as its record has it."""

    config: Mapping[str, Any]
    turns: tuple[float, ...]
    """Milliseconds of a step in each turn."""
    reason: str = ""
    """Why it was left out, where it was."""
    peak_bytes: int | None = None
    parameters: int | None = None

    @property
    def speed(self) -> float | None:
        """Steps a second: of the geometric mean over turns, whose errors are multiples."""
        return 1e3 / math.exp(mean(np.log(self.turns))) if self.turns else None

    @property
    def half(self) -> float | None:
        """Half the 95% interval of the speed, from the turns."""
        half = half_interval(list(np.log(self.turns))) if self.turns else None
        return None if half is None or self.speed is None else self.speed * math.sinh(half)


@dataclass(frozen=True)
class StepRecord:
    """What one `rtx bench steps` measured."""

    rows: tuple[TimedRow, ...]
    facts: Mapping[str, Any]
    """The record without its rows: settings, machine, versions, time."""

    def how(self) -> str:
        """Say how the times came about, in a line."""
        bench, facts = self.facts.get("bench") or {}, self.facts
        turns = plural(max((len(row.turns) for row in self.rows), default=0), "turn")
        steps, warmup = (plural(int(bench.get(key) or 0), "step") for key in ("per_turn", "warmup"))
        where = [str(facts.get("device") or ""), str(facts.get("time") or "")[:10]]
        return f"Rows in turn, {turns} of {steps}, after {warmup} of warm-up; {facts.get('ids')}; {', '.join(where)}."


def recorded(folder: Path) -> list[Path]:
    """Return the records of a folder."""
    return sorted({path for place in PLACES for path in folder.glob(place)})


def read_records(folders: Iterable[Path], found: Collection) -> list[StepRecord]:
    """Return the records below folders, the newest first; one that cannot be read is told in a line."""
    records = []
    for path in dict.fromkeys(path for folder in folders for path in recorded(folder)):
        content = read_object(path, found)
        try:
            records += [read_record(content)] if content else []
        except (KeyError, TypeError, ValueError, AttributeError):
            found.problems.append(f"{path}: is not a record of rtx bench steps")
    return sorted(records, key=lambda record: str(record.facts.get("time")), reverse=True)


def read_record(content: Mapping[str, Any]) -> StepRecord:
    """Return a record from its JSON.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is none.
    """
    rows = []
    for row in content["rows"]:
        turns = tuple(float(value) for value in row["ms_turns"])
        if content["what"] != WHAT or any(value <= 0 for value in turns):
            raise ValueError(content["what"])
        rows.append(
            TimedRow(
                flat(row["config"]), turns, str(row.get("reason") or ""), row.get("peak_bytes"), row.get("parameters")
            )
        )
    return StepRecord(tuple(rows), {key: value for key, value in content.items() if key != "rows"})


def paces_of(records: Sequence[StepRecord]) -> dict[Any, tuple[float, float | None]]:
    """Return steps a second and half their interval by the key of a row; the newest record counts."""
    timed = [(row_key(Cell(Path(), row.config)), row) for record in reversed(records) for row in record.rows]
    return {key: (row.speed, row.half) for key, row in timed if row.speed}


def views(record: StepRecord) -> list[Table]:
    """Return a table for each of the paper's that has rows here, and one for all other rows."""
    groups: dict[int, list[TimedRow]] = {}
    for row in record.rows:
        table = table_of(row.config, timed=True)
        groups.setdefault(table.number if table and table.row_of(row.config) else 99, []).append(row)
    by_number = {table.number: table for table in paper_tables()}
    return [steps_table(record, by_number.get(number), groups[number]) for number in sorted(groups)]


def steps_table(record: StepRecord, table: PaperTable | None, rows: Sequence[TimedRow]) -> Table:
    """Return a table of step times: ours, their ratio to the local row's, and the paper's."""
    order = {id(row): table.rows.index(printed) for row in rows if table and (printed := table.row_of(row.config))}
    rows = sorted(rows, key=lambda row: order.get(id(row), 0))
    named = [Row([Cell(Path(), row.config)]) for row in rows]
    name_rows(named)
    entries = []
    for row, name in zip(rows, (row.name for row in named), strict=True):
        printed, local = table.row_of(row.config) if table else None, local_row(row, record.rows)
        base = next((one.steps_per_second for one in table.rows if one.kind == "local"), None) if table else None
        theirs = printed.steps_per_second if printed else None
        entry: dict[str, Any] = {"row": name, "milliseconds": 1e3 / row.speed if row.speed else row.reason or "failed"}
        entry |= {"steps_per_second": row.speed, "pace_half": row.half, "peak_bytes": row.peak_bytes}
        entry |= {"parameters": row.parameters, "turns": len(row.turns), "note": row.reason}
        entry |= {"speed_ratio": row.speed / local.speed} if row.speed and local and local.speed else {}
        entry |= {"paper_steps_per_second": theirs, "paper_speed_ratio": theirs / base if theirs and base else None}
        entry |= {"peak_gib": row.peak_bytes / 2**30 if row.peak_bytes else None}
        entries.append(entry)
    columns = [
        Column("row", "row"),
        Column("milliseconds", "ms", 1),
        Column("steps_per_second", "steps/s", 3, "pace_half"),
        Column("speed_ratio", "x local", 2),
        Column("paper_steps_per_second", "paper", 3),
        Column("paper_speed_ratio", "paper x", 2),
        Column("peak_gib", "peak GiB", 2, brief=False),
        Column("parameters", "parameters", brief=False),
        Column("turns", "turns", brief=False),
        Column("note", "why not", brief=False),
    ]
    lines = [record.how(), "\N{PLUS-MINUS SIGN} are 95% intervals over turns."]
    lines += [f"Paper: {table.speed}; ratios are to its local row."] if table else []
    if record.facts.get("ids") == DRAWN and any(follows_counts(row.config) for row in rows):
        lines.append(f"{FOLLOWS_COUNTS}.")
    lines += [f"Failed: {entry['row']}: {entry['note']}." for entry in entries if entry["note"]]
    lines += (
        [] if any("speed_ratio" in entry for entry in entries) else ["No ratios: they are to a row of local heads."]
    )
    changes = dict.fromkeys(change for row in rows for change in (table.departures(row.config) if table else ()))
    lines += [f"Not the paper's setting: {'; '.join(changes)}."] if changes else []
    title = f"{table.name}. {table.title}: measured training steps" if table else "Measured training steps"
    return Table(title, columns, entries, lines, table.footnotes if table and not table.split else ())


def local_row(row: TimedRow, rows: Sequence[TimedRow]) -> TimedRow | None:
    """Return the timed local row to compare a row with: same N, batch and hardware, else the fewest differences."""
    same = ("data.length", "trainer.batch_size", "hardware.threads", "hardware.precision", "hardware.compile")
    able = [other for other in rows if kind_of(other.config) == "local" and other.turns]
    able = [other for other in able if all(row.config.get(key) == other.config.get(key) for key in same)]
    keys = row.config.keys()
    return min(able, key=lambda other: sum(row.config.get(k) != other.config.get(k) for k in keys), default=None)


def follows_counts(config: Mapping[str, Any]) -> bool:
    """Tell whether each position chooses its clusters by itself, so that the data decide how many members one has."""
    return kind_of(config) == "routing" and config.get("routing.selection") in ("causal", "nearest")


def equal_time_tables(cells: Sequence[Cell], records: Sequence[StepRecord]) -> list[tuple[Table, str]]:
    """Return what each kind had reached when the first had taken all its steps, with the error of paces in verdicts.

    That needs a learning rate that stays constant after its warm-up: then a validation on the way is the score of a run
    of that length. Paces are those of the newest record that has all rows, which were timed in turn.
    """
    groups: dict[tuple[str, ...], dict[object, Row]] = {}
    for cell in cells:
        if cell.state == "done" and cell.step and cell.config.get("optimizer.schedule") == "constant":
            data = str(cell.data.get("fingerprint") or cell.config.get("data.name"))
            key = (data, *(str(cell.config.get(name)) for name in SAME))
            groups.setdefault(key, {}).setdefault(row_key(cell), Row([])).cells.append(cell)
    return [made for rows in groups.values() if (made := equal_time(list(rows.values()), records))]


def equal_time(rows: Sequence[Row], records: Sequence[StepRecord]) -> tuple[Table, str] | None:
    """Return the table of some rows, and what it allows to say; None where they are not several with a pace."""
    for record in records:
        timed = {row_key(Cell(Path(), row.config)): row for row in record.rows if row.speed}
        if len(rows) > 1 and all(row_key(row.cells[0]) in timed for row in rows):
            break
    else:
        return None
    drawn, errors, scored = record.facts.get("ids") == DRAWN, {}, []
    speeds = {id(row): timed[row_key(row.cells[0])] for row in rows}
    sure = [row for row in rows if not (drawn and follows_counts(row.config))]
    seconds = min((row.step / (speeds[id(row)].speed or 1) for row in sure), default=0.0)
    for row in sure:
        steps = min(seconds * (speeds[id(row)].speed or 0), row.step)
        row.scores = [score for cell in row.cells if (score := score_at(cell, steps))]
        if row.scores:
            logs = np.log(speeds[id(row)].turns)
            slope = abs(slope_at(row.cells, steps)) * steps
            errors[heads_label(row.config)] = (
                (slope * statistics.stdev(logs) / math.sqrt(len(logs)), len(logs) - 1.0)
                if len(logs) > 1
                else (0.0, 1.0)
            )
            scored.append(row)
    if len(scored) < 2:
        return None
    name_rows(scored)
    paces = {row_key(row.cells[0]): (speeds[id(row)].speed or 0.0, speeds[id(row)].half) for row in scored}
    table, said = kinds_table(scored[0].scores[0].protocol, scored, paces, errors=errors)
    table.title = f"Equal time: {seconds / 60:,.1f} minutes of training steps"
    table.lines = [
        f"{table.lines[0]} Paces as timed in turn ({record.facts.get('device')}); their error is in the verdicts. "
        "Between two validations bits are taken to fall in a straight line; the learning rate is constant."
    ]
    left_out = [heads_label(row.config) for row in rows if row not in scored]
    table.lines += [f"Left out ({FOLLOWS_COUNTS}): {', '.join(left_out)}."] if left_out else []
    return table, said


def validations(cell: Cell) -> dict[int, tuple[float, int]]:
    """Return bits and units of the validations on the way, by step."""
    rows = [row for row in cell.metrics if row.get("kind") == "valid"]
    return {
        whole(row.get("step")): (bits, whole(row.get("val_units")))
        for row in rows
        if (bits := real(row.get("val_bits"))) is not None
    }


def around(cell: Cell, step: float) -> tuple[int, int] | None:
    """Return the steps of the validations before and after some step."""
    found = sorted(validations(cell))
    pairs = [(first, second) for first, second in itertools.pairwise(found) if first <= step <= second]
    return pairs[-1] if pairs else None


def slope_at(cells: Sequence[Cell], step: float) -> float:
    """Return by how many bits a step changes the score there, the mean over runs."""
    slopes = []
    for cell in cells:
        if pair := around(cell, step):
            found = validations(cell)
            slopes.append((found[pair[1]][0] - found[pair[0]][0]) / (pair[1] - pair[0]))
    return mean(slopes) if slopes else 0.0


def score_at(cell: Cell, step: float) -> Score | None:
    """Return the score of a run at some step, between the validations before and after it; None before the first."""
    pair, found = around(cell, step), validations(cell)
    if pair is None:
        return None
    share = (step - pair[0]) / (pair[1] - pair[0])
    bits = (1 - share) * found[pair[0]][0] + share * found[pair[1]][0]
    unit, length = str(cell.data.get("unit", "unit")), whole(cell.config.get("data.length"))
    stride = whole(cell.config.get("trainer.val_stride")) or length
    protocol = Protocol("valid", "parallel", unit, str(cell.data.get("name", "")), "", length, stride)
    return Score(protocol, bits, found[pair[0]][1], sees_future(cell.config), cell.seed)
