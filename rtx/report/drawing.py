"""What all plots share: colours of the kinds of heads, axes, names beside points, SVG and PNG."""

from __future__ import annotations

import html
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import BboxBase

COLOURS = {
    "full": "#000000",
    "local+full": "#000000",
    "local": "#0072b2",
    "random": "#e69f00",
    "routing (topk)": "#d55e00",
    "routing (causal)": "#009e73",
    "routing (nearest)": "#cc79a7",
    "routing (blocks)": "#7d4fa3",
    "routing (indexer)": "#8c6a1f",
    "routing": "#56b4e9",
}
"""The palette of Okabe and Ito, and two more colours. A kind has one colour in all plots."""
GREY = "#767676"
"""Of other kinds."""

SEES_FUTURE = " (sees the future)"
"""Behind the names of kinds that do."""

STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are no formulas
    "svg.hashsalt": "rtx",
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Side = tuple[int, int]
"""The direction of a name from its point: 1 is right or up, -1 left or down."""

RIGHT: Sequence[Side] = ((1, 0),)
AROUND: Sequence[Side] = ((1, 0), (-1, 0), (0, 1), (0, -1))
ALIGNMENTS = {1: "left", 0: "center", -1: "right"}
"""How a name is aligned, by its direction across."""

DISTANCES = range(0, 240, 3)
"""Points by which a name may be moved away from its mark."""
BESIDE = 8
"""Points between a mark and a name at its left or right."""
ABOVE = 9
"""Points between a mark and a name above or below it."""


@dataclass(frozen=True)
class Plot:
    """A plot; `name` is that of its file."""

    name: str
    caption: str
    svg: str
    png: bytes


@dataclass(frozen=True)
class Mark:
    """A point of a plot with half its error bars, across and up."""

    x: float
    y: float
    dx: float = 0.0
    dy: float = 0.0


def colour(kind: str) -> str:
    """Return the colour of a kind of heads."""
    if kind in COLOURS:
        return COLOURS[kind]
    return COLOURS["routing"] if kind.startswith("routing") else GREY


def axes(x_title: str, y_title: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels beside each other, which share their y axis."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        planes = list(figure.subplots(1, panels, squeeze=False, sharey=True)[0])
    for plane in planes:
        plane.set_xlabel(x_title)
    planes[0].set_ylabel(y_title)
    return figure, planes


def plot_of(name: str, caption: str, figure: Figure) -> Plot:
    """Return a figure as SVG in colours that the page sets, and as PNG on white.

    The figure keeps the layout of the SVG.
    """
    from matplotlib import rc_context

    svg = io.StringIO()
    png = io.BytesIO()
    # Without these, equal plots are equal files.
    unset = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context(STYLE):
        figure.savefig(svg, format="svg", transparent=True, metadata=unset)
        # Both formats have one layout: computing it again would give the same.
        figure.set_layout_engine("none")
        figure.savefig(png, format="png", dpi=150)
    return Plot(name, caption, with_page_colours(svg.getvalue(), caption), png.getvalue())


def with_page_colours(text: str, caption: str) -> str:
    """Return an SVG element with the page's ink for black, and variables for other colours."""
    element = text[text.index("<svg") :].replace("#000000", "currentColor")
    for ink in (*COLOURS.values(), GREY):
        element = element.replace(ink, f"var(--c{ink[1:]}, {ink})")
    label = f'role="img" aria-label="{html.escape(caption)}"'
    return element.replace("<svg ", f"<svg {label} ", 1)


def name_marks(plane: Axes, marks: Mapping[str, Mark], sides: Sequence[Side] = RIGHT) -> None:
    """Write names beside their marks, in their colours.

    A name is written at the first place where it covers neither an error bar nor another name: at
    one of the `sides` of its own bars, then ever farther up, or farther away.
    """
    plane.figure.canvas.draw()
    taken = boxes_of_bars(plane, marks)
    for name, mark in sorted(marks.items(), key=lambda item: item[1].y):
        text = write_where_free(plane, name, mark, sides, taken)
        if text is None:
            text = write_name(plane, name, (mark.x, mark.y), (1, 0), (BESIDE, 0))
        taken.append(text.get_window_extent())


def write_where_free(
    plane: Axes,
    name: str,
    mark: Mark,
    sides: Sequence[Side],
    taken: Sequence[BboxBase],
) -> Any:
    """Write a name where it covers none of the boxes that are `taken`, and return the text.

    None: there is no such place.
    """
    for distance, side in itertools.product(DISTANCES, sides):
        text = write_name(plane, name, end_of_bar(mark, side), side, offset_of(side, distance))
        box = text.get_window_extent()
        if is_inside(box, plane) and not any(box.overlaps(other) for other in taken):
            return text
        text.remove()
    return None


def boxes_of_bars(plane: Axes, marks: Mapping[str, Mark]) -> list[BboxBase]:
    """Return the boxes around the error bars of marks, in pixels."""
    from matplotlib.transforms import Bbox

    boxes: list[BboxBase] = []
    for mark in marks.values():
        across = [(mark.x - mark.dx, mark.y), (mark.x + mark.dx, mark.y)]
        up = [(mark.x, mark.y - mark.dy), (mark.x, mark.y + mark.dy)]
        for ends in (across, up):
            boxes.append(Bbox(plane.transData.transform(ends)).padded(3))
    return boxes


def end_of_bar(mark: Mark, side: Side) -> tuple[float, float]:
    """Return the end of a mark's error bar at a side."""
    across, up = side
    return mark.x + across * mark.dx, mark.y + up * mark.dy


def offset_of(side: Side, distance: int) -> tuple[int, int]:
    """Return the points from the end of an error bar to a name.

    `distance`: further points, away from a bar above or below, else up.
    """
    across, up = side
    if up:
        return BESIDE * across, up * (ABOVE + distance)
    return BESIDE * across, distance


def is_inside(box: BboxBase, plane: Axes) -> bool:
    """Tell whether a box is right of the left axis, above the lower one and in the figure."""
    in_width = plane.bbox.x0 < box.x0 and box.x1 < plane.figure.bbox.x1
    return in_width and plane.bbox.y0 < box.y0


def write_name(
    plane: Axes, name: str, point: tuple[float, float], side: Side, offset: tuple[float, float]
) -> Any:
    """Write a name at an offset from a point, and return the text."""
    return plane.annotate(
        name,
        point,
        offset,
        textcoords="offset points",
        va="center",
        ha=ALIGNMENTS[side[0]],
        color=colour(name.removesuffix(SEES_FUTURE)),
    )
