"""Plots of scores, curves and divergences by kind of heads."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rtx.report.certainty import below_noise, span, standard_error
from rtx.report.divergences import (
    BOUND,
    MEAN,
    Spreads,
    kinds_in,
    newest_divergence,
    paper_spreads,
    spreads,
)
from rtx.report.drawing import (
    AROUND,
    GREY,
    SEES_FUTURE,
    Mark,
    Plot,
    axes,
    colour,
    name_marks,
    plot_of,
)
from rtx.report.paper import heads_label, kind_of
from rtx.report.ranking import half_interval, mean
from rtx.report.run_records import Cell
from rtx.report.score_rows import Row
from rtx.runs.records import AnalysisRecord
from rtx.tables import Entry, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

CELL_WIDTH = 0.75
"""Inches of a cell of a heat map in which its value can be read."""
CELL_HEIGHT = 0.5
LEAST_CELLS = 4
"""Of a grid that is drawn as a heat map."""
EQUAL_CONTRAST = math.sqrt(1.05 * 0.05)
"""The luminance, plus 0.05, of a ground on which black and white are equally readable."""
NEAR_BLACK = "#010101"
"""Black itself follows the colours of the page."""
NEAR_WHITE = "#fefefe"
DIVERGENCE_INKS = ("#0072b2", "#e69f00", "#d55e00")
"""Of the kinds of pairs of heads."""

PlacedValues = Mapping[int, Sequence[float]]
"""The values of runs by their place on the x axis."""


@dataclass(frozen=True)
class CurvePlot:
    """The name and the texts of a plot of curves."""

    name: str
    caption: str
    x_title: str
    y_title: str


@dataclass(frozen=True)
class MeanCurve:
    """The means of runs, and half their 95% intervals, by place on the x axis."""

    places: Sequence[int]
    means: Sequence[float]
    halves: Sequence[float]

    @property
    def low(self) -> list[float]:
        return [middle - half for middle, half in zip(self.means, self.halves, strict=True)]

    @property
    def high(self) -> list[float]:
        return [middle + half for middle, half in zip(self.means, self.halves, strict=True)]


@dataclass(frozen=True)
class GridName:
    """The kind of heads and the window of a panel of a heat map."""

    kind: str
    window: int


Grid = dict[tuple[int, int], float]
"""Mean bits by the numbers of routing heads and routing layers."""


def plots_of(
    answer: Table | None, rows: Sequence[Row], cells: Sequence[Cell], unit: str
) -> list[Plot]:
    """Return all plots that the records allow, that of scores beside speed first.

    `answer`: the ranking of the kinds of heads; `rows`: those of one protocol, in `unit`.
    """
    plots = []
    if answer:
        plots.append(scores_and_speed(answer, unit))
    plots.append(heat_map(rows, unit))
    with_config: list[Cell] = []
    for row in rows:
        with_config += [cell for cell in row.cells if cell.config]
    plots.append(learning_curves(with_config, unit))
    plots.append(loss_by_position(with_config, unit))
    for cell in cells:
        divergence = newest_divergence(cell)
        if divergence:
            plots.append(divergence_by_layer(cell, divergence))
    return [plot for plot in plots if plot]


def scores_and_speed(ranking: Table, unit: str) -> Plot | None:
    """Draw the kinds of heads: bits against steps a second, with the intervals of both.

    None for fewer than two kinds.
    """
    entries = [entry for entry in ranking.rows if has_point(entry)]
    if len(entries) < 2:
        return None
    x_title = "training steps per second (more is better)"
    figure, (plane,) = axes(x_title, f"{unit} (less is better)")
    marks = {}
    for entry in entries:
        mark = draw_kind(plane, entry)
        name = entry["heads"]
        if entry["sees_future"] == "yes":
            name += SEES_FUTURE
        marks[name] = mark
    speeds = [mark.x for mark in marks.values()]
    plane.set_xlim(right=max(speeds) + 0.5 * (max(speeds) - min(speeds)))
    name_marks(plane, marks, AROUND)
    return plot_of("speed", "Scores beside speed, with 95% intervals", figure)


def has_point(entry: Entry) -> bool:
    """Tell whether a kind has a score and a speed; a score by seeds that chose the row is none."""
    is_chosen_by_score = bool(entry.get("seeds_remark"))
    has_score = entry["ours"] is not None
    return has_score and bool(entry.get("steps_per_second")) and not is_chosen_by_score


def draw_kind(plane: Axes, entry: Entry) -> Mark:
    """Draw the score and the speed of a kind; a kind that sees the future has an empty mark."""
    ink = colour(entry["heads"])
    plane.errorbar(
        entry["steps_per_second"],
        entry["ours"],
        entry["half"],
        entry["pace_half"],
        fmt="o",
        capsize=3,
        color=ink,
        markerfacecolor="none" if entry["sees_future"] == "yes" else ink,
    )
    return Mark(
        entry["steps_per_second"],
        entry["ours"],
        entry["pace_half"] or 0.0,
        entry["half"] or 0.0,
    )


def learning_curves(cells: Sequence[Cell], unit: str) -> Plot | None:
    """Draw the validations of each kind of heads over its runs."""
    kinds: dict[str, dict[int, list[float]]] = {}
    for cell in cells:
        values = kinds.setdefault(heads_label(cell.config), {})
        for step, bits in cell.curve.items():
            values.setdefault(step, []).append(bits)
    y_title = f"{unit} (validation windows)"
    texts = CurvePlot("curves", "Learning curves", "optimizer steps", y_title)
    return curves(kinds, texts)


def loss_by_position(cells: Sequence[Cell], unit: str) -> Plot | None:
    """Draw the loss by position that `rtx analyze context` recorded, by kind of heads."""
    kinds: dict[str, dict[int, list[float]]] = {}
    for cell in cells:
        values = kinds.setdefault(heads_label(cell.config), {})
        for record in cell.analyses:
            for row in record.positions:
                middle = (row.first + row.last) // 2
                values.setdefault(middle, []).append(row.bits)
    return curves(kinds, CurvePlot("positions", "Loss by position", "position in the window", unit))


def curves(kinds: Mapping[str, PlacedValues], texts: CurvePlot) -> Plot | None:
    """Draw the mean of each kind, with a band of 95% intervals; None without a curve.

    The first fifth of a curve may be above the picture: losses fall far in the first steps.
    """
    drawn = {kind: mean_curve(values) for kind, values in kinds.items() if values}
    if max((len(values) for values in kinds.values()), default=0) < 2:
        return None
    figure, (plane,) = axes(texts.x_title, texts.y_title)
    marks = {}
    tops: list[float] = []
    for kind, curve in drawn.items():
        plane.plot(curve.places, curve.means, color=colour(kind))
        plane.fill_between(
            curve.places, curve.low, curve.high, color=colour(kind), alpha=0.15, linewidth=0
        )
        marks[kind] = Mark(curve.places[-1], curve.means[-1])
        fifth = len(curve.means) // 5
        third = len(curve.means) // 3
        tops += [curve.means[fifth], *curve.high[third:]]
    lowest = min(mark.y for mark in marks.values())
    margin = 0.08 * (max(tops) - lowest)
    plane.set_ylim(lowest - margin - 1e-6, max(tops) + 1e-6)
    plane.set_xlim(0, 1.3 * max(mark.x for mark in marks.values()))
    name_marks(plane, marks)
    caption = f"{texts.caption}: means over seeds with 95% intervals"
    return plot_of(texts.name, caption, figure)


def mean_curve(values: PlacedValues) -> MeanCurve:
    """Return means and intervals at the places where all runs have a value."""
    most = max(len(numbers) for numbers in values.values())
    places = sorted(place for place in values if len(values[place]) == most)
    means = [mean(values[place]) for place in places]
    halves = [half_interval(values[place]) or 0.0 for place in places]
    return MeanCurve(places, means, halves)


def heat_map(rows: Sequence[Row], unit: str) -> Plot | None:
    """Draw mean bits by routing heads and routing layers, as of the paper's Table 1.

    Each kind of heads and window has a panel. None without a grid of at least four cells.
    """
    routing_rows = [row for row in rows if kind_of(row.config) == "routing" and row.values()]
    grids = grids_of(routing_rows)
    if max(map(len, grids.values()), default=0) < LEAST_CELLS:
        return None
    figure, panels = axes("routing layers", "routing heads", len(grids))
    set_size(figure, list(grids.values()))
    values: list[float] = []
    for grid in grids.values():
        values += grid.values()
    scale = {"cmap": "cividis_r", "vmin": min(values), "vmax": max(values)}
    images = []
    names = sorted(grids, key=lambda name: (name.kind, name.window))
    for panel, name in zip(panels, names, strict=True):
        images.append(draw_grid(panel, grids[name], scale))
        panel.set_title(f"{name.kind}\nwindow {name.window}", fontsize=10)
    bar = figure.colorbar(images[-1], ax=panels, label=f"{unit} (lighter is better)")
    bar.ax.invert_yaxis()  # the best on top
    figure.supxlabel(textwrap.fill(heat_map_note(routing_rows, unit), 70), fontsize=9)
    caption = f"{unit} by routing heads and layers (lighter is better)"
    return plot_of("heads-by-layers", caption, figure)


def grids_of(rows: Sequence[Row]) -> dict[GridName, Grid]:
    """Return the mean bits of rows by kind and window, then by routing heads and layers."""
    grids: dict[GridName, Grid] = {}
    for row in rows:
        name = GridName(heads_label(row.config), row.config["routing.window"])
        place = (row.config["routing.heads"], row.config["routing.layers"])
        grids.setdefault(name, {})[place] = mean(row.values().values())
    return grids


def set_size(figure: Figure, grids: Sequence[Grid]) -> None:
    """Make a figure large enough for the values of all cells of grids beside each other."""
    columns = sum(len({layers for _, layers in grid}) for grid in grids)
    rows = max(len({heads for heads, _ in grid}) for grid in grids)
    width = max(6.4, 1.8 + CELL_WIDTH * columns)
    height = max(3.4, 1.6 + CELL_HEIGHT * rows)
    figure.set_size_inches(width, height)


def draw_grid(panel: Axes, grid: Grid, scale: Mapping[str, Any]) -> AxesImage:
    """Draw values by heads and layers as colours, with the numbers on them; return the image."""
    heads = sorted({heads for heads, _ in grid})
    layers = sorted({layers for _, layers in grid})
    values = [[grid.get((head, layer), math.nan) for layer in layers] for head in heads]
    image = panel.imshow(values, aspect="auto", **scale)
    panel.set_xticks(range(len(layers)), map(str, layers))
    panel.set_yticks(range(len(heads)), map(str, heads))
    to_rgba: Any = image.to_rgba  # its stub has no single number
    for (head, layer), value in grid.items():
        ink = ink_on(to_rgba(value))
        place = (layers.index(layer), heads.index(head))
        panel.text(*place, f"{value:.3f}", ha="center", va="center", color=ink)
    return image


def ink_on(ground: Sequence[float]) -> str:
    """Return black or white, which has more contrast on a ground by WCAG 2.

    `ground`: red, green and blue from 0 to 1.
    """
    red, green, blue = [linear(part) for part in ground[:3]]
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return NEAR_BLACK if luminance + 0.05 > EQUAL_CONTRAST else NEAR_WHITE


def linear(part: float) -> float:
    """Return the linear value of a part of an sRGB colour."""
    if part <= 0.04045:
        return part / 12.92
    return ((part + 0.055) / 1.055) ** 2.4


def heat_map_note(rows: Sequence[Row], unit: str) -> str:
    """Return how many seeds a cell has, and which differences are within the noise of a score."""
    seeds = [len(row.values()) for row in rows]
    noun = "seed" if max(seeds) == 1 else "seeds"
    note = f"{span(seeds)} {noun} a cell"
    error = standard_error(rows)
    if error is None:
        return note
    return f"{note}; differences {below_noise(error, unit)}"


def divergence_by_layer(cell: Cell, record: AnalysisRecord) -> Plot:
    """Draw the divergence of the heads of a run by layer; the paper's lines are dashed."""
    figure, (plane,) = axes("layer", "nats")
    ours = spreads(record)
    theirs = paper_spreads()
    inks = dict(zip(kinds_in(ours), DIVERGENCE_INKS, strict=False))
    marks: dict[str, Mark] = {}
    for kind in kinds_in(ours):
        style = {"linestyle": "-", "color": inks.get(kind, GREY), "alpha": 1}
        marks |= draw_spreads(plane, kind, ours, kind, style)
    for kind in kinds_in(ours):
        style = {"linestyle": "--", "color": inks.get(kind, GREY), "alpha": 0.5}
        marks |= draw_spreads(plane, f"paper {kind}", theirs, kind, style)
    plane.axhline(BOUND, color=GREY, linewidth=0.8, linestyle=":")
    plane.set_xlim(right=1.45 * max(mark.x for mark in marks.values()) + 0.5)
    name_marks(plane, marks)
    caption = f"Divergence of heads by layer: {cell.name}"
    return plot_of(f"divergence-{cell.folder.name}", caption, figure)


def draw_spreads(
    plane: Axes, name: str, by_pairs: Spreads, kind: str, style: Mapping[str, Any]
) -> dict[str, Mark]:
    """Draw the spreads of a kind of pairs by layer; return the end of the line by `name`.

    Nothing is drawn or returned where no layer has the kind.
    """
    by_layer = {}
    for pairs, spread in by_pairs.items():
        if pairs.kind == kind and pairs.layer != MEAN:
            by_layer[int(pairs.layer)] = spread
    if not by_layer:
        return {}
    layers = sorted(by_layer)
    means = [by_layer[layer].mean for layer in layers]
    deviations = [by_layer[layer].deviation for layer in layers]
    plane.errorbar(layers, means, yerr=deviations, capsize=2, **style)
    return {name: Mark(layers[-1], means[-1])}
