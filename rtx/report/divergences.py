"""The divergence of heads' attention by layer, beside the paper's Table 6."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rtx.report.paper import DIVERGENCE_TABLE, PaperTable, Spread, numbered, setting_lines
from rtx.report.ranking import mean
from rtx.report.run_records import Cell
from rtx.runs.records import AnalysisRecord, DivergenceRecord
from rtx.tables import Column, Entry, Table

PAPER_KINDS = ("local local", "local routing", "routing routing")
"""Kinds of pairs of heads, in the order of the paper's columns."""
BOUND = math.log(2)
"""The largest Jensen-Shannon divergence, in nats."""
MEAN = "mean"
"""In place of a layer: the mean over layers."""


@dataclass(frozen=True)
class PairsOfHeads:
    """Pairs of heads of two groups in a layer."""

    layer: str
    kind: str


Spreads = Mapping[PairsOfHeads, Spread]


def spreads(record: AnalysisRecord) -> Spreads:
    """Return the divergences of a record of `rtx analyze divergence`, with means over layers."""
    by_pairs = {}
    for row in record.layers:
        kind = " ".join(map(heads_name, row.kind))
        by_pairs[PairsOfHeads(str(row.layer), kind)] = Spread(row.mean, row.deviation)
    return with_means(by_pairs)


def heads_name(group: str) -> str:
    """Return what tables call a group of heads, which a model calls `routed` where it routes."""
    return "routing" if group == "routed" else group


def paper_spreads() -> Spreads:
    """Return the divergences that the paper prints, with means over layers."""
    by_pairs = {}
    for layer, spreads_of_layer in enumerate(numbered(DIVERGENCE_TABLE).divergences):
        for kind, spread in zip(PAPER_KINDS, spreads_of_layer, strict=True):
            by_pairs[PairsOfHeads(str(layer), kind)] = spread
    return with_means(by_pairs)


def with_means(by_pairs: Spreads) -> Spreads:
    """Return spreads with their means over layers, as earlier versions of the paper print them."""
    means = {}
    for kind in kinds_in(by_pairs):
        alike = [spread for pairs, spread in by_pairs.items() if pairs.kind == kind]
        mean_of_means = mean(spread.mean for spread in alike)
        mean_deviation = mean(spread.deviation for spread in alike)
        means[PairsOfHeads(MEAN, kind)] = Spread(mean_of_means, mean_deviation)
    return {**by_pairs, **means}


def kinds_in(by_pairs: Spreads) -> list[str]:
    """Return the kinds of pairs."""
    return list(dict.fromkeys(pairs.kind for pairs in by_pairs))


def layers_in(by_pairs: Spreads) -> list[str]:
    """Return the layers; the mean is the last one."""
    return list(dict.fromkeys(pairs.layer for pairs in by_pairs))


def newest_divergence(cell: Cell) -> AnalysisRecord | None:
    """Return a run's record of its best checkpoint, else of its last; of several the latest."""
    records = [record for record in cell.analyses if isinstance(record, DivergenceRecord)]
    return max(records, key=precedence, default=None)


def precedence(record: AnalysisRecord) -> tuple[bool, int]:
    """Return what orders the analyses of a run: its best checkpoint last, then by steps."""
    return record.checkpoint.name == "best", record.checkpoint.step


def divergence_view(cell: Cell, record: AnalysisRecord) -> Table:
    """Return a table of layers as rows and kinds of pairs as columns, beside the paper's.

    It is the paper's Table 6 for a run on the same data, and names other settings of the run.
    """
    table = numbered(DIVERGENCE_TABLE)
    ours = spreads(record)
    theirs = paper_spreads()
    if layers_in(ours) != layers_in(theirs):
        # Layers of models of other depths are not compared, but their means are.
        theirs = {pairs: spread for pairs, spread in theirs.items() if pairs.layer == MEAN}
    columns = [Column("layer", "layer")]
    for kind in kinds_in(ours):
        columns.append(spread_column(kind))
        columns.append(spread_column(f"paper {kind}"))
    entries = []
    for layer in layers_in(ours):
        entry: Entry = {"layer": layer}
        for kind in kinds_in(ours):
            pairs = PairsOfHeads(layer, kind)
            entry |= spread_entry(kind, ours.get(pairs))
            entry |= spread_entry(f"paper {kind}", theirs.get(pairs))
        entries.append(entry)
    title = divergence_title(cell, record, table)
    return Table(title, columns, entries, divergence_lines(cell, record, table), table.footnotes)


def key_of(title: str) -> str:
    """Return the key of the values of a column."""
    return title.replace(" ", "_")


def spread_column(title: str) -> Column:
    """Return a column of divergences with their deviations."""
    return Column(key_of(title), title, 4, f"{key_of(title)}_deviation")


def spread_entry(title: str, spread: Spread | None) -> Entry:
    """Return the values of a column in a row; empty without a spread."""
    if spread is None:
        return {}
    return {key_of(title): spread.mean, f"{key_of(title)}_deviation": spread.deviation}


def has_papers_data(record: AnalysisRecord, table: PaperTable) -> bool:
    """Tell whether a record is of the data of the paper's table."""
    return record.data.name == table.of_paper["data.name"]


def where(record: AnalysisRecord) -> str:
    """Return the split and the data of a record, in words."""
    return f"{record.analyze['split']} split of {record.data.name}"


def divergence_title(cell: Cell, record: AnalysisRecord, table: PaperTable) -> str:
    """Return the title of the divergences of a run."""
    if not has_papers_data(record, table):
        return f"Jensen-Shannon divergence of attention, by layer: {where(record)}"
    if table.departures(cell.config):
        return f"Table {table.number} with other settings than the paper's: {where(record)}"
    return f"Table {table.number}. {table.title}"


def divergence_lines(cell: Cell, record: AnalysisRecord, table: PaperTable) -> list[str]:
    """Return the lines above the divergences of a run."""
    options = record.analyze
    sequences = f"{options['sequences']} sequences of {record.length}"
    draws = f"{options['draws']} draws of pairs of heads on {sequences}"
    lines = [f"{cell.name}: {where(record)}; {draws}; nats, at most {BOUND:.4f}."]
    if has_papers_data(record, table):
        lines += setting_lines(table.departures(cell.config), table.differences(cell.config))
    else:
        lines.append("The paper's values are of a model of 10 layers on Wikitext-103, N=4096.")
    return lines
