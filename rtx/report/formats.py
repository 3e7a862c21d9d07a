"""A report as Markdown, CSV, LaTeX and lines for the terminal."""

from __future__ import annotations

import csv
import io

from rtx.report.report import Report
from rtx.report.views import DASH, Value, View

LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {mark: f"\\{mark}" for mark in "&%$#_{}"}
LATEX |= {DASH: "--", "\N{MINUS SIGN}": "$-$", "\N{PLUS-MINUS SIGN}": r"$\pm$"}


def markdown(report: Report) -> str:
    """Return the report as Markdown."""
    lines = [f"# {report.title}", ""]
    if report.problems:
        lines += ["To know:", "", *(f"- {problem}" for problem in report.problems), ""]
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
    lines = [f"## {view.title}", "", *(line + "  " for line in view.lines), ""]
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
    keys = dict.fromkeys(column.key for view in report.views for column in view.columns)
    out = io.StringIO()
    writer = csv.DictWriter(out, ["table", *keys, "protocol"], restval="", lineterminator="\n")
    writer.writeheader()
    for view in report.views:
        for row in view.rows:
            values = {column.key: exported(value) for column, value in zip(view.columns, row, strict=True)}
            writer.writerow({"table": view.title, **values, "protocol": view.lines[0] if view.lines else ""})
    return out.getvalue()


def exported(value: Value) -> float | str:
    """Return an entry as it is sorted and exported: not rounded, and empty where there is nothing."""
    if value.raw is not None:
        return value.raw
    return "" if value.text == DASH else value.text


def latex(report: Report) -> str:
    """Return the tables of scores as LaTeX; they need \\usepackage{booktabs}."""
    parts = ["% written by rtx report; needs \\usepackage{booktabs}"]
    for view in report.views:
        columns = "".join("r" if column.number else "l" for column in view.columns)
        lines = ["\\begin{table}", "\\centering", f"\\caption{{{tex(' '.join([view.title + '.', *view.lines]))}}}"]
        lines += [f"\\begin{{tabular}}{{{columns}}}", "\\toprule"]
        lines.append(" & ".join(tex(column.title) for column in view.columns) + r" \\")
        lines.append("\\midrule")
        lines += [" & ".join(tex(value.text) for value in row) + r" \\" for row in view.rows]
        lines += ["\\bottomrule", "\\end{tabular}"]
        lines += [f"\\par\\footnotesize {tex(note)}" for note in view.footnotes]
        parts.append("\n".join([*lines, "\\end{table}"]))
    return "\n\n".join(parts) + "\n"


def tex(text: str) -> str:
    """Return text in which nothing is a command of LaTeX."""
    return "".join(LATEX.get(letter, letter) for letter in text)


def terminal(view: View, width: int = 46) -> str:
    """Return the columns of a table that a terminal has room for, in even columns."""
    chosen = [at for at, column in enumerate(view.columns) if column.brief] or list(range(len(view.columns)))
    rows = [[view.columns[at].title for at in chosen]]
    rows += [[shortened(row[at].text, width) for at in chosen] for row in view.rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(chosen))]
    lines = []
    for row in rows:
        entries = [
            text.rjust(size) if view.columns[at].number else text.ljust(size)
            for text, size, at in zip(row, widths, chosen, strict=True)
        ]
        lines.append("  ".join(entries).rstrip())
    return "\n".join([view.title, *view.lines, "", *lines])


def shortened(text: str, width: int) -> str:
    """Return text of at most so many letters."""
    return text if len(text) <= width else text[: width - 1] + "…"
