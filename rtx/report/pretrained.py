"""What selections cost pretrained models, by the records of `rtx analyze pretrained`.

Records of one model with equal settings make a `Comparison` of the choices that were measured on
all their texts: the windows of the texts are pooled. A text with further choices has a comparison
of its own. Intervals are 95% intervals over windows. Selections are compared at equal numbers of
keys window by window, with Holm's correction.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rtx.errors import plural
from rtx.report.drawing import Plot
from rtx.report.pretrained_plots import HeadGrid, Line, coverage_plot, loss_plot
from rtx.report.ranking import (
    FEW,
    LEVEL,
    SEEDS,
    Difference,
    Error,
    Values,
    compare,
    half_interval,
    mean,
)
from rtx.report.ranking import Comparison as Verdict
from rtx.runs.pretrained_record import Grid, PretrainedRecord, SelectionCostRow
from rtx.tables import Column, Entry, Table

LISTS = ("selection", "keys", "per", "rotary", "dense_layers")
"""Options that say which choices are compared, not how."""
LOCAL = "none"
"""The selection without further keys."""
FEW_WINDOWS = FEW.replace("seeds", "windows")


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


def loss_table(comparison: Comparison) -> Table:
    """Return a row for each choice: its loss on all texts and on each, and what it reads."""
    columns = [
        Column("label", "further keys"),
        Column("k", "k"),
        Column("ours", "bits/token above dense", 4, "half"),
    ]
    if len(comparison.texts) > 1:
        for text in comparison.texts:
            columns.append(Column(text, text, 3, f"{text} half", brief=False))
    columns += [
        Column("kept", "far weight kept", 3),
        Column("keys", "keys read", 0),
        Column("pairs", "pairs scored", 0),
        Column("seeds", "windows", brief=False),
    ]
    rows = [loss_entry(name, cost) for name, cost in comparison.ranked()]
    lines = [
        comparison.settings,
        "± 95% intervals over windows, of paired differences to the dense model.",
        "Far weight is the dense model's attention weight between the first keys and the window.",
    ]
    return Table(f"Loss with each selection: {comparison.title}", columns, rows, lines)


def loss_entry(name: ChoiceName, cost: ChoiceCost) -> Entry:
    """Return the row of a choice; its `ours`, `half` and `seeds` are drawn on terminals."""
    entry: Entry = {
        "label": name.label,
        "k": name.k,
        "ours": cost.mean,
        "half": cost.half,
        "kept": cost.kept,
        "keys": cost.keys,
        "pairs": cost.pairs,
        "seeds": len(cost.above),
    }
    for text, row in cost.rows.items():
        entry[text] = row.above
        entry[f"{text} half"] = half_interval(row.above_of_windows)
    return entry


def dense_table(comparison: Comparison) -> Table:
    """Return a row for each text: the dense model's loss, and where its attention weight is."""
    columns = (
        Column("text", "text"),
        Column("windows", "windows"),
        Column("bits", "bits/token", 3, "bits_half"),
        Column("bits_per_byte", "bits/byte", 3),
        Column("sinks", "weight on first keys", 3, "sinks_half"),
        Column("far", "far weight", 3, "far_half"),
    )
    rows = []
    for text, record in comparison.texts.items():
        count = len(record.dense.bits_of_windows)
        entry: Entry = {
            "text": text,
            "windows": count,
            "bits": record.dense.bits,
            "bits_half": half_interval(record.dense.bits_of_windows),
            "bits_per_byte": record.dense.bits_per_byte,
            "sinks": record.weight.sinks,
            "sinks_half": half_of_error(record.weight.sinks_error, count),
            "far": record.weight.far,
            "far_half": half_of_error(record.weight.far_error, count),
        }
        rows.append(entry)
    return Table(f"The dense model: {comparison.title}", columns, rows)


def half_of_error(error: float | None, count: int) -> float | None:
    """Return half the 95% interval of a mean of `count` windows with a standard error."""
    if error is None:
        return None
    return Difference(0.0, Error(error, count - 1)).half(LEVEL)


@dataclass(frozen=True)
class Pair:
    """Two choices with equal numbers of further keys, compared window by window.

    Args:
        differences: the loss of the first less that of the other, on each window that both have.
        compared: the comparison after Holm's correction; None: too few windows.
    """

    name: ChoiceName
    other: ChoiceName
    differences: Sequence[float]
    compared: Verdict | None = None

    @property
    def mean(self) -> float:
        return mean(self.differences)

    @property
    def half(self) -> float | None:
        """Half the interval, at Holm's level where there is a verdict; None: a single window."""
        if self.compared is None:
            return half_interval(self.differences)
        return self.compared.half

    @property
    def verdict(self) -> str:
        """What the first is against the other."""
        if self.compared is None:
            return FEW_WINDOWS
        return self.compared.verdict


def pairs_of(comparison: Comparison) -> list[Pair]:
    """Return all pairs of choices with equal numbers of further keys that share windows.

    Of each the choice with the larger loss comes first, so that its difference is positive.
    """
    pairs = []
    for names in comparison.by_keys().values():
        for other, name in itertools.combinations(names, 2):
            differences = differences_of(comparison, name, other)
            if differences:
                pairs.append(Pair(name, other, differences))
    tested = [pair for pair in pairs if len(pair.differences) >= SEEDS]
    rows = {str(name): cost.above for name, cost in comparison.costs.items()}
    verdicts = compare(rows, [(str(pair.name), str(pair.other)) for pair in tested])
    with_verdicts = []
    for pair in pairs:
        verdict = verdicts.get((str(pair.name), str(pair.other)))
        with_verdicts.append(replace(pair, compared=verdict))
    return with_verdicts


def differences_of(comparison: Comparison, name: ChoiceName, other: ChoiceName) -> list[float]:
    """Return the loss of a choice less that of another, on each window that both have."""
    bits = comparison.costs[name].above
    other_bits = comparison.costs[other].above
    return [bits[window] - other_bits[window] for window in bits if window in other_bits]


def pairs_table(comparison: Comparison, pairs: Sequence[Pair]) -> Table:
    """Return a row for each pair of choices with equal numbers of further keys."""
    columns = (
        Column("k", "k"),
        Column("label", "further keys"),
        Column("other", "against"),
        Column("difference", "difference in bits/token", 4, "half"),
        Column("verdict", "verdict"),
        Column("windows", "windows", brief=False),
    )
    rows = []
    for pair in pairs:
        entry: Entry = {
            "k": pair.name.k,
            "label": pair.name.label,
            "other": pair.other.label,
            "difference": pair.mean,
            "half": pair.half,
            "verdict": pair.verdict,
            "windows": len(pair.differences),
        }
        rows.append(entry)
    correction = f"Holm's correction over the pairs with {SEEDS} windows or more"
    lines = [f"Differences window by window at equal k; verdicts after {correction}."]
    return Table(f"Selections in pairs: {comparison.title}", columns, rows, lines)


def headlines(comparison: Comparison, pairs: Sequence[Pair]) -> list[str]:
    """Return a sentence for each number of further keys: which choice loses least."""
    sentences = []
    for k, names in comparison.by_keys().items():
        best = comparison.costs[names[0]]
        loss = f"{best.mean:.3f}"
        if best.half is not None:
            loss += f" ± {best.half:.3f}"
        sentence = f"{comparison.title}: with {k} further keys {names[0].label} loses least"
        sentence += f", {loss} bits/token above dense"
        verdicts = {pair.name: pair.verdict for pair in pairs if pair.other == names[0]}
        tied = [name.label for name, verdict in verdicts.items() if verdict == "tied"]
        if tied:
            sentence += f"; tied with it: {', '.join(tied)}"
        if FEW_WINDOWS in verdicts.values():
            sentence += f"; a verdict takes {SEEDS} windows"
        sentences.append(f"{sentence}.")
    return sentences


def lines_of(comparison: Comparison) -> list[Line]:
    """Return the choices as the lines of a plot: those with one label at all their keys."""
    lines: dict[str, Line] = {}
    for name, cost in comparison.costs.items():
        line = lines.setdefault(name.label, Line(name.label, cost.row.choice.selection))
        line.keys.append(cost.keys)
        line.pairs.append(cost.pairs)
        line.above.append(cost.mean)
        line.halves.append(cost.half)
    return list(lines.values())


def plots_of(comparison: Comparison) -> list[Plot]:
    """Return the plot of losses, and for each number of keys one of coverage by layer and head."""
    caption = f"{comparison.title}: loss beside keys read and beside pairs scored, 95% intervals"
    plots = [loss_plot(comparison.file_name, caption, lines_of(comparison))]
    for k, names in comparison.by_keys().items():
        grids = [HeadGrid("far weight", far_weight(comparison))]
        for name in names:
            grid = kept_of_heads(comparison.costs[name])
            if grid is not None:
                grids.append(HeadGrid(name.label, grid))
        if len(grids) > 1:
            coverage = (
                f"the far weight of each head, and the share of it kept with {k} further keys"
            )
            file_name = f"{comparison.file_name}-coverage-k{k}"
            plots.append(coverage_plot(file_name, f"{comparison.title}: {coverage}", grids))
    return plots


def far_weight(comparison: Comparison) -> Grid:
    """Return the dense model's weight on far keys of each layer and head, the mean over texts."""
    return mean_grid([record.weight.far_of_heads for record in comparison.texts.values()])


def kept_of_heads(cost: ChoiceCost) -> Grid | None:
    """Return the share of the far weight that a choice keeps in each layer and head.

    It is the mean over texts. None: it was not measured.
    """
    grids = [row.kept_of_heads for row in cost.rows.values() if row.kept_of_heads is not None]
    return mean_grid(grids) if grids else None


def mean_grid(grids: Sequence[Grid]) -> Grid:
    """Return the means of grids of one shape; None where any of them has no value."""
    means: Grid = []
    for layers in zip(*grids, strict=True):
        means.append([mean_or_none(values) for values in zip(*layers, strict=True)])
    return means


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Return the mean of values; None if any of them is missing."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return None
    return mean(numbers)


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
