"""Plots of what selections cost pretrained models: loss, and weight kept by layer and head."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rtx.report.drawing import GREY, Plot, axes, plot_of
from rtx.report.pretrained_comparisons import ChoiceCost, Comparison
from rtx.report.ranking import mean
from rtx.runs.pretrained_record import Grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "exact": "#000000",
    "probed": "#d55e00",
    "blocks": "#7d4fa3",
    "next": "#0072b2",
    "causal": "#009e73",
    "lsh": "#e69f00",
    "random": "#cc79a7",
}
"""The colours of selections; the lines of all others are grey."""
PANEL_WIDTH = 1.15
"""Inches of the heat map of a selection."""
LAYER_HEIGHT = 0.11
"""Inches of a layer in a heat map."""
TITLE_WIDTH = 15
"""Characters of a line of the title of a heat map."""


@dataclass
class Line:
    """The points of one selection in the plot of losses, one for each number of further keys.

    Args:
        halves: half the intervals of `above`; None: a single window.
    """

    label: str
    selection: str
    keys: list[float] = field(default_factory=list)
    pairs: list[float] = field(default_factory=list)
    above: list[float] = field(default_factory=list)
    halves: list[float | None] = field(default_factory=list)

    @property
    def is_variant(self) -> bool:
        """Whether it is a variant of a selection, such as "exact, before rotary"."""
        return self.label != self.selection and self.selection not in ("none", "next")


@dataclass(frozen=True)
class HeadGrid:
    """A share for each layer and head; None: there is none."""

    title: str
    values: Grid


def lines_of(comparison: Comparison) -> list[Line]:
    """Return the choices as the lines of a plot: those with one label, from few keys to many."""
    lines: dict[str, Line] = {}
    by_k = sorted(comparison.costs.items(), key=lambda item: item[0].k)
    for name, cost in by_k:
        line = lines.setdefault(name.label, Line(name.label, cost.row.choice.selection))
        line.keys.append(cost.keys)
        line.pairs.append(cost.pairs)
        line.above.append(cost.mean)
        line.halves.append(cost.half)
    return list(lines.values())


def plots_of(comparison: Comparison) -> list[Plot]:
    """Return the plot of losses, and for each number of keys one of coverage by layer and head."""
    caption = f"{comparison.title}: loss beside keys read and beside pairs scored, 95% intervals"
    plots = [loss_plot(comparison.file_name, caption, lines_of(comparison))]
    for k, names in comparison.by_keys().items():
        grids = [HeadGrid("far weight", far_weight(comparison))]
        for name in names:
            grid = kept_of_heads(comparison.costs[name])
            if grid is not None:
                grids.append(HeadGrid(name.label, grid))
        if len(grids) > 1:
            coverage = (
                f"the far weight of each head, and the share of it kept with {k} further keys"
            )
            file_name = f"{comparison.file_name}-coverage-k{k}"
            plots.append(coverage_plot(file_name, f"{comparison.title}: {coverage}", grids))
    return plots


def far_weight(comparison: Comparison) -> Grid:
    """Return the dense model's weight on far keys of each layer and head, the mean over texts."""
    return mean_grid([record.weight.far_of_heads for record in comparison.texts.values()])


def kept_of_heads(cost: ChoiceCost) -> Grid | None:
    """Return the share of the far weight that a choice keeps in each layer and head.

    It is the mean over texts. None: it was not measured.
    """
    grids = [row.kept_of_heads for row in cost.rows.values() if row.kept_of_heads is not None]
    return mean_grid(grids) if grids else None


def mean_grid(grids: Sequence[Grid]) -> Grid:
    """Return the means of grids of one shape; None where any of them has no value."""
    means: Grid = []
    for layers in zip(*grids, strict=True):
        means.append([mean_or_none(values) for values in zip(*layers, strict=True)])
    return means


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Return the mean of values; None if any of them is missing."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return None
    return mean(numbers)


def loss_plot(name: str, caption: str, lines: Sequence[Line]) -> Plot:
    """Return a plot of bits above dense over the keys read, and over the pairs scored."""
    figure, panels = axes("keys that a query reads", "bits/token above dense", 2)
    panels[1].set_xlabel("pairs scored for a query")
    for line in lines:
        draw_line(panels[0], line, line.keys)
        draw_line(panels[1], line, line.pairs)
    for panel in panels:
        panel.axhline(0, color=GREY, linewidth=0.8)
        # Ticks are at powers of 2 and of 10, with labels such as 64 and 0.01.
        panel.set_xscale("log", base=2)
        panel.set_yscale("symlog", linthresh=0.01)
        panel.set_ylim(bottom=lowest_end(lines))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
    handles, labels = panels[0].get_legend_handles_labels()
    # Any, because matplotlib's type stubs lack the locations outside of panels.
    location: Any = "outside right"
    figure.legend(handles, labels, loc=location, fontsize="small")
    return plot_of(name, caption, figure)


def lowest_end(lines: Sequence[Line]) -> float:
    """Return the lowest end of all error bars, at most 0, where the dense model is."""
    ends = [0.0]
    for line in lines:
        for above, half in zip(line.above, line.halves, strict=True):
            ends.append(above - (half or 0.0))
    return min(ends)


def draw_line(panel: Axes, line: Line, places: Sequence[float]) -> None:
    """Draw the bits above dense of a selection; the line of a variant is dashed."""
    # NaN draws no bar.
    halves = [math.nan if half is None else half for half in line.halves]
    style: dict[str, Any] = {"color": COLOURS.get(line.selection, GREY), "marker": "."}
    if line.is_variant:
        style["linestyle"] = "--"
    panel.errorbar(places, line.above, halves, label=line.label, **style)


def coverage_plot(name: str, caption: str, grids: Sequence[HeadGrid]) -> Plot:
    """Return heat maps beside each other, of layers (down) and heads (across), from 0 to 1."""
    figure, panels = axes("head", "layer", len(grids))
    layers = len(grids[0].values)
    width = max(6.4, 1.5 + PANEL_WIDTH * len(grids))
    figure.set_size_inches(width, 1.2 + max(1.6, LAYER_HEIGHT * layers))
    image = None
    for panel, grid in zip(panels, grids, strict=True):
        values = [[math.nan if share is None else share for share in row] for row in grid.values]
        image = panel.imshow(values, aspect="auto", cmap="cividis", vmin=0, vmax=1)
        panel.set_title(textwrap.fill(grid.title, TITLE_WIDTH), fontsize=8)
        panel.locator_params(integer=True)
    assert image is not None
    figure.colorbar(image, ax=panels)
    return plot_of(name, caption, figure)
