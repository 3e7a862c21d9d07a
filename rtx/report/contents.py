"""The contents of a report, whatever it is written as: the answer, tables, plots, and where it ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rtx.report.divergences import divergence_views, newest_divergence
from rtx.report.paper import heads_label, paper_tables, table_of
from rtx.report.plots import Plot, plots_of
from rtx.report.run_records import Cell, Collection
from rtx.report.score_rows import Row, rows_by_protocol
from rtx.report.score_tables import departures, kinds_table, score_tables
from rtx.report.steps import StepRecord, equal_time_tables, paces_of, views
from rtx.report.tables import Column, Table


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
    commands: list[str] = field(default_factory=list)

    def every_table(self) -> list[Table]:
        """Return the answer and all other tables."""
        return [*([self.answer] if self.answer else []), *self.tables]


def build(found: Collection, title: str, records: Sequence[StepRecord] = ()) -> Report:
    """Return the report of all runs and step times that were found."""
    paces, by_protocol = paces_of(records), rows_by_protocol(found.cells)
    report = Report(title, found.problems)
    for protocol, rows in by_protocol:
        if protocol and len({heads_label(row.config) for row in rows if row.scores}) > 1:
            table, said = kinds_table(protocol, rows, paces, metric_of(rows))
            if report.answer is None:
                report.headline, report.answer = said, table
            else:
                table.lines.insert(0, said)
                report.tables.append(table)
        report.tables += score_tables(protocol, rows, paces)
    for table, said in equal_time_tables(found.cells, records):
        table.lines.insert(0, said)
        report.tables.append(table)
    report.tables += [*divergence_views(found.cells), *(table for record in records for table in views(record))]
    report.tables += [environment_table(found.cells), list_of_tables(found.cells, records)]
    protocol, rows = by_protocol[0]
    report.plots = plots_of(report.answer, rows, found.cells, f"bits/{protocol.unit}" if protocol else "bits")
    own = found.commands or [cell.command for cell in found.cells if cell.command]
    timed = [record.facts["command"] for record in records if "command" in record.facts]
    report.commands = list(dict.fromkeys([*own, *timed]))
    return report


def metric_of(rows: Sequence[Row]) -> str:
    """Return what the kinds of a table are compared by: as the paper's table has it, where every score has that."""
    scored = [row for row in rows if row.scores]
    table = table_of(scored[0].config)
    perplexity = table and table.metric.startswith("perplexity") and all(row.values("perplexity") for row in scored)
    return "perplexity" if perplexity else "bits"


def environment_table(cells: Sequence[Cell]) -> Table:
    """Return software and machine: what all runs share, and for how many runs the rest holds."""
    facts: dict[str, list[str]] = {}
    for env in (cell.environment for cell in cells if cell.environment):
        git = env.get("git") or {}
        own = {**env["versions"], "git commit": git.get("commit", "")[:12] + " with changes" * bool(git.get("changed"))}
        own |= {"device": env["gpu"] or f"CPU, {env['threads']} threads", "python": env["python"]}
        own |= {"data": env["data"]["name"], "data fingerprint": env["data"]["fingerprint"]}
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
        scored = [Row([cell]) for cell in cells if (cell.final or cell.scores) and table_of(cell.config) == table]
        timed = [row for record in records for row in record.rows if table_of(row.config, timed=True) == table]
        done, equal, paced = (
            len({table.row_of(row.config) for row in found} - {None})
            for found in (scored, [row for row in scored if not departures(row, table)], timed)
        )
        count = sum(newest_divergence(cell) is not None for cell in cells) if table.divergences else 0
        said = [f"{done} of {len(table.rows)} rows, {equal} of them with the paper's settings"] if done else []
        said += [f"{paced} of {len(table.rows)} rows timed"] if paced else []
        said += [f"{count} runs"] if count else []
        commands, run = "; ".join(table.commands), "; ".join(said) or "not run"
        rows.append({"table": f"Table {table.number}", "about": table.title, "run": run, "command": commands})
    columns = [("table", "table"), ("about", "about"), ("run", "run here"), ("command", "command")]
    return Table("The paper's tables", [Column(key, title, brief=False) for key, title in columns], rows)
