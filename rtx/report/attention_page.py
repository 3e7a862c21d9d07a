"""What heads read of a text, as one HTML page that needs nothing else and answers for every position that is tapped.

Shapes: P positions looked at, N positions of the text.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rtx.report.maps import GOLDEN, PLAIN_HUE, SHADES
from rtx.report.page import PAGE

MOST_BYTES = 2_000_000
"""Bytes of a page at the most."""

BODY = """<h1>{title}</h1>
{lines}
<div class="bar">
<label>head <select id="head"></select></label>
<span class="moves"><button type="button" id="back" aria-label="position before">&#9664;</button>
<button type="button" id="on" aria-label="next position">&#9654;</button></span>
</div>
<p id="told" role="status" aria-live="polite"></p>
<ul id="clusters" class="clusters"></ul>
<div id="text" tabindex="0" aria-label="the text; tap a unit, or move with the arrow keys"></div>
<figure><figcaption id="caption"></figcaption><canvas id="map"></canvas></figure>
<script type="application/json" id="data">{data}</script>"""


@dataclass(frozen=True)
class Sheet:
    """What one head reads at the positions looked at."""

    layer: int
    name: str
    """Such as "head 5: routing"."""
    shade_PN: np.ndarray
    """Uint8, as `maps.shades` gives them; 0: not read."""
    cluster_PN: np.ndarray
    """-1: not read, or the pattern has no clusters."""
    clusters: int


@dataclass(frozen=True)
class Text:
    """What is looked at."""

    units: Sequence[str]
    """N units, as they are shown."""
    first: int
    """The first of the P positions looked at, which follow each other."""
    chosen: int
    """The position shown at the start."""
    unit: str
    """What a unit is called."""


def attention_page(title: str, lines: Sequence[str], text: Text, sheets: Sequence[Sheet]) -> tuple[str, range]:
    """Return the page, and the positions that it answers for: as many as fit, around the chosen one.

    Args:
        title: of the page.
        lines: what stands above the text.
        text: what is looked at; the sheets are of `text.first` on.
        sheets: one for each head; the first with clusters is shown at the start.
    """
    count = positions = len(sheets[0].shade_PN)
    while True:
        keep = around(text, positions, count)
        data = {
            "units": list(text.units),
            "first": text.first + keep.start,
            "count": count,
            "chosen": text.chosen,
            "unit": text.unit,
            "shades": SHADES,
            "golden": GOLDEN,
            "plain": PLAIN_HUE,
            "sheets": [packed(sheet, keep) for sheet in sheets],
        }
        page = filled(title, lines, data)
        size = len(page.encode())
        if size <= MOST_BYTES or count == 1:
            return page, range(text.first + keep.start, text.first + keep.stop)
        count = max(1, min(count - 1, int(0.97 * count * MOST_BYTES / size)))


def around(text: Text, positions: int, count: int) -> slice:
    """Return `count` of the positions looked at, the chosen one amid them as far as there are others."""
    first = min(max(0, text.chosen - text.first - count // 2), positions - count)
    return slice(first, first + count)


def filled(title: str, lines: Sequence[str], data: dict[str, Any]) -> str:
    """Return the page with its style, its script and its data inside it."""
    here = Path(__file__).parent
    style, script = ((here / f"attention_page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    said = "".join(f'<p class="soft">{escape(line)}</p>' for line in lines)
    # "<" would end the element that holds the data.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    body = BODY.format(title=escape(title), lines=said, data=text)
    return PAGE.format(title=escape(title), style=style, script=script, body=body)


def packed(sheet: Sheet, keep: slice) -> dict[str, Any]:
    """Return what the script reads of a head: shades, and of each key the place of its cluster among those of its row.

    Both are bytes `[P, N]`, deflated, in base64. A row that reads in more than 255 clusters has the rest in the last.
    """
    shade_PN, cluster_PN = sheet.shade_PN[keep], sheet.cluster_PN[keep]
    place_PN, rows = np.zeros(shade_PN.shape, np.uint8), []
    for p, cluster_N in enumerate(cluster_PN if sheet.clusters else []):
        used, inverse_N = np.unique(cluster_N[shade_PN[p] > 0], return_inverse=True)
        place_PN[p, shade_PN[p] > 0] = np.minimum(inverse_N, 254)
        rows.append(used.tolist())
    found = {
        "layer": sheet.layer,
        "name": sheet.name,
        "clusters": sheet.clusters,
        "shades": deflated(shade_PN),
    }
    return found | ({"rows": rows, "places": deflated(place_PN)} if sheet.clusters else {})


def deflated(values: np.ndarray) -> str:
    """Return bytes as base64 of a zlib stream."""
    return base64.b64encode(zlib.compress(values.tobytes(), 6)).decode()
