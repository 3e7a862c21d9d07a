"""Plots by kind of heads, as SVG that follows the page's colours and as PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rtx.report.divergences import BOUND, kinds_of, name_of, newest_divergence, paper_spreads, spreads
from rtx.report.paper import heads_label
from rtx.report.ranking import half_interval, mean
from rtx.report.run_records import Cell, real
from rtx.report.score_rows import Row
from rtx.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "full": "#000000",
    "local": "#0072b2",
    "random": "#e69f00",
    "routing (topk)": "#d55e00",
    "routing (causal)": "#009e73",
    "routing (nearest)": "#cc79a7",
    "routing": "#56b4e9",
}
"""Okabe and Ito's palette; the same kind has the same colour everywhere, other kinds grey."""

GREY = "#767676"

STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rtx",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "savefig.transparent": True,
}


@dataclass(frozen=True)
class Plot:
    """A plot as it is written: its file's name, what it shows, and its two forms."""

    name: str
    caption: str
    svg: str
    png: bytes


def colour(kind: str) -> str:
    """Return the colour of a kind of heads."""
    return COLOURS.get(kind, COLOURS["routing"] if kind.startswith("routing") else GREY)


def axes(caption_x: str, caption_y: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels side by side."""
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

    with rc_context(STYLE):
        drawing, picture = io.StringIO(), io.BytesIO()
        figure.savefig(drawing, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        figure.savefig(picture, format="png", dpi=150, facecolor="white", transparent=False)
    text = drawing.getvalue()
    text = text[text.index("<svg") :].replace("#000000", "currentColor")
    for one in (*COLOURS.values(), GREY):
        text = text.replace(one, f"var(--c{one[1:]}, {one})")
    return Plot(name, caption, text.replace("<svg ", f'<svg role="img" aria-label="{caption}" ', 1), picture.getvalue())


def direct_labels(one: Axes, places: Mapping[str, tuple[float, float]]) -> None:
    """Write names beside their points, moved up where they would cover another."""
    one.figure.canvas.draw()
    taken: list[tuple[float, float]] = []
    pixels = one.figure.dpi / 72
    for name, (x, y) in sorted(places.items(), key=lambda place: place[1][1]):
        left, at = one.transData.transform((x, y))
        near = [other for side, other in taken if abs(side - left) < 90 * pixels]
        place = max([at, *(other + 12 * pixels for other in near)])
        taken.append((left, place))
        one.annotate(name, (x, y), (8, (place - at) / pixels + 1), textcoords="offset points", va="center")


def scores_and_speed(table: Table, unit: str) -> Plot | None:
    """Draw the kinds of heads: bits against steps a second, with the intervals of both."""
    rows = [row for row in table.rows if row.get("ours") is not None and row.get("steps_per_second")]
    if len(rows) < 2:
        return None
    figure, (one,) = axes("training steps per second (more is better)", f"{unit} (less is better)")
    for row in rows:
        face = "none" if row["sees_future"] == "yes" else colour(row["heads"])
        place = (row["steps_per_second"], row["ours"], row.get("half"), row.get("pace_half"))
        one.errorbar(*place, fmt="o", capsize=3, color=colour(row["heads"]), markerfacecolor=face)
    marks = {"yes": " (sees the future)", "no": ""}
    speeds = [row["steps_per_second"] for row in rows]
    one.set_xlim(right=max(speeds) + 0.5 * (max(speeds) - min(speeds)))
    ends = {row["heads"]: row["steps_per_second"] + (row.get("pace_half") or 0.0) for row in rows}
    direct_labels(one, {row["heads"] + marks[row["sees_future"]]: (ends[row["heads"]], row["ours"]) for row in rows})
    return finished("speed", "Scores beside speed, with 95% intervals", figure)


def learning_curves(rows: Sequence[Row], unit: str) -> Plot | None:
    """Draw the validations of each kind over its runs: the mean, and a band of its 95% interval."""
    kinds: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        for cell in row.cells if row.config else ():
            for entry in (entry for entry in cell.metrics if entry.get("kind") == "valid"):
                if (bits := real(entry.get("val_bits"))) is not None:
                    kinds.setdefault(heads_label(row.config), {}).setdefault(entry["step"], []).append(bits)
    if not kinds:
        return None
    figure, (one,) = axes("optimizer steps", f"{unit} (validation windows)")
    ends, tops = {}, []
    for kind, by_step in kinds.items():
        most = max(map(len, by_step.values()))
        steps = sorted(step for step, values in by_step.items() if len(values) == most)
        middle = [mean(by_step[step]) for step in steps]
        half = [half_interval(by_step[step]) or 0.0 for step in steps]
        one.plot(steps, middle, color=colour(kind), label=kind)
        low, high = ([m + sign * h for m, h in zip(middle, half, strict=True)] for sign in (-1, 1))
        one.fill_between(steps, low, high, color=colour(kind), alpha=0.15, linewidth=0)
        ends[kind], tops = (steps[-1], middle[-1]), [*tops, middle[len(middle) // 5], *high[len(high) // 3 :]]
    lowest = min(y for _, y in ends.values())
    one.set_ylim(lowest - 0.08 * (max(tops) - lowest) - 1e-6, max(tops) + 1e-6)
    one.set_xlim(0, 1.3 * max(x for x, _ in ends.values()))
    direct_labels(one, ends)
    return finished("curves", "Learning curves: means over seeds with 95% intervals", figure)


def heat_map(grids: Mapping[int, Mapping[tuple[int, int], float]], unit: str) -> Plot | None:
    """Draw Table 1: bits by routing heads and routing layers, a panel for each window."""
    if not grids:
        return None
    figure, panels = axes("routing layers", "routing heads", len(grids))
    every = sorted(value for grid in grids.values() for value in grid.values())
    low, high = every[0], every[int(0.8 * (len(every) - 1))]
    for panel, (window, grid) in zip(panels, grids.items(), strict=True):
        heads, layers = (sorted({key[at] for key in grid}) for at in (0, 1))
        values = [[grid.get((head, layer), float("nan")) for layer in layers] for head in heads]
        panel.imshow(values, cmap="cividis_r", vmin=low, vmax=high, aspect="auto")
        panel.set_title(f"window {window}", fontsize=10)
        panel.set_xticks(range(len(layers)), map(str, layers))
        panel.set_yticks(range(len(heads)), map(str, heads))
        for (head, layer), value in grid.items():
            ink = "white" if value > low + 0.55 * (high - low) else "black"
            place = layers.index(layer), heads.index(head)
            panel.text(
                *place, f"{value:.3f}", ha="center", va="center", color="#fefefe" if ink == "white" else "#010101"
            )
    return finished("heads-by-layers", f"{unit} by routing heads and layers (lighter is better)", figure)


def loss_by_position(cells: Sequence[Cell]) -> Plot | None:
    """Draw what `rtx analyze context` recorded: bits by position in the window, the mean of each kind's runs."""
    kinds: dict[str, dict[int, list[float]]] = {}
    units = set()
    for cell in cells:
        for record in (record for record in cell.analyses if record.get("what") == "context"):
            for row in record.get("positions") or ():
                middle = (row["first"] + row["last"]) // 2
                kinds.setdefault(heads_label(cell.config), {}).setdefault(middle, []).append(row["bits"])
                units.add(record.get("unit"))
    if not kinds:
        return None
    figure, (one,) = axes("position in the window", f"bits/{', '.join(map(str, units))}")
    ends = {}
    for kind, by_place in kinds.items():
        places = sorted(by_place)
        one.plot(places, [mean(by_place[at]) for at in places], color=colour(kind), marker=".")
        ends[kind] = (places[-1], mean(by_place[places[-1]]))
    one.margins(x=0.15)
    direct_labels(one, ends)
    return finished("positions", "Loss by position in the window", figure)


def divergence_by_layer(cells: Sequence[Cell]) -> list[Plot]:
    """Draw the divergence of heads of each run that has a record, the paper's as dashed lines."""
    plots = []
    for cell in cells:
        record = newest_divergence(cell)
        found = spreads(record) if record else {}
        if not found:
            continue
        figure, (one,) = axes("layer", "nats")
        ends, inks = {}, ("#0072b2", "#e69f00", "#d55e00", *[GREY] * 9)
        for prefix, spread, line in (("", found, "-"), ("paper ", paper_spreads(), "--")):
            for kind, ink in zip(kinds_of(found), inks, strict=False):
                points = [(n, *values) for (n, other), values in sorted(spread.items()) if other == kind]
                if points:
                    layers, means, wide = zip(*points, strict=True)
                    one.errorbar(
                        layers, means, yerr=wide, linestyle=line, color=ink, capsize=2, alpha=0.5 if prefix else 1
                    )
                    ends[prefix + name_of(kind)] = (layers[-1], means[-1])
        one.axhline(BOUND, color=GREY, linewidth=0.8, linestyle=":")
        one.set_xlim(right=1.45 * max(x for x, _ in ends.values()) + 0.5)
        direct_labels(one, ends)
        plots.append(finished(f"divergence-{len(plots)}", f"Divergence of heads by layer: {cell.name}", figure))
    return plots


def plots_of(answer: Table | None, rows: Sequence[Row], cells: Sequence[Cell], grids: Any, unit: str) -> list[Plot]:
    """Return all plots that the records allow, that of scores beside speed first."""
    made = [scores_and_speed(answer, unit) if answer else None, heat_map(grids, unit), learning_curves(rows, unit)]
    return [plot for plot in (*made, loss_by_position(cells), *divergence_by_layer(cells)) if plot]
