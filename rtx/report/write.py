"""A report as files: one HTML page that needs nothing else, Markdown, CSV, JSON, LaTeX, and its plots as PNG."""

from __future__ import annotations

import json
from pathlib import Path

from rtx.disk import replace_file
from rtx.report.contents import Report
from rtx.report.tables import DASH, MINUS, Column, Table

LETTERS = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "-": "{-}"}
LETTERS |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''", "[": "{[}", "*": "{*}"}
LETTERS |= {DASH: r"\textendash{}", MINUS: "$-$", "±": r"$\pm$", **{mark: f"\\{mark}" for mark in "&%$#_{}"}}


def write(report: Report, output: Path) -> list[Path]:
    """Write the report in every format, each file whole or not at all, and return their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    texts = {"html": html, "md": markdown, "csv": comma_separated, "json": as_json, "tex": latex}
    files = {f"report.{form}": text(report).encode("utf-8", "replace") for form, text in texts.items()}
    files |= {f"{plot.name}.png": plot.png for plot in report.plots}
    for name, content in files.items():
        replace_file(output / name, lambda file, content=content: file.write(content), durable=False)
    return [output / name for name in files]


def html(report: Report) -> str:
    """Return the page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return page.get_template("page.html.j2").render(report=report, entries=entries, classes=classes)


def entries(table: Table) -> list[list[tuple[Column, str, object]]]:
    """Return the rows of a table: of each entry its column, what is shown, and what it is sorted by."""
    columns, texts = table.shown(), table.texts()
    rows = zip(table.rows, texts.itertuples(index=False), strict=True)
    return [[(one, text, row.get(one.key, "")) for one, text in zip(columns, said, strict=True)] for row, said in rows]


def classes(table: Table, column: Column, row: int = -1) -> str:
    """Return the classes of a column's entries, and what colours a verdict."""
    said = str(table.rows[row].get(column.key, "")).partition(" ")[0] if row >= 0 else ""
    verdict = said if said in ("better", "behind", "best") else "future" if said == "yes" else ""
    return " ".join(filter(None, ["number" if table.is_number(column) else "", verdict]))


def markdown(report: Report) -> str:
    """Return the report as Markdown; the plots stand beside it."""
    tables = report.every_table()
    lines = [f"# {report.title}", "", *([f"**{escaped(report.headline)}**", ""] if report.headline else [])]
    lines += markdown_table(tables[0])
    lines += [f"![{escaped(plot.caption)}]({plot.name}.png)\n" for plot in report.plots]
    lines += ["To know:", "", *(f"- {escaped(problem)}" for problem in report.problems), ""] if report.problems else []
    for table in tables[1:]:
        lines += markdown_table(table)
    lines += ["## To reproduce", "", "```", *report.commands, "```"] if report.commands else []
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(table: Table) -> list[str]:
    """Return the lines of a table."""
    texts = table.texts()
    lines = [f"## {table.title}", "", *(escaped(line) + "  " for line in table.lines), ""]
    lines.append("| " + " | ".join(map(escaped, texts.columns)) + " |")
    lines.append("|" + "|".join("---:" if table.is_number(column) else "---" for column in table.shown()) + "|")
    lines += ["| " + " | ".join(map(escaped, row)) + " |" for row in texts.itertuples(index=False)]
    return [*lines, "", *(f"- {escaped(note)}" for note in table.notes), *([""] if table.notes else [])]


def escaped(text: object) -> str:
    """Return text that ends no column and starts no tag of a Markdown table."""
    return str(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def comma_separated(report: Report) -> str:
    """Return all tables as one CSV file; numbers as they are, not rounded."""
    import pandas

    tables = report.every_table()
    frames = [pandas.DataFrame(one.rows).assign(table=one.title, protocol=" ".join(one.lines[:1])) for one in tables]
    return pandas.concat([frame.convert_dtypes() for frame in frames]).to_csv(index=False)


def as_json(report: Report) -> str:
    """Return tables and commands as JSON; numbers as they are, not rounded."""
    tables = [
        {"title": table.title, "lines": table.lines, "footnotes": table.notes, "rows": table.rows}
        for table in report.every_table()
    ]
    said = {"title": report.title, "headline": report.headline, "problems": report.problems, "tables": tables}
    return json.dumps({**said, "commands": report.commands}, indent=1, ensure_ascii=False) + "\n"


def latex(report: Report) -> str:
    """Return the tables as LaTeX; notes stand below them, where they make no table too wide."""
    parts = ["% written by rtx report; needs \\usepackage{booktabs,graphicx}"]
    for table in (table for table in report.every_table() if table.shown(brief=True)):
        texts = table.texts(brief=True).map(tex)
        texts.columns = texts.columns.map(tex)
        form = "".join("r" if table.is_number(column) else "l" for column in table.shown(brief=True))
        body = texts.to_latex(index=False, escape=False, column_format=form)
        caption = tex(" ".join([f"{table.title}.", *table.lines]))
        lines = ["\\begin{table}", "\\centering", f"\\caption{{{caption}}}", "\\resizebox{\\textwidth}{!}{%"]
        notes = [f"\\par\\footnotesize {tex(note)}" for note in table.notes]
        parts.append("\n".join([*lines, body.rstrip() + "%\n}", *notes, "\\end{table}"]))
    return "\n\n".join(parts) + "\n"


def tex(text: str) -> str:
    """Return text in which nothing is a command of LaTeX; what its usual fonts lack is a question mark."""
    return "".join(LETTERS.get(letter, letter if " " <= letter <= "~" else "?") for letter in text)
