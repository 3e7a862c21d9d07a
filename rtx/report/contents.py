"""The contents of a report, whatever it is written as: the answer, tables, plots, samples, and where it ran."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rtx.report.divergences import divergence_views, newest_divergence
from rtx.report.paper import heads_label, paper_tables, table_of
from rtx.report.plots import Plot, plots_of
from rtx.report.run_records import Cell, Collection, part
from rtx.report.score_rows import Protocol, Row, rows_by_protocol
from rtx.report.score_tables import departures, heads_in_layers, kinds_table, score_tables
from rtx.report.steps import StepRecord, equal_time_tables, paces_of, views
from rtx.report.tables import Column, Table
from rtx.wording import printable

SAMPLE_LETTERS = 600
"""Of a sample that are shown."""


@dataclass
class Report:
    """What a report says."""

    title: str
    problems: list[str]
    headline: str = ""
    """What may be concluded, in a sentence or two."""
    answer: Table | None = None
    """The kinds of heads, ranked."""
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    samples: list[tuple[str, str]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def build(found: Collection, title: str, records: Sequence[StepRecord] = ()) -> Report:
    """Return the report of all runs and step times that were found."""
    report, paces = Report(title, found.problems), paces_of(records)
    by_protocol = rows_by_protocol(found)
    report.problems += apart(by_protocol)
    for protocol, rows in by_protocol:
        if protocol and len({heads_label(row.config) for row in rows if row.scores and row.config}) > 1:
            table, said = kinds_table(protocol, rows, paces, metric_of(rows))
            if report.answer is None:
                report.headline, report.answer = said, table
            else:
                table.lines.insert(0, said)
                report.tables.append(table)
        report.tables += score_tables(protocol, rows, paces) if rows else []
    for table, said in equal_time_tables(found.cells, records):
        table.lines.insert(0, said)
        report.tables.append(table)
    report.tables += divergence_views(found.cells)
    report.tables += [table for record in records for table in views(record)]
    protocol, rows = by_protocol[0]
    unit = f"bits/{protocol.unit}" if protocol else "bits"
    report.plots = plots_of(report.answer, rows, found.cells, heads_in_layers(rows), unit)
    report.samples = [(cell.name, sample) for cell in found.cells if (sample := newest_sample(cell.folder))][:6]
    timed = [str(command) for record in records if (command := record.facts.get("command"))]
    report.commands = list(dict.fromkeys([*(found.commands or commands_of(found.cells)), *timed]))
    report.tables += [environment_table(found.cells), list_of_tables(found.cells, records)]
    report.tables = [table for table in report.tables if table.rows]
    return report


def metric_of(rows: Sequence[Row]) -> str:
    """Return what the kinds of a table are compared by: as the paper's table has it, where every score has that."""
    tables = [table_of(row.config) for row in rows if row.scores]
    metric = tables[0].metric.partition("/")[0] if tables and tables[0] else "bits"
    return metric if all(row.values(metric) for row in rows if row.scores) else "bits"


def apart(by_protocol: Sequence[tuple[Protocol | None, list[Row]]]) -> list[str]:
    """Say that runs of different data or protocol are set apart, and by what."""
    protocols = [protocol for protocol, _ in by_protocol if protocol]
    names = ("split", "mode", "unit", "data", "fingerprint", "length", "stride", "windows", "ablate", "stamps")
    differing = [name for name in names if len({repr(getattr(p, name)) for p in protocols}) > 1]
    said = ", ".join({"fingerprint": "data fingerprint"}.get(name, name) for name in differing)
    return [f"scores of {len(protocols)} protocols are set apart, a table each: they differ by {said}"] if said else []


def newest_sample(folder: Path) -> str:
    """Return the beginning of the last text that a run wrote, or nothing."""
    try:
        newest = max(folder.glob("samples/*.txt"), key=lambda path: path.stat().st_mtime, default=None)
        content = newest.read_bytes()[: 4 * SAMPLE_LETTERS] if newest else b""
    except OSError:
        return ""
    return printable(content.decode("utf-8", "replace"))[:SAMPLE_LETTERS]


def commands_of(cells: Sequence[Cell]) -> list[str]:
    """Return the command line of each run, as a user would type it."""
    lines = [line for cell in cells if isinstance(line := cell.environment.get("command"), str) and line]
    commands = []
    for line in lines:
        try:
            words = shlex.split(line)
        except ValueError:
            words = line.split()
        commands.append(shlex.join(["rtx", *words[1:]]))
    return commands


def environment_table(cells: Sequence[Cell]) -> Table:
    """Return software and machine: what all runs share, and for how many runs the rest holds."""
    facts: dict[str, list[str]] = {}
    for cell in (cell for cell in cells if cell.environment):
        env, git = cell.environment, part(cell.environment, "git")
        commit = str(git.get("commit", ""))[:12] + (" with changes" if git.get("changed") else "")
        own = {**part(env, "versions"), "git commit": commit}
        own |= {"device": env.get("gpu") or f"CPU, {env.get('threads')} threads", "python": env.get("python")}
        own |= {"data": cell.data.get("name"), "data fingerprint": cell.data.get("fingerprint")}
        for key, value in own.items():
            facts.setdefault(key, []).append(str(value or "none"))
    rows = []
    for key, values in facts.items():
        counted = "; ".join(f"{value} ({values.count(value)} runs)" for value in dict.fromkeys(values))
        rows.append({"what": key, "value": values[0] if len(set(values)) == 1 else counted})
    return Table("Environment", [Column("what", "what", brief=False), Column("value", "value", brief=False)], rows)


def list_of_tables(cells: Sequence[Cell], records: Sequence[StepRecord]) -> Table:
    """Return the paper's tables: how many rows of each have been run here, and the commands for the rest."""
    rows = []
    for table in paper_tables():
        scores = [Row([cell]) for cell in cells if cell.config and table_of(cell.config) == table]
        scores = [row for row in scores if row.cells[0].final is not None or row.cells[0].evals]
        done = {table.row_of(row.config) for row in scores} - {None}
        equal = {table.row_of(row.config) for row in scores if not departures(row, table)}
        timed = [row for record in records for row in record.rows if row.turns]
        timed_rows = {table.row_of(row.config) for row in timed if table_of(row.config, timed=True) == table} - {None}
        said = (
            [f"{len(done)} of {len(table.rows)} rows, {len(equal)} of them with the paper's settings"] if done else []
        )
        said += [f"{len(timed_rows)} of {len(table.rows)} rows timed"] if timed_rows else []
        if table.divergences:
            said = [f"{count} runs"] if (count := sum(newest_divergence(cell) is not None for cell in cells)) else []
        commands, run = "; ".join(table.commands), "; ".join(said) or "not run"
        rows.append({"table": table.name, "about": table.title, "run": run, "command": commands})
    columns = [("table", "table"), ("about", "about"), ("run", "run here"), ("command", "command")]
    return Table("The paper's tables", [Column(key, title, brief=False) for key, title in columns], rows)
