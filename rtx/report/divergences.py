"""The divergence of heads' attention, the paper's Table 6 beside ours."""

import math
from collections.abc import Mapping
from typing import Any

from rtx.report.paper import numbered, setting_lines
from rtx.report.ranking import mean
from rtx.report.run_records import Cell
from rtx.report.tables import Column, Table
from rtx.runs.records import AnalysisRecord

Found = Mapping[tuple[str, str], tuple[float, float]]
"""Mean and deviation over the drawn pairs, in nats, by layer and kind of pair; layer "mean" is the mean over layers."""

PAPER_KINDS = (
    "local local",
    "local routing",
    "routing routing",
)  # in the order of the paper's columns
BOUND = math.log(2)


def spreads(record: AnalysisRecord) -> Found:
    """Return mean and deviation of a record of `rtx analyze divergence`."""
    values = {}
    for row in record.layers:
        kind = " ".join(map(heads_name, row.kind))
        values[str(row.layer), kind] = (row.mean, row.deviation)
    return with_means(values)


def heads_name(group: str) -> str:
    """Return what tables call a group of heads, which a model calls `routed` where it routes."""
    return "routing" if group == "routed" else group


def paper_spreads() -> Found:
    layers = enumerate(numbered(6).divergences)
    return with_means(
        {
            (str(n), kind): pair
            for n, row in layers
            for kind, pair in zip(PAPER_KINDS, row, strict=True)
        }
    )


def with_means(found: Found) -> Found:
    """Return values with the means over layers below them, as the paper's earlier versions print them."""
    columns = {
        kind: [pair for (_, other), pair in found.items() if other == kind] for _, kind in found
    }
    means = {
        ("mean", kind): (mean(a for a, _ in pairs), mean(b for _, b in pairs))
        for kind, pairs in columns.items()
    }
    return {**found, **means}


def newest_divergence(cell: Cell) -> AnalysisRecord | None:
    """Return a run's record of its best checkpoint, else of its last; of several the latest."""
    records = [record for record in cell.analyses if record.what == "divergence"]
    return max(records, key=precedence, default=None)


def precedence(record: AnalysisRecord) -> tuple[bool, int]:
    """Return what orders the analyses of a run: its best checkpoint last, then by steps."""
    return record.checkpoint.name == "best", record.checkpoint.step


def divergence_view(cell: Cell, record: AnalysisRecord) -> Table:
    """Return a table of layers as rows and kinds of pairs as columns, the paper's beside ours.

    It is the paper's Table 6 where the run is on the same data, and says what else the run has otherwise.
    """
    table, found, theirs = numbered(6), spreads(record), paper_spreads()
    layers = list(dict.fromkeys(layer for layer, _ in found))
    beside = layers if layers == list(dict.fromkeys(layer for layer, _ in theirs)) else ["mean"]
    entries: list[dict[str, Any]] = [{"layer": layer} for layer in layers]
    columns = [Column("layer", "layer")]
    for kind in dict.fromkeys(kind for _, kind in found):
        for start, values in (("", found), ("paper ", theirs)):
            key = f"{start}{kind}".replace(" ", "_")
            columns.append(Column(key, f"{start}{kind}", 4, f"{key}_deviation"))
            for entry in entries:
                pair = (
                    values.get((entry["layer"], kind))
                    if not start or entry["layer"] in beside
                    else None
                )
                entry |= {key: pair[0], f"{key}_deviation": pair[1]} if pair else {}
    wish = record.analyze
    data = record.data.name
    where = f"{wish['split']} split of {data}"
    draws = f"{wish['draws']} draws of pairs of heads on {wish['sequences']} sequences of {record.length}"
    lines = [f"{cell.name}: {where}; {draws}; nats, at most {BOUND:.4f}."]
    own = data == table.of_paper["data.name"]
    lines += (
        [] if own else ["The paper's values are of a model of 10 layers on Wikitext-103, N=4096."]
    )
    title = f"Jensen-Shannon divergence of attention, by layer: {where}"
    if own:
        departures = table.departures(cell.config)
        lines += setting_lines(departures, table.differences(cell.config))
        title = f"Table {table.number}. {table.title}"
        if departures:
            title = f"Table {table.number} with other settings than the paper's: {where}"
    return Table(title, columns, entries, lines, table.footnotes)
