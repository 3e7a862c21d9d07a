"""Step times that `rtx bench steps` recorded, beside the paper's: ratios to the local row, for its machine is another.

A record is outputs/<name>/bench/steps-<key>.json; nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx.report.cells import Cell, Collection, flat, read_object
from rtx.report.compared import common, speeds
from rtx.report.local import local_row
from rtx.report.matching import differing_keys, kind_of, paper_row, settings_changed
from rtx.report.names import label_of
from rtx.report.paper import PaperTable, paper_tables, timed_table_of
from rtx.report.report import Report
from rtx.report.scores import Row
from rtx.report.views import Column, Value, View, count, number, text
from rtx.wording import plural

WHAT = "training steps in turn"
"""What a record says it is."""

DRAWN = "ids drawn at random, no data read"
READ = "training batches of the data"
"""Where the ids of a record came from."""

FOLLOWS_COUNTS = (
    "selection=causal and nearest: a step takes the longer the less even clusters are filled, so that real data may "
    "take longer than ids drawn at random"
)
"""What such ids cannot tell."""

PLACES = ("bench/steps-*.json", "*/bench/steps-*.json")
"""Where records are below a folder."""

COLUMNS = (
    Column("row", "row", brief=True),
    Column("milliseconds", "ms", True, brief=True),
    Column("steps_per_second", "steps/s", True, brief=True),
    Column("speed_ratio", "x local", True, brief=True),
    Column("spread", "over turns"),
    Column("paper_steps_per_second", "paper", True, brief=True),
    Column("paper_speed_ratio", "paper x", True, brief=True),
    Column("peak_bytes", "peak GiB", True),
    Column("parameters", "parameters", True),
    Column("turns", "turns", True),
    Column("notes", "why not"),
)

SHORT_NAME = 22
"""Letters of a row's name up to which a terminal has room for the spread, too."""


@dataclass(frozen=True)
class TimedRow:
    """A row as its record has it."""

    config: Mapping[str, Any]
    """Every value by its dotted key."""
    turns: tuple[float, ...]
    """Milliseconds of a step in each turn."""
    reason: str = ""
    """Why it was left out, where it was."""
    peak_bytes: int | None = None
    parameters: int | None = None

    @property
    def milliseconds(self) -> float | None:
        """The median over turns."""
        return statistics.median(self.turns) if self.turns else None

    @property
    def speed(self) -> float | None:
        """Steps a second."""
        return 1e3 / self.milliseconds if self.milliseconds else None

    @property
    def machine(self) -> tuple[str, ...]:
        """What its pace depends on but the model and the batch; a record is of one machine."""
        return tuple(str(self.config.get(f"hardware.{key}")) for key in ("name", "threads", "precision", "compile"))


@dataclass(frozen=True)
class StepRecord:
    """What one `rtx bench steps` measured."""

    rows: tuple[TimedRow, ...]
    facts: Mapping[str, Any]
    """The record without its rows: settings, machine, versions, time."""

    def how(self) -> str:
        """Say how the times came about, in a line."""
        bench, facts = self.facts.get("bench") or {}, self.facts
        done = max((len(row.turns) for row in self.rows), default=0)
        steps, warmup = (plural(int(bench.get(key) or 0), "step") for key in ("per_turn", "warmup"))
        versions = facts.get("versions")
        torch = f"torch {versions.get('torch')}" if isinstance(versions, Mapping) else ""
        where = [str(facts.get("device") or ""), torch, str(facts.get("time") or "")[:10]]
        of = f" of {bench['turns']}" if bench.get("turns") and done < bench["turns"] else ""
        return (
            f"Rows in turn: the median of {plural(done, 'turn')}{of} of {steps}, "
            f"after {warmup} of warm-up; {facts.get('ids')}; {', '.join(filter(None, where))}."
        )


def record_path(folder: Path, hashes: Iterable[str], device: str) -> Path:
    """Return where a record stands below outputs/<name>: the same rows on the same device replace it."""
    key = hashlib.sha256("\n".join([device, *sorted(hashes)]).encode()).hexdigest()[:12]
    return folder / "bench" / f"steps-{key}.json"


def recorded(folder: Path) -> list[Path]:
    """Return the records of a folder, oldest names first."""
    return sorted({path for place in PLACES for path in folder.glob(place)})


def read_records(folders: Iterable[Path], found: Collection) -> list[StepRecord]:
    """Return the records below folders; one that cannot be read is told in a line."""
    records = []
    for path in dict.fromkeys(path for folder in folders for path in recorded(folder)):
        content = read_object(path, found)
        if content is None:
            continue
        try:
            records.append(read_record(content))
        except (KeyError, TypeError, ValueError, AttributeError):
            found.problems.append(f"{path}: is not a record of rtx bench steps")
    return records


def read_record(content: Mapping[str, Any]) -> StepRecord:
    """Return a record from its JSON.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is none.
    """
    if content["what"] != WHAT:
        raise ValueError(content["what"])
    rows = [
        TimedRow(
            config=flat(row["config"]),
            turns=tuple(float(value) for value in row["ms_turns"]),
            reason=str(row.get("reason") or ""),
            peak_bytes=row.get("peak_bytes"),
            parameters=row.get("parameters"),
        )
        for row in content["rows"]
    ]
    if any(value <= 0 for row in rows for value in row.turns):
        raise ValueError("a step without duration")
    return StepRecord(tuple(rows), {key: value for key, value in content.items() if key != "rows"})


def views(record: StepRecord) -> list[View]:
    """Return a table for each of the paper's that has rows here, and one for all other rows."""
    groups: dict[int, tuple[PaperTable | None, list[TimedRow]]] = {}
    for row in record.rows:
        table = timed_table_of(row.config)
        table = table if table and paper_row(row.config, table) else None
        groups.setdefault(table.number if table else 99, (table, []))[1].append(row)
    return [steps_view(record, *groups[key]) for key in sorted(groups)]


def steps_view(record: StepRecord, table: PaperTable | None, rows: Sequence[TimedRow]) -> View:
    """Return a table of step times: ours, their ratio to the local row's, and the paper's."""
    names = names_of(rows)
    if table:
        printed = [paper_row(row.config, table) for row in rows]
        order = {id(row): table.rows.index(own) for row, own in zip(rows, printed, strict=True) if own}
        rows, names = zip(*sorted(zip(rows, names, strict=True), key=lambda pair: order[id(pair[0])]), strict=True)
    title = f"{table.name}. {table.title}: measured training steps" if table else "Measured training steps"
    narrow = max(map(len, names)) <= SHORT_NAME
    columns = [dataclasses.replace(one, brief=narrow) if one.key == "spread" else one for one in COLUMNS]
    view = View(title, columns, [], [record.how()])
    if table and not table.split:  # the footnotes of other tables are about their scores
        view.footnotes = table.footnotes
    for row, name in zip(rows, names, strict=True):
        view.rows.append(values(row, name, local_row(row, record.rows), table))
    ratios, ids = any(local_row(row, record.rows) for row in rows), record.facts.get("ids")
    view.lines += lines_below(rows, names, ratios, ids, table)
    return view.without_empty()


def lines_below(
    rows: Sequence[TimedRow], names: Sequence[str], ratios: bool, ids: str | None, table: PaperTable | None
) -> list[str]:
    """Return what to know of a table: what its ratios are, what is not the paper's, and what failed."""
    lines = []
    if not ratios:
        same = "the same N, batch and hardware"
        lines.append(f"No ratios: they are to a row of local heads alone (routing.heads=0) of {same}.")
    elif table:
        lines.append(f"x local: speed over the local row's; paper: {table.speed}; paper x: over its local row's.")
    if ids == DRAWN and any(follows_counts(row.config) for row in rows):
        lines.append(f"{FOLLOWS_COUNTS}.")
    if table:
        changes = [changes_of(row, table) for row in rows]
        shared = common(changes)
        lines += [f"Not the paper's setting: {'; '.join(shared)}."] if shared else []
        own = dict.fromkeys(change for each in changes for change in each if change not in shared)
        for change in own:
            which = [name for name, each in zip(names, changes, strict=True) if change in each]
            lines.append(f"Not the paper's row: {', '.join(which)}: {change}.")
    for reason in dict.fromkeys(row.reason for row in rows if row.reason):
        which = [name for row, name in zip(rows, names, strict=True) if row.reason == reason]
        lines.append(f"Failed: {', '.join(which)}: {reason}.")
    return lines


def follows_counts(config: Mapping[str, Any]) -> bool:
    """Tell whether each position chooses its clusters by itself, so that the data decide how many members one has."""
    return kind_of(config) == "routing" and config.get("routing.selection") in ("causal", "nearest")


def changes_of(row: TimedRow, table: PaperTable) -> list[str]:
    """Return what of a row is not as the paper has it, each as `key=ours (paper: theirs)`."""
    printed, layers = paper_row(row.config, table), row.config.get("model.layers")
    other = printed is not None and printed.layers not in (None, layers)
    return [
        *settings_changed(row.config, table),
        *([f"model.layers={layers} (paper: {printed.layers})"] if other and printed else []),
    ]


def values(row: TimedRow, name: str, local: TimedRow | None, table: PaperTable | None) -> list[Value]:
    """Return the entries of a row."""
    printed = paper_row(row.config, table) if table else None
    peak = row.peak_bytes / 2**30 if row.peak_bytes else None
    return [
        text(name),
        Value("failed", None, row.reason) if row.reason and not row.turns else milliseconds(row.milliseconds),
        *speeds(row.speed, local.speed if local else None),
        spread(row, local),
        *speeds(printed.steps_per_second if printed else None, table.local_speed() if table else None),
        number(peak, 2),
        count(row.parameters),
        count(len(row.turns)),
        text(row.reason),
    ]


def milliseconds(value: float | None) -> Value:
    """Return a time with about four digits."""
    return Value() if value is None else Value(f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2}f}", value)


def spread(row: TimedRow, local: TimedRow | None) -> Value:
    """Return the least and the greatest ratio to the local row that a single turn gave."""
    if local is None or row is local:
        return Value()
    ratios = [theirs / ours for ours, theirs in zip(row.turns, local.turns, strict=False)]
    return text(f"{min(ratios):.2f} to {max(ratios):.2f}") if len(ratios) > 1 else Value()


def names_of(rows: Sequence[TimedRow]) -> list[str]:
    """Return a short name for each row, which tells it from the others: its heads, and what else rows of them vary."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(kind_of(row.config), []).append(Row([Cell(Path(), row.config)]))
    variants = list(dict.fromkeys(key for alike in by_kind.values() for key in differing_keys(alike)))
    names = [label_of(row.config, variants) for row in rows]
    return [f"{name} ({at})" if names.count(name) > 1 else name for at, name in enumerate(names, 1)]


def add_steps(report: Report, records: Sequence[StepRecord]) -> None:
    """Put the tables of step times behind those of scores, and their rows into the list of the paper's tables."""
    report.views += [view for record in records for view in views(record)]
    mine = [str(command) for record in records if (command := record.facts.get("command"))]
    report.commands = list(dict.fromkeys([*report.commands, *mine]))
    if report.tables:
        count_timed(report.tables, records)


def count_timed(view: View, records: Sequence[StepRecord]) -> None:
    """Say in the list of the paper's tables how many rows of each have been timed."""
    timed: dict[str, set[Any]] = {}
    for row in (row for record in records for row in record.rows if row.turns):
        table = timed_table_of(row.config)
        if table and (printed := paper_row(row.config, table)):
            timed.setdefault(table.name, set()).add(printed)
    sizes = {table.name: len(table.rows) for table in paper_tables()}
    at = [column.key for column in view.columns].index("run")
    for row in view.rows:
        name = row[0].text
        if name in timed:
            said = f"{len(timed[name])} of {sizes[name]} rows timed"
            row[at] = text(said if row[at].text == "not run" else f"{row[at].text}; {said}")
