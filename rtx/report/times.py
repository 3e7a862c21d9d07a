"""Tables of times to a loss and of losses at equal time, for each rival of the kinds of heads.

Seconds are those of optimizer steps alone, which a run records with each validation. For runs that
did not record them they are steps divided by steps a second. Seconds are compared only between runs
of one machine, with equal threads, precision, engine and validation windows.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rtx.errors import plural
from rtx.report.curves import (
    BUDGETS,
    Curve,
    Finding,
    Runs,
    budgets_of,
    findings_of,
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
from rtx.tables import DASH, MINUS, Column, Table

IN_TURN = "timed in turn"
VALIDATIONS = ("data.length", "trainer.val_stride", "trainer.val_windows")
"""Keys by which validations on the same data score the same units in the same context."""

FASTER = {"better": "faster", "behind": "slower", "tied": "tied", FEW: ""}
"""Verdicts on times, in words."""
BUDGET_TITLES = ("1/8", "1/4", "1/2", "all")
"""Of `BUDGETS`."""

MOST_LOG_RATIO = 700.0
"""Of which the exponential is still a float."""
NO_RATIO = Finding("no ratio")


@dataclass(frozen=True)
class TimeFindings:
    """All kinds of heads against one rival.

    `times`: findings by kind and loss; `gaps`: by kind and share of the equal time; `seconds`: the
    equal time by kind, that of the shortest run of the kind and the rival. Kinds that share no
    clock and seed with the rival are in none of them.
    """

    rival: str
    losses: Sequence[float]
    times: Mapping[tuple[str, float], Finding]
    gaps: Mapping[tuple[str, float], Finding]
    seconds: Mapping[str, float]
    notes: Sequence[str]


def curve_of(cell: Cell, pace: float | None) -> Curve | None:
    """Return the curve of a run by the seconds that it recorded, or by steps over a pace.

    None where there is no validation with seconds. A validation whose seconds do not rise is left
    out: the estimate for the first step of a process moves with the mean of the others.
    """
    steps = sorted(step for step in cell.curve if step > 0)
    if cell.trained:
        seconds_by_step = cell.trained
    else:
        seconds_by_step = {step: step / pace for step in steps if pace}
    seconds: list[float] = []
    bits: list[float] = []
    latest = 0.0
    for step in steps:
        now = seconds_by_step.get(step, math.nan)
        value = cell.curve[step]
        if math.isfinite(now) and math.isfinite(value) and now > latest:
            seconds.append(now)
            bits.append(value)
            latest = now
    return Curve(seconds, bits) if seconds else None


def clock_of(cell: Cell, record: StepRecord | None) -> str:
    """Return what is equal in two runs whose seconds may be compared, as JSON by its names.

    `record`: where the pace of the run comes from, if its steps were timed in turn with those of
    others; then the machine that trained it does not matter.
    """
    windows = [cell.fingerprint, *(cell.config[key] for key in VALIDATIONS)]
    clock: dict[str, Any] = {"validation windows": windows}
    if record:
        clock[IN_TURN] = record.facts.time
        return json.dumps(clock, sort_keys=True)
    assert cell.environment is not None  # a run without one has no curve
    hardware = cell.environment.hardware
    gpu = cell.environment.gpu
    clock["machine"] = f"several, of {cell.name}" if cell.moved else cell.environment.host
    clock["GPU"] = gpu
    clock["threads"] = None if gpu else cell.environment.threads
    clock["processes"] = [hardware.get("devices", 1), hardware.get("nodes", 1)]
    clock["precision"] = cell.config["hardware.precision"]
    clock["compilation"] = cell.config["hardware.compile"]
    clock["attention engine"] = cell.config["hardware.attention"]
    return json.dumps(clock, sort_keys=True)


def why_no_pair(row: Runs, rival: Runs, name: str) -> str:
    """Return why no run of a row is paired with one of a rival, by the clocks that most have."""
    clock = json.loads(usual_clock(row))
    clock_of_rival = json.loads(usual_clock(rival))
    if (IN_TURN in clock) != (IN_TURN in clock_of_rival):
        return f"timed in another way than {name}"
    names = sorted({*clock, *clock_of_rival})
    other = [part for part in names if clock.get(part) != clock_of_rival.get(part)]
    if not other:
        return f"no seed in common with {name}"
    return f"other {' and '.join(other)} than {name}"


def usual_clock(runs: Runs) -> str:
    """Return the clock of most runs."""
    clocks = Counter(clock for _, clock in runs.curves)
    return clocks.most_common(1)[0][0]


def record_of(picks: Sequence[Pick], records: Sequence[StepRecord]) -> StepRecord | None:
    """Return the newest record with all rows whose runs did not record their seconds."""
    needed = set()
    for pick in picks:
        if not all(cell.trained for cell in pick.row.cells):
            needed.add(row_key(pick.row.config))
    if not needed:
        return None
    for record in records:
        timed = {row_key(row.config) for row in record.rows if row.turns}
        if needed <= timed:
            return record
    return None


def timed_row(record: StepRecord | None, pick: Pick) -> TimedRow | None:
    """Return the row of a record that has timed a kind as it trains."""
    if record is None:
        return None
    key = row_key(pick.row.config)
    for row in record.rows:
        if row.turns and not row.reason and row_key(row.config) == key:
            return row
    return None


def runs_of(pick: Pick, record: StepRecord | None) -> tuple[Runs, str]:
    """Return the curves of the seeds that a kind is reported by, and where their pace is from.

    That is empty where all runs recorded their seconds.
    """
    timed = timed_row(record, pick)
    curves = {}
    without_seconds = False
    for cell in pick.row.cells:
        if cell.seed not in pick.values:
            continue
        if cell.trained:
            curve = curve_of(cell, None)
            clock = clock_of(cell, None)
        elif timed:
            curve = curve_of(cell, timed.speed)
            clock = clock_of(cell, record)
        else:
            curve = curve_of(cell, cell.pace)
            clock = clock_of(cell, None)
        if curve:
            curves[cell.seed, clock] = curve
            without_seconds = without_seconds or not cell.trained
    if not without_seconds:
        return Runs(curves), ""
    if timed:
        return Runs(curves, timed.log_error), f"a pace {IN_TURN}"
    return Runs(curves), "the median pace of each run"


def all_runs(kinds: Kinds, records: Sequence[StepRecord]) -> tuple[dict[str, Runs], list[str]]:
    """Return the curves of all kinds that have any, and sentences on seconds not recorded."""
    picks = [pick for pick in kinds.picked.values() if pick.values]
    record = record_of(picks, records)
    runs_by_kind: dict[str, Runs] = {}
    kinds_by_pace: dict[str, list[str]] = {}
    for pick in picks:
        runs, pace = runs_of(pick, record)
        if runs.curves:
            runs_by_kind[pick.kind] = runs
            kinds_by_pace.setdefault(pace, []).append(pick.kind)
    notes = []
    for pace, names in kinds_by_pace.items():
        if not pace:
            continue
        of = "" if len(names) == len(runs_by_kind) else f" of {', '.join(names)}"
        note = f"Seconds{of} were not recorded: they are steps over {pace}"
        if record and IN_TURN in pace:
            note += f" ({record.facts.device}); its error is in the verdicts"
        notes.append(f"{note}.")
    return runs_by_kind, notes


def compared_with(rival: str, kinds: Kinds, names: Sequence[str]) -> list[str]:
    """Return those of some kinds that are compared with a rival: all but it and those before it."""
    first_rivals = kinds.against[: list(kinds.against).index(rival) + 1]
    return [name for name in names if name not in first_rivals]


def all_findings(kinds: Kinds, records: Sequence[StepRecord]) -> list[TimeFindings]:
    """Return the findings against each rival that has curves, in the order of the rivals."""
    runs, notes = all_runs(kinds, records)
    legal = [kind for kind in kinds.legal if kind in runs]
    results = []
    for rival in kinds.against:
        names = compared_with(rival, kinds, legal)
        if rival in legal and names:
            others = {name: runs[name] for name in names}
            results.append(findings_against(rival, runs[rival], others, notes))
    return results


def findings_against(
    rival: str,
    rival_runs: Runs,
    others: Mapping[str, Runs],
    notes: Sequence[str],
) -> TimeFindings:
    """Return the findings on some kinds against a rival."""
    losses = losses_of(rival_runs)
    times = {}
    gaps = {}
    seconds = {}
    all_notes = list(notes)
    for kind, runs in others.items():
        pairs = pairs_of(runs, rival_runs)
        if not pairs:
            all_notes.append(f"{kind}: no ratio, {why_no_pair(runs, rival_runs, rival)}.")
            continue
        if len(pairs) < len(runs.curves):
            left_out = plural(len(runs.curves) - len(pairs), "run")
            equal = "with the same seed, machine, threads and engine"
            all_notes.append(f"{kind}: {left_out} without a run of {rival} {equal}.")
        budgets = budgets_of(runs, rival_runs)
        seconds[kind] = budgets[-1]
        for loss in losses:
            times[kind, loss] = times_to(loss, runs, rival_runs)
        for share, budget in zip(BUDGETS, budgets, strict=True):
            gaps[kind, share] = losses_after(budget, runs, rival_runs)
    return TimeFindings(rival, losses, findings_of(times), findings_of(gaps), seconds, all_notes)


def tables_of(results: Sequence[TimeFindings], kinds: Kinds, constant: bool) -> list[Table]:
    """Return two tables for each rival; a terminal shows those of the first that compare something.

    `constant`: whether the learning rate stays constant in all rows.
    """
    legal = [kind for kind in kinds.order if kind in kinds.legal]
    tables = []
    for number, result in enumerate(results):
        names = compared_with(result.rival, kinds, legal)
        is_first = number == 0
        has_times = compared(result.times) > 0
        has_gaps = compared(result.gaps) > 0
        tables.append(time_table(result, names, brief=is_first and has_times))
        tables.append(gap_table(result, names, constant, brief=is_first and has_gaps))
    return tables


def time_table(result: TimeFindings, names: Sequence[str], brief: bool) -> Table:
    """Return the times to several losses as shares of the rival's."""
    entries: list[dict[str, Any]] = []
    for kind in names:
        entry: dict[str, Any] = {"heads": kind}
        for number, loss in enumerate(result.losses):
            finding = result.times.get((kind, loss), NO_RATIO)
            entry[f"loss_{number}"] = ratio_text(finding)
            entry |= exported(finding, f"share of time to {loss:.2f}", ratio_from)
        entries.append(entry)
    columns = [Column("heads", "heads", brief=brief)]
    for number, loss in enumerate(result.losses):
        is_brief = brief and number > 0
        columns.append(Column(f"loss_{number}", f"to {loss:.2f} bits", brief=is_brief))
    how = (
        "Seconds of optimizer steps until a validation reaches a loss, as a share of those of "
        f"{result.rival}: below 1 is faster. Between validations the loss is interpolated linearly "
        "over the logarithm of time. Ratios are geometric means, paired by seed; "
        f"{correction(result.times)}."
    )
    title = f"Time to a loss, against {result.rival}"
    return Table(title, columns, entries, [how, *result.notes])


def gap_table(result: TimeFindings, names: Sequence[str], constant: bool, brief: bool) -> Table:
    """Return the differences in bits from the rival at several shares of the equal time."""
    entries = []
    for kind in names:
        seconds = result.seconds.get(kind)
        entry: dict[str, Any] = {"heads": kind, "time": ""}
        if seconds is not None:
            entry["time"] = duration(seconds)
        for title, share in zip(BUDGET_TITLES, BUDGETS, strict=True):
            finding = result.gaps.get((kind, share), NO_RATIO)
            entry[f"after_{title}"] = gap_text(finding)
            entry |= exported(finding, f"difference after {title}", float)
        entries.append(entry)
    columns = [Column("heads", "heads", brief=brief), Column("time", "equal time", brief=brief)]
    for title in BUDGET_TITLES:
        is_brief = brief and title != BUDGET_TITLES[0]
        columns.append(Column(f"after_{title}", f"after {title} of it", brief=is_brief))
    how = (
        f"Bits minus those of {result.rival} after equal seconds of optimizer steps, of the best "
        "validation so far: below 0 is better. The equal time is that of the shortest run of the "
        f"two rows. Paired by seed; {correction(result.gaps)}."
    )
    if not constant:
        shorter = "a run planned for a shorter time would be better there"
        how += f" The learning rate is not constant: {shorter}."
    title = f"Loss at equal time, against {result.rival}"
    return Table(title, columns, entries, [how, *result.notes])


def correction(findings: Mapping[Any, Finding]) -> str:
    """Return over how many comparisons intervals and verdicts are corrected, in words."""
    comparisons = plural(compared(findings), "comparison")
    return f"intervals and verdicts after Holm's correction over the {comparisons} of the table"


def compared(findings: Mapping[Any, Finding]) -> int:
    """Return how many findings are comparisons, and not a reason why there is none."""
    return sum(finding.comparison.difference is not None for finding in findings.values())


def ratio_text(finding: Finding) -> str:
    """Return `faster 0.44 (0.40 to 0.48)`, a number without a verdict, or why there is none."""
    if finding.difference is None:
        return finding.why
    verdict = FASTER[finding.comparison.verdict]
    if not verdict:
        return f"{ratio_number(ratio_from(finding.difference))}, {FEW}"
    return f"{verdict} {ratio_and_interval(finding)}"


def ratio_and_interval(finding: Finding) -> str:
    """Return the ratio of times that a difference of their logarithms is: `0.44 (0.40 to 0.48)`."""
    assert finding.difference is not None
    half = finding.comparison.half
    low = ratio_from(finding.difference - half)
    high = ratio_from(finding.difference + half)
    interval = f"{ratio_number(low)}{DASH}{ratio_number(high)}"
    return f"{ratio_number(ratio_from(finding.difference))} ({interval})"


def ratio_from(log_ratio: float) -> float:
    """Return a ratio from its logarithm, whose interval may be huge where few turns were timed."""
    return math.exp(min(log_ratio, MOST_LOG_RATIO))


def ratio_number(ratio: float) -> str:
    """Return a ratio with two decimals, or a large one in short."""
    return f"{ratio:.2f}" if ratio < 1000 else f"{ratio:.0e}"


def gap_text(finding: Finding) -> str:
    """Return a verdict with a difference and its interval, or a number alone, or why none."""
    if finding.difference is None:
        return finding.why
    difference = f"{finding.difference:+.3f}".replace("-", MINUS)
    if finding.comparison.verdict == FEW:
        return f"{difference}, {FEW}"
    return f"{finding.comparison.verdict} {difference} ± {finding.comparison.half:.3f}"


def exported(finding: Finding, name: str, unit: Callable[[float], float]) -> dict[str, float]:
    """Return a finding's number, interval and p by the names that exported files have for them.

    `unit` turns a difference into the number: `ratio_from` makes a ratio of one of logarithms.
    """
    if finding.difference is None:
        return {}
    numbers = {name: unit(finding.difference)}
    if finding.comparison.difference is not None:
        half = finding.comparison.half
        numbers[f"{name}, low"] = unit(finding.difference - half)
        numbers[f"{name}, high"] = unit(finding.difference + half)
        numbers[f"{name}, p"] = finding.comparison.chance
    return numbers


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"
