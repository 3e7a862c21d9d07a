"""A report as LaTeX, Markdown, CSV, a page and on a terminal: nothing in it is markup, and units are right; and what
a run says when it ends.
"""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from records import IMAGES, config, write_divergence, write_eval, write_run

from rtx.compose import compose
from rtx.report.contents import Report, as_json, build, comma_separated, html, latex, markdown, write
from rtx.report.run_records import collect
from rtx.report.summary import closing_lines, protocol_line
from rtx.report.tables import DASH, Column, Table, terminal, tex

NASTY = 'a|b <c> 50% & _x_ #1 {y} ~z^2 \\n $5 "q" [w] -- é 漢 \x1b'


@pytest.fixture
def report(tmp_path: Path) -> Report:
    write_run(tmp_path, config(routing__heads=4), bits=2.123456789012, data=IMAGES)
    write_run(tmp_path, config(routing__heads=8), bits=None, state="failed", reason=NASTY, data=IMAGES)
    write_run(tmp_path, config("cifar10_local"), bits=2.8, data=IMAGES)
    write_divergence(write_run(tmp_path, config("wikitext103"), bits=4.0))
    write_eval(write_run(tmp_path, config("pg19"), bits=4.0), 4.1, perplexity_per_word=35.0)
    return build(collect([tmp_path]), f"runs of {NASTY}")


def test_every_row_of_latex_has_as_many_entries_as_columns(report: Report) -> None:
    written = latex(report).replace(r"\&", "")
    tables = re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", written, re.DOTALL)
    assert len(tables) >= 5 and written.count("{") == written.count("}") + written.count(r"\{") - written.count(r"\}")
    for columns, body in tables:
        rows = [line for line in body.splitlines() if line.endswith(r" \\")]
        assert rows and {row.count("&") + 1 for row in rows} == {len(columns)}


def test_nothing_is_a_command_of_latex() -> None:
    assert tex("50% & _x_ #1 {y}") == r"50\% \& \_x\_ \#1 \{y\}"
    assert tex(f"{DASH} -- [w] 漢 \N{MINUS SIGN}1 ± 2") == r"\textendash{} {-}{-} {[}w] ? $-$1 $\pm$ 2"


def test_csv_columns_of_numbers_hold_numbers_whole_ones_stay_whole(report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(comma_separated(report))))
    assert rows and all(row["table"] for row in rows)
    assert {row["seeds"] for row in rows} <= {"", "1", "2"}
    assert {row["routing.heads"] for row in rows} <= {"", "0", "4", "8"}
    assert all(row["steps_per_second"] == "" or float(row["steps_per_second"]) > 0 for row in rows)
    tables = json.loads(as_json(report))["tables"]
    (row,) = [row for table in tables for row in table["rows"] if "heads=4" in row.get("run", "")]
    assert row["ours"] == 2.123456789012 and row["step"] == 2000 and isinstance(row["step"], int)


def test_markdown_and_page_show_letters_as_they_are(report: Report) -> None:
    written, page = markdown(report), html(report)
    assert "50% & _x_" in written and "a\\|b &lt;c>" in written
    assert "a|b &lt;c&gt;" in page and "<c>" not in page
    assert all(line.endswith("|") for line in written.splitlines() if line.startswith("|"))


def test_a_page_stands_alone_and_plots_are_files_too(report: Report, tmp_path: Path) -> None:
    files = write(report, tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r"(?:src|href)=\"(?!data:|#)[^\"]+\"", page)
    assert page.count("<svg") == len(report.plots) == sum(path.suffix == ".png" for path in files) >= 3
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in files if path.suffix == ".png")
    assert "var(--c0072b2, #0072b2)" in page and "currentColor" in page


def test_tables_fit_a_terminal_and_hold_no_markup(report: Report) -> None:
    tables = [table for table in report.every_table() if table.shown(brief=True)]
    for width in (80, 100):
        assert max(len(line) for table in tables for line in terminal(table, width).splitlines()) <= width
    table = Table("t", [Column("a", "a"), Column("n", "n", 2, "e")], [{"a": "[red]x", "n": -1.0, "e": 0.5}, {"a": "y"}])
    said = terminal(table, 10, strip=True)
    assert "[red]x" in said and "\N{MINUS SIGN}1.00 ± 0.50" in said and DASH in said


def test_the_closing_lines_fit_a_narrow_terminal() -> None:
    run, config = "outputs/rtx/20260101-120000-abcd", compose(["model.base=lsh", "model.lsh=reformer"])
    protocol = protocol_line(config, "valid", "byte", 628_118, partial=True, ablate="local")
    assert "628,118 bytes each scored once (a sample of the windows), windows of 256, stride 256" in protocol
    assert "lsh=reformer" in protocol and "sees the future" in protocol
    final = {"bits": 2.5, "unit": "byte", "baselines": {"order-2 bytes": 2.75, "zlib": 1.93}}
    said = closing_lines(run, "1,000 steps (trainer.max_minutes is up)", final, protocol)
    assert max(map(len, said.splitlines())) < 80
    assert said.splitlines()[-2:] == [f"next: rtx eval {run} split=test", f"      rtx sample {run}"]
