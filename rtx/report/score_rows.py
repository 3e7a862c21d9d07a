"""Rows of a table: what one protocol scored of runs that differ by their seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rtx.errors import written
from rtx.report.paper import Config, heads_label
from rtx.report.ranking import mean
from rtx.report.run_records import Cell, Score
from rtx.runs.records import Protocol
from rtx.settings.identity import tells_rows_apart
from rtx.settings.readers import default_where_unread, unread


@dataclass
class Row:
    """Runs that differ by their seed alone, with their scores by one protocol."""

    cells: list[Cell]
    scores: list[Score] = field(
        default_factory=list
    )  # of the first cells, one each; those without a score stand last
    name: str = ""

    @property
    def config(self) -> Config:
        return self.cells[0].config

    @property
    def sees_future(self) -> bool:
        return any(score.sees_future for score in self.scores)

    @property
    def step(self) -> int:
        """Steps that every run with a score has done; without scores every finished run, else the farthest."""
        counted = self.cells[: len(self.scores)] or [
            cell for cell in self.cells if cell.state == "done"
        ]
        return min((cell.step for cell in counted), default=max(cell.step for cell in self.cells))

    def done(self) -> Row:
        """Return its finished runs that have a score: what a run had when it was killed is no verdict's business."""
        pairs = [
            pair for pair in zip(self.cells, self.scores, strict=False) if pair[0].state == "done"
        ]
        return Row([cell for cell, _ in pairs], [score for _, score in pairs], self.name)

    def values(self, metric: str = "bits") -> dict[str, float]:
        """Return a number for each seed: of one that was run more than once, say on other threads, the mean."""
        by_seed: dict[str, list[float]] = {}
        for cell, score in zip(self.cells, self.scores, strict=False):
            value = score.perplexity if metric == "perplexity" else score.bits
            if value is not None:
                by_seed.setdefault(cell.seed, []).append(value)
        return {seed: mean(values) for seed, values in by_seed.items()}

    def paces(self) -> list[float]:
        """Return the steps a second of its runs as they ran; empty where they ran on several machines."""
        found = [cell for cell in self.cells if cell.pace]
        machines = {machine_of(cell) for cell in found}
        return [cell.pace or 0.0 for cell in found] if len(machines) == 1 else []

    def peak_share(self) -> float | None:
        """Return the mean share of the GPU's peak of its runs, None where it is not known of all of them."""
        shares = [cell.peak_share for cell in self.cells if cell.pace]
        known = [share for share in shares if share is not None]
        return mean(known) if known and len(known) == len(shares) else None


def machine_of(cell: Cell) -> tuple[str | None, str | None, int | None]:
    """Return what is equal in runs whose paces may be compared: GPU, host, threads."""
    record = cell.environment
    return (record.gpu, record.host, record.threads) if record else (None, None, None)


def rows_by_protocol(cells: Sequence[Cell]) -> list[tuple[Protocol | None, list[Row]]]:
    """Return a list of rows for each protocol, that with the most scores first, then test before others.

    A run without a score stands in the first table with its data, or in the first.
    """
    scored = [(cell, scores_of(cell, cells)) for cell in cells]
    every = [score.protocol for _, scores in scored for score in scores]
    trained = {cell.final.protocol.length for cell in cells if cell.final}
    order = sorted(
        set(every),
        key=lambda p: (
            p.ablate != "none",
            p.length not in trained,
            -every.count(p),
            p.split != "test",
            p.mode != "parallel",
            repr(p),
        ),
    )
    tables: dict[Protocol | None, dict[Any, Row]] = {protocol: {} for protocol in order or [None]}
    for cell, scores in scored:
        for score in scores:
            row = tables[score.protocol].setdefault(row_key(cell.config, cell.folder), Row([]))
            row.cells.append(cell)
            row.scores.append(score)
    for cell in (cell for cell, scores in scored if not scores):
        mine = cell.fingerprint
        home = next((p for p in order if p.fingerprint == mine), order[0] if order else None)
        tables[home].setdefault(row_key(cell.config, cell.folder), Row([])).cells.append(cell)
    for rows in tables.values():
        name_rows(list(rows.values()))
    return [(protocol, list(rows.values())) for protocol, rows in tables.items()]


def scores_of(cell: Cell, cells: Sequence[Cell]) -> list[Score]:
    """Return what a run scored, of each protocol the last of its evaluations, and its closing validation.

    This is left out where all runs on the same data that have one have been evaluated by one protocol in its manner
    (their own data, teacher-forced, whole, nothing ablated), on whatever split.
    """
    data = cell.fingerprint
    peers = [peer for peer in cells if peer.final and peer.fingerprint == data]
    manner = ("parallel", None, "none", data)
    plain = [
        {
            p
            for p in (score.protocol for score in peer.scores)
            if (p.mode, p.windows, p.ablate, p.fingerprint) == manner
        }
        for peer in peers
    ]
    last = [] if cell.final is None or set.intersection(*plain) else [cell.final]
    return list({score.protocol: score for score in [*last, *cell.scores]}.values())


def row_key(config: Config, folder: Any = None) -> Any:
    """Return what two runs of one row share: all that changes results but the seed, of the keys that a run reads."""
    kept = {
        key: value for key, value in default_where_unread(config).items() if tells_rows_apart(key)
    }
    return tuple(sorted((key, repr(value)) for key, value in kept.items())) or folder


def differing_keys(configs: Sequence[Config]) -> list[str]:
    """Return the keys by which configurations differ; seeds and what has no effect apart."""
    keys = dict.fromkeys(key for config in configs for key in config if tells_rows_apart(key))
    read = [values_read(config) for config in configs]
    return [key for key in keys if len({repr(values.get(key)) for values in read}) > 1]


def values_read(config: Config) -> dict[str, Any]:
    """Return the values of a configuration, None in place of those that its run does not read."""
    return {**config, **dict.fromkeys(unread(config))}


def name_rows(rows: Sequence[Row]) -> None:
    """Give each row a name: its kind of heads, and by what it differs from others of that kind."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        row.name = row.cells[0].title or row.cells[0].name
        if row.config:
            kinds.setdefault(heads_label(row.config), []).append(row)
    for kind, alike in kinds.items():
        keys = differing_keys([row.config for row in alike])[:4]
        for row in alike:
            values = values_read(row.config)
            told = [f"{key.rpartition('.')[2]}={written(values.get(key))}" for key in keys]
            row.name = " ".join([f"{kind}:", *told]) if told else kind
