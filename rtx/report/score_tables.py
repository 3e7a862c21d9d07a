"""Tables of scores: kinds of heads ranked, ours beside the paper's, and all rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rtx.report.paper import PaperTable, heads_label, kind_of, table_of
from rtx.report.ranking import FEW, SEEDS, Comparison, chosen, compare, half_interval, mean, standings
from rtx.report.run_records import whole
from rtx.report.score_rows import Protocol, Row, differing_keys, row_key, shown
from rtx.report.tables import Column, Table, signed
from rtx.wording import plural

Paces = Mapping[Any, tuple[float, float | None]]
"""Steps a second and half their interval, by the key of a row."""

AGAINST = ("local", "random")
"""The kinds that the others are compared with."""


def pace_of(row: Row, paces: Paces) -> dict[str, float | None]:
    """Return a row's steps a second: as timed in turn with others, else as its runs had them."""
    own = row.paces()
    pace = (
        paces.get(row_key(row.cells[0])) or (mean(own), half_interval(own)) if own else paces.get(row_key(row.cells[0]))
    )
    return {"steps_per_second": pace[0], "pace_half": pace[1]} if pace else {}


def interval(values: Mapping[str, float]) -> dict[str, float | int | None]:
    """Return mean, half the 95% interval and number of scores by seed."""
    found = list(values.values())
    return {"ours": mean(found) if found else None, "half": half_interval(found), "seeds": len(found)}


def kinds_table(
    protocol: Protocol,
    rows: Sequence[Row],
    paces: Paces,
    metric: str = "bits",
    errors: Mapping[str, tuple[float, float]] | None = None,
) -> tuple[Table, str]:
    """Return the kinds of heads, those that see no future ranked, and a sentence on what may be concluded.

    Of several rows of a kind the best is taken, with its scores by other seeds than those that chose it. `errors` are
    of the kinds, as `compare` has them.
    """
    kinds: dict[str, list[Row]] = {}
    for row in (row for row in rows if row.values(metric) and row.config):
        kinds.setdefault(heads_label(row.config), []).append(row)
    entries, values = {}, {}
    for kind, alike in kinds.items():
        row, values[kind], note = pick(alike, metric)
        entries[kind] = {"heads": kind, **interval(values[kind]), **pace_of(row, paces), "note": note}
        entries[kind]["sees_future"] = "yes" if row.sees_future else "no"
    legal = {kind: found for kind, found in values.items() if entries[kind]["sees_future"] == "no"}
    against = [kind for kind in AGAINST if kind in legal]
    pairs = [(kind, other) for other in against for kind in legal if kind != other and (kind, other) != AGAINST]
    found = compare(legal, pairs, errors)
    for kind, entry in entries.items():
        for other in against:
            entry[f"against_{other}"] = words_of(found, kind, other) if kind in legal else "not ranked"
    if not against:
        words = standings(legal)
        entries = {kind: {**entry, "standing": words.get(kind, "not ranked")} for kind, entry in entries.items()}
    columns = [
        Column("heads", "heads"),
        Column("ours", unit_of(protocol, metric), 4, "half"),
        Column("seeds", "seeds"),
        Column("sees_future", "sees future"),
        Column("steps_per_second", "steps/s", 3, "pace_half"),
        *(Column(f"against_{kind}", f"against {kind}") for kind in against),
        Column("standing", "standing"),
        Column("note", "of"),
    ]
    order = sorted(
        entries.values(), key=lambda row: (row["sees_future"] == "yes", row["ours"] is None, row["ours"] or 0)
    )
    table = Table(f"Which heads pay? {protocol.where}", columns, order, [f"{protocol.line(units_of(rows))}. {HOW}"])
    return table, conclusion(legal, against, found, [kind for kind in kinds if kind not in legal])


HOW = (
    "\N{PLUS-MINUS SIGN} are 95% intervals over seeds. Verdicts: paired differences where seeds match, else Welch's "
    "test; Holm's correction over the table."
)


def pick(alike: Sequence[Row], metric: str) -> tuple[Row, dict[str, float], str]:
    """Return the row that stands for a kind, the scores that it is reported by, and what it is the best of."""
    if len(alike) == 1:
        return alike[0], alike[0].values(metric), ""
    by_name = {row.name: row for row in alike}
    name, values = chosen({row.name: row.values(metric) for row in alike})
    seeds = f"by {plural(len(values), 'seed')} that did not choose it" if values else "no seed but those that chose it"
    return by_name[name], values, f"best of {len(alike)} ({name.partition(': ')[2]}), {seeds}"


def words_of(found: Mapping[tuple[str, str], Comparison], kind: str, other: str) -> str:
    """Return the verdict on a kind against another, with difference and interval."""
    if kind == other:
        return ""
    entry, sign = (found[kind, other], 1) if (kind, other) in found else (found[other, kind], -1)
    if entry.difference is None:
        return FEW
    verdict = entry.verdict if sign == 1 else {"better": "behind", "behind": "better"}.get(entry.verdict, entry.verdict)
    return f"{verdict} ({signed(sign * entry.difference, 3)} ± {entry.half:.3f})"


def conclusion(
    legal: Mapping[str, Mapping[str, float]],
    against: Sequence[str],
    found: Mapping[tuple[str, str], Comparison],
    unranked: Sequence[str],
) -> str:
    """Return in a sentence or two what may be said of the kinds."""
    few = {kind: len(values) for kind, values in legal.items() if len(values) < SEEDS}
    said = [f"{' and '.join(unranked)} sees the future and is not ranked"] if unranked else []
    if len(legal) < 2:
        return "; ".join(["Nothing to compare: one kind of heads has a score that sees no future", *said]) + "."
    if len(few) == len(legal):
        lowest = min(legal, key=lambda kind: mean(legal[kind].values()) if legal[kind] else math.inf)
        why = f"a verdict takes {SEEDS} seeds, and here are {' or '.join(map(str, sorted(set(few.values()))))}"
        said.insert(0, f"Not certain: {lowest} heads have the lowest mean, but {why}")
    elif few:
        said.insert(0, f"no verdict on {', '.join(few)}: fewer than {SEEDS} seeds")
    for other in against:
        verdicts: dict[str, list[str]] = {}
        for kind in (kind for kind in legal if kind != other):
            word = words_of(found, kind, other).partition(" (")[0]
            verdicts.setdefault(word, []).append(kind)
        named = {
            "better": f"better than {other}",
            "behind": f"behind {other}",
            "tied": f"no difference from {other} shown",
        }
        parts = [f"{text}: {', '.join(verdicts[word])}" for word, text in named.items() if word in verdicts]
        said.insert(against.index(other), "; ".join(parts)) if parts else None
    text = "; ".join(filter(None, said)) or "no difference shown"
    return text[0].upper() + text[1:] + "."


def unit_of(protocol: Protocol | None, metric: str) -> str:
    """Return what a column of scores holds."""
    return f"bits/{protocol.unit if protocol else 'unit'}" if metric.startswith("bits") else metric


def units_of(rows: Sequence[Row]) -> int | None:
    """Return how many units were scored, where that is one number."""
    units = {score.units for row in rows for score in row.scores}
    return units.pop() if len(units) == 1 else None


def score_tables(protocol: Protocol | None, rows: Sequence[Row], paces: Paces) -> list[Table]:
    """Return the rows of a protocol: by each of the paper's tables those with its settings and apart all others."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        table = table_of(row.config) if row.config else None
        groups.setdefault(table.number if table else 99, []).append(row)
    made = []
    for number in sorted(groups):
        mine, table = groups[number], table_of(groups[number][0].config)
        if table is None:
            made.append(rows_table("All rows", protocol, mine, paces, None))
            continue
        equal = [row for row in mine if row.scores and not departures(row, table)]
        made += [beside_paper(table, protocol, equal)] if equal else []
        if others := [row for row in mine if row not in equal]:
            made.append(
                rows_table(f"{table.name} with other settings than the paper's", protocol, others, paces, table)
            )
    return made


def departures(row: Row, table: PaperTable) -> list[str]:
    """Return why a row's numbers may not be set against the paper's: setting, steps, split, protocol or data."""
    reasons = table.departures(row.config)
    stated = table.setting.get("trainer.steps")
    least = stated["from"] if isinstance(stated, Mapping) else stated or row.config.get("trainer.steps") or 0
    reasons += [f"{row.step:,} steps done of {least:,}"] if row.step < least else []
    for protocol in {score.protocol for score in row.scores}:
        reasons += [f"split {protocol.split} (paper: {table.split})"] if protocol.split != table.split else []
        reasons += ["a sample of the windows"] if protocol.windows else []
        reasons += [f"ablated: {protocol.ablate}"] if protocol.ablate != "none" else []
        reasons += ["streaming"] if protocol.mode != "parallel" else []
        reasons += ["other data"] if protocol.data != row.config.get("data.name") else []
        reasons += [stamp.removesuffix(", not comparable") for stamp in protocol.stamps]
    return reasons


def beside_paper(table: PaperTable, protocol: Protocol | None, rows: Sequence[Row]) -> Table:
    """Return a table of the paper with our runs of its very settings, all its other rows as not run."""
    metric, entries = table.metric.partition("/")[0], []
    for printed in table.rows:
        mine = [row for row in rows if table.row_of(row.config) is printed]
        sizes = {"layers": printed.layers, "heads": printed.heads}
        base = {"model": printed.label, **sizes, "paper": printed.value}
        for row in mine:
            ours = interval(row.values(metric))
            gap = ours["ours"] - printed.value if ours["ours"] is not None and printed.value is not None else None
            sight = "yes" if row.sees_future else "no"
            entries.append({**base, **ours, "difference": gap, "sees_future": sight, "note": notes_of(row)})
        entries += [] if mine else [{**base, "ours": "not run"}]
    columns = [
        Column("model", "model"),
        Column("layers", "layers", brief=False),
        Column("heads", "heads", brief=False),
        Column("ours", f"ours ({table.metric})", 3, "half"),
        Column("seeds", "seeds"),
        Column("paper", "paper", 3),
        Column("difference", "difference", 3),
        Column("sees_future", "sees future"),
        Column("note", "notes"),
    ]
    where = f"{table.name}. {table.title}: {protocol.where if protocol else 'no scores yet'}"
    return Table(where, columns, entries, [f"{protocol.line(units_of(rows))}."] if protocol else [], table.footnotes)


def rows_table(
    title: str, protocol: Protocol | None, rows: Sequence[Row], paces: Paces, table: PaperTable | None
) -> Table:
    """Return all rows with the keys by which they differ; beside the paper's number what they have otherwise."""
    metric = table.metric.partition("/")[0] if table else "bits"
    reasons = {id(row): departures(row, table) if table else [] for row in rows}
    every = [reason for reason in reasons[id(rows[0])] if all(reason in mine for mine in reasons.values())]
    keys, entries = differing_keys([row.config for row in rows if row.config]), []
    for row in sorted(rows, key=lambda row: mean(row.values(metric).values()) if row.values(metric) else 1e9):
        printed = table.row_of(row.config) if table else None
        own = [reason for reason in reasons[id(row)] if reason not in every]
        state = ", ".join(dict.fromkeys(cell.state for cell in row.cells if cell.state != "done"))
        score = interval(row.values(metric)) if row.values(metric) else {"ours": state or "no score"}
        sight = {"sees_future": "yes" if row.sees_future else "no"} if row.scores else {}
        keyed = {key: shown(key, row.config) for key in keys}
        beside = {"paper": printed.value, "paper_row": printed.label} if printed else {}
        beside |= {"bits": mean(row.values().values())} if metric != "bits" and row.scores else {}
        facts = {"step": row.step or None, "differs": "; ".join(own), "note": notes_of(row)}
        entries.append({"run": row.name, **score, **sight, **pace_of(row, paces), **beside, **facts, **keyed})
    columns = [
        Column("run", "run"),
        Column("ours", unit_of(protocol, metric), 4, "half"),
        Column("seeds", "seeds"),
        Column("sees_future", "sees future"),
        Column("bits", unit_of(protocol, "bits"), 3, brief=False),
        Column("steps_per_second", "steps/s", 3, "pace_half", brief=False),
        Column("step", "steps done", brief=False),
        Column("paper_row", "the paper's row", brief=False),
        Column("paper", "its number, not comparable", 3, brief=False),
        Column("differs", "differs from the paper by", brief=False),
        Column("note", "notes", brief=False),
    ]
    lines = [f"{protocol.line(units_of(rows))}."] if protocol else ["No run has a score."]
    lines += [f"Not the paper's setting: {'; '.join(every)}."] if every else []
    where = f"{title}: {protocol.where}" if protocol else title
    return Table(where, columns, entries, [*lines, *earlier_weights(rows)], table.footnotes if table else ())


def notes_of(row: Row) -> str:
    """Return what else to know of a row: how runs ended, seeds that were run more than once."""
    notes = []
    for cell in (cell for cell in row.cells if cell.state != "done" or cell.reason):
        why = f": {cell.reason.splitlines()[0]}" if cell.reason else ""
        notes.append(f"seed {cell.seed} {cell.state} at step {cell.step:,}{why}" if cell.config else cell.state)
    seeds = [score.seed for score in row.scores]
    notes += [
        f"seed {seed}: mean of {seeds.count(seed)} runs" for seed in dict.fromkeys(seeds) if seeds.count(seed) > 1
    ]
    return "; ".join(notes)


def earlier_weights(rows: Sequence[Row]) -> list[str]:
    """Return a line where some scores are of a checkpoint before the run's last step, as the best one may be."""
    scores = [score for row in rows for score in row.scores]
    count = sum(score.earlier is not None for score in scores)
    if not count:
        return []
    return [
        f"{count} of {plural(len(scores), 'score')} are of a checkpoint before the run's last step: the best on "
        "windows of the validation split."
    ]


def heads_in_layers(rows: Sequence[Row]) -> dict[int, dict[tuple[int, int], float]]:
    """Return by window the mean bits of routing rows, by routing heads and routing layers: the grid of Table 1."""
    found: dict[int, dict[tuple[int, int], float]] = {}
    for row in (row for row in rows if kind_of(row.config) == "routing" and row.values()):
        window, heads, layers = (whole(row.config.get(f"routing.{key}")) for key in ("window", "heads", "layers"))
        found.setdefault(window, {})[heads, layers] = mean(row.values().values())
    return {window: grid for window, grid in sorted(found.items()) if len(grid) > 3}
