"""Rows of a table: the scores, by one protocol, of runs that differ by their seed alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtx.errors import written
from rtx.report.paper import Config, heads_label
from rtx.report.ranking import mean
from rtx.report.run_records import Cell, Score
from rtx.runs.records import Protocol
from rtx.settings.identity import tells_rows_apart
from rtx.settings.readers import default_where_unread, unread

RowKey = Hashable
"""What runs of one row share: see `row_key`."""

MOST_KEYS = 4
"""The most keys in the name of a row."""


@dataclass(frozen=True)
class ScoredRun:
    """A run and its score by the protocol of its row."""

    cell: Cell
    score: Score


@dataclass
class Row:
    """Runs that differ by their seed alone, with their scores by one protocol.

    Args:
        scored: the runs with a score by that protocol.
        unscored: those without; a row has at least one run.
    """

    scored: list[ScoredRun] = field(default_factory=list)
    unscored: list[Cell] = field(default_factory=list)
    name: str = ""

    @property
    def cells(self) -> list[Cell]:
        return [*(run.cell for run in self.scored), *self.unscored]

    @property
    def scores(self) -> list[Score]:
        return [run.score for run in self.scored]

    @property
    def config(self) -> Config:
        return self.cells[0].config

    @property
    def sees_future(self) -> bool:
        return any(score.sees_future for score in self.scores)

    @property
    def step(self) -> int:
        """The steps that every run with a score has done.

        Without scores, those that every finished run has done, else the most of any run.
        """
        counted = [run.cell.step for run in self.scored]
        if not counted:
            counted = [cell.step for cell in self.cells if cell.state == "done"]
        if not counted:
            return max(cell.step for cell in self.cells)
        return min(counted)

    def done(self) -> Row:
        """Return the finished runs that have a score.

        The score of a run that was killed before its end counts for no verdict.
        """
        scored = [run for run in self.scored if run.cell.state == "done"]
        return Row(scored, name=self.name)

    def values(self, metric: str = "bits") -> dict[str, float]:
        """Return a score by seed; of a seed that ran more than once, the mean.

        `metric`: bits or perplexity.
        """
        values_by_seed: dict[str, list[float]] = {}
        for run in self.scored:
            value = run.score.perplexity if metric == "perplexity" else run.score.bits
            if value is not None:
                values_by_seed.setdefault(run.cell.seed, []).append(value)
        return {seed: mean(values) for seed, values in values_by_seed.items()}

    def paces(self) -> list[float]:
        """Return the steps a second of its runs; empty where they ran on several machines."""
        paces = []
        machines = set()
        for cell in self.cells:
            if cell.pace:
                paces.append(cell.pace)
                machines.add(machine_of(cell))
        return paces if len(machines) == 1 else []

    def peak_share(self) -> float | None:
        """Return the mean share of the GPU's peak of its runs; None: not known of all of them."""
        shares = []
        for cell in self.cells:
            if cell.pace:
                if cell.peak_share is None:
                    return None
                shares.append(cell.peak_share)
        return mean(shares) if shares else None


@dataclass(frozen=True)
class ProtocolRows:
    """The rows of a protocol; None: of runs without any score."""

    protocol: Protocol | None
    rows: list[Row]


@dataclass(frozen=True)
class Machine:
    """What is equal in runs whose paces may be compared."""

    gpu: str | None = None
    host: str | None = None
    threads: int | None = None


def machine_of(cell: Cell) -> Machine:
    """Return the machine of a run."""
    record = cell.environment
    if record is None:
        return Machine()
    return Machine(record.gpu, record.host, record.threads)


def rows_by_protocol(cells: Sequence[Cell]) -> list[ProtocolRows]:
    """Return the rows of each protocol, in the order of `protocol_order`.

    A run without a score is in the first table with its data, or else in the first one.
    """
    replaced = {}
    for fingerprint in {cell.fingerprint for cell in cells}:
        replaced[fingerprint] = have_plain_evaluation(fingerprint, cells)
    scores_by_cell = [scores_of(cell, replaced[cell.fingerprint]) for cell in cells]
    trained_lengths = {cell.final.protocol.length for cell in cells if cell.final}
    order = protocol_order(scores_by_cell, trained_lengths)
    tables: dict[Protocol | None, dict[RowKey, Row]] = {one: {} for one in order or [None]}
    unscored = []
    for cell, scores in zip(cells, scores_by_cell, strict=True):
        key = row_key(cell.config, cell.folder)
        for score in scores:
            row = tables[score.protocol].setdefault(key, Row())
            row.scored.append(ScoredRun(cell, score))
        if not scores:
            unscored.append(cell)
    for cell in unscored:
        key = row_key(cell.config, cell.folder)
        row = tables[protocol_without_score(cell, order)].setdefault(key, Row())
        row.unscored.append(cell)
    groups = [ProtocolRows(protocol, list(rows.values())) for protocol, rows in tables.items()]
    for group in groups:
        name_rows(group.rows)
    return groups


def protocol_order(
    scores_by_cell: Sequence[Sequence[Score]], trained_lengths: Collection[int]
) -> list[Protocol]:
    """Return the protocols of scores, that with the most scores first.

    Those of ablated models are last, before them those at other lengths than that of training. Of
    equally many scores the test split is first, then teacher-forced scores.
    """
    counts: Counter[Protocol] = Counter()
    for scores in scores_by_cell:
        counts.update(score.protocol for score in scores)

    def place(protocol: Protocol) -> tuple[bool, bool, int, bool, bool, str]:
        return (
            protocol.ablate != "none",
            protocol.length not in trained_lengths,
            -counts[protocol],
            protocol.split != "test",
            protocol.mode != "parallel",
            repr(protocol),
        )

    return sorted(counts, key=place)


def protocol_without_score(cell: Cell, order: Sequence[Protocol]) -> Protocol | None:
    """Return the protocol in whose table a run without a score is listed; None: there is none."""
    for protocol in order:
        if protocol.fingerprint == cell.fingerprint:
            return protocol
    return order[0] if order else None


def scores_of(cell: Cell, is_replaced: bool) -> list[Score]:
    """Return the scores of a run: its closing validation, and the last evaluation by each protocol.

    The closing validation is left out if `is_replaced`: a plain evaluation takes its place in all
    runs on the same data.
    """
    scores = list(cell.scores)
    if cell.final is not None and not is_replaced:
        scores.insert(0, cell.final)
    by_protocol = {score.protocol: score for score in scores}
    return list(by_protocol.values())


def have_plain_evaluation(fingerprint: str | None, cells: Sequence[Cell]) -> bool:
    """Tell whether runs on the data of a fingerprint share a plain protocol, on whatever split.

    Runs without a closing validation do not count.
    """
    shared: set[Protocol] | None = None
    for cell in cells:
        if cell.final is None or cell.fingerprint != fingerprint:
            continue
        plain = {score.protocol for score in cell.scores if is_plain(score.protocol, fingerprint)}
        shared = plain if shared is None else shared & plain
    return bool(shared)


def is_plain(protocol: Protocol, fingerprint: str | None) -> bool:
    """Tell whether a protocol is that of a closing validation: whole, parallel, not ablated.

    `fingerprint` is that of the run's own data.
    """
    is_whole = protocol.windows is None and protocol.ablate == "none"
    return is_whole and protocol.mode == "parallel" and protocol.fingerprint == fingerprint


def row_key(config: Config, folder: Path | None = None) -> RowKey:
    """Return what two runs of one row share: the values of all keys that tell rows apart.

    Keys that a run does not read have their default there. `folder` is returned for a run without
    a configuration, which is a row by itself.
    """
    values = []
    for key, value in default_where_unread(config).items():
        if tells_rows_apart(key):
            values.append((key, repr(value)))
    return tuple(sorted(values)) or folder


def differing_keys(configs: Sequence[Config]) -> list[str]:
    """Return the keys that tell configurations apart; a key that a run does not read is None."""
    keys: dict[str, None] = {}
    for config in configs:
        keys |= dict.fromkeys(key for key in config if tells_rows_apart(key))
    read = [values_read(config) for config in configs]
    differing = []
    for key in keys:
        values = {repr(one.get(key)) for one in read}
        if len(values) > 1:
            differing.append(key)
    return differing


def values_read(config: Config) -> dict[str, Any]:
    """Return the values of a configuration, with None for keys that its run does not read."""
    return {**config, **dict.fromkeys(unread(config))}


def name_rows(rows: Sequence[Row]) -> None:
    """Give each row a name: its kind of heads, and its values of the keys that differ in the kind.

    A row without a configuration has the title or the name of its first run.
    """
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if row.config:
            kinds.setdefault(heads_label(row.config), []).append(row)
        else:
            first = row.cells[0]
            row.name = first.title or first.name
    for kind, alike in kinds.items():
        keys = differing_keys([row.config for row in alike])[:MOST_KEYS]
        for row in alike:
            values = values_read(row.config)
            settings = [f"{last_part(key)}={written(values.get(key))}" for key in keys]
            row.name = " ".join([f"{kind}:", *settings]) if settings else kind


def last_part(key: str) -> str:
    """Return the last part of a dotted key."""
    return key.rpartition(".")[2]
