"""What the charts of a report show: learning curves, and bits against speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rtx.report.cells import Cell
from rtx.report.matching import kind_of, paper_row
from rtx.report.names import labels, labels_of, printed_label
from rtx.report.paper import paper_tables, table_of
from rtx.report.plots import Point, Series
from rtx.report.scores import Row
from rtx.report.values import real, whole

KINDS = ("full", "local", "random", "routing")
"""Each has a colour of its own in a chart of bits against speed, and routing one for each window."""


@dataclass(frozen=True)
class Curves:
    """The learning curves of runs whose bits are of the same units."""

    caption: str
    unit: str
    series: list[Series]


def learning_curves(cells: Sequence[Cell]) -> list[Curves]:
    """Return the curves of all runs, a chart for each data set: bits of others are not to be compared."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        data = str(cell.data.get("name") or cell.config.get("data.name") or "unknown data")
        groups.setdefault((data, str(cell.data.get("unit", "unit"))), []).append(cell)
    charts = []
    for (data, unit), group in groups.items():
        series, kind = curves_of(group)
        what = "validation" if kind == "valid" else "training"
        on = f" on {data}" if len(groups) > 1 else ""
        charts += [Curves(f"Learning curves, {what}{on}", unit, series)] if series else []
    return charts


def curves_of(cells: Sequence[Cell]) -> tuple[list[Series], str]:
    """Return a curve for each run, of validations where they have several, else of training rows; and which."""
    names = labels(cells)
    for kind, key in (("valid", "val_bits"), ("train", "bits")):
        series = []
        for cell in cells:
            rows = [row for row in cell.metrics if row.get("kind") == kind]
            points = [(float(r["step"]), bits) for r in rows if (bits := real(r.get(key))) is not None]
            if points:
                series.append(Series(names.get(cell.folder, cell.name), points))
        if any(len(one.points) > 1 for one in series):
            return series, kind
    return [], "valid"


@dataclass(frozen=True)
class TradeOff:
    """Bits against steps per second of our rows, and of the paper's where they are rows of Table 1."""

    ours: list[Point] = field(default_factory=list)
    paper: list[Point] = field(default_factory=list)


def trade_off(rows: Sequence[Row]) -> TradeOff:
    """Return a point for each row that has a score and a pace."""
    names = labels_of(rows)
    windows = sorted({whole(row.config.get("routing.window")) for row in rows if kind_of(row.config) == "routing"})
    ours = []
    for row, name in zip(rows, names, strict=True):
        speed, bits = row.speed, row.mean()
        if speed is not None and bits is not None:
            window = whole(row.config.get("routing.window"))
            style = style_of(kind_of(row.config), windows.index(window) if window in windows else 0)
            ours.append(Point(name, speed, bits, style))
    theirs = []
    table = paper_tables()[0]
    if any(row.config and table_of(row.config) is table and paper_row(row.config, table) for row in rows):
        for printed in table.rows:
            if printed.steps_per_second and printed.value:
                style = style_of(printed.kind, int(printed.window == 1024))
                theirs.append(Point(printed_label(printed), printed.steps_per_second, printed.value, style))
    return TradeOff(ours, theirs)


def style_of(kind: str, window: int) -> int:
    """Return the colour of a kind of heads; `window` counts the windows of routing heads."""
    return KINDS.index(kind) + (window if kind == "routing" else 0) if kind in KINDS else len(KINDS) + 2
