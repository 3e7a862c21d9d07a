"""The tables of scores as LaTeX."""

from __future__ import annotations

import string

from rtx.report.report import Report
from rtx.report.views import DASH, View

LETTERS = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LETTERS |= {mark: f"\\{mark}" for mark in "&%$#_{}"}
LETTERS |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''", "\n": " ", "\t": " "}
LETTERS |= {mark: f"{{{mark}}}" for mark in "[]*"}  # behind the \\ of a row these would be its options
LETTERS |= {
    DASH: r"\textendash{}",
    "\N{MINUS SIGN}": "$-$",
    "\N{PLUS-MINUS SIGN}": r"$\pm$",
    "\N{HORIZONTAL ELLIPSIS}": r"\dots{}",
}

LAST_LETTER = "\N{LATIN SMALL LETTER LONG S}"
MISSING = "«»ÐÞðþĄąĐđĘęĦħĮįĸĿŀŉŊŋŦŧŲųſ"
"""pdflatex sets letters up to the last one but the missing ones in its usual fonts; any other would end its run."""

WIDE = 7
"""Columns from which on a table is scaled to the width of the text."""


def latex(report: Report) -> str:
    """Return the tables of scores as LaTeX."""
    parts = ["% written by rtx report; needs \\usepackage{booktabs,graphicx}"]
    parts += [latex_view(view) for view in report.views]
    return "\n\n".join(parts) + "\n"


def latex_view(view: View) -> str:
    """Return a table; its notes stand below it behind letters, as they would make it too wide."""
    shown = [at for at, column in enumerate(view.columns) if column.key != "notes"]
    notes = view.own_notes()
    marks = {note: mark(number) for number, note in enumerate(dict.fromkeys(note for row in notes for note in row))}
    lines = ["\\begin{table}", "\\centering", f"\\caption{{{tex(' '.join([view.title + '.', *view.lines]))}}}"]
    wide = len(shown) >= WIDE
    lines += ["\\resizebox{\\textwidth}{!}{%"] if wide else []
    lines += [f"\\begin{{tabular}}{{{''.join('r' if view.columns[at].number else 'l' for at in shown)}}}", "\\toprule"]
    lines += [" & ".join(tex(view.columns[at].title) for at in shown) + r" \\", "\\midrule"]
    for row, own in zip(view.rows, notes, strict=True):
        entries = [tex(row[at].text) for at in shown]
        entries[0] += f"$^{{{','.join(marks[note] for note in own)}}}$" if own else ""
        lines.append(" & ".join(entries) + r" \\")
    lines += ["\\bottomrule", "\\end{tabular}%\n}" if wide else "\\end{tabular}"]
    lines += [f"\\par\\footnotesize $^{{{letter}}}$ {tex(note)}" for note, letter in marks.items()]
    lines += [f"\\par\\footnotesize {tex(note)}" for note in view.footnotes]
    return "\n".join([*lines, "\\end{table}"])


def mark(number: int) -> str:
    """Return a, b, ..., z, aa, ab, ..."""
    letters = string.ascii_lowercase
    return (mark(number // len(letters) - 1) if number >= len(letters) else "") + letters[number % len(letters)]


def tex(text: str) -> str:
    """Return text in which nothing is a command of LaTeX, and that it has letters for."""
    return "".join(LETTERS.get(letter, letter if is_set(letter) else "?") for letter in text).replace("--", "-{}-")


def is_set(letter: str) -> bool:
    """Tell whether pdflatex has a letter."""
    return letter <= LAST_LETTER and letter.isprintable() and letter not in MISSING
