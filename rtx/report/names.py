"""What runs are called in charts and lists, and the order that they stand in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rtx.report.cells import Cell
from rtx.report.matching import differing_keys, kind_of, model_name
from rtx.report.paper import PaperRow, table_of
from rtx.report.scores import Row, has_effect
from rtx.wording import written

GROUPS = {"routed": "routing"}
"""What groups of heads are called where a report has another word for them."""


def in_order(cell: Cell) -> tuple[Any, ...]:
    """Return what runs are sorted by: as the paper's first table, then by seed and folder.

    Those without a configuration, which a sweep has not started yet, stay last and as they come.
    """
    kinds = ("full", "local", "random", "routing")
    kind = kind_of(cell.config) if cell.config else ""
    values = [cell.config.get(key) for key in ("routing.window", "routing.layers", "routing.heads", "seed")]
    numbers = [float(value) if isinstance(value, int | float) else 0.0 for value in values]
    return (kinds.index(kind) if kind in kinds else len(kinds), *numbers, str(cell.folder) if cell.config else "")


def label_of(config: Mapping[str, Any], variants: Sequence[str] = ()) -> str:
    """Return a short name of a configuration: its heads, and what else tells it apart."""
    name = model_name(config).removesuffix(" Transformer")
    if name in ("Routing", "Random"):
        routing = (config.get(f"routing.{key}") for key in ("heads", "layers", "window"))
        name += " {}x{} W={}".format(*routing)
    own = ("routing.heads", "routing.layers", "routing.window", "model.base")
    told = [key for key in variants if key not in own and has_effect(key, config)]
    if "routing.selection" in told:  # random members are told by the name
        told.remove("routing.selection")
        name += "" if name.startswith("Random") else f" {config.get('routing.selection')}"
    extra = [f"{key.rpartition('.')[2]}={written(config.get(key))}" for key in told]
    return " ".join([name, *extra]) if len(extra) <= 3 else name


def printed_label(printed: PaperRow) -> str:
    """Return a short name of a row of the paper."""
    name = printed.model.removesuffix(" Transformer")
    if printed.kind in ("routing", "random") and printed.window:
        name += f" {printed.routing_heads}x{printed.routing_layers} W={printed.window}"
    return name


def labels(cells: Sequence[Cell]) -> dict[Path, str]:
    """Return a name for each run; runs on the same data of the same name are told apart by seed, then by folder."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.config:
            groups.setdefault(str(cell.config.get("data.name")), []).append(cell)
    return {folder: name for group in groups.values() for folder, name in labels_on(group).items()}


def labels_on(cells: Sequence[Cell]) -> dict[Path, str]:
    """Return a name for each run on some data."""
    variants = differing_keys([Row([cell]) for cell in cells])
    selections = {cell.config.get("routing.selection") for cell in cells if kind_of(cell.config) == "routing"}
    if len(selections) < 2:  # random members are told by the name
        variants = [key for key in variants if key != "routing.selection"]
    table = all(table_of(cell.config) for cell in cells)
    names = {cell.folder: label_of(cell.config, () if table and len(variants) > 6 else variants) for cell in cells}
    for extra in (lambda c: f" seed {c.config.get('seed')}", lambda c: f" {c.folder.name}"):
        taken = list(names.values())
        for cell in cells:
            if taken.count(names[cell.folder]) > 1:
                names[cell.folder] += extra(cell)
    return names


def labels_of(rows: Sequence[Row]) -> list[str]:
    """Return a name for each row, by its first run."""
    names = labels([row.cells[0] for row in rows])
    return [names.get(row.cells[0].folder, row.cells[0].name) for row in rows]
