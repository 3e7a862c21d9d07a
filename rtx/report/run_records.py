"""Runs read from their folders, as they are, without torch: what is missing or half written is told and left out."""

import json
import math
import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rtx.data.sets import MADE
from rtx.disk import read_file
from rtx.errors import DAMAGED, printable
from rtx.evaluation.protocols import memory_phrases, spans, stamp_phrases
from rtx.report.paper import looks_ahead
from rtx.runs.folder import shown
from rtx.runs.status import run_state
from rtx.settings.identity import digests
from rtx.settings.run_config import read_values
from rtx.settings.schema import all_fields

SIGHT = {True: "selection sees the future", False: "sees no future"}
RECORDS = ("config.yaml", "status.json", "environment.json", "metrics.jsonl")


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
    windows: int | None = None  # how many windows were scored where not all were; 0: not known
    ablate: str = "none"
    stamps: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"{self.split} split of {self.data}" + ", streaming" * (self.mode == "streaming")

    def line(self, units: int | None = None) -> str:
        """Say it in a line; `units` were scored, or in every run of a table, where that is one number."""
        place = self.split + (f" of {self.data}" if self.data else "")
        scored = (
            f"{units:,} {self.unit}s each scored once" if units else f"each {self.unit} scored once"
        )
        scored += "" if self.windows is None else f" (a sample of {self.windows or 'the'} windows)"
        how = "streaming" if self.mode == "streaming" else "teacher-forced"
        parts = [f"bits/{self.unit} on {place}", scored, *self.stamps]
        parts += [f"windows of {self.length:,}", f"stride {self.stride:,}", how]
        parts += [f"ablated: {self.ablate}"] if self.ablate != "none" else []
        return ", ".join(
            [*parts, *([f"data fingerprint {self.fingerprint[:12]}"] if self.fingerprint else [])]
        )


@dataclass(frozen=True)
class Score:
    """A number with what it means."""

    protocol: Protocol
    bits: float
    units: int
    sees_future: bool
    step: int
    perplexity: float | None = None  # per word, where the data have a count of words
    best: bool = False  # whether these were the best checkpoint's weights
    figures: Mapping[str, float] = field(
        default_factory=dict
    )  # other measures, by the titles of their columns
    error: float | None = (
        None  # standard error of the bits over the windows scored; None: not recorded, or one window
    )
    windows: int | None = None  # how many windows were scored; None: not known

    def __post_init__(self) -> None:
        how = self.protocol
        unknown = (self.perplexity, self.error, self.windows, how.windows)
        texts = (how.split, how.mode, how.unit, how.data, how.fingerprint, how.ablate, *how.stamps)
        numbers = [self.bits, self.units, self.step, how.length, how.stride, *self.figures.values()]
        numbers += [number for number in unknown if number is not None]
        if not all(isinstance(one, str) for one in texts) or not all(
            isinstance(one, int | float) for one in numbers
        ):
            raise TypeError("a score of other types")

    def line(self) -> str:
        return f"{self.protocol.line(self.units)}; {SIGHT[self.sees_future]}"


@dataclass(frozen=True)
class Cell:
    """A run as its folder tells it."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)  # every value by its dotted key
    state: str = "unknown"  # as `run_state`, or not started
    reason: str = ""
    step: int = 0
    final: Score | None = None
    scores: Sequence[Score] = ()  # of its evaluations: the best checkpoint's last
    baselines: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict
    )  # bits of them, by split and name
    curve: Mapping[int, tuple[float, int]] = field(
        default_factory=dict
    )  # bits and units of validations, by step
    trained: Mapping[int, float] = field(
        default_factory=dict
    )  # seconds of optimizer steps up to validations, by step
    moved: bool = False  # whether it was resumed on another machine, or with other threads
    pace: float | None = (
        None  # steps a second: the median over rows of metrics.jsonl but the first, which warms up
    )
    peak_share: float | None = (
        None  # of the GPU's peak, the median over the same rows; None where none is known
    )
    analyses: Sequence[Mapping[str, Any]] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""

    @property
    def name(self) -> str:
        return shown(self.folder)

    @property
    def seed(self) -> str:
        return str(self.config.get("seed", ""))

    @property
    def data(self) -> Mapping[str, Any]:
        return self.environment.get("data") or {}

    @property
    def command(self) -> str:
        words = shlex.split(self.environment.get("command") or "")
        return shlex.join(["rtx", *words[1:]]) if words else ""


@dataclass
class Collection:
    """All that was found, a line for each thing that is wrong, and the sweeps' own command lines."""

    cells: list[Cell] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def collect(folders: Iterable[Path]) -> Collection:
    """Read every run in these folders: each is a run, or holds runs, or folders of runs."""
    found = Collection()
    pairs = [(run, folder) for folder in folders for run in run_folders(folder)]
    runs = dict.fromkeys(run for run, _ in pairs)
    for root in dict.fromkeys(
        run.parent for run, folder in pairs if run != folder
    ):  # a run alone is no sweep
        read_sweeps(root / "sweeps.jsonl", found)
    unstarted = [cell for cell in found.cells if cell.folder not in runs]
    found.cells = [read_cell(run, found) for run in runs] + unstarted
    return found


def run_folders(folder: Path) -> list[Path]:
    """Return the runs that a folder is, or holds, at most two levels down."""
    for pattern in ("", "*/", "*/*/"):
        runs = sorted({path.parent for name in RECORDS for path in folder.glob(pattern + name)})
        if runs:
            return runs
    return []


def decided(config: Mapping[str, Any], hardware: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the machine has made of keys that were left to it; `hardware` of environment.json says it."""
    compiled = hardware.get("compile", config.get("hardware.compile", False))
    return {
        "hardware.precision": hardware.get("precision", config["hardware.precision"]),
        "hardware.compile": False if compiled == "auto" else compiled,
    }


def read_sweeps(path: Path, found: Collection) -> None:
    """Take from sweeps.jsonl the sweeps' commands, and their cells as not started."""
    rows = sweeps_of(path, found)
    found.commands += dict.fromkeys(row["command"] for row in rows)
    cells = {name: title for row in rows for name, title in row["cells"].items()}
    found.cells += [
        Cell(path.parent / name, state="not started", title=cells[name]) for name in cells
    ]


def sweeps_of(path: Path, found: Collection) -> list[dict[str, Any]]:
    """Return the rows of a sweeps.jsonl, each a command and the titles of its cells by their folders' names."""
    rows = [row for row in read_lines(path, found) if isinstance(row.get("cells"), dict)]
    return [
        row
        for row in rows
        if all(isinstance(text, str) for text in (row.get("command"), *row["cells"].values()))
    ]


def read_cell(folder: Path, found: Collection) -> Cell:
    """Read a run; what cannot be read is told in a line and left out."""
    config = read_config(folder / "config.yaml", found)
    status, environment = (
        read_object(folder / name, found) for name in ("status.json", "environment.json")
    )
    evals, analyses = (
        [
            record
            for path in sorted(folder.glob(f"{kind}/*.json"))
            if (record := read_object(path, found))
        ]
        for kind in ("eval", "analysis")
    )
    rows = read_lines(folder / "metrics.jsonl", found)
    cell = Cell(folder, config, run_state(folder), printable(str(status.get("reason") or "")))
    try:
        found.problems += suspicions(cell)
        if not config or not status or not environment:
            return cell
        if not all(isinstance(environment[key], dict) for key in ("data", "versions")):
            raise TypeError("environment.json")
        final, step = status.get("final"), int(status["step"])  # a run that is at work has none yet
        latest = [
            row for _, row in sorted({(row["step"], row["kind"]): row for row in rows}.items())
        ]
        train_rows = [row for row in latest if row["kind"] == "train"]
        paces = [row["tokens_per_second"] for row in train_rows]
        shares = [row["mfu"] for row in train_rows if row.get("mfu") is not None]
        units = config["trainer.batch_size"] * config["data.length"]
        measured = [(record["split"], record) for record in evals if record["own_data"]] + [
            ("valid", final or {})
        ]
        computed = {**config, **decided(config, environment.get("hardware", {}))}
        return Cell(
            *(folder, computed, cell.state, cell.reason, step),
            final=closing(config, environment["data"], final, step, latest) if final else None,
            scores=sorted(map(evaluated, evals), key=lambda score: (score.best, score.step)),
            baselines={
                split: record["baselines"] for split, record in measured if "baselines" in record
            },
            curve={
                row["step"]: (row["val_bits"], row["val_units"])
                for row in latest
                if row.get("val_bits") is not None
            },
            trained={
                row["step"]: row["train_seconds"]
                for row in latest
                if row.get("train_seconds") is not None
            },
            moved=has_moved(folder, environment),
            pace=statistics.median(paces[1:] or paces) / units if paces else None,
            peak_share=statistics.median(shares[1:] or shares) if shares else None,
            analyses=analyses,
            environment=environment,
        )
    except DAMAGED as error:
        return without_scores(cell, error, found)


def has_moved(folder: Path, environment: Mapping[str, Any]) -> bool:
    """Tell whether a run was resumed on another machine, or with other threads, than it began on."""
    rows = read_lines(folder / "resumes.jsonl", Collection())
    same = [key for key in ("host", "gpu", "threads") if key in environment]
    return any(row[key] != environment[key] for row in rows for key in same if key in row)


def without_scores(cell: Cell, error: Exception, found: Collection) -> Cell:
    found.problems.append(
        f"{cell.name}: its records are damaged ({error!r}); listed without its scores"
    )
    return Cell(cell.folder, cell.config, cell.state, cell.reason)


def evaluated(record: Mapping[str, Any]) -> Score:
    data, split, point = record["data"], record["split"], record["checkpoint"]
    protocol = Protocol(
        *(split, record["mode"], data["unit"]),
        data=data["name"] + ("" if record["own_data"] else " (not the run's own data)"),
        fingerprint=data["fingerprint"],
        length=record["length"],
        stride=record["stride"],
        windows=record["windows"] if record["partial"] else None,
        ablate=record["ablate"],
        stamps=(*stamp_phrases(data.get("stamps", {}), split), *record.get("memory", ())),
    )
    bits, perplexity = float(record[f"bits_per_{data['unit']}"]), record.get("perplexity_per_word")
    sight = bool(record["selection_sees_future"])
    return Score(
        *(protocol, bits, record["units"], sight, point["step"], perplexity),
        best=point["name"] == "best",
        figures=figures_of(record),
        error=record.get("standard_error"),
        windows=record.get("windows"),
    )


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the measures of some data alone that a record holds, by the titles of their columns."""
    keys = ("accuracy", "bits_far_repeated", "far_repeated")
    found = {key.replace("_", " "): record[key] for key in keys if key in record}
    for kind in ("distance", "pairs"):
        shares = record.get(f"accuracy_by_{kind}", {}).items()
        found |= {f"accuracy, {kind} {value}": share for value, (share, _) in shares}
    return found


def closing(
    config: Mapping[str, Any],
    data: Mapping[str, Any],
    final: Mapping[str, Any],
    step: int,
    rows: Sequence[Mapping[str, Any]],
) -> Score:
    """Return the closing score of a run from its status; `rows` of its metrics have the standard error."""
    stamps = [*stamp_phrases(data.get("stamps", {}), "valid"), *memory_phrases(config)]
    where = ("valid", "parallel", final["unit"], data["name"], data["fingerprint"])
    protocol = Protocol(*where, *spans(config), final.get("windows"), stamps=tuple(stamps))
    bits, perplexity = float(final["bits"]), final.get("perplexity_per_word")
    written = [
        row for row in rows if row["kind"] == "final" and row.get("val_bits") == final["bits"]
    ]
    return Score(
        *(protocol, bits, final["units"], looks_ahead(config), step, perplexity),
        figures=figures_of(final),
        error=written[-1].get("val_se") if written else None,
        windows=windows_scored(config, protocol, final["units"]),
    )


def windows_scored(config: Mapping[str, Any], protocol: Protocol, units: int) -> int | None:
    """Return how many windows made a closing score; None of data whose answers alone are scored."""
    if protocol.windows:
        return protocol.windows
    if config["data.name"] in MADE:
        return None
    beyond_first = max(0, units - config["data.length"])
    return 1 + math.ceil(beyond_first / protocol.stride)


def suspicions(cell: Cell) -> list[str]:
    """Return a line for each thing that makes a run other than it seems."""
    rows = read_lines(cell.folder / "resumes.jsonl", Collection())
    if changed := [key for row in rows for key in row["changed"]]:
        return [f"{cell.name}: resumed with other values of {', '.join(dict.fromkeys(changed))}"]
    is_hash = re.fullmatch("[0-9a-f]{12}", cell.folder.name) and cell.config
    values = read_values(cell.folder / "config.yaml") if is_hash else {}
    if is_hash and cell.folder.name not in digests(values):
        return [
            f"{cell.name}: its configuration changed under the sweep; its name is the hash of another"
        ]
    return []


def read_config(path: Path, found: Collection) -> dict[str, Any]:
    """Return a run's values by dotted keys; a key that is newer than the run has its default."""
    try:
        return {key: known.default for key, known in all_fields().items()} | read_values(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        found.problems.append(
            f"{path}: cannot be read ({str(error).splitlines()[0]}); listed without configuration"
        )
        return {}


def read_object(path: Path, found: Collection) -> dict[str, Any]:
    """Return a JSON object; an empty one after a line about why."""
    try:
        return dict(json.loads(read_file(path)))
    except (OSError, *DAMAGED) as error:
        why = (
            "missing"
            if isinstance(error, FileNotFoundError)
            else "cannot be read; half written, or damaged"
        )
        found.problems.append(f"{path}: {why}")
        return {}


def read_lines(path: Path, found: Collection) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, one a line; broken lines are counted, the last one may lack its end."""
    rows, broken, lines = [], 0, []
    try:
        lines = read_file(path).splitlines()
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            found.problems.append(f"{path}: cannot be read ({error.strerror})")
    for line in lines:
        try:
            rows.append(dict(json.loads(line)))
        except DAMAGED:
            broken += 1
    if broken:
        found.problems.append(f"{path}: {broken} broken row{'s' * (broken > 1)} left out")
    return rows
