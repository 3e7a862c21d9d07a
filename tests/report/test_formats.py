"""A report as LaTeX, Markdown, CSV, a page and on a terminal, and the last lines of a run.

Nothing in a report is markup, and units are right. In a real browser: the first screen of the page,
sizes, contrast, sorting, no errors.
"""

import csv
import io
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtx.evaluation.protocol import Reading, protocol_of, score_record
from rtx.evaluation.scores import Score
from rtx.report.contents import Report, build
from rtx.report.formats import as_json, comma_separated, html, latex, write
from rtx.report.run_records import collect
from rtx.report.summary import closing_lines
from rtx.report.templates import tex
from rtx.runs.records import DataRecord, Measures
from rtx.settings.compose import compose
from rtx.tables import DASH, Column, Table, table_text
from tests.helpers.records import (
    DATA,
    FULL,
    IMAGES,
    LOCAL,
    config,
    write_divergence,
    write_eval,
    write_run,
)

NASTY = 'a|b <c> 50% & _x_ #1 {y} ~z^2 \\n $5 "q" [w] -- é 漢 \x1b'


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder, config(routing__heads=4), bits=2.123456789012, data=IMAGES)
    write_run(
        folder, config(routing__heads=8), bits=None, state="failed", reason=NASTY, data=IMAGES
    )
    write_run(folder, config("cifar10 heads=local"), bits=2.8, data=IMAGES)
    write_divergence(write_run(folder, config("wikitext103"), bits=4.0))
    write_eval(write_run(folder, config("pg19"), bits=4.0), 4.1, perplexity_per_word=35.0)
    return build(collect([folder]), f"runs of {NASTY}")


def test_every_row_of_latex_has_as_many_entries_as_columns_and_nothing_is_a_command(
    report: Report,
) -> None:
    written = latex(report).replace(r"\&", "")
    tables = re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", written, re.DOTALL)
    assert len(tables) >= 5 and written.count("{") == written.count("}") + written.count(
        r"\{"
    ) - written.count(r"\}")
    for columns, body in tables:
        rows = [line for line in body.splitlines() if line.endswith(r" \\")]
        assert rows and {row.count("&") + 1 for row in rows} == {len(columns)}
    assert tex("50% & _x_ #1 {y}") == r"50\% \& \_x\_ \#1 \{y\}"
    text = f"{DASH} -- [w] 漢 \N{MINUS SIGN}1 ± 2"
    assert tex(text) == r"\textendash{} {-}{-} {[}w] ? $-$1 $\pm$ 2"


def test_csv_columns_of_numbers_hold_numbers_whole_ones_stay_whole(report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(comma_separated(report))))
    assert rows and all(row["table"] for row in rows)
    assert {row["seeds"] for row in rows} <= {"", "1", "2"}
    assert {row["routing.heads"] for row in rows} <= {"", "0", "4", "8"}
    assert all(row["steps_per_second"] == "" or float(row["steps_per_second"]) > 0 for row in rows)
    tables = json.loads(as_json(report))["tables"]
    (row,) = [row for table in tables for row in table["rows"] if "heads=4" in row.get("run", "")]
    assert row["ours"] == 2.123456789012 and row["step"] == 2000 and isinstance(row["step"], int)


def test_files_show_letters_as_they_are_a_page_stands_alone_plots_are_files(
    report: Report, tmp_path: Path
) -> None:
    files = write(report, tmp_path / "out")
    written, page = ((tmp_path / "out" / f"report.{form}").read_text() for form in ("md", "html"))
    assert "50% & _x_" in written and "a\\|b &lt;c>" in written
    assert all(line.endswith("|") for line in written.splitlines() if line.startswith("|"))
    assert "a|b &lt;c&gt;" in page and "<c>" not in page
    assert not re.search(r"(?:src|href)=\"(?!data:|#)[^\"]+\"", page)
    assert (
        page.count("<svg") == len(report.plots) == sum(path.suffix == ".png" for path in files) >= 3
    )
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in files if path.suffix == ".png")
    assert "var(--c0072b2, #0072b2)" in page and "currentColor" in page


def test_tables_fit_a_terminal_and_hold_no_markup(report: Report) -> None:
    tables = [table for table in report.every_table() if table.shown(brief=True)]
    for width in (80, 100):
        assert (
            max(len(line) for table in tables for line in table_text(table, width).splitlines())
            <= width
        )
    table = Table(
        "t",
        [Column("a", "a"), Column("n", "n", 2, "e")],
        [{"a": "[red]x", "n": -1.0, "e": 0.5}, {"a": "y"}],
    )
    said = table_text(table, 10, intervals=True)
    assert "[red]x" in said and "\N{MINUS SIGN}1.00 ± 0.50" in said and DASH in said


def test_the_closing_lines_fit_a_narrow_terminal_and_use_a_wide_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = "outputs/rtx/20260101-120000-abcd"
    config = compose(["model.base=lsh", "model.lsh=reformer"])
    data = DataRecord.model_validate(DATA)
    protocol = protocol_of(config, data, "valid", Reading(ablate="local"), sample=31)
    score = Score(np.full(2, 314_059.0), np.full(2, 1e6))
    measures = Measures(baselines={"order-2 bytes": 2.75, "zlib": 1.93})
    final = score_record(config, protocol, score, measures)
    line = final.line()
    assert "628,118 bytes each scored once (a sample of 31 windows), windows of 256" in line
    assert "stride 256" in line and "lsh=reformer" in line and "sees the future" in line
    said = closing_lines(run, "1,000 steps (trainer.max_minutes is up)", final)
    assert max(map(len, said.splitlines())) < 80
    assert said.splitlines()[-2:] == [f"next: rtx eval {run} split=test", f"      rtx sample {run}"]
    monkeypatch.setenv("COLUMNS", "200")
    said = closing_lines(run, "1,000 steps (trainer.max_minutes is up)", final)
    assert 100 < max(map(len, said.splitlines())) < 120


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
WATCH = """<script>
window.faults = [];
window.addEventListener("error", (event) => window.faults.push(String(event.message)));
for (const word of ["error", "warn"])
  console[word] = (...parts) => window.faults.push(parts.join(" "));
</script>"""
FRAME = """<iframe src="page.html" style="border:0;width:{width}px;height:{height}px"></iframe>
<script>
const light = (colour) => {{
  const [r, g, b] = colour.match(/[0-9.]+/g).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}};
document.querySelector("iframe").onload = (event) => {{
  const view = event.target.contentWindow, page = view.document, result = {{}};
  const behind = (one) => {{
    for (; one; one = one.parentElement) {{
      const colour = view.getComputedStyle(one).backgroundColor;
      if (!colour.endsWith(", 0)")) return colour;
    }}
  }};
  const contrast = (one) => {{
    const [a, b] = [light(view.getComputedStyle(one).color), light(behind(one))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }};
  const texts_on_page = [...page.querySelectorAll("h1, p, td, th, summary, figcaption")];
  const shown = texts_on_page.filter((one) => one.offsetParent);
  result.contrast = Math.min(...shown.map(contrast));
  result.wide = page.documentElement.scrollWidth - page.documentElement.clientWidth;
  const low = (name) => page.querySelector(name).getBoundingClientRect().bottom;
  result.bottoms = [".headline", ".answer", "figure svg"].map(low);
  result.headline = page.querySelector(".headline").textContent;
  result.open = [...page.querySelectorAll("details[open] > summary")].map((one) => one.textContent);
  const table = page.querySelector("table.answer");
  const button = table.tHead.rows[0].cells[1].firstElementChild;
  const column = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[1].dataset.sort));
  button.focus();
  result.focused = page.activeElement === button;
  button.click();
  result.up = column();
  button.click();
  result.down = column();
  result.faults = view.faults;
  result.overlaps = 0;
  const drawn = (what) => [...page.querySelectorAll(".first svg " + what)];
  const boxes = (what) => drawn(what).map((one) => one.getBoundingClientRect());
  const texts = boxes("text"), bars = boxes("[id^=LineCollection] path");
  result.drawn = [texts.length, bars.length];
  texts.forEach((a, at) => texts.slice(at + 1).concat(bars).forEach((b) => {{
    const across = a.left + 2 < b.right && b.left + 2 < a.right;
    result.overlaps += across && a.top + 3 < b.bottom && b.top + 3 < a.bottom;
  }}));
  document.body.insertAdjacentHTML("beforeend", "<pre id=result></pre>");
  document.querySelector("#result").textContent = JSON.stringify(result);
}};
</script>"""


def looked_at(folder: Path, width: int, height: int, scheme: int) -> dict[str, Any]:
    """Return what is found in page.html of a folder, on a screen of a size, light (1) or dark."""
    (folder / "frame.html").write_text(FRAME.format(width=width, height=height), encoding="utf-8")
    options = "--headless --no-sandbox --disable-gpu --no-first-run --window-size=1400,1000"
    command = [str(CHROMIUM), *options.split()]
    command += [f"--blink-settings=preferredColorScheme={scheme}", "--allow-file-access-from-files"]
    command += [
        f"--user-data-dir={folder}/{width}-{scheme}",
        "--virtual-time-budget=5000",
        "--enable-logging=stderr",
    ]
    command += ["--dump-dom", (folder / "frame.html").as_uri()]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "CONSOLE" not in answer.stderr
    found = re.search(r"<pre id=\"result\">(.*?)</pre>", answer.stdout, re.DOTALL)
    assert found, answer.stdout[-2000:] + answer.stderr[-2000:]
    return json.loads(unescape(found[1]))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
def test_the_first_screen_holds_the_answer(tmp_path: Path) -> None:
    selections = [{"routing__selection": name} for name in ("causal", "random", "topk")]
    run = tmp_path
    for at, values in enumerate([LOCAL, FULL, *selections]):
        for seed in range(5):
            bits = 2 + 0.02 * at + 0.01 * (seed * at % 5)
            speed = 1.0 + 0.04 * at + 0.02 * seed
            run = write_run(
                tmp_path / "runs",
                config("far_text heads=causal", seed=seed, **values),
                bits=bits,
                speed=speed,
            )
    write_divergence(run, layers=4)
    page = html(build(collect([tmp_path / "runs"]), "a sweep"))
    (tmp_path / "page.html").write_text(page.replace("<head>", "<head>" + WATCH), encoding="utf-8")
    for width, height, scheme in ((1280, 800, 1), (1280, 800, 0), (375, 800, 0)):
        result = looked_at(tmp_path, width, height, scheme)
        assert result["faults"] == []
        assert result["wide"] <= 0, "the page itself must not scroll sideways; its tables do"
        assert result["contrast"] >= 4.5
        assert result["focused"] == (width == 1280), "titles that sort are left out on a phone"
        assert result["up"] == sorted(result["up"]) and result["down"] == result["up"][::-1]
        assert 5 < len(result["headline"].split()) <= 20
        assert result["open"] == ["Plots"]
        if width == 1280:
            assert max(result["bottoms"]) <= height, (
                "question, answer, table and plot are on the first screen"
            )
            assert result["overlaps"] == 0 and result["drawn"][0] >= 10, (
                "no name covers another one"
            )
