"""The records of many runs: from their folders, or in a study file, which has a line for each run.

Reports read both. Nothing here imports torch.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from pydantic import ConfigDict, Field, Json, TypeAdapter, ValidationError

from rtx.disk import names_inside, open_named, read_inside, write_inside
from rtx.errors import UserError
from rtx.runs.folder import ENVIRONMENT, METRICS, RESUMES, SWEEPS
from rtx.runs.older import MARK_OF_EARLIER_ROW
from rtx.runs.pretrained_record import PretrainedRecord, pretrained_files
from rtx.runs.records import (
    AnalysisFile,
    CurveRow,
    EnvironmentRecord,
    EvaluationRecord,
    Kind,
    MetricsRow,
    Record,
    ResumeRow,
    StatusRecord,
    StepsRecord,
    SweepRow,
    each_row,
    parsed,
    read_record,
    read_rows,
)
from rtx.runs.status import read_status
from rtx.settings.run_values import LARGEST_CONFIG, RUN_CONFIG

Row = TypeVar("Row", MetricsRow, CurveRow)
STUDY_SUFFIX = ".jsonl"
MOST_ROWS = 2**16
"""Rows of a kind that are kept of a run's metrics; with trainer.log_every=10 of 655,360 steps."""
SMALL_CURVE = 1 << 24
"""The most bytes of a run's metrics whose lines are checked in one call."""
CURVE_LINES = TypeAdapter(list[Json[CurveRow]], config=ConfigDict(defer_build=True))
"""Reads lines of metrics.jsonl."""


class StudyLine(Record):
    """A line of a study file: the records of one run, one sweep, one timing or one text.

    The text is one that a pretrained model was analyzed on.

    `run`: the name of its folder; `config`: the text of its config.yaml.
    """

    most_bytes: ClassVar[int] = 1 << 30

    run: str | None = None
    config: str = ""
    status: StatusRecord | None = None
    environment: EnvironmentRecord | None = None
    metrics: list[MetricsRow] = Field(default_factory=list[MetricsRow])
    resumes: list[ResumeRow] = Field(default_factory=list[ResumeRow])
    evaluations: list[EvaluationRecord] = Field(default_factory=list[EvaluationRecord])
    analyses: list[AnalysisFile] = Field(default_factory=list[AnalysisFile])
    sweep: SweepRow | None = None
    steps: StepsRecord | None = None
    pretrained: PretrainedRecord | None = None


def is_study(place: Path) -> bool:
    """Tell whether a path is a study file and no folder of runs."""
    return place.suffix == STUDY_SUFFIX and place.is_file()


def read_run(folder: Path, problems: list[str]) -> StudyLine:
    """Return the records of a run; `problems` gets a line for each that cannot be read."""
    line = read_all_but_metrics(folder, problems)
    line.metrics = thinned(each_row(MetricsRow, folder, METRICS, problems))
    return line


def read_curve(folder: Path, problems: list[str]) -> list[CurveRow]:
    """Return what a report reads of the metrics of a run."""
    rows = read_small_curve(folder)
    if rows is None:
        return thinned(each_row(CurveRow, folder, METRICS, problems))
    return thinned(rows) if len(rows) > MOST_ROWS else rows


def read_small_curve(folder: Path) -> list[CurveRow] | None:
    """Return the rows of a file of at most SMALL_CURVE bytes, validated in one call.

    That takes half the time of a call for each line. None if the file cannot be read, is larger,
    has rows of an earlier version, or has a line that is too long or invalid: `read_curve` then
    reads line by line, and reports the first bad line.
    """
    try:
        content = read_inside(folder, METRICS, SMALL_CURVE)
    except (OSError, UserError):
        return None
    if MARK_OF_EARLIER_ROW in content:
        return None
    lines = content.removesuffix(b"\n").split(b"\n")
    if max(map(len, lines)) >= CurveRow.most_bytes:
        return None
    try:
        return CURVE_LINES.validate_python(lines)
    except ValidationError:
        return None


def read_all_but_metrics(folder: Path, problems: list[str]) -> StudyLine:
    """Return the other records of a run, see `read_run`."""
    try:
        config = read_inside(folder, RUN_CONFIG, LARGEST_CONFIG).decode()
    except (OSError, UnicodeDecodeError):
        config = ""
    except UserError as error:
        problems.append(str(error))
        config = ""
    return StudyLine(
        run=folder.name,
        config=config,
        status=read_status(folder, problems),
        environment=read_record(EnvironmentRecord, folder, ENVIRONMENT, problems),
        resumes=read_rows(ResumeRow, folder, RESUMES, problems),
        evaluations=read_all(EvaluationRecord, folder, "eval", problems),
        analyses=read_all(AnalysisFile, folder, "analysis", problems),
    )


def thinned(rows: Iterable[Row]) -> list[Row]:
    """Return rows of metrics: all, or of a kind with more than MOST_ROWS one in 2, 4, 8, ...

    The last row of each kind is always among them.
    """
    kinds: dict[str, ThinnedKind[Row]] = {}
    for row in rows:
        kind = row.kind
        if kind not in kinds:
            kinds[kind] = ThinnedKind()
        kinds[kind].add(row)
    chosen: list[Row] = []
    for kind in kinds.values():
        chosen += kind.rows()
    return chosen


class ThinnedKind(Generic[Row]):
    """At most MOST_ROWS rows of a kind, evenly from those that were added, and the last one."""

    def __init__(self) -> None:
        self.chosen: list[Row] = []
        self.every = 1
        self.added = 0
        self.last: Row | None = None

    def add(self, row: Row) -> None:
        self.last = row
        if self.added % self.every == 0:
            self.chosen.append(row)
        self.added += 1
        if len(self.chosen) > MOST_ROWS:
            self.chosen = self.chosen[::2]
            self.every *= 2

    def rows(self) -> list[Row]:
        if self.last is None or self.chosen[-1] is self.last:
            return self.chosen
        return [*self.chosen, self.last]


def read_all(kind: type[Kind], folder: Path, inner: str, problems: list[str]) -> list[Kind]:
    """Return the records of the *.json of a folder in the folder of a run, in order of names."""
    try:
        names = names_inside(folder, inner, "*.json")
    except (OSError, UserError) as error:
        problems.append(str(error))
        return []
    records: list[Kind] = []
    for name in names:
        record = read_record(kind, folder, f"{inner}/{name}", problems)
        if record is not None:
            records.append(record)
    return records


def read_sweeps(folder: Path, problems: list[str]) -> list[SweepRow]:
    """Return the sweeps of a folder, the oldest first."""
    return read_rows(SweepRow, folder, SWEEPS, problems)


def steps_files(folder: Path) -> list[Path]:
    """Return the records of timed steps in a folder, or in a folder of it."""
    here = folder.glob("bench/steps-*.json")
    return sorted([*here, *folder.glob("*/bench/steps-*.json")])


def read_steps(folder: Path, problems: list[str]) -> list[StepsRecord]:
    """Return the records of timed steps in a folder, or in a folder of it."""
    records: list[StepsRecord] = []
    for path in steps_files(folder):
        place = path.parents[1]
        record = read_record(StepsRecord, place, path.relative_to(place), problems)
        if record is not None:
            records.append(record)
    return records


def read_pretrained(folder: Path, problems: list[str]) -> list[PretrainedRecord]:
    """Return the records of pretrained models in a folder, the oldest first."""
    records: list[PretrainedRecord] = []
    for path in pretrained_files(folder):
        record = read_record(PretrainedRecord, path.parent, path.name, problems)
        if record is not None:
            records.append(record)
    return sorted(records, key=lambda record: record.time)


def read_study(path: Path, problems: list[str]) -> list[StudyLine]:
    """Return the lines of a study file."""
    try:
        with open_named(path) as file:
            return list(parsed(StudyLine, file, problems))
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror})")
        return []


def write_study(path: Path, lines: Iterable[StudyLine]) -> None:
    """Replace a study file."""
    text = "".join(f"{line.model_dump_json(exclude_defaults=True)}\n" for line in lines)
    write_inside(path.parent, path.name, text.encode())
