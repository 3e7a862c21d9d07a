"""Loss by position and the gain from far context: lines for a terminal, and a chart that stands by itself."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rtx.report.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Scale, axes, padded, short, ticks
from rtx.report.summary import WIDTH as COLUMNS

STYLE = """svg { font: 12px system-ui, "DejaVu Sans", sans-serif; background: #fff; color: #1f6fb4; }
text { fill: #5d6570; } .title { fill: #1b1e23; } .grid { stroke: #d9dde3; fill: none; }
.axis { stroke: #5d6570; fill: none; } .line { fill: none; stroke: currentColor; stroke-width: 1.7; }
.bars { stroke: currentColor; stroke-width: 1.2; } circle { fill: currentColor; }
@media (prefers-color-scheme: dark) { svg { background: #14171b; color: #6db3f2; } text { fill: #9aa4b0; }
.title { fill: #e6e9ed; } .grid { stroke: #343a42; } .axis { stroke: #9aa4b0; } }"""


def context_table(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of a `rtx analyze context` result."""
    unit, windows = result["unit"], result["windows"]
    lines = [f"bits/{unit} by position, mean ± standard error over {windows:,} windows", f"{'positions':>15}  bits"]
    lines += [
        f"{between(row['first'], row['last']):>15}  {figure(row['bits'], row['error'])}" for row in result["positions"]
    ]
    lines.append("")
    if result["gains"]:
        lines += [
            *textwrap.wrap(
                f"the same {unit}s, those of the second half of {result['gains'][0]['windows']:,} windows, with less "
                "context; gain: what they lose by it, paired",
                COLUMNS,
            ),
            f"{'units before':>15}  {'bits':<17}  gain of the whole window",
        ]
        for row in result["gains"]:
            gain = "-" if row is result["gains"][0] else figure(row["gain"], row["gain_error"], "+")
            lines.append(f"{between(*row['context']):>15}  {figure(row['bits'], row['error']):<17}  {gain}")
    else:
        lines += textwrap.wrap(f"no gain from far context: {result['no_gains']}", COLUMNS)
    return [*lines, *textwrap.wrap(result["protocol"], COLUMNS)]


def between(first: int, last: int) -> str:
    """Return a range of whole numbers."""
    return f"{first:,}-{last:,}" if last > first else f"{first:,}"


def figure(value: float, error: float | None, sign: str = "") -> str:
    """Return a value with its standard error."""
    return f"{value:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")


@dataclass(frozen=True)
class Point:
    """A value at a place of the x axis."""

    label: str
    x: float
    y: float
    error: float


def context_chart(result: Mapping[str, Any]) -> str:
    """Return an SVG file: bits by position and, where it is known, the gain by context below it."""
    unit = result["unit"]
    by_position = [
        Point(between(row["first"], row["last"]), (row["first"] + row["last"]) / 2, row["bits"], row["error"] or 0.0)
        for row in result["positions"]
    ]
    length = result["length"]
    marks = [(value, short(value)) for value in ticks(0, length)]
    charts = [chart(by_position, (0, length), marks, "position in the window", f"bits/{unit}")]
    levels = list(reversed(result["gains"]))
    if len(levels) > 1:
        gains = [
            Point(between(*row["context"]), place, row["gain"], row["gain_error"] or 0.0)
            for place, row in enumerate(levels)
        ]
        names = [(point.x, point.label) for point in gains]
        title = f"bits/{unit} that the whole window gains over less context, same units"
        charts.append(chart(gains, (-0.5, len(gains) - 0.5), names, "units of context", title))
    height = len(charts) * HEIGHT
    body = "".join(f'<g transform="translate(0 {at * HEIGHT})">{one}</g>' for at, one in enumerate(charts))
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    return f"{opening}<title>{escape(result['protocol'])}</title><style>{STYLE}</style>{body}</svg>\n"


def chart(
    points: Sequence[Point], ends: tuple[float, float], marks: Sequence[tuple[float, str]], x_label: str, y_label: str
) -> str:
    """Return the inside of a chart: a line through points with bars of two standard errors each way."""
    low, high = (pick(p.y + sign * 2 * p.error for p in points) for pick, sign in ((min, -1), (max, 1)))
    x = Scale(*ends, LEFT, WIDTH - RIGHT)
    y = Scale(*padded(low, high, 0.06), HEIGHT - BOTTOM, TOP)
    parts = [axes(x, y, x_label, f"{y_label}; bars: 2 standard errors", marks)]
    line = " ".join(f"{x.at(p.x):.1f},{y.at(p.y):.1f}" for p in points)
    parts.append(f'<polyline class="line" points="{line}"/>')
    for p in points:
        place = f"{x.at(p.x):.1f}"
        bar = f"M{place} {y.at(p.y - 2 * p.error):.1f}V{y.at(p.y + 2 * p.error):.1f}"
        told = f"<title>{p.label}: {figure(p.y, p.error)}</title>"
        parts.append(f'<g>{told}<path class="bars" d="{bar}"/><circle cx="{place}" cy="{y.at(p.y):.1f}" r="3"/></g>')
    return "".join(parts)
