"""A report as one HTML page that needs nothing else: style, script and charts are inside it."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from rtx.report import plots
from rtx.report.divergence import BOUND
from rtx.report.formats import exported
from rtx.report.report import Report
from rtx.report.views import Column, Value, View

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
<script>
{script}</script>
</body>
</html>
"""


MOST_OPEN = 3
"""Problems that stand open above the tables; more would push these off the first screen."""


def html(report: Report) -> str:
    """Return the page."""
    parts = [f"<h1>{escape(report.title)}</h1>", told(report.problems)]
    parts += [table(view) for view in (report.glance, *report.views) if view]
    parts += [charts(report), samples(report)]
    if report.commands:
        parts.append(f"<h2>To reproduce</h2><pre>{escape(chr(10).join(report.commands))}</pre>")
    parts += [table(view) for view in (report.differences, report.environment, report.tables) if view]
    here = Path(__file__).parent
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return PAGE.format(title=escape(report.title), style=style, script=script, body="\n".join(filter(None, parts)))


def told(problems: list[str]) -> str:
    """Return what is to be known before the tables are read."""
    if not problems:
        return ""
    entries = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    if len(problems) <= MOST_OPEN:
        return f'<div class="told"><b>To know</b><ul>{entries}</ul></div>'
    summary = f"<summary><b>To know</b>: {len(problems)} things</summary>"
    return f'<details class="told">{summary}<ul>{entries}</ul></details>'


def table(view: View) -> str:
    """Return a table that sorts by its titles, the lines above it and its footnotes."""
    heads = "".join(head(column) for column in view.columns)
    rows = []
    for at, row in enumerate(view.rows):
        entries = "".join(entry(column, value) for column, value in zip(view.columns, row, strict=True))
        kind = ' class="absent"' if at in view.absent else ""
        rows.append(f"<tr{kind}>{entries}</tr>")
    lines = "".join(f'<p class="soft">{escape(line)}</p>' for line in view.lines)
    notes = "".join(f"<li>{escape(note)}</li>" for note in view.footnotes)
    foot = f'<ul class="foot">{notes}</ul>' if notes else ""
    more = any("more" in classes(column) for column in view.columns)
    toggle = '<label class="toggle"><input type="checkbox"> all columns</label>' if more else ""
    return (
        f"<section><h2>{escape(view.title)}</h2>{lines}{toggle}"
        f'<div class="wide"><table class="sortable"><thead><tr>{heads}</tr></thead>'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>{foot}</section>"
    )


def classes(column: Column) -> list[str]:
    """Return the classes of a column's entries; `more` are those that a phone leaves out until asked for them."""
    extra = not column.brief or column.key == "seeds" or (column.label and column.key not in ("model", "run", "layer"))
    return [column.key.replace(".", "_"), *(["number"] if column.number else []), *(["more"] if extra else [])]


def head(column: Column) -> str:
    """Return the title of a column, as a button."""
    kind = f' class="{escape(" ".join(classes(column)))}"'
    return f'<th scope="col" aria-sort="none"{kind}><button type="button">{escape(column.title)}</button></th>'


def entry(column: Column, value: Value) -> str:
    """Return one entry, with what it is sorted by."""
    hint = f' title="{escape(value.hint)}"' if value.hint else ""
    said = escape(value.text)
    if value.short and value.short != value.text:
        said = f'<span class="long">{said}</span><span class="short">{escape(value.short)}</span>'
    kind = escape(" ".join(classes(column)))
    return f'<td class="{kind}" data-sort="{escape(str(exported(value)))}"{hint}>{said}</td>'


def charts(report: Report) -> str:
    """Return the learning curves, bits against steps per second beside the paper's, and the divergence of heads."""
    figures = []
    for chart in report.curves:
        drawing = plots.curves(chart.series, "optimizer steps", f"bits/{chart.unit}")
        figures.append(figure(drawing, plots.legend([one.label for one in chart.series]), chart.caption))
    scatters = [(report.trade_off.ours, f"bits/{report.unit}", "Ours: bits against speed")]
    scatters += [(report.trade_off.paper, "bits/dim", "The paper: bits against speed on a TPUv3")]
    for points, label, caption in scatters:
        if points:
            drawing = plots.scatter(points, "steps per second", label)
            if plots.top_of(points) < max(point.y for point in points):
                caption += " (triangles: far above)"
            names = plots.legend([point.label for point in points], True, [point.style for point in points])
            figures.append(figure(drawing, names, caption))
    for caption, series in report.divergences:
        drawing = plots.profile(series, "layer", "nats: mean and deviation (dashed: the paper's)", BOUND)
        places = [plots.place_of(one, at) for at, one in enumerate(series)]
        figures.append(figure(drawing, plots.legend([one.label for one in series], places=places), caption))
    return f'<h2 id="plots">Plots</h2><div class="plots">{"".join(figures)}</div>' if figures else ""


def figure(drawing: str, legend: str, caption: str) -> str:
    """Return a chart with its legend."""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{drawing}{legend}</figure>"


def samples(report: Report) -> str:
    """Return what the runs wrote, and their pictures."""
    parts = []
    for at, (name, sample) in enumerate(report.samples):
        is_open = " open" if at == 0 else ""
        parts.append(f"<details{is_open}><summary>{escape(name)}</summary><pre>{escape(sample)}</pre></details>")
    for name, content in report.pictures:
        data = base64.b64encode(content).decode()
        picture = f'<img alt="samples of {escape(name)}" src="data:image/png;base64,{data}">'
        parts.append(f'<details class="pictures"><summary>{escape(name)}</summary>{picture}</details>')
    return f"<h2>Samples</h2>{''.join(parts)}" if parts else ""
