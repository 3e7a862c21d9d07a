"""The divergence of heads' attention, the paper's Table 6 beside ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rtx.report.paper import numbered
from rtx.report.ranking import mean
from rtx.report.run_records import Cell, part, whole
from rtx.report.tables import Column, Table

Kind = tuple[str, str]
"""What a pair's heads are: names of the groups of a layer, `routed` last."""

Found = Mapping[tuple[int, Kind], tuple[float, float]]
"""Mean and deviation over the drawn pairs, in nats, by layer and kind of pair."""

PAPER_KINDS: tuple[Kind, ...] = (("local", "local"), ("local", "routed"), ("routed", "routed"))
"""In the order of the paper's columns."""

BOUND = math.log(2)


def spreads(record: Mapping[str, Any]) -> Found:
    """Return what a record of `rtx analyze divergence` holds; empty where it is damaged."""
    try:
        rows = [
            (int(row["layer"]), row["kind"], float(row["mean"]), float(row["deviation"])) for row in record["layers"]
        ]
        found = {(layer, (str(first), str(second))): (mid, wide) for layer, (first, second), mid, wide in rows}
    except (KeyError, TypeError, ValueError):
        return {}
    return {key: values for key, values in found.items() if all(map(math.isfinite, values))}


def paper_spreads() -> Found:
    """Return the paper's Table 6."""
    layers = enumerate(numbered(6).divergences)
    return {(n, kind): values for n, row in layers for kind, values in zip(PAPER_KINDS, row, strict=True)}


def kinds_of(found: Found) -> list[Kind]:
    """Return the kinds of pairs: the paper's in its order, then others."""
    kinds = dict.fromkeys(kind for _, kind in found)
    return [kind for kind in PAPER_KINDS if kind in kinds] + [kind for kind in kinds if kind not in PAPER_KINDS]


def name_of(kind: Kind) -> str:
    """Return a kind of pairs in words."""
    return " ".join(kind).replace("routed", "routing")


def entries_of(found: Found) -> list[tuple[str, dict[Kind, tuple[float, float]]]]:
    """Return a row for each layer, and the means over layers, as the paper's earlier versions print them."""
    layers = sorted({layer for layer, _ in found})
    rows = [(str(n), {kind: found[n, kind] for kind in kinds_of(found) if (n, kind) in found}) for n in layers]
    averages = {}
    for kind in kinds_of(found):
        mine = [values for (_, other), values in found.items() if other == kind]
        averages[kind] = (mean(value for value, _ in mine), mean(wide for _, wide in mine))
    return [*rows, ("mean", averages)]


def newest_divergence(cell: Cell) -> Mapping[str, Any] | None:
    """Return a run's record of its best checkpoint, else of its last; of several the one after the most steps."""
    records = [record for record in cell.analyses if record.get("what") == "divergence" and spreads(record)]
    points = [part(record, "checkpoint") for record in records]
    ranks = [(point.get("name") == "best", whole(point.get("step"))) for point in points]
    return records[max(range(len(ranks)), key=lambda at: ranks[at])] if records else None


def divergence_views(cells: Sequence[Cell]) -> list[Table]:
    """Return a table for each run with a record: layers as rows, a kind of pairs a column, the paper's beside ours."""
    return [divergence_view(cell, record) for cell in cells if (record := newest_divergence(cell))]


def divergence_view(cell: Cell, record: Mapping[str, Any]) -> Table:
    """Return the table of a run; it is the paper's Table 6 where the run is on the same data."""
    table, found, theirs = numbered(6), spreads(record), dict(entries_of(paper_spreads()))
    wish, data, kinds = part(record, "analyze"), part(record, "data"), kinds_of(found)
    alike, entries = [name for name, _ in entries_of(found)] == list(theirs), []
    for layer, values in entries_of(found):
        entry: dict[str, Any] = {"layer": layer}
        for kind in kinds:
            beside = theirs[layer].get(kind) if alike or layer == "mean" else None
            for start, pair in (("", values.get(kind)), ("paper_", beside)):
                key = start + "_".join(kind)
                entry |= {key: pair[0], f"{key}_deviation": pair[1]} if pair else {}
        entries.append(entry)
    columns = [Column("layer", "layer")]
    for kind in kinds:
        key = "_".join(kind)
        columns.append(Column(key, name_of(kind), 4, f"{key}_deviation"))
        columns.append(Column(f"paper_{key}", f"paper {name_of(kind)}", 4, f"paper_{key}_deviation"))
    where = f"{wish.get('split', 'valid')} split of {data.get('name', 'unknown data')}"
    draws = f"{wish.get('draws', '?')} draws of pairs of heads on {wish.get('sequences', '?')} sequences"
    lines = [f"{cell.name}: {where}; {draws} of {record.get('length', '?')}; nats, at most {BOUND:.4f}."]
    own = data.get("name") == table.setting["data.name"]
    lines += [] if own else ["The paper's values are of a model of 10 layers on Wikitext-103, N=4096."]
    title = f"{table.name}. {table.title}" if own else f"Jensen-Shannon divergence of attention, by layer: {where}"
    return Table(title, columns, entries, lines, table.footnotes)
