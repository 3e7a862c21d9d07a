"""A report: its headline, tables, plots and commands, from the records of runs.

`rtx/report/formats.py` writes it to files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rtx.errors import plural, printable
from rtx.report.certainty import certainty
from rtx.report.divergences import divergence_view, newest_divergence
from rtx.report.headline import Answer, answer
from rtx.report.lengths import tables_by_length
from rtx.report.paper import heads_label
from rtx.report.paper_views import list_of_tables
from rtx.report.plots import Plot, plots_of
from rtx.report.pretrained_comparisons import Comparison, command_of, comparisons
from rtx.report.pretrained_plots import plots_of as pretrained_plots
from rtx.report.pretrained_tables import (
    dense_table,
    headlines,
    loss_table,
    pairs_of,
    pairs_table,
)
from rtx.report.run_records import Cell, Collection
from rtx.report.score_rows import ProtocolRows, Row, rows_by_protocol
from rtx.report.score_tables import Kinds, Paces, kinds_table, score_tables
from rtx.report.steps import StepRecord, newest_rows, timed_records, views
from rtx.report.time_plot import bits_and_time
from rtx.report.times import all_findings, all_runs, tables_of
from rtx.runs.records import EnvironmentRecord
from rtx.tables import Column, Table


@dataclass
class Report:
    """What a report says.

    Args:
        problems: a line for each record that is missing or damaged.
        headline: the verdict in a sentence or two, or why there is none.
        lines: one for each rival, and what else to know before the tables.
        noise: which differences to mistrust.
        answer: the ranking of the kinds of heads; None: there is one kind.
        commands: those that made the runs.
    """

    title: str
    problems: list[str]
    headline: str = ""
    lines: Sequence[str] = ()
    noise: str = ""
    answer: Table | None = None
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    def every_table(self) -> list[Table]:
        if self.answer is None:
            return self.tables
        return [self.answer, *self.tables]

    @property
    def opening(self) -> str:
        """The headline and the noise, for a report without lines between them."""
        return f"{self.headline} {self.noise}".strip()


def build(collection: Collection, title: str) -> Report:
    """Return the report of all runs, timed steps and pretrained models of a collection."""
    if collection.pretrained and not collection.cells and not collection.steps:
        return report_on_pretrained(collection, title)
    records = timed_records(collection.steps)
    paces = newest_rows(records)
    groups = rows_by_protocol(collection.cells)
    leading = leading_group(groups)
    report = Report(title, collection.problems)
    for group in groups:
        kinds = add_scores(report, group, paces, leads=group is leading)
        if kinds and group is leading:
            add_times(report, kinds, records)
    if not collection.cells:
        report.headline = "No scores here: step times alone."
    report.tables += further_tables(collection.cells, groups, records)
    report.plots += plots_of(report.answer, groups[0].rows, collection.cells, unit_of(groups[0]))
    report.commands = commands_of(collection, records)
    for comparison in comparisons(collection.pretrained):
        add_pretrained(report, comparison)
    return report


def report_on_pretrained(collection: Collection, title: str) -> Report:
    """Return the report of analyses of pretrained models alone.

    The table of losses of the first comparison is its answer.
    """
    report = Report(title, collection.problems)
    sentences: list[str] = []
    for comparison in comparisons(collection.pretrained):
        sentences += add_pretrained(report, comparison)
    report.headline = " ".join(sentences[:1])
    report.lines = sentences[1:]
    report.answer = report.tables.pop(0)
    return report


def add_pretrained(report: Report, comparison: Comparison) -> list[str]:
    """Add the tables, plots and commands of a comparison; return what it allows to conclude."""
    pairs = pairs_of(comparison)
    sentences = headlines(comparison, pairs)
    losses = loss_table(comparison)
    report.tables += [losses, pairs_table(comparison, pairs), dense_table(comparison)]
    report.plots += pretrained_plots(comparison)
    report.commands += [command_of(record) for record in comparison.texts.values()]
    return sentences


def leading_group(groups: Sequence[ProtocolRows]) -> ProtocolRows:
    """Return the rows of the first protocol that has scores of several kinds of heads.

    Where there is none, those of the first protocol.
    """
    for group in groups:
        if has_several_kinds(group):
            return group
    return groups[0]


def has_several_kinds(group: ProtocolRows) -> bool:
    """Tell whether the finished runs with a score by a protocol are of several kinds of heads."""
    kinds = {heads_label(row.config) for row in finished(group.rows)}
    return group.protocol is not None and len(kinds) > 1


def finished(rows: Sequence[Row]) -> list[Row]:
    """Return rows with their finished runs that have a score; rows without any are left out."""
    done = [row.done() for row in rows]
    return [row for row in done if row.scored]


def unit_of(group: ProtocolRows) -> str:
    """Return the unit of the scores of a protocol, such as `bits/byte`."""
    return f"bits/{group.protocol.unit}" if group.protocol else "bits"


def add_scores(report: Report, group: ProtocolRows, paces: Paces, leads: bool) -> Kinds | None:
    """Add the tables of a protocol; return its kinds of heads, or None where there is one kind.

    `leads`: whether the ranking of the kinds is the answer of the report. Other tables begin with
    lines on how certain they are.
    """
    ranked = finished(group.rows)
    tables = score_tables(group.protocol, group.rows, paces)
    kinds = None
    conclusion = Answer("", ())
    if group.protocol and has_several_kinds(group):
        kinds = kinds_table(group.protocol, ranked, paces)
        kinds.table.lines += lines_on_unfinished(group.rows, ranked)
        conclusion = answer(kinds, ())
        tables.insert(0, kinds.table)
    ranking = kinds.table if kinds else None
    sure = certainty(ranked, unit_of(group), ranking, conclusion.headline)
    if leads:
        report.headline = sure.verdict
        report.noise = sure.noise
        report.answer = ranking
    elif tables:
        opening = f"{sure.verdict} {sure.noise}".strip()
        tables[0].lines[:0] = [opening, *conclusion.lines]
    report.tables += [table for table in tables if table is not report.answer]
    return kinds


def lines_on_unfinished(rows: Sequence[Row], ranked: Sequence[Row]) -> list[str]:
    """Return a line that counts the scored runs that are not ranked; none where all are."""
    scored = sum(len(row.scored) for row in rows)
    left_out = scored - sum(len(row.scored) for row in ranked)
    if not left_out:
        return []
    return [f"Left out: {plural(left_out, 'scored run')} that did not end."]


def add_times(report: Report, kinds: Kinds, records: Sequence[StepRecord]) -> None:
    """Add what seconds of training say on the kinds of heads: headline, lines, tables and plot."""
    findings = all_findings(kinds, records)
    conclusion = answer(kinds, findings)
    report.headline = conclusion.headline
    report.lines = conclusion.lines
    schedules = {pick.row.config["optimizer.schedule"] for pick in kinds.picked.values()}
    report.tables[:0] = tables_of(findings, kinds, constant=schedules == {"constant"})
    runs, _ = all_runs(kinds, records)
    curves = {kind: runs_of_kind.curves for kind, runs_of_kind in runs.items()}
    see_future = [kind for kind in kinds.picked if kind not in kinds.legal]
    plot = bits_and_time(curves, see_future, kinds.unit)
    if plot:
        report.plots.append(plot)


def further_tables(
    cells: Sequence[Cell], groups: Sequence[ProtocolRows], records: Sequence[StepRecord]
) -> list[Table]:
    """Return the tables behind those of scores: by length, divergences, step times, environment."""
    tables = tables_by_length(groups)
    for cell in cells:
        divergence = newest_divergence(cell)
        if divergence:
            tables.append(divergence_view(cell, divergence))
    for record in records:
        tables += views(record)
    environment = environment_table(cells)
    if environment.rows:
        tables.append(environment)
    tables.append(list_of_tables(cells))
    return tables


def commands_of(collection: Collection, records: Sequence[StepRecord]) -> list[str]:
    """Return the commands of sweeps, or else of runs, and those that timed steps.

    Each is on one line.
    """
    commands = list(collection.commands)
    if not commands:
        commands += [cell.command for cell in collection.cells]
    commands += [record.facts.command for record in records]
    lines = [printable(command).replace("\n", " ") for command in commands if command]
    return list(dict.fromkeys(lines))


def environment_table(cells: Sequence[Cell]) -> Table:
    """Return versions, code, device and data of runs, with all values that occur."""
    values: dict[str, dict[str, None]] = {}
    for cell in cells:
        if cell.environment:
            for name, value in environment_of(cell.environment).items():
                values.setdefault(name, {})[str(value)] = None
    columns = [Column("what", "what", brief=False), Column("value", "value", brief=False)]
    rows = [{"what": name, "value": "; ".join(texts)} for name, texts in values.items()]
    return Table("Environment", columns, rows)


def environment_of(record: EnvironmentRecord) -> dict[str, str | None]:
    """Return versions, code, device and data of a run by their names."""
    commit = record.git.get("commit") or "none"
    code = commit[:12]
    if commit.endswith("-dirty"):
        code += " with changes"
    device = record.gpu or "CPU"
    if record.threads and not record.gpu:
        device = f"CPU, {plural(record.threads, 'thread')}"
    return {
        **record.versions,
        "git commit": code,
        "device": device,
        "python": record.python,
        "data": record.data.name,
        "data fingerprint": record.data.fingerprint,
    }
