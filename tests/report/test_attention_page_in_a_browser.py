"""The page of what heads read: what its data hold, its size, and in a real browser what a tap shows."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import zlib
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_page_in_a_browser import CHROMIUM, WATCH

from rtx.report import attention_page as module
from rtx.report.attention_page import Sheet, Text, attention_page
from rtx.report.maps import shades

ACT = """<script>
addEventListener("load", () => setTimeout(async () => {
  const $ = (name) => document.getElementById(name);
  const wait = () => new Promise((done) => setTimeout(done, 300));
  const marked = () => [...document.querySelectorAll("#text span")].map((s) => s.style.background ? 1 : 0).join("");
  while (!document.body.dataset.ready) await wait();
  const result = {head: $("head").selectedOptions[0].textContent, told: [$("told").textContent], marks: [marked()]};
  result.clusters = [...document.querySelectorAll("#clusters li")].map((entry) => entry.textContent.trim());
  document.querySelector('#text [data-at="5"]').click();
  result.told.push($("told").textContent);
  result.marks.push(marked());
  document.querySelector('#text [data-at="0"]').click();
  result.told.push($("told").textContent);
  $("on").click();
  result.told.push($("told").textContent);
  $("head").value = "0";
  $("head").dispatchEvent(new Event("change"));
  await wait();
  result.marks.push(marked());
  const pixels = $("map").getContext("2d").getImageData(0, 0, $("map").width, $("map").height).data;
  result.drawn = [$("map").width, $("map").height, pixels.filter((_, i) => i % 4 === 3 && pixels[i]).length];
  result.faults = window.faults;
  result.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const out = document.createElement("pre");
  out.id = "result";
  out.textContent = JSON.stringify(result);
  document.body.append(out);
}, 0));
</script>"""


def example(positions: int = 4, length: int = 6, heads: int = 2, seed: int = 0) -> tuple[Text, list[Sheet]]:
    """The last positions of a short text: a head that reads itself and the one before, and heads in clusters."""
    units = [*"ab</script>cdefgh"[: length - 1], "↵\n"]
    units += ["x"] * (length - len(units))
    at_P = np.arange(length - positions, length)
    local_PN = np.zeros((positions, length), np.float32)
    local_PN[np.arange(positions), at_P] = local_PN[np.arange(positions), at_P - 1] = 0.5
    sheets = [Sheet(0, "head 0: local", shades(local_PN), np.full((positions, length), -1), 0)]
    for head in range(1, heads):
        draw = np.random.default_rng(seed + head)
        weight_PN = draw.random((positions, length)).astype(np.float32) * (np.arange(length) <= at_P[:, None])
        cluster_PN = np.where(weight_PN > 0, draw.integers(300, size=weight_PN.shape), -1)
        sheets.append(Sheet(0, f"head {head}: routing, causal", shades(weight_PN), cluster_PN, 300))
    return Text(units, int(at_P[0]), length - 1, "byte"), sheets


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_holds_shades_and_clusters_of_every_pair() -> None:
    text, sheets = example()
    page, answered = attention_page("a <title>", ["a line & more"], text, sheets)
    data = data_of(page)
    assert answered == range(2, 6) and data["first"] == 2 and data["count"] == 4 and data["units"] == list(text.units)
    assert "a &lt;title&gt;" in page and "a line &amp; more" in page and "http" not in page
    for sheet, packed in zip(sheets, data["sheets"], strict=True):
        shown = np.frombuffer(zlib.decompress(base64.b64decode(packed["shades"])), np.uint8).reshape(4, 6)
        assert (shown == sheet.shade_PN).all()
        if sheet.clusters:
            places = np.frombuffer(zlib.decompress(base64.b64decode(packed["places"])), np.uint8).reshape(4, 6)
            for p, n in zip(*np.nonzero(sheet.shade_PN), strict=True):
                assert packed["rows"][p][places[p, n]] == sheet.cluster_PN[p, n]


def test_a_page_that_would_be_too_large_answers_for_fewer_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    text, sheets = example(positions=200, length=400, heads=4)
    whole, answered = attention_page("t", [], text, sheets)
    assert answered == range(200, 400)
    monkeypatch.setattr(module, "MOST_BYTES", len(whole.encode()) * 2 // 3)
    page, answered = attention_page("t", [], Text(text.units, text.first, 250, "byte"), sheets)
    assert len(page.encode()) <= module.MOST_BYTES and 50 < len(answered) < 150
    assert answered[0] < 250 < answered[-1] and answered[0] >= 200
    assert data_of(page)["count"] == len(answered)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
def test_a_tap_shows_what_a_position_reads(tmp_path: Path) -> None:
    text, sheets = example(positions=6, length=6)
    weight_PN = np.array([[1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], *np.zeros((3, 6)), [0.5, 0, 0.25, 0, 0, 0.25]])
    cluster_PN = np.array([[7, *[-1] * 5], *[[-1] * 6] * 4, [7, -1, 2, -1, -1, 7]])
    sheets[1] = Sheet(3, "head 1: routing, causal", shades(weight_PN.astype(np.float32)), cluster_PN, 9)
    page, _ = attention_page("What heads read", ["a line"], Text(text.units, 0, 5, "byte"), sheets)
    path = tmp_path / "page.html"
    path.write_text(page.replace("<head>", "<head>" + WATCH).replace("</body>", ACT + "</body>"), encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=500,900"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=20000"]
    answer = subprocess.run([*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=600)
    assert "CONSOLE" not in answer.stderr
    found = re.search(r'<pre id="result">(.*?)</pre>', answer.stdout, re.DOTALL)
    assert found, answer.stdout[-2000:] + answer.stderr[-2000:]
    result = json.loads(unescape(found[1]))
    assert result["faults"] == []
    assert result["head"] == "layer 3, head 1: routing, causal", "the first head with clusters"
    assert result["told"] == [
        'Position 5, which predicts "\\n", reads 3 positions, 5 back at the most.',
        'Position 5, which predicts "\\n", reads 3 positions, 5 back at the most.',
        'Position 0, which predicts "a", reads 1 position, 0 back at the most.',
        'Position 1, which predicts "b", reads nothing: it is in no cluster, and the head gives zero.',
    ]
    assert result["clusters"] == ["cluster 7: 2 keys", "cluster 2: 1 key"]
    # The mark of the start, then the units: key j is unit j - 1.
    assert result["marks"] == ["1010010", "1010010", "1100000"]
    assert result["drawn"][:2] == [6, 6] and result["drawn"][2] > 10
    assert result["wide"] <= 0, "the page must not scroll sideways"
