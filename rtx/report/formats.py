"""The files of a report: a page, Markdown, LaTeX, CSV, JSON, and its plots."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rtx.disk import replace_file
from rtx.errors import UserError
from rtx.report.contents import Report, build
from rtx.report.run_records import collect
from rtx.report.templates import filled
from rtx.runs.folder import shown

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""At the start of a text that a spreadsheet would compute."""


def write(report: Report, output: Path) -> list[Path]:
    """Write a report in every format and return the paths.

    UserError in a folder that has one of these files, but no report.
    """
    contents = {
        "report.json": as_json(report).encode("utf-8", "replace"),
        "report.html": html(report).encode("utf-8", "replace"),
        "report.md": markdown(report).encode("utf-8", "replace"),
        "report.csv": comma_separated(report).encode("utf-8", "replace"),
        "report.tex": latex(report).encode("utf-8", "replace"),
    }
    for plot in report.plots:
        contents[f"{plot.name}.png"] = plot.png
    if not (output / "report.json").exists():
        refuse_other_files(contents, output)
    output.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_file(output / name, content)
    return [output / name for name in contents]


def refuse_other_files(names: Iterable[str], output: Path) -> None:
    """Raise UserError if a folder has a file of one of these names."""
    for name in names:
        if (output / name).exists():
            other = f"holds a {name} that rtx report did not write"
            raise UserError(f"output={output}: {other}; name another folder")


def write_file(path: Path, content: bytes) -> None:
    """Write a file, or leave it as it was."""
    replace_file(path, lambda file: file.write(content), durable=False)


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
            write_file(path, plots[0].png)
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
    import pandas

    frames = []
    for table in report.every_table():
        protocol = " ".join(table.lines[:1])
        frame = pandas.DataFrame(table.rows).assign(table=table.title, protocol=protocol)
        frames.append(frame.map(no_formula).convert_dtypes())
    return pandas.concat(frames).to_csv(index=False)


def no_formula(value: Any) -> Any:
    """Return a value, with a quote before a text that a spreadsheet would compute."""
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return f"'{value}"
    return value


def as_json(report: Report) -> str:
    """Return tables and commands as JSON; numbers are not rounded."""
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
        "title": report.title,
        "headline": report.headline,
        "lines": report.lines,
        "noise": report.noise,
        "problems": report.problems,
        "tables": tables,
        "commands": report.commands,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
