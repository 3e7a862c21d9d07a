"""The page in a real browser: it renders, it sorts, and nothing lands on the console. Skips where Chromium is not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from records import write_divergence, write_table_1

from rtx.report.cells import collect
from rtx.report.page import html
from rtx.report.report import build

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WATCH = """<script>
window.faults = [];
window.addEventListener("error", (event) => window.faults.push(String(event.message)));
for (const word of ["error", "warn"]) console[word] = (...said) => window.faults.push(said.join(" "));
</script>"""
ACT = """<script>
const table = [...document.querySelectorAll("table.sortable")].find((one) => one.tBodies[0].rows.length === 27);
const at = [...table.tHead.rows[0].cells].findIndex((head) => head.textContent.startsWith("ours"));
const button = table.tHead.rows[0].cells[at].firstElementChild;
const column = () => [...table.tBodies[0].rows].map((row) => row.cells[at].textContent);
const result = {before: column()};
button.focus();
result.focused = document.activeElement === button;
button.click();
result.up = column();
result.said = table.tHead.rows[0].cells[at].getAttribute("aria-sort");
button.click();
result.down = column();
result.faults = window.faults;
result.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const shown = () => [...table.tHead.rows[0].cells].filter((head) => head.offsetParent !== null).length;
result.columns = [shown()];
table.closest("section").querySelector(".toggle input").click();
result.columns.push(shown(), table.tHead.rows[0].cells.length);
result.names = table.tBodies[0].rows[0].cells[0].innerText;
result.curves = [...document.querySelectorAll("svg.chart")].map((one) => one.querySelectorAll("polyline").length);
result.drawn = document.querySelector("svg.chart").getBoundingClientRect().height;
const out = document.createElement("pre");
out.id = "result";
out.textContent = JSON.stringify(result);
document.body.append(out);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
@pytest.mark.parametrize(("size", "scheme"), [("800,600", "1"), ("390,844", "0")])
def test_it_renders_and_sorts_without_an_error(size: str, scheme: str, tmp_path: Path) -> None:
    runs = write_table_1(tmp_path / "runs")
    write_divergence(next(path for path in sorted(runs.iterdir()) if path.is_dir()))
    page = html(build(collect([runs]), "a sweep"))
    path = tmp_path / "page.html"
    path.write_text(page.replace("<head>", "<head>" + WATCH).replace("</body>", ACT + "</body>"), encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--window-size={size}"]
    command += [f"--blink-settings=preferredColorScheme={scheme}"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--dump-dom", path.as_uri()]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "CONSOLE" not in answer.stderr
    found = re.search(r'<pre id="result">(.*?)</pre>', answer.stdout, re.DOTALL)
    assert found, answer.stdout[-2000:] + answer.stderr[-2000:]
    result = json.loads(unescape(found[1]))
    assert result["faults"] == []
    assert len(result["before"]) == 27
    assert result["focused"]
    assert result["up"] == sorted(result["before"], key=float)
    assert result["said"] == "ascending"
    assert result["down"] == sorted(result["before"], key=float, reverse=True)
    assert result["curves"] == [27, 0, 0, 6]
    every = result["columns"][-1]
    assert result["columns"] == [every if size == "800,600" else 4, every, every]
    assert result["drawn"] > 100
    assert result["wide"] <= 0, "the page itself must not scroll sideways; its tables do"
