"""The divergence of heads' attention, the paper's Table 6 beside ours: lines for a terminal, tables and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rtx.report.cells import Cell
from rtx.report.matching import settings_changed
from rtx.report.names import GROUPS
from rtx.report.paper import numbered
from rtx.report.plots import COLOURS, Series
from rtx.report.views import Column, Value, View, count, text

Kind = tuple[str, str]
"""What a pair's heads are: names of the groups of a layer, `routed` last."""

PAPER_KINDS: tuple[Kind, ...] = (("local", "local"), ("local", "routed"), ("routed", "routed"))
"""In the order of the paper's columns."""

BOUND = math.log(2)


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over the drawn pairs of a layer and kind, in nats."""

    mean: float
    deviation: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.deviation:.4f}"


Found = Mapping[tuple[int, Kind], Spread]
"""A spread for each layer and kind of pair."""


def spreads(result: Mapping[str, Any]) -> dict[tuple[int, Kind], Spread]:
    """Return what a record of `rtx analyze divergence` holds; entries that are not whole are left out."""
    found = {}
    layers = result.get("layers")
    for row in layers if isinstance(layers, list) else []:
        try:
            first, second = row["kind"]
            spread = Spread(float(row["mean"]), float(row["deviation"]))
            layer = int(row["layer"])
        except (KeyError, TypeError, ValueError):
            continue
        if math.isfinite(spread.mean) and math.isfinite(spread.deviation):
            found[layer, (str(first), str(second))] = spread
    return found


def paper_spreads() -> dict[tuple[int, Kind], Spread]:
    """Return the paper's Table 6."""
    table = numbered(6)
    return {
        (layer, kind): Spread(*values)
        for layer, row in enumerate(table.divergences)
        for kind, values in zip(PAPER_KINDS, row, strict=True)
    }


def layers_of(found: Found) -> list[int]:
    """Return the layers in their order."""
    return sorted({layer for layer, _ in found})


def kinds_of(found: Found) -> list[Kind]:
    """Return the kinds of pairs: the paper's in its order, then others."""
    kinds = dict.fromkeys(kind for _, kind in found)
    return [kind for kind in PAPER_KINDS if kind in kinds] + [kind for kind in kinds if kind not in PAPER_KINDS]


def name_of(kind: Kind) -> str:
    """Return a kind of pairs in words."""
    return " ".join(GROUPS.get(name, name) for name in kind)


def paper_beside(found: Found) -> dict[tuple[int, Kind], Spread]:
    """Return the paper's values, layer by layer, for a model of as many layers as the paper's; nothing for others."""
    paper = paper_spreads()
    return paper if layers_of(paper) == layers_of(found) and set(kinds_of(found)) & set(PAPER_KINDS) else {}


def divergence_table(result: Mapping[str, Any]) -> list[str]:
    """Return the lines that `rtx analyze divergence` prints; the paper's values below ours where layers correspond."""
    found = spreads(result)
    kinds, paper = kinds_of(found), paper_beside(found)
    lines = [
        f"Jensen-Shannon divergence, nats (at most {BOUND:.4f}): "
        f"mean ± deviation of {result['analyze']['draws']} draws",
        f"{'layer':<7}" + "".join(f"  {name_of(kind):>18}" for kind in kinds),
    ]
    for layer in layers_of(found):
        lines.append(f"{layer:<7}" + "".join(f"  {entry(found, layer, kind):>18}" for kind in kinds))
        if paper:
            lines.append(f"{'  paper':<7}" + "".join(f"  {entry(paper, layer, kind):>18}" for kind in kinds))
    ranges = [] if paper else paper_ranges(kinds)
    above = ["the paper's means (Table 6: 10 layers, Wikitext-103, N=4096):"] if ranges else []
    return [*lines, *share_lines(result, kinds), *above, *(f"  {one}" for one in ranges)]


def entry(found: Found, layer: int, kind: Kind) -> str:
    """Return mean and deviation, or a dash where a layer has no such pair."""
    return str(found.get((layer, kind), "-"))


def share_lines(result: Mapping[str, Any], kinds: Sequence[Kind]) -> list[str]:
    """Return over which share of the positions the means are, where some were left out."""
    shares = {kind: [row["share"] for row in result["layers"] if tuple(row["kind"]) == kind] for kind in kinds}
    if all(min(share) == 1 for share in shares.values()):
        return []
    means = (f"{name_of(kind)} {sum(share) / len(share):.0%}" for kind, share in shares.items())
    return ["over the positions where both heads read something:", f"  {', '.join(means)}"]


def paper_ranges(kinds: Sequence[Kind]) -> list[str]:
    """Return between which means the paper's layers lie, for a model whose layers are not the paper's."""
    ranges = []
    for kind in (kind for kind in PAPER_KINDS if kind in kinds):
        means = [spread.mean for (_, other), spread in paper_spreads().items() if other == kind]
        ranges.append(f"{name_of(kind)} {min(means):.4f} to {max(means):.4f}")
    return ranges


def newest_divergence(cell: Cell) -> Mapping[str, Any] | None:
    """Return a run's record of its best checkpoint, else of its last; of several the one after the most steps."""
    records = [record for record in cell.analyses if record.get("what") == "divergence" and spreads(record)]

    def rank(record: Mapping[str, Any]) -> tuple[bool, float]:
        checkpoint = record.get("checkpoint")
        checkpoint = checkpoint if isinstance(checkpoint, Mapping) else {}
        step = checkpoint.get("step")
        return checkpoint.get("name") == "best", step if isinstance(step, int) else -1

    return max(records, key=rank, default=None)


def divergence_views(cells: Sequence[Cell], names: Mapping[Any, str]) -> list[View]:
    """Return Table 6 beside ours: one table for each protocol, layers as rows, a kind of pairs a column.

    Args:
        cells: runs; those without a record are left out.
        names: what each run is called, by its folder.
    """
    groups: dict[str, list[tuple[Cell, Found]]] = {}
    for cell in cells:
        if record := newest_divergence(cell):
            groups.setdefault(protocol_of(record), []).append((cell, spreads(record)))
    return [divergence_view(protocol, runs, names) for protocol, runs in groups.items()]


def divergence_view(protocol: str, runs: Sequence[tuple[Cell, Found]], names: Mapping[Any, str]) -> View:
    """Return the table of runs whose divergences were measured alike."""
    table = numbered(6)
    kinds = kinds_of({key: spread for _, found in runs for key, spread in found.items()})
    lines = [f"Protocol: {protocol}."]
    changed = dict.fromkeys(line for cell, _ in runs for line in settings_changed(cell.config, table))
    lines += [f"Not the paper's setting: {'; '.join(changed)}."] if changed else []
    ranges = [] if any(paper_beside(found) for _, found in runs) else paper_ranges(kinds)
    lines += [f"The paper's means, over its 10 layers: {'; '.join(ranges)}."] if ranges else []
    columns = [Column("run", "run", brief=True, label=True), Column("layer", "layer", True, brief=True, label=True)]
    for kind in kinds:
        columns.append(Column("_".join(kind), name_of(kind), True, brief=True))
        columns.append(Column("paper_" + "_".join(kind), f"paper {name_of(kind)}", True, brief=True))
    view = View(f"{table.name}. {table.title}", columns, [], lines, table.footnotes)
    for cell, found in runs:
        paper = paper_beside(found)
        name = names.get(cell.folder, cell.name) if len(runs) > 1 else ""
        for layer in layers_of(found):
            values = [value(one.get((layer, kind))) for kind in kinds for one in (found, paper)]
            view.rows.append([text(name), count(layer), *values])
    return view.without_empty()


def value(spread: Spread | None) -> Value:
    """Return mean and deviation as an entry, sorted by the mean."""
    return Value() if spread is None else Value(str(spread), spread.mean, error=spread.deviation)


def protocol_of(record: Mapping[str, Any]) -> str:
    """Say in a line how a record came about."""
    wish, data = (part if isinstance(part, Mapping) else {} for part in (record.get("analyze"), record.get("data")))
    return (
        f"{wish.get('split', 'valid')} split of {data.get('name', 'unknown data')}"
        f" ({str(data.get('fingerprint', ''))[:12]}); {wish.get('draws', '?')} draws of pairs of heads on"
        f" {wish.get('sequences', '?')} sequences of {record.get('length', '?')}; nats, at most {BOUND:.4f}"
    )


def divergence_curves(cells: Sequence[Cell], names: Mapping[Any, str]) -> list[tuple[str, list[Series]]]:
    """Return a chart of each run with a record: a caption, and by layer what ours are and, dashed, the paper's."""
    charts = []
    for cell in cells:
        if record := newest_divergence(cell):
            found = spreads(record)
            paper = {key: spread for key, spread in paper_spreads().items() if key[1] in kinds_of(found)}
            series = [*by_kind(found, kinds_of(found), "", 0), *by_kind(paper, kinds_of(found), "paper ", COLOURS)]
            charts.append((f"Divergence of heads by layer: {names.get(cell.folder, cell.name)}", series))
    return charts


def by_kind(found: Found, kinds: Sequence[Kind], prefix: str, first: int) -> list[Series]:
    """Return the points of each kind of pairs; `first` is the style of the first."""
    result = []
    for at, kind in enumerate(kinds):
        points = [(float(layer), found[layer, kind]) for layer in layers_of(found) if (layer, kind) in found]
        if points:
            errors = [spread.deviation for _, spread in points]
            means = [(layer, spread.mean) for layer, spread in points]
            result.append(Series(prefix + name_of(kind), means, errors, first + at))
    return result
