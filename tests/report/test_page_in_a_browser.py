"""The page in a real browser: its first screen, sizes, contrast, sorting, no errors. Skips where Chromium is not."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from records import FULL, LOCAL, config, write_divergence, write_run

from rtx.report.contents import build, html
from rtx.report.run_records import collect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WATCH = """<script>
window.faults = [];
window.addEventListener("error", (event) => window.faults.push(String(event.message)));
for (const word of ["error", "warn"]) console[word] = (...said) => window.faults.push(said.join(" "));
</script>"""
FRAME = """<iframe src="page.html" style="border:0;width:{width}px;height:{height}px"></iframe><script>
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
  const shown = [...page.querySelectorAll("h1, p, td, th, summary, figcaption")].filter((one) => one.offsetParent);
  result.contrast = Math.min(...shown.map(contrast));
  result.wide = page.documentElement.scrollWidth - page.documentElement.clientWidth;
  const low = (name) => page.querySelector(name).getBoundingClientRect().bottom;
  result.bottoms = [".headline", ".answer", "figure svg"].map(low);
  result.headline = page.querySelector(".headline").textContent;
  result.open = [...page.querySelectorAll("details[open] > summary")].map((one) => one.textContent);
  const table = page.querySelector("table.answer"), button = table.tHead.rows[0].cells[1].firstElementChild;
  const column = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[1].dataset.sort));
  button.focus();
  result.focused = page.activeElement === button;
  button.click();
  result.up = column();
  button.click();
  result.down = column();
  result.faults = view.faults;
  result.overlaps = 0;
  const boxes = (what) => [...page.querySelectorAll(".first svg " + what)].map((one) => one.getBoundingClientRect());
  const texts = boxes("text"), bars = boxes("[id^=LineCollection] path");
  result.drawn = [texts.length, bars.length];
  texts.forEach((a, at) => texts.slice(at + 1).concat(bars).forEach((b) => {{
    result.overlaps += a.left + 2 < b.right && b.left + 2 < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom;
  }}));
  document.body.insertAdjacentHTML("beforeend", "<pre id=result></pre>");
  document.querySelector("#result").textContent = JSON.stringify(result);
}};
</script>"""


def looked_at(folder: Path, page: str, width: int, height: int, scheme: int) -> dict[str, Any]:
    (folder / "page.html").write_text(page.replace("<head>", "<head>" + WATCH), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.format(width=width, height=height), encoding="utf-8")
    command = [*f"{CHROMIUM} --headless --no-sandbox --disable-gpu --no-first-run --window-size=1400,1000".split()]
    command += [f"--blink-settings=preferredColorScheme={scheme}", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", "--enable-logging=stderr"]
    command += ["--dump-dom", (folder / "frame.html").as_uri()]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "CONSOLE" not in answer.stderr
    found = re.search(r"<pre id=\"result\">(.*?)</pre>", answer.stdout, re.DOTALL)
    assert found, answer.stdout[-2000:] + answer.stderr[-2000:]
    return json.loads(unescape(found[1]))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 800, 1), (1280, 800, 0), (375, 800, 0)])
def test_the_first_screen_holds_the_answer(width: int, height: int, scheme: int, tmp_path: Path) -> None:
    selections = [{"routing__selection": name} for name in ("causal", "random", "topk")]
    for at, values in enumerate([LOCAL, FULL, *selections]):
        for seed in range(5):
            bits, speed = 2 + 0.02 * at + 0.01 * (seed * at % 5), 1.0 + 0.04 * at + 0.02 * seed
            run = write_run(tmp_path / "runs", config("far_text_causal", seed=seed, **values), bits=bits, speed=speed)
    write_divergence(run, layers=4)
    result = looked_at(tmp_path, html(build(collect([tmp_path / "runs"]), "a sweep")), width, height, scheme)
    assert result["faults"] == []
    assert result["wide"] <= 0, "the page itself must not scroll sideways; its tables do"
    assert result["contrast"] >= 4.5
    assert result["focused"] == (width == 1280), "titles that sort are left out on a phone"
    assert result["up"] == sorted(result["up"]) and result["down"] == result["up"][::-1]
    assert result["headline"].endswith("routing (topk) sees the future and is not ranked.")
    assert result["open"] == ["Plots"]
    if width == 1280:
        assert max(result["bottoms"]) <= height, "question, answer, table and plot are on the first screen"
        assert result["overlaps"] == 0 and min(result["drawn"]) >= 10, "no name covers a bar or another name"
