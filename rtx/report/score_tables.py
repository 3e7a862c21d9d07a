"""Tables of scores: the ranking of kinds of heads, and all rows beside the paper's numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rtx.errors import plural
from rtx.report.paper import PaperTable, heads_label, setting_lines, table_of
from rtx.report.ranking import (
    FEW,
    OPPOSITE,
    Comparison,
    Names,
    Values,
    chosen,
    compare,
    half_interval,
    mean,
)
from rtx.report.run_records import Cell
from rtx.report.score_rows import Row, RowKey, differing_keys, row_key, values_read
from rtx.report.steps import TimedRow
from rtx.runs.records import Protocol
from rtx.tables import MINUS, Column, Entry, Table

Paces = Mapping[RowKey, TimedRow]
"""The rows that were timed in turn with others."""

AGAINST = ("full", "local+full", "local", "random", "random blocks")
"""The rivals: kinds that all others are compared with. If none of them is ranked, the rival is the
first ranked kind by name."""

CHOSE = "which chose it"
"""A remark on the number of seeds, for a row that is reported by the same seeds that chose it."""

ERROR = Column("standard_error", "std. error", 4)
"""The standard error over the windows of a score, in bits."""

PEAK = Column("peak_percent", "% of the GPU's peak", 1, brief=False)
"""The share of the GPU's peak, for GPUs whose peak is recorded (rtx/analysis/rates.json)."""

HOW = (
    "± are 95% intervals over seeds. Verdicts: paired differences where seeds match, else Welch's "
    "test; intervals and p after Holm's correction over the {} of the table."
)


def facts_of(row: Row, values: Values, paces: Paces) -> Entry:
    """Return the entries of a row that all tables have: its scores, standard error and pace.

    The standard error of each run is over the windows of its score; the entry is their mean.
    """
    scores = list(values.values())
    facts: Entry = {
        "ours": mean(scores) if scores else None,
        "half": half_interval(scores),
        "seeds": len(scores),
    }
    if row.scores:
        facts["sees_future"] = "yes" if row.sees_future else "no"
    errors = [score.error for score in row.scores if score.error is not None]
    facts["standard_error"] = mean(errors) if errors else None
    for name in figures([row]):
        measured = [score.figures[name] for score in row.scores if name in score.figures]
        facts[name] = mean(measured)
    share = row.peak_share()
    facts["peak_percent"] = None if share is None else 100 * share
    return facts | pace_facts(row, paces)


def pace_facts(row: Row, paces: Paces) -> dict[str, float | None]:
    """Return the steps a second of a row: timed in turn with others, else recorded by its runs."""
    timed = paces.get(row_key(row.config))
    if timed is not None:
        return {"steps_per_second": timed.speed, "pace_half": timed.half}
    recorded = row.paces()
    if not recorded:
        return {"steps_per_second": None, "pace_half": None}
    return {"steps_per_second": mean(recorded), "pace_half": half_interval(recorded)}


def figures(rows: Sequence[Row]) -> list[str]:
    """Return the names of the further measures in the scores of rows, without duplicates."""
    # A dictionary keeps the order, which a set does not.
    names: dict[str, None] = {}
    for row in rows:
        for score in row.scores:
            names |= dict.fromkeys(score.figures)
    return list(names)


def figure_columns(names: Sequence[str]) -> list[Column]:
    """Return the columns of further measures.

    A measure of a part of the data has a comma in its name. A terminal leaves its column out.
    """
    return [Column(name, name, 3, brief="," not in name) for name in names]


def pace_sentences(picked: Mapping[str, Pick], paces: Paces) -> list[str]:
    """Return sentences on the paces that were not timed in turn, or may differ from training."""
    untimed = []
    doubts = []
    for kind, pick in picked.items():
        timed = paces.get(row_key(pick.row.config))
        if timed is None:
            if pick.row.paces():
                untimed.append(kind)
        elif timed.reason:
            doubts.append(f"Steps/s of {kind} may not be those of training ({timed.reason}).")
    if not untimed:
        return doubts
    subject = "Steps/s"
    if len(untimed) < len(picked):
        subject += f" of {', '.join(untimed)}"
    return [f"{subject} were measured in training, not timed in turn.", *doubts]


def baseline(
    name_key: str, rows: Sequence[Row], protocol: Protocol | None, bits_key: str = "ours"
) -> list[Entry]:
    """Return one entry, for the best simple compressor on the split; none for a sample of windows.

    `name_key` and `bits_key` are the keys of the compressor's name and of its bits.
    """
    if protocol is None or protocol.windows is not None:
        return []
    bits = baseline_bits(rows, protocol.split)
    if not bits:
        return []
    best = min(bits, key=lambda name: bits[name])
    return [{name_key: f"baseline: {best}", bits_key: bits[best]}]


def baseline_bits(rows: Sequence[Row], split: str) -> Mapping[str, float]:
    """Return the bits of simple compressors on a split, from the first run that has any."""
    for row in rows:
        for cell in row.cells:
            if cell.baselines.get(split):
                return cell.baselines[split]
    return {}


@dataclass(frozen=True)
class Pick:
    """The best row of a kind of heads, which represents the kind.

    Args:
        values: the reported scores by seed; empty: every seed was used to choose the row.
        note: how the row was chosen; empty: it is the only one of its kind.
        rows: the number of rows of this kind.
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
        legal: the scores by seed of each kind that does not see the future.
        against: the rivals in their order.
        compared: the comparison of each pair of a kind and a rival.
        order: the kinds by ascending bits, those that see the future last.
        length: the number of tokens of a scored window.
        most_seeds: the largest number of seeds of a row.
        baseline: the simple baseline that is ahead of every model, and its bits; empty: none is.
    """

    table: Table
    picked: Mapping[str, Pick]
    legal: Mapping[str, Values]
    against: Sequence[str]
    compared: Mapping[Names, Comparison]
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
    return {kind: pick(kind, alike) for kind, alike in rows_by_kind.items()}


def kinds_table(protocol: Protocol, rows: Sequence[Row], paces: Paces) -> Kinds:
    """Return the ranking of the kinds of heads. Kinds that see the future are listed unranked.

    The best row of a kind represents it, with its scores by seeds that did not choose the row.
    """
    picked = picked_kinds(rows)
    legal = {kind: best.values for kind, best in picked.items() if not best.row.sees_future}
    against = [kind for kind in AGAINST if kind in legal] or sorted(legal)[:1]
    pairs = pairs_with_rivals(legal, against)
    compared = compare(legal, pairs)
    entries = kinds_entries(picked, against, compared, paces)
    simple = baseline("heads", rows, protocol)
    opening = opening_line(protocol, rows, len(pairs), pace_sentences(picked, paces))
    notes = [f"{kind}: {best.note}." for kind, best in picked.items() if best.note]
    table = Table(
        title=f"Scores by kind of heads: {protocol.where}",
        columns=kinds_columns(protocol, against, figures(rows)),
        rows=[*entries, *simple],
        lines=[opening, *notes],
    )
    return Kinds(
        table=table,
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


def opening_line(
    protocol: Protocol, rows: Sequence[Row], comparisons: int, sentences: Sequence[str]
) -> str:
    """Return the first line above a ranking: protocol, statistical method, then `sentences`.

    `comparisons` is the number of comparisons over which Holm's correction is made.
    """
    protocol_line = protocol.line(units_of(rows))
    how = HOW.format(plural(comparisons, "comparison"))
    return " ".join([f"{protocol_line}.", how, *sentences])


def pairs_with_rivals(kinds: Iterable[str], against: Sequence[str]) -> list[Names]:
    """Return all pairs of a kind and a rival. A pair of two rivals is in the list only once."""
    pairs = []
    for number, rival in enumerate(against):
        # A rival is not compared with itself. Its pairs with earlier rivals are already there.
        excluded = against[: number + 1]
        pairs += [(kind, rival) for kind in kinds if kind not in excluded]
    return pairs


def kinds_entries(
    picked: Mapping[str, Pick],
    against: Sequence[str],
    compared: Mapping[Names, Comparison],
    paces: Paces,
) -> list[Entry]:
    """Return an entry for each kind, by ascending bits, those that see the future last."""
    entries = []
    for kind, best in picked.items():
        facts = facts_of(best.row, best.values or best.row.values(), paces)
        entry = {"heads": kind, **facts, "note": best.note}
        if not best.values:
            # The scores by the seeds that chose the row are biased, so they get no interval.
            entry["half"] = None
            entry["seeds_remark"] = CHOSE
        if best.note:
            entry["of"] = best.rows
        is_ranked = not best.row.sees_future
        for rival in against:
            against_rival = verdict(compared, kind, rival, is_ranked)
            entry[f"against_{rival}"] = against_rival.word
            entry[f"less_{rival}"] = against_rival.numbers
        entries.append(entry)
    entries.sort(key=lambda entry: (entry["sees_future"] == "yes", entry["ours"] or math.inf))
    return entries


def kinds_columns(
    protocol: Protocol, against: Sequence[str], measures: Sequence[str]
) -> list[Column]:
    """Return the columns of the ranking, with two for each rival and one for each measure."""
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
        *(Column(f"less_{kind}", f"minus {kind}", brief=False) for kind in against),
        Column("of", "best of"),
    ]


def baseline_ahead(simple: Sequence[Entry], entries: Sequence[Entry], protocol: Protocol) -> str:
    """Return the simple baseline that is ahead of every model, and its bits; empty for none."""
    lowest = min(entry["ours"] or math.inf for entry in entries)
    for entry in simple:
        bits = entry["ours"]
        if bits < lowest:
            name = entry["heads"].removeprefix("baseline: ")
            return f"{name} ({bits:.3f} bits/{protocol.unit})"
    return ""


def pick(kind: str, alike: Sequence[Row]) -> Pick:
    """Return the best row of a kind."""
    if len(alike) == 1:
        return Pick(kind, alike[0], alike[0].values(), note="", rows=1)
    # Rows are identified by number, because their names may be equal.
    values_by_number = {str(number): row.values() for number, row in enumerate(alike)}
    number, values = chosen(values_by_number)
    best_row = alike[int(number)]
    settings = best_row.name.partition(": ")[2]
    best = f"best of {len(alike)}"
    if settings:
        best += f" ({settings})"
    note = f"{best}, by the seeds that chose it, so rather too low"
    if values:
        note = f"{best}, by {plural(len(values), 'seed')} that did not choose it"
    return Pick(kind, best_row, values, note, rows=len(alike))


@dataclass(frozen=True)
class Verdict:
    """The verdict on a kind against a rival in words.

    Args:
        numbers: the difference, its interval and p; empty: not compared.
    """

    word: str
    numbers: str = ""


def verdict(
    compared: Mapping[Names, Comparison], kind: str, rival: str, is_ranked: bool
) -> Verdict:
    """Return the verdict on a kind against a rival; empty if the kind is the rival itself."""
    sign = 1
    comparison = compared.get((kind, rival))
    if comparison is None:
        # Two rivals are compared once, so the pair may be in the other order.
        sign = -1
        comparison = compared.get((rival, kind))
    if comparison is None:
        return Verdict("" if is_ranked else "not ranked")
    if comparison.difference is None:
        return Verdict(FEW if is_ranked else "not ranked")
    word = comparison.verdict
    if sign == -1:
        word = OPPOSITE.get(word, word)
    chance = "p<0.001" if comparison.chance < 0.001 else f"p={comparison.chance:.2g}"
    numbers = f"{sign * comparison.difference:+.3f} ± {comparison.half:.3f}, {chance}"
    return Verdict(word, numbers.replace("-", MINUS))


def units_of(rows: Sequence[Row]) -> int | None:
    """Return the number of units that a score covers; None if scores differ in it."""
    units: set[int] = set()
    for row in rows:
        units |= {score.units for score in row.scores}
    return units.pop() if len(units) == 1 else None


def score_tables(protocol: Protocol | None, rows: Sequence[Row], paces: Paces) -> list[Table]:
    """Return tables with the rows of a protocol, in the order of the paper's tables.

    Each table of the paper has one for the rows with its settings, then one for those with others.
    Rows without a table of the paper are last.
    """
    groups: dict[tuple[float, bool], list[Row]] = {}
    for row in rows:
        table = table_of(row.config)
        is_equal = bool(table and row.scores and not departures(row, table))
        number = table.number if table else math.inf
        groups.setdefault((number, not is_equal), []).append(row)
    tables = []
    for (_, is_other), group in sorted(groups.items(), key=lambda item: item[0]):
        table = table_of(group[0].config)
        tables.append(rows_table(protocol, group, paces, table, equal=not is_other))
    return tables


def departures(row: Row, table: PaperTable) -> list[str]:
    """Return the reasons why a row's numbers may not be compared with the paper's.

    The row may differ in settings, number of steps, split, protocol or data.
    """
    reasons = table.departures(row.config)
    least = least_steps(row, table)
    if row.step < least:
        reasons.append(f"{row.step:,} steps done of {least:,}")
    for protocol in {score.protocol for score in row.scores}:
        reasons += protocol_departures(protocol, row, table)
    return reasons


def least_steps(row: Row, table: PaperTable) -> int:
    """Return the number of steps from which on a run may be compared with the paper's."""
    stated = table.of_paper.get("trainer.steps")
    if isinstance(stated, Mapping):
        return stated["from"]
    if stated:
        return stated
    return row.config.get("trainer.steps") or 0


def protocol_departures(protocol: Protocol, row: Row, table: PaperTable) -> list[str]:
    """Return how a protocol differs from that of the paper's numbers."""
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
    """The reasons of several rows.

    Args:
        shared: the reasons that all rows share.
        others: for each row a text with its other reasons.
    """

    shared: Sequence[str]
    others: Sequence[str]


def reasons_of(lists: Sequence[Sequence[str]]) -> Reasons:
    """Divide the reasons of rows, one list for each row, into shared and other reasons."""
    shared = shared_by_all(lists)
    others = []
    for reasons in lists:
        unshared = [reason for reason in reasons if reason not in shared]
        others.append("; ".join(unshared))
    return Reasons(shared, others)


def rows_table(
    protocol: Protocol | None,
    rows: Sequence[Row],
    paces: Paces,
    table: PaperTable | None,
    equal: bool,
) -> Table:
    """Return a table of rows, with the keys by which they differ, beside the paper's numbers.

    Args:
        table: the table of the paper that has the rows; None: no table has them.
        equal: whether the rows have the settings of `table`. If so, a column has the differences
            from its numbers, and its other rows are listed as not run.
    """
    departing = reasons_of([departures(row, table) if table else [] for row in rows])
    silent = reasons_of([table.differences(row.config) if table else [] for row in rows])
    entries = row_entries(rows, paces, table, equal)
    for entry, differs, differs_silently in zip(
        entries, departing.others, silent.others, strict=True
    ):
        entry["differs"] = differs
        entry["silent"] = differs_silently
    add_differing_values(entries, rows)
    # A row without a score has a text in place of it, and is last.
    entries.sort(key=lambda entry: math.inf if isinstance(entry["ours"], str) else entry["ours"])
    bits_key = "ours" if metric_of(table) == "bits" else "bits"
    entries += baseline("run", rows, protocol, bits_key)
    if table and equal:
        entries += entries_not_run(rows, table)
    return Table(
        title=rows_title(protocol, table, equal),
        columns=rows_columns(protocol, rows, table, equal),
        rows=entries,
        lines=rows_lines(protocol, rows, departing, silent),
        notes=table.footnotes if table else (),
    )


def metric_of(table: PaperTable | None) -> str:
    """Return the metric of a table of the paper without its unit; bits where there is no table."""
    return table.metric.partition("/")[0] if table else "bits"


def row_entries(
    rows: Sequence[Row], paces: Paces, table: PaperTable | None, equal: bool
) -> list[Entry]:
    """Return the scores of each row, beside the paper's numbers; arguments as of `rows_table`."""
    entries = []
    for row in rows:
        entry = score_entry(row, metric_of(table), paces)
        if table:
            entry |= paper_entry(row, table, entry["ours"], equal)
        entries.append(entry)
    return entries


def add_differing_values(entries: Sequence[Entry], rows: Sequence[Row]) -> None:
    """Add to the entry of each row its values of the keys by which the rows differ."""
    keys = differing_keys([row.config for row in rows if row.config])
    for entry, row in zip(entries, rows, strict=True):
        values = values_read(row.config)
        entry |= {key: values.get(key) for key in keys}


def rows_lines(
    protocol: Protocol | None, rows: Sequence[Row], departing: Reasons, silent: Reasons
) -> list[str]:
    """Return the lines above a table of rows: the protocol, shared reasons, earlier checkpoints."""
    lines = ["No run has a score."]
    if protocol is not None:
        lines = [f"{protocol.line(units_of(rows))}."]
    lines += setting_lines(departing.shared, silent.shared)
    return lines + earlier_scores(rows)


def score_entry(row: Row, metric: str, paces: Paces) -> Entry:
    """Return a row's name, scores and notes. Without a score, "ours" says how its runs ended."""
    values = row.values(metric)
    facts = facts_of(row, values, paces)
    entry = {"run": row.name, **facts, "step": row.step or None, "note": notes_of(row)}
    if not values:
        states = {cell.state for cell in row.cells} - {"done"}
        entry |= {"ours": ", ".join(sorted(states)) or "no score", "seeds": None}
    if metric != "bits" and row.scores:
        entry["bits"] = mean(row.values().values())
    return entry


def paper_entry(row: Row, table: PaperTable, ours: float | str, equal: bool) -> Entry:
    """Return the paper's number for a row, and if settings are equal the difference from it."""
    printed = table.row_of(row.config)
    if printed is None:
        return {}
    entry: Entry = {"paper": printed.value, "paper_row": printed.label}
    if equal and printed.value and not isinstance(ours, str):
        entry["difference"] = ours - printed.value
    return entry


def entries_not_run(rows: Sequence[Row], table: PaperTable) -> list[Entry]:
    """Return entries for the rows of the paper's table that no run reproduces."""
    reproduced = [table.row_of(row.config) for row in rows]
    entries = []
    for printed in table.rows:
        if printed not in reproduced:
            entry = {"paper_row": printed.label, "paper": printed.value, "ours": "not run"}
            entries.append(entry)
    return entries


def rows_columns(
    protocol: Protocol | None, rows: Sequence[Row], table: PaperTable | None, equal: bool
) -> list[Column]:
    """Return the columns of a table of rows. If the paper's metric is not bits, bits are added."""
    bits = f"bits/{protocol.unit}" if protocol else "bits"
    metric = table.metric if table else bits
    scores = [
        Column("ours", metric, 4, "half"),
        Column("seeds", "seeds"),
        Column("sees_future", "sees future"),
        Column("bits", bits, 3),
    ]
    # The standard error is that of the bits, so its column follows theirs.
    error_index = 1 if metric.partition("/")[0] == "bits" else len(scores)
    scores.insert(error_index, ERROR)
    paper_title = "paper" if equal else "its number, not comparable"
    return [
        Column("run", "run"),
        *scores,
        *figure_columns(figures(rows)),
        Column("steps_per_second", "steps/s", 3, "pace_half", brief=False),
        PEAK,
        Column("step", "steps done", brief=False),
        Column("paper_row", "the paper's row", brief=equal),
        Column("paper", paper_title, 3, brief=equal),
        Column("difference", "difference", 3),
        Column("differs", "differs from the paper by", brief=False),
        Column("silent", "where the paper is silent or its code differs", brief=False),
        Column("note", "notes", brief=False),
    ]


def rows_title(protocol: Protocol | None, table: PaperTable | None, equal: bool) -> str:
    """Return the title of a table of rows."""
    title = "Scores of all rows"
    if table and equal:
        title = f"Table {table.number}. {table.title}"
    elif table:
        title = f"Table {table.number} with other settings than the paper's"
    if protocol is None:
        return title
    return f"{title}: {protocol.where}"


def earlier_scores(rows: Sequence[Row]) -> list[str]:
    """Return a line that counts the scores of checkpoints before the last step; none for none."""
    is_earlier = []
    for row in rows:
        is_earlier += [run.score.step < run.cell.step for run in row.scored]
    count = sum(is_earlier)
    if not count:
        return []
    verb = "is" if count == 1 else "are"
    scores = f"{count} of {plural(len(is_earlier), 'score')}"
    checkpoint = "a checkpoint before the run's last step"
    return [f"{scores} {verb} of {checkpoint}: the best on windows of the validation split."]


def shared_by_all(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return the items that all lists contain, in the order of the first list."""
    return [item for item in lists[0] if all(item in items for items in lists)]


def notes_of(row: Row) -> str:
    """Return notes on runs that are not done or have a reason, and on seeds of several runs."""
    notes = [run_note(cell) for cell in row.cells if cell.state != "done" or cell.reason]
    runs_by_seed = Counter(run.cell.seed for run in row.scored)
    for seed, runs in runs_by_seed.items():
        if runs > 1:
            notes.append(f"seed {seed}: mean of {runs} runs")
    return "; ".join(notes)


def run_note(cell: Cell) -> str:
    """Return how a run ended, and the first line of the reason."""
    if not cell.config:
        return cell.state
    note = f"seed {cell.seed} {cell.state} at step {cell.step:,}"
    if not cell.reason:
        return note
    first_line = cell.reason.splitlines()[0]
    return f"{note}: {first_line}"
