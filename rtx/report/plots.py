"""Charts as SVG text that stands in a page by itself: colours come from the page's style, in light and in dark."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 52, 26, 30, 40
COLOURS = 8
"""Colours of the page's style, c0 to c7; further series repeat them with other dashes."""

FAR = 3.0
"""How far above the median a point may stand in a scatter, in distances from the lowest to the median."""

MOST_POINTS = 240
"""Points drawn of a curve; of more, evenly chosen ones."""


@dataclass(frozen=True)
class Series:
    """Points that belong together, with what they are called."""

    label: str
    points: Sequence[tuple[float, float]]
    errors: Sequence[float] = ()
    """Half the lengths of the bars through the points, where they have some."""
    place: int | None = None
    """Its place among the styles; unset: its place among the series."""


@dataclass(frozen=True)
class Point:
    """A place in a chart with its name, and its colour among those of the page."""

    label: str
    x: float
    y: float
    style: int


@dataclass(frozen=True)
class Scale:
    """From values to places in the picture, linear or by powers of two."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        share = 0.5 if high == low else (value - low) / (high - low)
        return self.start + share * (self.end - self.start)


def curves(series: Sequence[Series], x_label: str, y_label: str) -> str:
    """Return a chart of learning curves; the first steep fall may leave it at the top, so that the ends can be told."""
    shown = [Series(s.label, thinned(s.points)) for s in series if s.points]
    if not shown:
        return ""
    xs = [x for s in shown for x, _ in s.points]
    ys = [y for s in shown for _, y in s.points]
    last = [s.points[-1][1] for s in shown]
    top = min(max(ys), max(last) + 1.5 * max(max(last) - min(last), 0.15 * max(last), 0.1))
    x = Scale(*padded(min(xs), max(xs), 0.0), LEFT, WIDTH - RIGHT)
    y = Scale(*padded(min(ys), top, 0.05), HEIGHT - BOTTOM, TOP)
    lines = []
    for index, one in enumerate(shown):
        places = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in one.points)
        end = one.points[-1]
        lines.append(
            f'<g class="series {style(index)}" data-series="{index}"><title>{escape(one.label)}: '
            f'{end[1]:.4f} at {end[0]:,.0f}</title><polyline points="{places}"/>'
            f'<circle cx="{x.at(end[0]):.1f}" cy="{y.at(end[1]):.1f}" r="2.5"/></g>'
        )
    inside = f'<rect x="{LEFT}" y="{TOP - 4}" width="{WIDTH - LEFT}" height="{HEIGHT - BOTTOM - TOP + 4}"/>'
    body = f'<clipPath id="plot">{inside}</clipPath><g clip-path="url(#plot)">{"".join(lines)}</g>'
    return picture(axes(x, y, x_label, y_label) + body, f"{y_label} against {x_label}")


def scatter(points: Sequence[Point], x_label: str, y_label: str, digits: int = 3) -> str:
    """Return a chart of points; the numbers at them are those of the legend. Lower is better: points far above the
    others stand at the upper edge as triangles, so that the others can be told.
    """
    if not points:
        return ""
    top = top_of(points)
    x = Scale(*padded(min(p.x for p in points), max(p.x for p in points), 0.08), LEFT, WIDTH - RIGHT)
    y = Scale(*padded(min(p.y for p in points), top, 0.08), HEIGHT - BOTTOM, TOP)
    marks = []
    for index, point in enumerate(points):
        above = point.y > top
        px, py = x.at(point.x), TOP + 6 if above else y.at(point.y)
        mark = (
            f"M{px - 5:.1f} {py + 4:.1f}h10l-5 -9z"
            if above
            else f"M{px - 5:.1f} {py:.1f}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z"
        )
        said = f"{escape(point.label)}: {point.y:.{digits}f}, {point.x:.3g} steps/s"
        marks.append(
            f'<g class="series {style(point.style)}" data-series="{index}"><title>{said}</title>'
            f'<path class="dot" d="{mark}"/><text x="{px + 8:.1f}" y="{py + 4:.1f}">{index + 1}</text></g>'
        )
    return picture(axes(x, y, x_label, y_label) + "".join(marks), f"{y_label} against {x_label}")


def top_of(points: Sequence[Point]) -> float:
    """Return the largest y that a scatter shows at its place."""
    middle, most = statistics.median(p.y for p in points), max(p.y for p in points)
    return min(most, middle + FAR * (middle - min(p.y for p in points))) if len(points) > 2 else most


def profile(series: Sequence[Series], x_label: str, y_label: str, bound: float) -> str:
    """Return a chart of lines with bars through their points from 0 up, and a line for what y is bounded by."""
    xs = [x for one in series for x, _ in one.points]
    x = Scale(*padded(min(xs), max(xs), 0.06), LEFT, WIDTH - RIGHT)
    y = Scale(0.0, 1.06 * bound, HEIGHT - BOTTOM, TOP)
    body = [f'<path class="bound" d="M{LEFT} {y.at(bound):.1f}H{WIDTH - RIGHT}"/>']
    for index, one in enumerate(series):
        aside = 4.0 * (index - (len(series) - 1) / 2)  # so that bars of one x do not hide each other
        places = [(x.at(a) + aside, b) for a, b in one.points]
        line = " ".join(f"{px:.1f},{y.at(b):.1f}" for px, b in places)
        bars = "".join(
            f"M{px:.1f} {y.at(max(0.0, b - error)):.1f}V{y.at(min(bound, b + error)):.1f}"
            for (px, b), error in zip(places, one.errors, strict=True)
        )
        dots = "".join(f'<circle cx="{px:.1f}" cy="{y.at(b):.1f}" r="2.5"/>' for px, b in places)
        body.append(
            f'<g class="series {style(place_of(one, index))}" data-series="{index}"><title>{escape(one.label)}</title>'
            f'<polyline points="{line}"/><path class="bars" d="{bars}"/>{dots}</g>'
        )
    return picture(axes(x, y, x_label, y_label) + "".join(body), f"{y_label} against {x_label}")


def place_of(one: Series, index: int) -> int:
    """Return the place of a series among the styles."""
    return index if one.place is None else one.place


def legend(labels: Sequence[str], numbered: bool = False, places: Sequence[int] | None = None) -> str:
    """Return the names of the series of a chart in its colours, as a list; `places` are theirs among the styles."""
    entries = []
    for index, label in enumerate(labels):
        mark = f"<b>{index + 1}</b>" if numbered else '<svg viewBox="0 0 22 8"><path d="M0 4H22"/></svg>'
        entries.append(
            f'<li class="{style(places[index] if places else index)}" data-series="{index}">{mark} {escape(label)}</li>'
        )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def style(index: int) -> str:
    """Return the classes that give a series its colour and its dashes."""
    return f"c{index % COLOURS} d{index // COLOURS % 4}"


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `MOST_POINTS` of the points, the first and the last among them."""
    if len(points) <= MOST_POINTS:
        return list(points)
    return [points[round(at * (len(points) - 1) / (MOST_POINTS - 1))] for at in range(MOST_POINTS)]


def padded(low: float, high: float, share: float) -> tuple[float, float]:
    """Return a range with room at both ends."""
    room = (high - low) * share or (abs(high) * 0.05 or 1.0 if high == low else 0.0)
    return low - room, high + room


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers within a range."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [step * at for at in range(first, math.floor(high / step + 1e-9) + 1)]


def axes(x: Scale, y: Scale, x_label: str, y_label: str, marks: Sequence[tuple[float, str]] = ()) -> str:
    """Return grid lines, tick labels and axis titles; `marks` are values of x with their labels, else round numbers."""
    parts = []
    for value, label in marks or [(value, short(value)) for value in ticks(x.low, x.high)]:
        place = f"{x.at(value):.1f}"
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{place}" y="{HEIGHT - BOTTOM + 16}">{escape(label)}</text>'
        )
    for value in ticks(y.low, y.high):
        place = f"{y.at(value):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {place}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{place}" dy="4">{short(value)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(f'<text class="title" text-anchor="end" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}">{escape(x_label)}</text>')
    parts.append(f'<text class="title" x="4" y="{TOP - 14}">{escape(y_label)}</text>')
    return "".join(parts)


def short(value: float) -> str:
    """Return a tick's label."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{round(value, 10):g}"


def picture(body: str, title: str) -> str:
    """Return an SVG element."""
    return f'<svg class="chart" role="img" aria-label="{escape(title)}" viewBox="0 0 {WIDTH} {HEIGHT}">{body}</svg>'
