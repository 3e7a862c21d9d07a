"""Scores by the length of a window, and accuracies by the depth of what an answer repeats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rtx.report.ranking import half_interval, mean
from rtx.report.run_records import Score
from rtx.report.score_rows import ProtocolRows, Row, row_key
from rtx.runs.records import EvaluationRecord, Protocol, ScoreRecord
from rtx.settings.data_sets import MADE
from rtx.tables import Column, Entry, Table

DEPTH = "depth of what the answer repeats, in % of the window"
NAMES = (Column("heads", "heads"), Column("sees_future", "sees future"))
"""The first columns of a table of several runs."""


def tables_of_run(records: Sequence[EvaluationRecord]) -> list[Table]:
    """Return the scores of one run at several lengths, and its accuracies by depth at each."""
    rows = []
    for record in records:
        length = record.protocol.length
        trained = record.trained_length or length
        rows.append(
            {
                "length": length,
                "times": length / trained,
                "bits": record.bits,
                "error": record.standard_error,
                "percent": percent(record.accuracy),
                "chance": percent(record.chance),
                "far": record.bits_far_repeated,
            }
        )
    unit = records[0].unit
    columns = [
        Column("length", "length"),
        Column("times", "times the training length", 2),
        Column("bits", f"bits/{unit}", 4),
        Column("error", "std. error", 4),
        Column("percent", "accuracy, %", 1),
        Column("chance", "chance, %", 2),
        Column("far", "bits, far-repeated", 4),
    ]
    where = records[0].protocol.where
    scores = Table(f"By length: {where}", columns, rows)
    by_depth = [{"length": record.protocol.length, **depths(record)} for record in records]
    table = depth_table(f"Accuracy in %, by {DEPTH}", [Column("length", "length")], by_depth)
    return [scores, table] if table else [scores]


def sight(row: Row) -> str:
    """Return whether selection could see the future, for a cell of a table."""
    return "yes" if row.sees_future else "no"


def percent(share: float | None) -> float | None:
    """Return a share in percent."""
    return None if share is None else 100 * share


def depths(record: ScoreRecord) -> dict[str, float]:
    """Return the accuracy of a score in percent, by the depth in percent."""
    return {f"at {depth}": 100 * share for depth, (share, _) in record.accuracy_by_depth.items()}


def depth_table(title: str, names: Sequence[Column], rows: list[Entry]) -> Table | None:
    """Return a table with a column for each depth; None where answers have at most one depth."""
    keys: set[str] = set()
    for row in rows:
        keys |= {key for key in row if key.startswith("at ")}
    if len(keys) < 2:
        return None
    ordered = sorted(keys, key=lambda key: int(key.removeprefix("at ")))
    columns = [Column(key, key.removeprefix("at "), 0) for key in ordered]
    return Table(title, [*names, *columns], rows)


def tables_by_length(row_groups: Sequence[ProtocolRows]) -> list[Table]:
    """Return the tables of runs that were scored at several lengths, or by depth.

    `row_groups`: the rows of each protocol. The rows of a table were scored by protocols that
    differ in the length alone.
    """
    groups: dict[Any, dict[int, list[Row]]] = {}
    for group in row_groups:
        if group.protocol is not None:
            by_length = groups.setdefault(any_length(group.protocol), {})
            by_length.setdefault(group.protocol.length, []).extend(group.rows)
    tables: list[Table | None] = []
    for (where, unit), by_length in groups.items():
        tables.append(length_table(where, unit, by_length))
        tables.append(rows_by_depth(where, by_length))
    return [table for table in tables if table is not None]


def any_length(protocol: Protocol) -> tuple[str, str]:
    """Return the protocol in words, without its length and what follows from that; and its unit."""
    parts = [protocol.where, *protocol.stamps]
    if protocol.data not in MADE:
        parts.append(f"data fingerprint {protocol.fingerprint[:12]}")
    if protocol.windows is not None:
        parts.append("samples of windows")
    if protocol.stride != protocol.length:
        parts.append(f"stride {protocol.stride:,}")
    if protocol.ablate != "none":
        parts.append(f"ablated: {protocol.ablate}")
    return ", ".join(parts), protocol.unit


def length_table(where: str, unit: str, by_length: Mapping[int, Sequence[Row]]) -> Table | None:
    """Return a row for each row of runs, with the mean score at each length; None for one length.

    Scores of answers are accuracies, those of other units bits.
    """
    if len(by_length) < 2:
        return None
    lengths = sorted(by_length)
    entries: dict[Any, Entry] = {}
    has_answers = False
    for length in lengths:
        for row in by_length[length]:
            key = row_key(row.config, row.cells[0].folder)
            entry = entries.setdefault(key, {"heads": row.name, "sees_future": sight(row)})
            accuracies = accuracies_of(row.scores)
            values = accuracies or [score.bits for score in row.scores]
            has_answers = has_answers or bool(accuracies)
            if values:
                entry[str(length)] = mean(values)
                entry[f"half {length}"] = half_interval(values)
                entry["trained"] = row.config.get("data.length")
    digits = 1 if has_answers else 4
    columns = [*NAMES, Column("trained", "trained at")]
    for length in lengths:
        columns.append(Column(str(length), f"{length:,}", digits, f"half {length}"))
    measure = "accuracy in %" if has_answers else f"bits/{unit}"
    lines = ["± are 95% intervals over seeds."]
    return Table(
        f"By length of the window, {measure}: {where}", columns, [*entries.values()], lines
    )


def accuracies_of(scores: Iterable[Score]) -> list[float]:
    """Return the accuracies of scores in percent; none of scores of all units."""
    accuracies = [score.record.accuracy for score in scores]
    return [100 * accuracy for accuracy in accuracies if accuracy is not None]


def rows_by_depth(where: str, by_length: Mapping[int, Sequence[Row]]) -> Table | None:
    """Return the mean accuracies of each row of runs at each length, by depth."""
    entries = []
    for length, rows in sorted(by_length.items()):
        for row in rows:
            accuracies: dict[str, list[float]] = {}
            for score in row.scores:
                for depth, accuracy in depths(score.record).items():
                    accuracies.setdefault(depth, []).append(accuracy)
            entry: Entry = {"heads": row.name, "sees_future": sight(row), "length": length}
            entry |= {depth: mean(values) for depth, values in accuracies.items()}
            entries.append(entry)
    names = [*NAMES, Column("length", "length")]
    return depth_table(f"Accuracy in %, by {DEPTH}: {where}", names, entries)
