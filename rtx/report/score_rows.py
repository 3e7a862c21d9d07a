"""What runs scored: a table is what one protocol scored, a row of it the runs that differ by their seed alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rtx.evaluation.measures import stamp_phrases
from rtx.identity import NAMELIKE, OUTSIDE
from rtx.report.paper import Config, heads_label, kind_of, routes
from rtx.report.ranking import mean
from rtx.report.run_records import Cell, Collection, part, real, training_pace, whole
from rtx.wording import written

WITHOUT_EFFECT = (*OUTSIDE, "hardware.devices", "hardware.nodes", "hardware.name")
"""What keys begin with by which two runs of one row may differ, beside the seed."""

UNTOUCHED = {
    *(*NAMELIKE, "seed", "data.path", "hardware.threads", "hardware.compile", "hardware.deterministic"),
    *("trainer.val_every", "trainer.val_windows", "trainer.log_every"),
}


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

    @property
    def where(self) -> str:
        """The split and what makes it other than the plain one."""
        return f"{self.split} split of {self.data}" + ", streaming" * (self.mode == "streaming")

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
    seed: str
    perplexity: float | None = None
    """Per word, where the data have a count of words."""
    earlier: int | None = None
    """Step of the weights that were scored where it is not the run's last one."""


@dataclass
class Row:
    """Runs that differ by their seed alone, with their scores by one protocol."""

    cells: list[Cell]
    scores: list[Score] = field(default_factory=list)
    name: str = ""
    """What tells it from the other rows of its table."""

    @property
    def config(self) -> Config:
        """The configuration of the first."""
        return self.cells[0].config

    @property
    def sees_future(self) -> bool:
        """Whether some score may depend on later units."""
        return any(score.sees_future for score in self.scores)

    @property
    def step(self) -> int:
        """Steps that every run with a score has done, else those of the farthest."""
        done = [cell.step for cell in self.cells if cell.state == "done"]
        return min(done) if done else max(cell.step for cell in self.cells)

    def values(self, metric: str = "bits") -> dict[str, float]:
        """Return a number for each seed: of one that was run more than once, say on other threads, the mean."""
        by_seed: dict[str, list[float]] = {}
        for score in self.scores:
            value = score.perplexity if metric.startswith("perplexity") else score.bits
            if value is not None:
                by_seed.setdefault(score.seed, []).append(value)
        return {seed: mean(values) for seed, values in by_seed.items()}

    def paces(self) -> list[float]:
        """Return the steps a second of its runs as they ran; empty where they ran on several machines."""
        facts = [
            (cell.environment.get("gpu") or cell.environment.get("host"), cell.environment.get("threads"))
            for cell in self.cells
        ]
        paces = [pace for cell in self.cells if (pace := training_pace(cell))]
        return paces if len(set(map(str, facts))) == 1 else []


def sees_future(config: Config) -> bool:
    """Tell whether a teacher-forced score may depend on later units, as `rtx.report.summary.sees_future`."""
    hashes = "lsh" in str(config.get("model.base")).split("+") and config.get("model.lsh") == "reformer"
    return (routes(config) and config.get("routing.selection") == "topk") or hashes


def scores_of(cell: Cell, closing_too: bool = True) -> list[Score]:
    """Return what was scored; of each protocol the best checkpoint counts before others, then the closing score."""
    found: dict[Protocol, tuple[bool, int, Score]] = {}
    for record in cell.evals:
        if score := evaluated(cell, record):
            checkpoint = part(record, "checkpoint")
            rank = (checkpoint.get("name") == "best", whole(checkpoint.get("step")))
            if score.protocol not in found or rank > found[score.protocol][:2]:
                found[score.protocol] = (*rank, score)
    scores = [score for _, _, score in found.values()]
    if closing_too and cell.final is not None and (last := closing(cell, cell.final)).protocol not in found:
        scores.append(last)
    return scores


def evaluated(cell: Cell, record: Mapping[str, Any]) -> Score | None:
    """Return the score of a record of `rtx eval`; None where it holds none."""
    data, split = part(record, "data"), str(record.get("split", "valid"))
    unit = str(data.get("unit", "unit"))
    bits, length = real(record.get(f"bits_per_{unit}")), whole(record.get("length"))
    if bits is None:
        return None
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
        stamps=tuple(stamp_phrases(part(data, "stamps"), split)),
    )
    step = whole(part(record, "checkpoint").get("step"))
    perplexity, sight = real(record.get("perplexity_per_word")), bool(record.get("selection_sees_future"))
    return Score(
        protocol, bits, whole(record.get("units")), sight, cell.seed, perplexity, step if 0 < step < cell.step else None
    )


def closing(cell: Cell, final: Mapping[str, Any]) -> Score:
    """Return the score on the validation split with which a run ends."""
    length, data = whole(cell.config.get("data.length")), cell.data
    protocol = Protocol(
        split="valid",
        mode="parallel",
        unit=str(final.get("unit", "unit")),
        data=str(data.get("name") or cell.config.get("data.name") or ""),
        fingerprint=str(data.get("fingerprint", "")),
        length=length,
        stride=whole(cell.config.get("trainer.val_stride")) or length,
        stamps=tuple(stamp_phrases(part(data, "stamps"), "valid")),
    )
    perplexity, bits = real(final.get("perplexity_per_word")), float(final["bits"])
    return Score(protocol, bits, whole(final.get("units")), sees_future(cell.config), cell.seed, perplexity)


def rows_by_protocol(found: Collection) -> list[tuple[Protocol | None, list[Row]]]:
    """Return a list of rows for each protocol, that with the most scores first, then test before others.

    A run without a score stands in the first table with its data, or in the first. A run whose records are damaged is
    told, and stands without a score.
    """
    scored = scores_by_run(found)
    counts: dict[Protocol, int] = {}
    for protocol in (score.protocol for scores in scored.values() for score in scores):
        counts[protocol] = counts.get(protocol, 0) + 1
    order = sorted(
        counts, key=lambda p: (p.ablate != "none", -counts[p], p.split != "test", p.mode != "parallel", repr(p))
    )
    tables: dict[Protocol | None, dict[Any, Row]] = {protocol: {} for protocol in order or [None]}
    for cell in found.cells:
        for score in scored[id(cell)]:
            row = tables[score.protocol].setdefault(row_key(cell), Row([]))
            row.cells.append(cell)
            row.scores.append(score)
        if not scored[id(cell)]:
            mine = cell.data.get("fingerprint")
            home = next((p for p in order if mine and p.fingerprint == mine), order[0] if order else None)
            tables[home].setdefault(row_key(cell), Row([])).cells.append(cell)
    for rows in tables.values():
        name_rows(list(rows.values()))
    return [(protocol, sorted(rows.values(), key=in_order)) for protocol, rows in tables.items()]


def scores_by_run(found: Collection) -> dict[int, list[Score]]:
    """Return what each run scored, by the number of its object.

    The closing validations of runs on one data set are left out where all of these have been evaluated by one protocol
    in the same manner (their own data, teacher-forced, whole, nothing ablated), on whatever split; else they stay, for
    all to stand in one table.
    """
    every, shared = {}, {}
    for cell in found.cells:
        try:
            every[id(cell)] = scores_of(cell), scores_of(cell, closing_too=False)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            found.problems.append(f"{cell.name}: its records are damaged ({error}); listed without its scores")
            every[id(cell)] = [], []
        if cell.final is not None:
            own, manner = cell.data.get("fingerprint"), ("parallel", None, "none")
            evaluations = {score.protocol for score in every[id(cell)][1]}
            plain = {p for p in evaluations if (p.mode, p.windows, p.ablate) == manner and p.fingerprint == own}
            shared[str(own)] = shared.get(str(own), plain) & plain
    return {id(cell): every[id(cell)][bool(shared.get(str(cell.data.get("fingerprint"))))] for cell in found.cells}


def row_key(cell: Cell) -> tuple[tuple[str, str], ...]:
    """Return what two runs of one row share: all that changes results but the seed."""
    if not cell.config:
        return (("folder", str(cell.folder)),)
    precision = part(cell.environment, "hardware").get("precision") or cell.config.get("hardware.precision", "")
    values = {**cell.config, "hardware.precision": precision}
    kept = {key: value for key, value in values.items() if key not in UNTOUCHED}
    return tuple((key, repr(value)) for key, value in sorted(kept.items()) if not key.startswith(WITHOUT_EFFECT))


def in_order(row: Row) -> tuple[Any, ...]:
    """Return what rows are sorted by where nothing else is said: as the paper's first table, unknown ones last."""
    kinds = ("full", "local", "random", "routing", "sparse", "lsh", "adaptive_span")
    kind = kind_of(row.config)
    sizes = [real(row.config.get(f"routing.{key}")) or 0.0 for key in ("window", "layers", "heads")]
    return (not row.config, kinds.index(kind) if kind in kinds else len(kinds), *sizes, row.name)


def differing_keys(configs: Sequence[Config]) -> list[str]:
    """Return the keys by which configurations differ, those of the routing first, then of the model; seeds apart."""
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = [key for key in keys if len({repr(shown(key, config)) for config in configs}) > 1]
    kept = [key for key in differing if key not in UNTOUCHED and not key.startswith(WITHOUT_EFFECT)]
    first = ("routing.", "model.", "data.", "optimizer.", "trainer.")
    return sorted(kept, key=lambda key: next((at for at, section in enumerate(first) if key.startswith(section)), 9))


def shown(key: str, config: Config) -> Any:
    """Return the value of a key; None where it has no effect, as of routing heads where there are none."""
    without = key.startswith("routing.") and key != "routing.heads" and not routes(config)
    return None if without else config.get(key)


def name_rows(rows: Sequence[Row]) -> None:
    """Give each row a name: its kind of heads, and by what it differs from others of that kind."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(heads_label(row.config) if row.config else "", []).append(row)
    for kind, alike in kinds.items():
        keys = differing_keys([row.config for row in alike if row.config])
        for row in alike:
            told = [f"{key.rpartition('.')[2]}={written(shown(key, row.config))}" for key in keys[:4]]
            row.name = " ".join([f"{kind}:", *told]) if told else kind
            if not row.config:
                row.name = row.cells[0].title or row.cells[0].name
