"""Runs read for a report, from their folders or from study files, without torch.

What is missing or damaged is left out, with a line for each in `Collection.problems`.
"""

import os
import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rtx.errors import printable
from rtx.evaluation.protocol import with_protocol
from rtx.runs.folder import run_folders, shown
from rtx.runs.pretrained_record import PretrainedRecord
from rtx.runs.records import (
    AnalysisRecord,
    CurveRow,
    EnvironmentRecord,
    EvaluationRecord,
    Measures,
    OlderFinal,
    Protocol,
    ResumeRow,
    ScoreRecord,
    StepsRecord,
    SweepRow,
)
from rtx.runs.status import state_of
from rtx.runs.study import (
    StudyLine,
    is_study,
    read_all_but_metrics,
    read_curve,
    read_pretrained,
    read_steps,
    read_study,
    read_sweeps,
)
from rtx.settings.identity import digest, digests
from rtx.settings.run_values import RUN_CONFIG, values_of
from rtx.settings.schema import all_fields

NOT_STARTED = "not started"
"""The state of a run that a sweep has yet to begin."""


@dataclass(frozen=True)
class Score:
    """A score of a run: its record, and of which weights it is.

    `best`: whether they are the best checkpoint's.
    """

    record: ScoreRecord
    step: int
    best: bool = False

    @property
    def figures(self) -> dict[str, float]:
        """Measures of some data alone, by the titles of their columns."""
        return figures_of(self.record)

    @property
    def protocol(self) -> Protocol:
        return self.record.protocol

    @property
    def bits(self) -> float:
        return self.record.bits

    @property
    def units(self) -> int:
        return self.record.units

    @property
    def sees_future(self) -> bool:
        return self.record.sees_future

    @property
    def perplexity(self) -> float | None:
        """Per word, where the data have a count of words."""
        return self.record.perplexity_per_word

    @property
    def error(self) -> float | None:
        """The standard error of the bits over the windows; None: not recorded, or one window."""
        return self.record.standard_error

    @property
    def windows(self) -> int | None:
        """How many windows were scored; None: not known."""
        return self.record.windows

    def line(self) -> str:
        """Return the protocol of the score, and what its selection sees."""
        return f"{self.protocol.line(self.units)}; {self.record.sight}"


@dataclass(frozen=True)
class Cell:
    """A run as its records have it.

    Args:
        folder: where it is; of a run in a study file, where its folder would be.
        config: every value by its dotted key; empty where it cannot be read.
        state: see `run_state`, or `NOT_STARTED`.
        scores: of its evaluations, the best checkpoint's last.
        baselines: bits of simple compressors, by split and name.
        curve: bits of validations, by step.
        trained: seconds of optimizer steps up to validations, by step.
        moved: whether it was resumed on another machine, or with other threads.
        pace: steps a second, the median over the rows of metrics.jsonl but the first.
        peak_share: of the GPU's peak, the median over the same rows; None where it is not known.
    """

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    state: str = "unknown"
    reason: str = ""
    step: int = 0
    final: Score | None = None
    scores: Sequence[Score] = ()
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    curve: Mapping[int, float] = field(default_factory=dict)
    trained: Mapping[int, float] = field(default_factory=dict)
    moved: bool = False
    pace: float | None = None
    peak_share: float | None = None
    analyses: Sequence[AnalysisRecord] = ()
    environment: EnvironmentRecord | None = None
    title: str = ""

    @property
    def name(self) -> str:
        return shown(self.folder)

    @property
    def seed(self) -> str:
        return str(self.config.get("seed", ""))

    @property
    def fingerprint(self) -> str | None:
        """That of its data, None where it is not known."""
        return self.environment.data.fingerprint if self.environment else None

    @property
    def command(self) -> str:
        """Return the command that began it, with `rtx` for whatever program it was."""
        command = self.environment.command if self.environment else ""
        try:
            words = shlex.split(command)
        except ValueError:
            # A quote without its end: no rtx wrote that.
            words = command.split()
        return shlex.join(["rtx", *words[1:]]) if words else ""


@dataclass
class Collection:
    """All that was read.

    These are runs, timed steps, texts that pretrained models were analyzed on, the sweeps'
    commands, and a line for each problem.
    """

    cells: list[Cell] = field(default_factory=list)
    steps: list[StepsRecord] = field(default_factory=list)
    pretrained: list[PretrainedRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def collect(places: Iterable[Path]) -> Collection:
    """Read study files and folders; a folder is a run, or has runs, or folders of runs."""
    collection = Collection()
    for place in dict.fromkeys(places):
        if is_study(place):
            add_study(place, collection)
        else:
            add_folder(place, collection)
    collection.cells.sort(key=lambda cell: cell.state == NOT_STARTED)
    collection.steps.sort(key=lambda record: record.time, reverse=True)
    return collection


def add_study(path: Path, collection: Collection) -> None:
    """Add the runs, sweeps, timed steps and pretrained models of a study file."""
    root = path.with_suffix("")
    sweeps = []
    for line in read_study(path, collection.problems):
        if line.run is not None:
            rows = [CurveRow.of(row) for row in line.metrics]
            collection.cells.append(cell_of(line, rows, root / line.run, collection.problems))
        if line.sweep is not None:
            sweeps.append(line.sweep)
        if line.steps is not None:
            collection.steps.append(line.steps)
        if line.pretrained is not None:
            collection.pretrained.append(line.pretrained)
    add_sweeps(root, sweeps, collection)


def add_folder(folder: Path, collection: Collection) -> None:
    """Add the runs, sweeps, timed steps and pretrained models of a folder.

    Runs that were added before are left out.
    """
    collection.steps += read_steps(folder, collection.problems)
    collection.pretrained += read_pretrained(folder, collection.problems)
    runs = run_folders(folder)
    added = {cell.folder for cell in collection.cells}
    for run in runs:
        if run not in added:
            line = read_all_but_metrics(run, collection.problems)
            rows = read_curve(run, collection.problems)
            collection.cells.append(cell_of(line, rows, run, collection.problems))
    # A run alone is no sweep.
    for root in dict.fromkeys(run.parent for run in runs if run != folder):
        add_sweeps(root, read_sweeps(root, collection.problems), collection)


def add_sweeps(root: Path, rows: Sequence[SweepRow], collection: Collection) -> None:
    """Add the commands of sweeps, and their runs that have not started."""
    collection.commands += dict.fromkeys(row.command for row in rows)
    started = {cell.folder for cell in collection.cells}
    titles: dict[Path, str] = {}
    for row in rows:
        titles |= {root / name: title for name, title in row.cells.items()}
    for folder, title in titles.items():
        if folder not in started:
            collection.cells.append(Cell(folder, state=NOT_STARTED, title=title))


def cell_of(
    line: StudyLine, metrics: Sequence[CurveRow], folder: Path, problems: list[str]
) -> Cell:
    """Return a run from its records; `problems` gets a line for each that is damaged.

    `metrics`: its rows of metrics, in place of those of `line`.
    """
    values = recorded_values(line.config, folder, problems)
    config = with_defaults(values)
    state = state_of(line.status)
    reason = printable(line.status.reason or "") if line.status else ""
    problems += suspicions(line.resumes, values, folder)
    if not config or line.status is None or line.environment is None:
        return Cell(folder, config, state, reason)
    rows = latest_rows(metrics)
    final = None
    if line.status.final is not None:
        record = closing(line.status.final, config, line.environment, rows)
        final = Score(record, line.status.step)
    scores = [evaluated(record) for record in line.evaluations]
    curve, trained = validations(rows)
    pace, peak_share = speed_of(rows, config)
    return Cell(
        folder,
        {**config, **decided(config, line.environment)},
        state,
        reason,
        line.status.step,
        final=final,
        scores=sorted(scores, key=lambda score: (score.best, score.step)),
        baselines=baselines_of(line.evaluations, final),
        curve=curve,
        trained=trained,
        moved=has_moved(line.resumes, line.environment),
        pace=pace,
        peak_share=peak_share,
        analyses=[file.root for file in line.analyses],
        environment=line.environment,
    )


def recorded_values(text: str, folder: Path, problems: list[str]) -> dict[str, Any]:
    """Return the values in a run's config.yaml by dotted keys, {} where it cannot be read."""
    try:
        return values_of(text)
    except (ValueError, yaml.YAMLError) as error:
        why = str(error).splitlines()[0]
        path = folder / RUN_CONFIG
        problems.append(f"{path}: cannot be read ({why}); listed without configuration")
        return {}


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's values; a key that is newer than the run has its default."""
    if not values:
        return {}
    defaults = {key: known.default for key, known in all_fields().items()}
    return {**defaults, **values}


def decided(config: Mapping[str, Any], environment: EnvironmentRecord) -> dict[str, Any]:
    """Return what the machine made of keys that were left to it."""
    hardware = environment.hardware
    compiled = hardware.get("compile", config.get("hardware.compile", False))
    if compiled == "auto":
        compiled = False
    precision = hardware.get("precision", config["hardware.precision"])
    return {"hardware.precision": precision, "hardware.compile": compiled}


def suspicions(resumes: Sequence[ResumeRow], values: Mapping[str, Any], folder: Path) -> list[str]:
    """Return a line for each thing that makes a run other than it seems.

    `values`: those in its config.yaml.
    """
    keys: list[str] = []
    for row in resumes:
        keys += row.changed
    if keys:
        changed = ", ".join(dict.fromkeys(keys))
        return [f"{shown(folder)}: resumed with other values of {changed}"]
    if not values or not re.fullmatch("[0-9a-f]{12}", folder.name):
        return []
    # The former names are computed only for the few runs that need them.
    if folder.name == digest(values) or folder.name in digests(values) or has_short_path(values):
        return []
    other = "its name is the hash of another"
    return [f"{shown(folder)}: its configuration changed under the sweep; {other}"]


def has_short_path(values: Mapping[str, Any]) -> bool:
    """Whether only the last name of data.path is recorded, as in study files.

    The hash of the configuration covers the whole path.
    """
    path = values.get("data.path")
    return path is not None and not os.path.isabs(path)


def latest_rows(rows: Sequence[CurveRow]) -> list[CurveRow]:
    """Return the last row of each step and kind: a run that was resumed has written some twice."""
    latest = {(row.step, row.kind): row for row in rows}
    return [latest[key] for key in sorted(latest)]


def validations(rows: Sequence[CurveRow]) -> tuple[dict[int, float], dict[int, float]]:
    """Return bits of validations, and seconds of optimizer steps, by step."""
    curve = {}
    trained = {}
    for row in rows:
        for bits in (row.valid_bits, row.final_bits):
            if bits is not None:
                curve[row.step] = bits
        if row.seconds is not None:
            trained[row.step] = row.seconds
    return curve, trained


def speed_of(
    rows: Sequence[CurveRow], config: Mapping[str, Any]
) -> tuple[float | None, float | None]:
    """Return steps a second, and the share of the GPU's peak; None where they are not recorded."""
    paces = [row.tokens_per_second for row in rows if row.tokens_per_second is not None]
    shares = [row.mfu for row in rows if row.mfu is not None]
    units = config["trainer.batch_size"] * config["data.length"]
    pace = usual(paces)
    return None if pace is None else pace / units, usual(shares)


def usual(numbers: Sequence[float]) -> float | None:
    """Return the median of numbers but the first, which is of the steps that warm up."""
    if not numbers:
        return None
    return statistics.median(numbers[1:] or numbers)


def has_moved(rows: Sequence[ResumeRow], environment: EnvironmentRecord) -> bool:
    """Tell whether a run was resumed on another machine than its first, or with other threads."""
    for row in rows:
        for name in row.model_fields_set & {"host", "gpu", "threads"}:
            is_recorded = name in environment.model_fields_set
            if is_recorded and getattr(row, name) != getattr(environment, name):
                return True
    return False


def evaluated(record: EvaluationRecord) -> Score:
    """Return the score of an evaluation."""
    is_best = record.checkpoint.name == "best"
    return Score(record, record.checkpoint.step, is_best)


def closing(
    final: ScoreRecord | OlderFinal,
    config: Mapping[str, Any],
    environment: EnvironmentRecord,
    rows: Sequence[CurveRow],
) -> ScoreRecord:
    """Return the closing score of a run with its protocol."""
    if isinstance(final, ScoreRecord):
        return final
    error = None
    for row in rows:
        if row.final_bits == final.bits:
            error = row.final_standard_error
    return with_protocol(final, config, environment.data, error)


def baselines_of(
    evaluations: Sequence[EvaluationRecord], final: Score | None
) -> dict[str, Mapping[str, float]]:
    """Return the bits of simple compressors on the run's own data, by split."""
    baselines: dict[str, Mapping[str, float]] = {}
    for record in evaluations:
        if record.own_data and record.baselines:
            baselines[record.protocol.split] = record.baselines
    if final is not None and final.record.baselines:
        baselines["valid"] = final.record.baselines
    return baselines


def figures_of(measures: Measures) -> dict[str, float]:
    """Return the measures of some data alone, by the titles of their columns."""
    figures = {}
    for name in ("accuracy", "bits_far_repeated", "far_repeated"):
        value = getattr(measures, name)
        if value is not None:
            figures[name.replace("_", " ")] = value
    for value, (share, _) in measures.accuracy_by_distance.items():
        figures[f"accuracy, distance {value}"] = share
    if len(measures.accuracy_by_depth) > 1:
        for value, (share, _) in measures.accuracy_by_depth.items():
            figures[f"accuracy, depth {value}%"] = share
    if len(measures.accuracy_by_hops) > 1:
        for value, (share, _) in measures.accuracy_by_hops.items():
            figures[f"accuracy, hops {value}"] = share
    for value, (share, _) in measures.accuracy_by_pairs.items():
        figures[f"accuracy, pairs {value}"] = share
    return figures
