"""The first plot of a report: bits over seconds of training, a line for each kind of heads."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rtx.errors import plural
from rtx.report.curves import Curve
from rtx.report.drawing import (
    SEES_FUTURE,
    Plot,
    Side,
    axes,
    colour,
    is_inside,
    plot_of,
    write_name,
)
from rtx.report.ranking import half_interval, mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
RunCurves = Mapping[tuple[str, str], Curve]
"""The curves of a kind of heads by seed and clock."""

POINTS = 60
"""Number of points of a mean curve, at equal distances over log time."""
FIRST_SHOWN = POINTS // 4
"""From this point on a mean curve lies inside the plot; its steep start may be cut off."""
NAMES_SHARE = 0.45
"""Room for names at the right of the lines, as a share of the lines' width."""
SIDES: Sequence[Side] = ((1, 0), (0, -1), (0, 1))
"""Where a name may stand beside the end of a line: right, below, above."""
OTHER_SIDE_COST = 3
"""Of a name that is not at the right, in covered points of lines."""
GAP_BESIDE = 8
"""Points between the end of a line and a name at its right."""
GAP_ABOVE = 11
"""Points between the end of a line and a name above or below it."""
DISTANCES = range(0, 33, 3)
SIGNED_DISTANCES = (*DISTANCES, *(-distance for distance in DISTANCES[1:]))
"""Points by which a name may slide along its side: up or down at the right, else right or left."""


class Place(NamedTuple):
    """Where a name may stand: what it covers, and how it is written there."""

    cost: float
    side: Side
    offset: Point
    box: Any


def bits_and_time(
    runs: Mapping[str, RunCurves],
    see_future: Sequence[str],
    unit: str,
) -> Plot | None:
    """Draw the bits of kinds of heads over their seconds of training, or None without curves.

    Lines are means over seeds with 95% intervals. Only runs of the most frequent clock are drawn;
    the caption counts the others. Seconds of one clock are comparable: those of one machine, number
    of threads and engine.

    Args:
        runs: curves by kind, then by seed and clock.
        see_future: kinds whose heads see the future; their lines are dashed.
        unit: of the bits, such as bits/byte.
    """
    clocks: Counter[str] = Counter()
    for curves in runs.values():
        clocks.update(clock for _, clock in curves)
    if not clocks:
        return None
    usual = clocks.most_common(1)[0][0]
    drawn = curves_of_clock(runs, usual)
    if not drawn:
        return None
    x_title = "seconds of training, log scale (optimizer steps alone)"
    figure, (plane,) = axes(x_title, f"{unit} (less is better)")
    plane.set_xscale("log")
    ends: dict[str, Point] = {}
    points: list[Point] = []
    top = -math.inf
    for kind, curves in drawn.items():
        mean_line = draw_mean(plane, kind, curves, dashed=kind in see_future)
        name = kind + SEES_FUTURE if kind in see_future else kind
        ends[name] = mean_line[-1]
        points += mean_line[:-1]
        top = max(top, mean_line[FIRST_SHOWN][1])
    first = min(seconds for seconds, _ in points)
    set_limits(plane, first, ends, top)
    name_ends(plane, ends, points)
    caption = "Bits over seconds of training"
    left_out = sum(clocks.values()) - clocks[usual]
    if left_out:
        other = "with other machine, threads or engine left out"
        caption += f" ({plural(left_out, 'run')} {other})"
    return plot_of("time", f"{caption}: means over seeds with 95% intervals", figure)


def curves_of_clock(runs: Mapping[str, RunCurves], wanted: str) -> dict[str, list[Curve]]:
    """Return the curves of one clock that have a line, by kind."""
    drawn: dict[str, list[Curve]] = {}
    for kind, curves in runs.items():
        for (_, clock), curve in curves.items():
            if clock == wanted and len(curve.seconds) > 1:
                drawn.setdefault(kind, []).append(curve)
    return drawn


def draw_mean(plane: Axes, kind: str, curves: Sequence[Curve], dashed: bool) -> list[Point]:
    """Draw the mean of curves with its interval, and return the points of its line."""
    seconds, middle, half = mean_curve(curves)
    ink = colour(kind)
    style = "--" if dashed else "-"
    plane.plot(seconds, middle, color=ink, linestyle=style)
    low = [value - width for value, width in zip(middle, half, strict=True)]
    high = [value + width for value, width in zip(middle, half, strict=True)]
    plane.fill_between(seconds, low, high, color=ink, alpha=0.15, linewidth=0)
    return list(zip(seconds, middle, strict=True))


def mean_curve(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float]]:
    """Return seconds, the mean bits of curves there, and half the 95% interval of each mean.

    They span the time that all curves share: from the latest start to the earliest end.
    """
    import numpy as np

    first = max(curve.seconds[0] for curve in curves)
    last = min(curve.total for curve in curves)
    seconds = np.geomspace(first, max(first, last), POINTS).tolist()
    middle = []
    half = []
    for now in seconds:
        log_now = math.log(now)
        values = [float(np.interp(log_now, np.log(curve.seconds), curve.bits)) for curve in curves]
        middle.append(mean(values))
        half.append(half_interval(values) or 0.0)
    return seconds, middle, half


def set_limits(plane: Axes, first: float, ends: Mapping[str, Point], top: float) -> None:
    """Set the limits of both axes, with room for names at the ends of lines, and mark seconds.

    `top`: the largest bits that are shown; the start of a line may lie above.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    last = max(seconds for seconds, _ in ends.values())
    lowest = min(bits for _, bits in ends.values())
    plane.set_ylim(lowest - 0.08 * (top - lowest) - 1e-6, top + 1e-6)
    # On a log axis a power of a ratio is a share of its width; short lines count as a doubling.
    room = max(2.0, last / first) ** NAMES_SHARE
    plane.set_xlim(0.95 * first, last * room)
    plane.xaxis.set_major_locator(FixedLocator(marks_of_time(first, last)))
    plane.xaxis.set_major_formatter(FuncFormatter(lambda mark, _: f"{mark:,g}"))
    plane.xaxis.set_minor_locator(NullLocator())


def marks_of_time(first: float, last: float) -> list[float]:
    """Return the round numbers in a span of seconds; its ends where there are none."""
    powers = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
    round_numbers = []
    for power in powers:
        round_numbers += [digit * 10.0**power for digit in (1, 2, 5)]
    inside = [mark for mark in round_numbers if 0.95 * first <= mark <= 1.05 * last]
    return inside or [first, last]


def name_ends(plane: Axes, ends: Mapping[str, Point], points: Sequence[Point]) -> None:
    """Write names beside the ends of their lines, in their colours.

    Places that leave the plot, or cover another name or end, are left out. Of the others a name
    takes the cheapest: a covered point of a line costs 1, a point of distance 1/2, and another side
    than the right `OTHER_SIDE_COST`. Without any, it is at the right.
    """
    from matplotlib.transforms import Bbox

    plane.figure.canvas.draw()
    pixels = [tuple(point) for point in plane.transData.transform(points)]
    ends_in_pixels = plane.transData.transform(list(ends.values()))
    taken = [Bbox([end, end]).padded(4) for end in ends_in_pixels]
    for name, end in sorted(ends.items(), key=lambda item: item[1][1]):
        places: list[Place] = []
        for side, distance in itertools.product(SIDES, SIGNED_DISTANCES):
            offset = offset_of(side, distance)
            text = write_name(plane, name, end, side, offset)
            box = text.get_window_extent()
            text.remove()
            if not is_inside(box, plane) or any(box.overlaps(other) for other in taken):
                continue
            covered = sum(box.contains(*pixel) for pixel in pixels)
            cost = covered + abs(distance) / 2
            if side != SIDES[0]:
                cost += OTHER_SIDE_COST
            places.append(Place(cost, side, offset, box))
        if not places:
            write_name(plane, name, end, SIDES[0], offset_of(SIDES[0], 0))
            continue
        best = min(places, key=lambda place: place.cost)
        write_name(plane, name, end, best.side, best.offset)
        taken.append(best.box)


def offset_of(side: Side, distance: int) -> Point:
    """Return the points by which a name is moved from the end of its line."""
    across, up = side
    if across:
        return GAP_BESIDE * across, distance
    return distance, GAP_ABOVE * up
