"""Tables of scores: kinds of heads ranked, ours beside the paper's, and all rows."""

import math
from collections.abc import Mapping, Sequence
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
from rtx.report.score_rows import Row, differing_keys, row_key, values_read
from rtx.report.tables import MINUS, Column, Table
from rtx.runs.records import Protocol

Paces = Mapping[Any, tuple[float, float | None, str]]
"""Steps a second and half their interval, as timed in turn, and why they may not be those of training, by row."""

AGAINST = ("full", "local+full", "local", "random", "random blocks")
"""The kinds that the others are compared with; where there is none of them, it is the first by name."""

CHOSE = "which chose it"
"""Behind the number of seeds of a row that was chosen by these very seeds."""

ERROR = Column("standard_error", "std. error", 4)
"""Of the bits of a score, over its windows."""

PEAK = Column("peak_percent", "% of the GPU's peak", 1, brief=False)
"""Of runs on a GPU whose peak is known (rtx/analysis/rates.json)."""

HOW = (
    "± are 95% intervals over seeds. Verdicts: paired differences where seeds match, else Welch's test; intervals and "
    "p after Holm's correction over the {} of the table."
)


def facts_of(row: Row, values: Values, paces: Paces) -> dict[str, Any]:
    """Return what every table says of a row: mean, interval and number of its scores by seed, what it sees, its pace.

    The pace is as timed in turn with others, else as its runs had it. The standard error is that of a score over its
    windows, the mean over the runs.
    """
    found, own = list(values.values()), row.paces()
    pace = paces.get(row_key(row.config)) or (
        (mean(own), half_interval(own)) if own else (None, None)
    )
    facts = {
        "ours": mean(found) if found else None,
        "half": half_interval(found),
        "seeds": len(found),
    }
    facts |= {"sees_future": "yes" if row.sees_future else "no"} if row.scores else {}
    errors = [score.error for score in row.scores if score.error is not None]
    facts["standard_error"] = mean(errors) if errors else None
    for name in figures([row]):
        facts[name] = mean(score.figures[name] for score in row.scores if name in score.figures)
    share = row.peak_share()
    facts["peak_percent"] = None if share is None else 100 * share
    return {**facts, "steps_per_second": pace[0], "pace_half": pace[1]}


def figures(rows: Sequence[Row]) -> list[str]:
    """Return the titles of the further measures that rows have."""
    return list(
        dict.fromkeys(name for row in rows for score in row.scores for name in score.figures)
    )


def said_of_paces(picked: Mapping[str, Row], paces: Paces) -> str:
    """Return which steps a second are not those of training timed in turn, as ` A sentence.`; empty: all are."""
    timed = {kind: paces.get(row_key(row.config)) for kind, row in picked.items()}
    own = [kind for kind, pace in timed.items() if pace is None and picked[kind].paces()]
    of = f" of {', '.join(own)}" if len(own) < len(picked) else ""
    said = [f"Steps/s{of} are as the runs went, not timed in turn."] if own else []
    said += [
        f"Steps/s of {kind} may not be those of training ({pace[2]})."
        for kind, pace in timed.items()
        if pace and pace[2]
    ]
    return "".join(f" {sentence}" for sentence in said)


def baseline(
    name: str, rows: Sequence[Row], protocol: Protocol | None, column: str = "ours"
) -> list[dict[str, Any]]:
    """Return a row, named in some column, of the best simple model of the same units, where one was scored."""
    split = protocol.split if protocol and protocol.windows is None else ""
    bits = next(
        (cell.baselines[split] for row in rows for cell in row.cells if cell.baselines.get(split)),
        {},
    )
    best = min(bits, key=lambda key: bits[key], default="")
    return [{name: f"baseline: {best}", column: bits[best]}] if bits else []


@dataclass(frozen=True)
class Pick:
    """The row that stands for a kind of heads, and the scores by seed that it is reported by.

    `values` are empty where every seed helped to choose the row. `note`: what it is the best of, of `rows` rows.
    """

    kind: str
    row: Row
    values: Values
    note: str
    rows: int


@dataclass(frozen=True)
class Kinds:
    """The kinds of heads of a protocol, ranked.

    `legal`: the scores by seed of the kinds that see no future; `against`: the rivals, the first one first; `compared`:
    each kind with each rival; `order`: the kinds from the least bits on, those that see the future last; `length`:
    units of a window that is scored.
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
    baseline: str  # the simple baseline that is ahead of every model, in words; empty: none


def picked_kinds(rows: Sequence[Row]) -> dict[str, Pick]:
    """Return the row that stands for each kind of heads."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if row.config and row.scores:
            kinds.setdefault(heads_label(row.config), []).append(row)
    found = {}
    for kind, alike in kinds.items():
        row, values, note = pick(alike)
        found[kind] = Pick(kind, row, values, note, len(alike))
    return found


def kinds_table(protocol: Protocol, rows: Sequence[Row], paces: Paces) -> Kinds:
    """Return the kinds of heads, those that see no future ranked.

    Of several rows of a kind the best is taken, with its scores by other seeds than those that chose it.
    """
    picked = picked_kinds(rows)
    legal = {kind: one.values for kind, one in picked.items() if not one.row.sees_future}
    against = [kind for kind in AGAINST if kind in legal] or sorted(legal)[:1]
    pairs = [
        (kind, other)
        for other in against
        for kind in legal
        if kind not in against[: against.index(other) + 1]
    ]
    compared = compare(legal, pairs)
    entries = []
    for kind, one in picked.items():
        entry = {
            "heads": kind,
            **facts_of(one.row, one.values or one.row.values(), paces),
            "note": one.note,
        }
        if not one.values:  # those that chose the row are no fair sample of its scores
            entry |= {"half": None, "seeds_remark": CHOSE}
        entry |= {"of": one.rows} if one.note else {}
        for other in against:
            entry[f"against_{other}"], entry[f"less_{other}"] = verdict(
                compared, kind, other, kind in legal
            )
        entries.append(entry)
    entries.sort(key=lambda row: (row["sees_future"] == "yes", row["ours"] or math.inf))
    simple = baseline("heads", rows, protocol)
    how = HOW.format(plural(len(pairs), "comparison"))
    lines = [f"{protocol.line(units_of(rows))}. {how}"]
    lines[0] += said_of_paces({kind: one.row for kind, one in picked.items()}, paces)
    lines += [f"{kind}: {one.note}." for kind, one in picked.items() if one.note]
    columns = kinds_columns(protocol, against, figures(rows))
    return Kinds(
        table=Table(f"Which heads pay? {protocol.where}", columns, [*entries, *simple], lines),
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
        *(Column(name, name, 3, brief="," not in name) for name in measures),
        *(Column(f"less_{kind}", f"less {kind}", brief=False) for kind in against),
        Column("of", "best of"),
    ]


def baseline_ahead(
    simple: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]], protocol: Protocol
) -> str:
    """Return the simple baseline and its bits where it is ahead of every model, else an empty string."""
    lowest = min(entry["ours"] or math.inf for entry in entries)
    for row in simple:
        if row["ours"] < lowest:
            name = row["heads"].partition(": ")[2]
            return f"{name} ({row['ours']:.3f} bits/{protocol.unit})"
    return ""


def pick(alike: Sequence[Row]) -> tuple[Row, Values, str]:
    """Return the row that stands for a kind, the scores that it is reported by, and what it is the best of."""
    if len(alike) == 1:
        return alike[0], alike[0].values(), ""
    at, values = chosen(
        {str(at): row.values() for at, row in enumerate(alike)}
    )  # names may be alike
    best_row = alike[int(at)]
    told = best_row.name.partition(": ")[2]
    best = f"best of {len(alike)}" + (f" ({told})" if told else "")
    if values:
        return best_row, values, f"{best}, by {plural(len(values), 'seed')} that did not choose it"
    return best_row, {}, f"{best}, by the seeds that chose it, so rather too low"


def verdict(
    found: Mapping[tuple[str, str], Comparison], kind: str, other: str, ranked: bool = True
) -> tuple[str, str]:
    """Return the verdict on a kind against another, and the difference of their means, its interval and p."""
    entry, sign = (
        (found[kind, other], 1) if (kind, other) in found else (found.get((other, kind)), -1)
    )
    if entry is None or entry.difference is None:
        return (FEW if entry else "") if ranked else "not ranked", ""
    word = entry.verdict if sign == 1 else OPPOSITE.get(entry.verdict, entry.verdict)
    chance = "p<0.001" if entry.chance < 0.001 else f"p={entry.chance:.2g}"
    return word, f"{sign * entry.difference:+.3f} ± {entry.half:.3f}, {chance}".replace("-", MINUS)


def units_of(rows: Sequence[Row]) -> int | None:
    """Return how many units were scored, where that is one number."""
    units = {score.units for row in rows for score in row.scores}
    return units.pop() if len(units) == 1 else None


def score_tables(protocol: Protocol | None, rows: Sequence[Row], paces: Paces) -> list[Table]:
    """Return the rows of a protocol: by each of the paper's tables those with its settings, and apart all others."""
    groups: dict[tuple[int, bool], list[Row]] = {}
    for row in rows:
        table = table_of(row.config)
        equal = bool(table and row.scores and not departures(row, table))
        groups.setdefault((table.number if table else 99, not equal), []).append(row)
    return [
        rows_table(protocol, mine, paces, table_of(mine[0].config), equal=not other)
        for (_, other), mine in sorted(groups.items(), key=lambda group: group[0])
    ]


def departures(row: Row, table: PaperTable) -> list[str]:
    """Return why a row's numbers may not be set against the paper's: setting, steps, split, protocol or data."""
    reasons = table.departures(row.config)
    stated = table.of_paper.get("trainer.steps")
    least = (
        stated["from"]
        if isinstance(stated, Mapping)
        else stated or row.config.get("trainer.steps") or 0
    )
    reasons += [f"{row.step:,} steps done of {least:,}"] if row.step < least else []
    for protocol in {score.protocol for score in row.scores}:
        reasons += (
            [f"split {protocol.split} (paper: {table.split})"]
            if protocol.split != table.split
            else []
        )
        reasons += ["a sample of the windows"] if protocol.windows else []
        reasons += [f"ablated: {protocol.ablate}"] if protocol.ablate != "none" else []
        reasons += ["streaming"] if protocol.mode != "parallel" else []
        trained = row.config.get("data.length")
        reasons += (
            [f"windows of {protocol.length} (trained on {trained})"]
            if protocol.length != trained
            else []
        )
        reasons += ["other data"] if protocol.data != row.config.get("data.name") else []
        reasons += [stamp.removesuffix(", not comparable") for stamp in protocol.stamps]
    return reasons


def rows_table(
    protocol: Protocol | None,
    rows: Sequence[Row],
    paces: Paces,
    table: PaperTable | None,
    equal: bool,
) -> Table:
    """Return all rows with the keys by which they differ.

    Beside the paper's number stands the difference to it where rows have its very settings (`equal`; its other rows
    stand there as not run), else what they have otherwise.
    """
    metric = table.metric.partition("/")[0] if table else "bits"
    bits = f"bits/{protocol.unit}" if protocol else "bits"
    reasons = [departures(row, table) if table else [] for row in rows]
    every = shared_by_all(reasons)
    silent = [table.differences(row.config) if table else [] for row in rows]
    every_silent = shared_by_all(silent)
    keys, entries = differing_keys([row.config for row in rows if row.config]), []
    for row, own, others in zip(rows, reasons, silent, strict=True):
        values, states = (
            row.values(metric),
            {cell.state for cell in row.cells} - {"done"} or {"no score"},
        )
        entry = {
            "run": row.name,
            **facts_of(row, values, paces),
            "step": row.step or None,
            "note": notes_of(row),
        }
        entry |= {} if values else {"ours": ", ".join(sorted(states)), "seeds": None}
        entry |= {"bits": mean(row.values().values())} if metric != "bits" and row.scores else {}
        if table and (printed := table.row_of(row.config)):
            entry |= {"paper": printed.value, "paper_row": printed.label}
            entry |= (
                {"difference": entry["ours"] - printed.value}
                if equal and printed.value and values
                else {}
            )
        entry |= {"differs": "; ".join(reason for reason in own if reason not in every)}
        entry |= {"silent": "; ".join(one for one in others if one not in every_silent)}
        values_of_row = values_read(row.config)
        entries.append(entry | {key: values_of_row.get(key) for key in keys})
    entries.sort(key=lambda entry: math.inf if isinstance(entry["ours"], str) else entry["ours"])
    entries += baseline("run", rows, protocol, "ours" if metric == "bits" else "bits")
    if table and equal:
        run = [table.row_of(row.config) for row in rows]
        rest = [printed for printed in table.rows if printed not in run]
        entries += [{"paper_row": one.label, "paper": one.value, "ours": "not run"} for one in rest]
    columns = [
        Column("run", "run"),
        Column("ours", table.metric if table else bits, 4, "half"),
        *([ERROR] if metric == "bits" else []),
        Column("seeds", "seeds"),
        Column("sees_future", "sees future"),
        Column("bits", bits, 3),
        *([] if metric == "bits" else [ERROR]),
        *(Column(name, name, 3, brief="," not in name) for name in figures(rows)),
        Column("steps_per_second", "steps/s", 3, "pace_half", brief=False),
        PEAK,
        Column("step", "steps done", brief=False),
        Column("paper_row", "the paper's row", brief=equal),
        Column("paper", "paper" if equal else "its number, not comparable", 3, brief=equal),
        Column("difference", "difference", 3),
        Column("differs", "differs from the paper by", brief=False),
        Column("silent", "where the paper is silent or its code differs", brief=False),
        Column("note", "notes", brief=False),
    ]
    lines = [f"{protocol.line(units_of(rows))}."] if protocol else ["No run has a score."]
    lines += setting_lines(every, every_silent)
    pairs = [pair for row in rows for pair in zip(row.cells, row.scores, strict=False)]
    if earlier := sum(score.step < cell.step for cell, score in pairs):
        verb = "is" if earlier == 1 else "are"
        said = f"{earlier} of {plural(len(pairs), 'score')} {verb} of a checkpoint before the run's last step"
        lines.append(f"{said}: the best on windows of the validation split.")
    title = f"Table {table.number}" if table else "All rows"
    if table:
        title += f". {table.title}" if equal else " with other settings than the paper's"
    title += f": {protocol.where}" if protocol else ""
    return Table(title, columns, entries, lines, table.footnotes if table else ())


def shared_by_all(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return what all lists hold, in the order of the first."""
    return [one for one in lists[0] if all(one in other for other in lists)]


def notes_of(row: Row) -> str:
    """Return what else to know of a row: how runs ended, seeds that were run more than once."""
    notes = []
    for cell in (cell for cell in row.cells if cell.state != "done" or cell.reason):
        why = f": {cell.reason.splitlines()[0]}" if cell.reason else ""
        notes.append(
            f"seed {cell.seed} {cell.state} at step {cell.step:,}{why}"
            if cell.config
            else cell.state
        )
    seeds = [cell.seed for cell in row.cells[: len(row.scores)]]
    twice = [seed for seed in dict.fromkeys(seeds) if seeds.count(seed) > 1]
    return "; ".join(
        [*notes, *(f"seed {seed}: mean of {seeds.count(seed)} runs" for seed in twice)]
    )
