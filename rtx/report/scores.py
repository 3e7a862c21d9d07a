"""What runs scored, by protocol; runs that differ by their seed alone as one row, with its standard error."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rtx.evaluation.measures import stamp_phrases
from rtx.identity import NAMELIKE, OUTSIDE
from rtx.report.cells import Cell
from rtx.report.values import real, whole

WITHOUT_EFFECT = (
    *OUTSIDE,
    "hardware.devices",
    "hardware.nodes",
    "hardware.name",
)
"""What keys begin with by which two runs of one row may differ, beside the seed."""

UNTOUCHED = {
    *(*NAMELIKE, "seed", "data.path", "hardware.threads", "hardware.compile", "hardware.deterministic"),
    *("trainer.val_every", "trainer.val_windows", "trainer.checkpoint_every", "trainer.log_every"),
}

SEEDS = 3
"""Seeds from which on an ordering may be claimed."""

ERRORS = 2.0
"""Standard errors that two rows must be apart for it."""

WORD_PERPLEXITY = "perplexity_per_word"


@dataclass(frozen=True)
class Protocol:
    """How a number came about; only numbers of one protocol stand in one table."""

    split: str
    mode: str
    unit: str
    data: str
    fingerprint: str
    length: int
    stride: int
    windows: int | None = None
    """How many windows were scored where not all were."""
    ablate: str = "none"
    stamps: tuple[str, ...] = ()

    def line(self, units: int | None = None) -> str:
        """Say it in a line; `units` were scored in every run, where that is one number."""
        how = "streaming" if self.mode == "streaming" else "teacher-forced"
        which = f"{units:,} {self.unit}s, each scored once" if units else "each unit scored once"
        which += f", a sample of {self.windows:,} windows" if self.windows else ""
        parts = [f"{self.split} split of {self.data}", f"bits/{self.unit}", how, which]
        parts += [f"windows of {self.length:,}, stride {self.stride:,}"]
        parts += [f"ablated: {self.ablate}"] if self.ablate != "none" else []
        parts += [f"data fingerprint {self.fingerprint[:12]}"] if self.fingerprint else []
        return "; ".join([*parts, *self.stamps])


@dataclass(frozen=True)
class Score:
    """A number with what it means."""

    protocol: Protocol
    bits: float
    units: int
    sees_future: bool
    error: float | None = None
    """Standard error over the windows."""
    perplexity: float | None = None
    """Per word, where the data have a count of words."""
    seed: str = ""
    """Of the run that it is of."""
    earlier: int | None = None
    """Step of the weights that were scored where it is not the run's last one."""

    def value(self, metric: str) -> float | None:
        """Return it as a table of the paper has it."""
        return self.perplexity if metric.startswith("perplexity") else self.bits


@dataclass
class Row:
    """Runs that differ by their seed alone, with their scores by one protocol."""

    cells: list[Cell]
    scores: list[Score] = field(default_factory=list)

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the first."""
        return self.cells[0].config

    def values(self, metric: str = "bits") -> list[float]:
        """Return a number for each seed: of one that was run more than once, say on other threads, the mean."""
        by_seed: dict[str, list[float]] = {}
        for score in self.scores:
            if (value := score.value(metric)) is not None:
                by_seed.setdefault(score.seed, []).append(value)
        return [statistics.fmean(values) for values in by_seed.values()]

    def runs_of_seeds(self) -> dict[str, int]:
        """Return how many runs with a score each seed has."""
        return Counter(score.seed for score in self.scores)

    def mean(self, metric: str = "bits") -> float | None:
        """Return the mean over seeds."""
        values = self.values(metric)
        return statistics.fmean(values) if values else None

    def error(self, metric: str = "bits") -> float | None:
        """Return the standard error over seeds; None for a single one."""
        values = self.values(metric)
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None

    @property
    def speed(self) -> float | None:
        """Optimizer steps a second: the mean of the medians of the runs on its machine."""
        machine = self.machine
        own = [cell for cell in self.cells if machine_of(cell) == machine]
        speeds = [speed for cell in own if (speed := steps_per_second(cell)) is not None]
        return statistics.fmean(speeds) if speeds else None

    @property
    def machine(self) -> tuple[str, ...]:
        """The one that most of its runs with a pace were on, of several the first by name."""
        counts = Counter(machine_of(cell) for cell in self.cells if cell.metrics) or Counter(
            [machine_of(self.cells[0])]
        )
        return min(counts, key=lambda machine: (-counts[machine], machine))

    @property
    def steps(self) -> int:
        """Steps that its runs were to take; 0 where that is not known."""
        return whole(self.config.get("trainer.steps"))

    @property
    def step(self) -> int:
        """Steps that every run with a score has done, else those of the farthest."""
        done = [cell.step for cell in self.cells if cell.state == "done"]
        return min(done) if done else max(cell.step for cell in self.cells)


def scores_of(cell: Cell) -> list[Score]:
    """Return what was scored: its evaluations, and the closing validation where none of them has its protocol."""
    found = evaluations(cell)
    if cell.final is not None and (last := closing(cell, cell.final)).protocol not in {one.protocol for one in found}:
        found.append(last)
    return found


def evaluations(cell: Cell) -> list[Score]:
    """Return a score for each protocol that a run was evaluated by: of the best checkpoint before others."""
    found: dict[Protocol, tuple[bool, int, Score]] = {}
    for record in cell.evals:
        score = evaluated(cell, record)
        if score is None:
            continue
        checkpoint = record.get("checkpoint")
        checkpoint = checkpoint if isinstance(checkpoint, Mapping) else {}
        rank = (checkpoint.get("name") == "best", whole(checkpoint.get("step")))
        if score.protocol not in found or rank > found[score.protocol][:2]:
            found[score.protocol] = (*rank, score)
    return [score for _, _, score in found.values()]


def evaluated(cell: Cell, record: Mapping[str, Any]) -> Score | None:
    """Return the score of an evaluation's record; None where it is none."""
    data = record.get("data") if isinstance(record.get("data"), Mapping) else cell.data
    assert isinstance(data, Mapping)
    unit = str(data.get("unit", "unit"))
    bits = real(record.get(f"bits_per_{unit}"))
    if bits is None:
        return None
    split = str(record.get("split", "valid"))
    length = whole(record.get("length"))
    protocol = Protocol(
        split=split,
        mode=str(record.get("mode", "parallel")),
        unit=unit,
        data=str(data.get("name", "")) + ("" if record.get("own_data", True) else " (not the run's own data)"),
        fingerprint=str(data.get("fingerprint", "")),
        length=length,
        stride=whole(record.get("stride")) or length,
        windows=whole(record.get("windows")) if record.get("partial") else None,
        ablate=str(record.get("ablate", "none")),
        stamps=stamps_of(data, split),
    )
    sight = bool(record.get("selection_sees_future"))
    error, word = real(record.get("standard_error")), real(record.get(WORD_PERPLEXITY))
    checkpoint = record.get("checkpoint")
    step = whole(checkpoint.get("step")) if isinstance(checkpoint, Mapping) else 0
    earlier = step if 0 < step < cell.step else None
    return Score(protocol, bits, whole(record.get("units")), sight, error, word, seed_of(cell), earlier)


def closing(cell: Cell, final: Mapping[str, Any]) -> Score:
    """Return the score on the validation split with which a run ends."""
    length = whole(cell.config.get("data.length"))
    stride = whole(cell.config.get("trainer.val_stride")) or length
    name = str(cell.data.get("name") or cell.config.get("data.name") or "")
    protocol = Protocol(
        *("valid", "parallel", str(final.get("unit", "unit")), name, str(cell.data.get("fingerprint", ""))),
        *(length, stride),
        stamps=stamps_of(cell.data, "valid"),
    )
    return Score(
        *(protocol, float(final["bits"]), whole(final.get("units")), sees_future(cell.config)),
        *(real(final.get("se")), real(final.get(WORD_PERPLEXITY)), seed_of(cell)),
    )


def seed_of(cell: Cell) -> str:
    """Return the seed of a run, as text: a damaged record may hold anything."""
    return str(cell.config.get("seed", ""))


def sees_future(config: Mapping[str, Any]) -> bool:
    """Tell whether a teacher-forced score may depend on later units, as `rtx.report.summary.sees_future`."""
    hashes = "lsh" in str(config.get("model.base")).split("+") and config.get("model.lsh") == "reformer"
    return (routes(config) and config.get("routing.selection") == "topk") or hashes


def routes(config: Mapping[str, Any]) -> bool:
    """Tell whether some heads route."""
    return bool(config.get("routing.heads")) and bool(config.get("routing.layers"))


def has_effect(key: str, config: Mapping[str, Any]) -> bool:
    """Tell whether a key says anything of a run: of routing heads only where there are any, and nothing unknown."""
    return bool(config) and (routes(config) or key == "routing.heads" or not key.startswith("routing."))


def stamps_of(data: Mapping[str, Any], split: str) -> tuple[str, ...]:
    """Return what makes data other than the benchmark's, in words."""
    stamps = data.get("stamps")
    if not isinstance(stamps, Mapping):
        return ()
    return tuple(stamp_phrases(stamps, split))


def steps_per_second(cell: Cell) -> float | None:
    """Return the median pace over the rows of metrics.jsonl, without the first one: it warms up."""
    units = whole(cell.config.get("trainer.batch_size")) * whole(cell.config.get("data.length"))
    paces = [real(row.get("tokens_per_second")) for row in cell.metrics if row.get("kind") == "train"]
    known = [pace for pace in paces if pace is not None and pace > 0]
    if not known or not units:
        return None
    return statistics.median(known[1:] or known) / units


def machine_of(cell: Cell) -> tuple[str, ...]:
    """Return what the pace of a run depends on but the model and the batch."""
    env = cell.environment
    facts = [env.get("gpu") or env.get("host"), env.get("cpus"), env.get("threads")]
    facts += [cell.config.get(f"hardware.{key}") for key in ("devices", "nodes", "compile")]
    facts.append(cell.precision)
    return tuple(map(str, facts))


def row_key(cell: Cell) -> tuple[tuple[str, str], ...]:
    """Return what two runs of one row share: all that changes results but the seed."""
    if not cell.config:
        return (("folder", str(cell.folder)),)
    values = {**cell.config, "hardware.precision": cell.precision}
    kept = {key: value for key, value in values.items() if key not in UNTOUCHED}
    return tuple((key, repr(value)) for key, value in sorted(kept.items()) if not key.startswith(WITHOUT_EFFECT))


def tables_by_protocol(cells: Sequence[Cell]) -> list[tuple[Protocol | None, list[Row]]]:
    """Return a list of rows for each protocol, that with the most scores first, then test before others.

    A run without a score stands in the first table with its data, or in the first.
    """
    scored = scores_by_run(cells)
    protocols: dict[Protocol, int] = {}
    for cell in cells:
        for score in scored[id(cell)]:
            protocols[score.protocol] = protocols.get(score.protocol, 0) + 1
    order = sorted(protocols, key=lambda p: (p.ablate != "none", -protocols[p], p.split != "test", repr(p)))
    tables: dict[Protocol | None, dict[Any, Row]] = {protocol: {} for protocol in order or [None]}
    for cell in cells:
        for score in scored[id(cell)]:
            row = tables[score.protocol].setdefault(row_key(cell), Row([]))
            row.cells.append(cell)
            row.scores.append(score)
        if not scored[id(cell)]:
            mine = cell.data.get("fingerprint")
            home = next((p for p in order if mine and p.fingerprint == mine), order[0] if order else None)
            tables[home].setdefault(row_key(cell), Row([])).cells.append(cell)
    return [(protocol, list(rows.values())) for protocol, rows in tables.items()]


def scores_by_run(cells: Sequence[Cell]) -> dict[int, list[Score]]:
    """Return what each run scored, by the number of its object.

    The closing validations of runs on one data set are left out where all of these have been evaluated by one protocol
    in the same manner (their own data, teacher-forced, whole, nothing ablated), on whatever split; else they stay, for
    all to stand in one table.
    """
    shared: dict[str, set[Protocol]] = {}
    for cell in (cell for cell in cells if cell.final is not None):
        own = str(cell.data.get("fingerprint"))
        plain = {score.protocol for score in evaluations(cell) if is_plain(score.protocol, own)}
        shared[own] = shared.get(own, plain) & plain
    replaced = {own for own, protocols in shared.items() if protocols}
    return {
        id(cell): evaluations(cell) if str(cell.data.get("fingerprint")) in replaced else scores_of(cell)
        for cell in cells
    }


def is_plain(protocol: Protocol, fingerprint: str) -> bool:
    """Tell whether a score came about as closing validations do, but for the split and the stride."""
    manner = (protocol.mode, protocol.windows, protocol.ablate, protocol.fingerprint)
    return manner == ("parallel", None, "none", fingerprint)


def standings(rows: Sequence[Row], metric: str = "bits", names: Sequence[str] = ()) -> tuple[list[str], str]:
    """Return a word for each row, and a line that says what ordering is claimed: none within 2 standard errors.

    Args:
        rows: of one protocol.
        metric: what the rows are compared by; less is better.
        names: what the line calls each row; none: it only counts them.
    """
    ranked = [row for row in rows if len(row.values(metric)) >= SEEDS]
    words = ["" for _ in rows]
    if len(ranked) < 2:
        seeds = max((len(row.values(metric)) for row in rows), default=0)
        few = f"the rows have {seeds} seed{'s' * (seeds != 1)} at the most" if not ranked else "one row has"
        return words, f"No ordering is claimed: it takes {SEEDS} seeds a row, and {few}."
    best = min(ranked, key=lambda row: row.mean(metric) or math.inf)
    tied = {id(row) for row in ranked if row is best or not apart(best, row, metric)}
    for place, row in enumerate(rows):
        if row.mean(metric) is None:
            continue
        if len(row.values(metric)) < SEEDS:
            words[place] = "not ranked"
        elif id(row) in tied:
            words[place] = "best" if len(tied) == 1 else "tied for best"
        else:
            words[place] = "behind"
    line = f"{len(tied)} rows are tied for the best" if len(tied) > 1 else "one row is best"
    line += f" ({', '.join(name for name, row in zip(names, rows, strict=True) if id(row) in tied)})" if names else ""
    return (
        words,
        f"Of rows with {SEEDS} seeds or more {line}; within {ERRORS:g} standard errors no ordering is claimed.",
    )


def apart(first: Row, second: Row, metric: str) -> bool:
    """Tell whether two rows differ by more than 2 standard errors of their difference."""
    difference = abs((first.mean(metric) or 0.0) - (second.mean(metric) or 0.0))
    return difference > ERRORS * math.hypot(first.error(metric) or 0.0, second.error(metric) or 0.0)
