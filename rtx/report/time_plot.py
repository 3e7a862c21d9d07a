"""The first plot of a report: bits beside seconds of training, a line for each kind of heads."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rtx.errors import plural
from rtx.report.curves import Curve
from rtx.report.plots import AHEAD, Plot, axes, colour, finished
from rtx.report.ranking import half_interval, mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]

POINTS = 60
"""Of a mean curve, at equal distances over log time."""
NAMES_SHARE = 0.45
"""Of the width of the plot, that names take at the right of its lines."""
SIDES = ((1, 0), (0, -1), (0, 1))
"""Where a name may stand beside the end of a line: right, below, above."""
DISTANCES = range(0, 33, 3)
"""Points by which a name may be moved away from the end of its line, or up and down beside it."""


def bits_and_time(kinds: Mapping[str, Mapping[tuple[str, str], Curve]], ahead: Sequence[str], unit: str) -> Plot | None:
    """Draw the bits of kinds of heads beside their seconds of training: means over seeds with 95% intervals.

    `kinds`: curves by kind, seed and clock. Those of the most frequent clock are drawn, the others left out, as the
    caption says. `ahead`: kinds that see the future, dashed.
    """
    clocks = Counter(clock for curves_of_kind in kinds.values() for _, clock in curves_of_kind)
    if not clocks:
        return None
    common = clocks.most_common(1)[0][0]
    drawn = {}
    for kind, of_kind in kinds.items():
        able = [curve for (_, clock), curve in of_kind.items() if clock == common and len(curve.seconds) > 1]
        if able:
            drawn[kind] = able
    if not drawn:
        return None
    figure, (one,) = axes("seconds of training, log scale (optimizer steps alone)", f"{unit} (less is better)")
    one.set_xscale("log")
    ends, tops, lines = {}, [], []
    for kind, of_kind in drawn.items():
        seconds, middle, half = mean_curve(of_kind)
        ink = colour(kind)
        one.plot(seconds, middle, color=ink, linestyle="--" if kind in ahead else "-")
        low = [value - wide for value, wide in zip(middle, half, strict=True)]
        high = [value + wide for value, wide in zip(middle, half, strict=True)]
        one.fill_between(seconds, low, high, color=ink, alpha=0.15, linewidth=0)
        ends[kind + AHEAD * (kind in ahead)] = (seconds[-1], middle[-1])
        lines += zip(seconds[:-1], middle[:-1], strict=True)
        tops.append(middle[len(middle) // 4])
    limits_of_time(one, min(x for x, _ in lines), ends, max(tops))
    name_ends(one, ends, lines)
    left_out = sum(clocks.values()) - clocks[common]
    caption = "Bits beside seconds of training"
    if left_out:
        caption += f" ({plural(left_out, 'run')} with other machine, threads or engine left out)"
    return finished("time", f"{caption}: means over seeds with 95% intervals", figure)


def mean_curve(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float]]:
    """Return seconds, mean bits and half their 95% intervals, from the last first validation to the first last one."""
    import numpy as np

    first = max(curve.seconds[0] for curve in curves)
    last = min(curve.total for curve in curves)
    seconds = np.geomspace(first, max(first, last), POINTS).tolist()
    middle = []
    half = []
    for at in seconds:
        values = [float(np.interp(math.log(at), np.log(curve.seconds), curve.bits)) for curve in curves]
        middle.append(mean(values))
        half.append(half_interval(values) or 0.0)
    return seconds, middle, half


def limits_of_time(one: Axes, first: float, ends: Mapping[str, Point], highest: float) -> None:
    """Leave room for names at the ends of lines, and mark round numbers of seconds; early bits may lie above."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    last = max(x for x, _ in ends.values())
    lowest = min(y for _, y in ends.values())
    one.set_ylim(lowest - 0.08 * (highest - lowest) - 1e-6, highest + 1e-6)
    one.set_xlim(0.95 * first, last * max(2.0, last / first) ** NAMES_SHARE)
    powers = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
    marks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    one.xaxis.set_major_locator(FixedLocator([mark for mark in marks if 0.95 * first <= mark <= 1.05 * last]))
    one.xaxis.set_major_formatter(FuncFormatter(lambda mark, _: f"{mark:,g}"))
    one.xaxis.set_minor_locator(NullLocator())


def name_ends(one: Axes, ends: Mapping[str, Point], lines: Sequence[Point]) -> None:
    """Write names beside the ends of their lines, in their colours.

    A name covers no other one and no end, and of the points of `lines` as few as may be.
    """
    from matplotlib.transforms import Bbox

    one.figure.canvas.draw()
    points = [tuple(point) for point in one.transData.transform(lines)]
    taken = [Bbox([end, end]).padded(4) for end in one.transData.transform(list(ends.values()))]
    for name, end in sorted(ends.items(), key=lambda item: item[1][1]):
        best: tuple[float, Point, Any] | None = None
        for side, distance in itertools.product(SIDES, (*DISTANCES, *(-far for far in DISTANCES[1:]))):
            offset = offset_of(side, distance)
            text = write_name(one, name, end, side, offset)
            box = text.get_window_extent()
            text.remove()
            inside = one.bbox.x0 < box.x0 and box.x1 < one.figure.bbox.x1 and one.bbox.y0 < box.y0
            if not inside or any(box.overlaps(other) for other in taken):
                continue
            covered = sum(box.contains(*point) for point in points)
            cost = covered + abs(distance) / 2 + 3 * (side != SIDES[0])
            if best is None or cost < best[0]:
                best = (cost, offset, (side, box))
        if best:
            _, offset, (side, box) = best
            write_name(one, name, end, side, offset)
            taken.append(box)
        else:
            write_name(one, name, end, SIDES[0], (8, 0))


def offset_of(side: tuple[int, int], distance: int) -> Point:
    """Return the points by which a name is moved from the end of its line."""
    across, up = side
    if across:
        return 8 * across, distance
    return distance, 11 * up


def write_name(one: Axes, name: str, end: Point, side: tuple[int, int], offset: Point) -> Any:
    """Write a name beside the end of its line, and return the text."""
    align = "left" if side[0] else "center"
    ink = colour(name.removesuffix(AHEAD))
    return one.annotate(name, end, offset, textcoords="offset points", va="center", ha=align, color=ink)
