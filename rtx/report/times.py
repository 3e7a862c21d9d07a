"""Two questions that need seconds of training: how long a row takes to a loss, and which row is ahead at equal time.

Seconds are those of optimizer steps alone, which a run records beside its validations. Of older runs they are their
steps over a pace. Only runs of one machine, with like threads, engine and validations, are compared.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rtx.errors import plural
from rtx.report.curves import (
    BUDGETS,
    Curve,
    Finding,
    Runs,
    budgets_of,
    judged,
    losses_after,
    losses_of,
    pairs_of,
    times_to,
)
from rtx.report.ranking import FEW
from rtx.report.run_records import Cell
from rtx.report.score_rows import row_key
from rtx.report.score_tables import Kinds, Pick
from rtx.report.steps import StepRecord, TimedRow
from rtx.report.tables import DASH, MINUS, Column, Table

IN_TURN = "timed in turn"
VALIDATIONS = ("data.length", "trainer.val_stride", "trainer.val_windows")
"""What rows share, beside their data, for their validations to be of the same units in the same context."""

FASTER = {"better": "faster", "behind": "slower", "tied": "tied", FEW: ""}
SHARES = ("1/8", "1/4", "1/2", "all")
"""The titles of `BUDGETS`."""


@dataclass(frozen=True)
class Against:
    """All kinds of heads against a rival: findings by kind and loss, and by kind and share of the time.

    `seconds`: the time that is shared out, the shortest of a kind's runs and of the rival's, by kind.
    """

    rival: str
    losses: Sequence[float]
    times: Mapping[tuple[str, float], Finding]
    gaps: Mapping[tuple[str, float], Finding]
    seconds: Mapping[str, float]
    notes: Sequence[str]


def curve_of(cell: Cell, pace: float | None) -> Curve | None:
    """Return the curve of a run by the seconds that it recorded, else by its steps over a pace; None: no validation."""
    steps = sorted(step for step in cell.curve if step > 0)
    if cell.trained:
        points = [(cell.trained[step], cell.curve[step][0]) for step in steps if step in cell.trained]
    else:
        points = [(step / pace, cell.curve[step][0]) for step in steps if pace]
    rising: list[tuple[float, float]] = []
    for seconds, bits in points:
        if seconds > 0 and math.isfinite(bits) and (not rising or seconds > rising[-1][0]):
            rising.append((seconds, bits))
    return Curve([seconds for seconds, _ in rising], [bits for _, bits in rising]) if rising else None


def clock_of(cell: Cell, record: StepRecord | None) -> str:
    """Return what two runs share whose seconds may be compared, as JSON of its parts by their names.

    `record`: the record of steps timed in turn that the pace comes from; the machine of the run does not matter then.
    """
    facts = cell.environment.get("hardware", {})
    clock: dict[str, Any] = {"validation windows": [cell.data.get("fingerprint")]}
    clock["validation windows"] += [cell.config[key] for key in VALIDATIONS]
    if record:
        return json.dumps({**clock, IN_TURN: record.facts["time"]}, sort_keys=True)
    gpu = cell.environment.get("gpu")
    clock["machine"] = cell.environment.get("host")
    clock["GPU"] = gpu
    clock["threads"] = None if gpu else cell.environment.get("threads")
    clock["processes"] = [facts.get("devices", 1), facts.get("nodes", 1)]
    clock["precision"] = cell.config["hardware.precision"]
    clock["compilation"] = cell.config["hardware.compile"]
    clock["attention engine"] = cell.config["hardware.attention"]
    if cell.moved:
        clock["machine"] = f"several, of {cell.name}"
    return json.dumps(clock, sort_keys=True)


def other_clock(own: Runs, rival: Runs) -> str:
    """Return in what the clock of most of a row's runs differs from the rival's, in words."""
    (mine, _), *_ = Counter(clock for _, clock in own.curves).most_common()
    (theirs, _), *_ = Counter(clock for _, clock in rival.curves).most_common()
    ours = json.loads(mine)
    others = json.loads(theirs)
    if (IN_TURN in ours) != (IN_TURN in others):
        return "timed in another way"
    named = [name for name in sorted({*ours, *others}) if ours.get(name) != others.get(name)]
    return f"other {' and '.join(named)}" if named else "no seed in common"


def record_of(picks: Sequence[Pick], records: Sequence[StepRecord]) -> StepRecord | None:
    """Return the newest record that has timed all rows in turn whose runs did not record their seconds."""
    keys = {row_key(pick.row.config) for pick in picks if not all(cell.trained for cell in pick.row.cells)}
    for record in records:
        if keys and keys <= {row_key(row.config) for row in record.rows if row.turns}:
            return record
    return None


def runs_of(pick: Pick, record: StepRecord | None) -> tuple[Runs, str]:
    """Return the curves of a row's seeds, and a sentence on its seconds where its runs did not record them."""
    timed = row_of(record, pick) if record else None
    curves = {}
    derived = False
    for cell in pick.row.cells:
        in_turn = timed if not cell.trained else None
        curve = curve_of(cell, in_turn.speed if in_turn else cell.pace)
        if curve and cell.seed in pick.values:
            curves[cell.seed, clock_of(cell, record if in_turn else None)] = curve
            derived = derived or not cell.trained
    if not derived:
        return Runs(curves), ""
    pace = f"a pace {IN_TURN}" if timed else "the median pace of each run"
    return Runs(curves, timed.log_error if timed else None), pace


def row_of(record: StepRecord, pick: Pick) -> TimedRow | None:
    """Return the row of a record that has timed a kind in training."""
    key = row_key(pick.row.config)
    able = (row for row in record.rows if row.turns and not row.reason)
    return next((row for row in able if row_key(row.config) == key), None)


def all_runs(kinds: Kinds, records: Sequence[StepRecord]) -> tuple[dict[str, Runs], list[str]]:
    """Return the curves of all kinds that have any, and sentences on seconds that were not recorded."""
    picks = [pick for pick in kinds.picked.values() if pick.values]
    record = record_of(picks, records)
    found: dict[str, Runs] = {}
    derived: dict[str, list[str]] = {}
    for pick in picks:
        runs, pace = runs_of(pick, record)
        if runs.curves:
            found[pick.kind] = runs
        if runs.curves and pace:
            derived.setdefault(pace, []).append(pick.kind)
    notes = []
    for pace, names in derived.items():
        of = "" if len(names) == len(found) else f" of {', '.join(names)}"
        device = f" ({record.facts['device']}); its error is in the verdicts" if record and IN_TURN in pace else ""
        notes.append(f"Seconds{of} were not recorded: they are steps over {pace}{device}.")
    return found, notes


def comparisons(kinds: Kinds, records: Sequence[StepRecord]) -> list[Against]:
    """Return the findings against each rival that has curves, in the order of the rivals."""
    runs, notes = all_runs(kinds, records)
    legal = {kind: runs[kind] for kind in kinds.legal if kind in runs}
    found = []
    for number, rival in enumerate(kinds.against):
        others = {kind: own for kind, own in legal.items() if kind not in kinds.against[: number + 1]}
        if rival in legal and others:
            found.append(against(rival, legal[rival], others, notes))
    return found


def against(rival: str, runs: Runs, others: Mapping[str, Runs], notes: Sequence[str]) -> Against:
    """Return the findings on some kinds against a rival."""
    losses = losses_of(runs)
    times = {}
    gaps = {}
    seconds = {}
    told = list(notes)
    for kind, own in others.items():
        pairs = pairs_of(own, runs)
        if not pairs:
            told.append(f"{kind}: no ratio, {other_clock(own, runs)} than {rival}.")
            continue
        if len(pairs) < len(own.curves):
            left_out = plural(len(own.curves) - len(pairs), "run")
            told.append(f"{kind}: {left_out} without a run of {rival} of like seed, machine, threads and engine.")
        budgets = budgets_of(own, runs)
        seconds[kind] = budgets[-1]
        for loss in losses:
            times[kind, loss] = times_to(loss, own, runs)
        for share, budget in zip(BUDGETS, budgets, strict=True):
            gaps[kind, share] = losses_after(budget, own, runs)
    return Against(rival, losses, judged(times), judged(gaps), seconds, told)


def tables_of(found: Sequence[Against], kinds: Kinds, constant: bool) -> list[Table]:
    """Return two tables for each rival; a terminal shows those of the first.

    `constant`: whether the learning rate stays constant in all rows.
    """
    tables = []
    for number, one in enumerate(found):
        rows = [kind for kind in kinds.order if kind in kinds.legal and kind not in kinds.against[: number + 1]]
        tables.append(time_table(one, rows, brief=number == 0))
        tables.append(gap_table(one, rows, constant, brief=number == 0))
    return tables


def time_table(one: Against, rows: Sequence[str], brief: bool) -> Table:
    """Return the times to several losses as shares of the rival's."""
    entries: list[dict[str, Any]] = []
    for kind in rows:
        entry: dict[str, Any] = {"heads": kind}
        for number, loss in enumerate(one.losses):
            finding = one.times.get((kind, loss), Finding("no ratio"))
            entry[f"loss_{number}"] = ratio_text(finding)
            entry |= numbers_of(finding, f"share of time to {loss:.2f}", math.exp)
        entries.append(entry)
    columns = [Column("heads", "heads", brief=brief)]
    for number, loss in enumerate(one.losses):
        columns.append(Column(f"loss_{number}", f"to {loss:.2f} bits", brief=brief and number > 0))
    lines = [
        f"Seconds of optimizer steps to a validation of so many bits, as a share of those of {one.rival}: below 1 is "
        "faster. Between validations bits are taken to fall in a straight line over log time. Ratios are geometric "
        f"means paired by seed; {corrected(one.times)}.",
        *one.notes,
    ]
    return Table(f"Time to a loss, against {one.rival}", columns, entries, lines)


def gap_table(one: Against, rows: Sequence[str], constant: bool, brief: bool) -> Table:
    """Return the differences in bits from the rival at several shares of the shorter time of the two."""
    entries = []
    for kind in rows:
        entry: dict[str, Any] = {"heads": kind, "time": duration(one.seconds[kind]) if kind in one.seconds else ""}
        for title, share in zip(SHARES, BUDGETS, strict=True):
            finding = one.gaps.get((kind, share), Finding("no ratio"))
            entry[f"after_{title}"] = gap_text(finding)
            entry |= numbers_of(finding, f"difference after {title}", float)
        entries.append(entry)
    columns = [Column("heads", "heads", brief=brief), Column("time", "equal time", brief=brief)]
    for title in SHARES:
        columns.append(Column(f"after_{title}", f"after {title} of it", brief=brief and title != SHARES[0]))
    lines = [
        f"Bits less those of {one.rival} after equal seconds of optimizer steps, by the best validation so far: below "
        f"0 is better. The equal time is that of the shortest run of the two rows. Paired by seed; "
        f"{corrected(one.gaps)}."
    ]
    if not constant:
        lines[0] += " The learning rate is not constant: a run planned for a shorter time would be better there."
    return Table(f"Loss at equal time, against {one.rival}", columns, entries, [*lines, *one.notes])


def corrected(findings: Mapping[Any, Finding]) -> str:
    count = sum(finding.comparison.difference is not None for finding in findings.values())
    return f"intervals and verdicts after Holm's correction over the {plural(count, 'comparison')} of the table"


def ratio_text(finding: Finding) -> str:
    """Return `faster 0.44 (0.40 to 0.48)`, or a number without a verdict, or why there is no number."""
    if finding.middle is None:
        return finding.why
    word = FASTER[finding.comparison.verdict]
    return f"{word} {ratio_span(finding).replace(' to ', DASH)}" if word else f"{math.exp(finding.middle):.2f}, {FEW}"


def ratio_span(finding: Finding) -> str:
    """Return a ratio and its interval: `0.44 (0.40 to 0.48)`."""
    assert finding.middle is not None
    half = finding.comparison.half
    low = math.exp(finding.middle - half)
    high = math.exp(finding.middle + half)
    return f"{math.exp(finding.middle):.2f} ({low:.2f} to {high:.2f})"


def gap_text(finding: Finding) -> str:
    """Return a verdict with a difference and its interval, or a number alone, or why there is none."""
    if finding.middle is None:
        return finding.why
    middle = f"{finding.middle:+.3f}".replace("-", MINUS)
    if finding.comparison.verdict == FEW:
        return f"{middle}, {FEW}"
    return f"{finding.comparison.verdict} {middle} ± {finding.comparison.half:.3f}"


def numbers_of(finding: Finding, name: str, scale: Any) -> dict[str, Any]:
    """Return a finding's number, interval and p by the names that exported files have for them."""
    if finding.middle is None:
        return {}
    found = {name: scale(finding.middle)}
    if finding.comparison.difference is not None:
        half = finding.comparison.half
        found[f"{name}, low"] = scale(finding.middle - half)
        found[f"{name}, high"] = scale(finding.middle + half)
        found[f"{name}, p"] = finding.comparison.chance
    return found


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"
