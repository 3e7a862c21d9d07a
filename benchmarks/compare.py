"""Say which rows of a benchmark moved by more than their noise: `compare.py A.json B.json`.

A and B are records of one script of `benchmarks/`, say of `benchmarks/results/` and of a new run on
the same machine. Rows are matched by what they measure. The times of a row are compared on a log
scale by Welch's test over its repeated measurements, at the level that Holm's correction over all
rows leaves: of records without a difference, one in twenty names a row. A row is named where this
test finds a difference and its times differ by at least `--least` (0.02: 2%). Memory has no noise:
`--least` alone decides.

The noise within one run is less than that between two. On a shared machine record twice without a
change first. A ratio that all rows have in common (the median, printed last) is the machine's.

Exit code: 0; 1 where a row is slower or takes more memory; 2 for files that cannot be compared.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx.errors import UserError, plural
from rtx.report.ranking import SEEDS, Comparison
from rtx.report.ranking import compare as compared
from rtx.settings.schema import flat

Row = Mapping[str, Any]
SAMPLES = ("ms_all", "ms_turns", "values")
"""Fields of a row that hold its repeated measurements."""
SINGLE = ("ms", "graph_ms", "value")
"""Fields with one number, in rows without repeated measurements."""
MEMORY = ("peak_bytes", "bytes_above_imports")
IDENTITY = (
    "what",
    "key",
    "case",
    "group",
    "pattern",
    "backend",
    "memory",
    "dtype",
    "unit",
    *("N", "W", "C", "B", "H", "D", "layers", "hidden", "heads"),
    "overrides",
)
"""Fields that say what a row measures."""


@dataclass(frozen=True)
class Measured:
    """What one record says of a row."""

    samples: Sequence[float]
    is_rate: bool
    memory: float | None


@dataclass(frozen=True)
class Record:
    """The rows of a file by their names, and the machines that measured them."""

    rows: Mapping[str, Measured]
    machines: Sequence[str]


@dataclass(frozen=True)
class Move:
    """How a row has moved: B over A, with the bounds of the ratio where noise is known."""

    name: str
    ratio: float
    low: float
    high: float
    is_worse: bool

    def line(self) -> str:
        """Return the row as a line."""
        bounds = ""
        if self.low < self.high:
            bounds = f"  ({self.low:.2f} to {self.high:.2f})"
        return f"  x {self.ratio:.3f}{bounds}  {self.name}"


def main(words: Sequence[str] | None = None) -> int:
    """Compare two records, print which rows moved, and return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("a", type=Path, help="record before")
    parser.add_argument("b", type=Path, help="record after")
    parser.add_argument("--least", type=float, default=0.02, help="smallest share that counts")
    args = parser.parse_args(words)
    try:
        return report(read(args.a), read(args.b), args.least)
    except UserError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2


def report(first: Record, second: Record, least: float) -> int:
    """Print which rows moved and what was compared; return the exit code."""
    shared = sorted(first.rows.keys() & second.rows.keys())
    if not shared:
        raise UserError("the two records have no row in common")
    moves = time_moves(first.rows, second.rows, shared, least)
    memory = memory_moves(first.rows, second.rows, shared, least)
    show("slower", [move for move in moves if move.is_worse])
    show("faster", [move for move in moves if not move.is_worse])
    show("more memory", [move for move in memory if move.is_worse])
    show("less memory", [move for move in memory if not move.is_worse])
    print("\n".join(remarks(first.rows, second.rows, shared, len(moves))))
    if first.machines != second.machines:
        machines = f"{', '.join(first.machines)}; {', '.join(second.machines)}"
        print(f"not the same machine, so ratios are no verdict on the code: {machines}")
    return int(any(move.is_worse for move in [*moves, *memory]))


def read(path: Path) -> Record:
    """Return the rows of a record by their names; `UserError` for another file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    whole = record if isinstance(record, dict) else {"rows": record}
    rows = whole.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: holds no rows of a benchmark")
    varied = varied_keys([flat(row.get("config", {})) for row in rows])
    found: dict[str, Measured] = {}
    machines = set()
    for row in rows:
        measured = measurements(row)
        if not measured.samples and measured.memory is None:
            continue
        name = name_of(row, varied)
        if name in found:
            raise UserError(f"{path}: two rows are {name}")
        found[name] = measured
        machines.add(str(row.get("machine") or whole.get("machine") or whole.get("device")))
    return Record(found, sorted(machines))


def varied_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which the configurations of rows differ."""
    keys = sorted(set().union(*configs))
    return [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]


def name_of(row: Row, varied: Iterable[str]) -> str:
    """Return what a row measures, in words; of its configuration the keys in `varied`."""
    parts = []
    for field in IDENTITY:
        value = row.get(field)
        if isinstance(value, str):
            parts.append(value)
        elif isinstance(value, list):
            parts.append(" ".join(map(str, value)))
        elif value is not None:
            parts.append(f"{field}={value}")
    config = flat(row.get("config", {}))
    parts += [f"{key}={config[key]}" for key in varied if key in config]
    return " ".join(part for part in parts if part)


def measurements(row: Row) -> Measured:
    """Return the measurements of a row; one that failed or was left out has none."""
    samples = next((row[field] for field in SAMPLES if row.get(field)), None)
    if samples is None:
        samples = [row[field] for field in SINGLE if row.get(field)]
    memory = next((row[field] for field in MEMORY if row.get(field)), None)
    positive = [float(value) for value in samples if value > 0]
    return Measured(positive, str(row.get("unit", "")).endswith("/s"), memory)


def time_moves(
    before: Mapping[str, Measured],
    after: Mapping[str, Measured],
    shared: Iterable[str],
    least: float,
) -> list[Move]:
    """Return the rows whose times moved by more than their noise, the largest move first."""
    rows: dict[str, dict[str, float]] = {}
    pairs = []
    for name in shared:
        # Turns of two runs are no pairs, so they have different names.
        old = {f"a{n}": math.log(value) for n, value in enumerate(before[name].samples)}
        new = {f"b{n}": math.log(value) for n, value in enumerate(after[name].samples)}
        rows |= {f"before {name}": old, f"after {name}": new}
        pairs.append((f"after {name}", f"before {name}"))
    moves = []
    for (one, _), comparison in compared(rows, pairs).items():
        name = one.removeprefix("after ")
        move = move_of(name, comparison, after[name].is_rate)
        if move is not None and is_large(move.ratio, least):
            moves.append(move)
    return by_size(moves)


def move_of(name: str, comparison: Comparison, is_rate: bool) -> Move | None:
    """Return a row that moved by more than its noise, None for others."""
    if comparison.difference is None or comparison.verdict == "tied":
        return None
    center = comparison.difference
    low, high = (math.exp(center + sign * comparison.half) for sign in (-1, 1))
    return Move(name, math.exp(center), low, high, is_worse=(center > 0) != is_rate)


def memory_moves(
    before: Mapping[str, Measured],
    after: Mapping[str, Measured],
    shared: Iterable[str],
    least: float,
) -> list[Move]:
    """Return the rows whose memory moved, the largest move first."""
    moves = []
    for name in shared:
        old = before[name].memory
        new = after[name].memory
        if old and new and is_large(new / old, least):
            ratio = new / old
            moves.append(Move(name, ratio, ratio, ratio, is_worse=ratio > 1))
    return by_size(moves)


def is_large(ratio: float, least: float) -> bool:
    """Return whether a ratio is far enough from 1."""
    return abs(math.log(ratio)) >= math.log1p(least)


def by_size(moves: Iterable[Move]) -> list[Move]:
    """Return moves in falling order of their size."""
    return sorted(moves, key=lambda move: -abs(math.log(move.ratio)))


def show(title: str, moves: Sequence[Move]) -> None:
    """Print the rows that moved in one direction."""
    if moves:
        print(f"{title}: {plural(len(moves), 'row')}")
        print("\n".join(move.line() for move in moves))


def remarks(
    before: Mapping[str, Measured],
    after: Mapping[str, Measured],
    shared: Sequence[str],
    moved: int,
) -> list[str]:
    """Return lines on what was compared, and on what could not be."""
    few = 0
    ratios = []
    for name in shared:
        old = before[name].samples
        new = after[name].samples
        few += min(len(old), len(new)) < SEEDS
        if old and new:
            ratios.append(statistics.median(new) / statistics.median(old))
    lines = [f"{plural(len(shared) - few, 'row')} compared in time, {moved} moved"]
    if few:
        reason = f"fewer than {SEEDS} measurements in a record say nothing of noise"
        lines.append(f"{plural(few, 'row')} not compared in time: {reason}")
    for title, ours, theirs in (("A", before, after), ("B", after, before)):
        alone = len(ours.keys() - theirs.keys())
        if alone:
            lines.append(f"{plural(alone, 'row')} in {title} alone")
    if ratios:
        lines.append(f"median ratio of all rows, B over A: {statistics.median(ratios):.3f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
