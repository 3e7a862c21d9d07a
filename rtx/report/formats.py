"""A report as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from rtx.report.report import Report
from rtx.report.views import DASH, Value, View


def markdown(report: Report) -> str:
    """Return the report as Markdown."""
    lines = [f"# {report.title}", ""]
    if report.problems:
        lines += ["To know:", "", *(f"- {escaped(problem)}" for problem in report.problems), ""]
    for view in report.views:
        lines += markdown_view(view)
    if report.commands:
        lines += ["## To reproduce", "", "```", *report.commands, "```", ""]
    for view in (report.differences, report.environment, report.tables):
        if view:
            lines += markdown_view(view)
    if report.samples:
        lines += ["## Samples", ""]
        for name, sample in report.samples:
            lines += [f"{name}:", "", *(f"    {line}" for line in sample.splitlines()), ""]
    return "\n".join(lines).rstrip() + "\n"


def markdown_view(view: View) -> list[str]:
    """Return the lines of a table."""
    lines = [f"## {view.title}", "", *(escaped(line) + "  " for line in view.lines), ""]
    lines.append("| " + " | ".join(escaped(column.title) for column in view.columns) + " |")
    lines.append("|" + "|".join("---:" if column.number else "---" for column in view.columns) + "|")
    lines += ["| " + " | ".join(escaped(value.text) for value in row) + " |" for row in view.rows]
    lines += ["", *(f"- {note}" for note in view.footnotes)]
    return [*lines, ""] if view.footnotes else lines


def escaped(text: str) -> str:
    """Return text that ends no column and starts no tag of a Markdown table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def comma_separated(report: Report) -> str:
    """Return all tables of scores as one CSV file; numbers as they are, not rounded."""
    rows = [csv_row(view, row) for view in report.views for row in view.rows]
    keys = dict.fromkeys(key for row in rows for key in row if key != "protocol")
    out = io.StringIO()
    writer = csv.DictWriter(
        out, [*keys, "protocol"] if keys else ["table", "protocol"], restval="", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_json(report: Report) -> str:
    """Return tables, learning curves, commands and environment as JSON; numbers as they are, not rounded."""
    content: dict[str, Any] = {
        "title": report.title,
        "problems": report.problems,
        "tables": [table_content(view) for view in report.views],
        "curves": [
            {"title": one.caption, "unit": one.unit, "runs": {line.label: list(line.points) for line in one.series}}
            for one in report.curves
        ],
        "commands": report.commands,
    }
    for name, view in (("differences", report.differences), ("environment", report.environment)):
        content |= {name: table_content(view)} if view else {}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def table_content(view: View) -> dict[str, Any]:
    """Return a table with its rows by the keys of its columns."""
    rows = [csv_row(view, row) for row in view.rows]
    kept = [{key: value for key, value in row.items() if key not in ("table", "protocol")} for row in rows]
    return {"title": view.title, "lines": view.lines, "footnotes": list(view.footnotes), "rows": kept}


def csv_row(view: View, row: list[Value]) -> dict[str, float | str]:
    """Return a row of a table by the keys of its columns.

    What stands behind a ± has a column of its own, and so has what stands in the place of a number: not run, failed.
    """
    values: dict[str, float | str] = {"table": view.title}
    for column, value in zip(view.columns, row, strict=True):
        values[column.key] = said = exported(value)
        if column.number and said and isinstance(said, str):
            values |= {column.key: "", "state": said}
        if value.error is not None:
            values[f"{column.key}_deviation"] = value.error
    return {**values, "protocol": view.lines[0] if view.lines else ""}


def exported(value: Value) -> float | str:
    """Return an entry as it is sorted and exported: not rounded, and empty where there is nothing."""
    if value.raw is not None:
        return value.raw
    return "" if value.text == DASH else value.text
