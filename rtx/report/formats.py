"""The files of a report: a page, Markdown, LaTeX, CSV, JSON, and its plots."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rtx.disk import ITSELF, LinkRefused, make_folder, read_inside, status_inside, write_inside
from rtx.errors import UserError
from rtx.report.contents import Report, build
from rtx.report.run_records import collect
from rtx.report.templates import filled
from rtx.runs.folder import shown

PROGRAM = "rtx report"
"""What a report.json says it was written by."""
OLDER_KEYS = {"title", "headline", "lines", "noise", "problems", "tables", "commands"}
"""The keys of a report.json of an earlier version, which says neither program nor files."""
RECORD = "report.json"
LARGEST_REPORT = 1 << 28
"""The most bytes of it."""
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""At the start of a text that a spreadsheet would compute."""


def write(report: Report, folder: Path, name: str = ITSELF) -> list[Path]:
    """Write a report in every format and return the paths.

    UserError, before anything is written, where one of the files is there already and no earlier
    report wrote it.

    Args:
        folder: a folder that the user has named.
        name: the report's name below it.
    """
    contents = {
        "report.html": html(report).encode("utf-8", "replace"),
        "report.md": markdown(report).encode("utf-8", "replace"),
        "report.csv": comma_separated(report).encode("utf-8", "replace"),
        "report.tex": latex(report).encode("utf-8", "replace"),
    }
    for plot in report.plots:
        contents[f"{plot.name}.png"] = plot.png
    files = [RECORD, *contents]
    former = former_files(folder, name)
    refuse_other_files(files, folder, name, files if former is None else former)
    make_folder(folder, name)
    # Written first, so that the files of a report that is cut short are known.
    every_file = dict.fromkeys([*files, *(former or ())])
    record = as_json(report, [*every_file]).encode("utf-8", "replace")
    for file, content in {RECORD: record, **contents}.items():
        write_inside(folder, f"{name}/{file}", content, durable=False)
    return [folder / name / file for file in files]


def refuse_other_files(
    files: Sequence[str], folder: Path, name: str, former: Sequence[str]
) -> None:
    """Raise UserError where one of these files exists and is none of `former`."""
    for file in files:
        is_there = status_inside(folder, f"{name}/{file}") is not None
        if is_there and file not in former:
            other = f"holds a {file} that rtx report did not write"
            raise UserError(f"output={folder / name}: {other}; name another folder")


def former_files(folder: Path, name: str) -> list[str] | None:
    """Return the names of what earlier reports have written; None: an older one does not say."""
    try:
        record = json.loads(read_inside(folder, f"{name}/{RECORD}", LARGEST_REPORT))
    except LinkRefused:
        raise
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(record, dict):
        return []
    if record.keys() == OLDER_KEYS:
        return None
    files = record.get("files")
    if record.get("program") != PROGRAM or not isinstance(files, list):
        return []
    return [str(file) for file in files]


def save_plots(folders: Iterable[Path]) -> str:
    """Save the first plot of the runs of each folder in it; return the paths in lines.

    A folder whose records allow no plot has no line.
    """
    lines = []
    for folder in folders:
        plots = build(collect([folder]), "").plots
        if not plots:
            continue
        path = folder / f"{plots[0].name}.png"
        try:
            write_inside(folder, path.name, plots[0].png, durable=False)
            lines.append(shown(path))
        except OSError as error:
            lines.append(f"no plot: {path}: {error.strerror}")
    return "\n".join(lines)


def html(report: Report) -> str:
    """Return a report as a page that needs no other file."""
    return filled("page.html.j2", report=report)


def markdown(report: Report) -> str:
    return filled("report.md.j2", report=report)


def latex(report: Report) -> str:
    """Return the brief columns of all tables in LaTeX."""
    return filled("report.tex.j2", report=report)


def comma_separated(report: Report) -> str:
    """Return all tables as one CSV file; numbers are not rounded."""
    names: dict[str, None] = {}
    rows: list[dict[str, Any]] = []
    for table in report.every_table():
        source = {"table": table.title, "protocol": " ".join(table.lines[:1])}
        for row in table.rows:
            names |= dict.fromkeys(row)
            cells = {**row, **source}
            rows.append({name: no_formula(value) for name, value in cells.items()})
        names |= dict.fromkeys(source)
    content = io.StringIO()
    writer = csv.DictWriter(content, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return content.getvalue()


def no_formula(value: Any) -> Any:
    """Return a value, with a quote before a text that a spreadsheet would compute."""
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return f"'{value}"
    return value


def as_json(report: Report, files: Sequence[str] = ()) -> str:
    """Return tables and commands as JSON; numbers are not rounded.

    `files`: the names of all files of the report.
    """
    tables = []
    for table in report.every_table():
        tables.append(
            {
                "title": table.title,
                "lines": table.lines,
                "footnotes": table.notes,
                "rows": table.rows,
            }
        )
    content = {
        "program": PROGRAM,
        "files": list(files),
        "title": report.title,
        "headline": report.headline,
        "lines": report.lines,
        "noise": report.noise,
        "problems": report.problems,
        "tables": tables,
        "commands": report.commands,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
