"""The page in a real browser: it renders, it sorts, and nothing lands on the console. Skips where Chromium is not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from records import write_table_1

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
const table = document.querySelector("table.sortable");
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
result.curves = document.querySelectorAll("svg.chart polyline").length;
result.drawn = document.querySelector("svg.chart").getBoundingClientRect().height;
const out = document.createElement("pre");
out.id = "result";
out.textContent = JSON.stringify(result);
document.body.append(out);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
def test_it_renders_and_sorts_without_an_error(tmp_path: Path) -> None:
    page = html(build(collect([write_table_1(tmp_path / "runs")]), "a sweep"))
    path = tmp_path / "page.html"
    path.write_text(page.replace("<head>", "<head>" + WATCH).replace("</body>", ACT + "</body>"), encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=800,600"]
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
    assert result["curves"] == 27
    assert result["drawn"] > 100
    assert result["wide"] <= 0, "the page itself must not scroll sideways; its tables do"
