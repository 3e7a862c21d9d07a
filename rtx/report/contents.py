"""A report: the answer, tables, plots and where it ran; as a page that needs nothing else, and in other formats."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rtx.disk import replace_file
from rtx.errors import UserError, plural, printable
from rtx.report.certainty import certainty
from rtx.report.divergences import PAPER_KINDS, divergence_view, newest_divergence
from rtx.report.headline import Answer, answer
from rtx.report.lengths import tables_by_length
from rtx.report.paper import PaperTable, heads_label, paper_tables, table_of
from rtx.report.plots import Plot, plots_of
from rtx.report.run_records import Cell, Collection, collect
from rtx.report.score_rows import Row, rows_by_protocol
from rtx.report.score_tables import Kinds, Paces, departures, kinds_table, score_tables
from rtx.report.steps import StepRecord, paces_of, timed_records, views
from rtx.report.tables import Column, Table, filled
from rtx.report.time_plot import bits_and_time
from rtx.report.times import all_findings, all_runs, tables_of
from rtx.runs.folder import shown
from rtx.runs.records import EnvironmentRecord, Protocol


@dataclass
class Report:
    title: str
    problems: list[str]
    headline: str = ""  # what may be concluded, in a sentence or two, or why nothing may be
    lines: Sequence[str] = ()  # one for each rival, and what else to know before the tables
    noise: str = ""  # what differences to mistrust, behind the headline
    answer: Table | None = None  # the kinds of heads, ranked
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    def every_table(self) -> list[Table]:
        return [*([self.answer] if self.answer else []), *self.tables]

    @property
    def opening(self) -> str:
        """The headline and the noise of a report without lines between them."""
        return f"{self.headline} {self.noise}".strip()


def build(found: Collection, title: str) -> Report:
    """Return the report of all runs and timed steps of a collection."""
    records = timed_records(found.steps)
    paces, by_protocol = paces_of(records), rows_by_protocol(found.cells)
    report = Report(title, found.problems)
    compared = [protocol for protocol, rows in by_protocol if protocol and several_kinds(rows)]
    leading = compared[0] if compared else by_protocol[0][0]
    made: list[Plot | None] = []
    for protocol, rows in by_protocol:
        kinds = add_scores(report, protocol, rows, paces, leads=protocol == leading)
        if kinds and protocol == leading:
            made.append(add_times(report, kinds, records))
    if not found.cells:
        report.headline = "No scores here: step times alone."
    report.tables += tables_by_length(found.cells)
    report.tables += [
        divergence_view(cell, one) for cell in found.cells if (one := newest_divergence(cell))
    ]
    report.tables += [table for record in records for table in views(record)]
    report.tables += [
        one for one in (environment_table(found.cells), list_of_tables(found.cells)) if one.rows
    ]
    protocol, rows = by_protocol[0]
    report.plots = [plot for plot in made if plot]
    report.plots += plots_of(
        report.answer, rows, found.cells, f"bits/{protocol.unit}" if protocol else "bits"
    )
    own = found.commands or [cell.command for cell in found.cells if cell.command]
    timed = [record.facts.command for record in records if record.facts.command]
    report.commands = [
        printable(command).replace("\n", " ") for command in dict.fromkeys([*own, *timed])
    ]
    return report


def finished(rows: Sequence[Row]) -> list[Row]:
    """Return rows with their finished runs that have a score, those without any left out."""
    done = [row.done() for row in rows]
    return [row for row in done if row.scores]


def several_kinds(rows: Sequence[Row]) -> bool:
    """Tell whether finished runs are of several kinds of heads."""
    return len({heads_label(row.config) for row in finished(rows)}) > 1


def add_scores(
    report: Report, protocol: Protocol | None, rows: Sequence[Row], paces: Paces, leads: bool
) -> Kinds | None:
    """Add the tables of a protocol to a report, and return its kinds of heads; None where there are not several.

    `leads`: whether the table of kinds of heads is the answer of the report, with a headline of its own to come. Other
    tables say before them how certain they are.
    """
    ranked, tables = finished(rows), score_tables(protocol, rows, paces)
    unit = f"bits/{protocol.unit}" if protocol else "bits"
    kinds = None
    said = Answer("", ())
    if protocol and several_kinds(rows):
        kinds = kinds_table(protocol, ranked, paces)
        said = answer(kinds, ())
        left_out = sum(len(row.scores) for row in rows) - sum(len(row.scores) for row in ranked)
        kinds.table.lines += (
            [f"Left out: {plural(left_out, 'scored run')} that did not end."] if left_out else []
        )
        tables = [kinds.table, *tables]
    sure = certainty(ranked, unit, kinds.table if kinds else None, said.headline)
    if leads:
        report.headline, report.noise = sure.verdict, sure.noise
        report.answer = tables.pop(0) if kinds else None
    elif tables:
        tables[0].lines[:0] = [f"{sure.verdict} {sure.noise}".strip(), *said.lines]
    report.tables += tables
    return kinds


def add_times(report: Report, kinds: Kinds, records: Sequence[StepRecord]) -> Plot | None:
    """Add what seconds of training tell of the kinds of heads, headline and lines first; return the plot of it."""
    runs, _ = all_runs(kinds, records)
    findings = all_findings(kinds, records)
    conclusion = answer(kinds, findings)
    report.headline = conclusion.headline
    report.lines = conclusion.lines
    constant = all(
        one.row.config["optimizer.schedule"] == "constant" for one in kinds.picked.values()
    )
    report.tables[:0] = tables_of(findings, kinds, constant)
    ahead = [kind for kind in kinds.picked if kind not in kinds.legal]
    return bits_and_time(
        {kind: of_kind.curves for kind, of_kind in runs.items()}, ahead, kinds.unit
    )


def facts_of_environment(record: EnvironmentRecord) -> dict[str, str | None]:
    """Return versions, code, device and data of a run by their names."""
    commit = record.git.get("commit") or "none"
    changes = " with changes" if commit.endswith("-dirty") else ""
    return {
        **record.versions,
        "git commit": f"{commit[:12]}{changes}",
        "device": record.gpu or f"CPU, {record.threads} threads",
        "python": record.python,
        "data": record.data.name,
        "data fingerprint": record.data.fingerprint,
    }


def environment_table(cells: Sequence[Cell]) -> Table:
    facts = []
    for cell in cells:
        if cell.environment:
            facts.append(facts_of_environment(cell.environment))
    names = dict.fromkeys(name for one in facts for name in one)
    rows = []
    for name in names:
        values = dict.fromkeys(str(one[name]) for one in facts if name in one)
        rows.append({"what": name, "value": "; ".join(values)})
    return Table(
        "Environment",
        [Column("what", "what", brief=False), Column("value", "value", brief=False)],
        rows,
    )


def list_of_tables(cells: Sequence[Cell]) -> Table:
    """Return the paper's tables: how many rows of each have been run here, and the commands for the rest."""
    rows = []
    for table in paper_tables():
        mine = [
            Row([cell])
            for cell in cells
            if (cell.final or cell.scores) and table_of(cell.config) == table
        ]
        equal = [row for row in mine if not departures(row, table)]
        done, same = (
            len({table.row_of(row.config) for row in found} - {None}) for found in (mine, equal)
        )
        run = (
            f"{done} of {len(table.rows)} rows, {same} of them with the paper's settings"
            if done
            else "not run"
        )
        rows.append({"table": f"Table {table.number}", "about": table.title, "run": run})
        rows[-1]["command"] = "; ".join(table.commands)
    columns = [("table", "table"), ("about", "about"), ("run", "run here"), ("command", "command")]
    return Table(
        "The paper's tables", [Column(key, title, brief=False) for key, title in columns], rows
    )


def printed_view(table: PaperTable) -> Table:
    """Return a table of the paper with the numbers that it prints."""
    rows: list[dict[str, Any]] = []
    if table.divergences:
        for layer, pairs in enumerate(table.divergences):
            rows.append({"layer": str(layer)})
            for kind, (middle, deviation) in zip(PAPER_KINDS, pairs, strict=True):
                rows[-1][kind] = middle
                rows[-1][f"{kind} deviation"] = deviation
        spreads = [Column(kind, kind, 4, f"{kind} deviation") for kind in PAPER_KINDS]
        return Table("", [Column("layer", "layer"), *spreads], rows)
    for row in table.rows:
        rows.append({"row": row.label, "layers": row.layers, "heads": row.heads})
        rows[-1] |= {"value": row.value, "steps_per_second": row.steps_per_second}
    columns = [Column("row", "row"), Column("layers", "layers"), Column("heads", "heads")]
    values = [row.value for row in table.rows]
    speeds = [row.steps_per_second for row in table.rows]
    columns.append(Column("value", table.metric, decimals(values)))
    columns.append(Column("steps_per_second", "steps/s", decimals(speeds)))
    return Table("", columns, rows)


def decimals(values: Sequence[float | None]) -> int:
    """Return how many digits the most exact of some numbers has behind its point."""
    return max(len(str(value).partition(".")[2]) for value in values)


def write(report: Report, output: Path) -> list[Path]:
    """Write the report in every format and return the paths; `UserError` in a folder with files of somebody else's."""
    texts = {"json": as_json, "html": html, "md": markdown, "csv": comma_separated, "tex": latex}
    files = {
        f"report.{form}": text(report).encode("utf-8", "replace") for form, text in texts.items()
    }
    files |= {f"{plot.name}.png": plot.png for plot in report.plots}
    foreign = (
        []
        if (output / "report.json").exists()
        else [name for name in files if (output / name).exists()]
    )
    if foreign:
        raise UserError(
            f"output={output}: holds a {foreign[0]} that rtx report did not write; name another folder"
        )
    output.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        replace_file(
            output / name, lambda file, content=content: file.write(content), durable=False
        )
    return [output / name for name in files]


def save_plots(folders: Iterable[Path]) -> str:
    """Save beside the runs of each folder the first plot that their records allow, and return their paths in lines."""
    lines = []
    for folder in folders:
        for plot in build(collect([folder]), "").plots[:1]:
            path = folder / f"{plot.name}.png"
            try:
                replace_file(path, lambda file, png=plot.png: file.write(png), durable=False)
                lines.append(shown(path))
            except OSError as error:
                lines.append(f"no plot: {path}: {error.strerror}")
    return "\n".join(lines)


html = partial(filled, "page.html.j2")
markdown = partial(filled, "report.md.j2")
latex = partial(filled, "report.tex.j2")


def comma_separated(report: Report) -> str:
    """Return all tables as one CSV file; numbers as they are, not rounded."""
    import pandas

    tables = report.every_table()
    frames = [
        pandas.DataFrame(one.rows).assign(table=one.title, protocol=" ".join(one.lines[:1]))
        for one in tables
    ]
    return pandas.concat([frame.map(no_formula).convert_dtypes() for frame in frames]).to_csv(
        index=False
    )


def no_formula(value: Any) -> Any:
    """Return the value of a cell; a text that spreadsheets would compute stands behind a quote."""
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )


def as_json(report: Report) -> str:
    """Return tables and commands as JSON; numbers as they are, not rounded."""
    said = {
        "title": report.title,
        "headline": report.headline,
        "lines": report.lines,
        "noise": report.noise,
    }
    said |= {"problems": report.problems}
    tables = [
        {"title": table.title, "lines": table.lines, "footnotes": table.notes, "rows": table.rows}
        for table in report.every_table()
    ]
    return (
        json.dumps(
            {**said, "tables": tables, "commands": report.commands}, indent=1, ensure_ascii=False
        )
        + "\n"
    )
