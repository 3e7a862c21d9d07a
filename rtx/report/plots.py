"""Plots by kind of heads, as SVG that follows the page's colours and as PNG."""

from __future__ import annotations

import html
import io
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rtx.report.certainty import TWO_DEVIATIONS, bits_said, numbers, standard_error
from rtx.report.divergences import BOUND, newest_divergence, paper_spreads, spreads
from rtx.report.paper import heads_label, kind_of
from rtx.report.ranking import half_interval, mean
from rtx.report.run_records import Cell
from rtx.report.score_rows import Row
from rtx.report.tables import Table
from rtx.runs.records import AnalysisRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
"""Okabe and Ito's palette and two more; the same kind has the same colour everywhere, other kinds grey."""

CELL = (0.75, 0.5)
"""Inches of a cell of a heat map, across and down, in which its value can be read."""
EQUAL_CONTRAST = math.sqrt(1.05 * 0.05)
"""Luminance (and 0.05) of a ground on which black and white are as readable."""
AHEAD = " (sees the future)"
GREY = "#767676"
STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are no formulas
    "svg.hashsalt": "rtx",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class Plot:
    name: str
    caption: str
    svg: str
    png: bytes


def colour(kind: str) -> str:
    return COLOURS.get(kind, COLOURS["routing"] if kind.startswith("routing") else GREY)


def axes(caption_x: str, caption_y: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        found = list(figure.subplots(1, panels, squeeze=False, sharey=True)[0])
    for one in found:
        one.set_xlabel(caption_x)
    found[0].set_ylabel(caption_y)
    return figure, found


def finished(name: str, caption: str, figure: Figure) -> Plot:
    """Return a figure as SVG whose ink is the page's and as PNG on white."""
    from matplotlib import rc_context

    drawing, picture = io.StringIO(), io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(
            drawing,
            format="svg",
            transparent=True,
            metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
        )
        figure.savefig(picture, format="png", dpi=150)
    text = drawing.getvalue()
    text = text[text.index("<svg") :].replace("#000000", "currentColor")
    for one in (*COLOURS.values(), GREY):
        text = text.replace(one, f"var(--c{one[1:]}, {one})")
    text = text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(caption)}" ', 1)
    return Plot(name, caption, text, picture.getvalue())


RIGHT, AROUND = ((1, 0),), ((1, 0), (-1, 0), (0, 1), (0, -1))


def direct_labels(
    one: Axes, places: Mapping[str, tuple[float, ...]], sides: Sequence[tuple[int, int]] = RIGHT
) -> None:
    """Write names beside their points, given with half their error bars: x, y, and where there are such bars dx, dy.

    A name takes the first place where it covers neither a bar nor another name: at one of the `sides` of its own bars,
    then ever farther up, or farther away.
    """
    from matplotlib.transforms import Bbox

    one.figure.canvas.draw()
    bars = {name: (*place, 0.0, 0.0)[:4] for name, place in places.items()}
    spans = [[(x - dx, y), (x + dx, y)] for x, y, dx, _ in bars.values()]
    spans += [[(x, y - dy), (x, y + dy)] for x, y, _, dy in bars.values()]
    taken = [Bbox(one.transData.transform(span)).padded(3) for span in spans]
    for name, (x, y, dx, dy) in sorted(bars.items(), key=lambda bar: bar[1][1]):
        for farther, (a, b) in itertools.product(range(0, 240, 3), sides):
            style: Any = {
                "va": "center",
                "ha": ("center", "left", "right")[a],
                "textcoords": "offset points",
            }
            style["color"] = colour(
                name.removesuffix(AHEAD)
            )  # where names are many they stand apart from their points
            offset = (8 * a, b * (9 + farther) if b else farther)
            text = one.annotate(name, (x + a * dx, y + b * dy), offset, **style)
            box = text.get_window_extent()
            inside = one.bbox.x0 < box.x0 and box.x1 < one.figure.bbox.x1 and box.y0 > one.bbox.y0
            if inside and not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        else:
            one.annotate(
                name, (x, y), (8, 0), textcoords="offset points", va="center", color=colour(name)
            )
        taken.append(box)


def scores_and_speed(table: Table, unit: str) -> Plot | None:
    """Draw the kinds of heads: bits against steps a second, with the intervals of both."""
    fair = [
        row for row in table.rows if not row.get("seeds_remark")
    ]  # not chosen by the very scores shown
    rows = [row for row in fair if row["ours"] is not None and row.get("steps_per_second")]
    if len(rows) < 2:
        return None
    figure, (one,) = axes("training steps per second (more is better)", f"{unit} (less is better)")
    ends, speeds = {}, [row["steps_per_second"] for row in rows]
    for row in rows:
        ink, ahead = colour(row["heads"]), row["sees_future"] == "yes"
        place = (row["steps_per_second"], row["ours"], row["half"], row["pace_half"])
        one.errorbar(
            *place, fmt="o", capsize=3, color=ink, markerfacecolor="none" if ahead else ink
        )
        name = row["heads"] + AHEAD * ahead
        ends[name] = (
            row["steps_per_second"],
            row["ours"],
            row["pace_half"] or 0.0,
            row["half"] or 0.0,
        )
    one.set_xlim(right=max(speeds) + 0.5 * (max(speeds) - min(speeds)))
    direct_labels(one, ends, AROUND)
    return finished("speed", "Scores beside speed, with 95% intervals", figure)


def curves(
    kinds: Mapping[str, Mapping[int, Sequence[float]]],
    name: str,
    caption: str,
    captions: tuple[str, str],
) -> Plot | None:
    """Draw the mean of each kind where all its runs have a value, with a band of their 95% intervals.

    `kinds` are values by kind of heads and place on the x axis. The first fifth of a curve may lie above the picture:
    losses fall far in the first steps.
    """
    if max(map(len, kinds.values()), default=0) < 2:
        return None
    figure, (one,) = axes(*captions)
    ends, tops = {}, []
    for kind, values in kinds.items():
        most = max(map(len, values.values()))
        places = sorted(place for place in values if len(values[place]) == most)
        middle = [mean(values[place]) for place in places]
        half = [half_interval(values[place]) or 0.0 for place in places]
        one.plot(places, middle, color=colour(kind))
        low, high = ([m + sign * h for m, h in zip(middle, half, strict=True)] for sign in (-1, 1))
        one.fill_between(places, low, high, color=colour(kind), alpha=0.15, linewidth=0)
        ends[kind] = (places[-1], middle[-1])
        tops += [middle[len(middle) // 5], *high[len(high) // 3 :]]
    lowest = min(y for _, y in ends.values())
    one.set_ylim(lowest - 0.08 * (max(tops) - lowest) - 1e-6, max(tops) + 1e-6)
    one.set_xlim(0, 1.3 * max(x for x, _ in ends.values()))
    direct_labels(one, ends)
    return finished(name, f"{caption}: means over seeds with 95% intervals", figure)


def curves_of(cells: Sequence[Cell], unit: str) -> list[Plot | None]:
    """Draw the validations of each kind over its runs, and the loss by position that `rtx analyze context` recorded."""
    steps: dict[str, dict[int, list[float]]] = {}
    positions: dict[str, dict[int, list[float]]] = {}
    for cell in cells:
        kind = heads_label(cell.config)
        for step, (bits, _) in cell.curve.items():
            steps.setdefault(kind, {}).setdefault(step, []).append(bits)
        for row in (row for record in cell.analyses for row in record.positions):
            middle = (row.first + row.last) // 2
            positions.setdefault(kind, {}).setdefault(middle, []).append(row.bits)
    return [
        curves(
            steps, "curves", "Learning curves", ("optimizer steps", f"{unit} (validation windows)")
        ),
        curves(positions, "positions", "Loss by position", ("position in the window", unit)),
    ]


def heat_map(rows: Sequence[Row], unit: str) -> Plot | None:
    """Draw Table 1: mean bits of routing rows by routing heads and routing layers, a panel for each window."""
    grids: dict[tuple[str, int], dict[tuple[int, int], float]] = {}
    drawn = [row for row in rows if kind_of(row.config) == "routing" and row.values()]
    for row in drawn:
        window, heads, layers = (
            row.config[f"routing.{key}"] for key in ("window", "heads", "layers")
        )
        grids.setdefault((heads_label(row.config), window), {})[heads, layers] = mean(
            row.values().values()
        )
    if max(map(len, grids.values()), default=0) < 4:
        return None
    across = sum(len({layers for _, layers in grid}) for grid in grids.values())
    down = max(len({heads for heads, _ in grid}) for grid in grids.values())
    figure, panels = axes("routing layers", "routing heads", len(grids))
    figure.set_size_inches(max(6.4, 1.8 + CELL[0] * across), max(3.4, 1.6 + CELL[1] * down))
    every = [value for grid in grids.values() for value in grid.values()]
    scale = {"cmap": "cividis_r", "vmin": min(every), "vmax": max(every)}
    for panel, ((kind, window), grid) in zip(panels, sorted(grids.items()), strict=True):
        image = draw_grid(panel, grid, scale)
        panel.set_title(f"{kind}\nwindow {window}", fontsize=10)
    bar = figure.colorbar(image, ax=panels, label=f"{unit} (lighter is better)")
    bar.ax.invert_yaxis()  # the best on top
    figure.supxlabel(textwrap.fill(under_heat_map(drawn, unit), 70), fontsize=9)
    return finished(
        "heads-by-layers", f"{unit} by routing heads and layers (lighter is better)", figure
    )


def draw_grid(panel: Axes, grid: Mapping[tuple[int, int], float], scale: Mapping[str, Any]) -> Any:
    """Draw values by heads and layers as colours, with the values on them; returns the image."""
    heads, layers = (sorted({key[at] for key in grid}) for at in (0, 1))
    values = [[grid.get((head, layer), float("nan")) for layer in layers] for head in heads]
    image: Any = panel.imshow(
        values, aspect="auto", **scale
    )  # the stubs know no colour of a single number
    panel.set_xticks(range(len(layers)), map(str, layers))
    panel.set_yticks(range(len(heads)), map(str, heads))
    for (head, layer), value in grid.items():
        ink = ink_on(image.to_rgba(value))
        panel.text(
            layers.index(layer),
            heads.index(head),
            f"{value:.3f}",
            ha="center",
            va="center",
            color=ink,
        )
    return image


def ink_on(ground: Sequence[float]) -> str:
    """Return the colour of text on a ground of red, green and blue from 0 to 1: of near black and near white the more
    readable one, by WCAG's contrast.
    """
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in ground[:3]
    ]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (
        "#010101" if light + 0.05 > EQUAL_CONTRAST else "#fefefe"
    )  # black itself follows the page


def under_heat_map(rows: Sequence[Row], unit: str) -> str:
    """Return how many seeds a cell has, and which differences are within the noise of a score."""
    seeds = [len(row.values()) for row in rows]
    said = f"{numbers(seeds)} {'seed' if max(seeds) == 1 else 'seeds'} a cell"
    error = standard_error(rows)
    if error is None:
        return said
    hidden = bits_said(TWO_DEVIATIONS * error)
    return f"{said}; differences below about {hidden} {unit} are within the noise of a score"


def divergence_by_layer(cell: Cell, record: AnalysisRecord) -> Plot:
    """Draw the divergence of heads of a run, the paper's as dashed lines."""
    figure, (one,) = axes("layer", "nats")
    ours, ends = spreads(record), {}
    inks = dict(
        zip(
            dict.fromkeys(kind for _, kind in ours), ("#0072b2", "#e69f00", "#d55e00"), strict=False
        )
    )
    for prefix, found, line in (("", ours, "-"), ("paper ", paper_spreads(), "--")):
        for kind in dict.fromkeys(kind for _, kind in ours):
            points = sorted(
                (int(n), *pair)
                for (n, other), pair in found.items()
                if other == kind and n != "mean"
            )
            if points:
                layers, middle, wide = zip(*points, strict=True)
                style: Any = {
                    "linestyle": line,
                    "color": inks.get(kind, GREY),
                    "alpha": 0.5 if prefix else 1,
                }
                one.errorbar(layers, middle, yerr=wide, capsize=2, **style)
                ends[prefix + kind] = (layers[-1], middle[-1])
    one.axhline(BOUND, color=GREY, linewidth=0.8, linestyle=":")
    one.set_xlim(right=1.45 * max(x for x, _ in ends.values()) + 0.5)
    direct_labels(one, ends)
    return finished(
        f"divergence-{cell.folder.name}", f"Divergence of heads by layer: {cell.name}", figure
    )


def plots_of(
    answer: Table | None, rows: Sequence[Row], cells: Sequence[Cell], unit: str
) -> list[Plot]:
    """Return all plots that the records allow, that of scores beside speed first; `rows` are of one protocol."""
    made = [scores_and_speed(answer, unit) if answer else None, heat_map(rows, unit)]
    made += curves_of([cell for row in rows for cell in row.cells if cell.config], unit)
    made += [
        divergence_by_layer(cell, record) for cell in cells if (record := newest_divergence(cell))
    ]
    return [plot for plot in made if plot]
