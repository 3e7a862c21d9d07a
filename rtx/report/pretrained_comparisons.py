"""Records of `rtx analyze pretrained` that are compared with each other.

Records of one model with equal settings make a `Comparison` of the choices that were measured on
all their texts: the windows of the texts are pooled. A text with further choices has a comparison
of its own.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rtx.errors import plural
from rtx.report.ranking import Values, half_interval, mean
from rtx.runs.pretrained_record import PretrainedRecord, SelectionCostRow

LISTS = ("selection", "keys", "per", "rotary", "dense_layers")
"""Options that say which choices are compared, not how."""
LOCAL = "none"
"""The selection without further keys."""


@dataclass(frozen=True)
class ChoiceName:
    """The name of a choice in tables: its selection with variants, and its further keys."""

    label: str
    k: int

    def __str__(self) -> str:
        return f"{self.label}, k = {self.k}"


@dataclass
class ChoiceCost:
    """The rows of one choice on the texts on which it was measured."""

    rows: dict[str, SelectionCostRow] = field(default_factory=dict)
    """A row by the name of its text."""

    @property
    def row(self) -> SelectionCostRow:
        """One of the rows, for what they have in common."""
        return next(iter(self.rows.values()))

    @property
    def has_further_keys(self) -> bool:
        """Whether the choice reads more than the window and the first keys."""
        return self.row.choice.selection != LOCAL

    @property
    def above(self) -> Values:
        """Bits above dense by the names of windows."""
        values = {}
        for text, row in self.rows.items():
            for number, bits in enumerate(row.above_of_windows):
                values[f"{text} {number}"] = bits
        return values

    @property
    def mean(self) -> float:
        return mean(self.above.values())

    @property
    def half(self) -> float | None:
        """Half the interval of the mean; None for a single window."""
        return half_interval(list(self.above.values()))

    @property
    def keys(self) -> float:
        return self.mean_of("keys")

    @property
    def pairs(self) -> float:
        return self.mean_of("pairs")

    @property
    def kept(self) -> float | None:
        """The share of the far weight that is kept; None: not measured."""
        if any(row.kept is None for row in self.rows.values()):
            return None
        return self.mean_of("kept")

    def mean_of(self, name: str) -> float:
        """Return the mean of a field over windows."""
        values: list[float] = []
        for row in self.rows.values():
            values += [getattr(row, name)] * len(row.above_of_windows)
        return mean(values)


@dataclass
class Comparison:
    """The records of one model with equal settings.

    Args:
        texts: a record by the name of its text, for what is of the dense model.
        costs: what each choice cost.
        of_text: the text, if other texts have another comparison.
    """

    texts: dict[str, PretrainedRecord] = field(default_factory=dict)
    costs: dict[ChoiceName, ChoiceCost] = field(default_factory=dict)
    of_text: str = ""

    @property
    def record(self) -> PretrainedRecord:
        """One of the records, for what they have in common."""
        return next(iter(self.texts.values()))

    @property
    def title(self) -> str:
        """The model, the length, and the text if it is one of several, for titles of tables."""
        title = f"{self.record.model}, N = {self.record.length:,}"
        return f"{title}, {self.of_text}" if self.of_text else title

    @property
    def file_name(self) -> str:
        """The name of the file of the plot, with which other names begin."""
        name = f"pretrained-{self.record.model}-N{self.record.length}"
        return f"{name}-{self.of_text}" if self.of_text else name

    @property
    def settings(self) -> str:
        """A line on what every choice has in common."""
        options = self.record.analyze
        reads = f"last {options['window']} and first {options['sinks']} keys"
        windows = 0
        for record in self.texts.values():
            windows += len(record.dense.bits_of_windows)
        over = f"{plural(windows, 'window')} of {plural(len(self.texts), 'text')}"
        return f"Every head reads the {reads}; {over}, {self.record.precision}."

    def ranked(self) -> list[tuple[ChoiceName, ChoiceCost]]:
        """Return all choices, the one with the least loss first."""
        return sorted(self.costs.items(), key=lambda item: item[1].mean)

    def by_keys(self) -> dict[int, list[ChoiceName]]:
        """Return the choices with each number of further keys, the least loss first."""
        names: dict[int, list[ChoiceName]] = {}
        for name, cost in self.ranked():
            if cost.has_further_keys:
                names.setdefault(name.k, []).append(name)
        return dict(sorted(names.items()))

    def by_texts(self) -> list[Comparison]:
        """Return this comparison as one of all texts, and one of each text with further choices.

        That of all texts has the choices that were measured on all of them.
        """
        common = {}
        texts_with_more: dict[str, None] = {}
        for name, cost in self.costs.items():
            if len(cost.rows) == len(self.texts):
                common[name] = cost
            else:
                texts_with_more |= dict.fromkeys(cost.rows)
        parts = [self.of_one_text(text) for text in texts_with_more]
        has_more = any(cost.has_further_keys for cost in common.values())
        if has_more or not parts:
            parts.insert(0, Comparison(self.texts, common))
        return parts

    def of_one_text(self, text: str) -> Comparison:
        """Return all choices that were measured on a text."""
        costs = {}
        for name, cost in self.costs.items():
            if text in cost.rows:
                costs[name] = ChoiceCost({text: cost.rows[text]})
        return Comparison({text: self.texts[text]}, costs, text)


def comparisons(records: Iterable[PretrainedRecord]) -> list[Comparison]:
    """Return the comparisons of records; of equal choices on one text the last counts."""
    by_settings: dict[str, Comparison] = {}
    for record in records:
        comparison = by_settings.setdefault(settings_of(record), Comparison())
        text = text_name(record, comparison.texts)
        comparison.texts[text] = record
        for row in record.rows:
            cost = comparison.costs.setdefault(ChoiceName(row.label, row.k), ChoiceCost())
            cost.rows[text] = row
    parts = []
    for comparison in by_settings.values():
        parts += comparison.by_texts()
    return parts


def settings_of(record: PretrainedRecord) -> str:
    """Return what records of one comparison have in common, as a text."""
    options = {name: value for name, value in record.analyze.items() if name not in LISTS}
    options.pop("windows", None)
    options["model"] = record.model
    return f"{sorted(options.items())} {record.precision}"


def text_name(record: PretrainedRecord, others: Mapping[str, PretrainedRecord]) -> str:
    """Return the name of a record's text, with a number if other windows have that name."""
    for number in itertools.count(1):
        name = record.text if number == 1 else f"{record.text} ({number})"
        other = others.get(name)
        if other is None or same_windows(other, record):
            return name
    raise AssertionError("the count has no end")


def same_windows(record: PretrainedRecord, other: PretrainedRecord) -> bool:
    """Tell whether two records are of the same windows of one text."""
    is_same_text = record.data.fingerprint == other.data.fingerprint
    count = len(record.dense.bits_of_windows)
    return is_same_text and count == len(other.dense.bits_of_windows)


def command_of(record: PretrainedRecord) -> str:
    """Return the command that made a record."""
    words = ["rtx", "analyze", "pretrained", f"data={record.data.name}"]
    if record.data.name == "text":
        words.append(f"data.path={record.text}")
    for name, value in record.analyze.items():
        if value is not None:
            words.append(f"{name}={value}")
    words.append(f"hardware.precision={record.precision}")
    return shlex.join(words)
