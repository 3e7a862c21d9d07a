"""Tables and sentences on what selections cost pretrained models.

Intervals are 95% intervals over windows. Selections are compared at equal numbers of keys window by
window, with Holm's correction.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rtx.report.pretrained_comparisons import ChoiceCost, ChoiceName, Comparison
from rtx.report.ranking import (
    FEW,
    LEVEL,
    SEEDS,
    Difference,
    Error,
    compare,
    half_interval,
    mean,
)
from rtx.report.ranking import Comparison as Verdict
from rtx.tables import Column, Entry, Table

FEW_WINDOWS = FEW.replace("seeds", "windows")


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
