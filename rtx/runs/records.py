"""The records of a run: a class for each kind of file, which both writers and readers use.

`read_record` and `read_rows` check what a file contains.

Files of a run's folder: status.json (`StatusRecord`), environment.json (`EnvironmentRecord`),
metrics.jsonl (`MetricsRow`), resumes.jsonl (`ResumeRow`), eval/*.json (`EvaluationRecord`),
audit.json (`AuditRecord`), analysis/*.json (`AnalysisFile`). Of a sweep's folder: sweeps.jsonl
(`SweepRow`), bench/steps-*.json (`StepsRecord`). Study files (`rtx.runs.study`) have those of many
runs.

Records of earlier versions have other keys: `older.py` maps them.
"""

import contextlib
import datetime
import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    RootModel,
    Tag,
    ValidationError,
    model_validator,
)

from rtx.disk import Name, open_inside, read_inside
from rtx.errors import UserError, plural
from rtx.runs import older

Kind = TypeVar("Kind", bound="Record | AnalysisFile")
Line = TypeVar("Line", bound="Record")
TAIL_BYTES = 2**16
"""What `last_rows` reads: hundreds of rows of metrics."""
LARGEST_ROWS = 1 << 30
"""The most bytes of a run's metrics that are read whole."""
Number = Annotated[int, Field(gt=-(2**63), lt=2**63)] | float | None
"""A number of a record. Larger integers would overflow in numpy and pandas."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of steps, units, windows or the like."""


def inner_name(name: str) -> str:
    """Return the name of a file or folder inside another; ValueError if it leads elsewhere."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("is not the name of a folder inside another one")
    return name


InnerName = Annotated[str, AfterValidator(inner_name)]
ANALYSES = ("divergence", "patterns", "context", "coverage")
TAGS = ("score", "older", *(f"{name} analysis" for name in ANALYSES))
"""Names of the versions of a closing score, and of the kinds of analyses, in paths of fields."""
TIMED_STEPS: Literal["training steps in turn"] = "training steps in turn"
"""What a `StepsRecord` says it is."""
SECONDS_OF_STEPS = AliasChoices(
    "train/train_seconds", "valid/train_seconds", "valid/final_train_seconds"
)
"""Names of the seconds of optimizer steps, of which a row of metrics has one."""
SIGHT = {True: "selection sees the future", False: "sees no future"}
"""Words for `sees_future`."""
State = Literal["running", "done", "failed", "preempted", "interrupted"]


class Record(BaseModel):
    """A record; unknown keys are left out, unless a class allows them."""

    model_config = ConfigDict(
        extra="ignore", defer_build=True, ser_json_inf_nan="constants", serialize_by_alias=True
    )
    most_bytes: ClassVar[int] = 1 << 20
    """The most bytes of a file with one such record, or of a line with one."""

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Return the record in a line; ValidationError where it is none."""
        return cls.model_validate_json(line)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values, without keys that were never set, or are None."""
        return self.model_dump(exclude_unset=True, exclude_none=True)

    def to_json_with_none(self) -> dict[str, Any]:
        """Return the record as JSON values, without keys that were never set."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


class Protocol(Record):
    """How a score was computed; a table has scores of one protocol alone.

    `windows`: the number of windows of a sample; 0: a sample of unrecorded size; None: all windows.
    `stamps`: what else differs from a plain reading of the split, in words.
    """

    split: str
    mode: str = "parallel"
    unit: str
    data: str
    fingerprint: str
    length: Count
    stride: Count
    windows: Count | None = None
    ablate: str = "none"
    stamps: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))

    @property
    def where(self) -> str:
        """The split, its data, and whether they were streamed, in words."""
        streaming = ", streaming" if self.mode == "streaming" else ""
        return f"{self.split} split of {self.data}{streaming}"

    def line(self, units: int | None = None) -> str:
        """Return the protocol in a line.

        `units` is the number of scored units; None where scores of one line differ in it.
        """
        data = f"data fingerprint {self.fingerprint[:12]}"
        return ", ".join([*self.parts(f"{self.split} of {self.data}", units), data])

    def line_for_run(self, units: int, selection: str, sees_future: bool) -> str:
        """Return the protocol of a score, and the selection, in a line.

        It is printed for one run, so the name of the data is left out unless they are other data.
        """
        place = self.split
        if self.data.endswith(older.FOREIGN):
            name = self.data.removesuffix(older.FOREIGN)
            place += f" of other data than the run's ({name})"
        return f"{', '.join(self.parts(place, units))}; {selection}: {SIGHT[sees_future]}"

    def parts(self, place: str, units: int | None) -> list[str]:
        """Return the parts of a line on the protocol; `place`: the split and its data, in words."""
        scored = f"each {self.unit} scored once"
        if units:
            scored = f"{units:,} {self.unit}s each scored once"
        if self.windows is not None:
            scored += f" (a sample of {self.windows or 'the'} windows)"
        parts = [f"bits/{self.unit} on {place}", scored, *self.stamps]
        parts += [f"windows of {self.length:,}", f"stride {self.stride:,}"]
        parts.append("streaming" if self.mode == "streaming" else "teacher-forced")
        if self.ablate != "none":
            parts.append(f"ablated: {self.ablate}")
        return parts


class DataRecord(Record):
    """The data of a run; other keys describe their source, splits and tokenizer."""

    model_config = ConfigDict(extra="allow")

    name: str
    unit: str
    fingerprint: str
    stamps: dict[str, Any] = {}


class Measures(Record):
    """A score in the measures that its data have beside bits per unit.

    `accuracy_by_*`: accuracy and number of answers by what `Score.accuracies` tells apart.
    `baselines`: bits of simple compressors on the same units, by name.
    """

    accuracy: Number = None
    chance: Number = None
    accuracy_by_distance: dict[str, tuple[float, Count]] = {}
    accuracy_by_depth: dict[str, tuple[float, Count]] = {}
    accuracy_by_hops: dict[str, tuple[float, Count]] = {}
    accuracy_by_pairs: dict[str, tuple[float, Count]] = {}
    bits_far_repeated: Number = None
    far_repeated: Number = None
    bits_per_byte: Number = None
    perplexity_per_word: Number = None
    words: Number = None
    words_are: str = ""
    words_comparable: bool = True
    baselines: dict[str, float] = {}


class ScoreRecord(Measures):
    """A score with its protocol.

    `windows`: the number of scored windows; None: not recorded. `standard_error`: of the bits, over
    windows; None: one window, or not recorded. `selection`: how keys were chosen, in words.
    """

    protocol: Protocol
    bits: FiniteFloat
    units: Count
    windows: Count | None = None
    nats: Number = None
    standard_error: Number = None
    sees_future: bool = False
    selection: str = ""

    @property
    def unit(self) -> str:
        return self.protocol.unit

    @property
    def sample(self) -> int | None:
        """The number of windows of a sample; None: all were scored."""
        return self.protocol.windows

    def line(self) -> str:
        """Return the protocol, and whether the selection could see the future, in a line."""
        return self.protocol.line_for_run(self.units, self.selection, self.sees_future)

    @property
    def sight(self) -> str:
        """Whether the selection could see the future, in words."""
        return SIGHT[self.sees_future]


class OlderFinal(Measures):
    """The closing score of a run of an earlier version, which did not record its protocol."""

    bits: FiniteFloat
    unit: str = "unit"
    units: Count = 0
    windows: Count | None = None

    @property
    def sample(self) -> int | None:
        """The number of windows of a sample; None: all were scored."""
        return self.windows


def time_of(text: str) -> datetime.datetime:
    """Return the time that a record has; ValueError where it is none, or has no time zone."""
    time = datetime.datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return time


def version_of_final(final: Any) -> str:
    """Return the tag of the class that reads a closing score."""
    has_protocol = hasattr(final, "protocol") or (isinstance(final, dict) and "protocol" in final)
    return "score" if has_protocol else "older"


Final = Annotated[
    Annotated[ScoreRecord, Tag("score")] | Annotated[OlderFinal, Tag("older")],
    Discriminator(version_of_final),
]


class BestRecord(Record):
    """The best validation of a run so far; scores of other windows are not compared."""

    bits: FiniteFloat
    step: Count = 0
    windows: Count | None = None

    @property
    def sample(self) -> int | None:
        return self.windows


class StatusRecord(Record):
    """The state and progress of a run. `seconds`: since its first step, over all its processes."""

    state: State
    reason: str | None = None
    step: Count = 0
    steps: Count | None = None
    saved: Count | None = None
    seconds: FiniteFloat = 0.0
    mfu: Number = None
    best: BestRecord | None = None
    final: Final | None = None
    pid: int | None = Field(default=None, gt=0, lt=2**31)
    host: str | None = None
    heartbeat: str = ""

    @model_validator(mode="after")
    def check_running(self) -> "StatusRecord":
        """Raise ValueError for a running state without process, host or heartbeat.

        Runs are ordered by their heartbeats, so that one that is no time is refused in any state.
        """
        if self.state == "running" and (self.pid is None or self.host is None):
            raise ValueError("a running process needs pid and host")
        if self.state == "running" or self.heartbeat:
            time_of(self.heartbeat)
        return self


class EnvironmentRecord(Record):
    """Software, machine, code and command at the first step of a run.

    `threads`: of each process. `hardware`: the fields of `rtx.training.hardware.Hardware`.
    """

    model_config = ConfigDict(extra="allow")

    time: str = ""
    command: str = ""
    host: str | None = None
    python: str = ""
    versions: dict[str, str | None]
    git: dict[str, str | None] = {}
    threads: Count | None = None
    gpu: str | None = None
    hardware: dict[str, Any] = {}
    data: DataRecord
    parameters: Count | None = None
    extensions: dict[str, str] = {}


class ResumeRow(Record):
    """A line of resumes.jsonl: the environment of a resume. `changed`: old and new value by key."""

    model_config = ConfigDict(extra="allow")

    changed: dict[str, Any] = {}
    host: str | None = None
    gpu: str | None = None
    threads: Count | None = None


class MetricsRow(Record):
    """A line of metrics.jsonl: metrics by name, such as `train/bits`, after `step` optimizer steps.

    After a resume a file may have several rows of one step and kind: the last one counts.
    """

    model_config = ConfigDict(extra="allow")
    # As in the documentation of pydantic.
    __pydantic_extra__: dict[str, Number]  # pyright: ignore[reportIncompatibleVariableOverride]

    step: Count
    time: str = ""

    @model_validator(mode="before")
    @classmethod
    def map_older(cls, row: Any) -> Any:
        return older.metrics_row(row)

    @property
    def metrics(self) -> dict[str, Number]:
        """Numbers by name; None: not finite."""
        return self.__pydantic_extra__

    @functools.cached_property
    def kind(self) -> str:
        """`train`, `valid`, or `final` for the closing validation."""
        return older.kind_of(self.metrics)

    def get(self, name: str) -> Number:
        """Return a number, None where the row has none of this name."""
        return self.metrics.get(name)


class CurveRow(Record):
    """What a report reads of a line of metrics.jsonl; it checks no other number of the line.

    Reports read millions of lines, and a `MetricsRow` takes three times as long.
    """

    step: Count
    valid_bits: Number = Field(default=None, alias="valid/bits")
    final_bits: Number = Field(default=None, alias="valid/final_bits")
    final_standard_error: Number = Field(default=None, alias="valid/final_standard_error")
    seconds: Number = Field(default=None, validation_alias=SECONDS_OF_STEPS)
    tokens_per_second: Number = Field(default=None, alias="train/tokens_per_second")
    mfu: Number = Field(default=None, alias="train/mfu")

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        # A validator that maps the keys of earlier versions would double the time.
        if older.MARK_OF_EARLIER_ROW in line:
            return cls.of(MetricsRow.model_validate_json(line))
        return cls.model_validate_json(line)

    @classmethod
    def of(cls, row: MetricsRow) -> Self:
        """Return the part of a row."""
        return cls.model_validate({"step": row.step, **row.metrics})

    @property
    def kind(self) -> str:
        """`train`, `valid`, or `final` for the closing validation."""
        present = self.model_fields_set
        if "final_bits" in present:
            return "final"
        return "valid" if "valid_bits" in present else "train"


class CheckpointRecord(Record):
    """Which weights were scored: best, last or previous, and after how many steps."""

    name: str
    step: Count


class EvaluationRecord(ScoreRecord):
    """A score by `rtx eval`, a file of eval/.

    `trained_length`: units of a sequence of training, where windows may have another length.
    """

    checkpoint: CheckpointRecord
    data: DataRecord
    own_data: bool
    precision: str = ""
    read_as: str = "whole"
    trained_length: Count | None = None
    seed: Count | None = None
    split_units: Count | None = None
    memory: tuple[str, ...] = ()
    seconds: Number = None
    time: str = ""

    @model_validator(mode="before")
    @classmethod
    def map_older(cls, record: Any) -> Any:
        return older.evaluation(record)


class MovesRow(Record):
    """How far the outputs of a group of heads, or the logits, move when later units change.

    `largest`: the largest relative change. `moved`: the share of prefixes at which they move by
    more than the tolerance. The logits have the layer "".
    """

    layer: Count | str
    heads: str
    largest: float
    moved: float


class ModeAudit(Record):
    """Whether a model sees the future in one mode, and in which layers and heads that arises.

    `repeat`: the largest relative change of the logits when nothing changes.
    """

    sees_future: bool
    arises_in: list[tuple[Count | str, str]]
    repeat: float
    rows: list[MovesRow]


class ChangesRecord(Record):
    """What moves when all units behind prefixes of these lengths change."""

    sequences: Count
    length: Count
    prefixes: list[Count]
    tolerance: float
    teacher_forced: ModeAudit = Field(alias="teacher-forced")
    streaming: ModeAudit


class ChoiceRow(Record):
    """What trains the choice of keys of a group of heads, and whether it does.

    `gradient`: its norm; None: nothing trains the choice, or the norm is not finite.
    """

    layer: Count
    heads: str
    trained_by: str
    gradient: float | None = None
    missing: bool


class DifferenceRow(Record):
    """A difference of two readings in bits, with standard errors; None: of a single value."""

    bits: float
    over_positions: float | None = None
    over_windows: float | None = None


class PriceRecord(Record):
    """The bits of units in several readings. `positions`: those scored, of each window."""

    unit: str
    split: str
    windows: Count
    positions: list[list[Count]]
    length: Count
    precision: str
    data: DataRecord
    bits: dict[str, float]
    leak_gives: DifferenceRow
    competing_costs: DifferenceRow
    together: DifferenceRow

    @model_validator(mode="before")
    @classmethod
    def map_older(cls, record: Any) -> Any:
        return older.price(record)


class AuditRecord(Record):
    """audit.json: by `rtx audit`, whether outputs move with the future, and their price in bits."""

    run: str
    checkpoint: CheckpointRecord
    seed: Count
    time: str
    changes: ChangesRecord
    choices: list[ChoiceRow]
    price: PriceRecord


class KindRow(Record):
    """The divergence of pairs of heads of two kinds in nats: of each draw, mean and deviation."""

    kind: tuple[str, str]
    mean: float
    deviation: float
    nats_R: list[float] = []


class DivergenceRow(KindRow):
    """The divergence in a layer. `share`: of the positions at which both heads read something."""

    layer: Count
    share: float | None = None


class PositionRow(Record):
    """The bits of the positions `first` to `last` of windows, with their standard error."""

    first: Count
    last: Count
    bits: float
    error: float | None = None


class GainRow(Record):
    """The bits of units with `context` other ones before them, and what a whole window gains."""

    context: tuple[Count, Count]
    bits: float
    error: float | None = None
    gain: float
    gain_error: float | None = None


class HeadRow(Record):
    """What a head reads, on average over the share of positions at which it reads anything.

    None: it reads nothing. `rtx.analysis.attention_weights.summary` says what they are.
    """

    layer: Count
    head: Count
    pattern: str
    reads_share: float
    keys: float | None = None
    distance: float | None = None
    farthest: Count | None = None
    self_weight: float | None = None


class RetainedPoint(Record):
    """The share of far weight that a selection retains with some keys, and of all weight."""

    keys: float
    share: float
    error: float | None = None
    of_all: float = Field(alias="of all")


class SelectionRow(RetainedPoint):
    """What a selection retains; further keys are the shares of layers. `curve`: by keys."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float]  # pyright: ignore[reportIncompatibleVariableOverride]

    selection: str
    curve: list[RetainedPoint]


class AnalysisRecord(Record):
    """What all files of analysis/ have, beside `what`, the name of the analysis.

    `analyze`: the options of the analysis. Other analyses than divergence have no `layers`, and
    others than context no `positions`.
    """

    checkpoint: CheckpointRecord
    data: DataRecord
    length: Count | None = None
    analyze: dict[str, Any] = {}
    time: str = ""
    layers: list[DivergenceRow] = []
    positions: list[PositionRow] = []

    @model_validator(mode="before")
    @classmethod
    def map_older(cls, record: Any) -> Any:
        return older.analysis(record)


class DivergenceRecord(AnalysisRecord):
    """By `rtx analyze divergence`: how far apart the heads of each layer read."""

    what: Literal["divergence"]
    layers: list[DivergenceRow] = Field()
    over_layers: list[KindRow] = []


class PatternsRecord(AnalysisRecord):
    """By `rtx analyze patterns`: what the heads of a layer read in the units from `start` on."""

    what: Literal["patterns"]
    start: Count | None = None
    units: Count | None = None
    heads: list[HeadRow] = []


class ContextRecord(AnalysisRecord):
    """By `rtx analyze context`: loss by position, and what units gain from farther context."""

    what: Literal["context"]
    unit: str = ""
    positions: list[PositionRow] = Field()
    gains: list[GainRow] = []
    windows: Count | None = None
    protocol: Protocol | None = None


class CoverageRecord(AnalysisRecord):
    """By `rtx analyze coverage`: what selections retain of the weight of full heads.

    `beyond`: the share of their weight beyond the local window: its mean, error, and by layers.
    """

    what: Literal["coverage"]
    window: Count
    keys: Count
    block: Count
    beyond: dict[str, float | None]
    rows: list[SelectionRow]


def tag_of_analysis(record: Any) -> str:
    """Return the tag of the class that reads a file of analysis/."""
    what = older.json_object(record).get("what") or getattr(record, "what", None)
    return f"{what} analysis"


class AnalysisFile(RootModel[Any]):
    """A file of analysis/, read by the class of its analysis."""

    model_config = ConfigDict(defer_build=True, ser_json_inf_nan="constants")
    most_bytes: ClassVar[int] = 1 << 26

    root: Annotated[
        Annotated[DivergenceRecord, Tag("divergence analysis")]
        | Annotated[PatternsRecord, Tag("patterns analysis")]
        | Annotated[ContextRecord, Tag("context analysis")]
        | Annotated[CoverageRecord, Tag("coverage analysis")],
        Discriminator(tag_of_analysis),
    ]


class SweepRow(Record):
    """A line of sweeps.jsonl: a command, and the titles of its cells by folder name."""

    time: str = ""
    command: str
    cells: dict[InnerName, str]


class StepsRow(Record):
    """A timed configuration: milliseconds of a step in each turn, or the reason for none."""

    config: dict[str, Any]
    ms_turns: list[Annotated[float, Field(gt=0)]]
    reason: str | None = None
    parameters: Count | None = None


class BenchRecord(Record):
    """How steps were timed."""

    model_config = ConfigDict(extra="allow")

    per_turn: Count
    warmup: Count


class StepsRecord(Record):
    """bench/steps-*.json: training steps of several configurations, timed in turn."""

    model_config = ConfigDict(extra="allow")
    most_bytes: ClassVar[int] = 1 << 26

    what: Literal["training steps in turn"] = TIMED_STEPS
    bench: BenchRecord
    device: str
    ids: str
    time: str
    command: str | None = None
    rows: list[StepsRow]


def read_record(kind: type[Kind], folder: Path, name: Name, problems: list[str]) -> Kind | None:
    """Return the record in a file; None, with a line added to `problems`, if it is unreadable."""
    path = folder / name
    try:
        return kind.model_validate_json(read_inside(folder, name, kind.most_bytes))
    except FileNotFoundError:
        problems.append(f"{path}: missing")
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror})")
    except ValidationError as error:
        problems.append(f"{path}: {fault_of(error)}")
    except UserError as error:
        problems.append(str(error))
    return None


def read_rows(kind: type[Line], folder: Path, name: Name, problems: list[str]) -> list[Line]:
    """Return the records of a file with one a line, see `each_row`."""
    return list(each_row(kind, folder, name, problems))


def each_row(kind: type[Line], folder: Path, name: Name, problems: list[str]) -> Iterator[Line]:
    """Yield the records of a file with one a line; broken lines are left out, and counted.

    The last line of a run that was killed may lack its end. A file that is missing has no lines.
    Nothing behind a line that is too long is read.
    """
    try:
        with open_inside(folder, name) as file:
            yield from parsed(kind, file, problems)
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{folder / name}: cannot be read ({error.strerror})")
    except UserError as error:
        problems.append(str(error))


def parsed(kind: type[Line], file: BinaryIO, problems: list[str]) -> Iterator[Line]:
    """Yield the records in the lines of an open file, see `each_row`."""
    path = file.name
    longest = kind.most_bytes
    number = 0
    faults = 0
    first_fault = ""
    while line := file.readline(longest + 1):
        number += 1
        if len(line) > longest:
            problems.append(f"{path}: line {number} is longer than {longest:,} bytes")
            break
        try:
            yield kind.from_line(line)
        except ValidationError as error:
            faults += 1
            first_fault = first_fault or f"line {number}: {fault_of(error)}"
    if faults:
        problems.append(f"{path}: {plural(faults, 'broken row')} left out ({first_fault})")


def last_rows(kind: type[Kind], folder: Path, name: Name) -> list[Kind]:
    """Return the records in the last TAIL_BYTES of a file with one a line; broken lines are left
    out.
    """
    content = b""
    with contextlib.suppress(OSError, UserError), open_inside(folder, name) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        content = file.read(TAIL_BYTES)
    rows: list[Kind] = []
    for line in content.splitlines():
        with contextlib.suppress(ValidationError):
            rows.append(kind.model_validate_json(line))
    return rows


def fault_of(error: ValidationError) -> str:
    """Return the first fault of a record: which field, and what it should be."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return "cannot be read; half written, or damaged"
    parts = [str(part) for part in first["loc"] if part not in TAGS]
    field = ".".join(parts)
    if field:
        return f"{field} is damaged: {first['msg']}"
    return f"is damaged: {first['msg']}"


def finite(value: Any) -> Any:
    """Return a number as JSON has it: None in place of one that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
