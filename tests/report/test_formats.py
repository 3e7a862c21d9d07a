"""What a report is written as: LaTeX without a stray command, CSV that a reader takes, lines that fit a terminal."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from records import config, write_divergence, write_eval, write_run, write_table_1

from rtx.report.cells import collect
from rtx.report.formats import as_json, comma_separated, markdown
from rtx.report.latex import latex, mark, tex
from rtx.report.page import html
from rtx.report.report import Report, build
from rtx.report.terminal import terminal
from rtx.report.views import Column, Value, View

IMAGES = {"name": "cifar10", "unit": "dim", "fingerprint": "abcd" * 4, "stamps": {"lossy": True}}
NASTY = 'a|b <c> 50% & _x_ #1 {y} ~z^2 \\n $5 "q" [w] -- é 漢 \x1b'


@pytest.fixture
def report(tmp_path: Path) -> Report:
    """A report with every kind of table, and a reason of every kind of letters."""
    write_run(tmp_path, config(routing__heads=4), bits=2.9, data=IMAGES)
    write_run(tmp_path, config(routing__heads=8), bits=None, state="failed", reason=NASTY, data=IMAGES)
    write_divergence(write_run(tmp_path, config("wikitext103"), bits=4.0))
    write_eval(write_run(tmp_path, config("pg19"), bits=4.0), 4.1, perplexity_per_word=35.0)
    return build(collect([tmp_path]), f"runs of {NASTY}")


def test_nothing_in_latex_is_a_command_but_ours(report: Report) -> None:
    written = latex(report)
    bare = re.sub(r"\\(?:text\w+|dots)\{\}|\\[&%$#_{}]", "", written)
    assert bare.isascii() or set(re.sub(r"[ -~\n]", "", bare)) == {"é"}
    body = [line for line in bare.splitlines() if not line.startswith("% written")]
    assert not re.search(r"[#~_]", "\n".join(body))
    assert {line for line in body if "%" in line} == {"\\resizebox{\\textwidth}{!}{%", "\\end{tabular}%"}
    assert bare.count("{") == bare.count("}")
    assert set(re.findall(r"\\([a-z]+)", bare)) == {
        *("begin", "end", "centering", "caption", "resizebox", "textwidth", "toprule", "midrule", "bottomrule", "par"),
        *("footnotesize", "pm", "usepackage"),
    }


def test_rows_of_latex_have_as_many_entries_as_columns(report: Report) -> None:
    written = latex(report).replace(r"\&", "")
    tables = re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", written, re.DOTALL)
    assert len(tables) == len(report.views) >= 4
    for columns, body in tables:
        rows = [line for line in body.splitlines() if line.endswith(r" \\")]
        assert rows and {row.count("&") + 1 for row in rows} == {len(columns)}


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed")
def test_pdflatex_sets_every_table_and_every_letter(report: Report, tmp_path: Path) -> None:
    letters = "".join(letter for letter in map(chr, range(32, 0x250)) if letter.isprintable())
    (tmp_path / "report.tex").write_text(latex(report) + "\n\\clearpage\n" + "\n\n".join(map(tex, letters)))
    packages = re.findall(r"needs (\\usepackage\{.*\})", latex(report))
    whole = ["\\documentclass{article}", *packages, "\\begin{document}", "\\input{report}", "\\end{document}"]
    (tmp_path / "whole.tex").write_text("\n".join(whole))
    command = ["pdflatex", "-interaction=nonstopmode", "whole.tex"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert ran.returncode == 0, [line for line in ran.stdout.splitlines() if line.startswith("!")]
    assert (tmp_path / "whole.pdf").is_file()


def test_letters_of_latex() -> None:
    assert tex("50% of a_b & {c}") == r"50\% of a\_b \& \{c\}"
    assert tex("--cfg [x] \N{MINUS SIGN}1 \N{EN DASH}") == r"-{}-cfg {[}x{]} $-$1 \textendash{}"
    assert [mark(number) for number in (0, 25, 26, 27, 52)] == ["a", "z", "aa", "ab", "ba"]


def test_csv_columns_of_numbers_hold_numbers_alone(report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(comma_separated(report), newline="")))
    assert len(rows) == sum(len(view.rows) for view in report.views)
    for row in rows:
        assert None not in row and None not in row.values()
        for key in ("ours", "paper", "difference", "paper_speed_ratio", "steps_per_second", "trained", "local_local"):
            assert not row[key] or math.isfinite(float(row[key]))
    states = [row["state"] for row in rows]
    assert "failed" in states and "not run" in states
    assert any(row["notes"].startswith(f"failed at step 2,000: {NASTY[:20]}") for row in rows)


def test_markdown_and_page_show_letters_as_they_are(report: Report) -> None:
    assert "a\\|b &lt;c>" in markdown(report)
    page = html(report)
    assert "a|b &lt;c&gt;" in page and "<c>" not in page


def test_a_table_on_a_narrow_terminal(tmp_path: Path) -> None:
    write_table_1(tmp_path, IMAGES)
    (view,) = build(collect([tmp_path]), "a report").views
    lines = terminal(view, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == ["Routing", "8", "12", "1,024", "3.391", "1", "3.291", "(+0.100)"]


def test_what_was_not_run_is_counted_and_notes_stand_below_their_rows() -> None:
    columns = [Column("model", "model", brief=True), Column("notes", "notes", brief=True), Column("x", "x")]
    rows = [[Value("ours"), Value("failed: no memory; shared"), Value("1")] for _ in range(2)]
    rows += [[Value("paper's"), Value(), Value()], [Value("to come"), Value(), Value()]]
    view = View("Title", columns, rows, ["Lines above."], absent={2}, waiting={3})
    view.rows[1] = [Value("other"), Value("shared"), Value("2")]
    assert terminal(view, 80).splitlines() == [
        *("Title", "Lines above.", "All rows: shared.", "", "model", "ours", "    failed: no memory", "other"),
        *("1 cell not started", "1 of the paper's rows not run"),
    ]


def test_json_has_every_table_and_curve(report: Report) -> None:
    content = json.loads(as_json(report))
    assert [table["title"] for table in content["tables"]] == [view.title for view in report.views]
    assert [len(table["rows"]) for table in content["tables"]] == [len(view.rows) for view in report.views]
    table_1 = next(table for table in content["tables"] if table["title"].startswith("Table 1"))
    ours = [row["ours"] for row in table_1["rows"] if row["seeds"] == 1]
    assert 2.9 in ours and table_1["lines"][0].startswith("Protocol: valid split of cifar10")
    assert all(len(points) == 20 for curves in content["curves"] for points in curves["runs"].values())
    assert content["environment"]["rows"] and content["differences"]["rows"]
