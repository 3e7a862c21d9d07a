"""Tables of scores: kinds of heads ranked, ours beside the paper's, and all rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rtx.errors import plural
from rtx.report.paper import PaperTable, heads_label, setting_lines, table_of
from rtx.report.ranking import (
    FEW,
    OPPOSITE,
    Comparison,
    Values,
    chosen,
    compare,
    half_interval,
    mean,
)
from rtx.report.run_records import Cell
from rtx.report.score_rows import Row, differing_keys, row_key, values_read
from rtx.report.tables import MINUS, Column, Table
from rtx.runs.records import Protocol

Paces = Mapping[Any, tuple[float, float | None, str]]
"""Paces timed in turn, by row: steps a second, half their interval, and a reason.

The reason is why the pace may not be that of training; it may be empty.
"""

AGAINST = ("full", "local+full", "local", "random", "random blocks")
"""The rivals of other kinds. Without any of them it is the first kind by name."""

CHOSE = "which chose it"
"""The remark on the number of seeds of a row that was chosen by these very seeds."""

ERROR = Column("standard_error", "std. error", 4)
"""The standard error of the bits of a score, over its windows."""

PEAK = Column("peak_percent", "% of the GPU's peak", 1, brief=False)
"""Of runs on a GPU whose peak is recorded (rtx/analysis/rates.json)."""

HOW = (
    "± are 95% intervals over seeds. Verdicts: paired differences where seeds match, else Welch's "
    "test; intervals and p after Holm's correction over the {} of the table."
)


def facts_of(row: Row, values: Values, paces: Paces) -> dict[str, Any]:
    """Return what every table has of a row: mean, interval and number of its scores, its pace.

    The standard error is that of a score over its windows, the mean over the runs.
    """
    scores = list(values.values())
    facts: dict[str, Any] = {
        "ours": mean(scores) if scores else None,
        "half": half_interval(scores),
        "seeds": len(scores),
    }
    if row.scores:
        facts["sees_future"] = "yes" if row.sees_future else "no"
    errors = [score.error for score in row.scores if score.error is not None]
    facts["standard_error"] = mean(errors) if errors else None
    for name in figures([row]):
        facts[name] = mean(score.figures[name] for score in row.scores if name in score.figures)
    share = row.peak_share()
    facts["peak_percent"] = None if share is None else 100 * share
    return facts | pace_facts(row, paces)


def pace_facts(row: Row, paces: Paces) -> dict[str, float | None]:
    """Return the steps a second of a row: timed in turn with others, else as its runs had it."""
    in_turn = paces.get(row_key(row.config))
    if in_turn is not None:
        return {"steps_per_second": in_turn[0], "pace_half": in_turn[1]}
    recorded = row.paces()
    if not recorded:
        return {"steps_per_second": None, "pace_half": None}
    return {"steps_per_second": mean(recorded), "pace_half": half_interval(recorded)}


def figures(rows: Sequence[Row]) -> list[str]:
    """Return the titles of the further measures that rows have."""
    titles: dict[str, None] = {}
    for row in rows:
        for score in row.scores:
            titles |= dict.fromkeys(score.figures)
    return list(titles)


def figure_columns(names: Sequence[str]) -> list[Column]:
    """Return the columns of further measures; a terminal has those of all data of a run."""
    return [Column(name, name, 3, brief="," not in name) for name in names]


def pace_sentences(picked: Mapping[str, Pick], paces: Paces) -> list[str]:
    """Return which steps a second are not those of training timed in turn, in sentences."""
    untimed = []
    doubts = []
    for kind, pick in picked.items():
        pace = paces.get(row_key(pick.row.config))
        if pace is None and pick.row.paces():
            untimed.append(kind)
        if pace is not None and pace[2]:
            doubts.append(f"Steps/s of {kind} may not be those of training ({pace[2]}).")
    if not untimed:
        return doubts
    of = f" of {', '.join(untimed)}" if len(untimed) < len(picked) else ""
    return [f"Steps/s{of} are as the runs went, not timed in turn.", *doubts]


def baseline(
    name: str, rows: Sequence[Row], protocol: Protocol | None, column: str = "ours"
) -> list[dict[str, Any]]:
    """Return an entry for the best simple compressor on the same split; none for a sample.

    `name` and `column` are the keys of its name and of its bits.
    """
    if protocol is None or protocol.windows is not None:
        return []
    bits = baseline_bits(rows, protocol.split)
    if not bits:
        return []
    best = min(bits, key=lambda key: bits[key])
    return [{name: f"baseline: {best}", column: bits[best]}]


def baseline_bits(rows: Sequence[Row], split: str) -> Mapping[str, float]:
    """Return the bits of simple compressors on a split, from the first run that has any."""
    for row in rows:
        for cell in row.cells:
            if cell.baselines.get(split):
                return cell.baselines[split]
    return {}


@dataclass(frozen=True)
class Pick:
    """The row that represents a kind of heads, and the scores by seed that it is reported by.

    `values` are empty where every seed helped to choose the row. `note` says of which rows it is
    the best, of which there are `rows`.
    """

    kind: str
    row: Row
    values: Values
    note: str
    rows: int


@dataclass(frozen=True)
class Kinds:
    """The kinds of heads of a protocol, ranked.

    Args:
        legal: the scores by seed of the kinds that see no future.
        against: the rivals in their order.
        compared: each kind with each rival.
        order: the kinds from the least bits on, those that see the future last.
        length: tokens of a window that is scored.
        baseline: the simple baseline that is ahead of every model, in words; empty where none is.
    """

    table: Table
    picked: Mapping[str, Pick]
    legal: Mapping[str, Values]
    against: Sequence[str]
    compared: Mapping[tuple[str, str], Comparison]
    order: Sequence[str]
    unit: str
    length: int
    most_seeds: int
    baseline: str


def picked_kinds(rows: Sequence[Row]) -> dict[str, Pick]:
    """Return the row that represents each kind of heads."""
    rows_by_kind: dict[str, list[Row]] = {}
    for row in rows:
        if row.config and row.scores:
            rows_by_kind.setdefault(heads_label(row.config), []).append(row)
    picked = {}
    for kind, alike in rows_by_kind.items():
        row, values, note = pick(alike)
        picked[kind] = Pick(kind, row, values, note, len(alike))
    return picked


def kinds_table(protocol: Protocol, rows: Sequence[Row], paces: Paces) -> Kinds:
    """Return the kinds of heads, those that see no future ranked.

    Of several rows of a kind the best is taken, with its scores by other seeds than those that
    chose it.
    """
    picked = picked_kinds(rows)
    legal = {kind: one.values for kind, one in picked.items() if not one.row.sees_future}
    against = [kind for kind in AGAINST if kind in legal] or sorted(legal)[:1]
    pairs = pairs_with_rivals(legal, against)
    compared = compare(legal, pairs)
    entries = kinds_entries(picked, against, compared, paces)
    simple = baseline("heads", rows, protocol)
    how = HOW.format(plural(len(pairs), "comparison"))
    opening = [f"{protocol.line(units_of(rows))}. {how}", *pace_sentences(picked, paces)]
    notes = [f"{kind}: {one.note}." for kind, one in picked.items() if one.note]
    columns = kinds_columns(protocol, against, figures(rows))
    title = f"Which heads pay? {protocol.where}"
    return Kinds(
        table=Table(title, columns, [*entries, *simple], [" ".join(opening), *notes]),
        picked=picked,
        legal=legal,
        against=against,
        compared=compared,
        order=[entry["heads"] for entry in entries],
        unit=f"bits/{protocol.unit}",
        length=protocol.length,
        most_seeds=max(len(row.values()) for row in rows if row.scores),
        baseline=baseline_ahead(simple, entries, protocol),
    )


def pairs_with_rivals(kinds: Iterable[str], against: Sequence[str]) -> list[tuple[str, str]]:
    """Return each kind with each rival, except the rival itself and those before it."""
    pairs = []
    for number, rival in enumerate(against):
        first_rivals = against[: number + 1]
        pairs += [(kind, rival) for kind in kinds if kind not in first_rivals]
    return pairs


def kinds_entries(
    picked: Mapping[str, Pick],
    against: Sequence[str],
    compared: Mapping[tuple[str, str], Comparison],
    paces: Paces,
) -> list[dict[str, Any]]:
    """Return the values of each kind, from the least bits on, those that see the future last."""
    entries = []
    for kind, one in picked.items():
        facts = facts_of(one.row, one.values or one.row.values(), paces)
        entry = {"heads": kind, **facts, "note": one.note}
        if not one.values:
            # The seeds that chose the row are no fair sample of its scores.
            entry |= {"half": None, "seeds_remark": CHOSE}
        if one.note:
            entry["of"] = one.rows
        for rival in against:
            is_ranked = not one.row.sees_future
            word, numbers = verdict(compared, kind, rival, is_ranked)
            entry[f"against_{rival}"] = word
            entry[f"less_{rival}"] = numbers
        entries.append(entry)
    entries.sort(key=lambda entry: (entry["sees_future"] == "yes", entry["ours"] or math.inf))
    return entries


def kinds_columns(
    protocol: Protocol, against: Sequence[str], measures: Sequence[str]
) -> list[Column]:
    """Return the columns of the kinds of heads: against each rival, and with further measures."""
    return [
        Column("heads", "heads"),
        Column("ours", f"bits/{protocol.unit}", 4, "half"),
        ERROR,
        Column("seeds", "seeds", remark="seeds_remark"),
        Column("sees_future", "sees future"),
        *(Column(f"against_{kind}", f"against {kind}") for kind in against),
        Column("steps_per_second", "steps/s", 3, "pace_half"),
        PEAK,
        *figure_columns(measures),
        *(Column(f"less_{kind}", f"less {kind}", brief=False) for kind in against),
        Column("of", "best of"),
    ]


def baseline_ahead(
    simple: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]], protocol: Protocol
) -> str:
    """Return the simple baseline that is ahead of every model, and its bits; empty for none."""
    lowest = min(entry["ours"] or math.inf for entry in entries)
    for row in simple:
        if row["ours"] < lowest:
            name = row["heads"].partition(": ")[2]
            return f"{name} ({row['ours']:.3f} bits/{protocol.unit})"
    return ""


def pick(alike: Sequence[Row]) -> tuple[Row, Values, str]:
    """Return the best row of a kind, the scores it is reported by, and a note on the choice."""
    if len(alike) == 1:
        return alike[0], alike[0].values(), ""
    # By number: names of rows may be equal.
    values_by_number = {str(number): row.values() for number, row in enumerate(alike)}
    number, values = chosen(values_by_number)
    best_row = alike[int(number)]
    settings = best_row.name.partition(": ")[2]
    best = f"best of {len(alike)}"
    if settings:
        best += f" ({settings})"
    if values:
        return best_row, values, f"{best}, by {plural(len(values), 'seed')} that did not choose it"
    return best_row, {}, f"{best}, by the seeds that chose it, so rather too low"


def verdict(
    compared: Mapping[tuple[str, str], Comparison], kind: str, rival: str, is_ranked: bool
) -> tuple[str, str]:
    """Return the verdict on a kind against a rival, and the difference, its interval and p."""
    sign = 1
    comparison = compared.get((kind, rival))
    if comparison is None:
        sign = -1
        comparison = compared.get((rival, kind))
    if comparison is None or comparison.difference is None:
        if not is_ranked:
            return "not ranked", ""
        return FEW if comparison else "", ""
    word = comparison.verdict
    if sign == -1:
        word = OPPOSITE.get(word, word)
    chance = "p<0.001" if comparison.chance < 0.001 else f"p={comparison.chance:.2g}"
    numbers = f"{sign * comparison.difference:+.3f} ± {comparison.half:.3f}, {chance}"
    return word, numbers.replace("-", MINUS)


def units_of(rows: Sequence[Row]) -> int | None:
    """Return how many units were scored, where that is one number."""
    units = {score.units for row in rows for score in row.scores}
    return units.pop() if len(units) == 1 else None


def score_tables(protocol: Protocol | None, rows: Sequence[Row], paces: Paces) -> list[Table]:
    """Return the rows of a protocol: by table of the paper, those with its settings first."""
    groups: dict[tuple[int, bool], list[Row]] = {}
    for row in rows:
        table = table_of(row.config)
        is_equal = bool(table and row.scores and not departures(row, table))
        number = table.number if table else 99
        groups.setdefault((number, not is_equal), []).append(row)
    tables = []
    for (_, is_other), group in sorted(groups.items(), key=lambda item: item[0]):
        table = table_of(group[0].config)
        tables.append(rows_table(protocol, group, paces, table, equal=not is_other))
    return tables


def departures(row: Row, table: PaperTable) -> list[str]:
    """Return why a row's numbers may not be compared with the paper's.

    That is by settings, steps, split, protocol or data.
    """
    reasons = table.departures(row.config)
    least = least_steps(row, table)
    if row.step < least:
        reasons.append(f"{row.step:,} steps done of {least:,}")
    for protocol in {score.protocol for score in row.scores}:
        reasons += protocol_departures(protocol, row, table)
    return reasons


def least_steps(row: Row, table: PaperTable) -> int:
    """Return the steps that a run must have done to be compared with the paper's."""
    stated = table.of_paper.get("trainer.steps")
    if isinstance(stated, Mapping):
        return stated["from"]
    return stated or row.config.get("trainer.steps") or 0


def protocol_departures(protocol: Protocol, row: Row, table: PaperTable) -> list[str]:
    """Return how a protocol is other than that of the paper's numbers."""
    reasons = []
    if protocol.split != table.split:
        reasons.append(f"split {protocol.split} (paper: {table.split})")
    if protocol.windows:
        reasons.append("a sample of the windows")
    if protocol.ablate != "none":
        reasons.append(f"ablated: {protocol.ablate}")
    if protocol.mode != "parallel":
        reasons.append("streaming")
    trained = row.config.get("data.length")
    if protocol.length != trained:
        reasons.append(f"windows of {protocol.length} (trained on {trained})")
    if protocol.data != row.config.get("data.name"):
        reasons.append("other data")
    stamps = [stamp.removesuffix(", not comparable") for stamp in protocol.stamps]
    return reasons + stamps


@dataclass(frozen=True)
class Reasons:
    """Reasons of several rows: those that all rows share, and a text with the others for each."""

    shared: Sequence[str]
    others: Sequence[str]


def reasons_of(lists: Sequence[Sequence[str]]) -> Reasons:
    """Return the reasons of rows, a list for each, divided into shared and other ones."""
    shared = shared_by_all(lists)
    others = ["; ".join(one for one in reasons if one not in shared) for reasons in lists]
    return Reasons(shared, others)


def rows_table(
    protocol: Protocol | None,
    rows: Sequence[Row],
    paces: Paces,
    table: PaperTable | None,
    equal: bool,
) -> Table:
    """Return all rows with the keys by which they differ, beside the paper's numbers.

    `equal`: whether the rows have the settings of `table`. Then the difference from its number is
    a column, and its other rows are listed as not run; else what the rows have otherwise.
    """
    metric = table.metric.partition("/")[0] if table else "bits"
    departing = reasons_of([departures(row, table) if table else [] for row in rows])
    silent = reasons_of([table.differences(row.config) if table else [] for row in rows])
    keys = differing_keys([row.config for row in rows if row.config])
    entries = []
    for row, differs, differs_silently in zip(rows, departing.others, silent.others, strict=True):
        entry = score_entry(row, metric, paces)
        if table:
            entry |= paper_entry(row, table, entry["ours"], equal)
        entry |= {"differs": differs, "silent": differs_silently}
        values = values_read(row.config)
        entries.append(entry | {key: values.get(key) for key in keys})
    entries.sort(key=lambda entry: math.inf if isinstance(entry["ours"], str) else entry["ours"])
    entries += baseline("run", rows, protocol, "ours" if metric == "bits" else "bits")
    if table and equal:
        entries += entries_not_run(rows, table)
    lines = [f"{protocol.line(units_of(rows))}."] if protocol else ["No run has a score."]
    lines += setting_lines(departing.shared, silent.shared)
    lines += earlier_scores(rows)
    columns = rows_columns(protocol, rows, table, equal)
    footnotes = table.footnotes if table else ()
    return Table(rows_title(protocol, table, equal), columns, entries, lines, footnotes)


def score_entry(row: Row, metric: str, paces: Paces) -> dict[str, Any]:
    """Return a row's name, scores and notes; without a score how its runs ended in place of it."""
    values = row.values(metric)
    facts = facts_of(row, values, paces)
    entry = {"run": row.name, **facts, "step": row.step or None, "note": notes_of(row)}
    if not values:
        states = {cell.state for cell in row.cells} - {"done"}
        entry |= {"ours": ", ".join(sorted(states)) or "no score", "seeds": None}
    if metric != "bits" and row.scores:
        entry["bits"] = mean(row.values().values())
    return entry


def paper_entry(row: Row, table: PaperTable, ours: float | str, equal: bool) -> dict[str, Any]:
    """Return the paper's number of a row, and the difference from it where settings are equal."""
    printed = table.row_of(row.config)
    if printed is None:
        return {}
    entry: dict[str, Any] = {"paper": printed.value, "paper_row": printed.label}
    if equal and printed.value and not isinstance(ours, str):
        entry["difference"] = ours - printed.value
    return entry


def entries_not_run(rows: Sequence[Row], table: PaperTable) -> list[dict[str, Any]]:
    """Return entries for those of the paper's rows that no run is."""
    run = [table.row_of(row.config) for row in rows]
    rest = [printed for printed in table.rows if printed not in run]
    return [{"paper_row": one.label, "paper": one.value, "ours": "not run"} for one in rest]


def rows_columns(
    protocol: Protocol | None, rows: Sequence[Row], table: PaperTable | None, equal: bool
) -> list[Column]:
    """Return the columns of a table of rows; bits have one besides the paper's other metric."""
    bits = f"bits/{protocol.unit}" if protocol else "bits"
    metric = table.metric if table else bits
    scores = [
        Column("ours", metric, 4, "half"),
        Column("seeds", "seeds"),
        Column("sees_future", "sees future"),
        Column("bits", bits, 3),
    ]
    # The standard error is that of the bits, so it follows their column.
    error_after = 1 if metric.partition("/")[0] == "bits" else len(scores)
    scores.insert(error_after, ERROR)
    paper = "paper" if equal else "its number, not comparable"
    return [
        Column("run", "run"),
        *scores,
        *figure_columns(figures(rows)),
        Column("steps_per_second", "steps/s", 3, "pace_half", brief=False),
        PEAK,
        Column("step", "steps done", brief=False),
        Column("paper_row", "the paper's row", brief=equal),
        Column("paper", paper, 3, brief=equal),
        Column("difference", "difference", 3),
        Column("differs", "differs from the paper by", brief=False),
        Column("silent", "where the paper is silent or its code differs", brief=False),
        Column("note", "notes", brief=False),
    ]


def rows_title(protocol: Protocol | None, table: PaperTable | None, equal: bool) -> str:
    """Return the title of a table of rows."""
    title = "All rows"
    if table and equal:
        title = f"Table {table.number}. {table.title}"
    elif table:
        title = f"Table {table.number} with other settings than the paper's"
    return f"{title}: {protocol.where}" if protocol else title


def earlier_scores(rows: Sequence[Row]) -> list[str]:
    """Return a line that counts the scores of a checkpoint before the last step, if there are."""
    earlier = []
    for row in rows:
        for cell, score in zip(row.cells, row.scores, strict=False):
            earlier.append(score.step < cell.step)
    count = sum(earlier)
    if not count:
        return []
    verb = "is" if count == 1 else "are"
    scores = f"{count} of {plural(len(earlier), 'score')}"
    checkpoint = "a checkpoint before the run's last step"
    return [f"{scores} {verb} of {checkpoint}: the best on windows of the validation split."]


def shared_by_all(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return what all lists hold, in the order of the first."""
    return [one for one in lists[0] if all(one in other for other in lists)]


def notes_of(row: Row) -> str:
    """Return how runs of a row ended that are not done, and seeds that ran more than once."""
    notes = [run_note(cell) for cell in row.cells if cell.state != "done" or cell.reason]
    seeds = Counter(cell.seed for cell in row.cells[: len(row.scores)])
    for seed, runs in seeds.items():
        if runs > 1:
            notes.append(f"seed {seed}: mean of {runs} runs")
    return "; ".join(notes)


def run_note(cell: Cell) -> str:
    """Return how a run ended, and why."""
    if not cell.config:
        return cell.state
    note = f"seed {cell.seed} {cell.state} at step {cell.step:,}"
    return f"{note}: {cell.reason.splitlines()[0]}" if cell.reason else note
