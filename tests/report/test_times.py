"""Time to a loss and loss at equal time: interpolation, what is not compared, and the first lines.

Verdicts by simulation: seldom false where rows are equal, often right where one is faster.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtx.cli import main as cli
from rtx.report.contents import Report
from rtx.report.curves import (
    BUDGETS,
    NO_VALIDATION,
    NOT_REACHED,
    TOO_EARLY,
    Curve,
    Finding,
    Runs,
    budgets_of,
    findings_of,
    losses_after,
    losses_of,
    times_to,
)
from rtx.report.headline import Duel, verdict_on
from rtx.report.ranking import Comparison
from rtx.report.run_records import collect
from rtx.report.time_plot import marks_of_time
from rtx.report.times import curve_of, ratio_and_interval
from rtx.tables import Table
from tests.helpers.records import (
    CAUSAL,
    FULL,
    LOCAL,
    config,
    steps_record,
    timed_row,
    write_record,
    write_run,
)
from tests.helpers.reports import with_captions, without_plots

RANDOM = {"routing__selection": "random"}


def table_of(report: Report, start: str) -> Table:
    return next(table for table in report.tables if table.title.startswith(start))


def cells(table: Table, heads: str) -> list[str]:
    """Return the texts of a row."""
    row = next(row for row in table.rows if row["heads"] == heads)
    return [row[column.key] for column in table.columns[1:]]


def write_row(
    folder: Path,
    values: dict[str, Any],
    pace: float,
    above: float = 0.0,
    seeds: int = 5,
    **facts: Any,
) -> None:
    """Write runs whose step takes `pace` seconds.

    Bits are 2 + 1/√(step/100), and by seed a little more than `above` more.
    """
    for seed in range(seeds):
        moved = above + 0.002 * (seed * 3 % 5)
        curve = {
            step: (pace * step, 2.0 + moved + (step / 100) ** -0.5)
            for step in range(100, 2001, 100)
        }
        made = config("far_text heads=causal", seed=seed, **values)
        write_run(folder, made, bits=curve[2000][1], curve=curve, **facts)


def test_between_validations_bits_fall_in_a_straight_line_over_log_time() -> None:
    curve = Curve([10.0, 1000.0], [4.0, 2.0])
    assert curve.time_to(3.0) == pytest.approx(100.0) and curve.loss_at(100.0) == pytest.approx(3.0)
    assert curve.time_to(4.0) == 10.0 and curve.time_to(2.0) == pytest.approx(1000.0)
    assert curve.loss_at(9.9) is None and curve.loss_at(5000.0) == 2.0
    bumpy = Curve([1.0, 2.0, 4.0, 8.0], [4.0, 3.0, 3.5, 2.0])
    assert bumpy.best == [4.0, 3.0, 3.0, 2.0]
    assert bumpy.time_to(3.0) == 2.0, "the first time counts, not the last"
    assert bumpy.loss_at(4.0) == 3.0
    slower = Curve([3 * seconds for seconds in bumpy.seconds], bumpy.bits)
    assert slower.time_to(2.6) == pytest.approx(3 * bumpy.time_to(2.6))


def test_losses_lie_between_a_tenth_of_the_time_and_what_all_seeds_reach() -> None:
    curve = Curve([1.0, 10.0, 100.0], [6.0, 5.0, 3.0])
    worse = Curve([1.0, 10.0, 100.0], [6.0, 5.0, 3.004])
    rival = Runs({("0", "c"): curve, ("1", "c"): worse})
    assert losses_of(rival) == [4.51, 4.01, 3.51, 3.01]
    assert losses_of(Runs({("0", "c"): Curve([1.0], [6.0])})) == [6.0]
    never = Runs({("0", "c"): Curve([1.0, 100.0], [9.0, 8.0]), ("1", "c"): curve})
    assert times_to(4.01, never, rival).why == "reached by 1 of 2 seeds"
    assert times_to(4.01, Runs({("0", "c"): Curve([1.0], [9.0])}), rival).why == NOT_REACHED
    assert times_to(4.01, Runs({("0", "c"): Curve([1.0], [3.0])}), rival).why == TOO_EARLY
    assert losses_after(0.5, rival, rival).why == NO_VALIDATION
    assert budgets_of(rival, rival) == [12.5, 25.0, 50.0, 100.0]


def test_a_seed_that_ran_twice_counts_once_and_few_seeds_give_a_number_without_a_verdict() -> None:
    fast = Curve([1.0, 10.0], [4.0, 2.0])
    slow = Curve([2.0, 20.0], [4.0, 2.0])
    rival = Runs({(seed, clock): slow for seed in "0123" for clock in "ab"})
    own = Runs({(seed, clock): fast for seed in "0123" for clock in "ab"})
    finding = findings_of({("x", 3.0): times_to(3.0, own, rival)})["x", 3.0]
    assert finding.difference == pytest.approx(math.log(0.5))
    assert finding.comparison.verdict == "too few seeds"


def test_the_top_of_a_report_is_a_sentence_and_a_line_for_each_rival(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_row(tmp_path, FULL, pace=1.0)
    write_row(tmp_path, CAUSAL, pace=0.4, above=0.02)
    write_row(tmp_path, LOCAL, pace=0.3, above=0.5)
    write_row(tmp_path, RANDOM, pace=0.4, above=0.6)
    report = without_plots(tmp_path)
    assert report.answer is not None
    start = "At length 2,048, routing (causal) reaches 2.36 bits in 0.45"
    assert report.headline.startswith(start) and len(report.lines) == 3
    assert report.headline.endswith("of full attention's time, but ends 0.020 bits behind.")
    first, *others = report.lines
    assert first.startswith("Against full attention, routing (causal): 2.36 bits in 0.45")
    assert "of its time, 2.24 not reached; after 13.3 min each," in first and first.endswith(
        "0.020 ± 0.000 bits behind."
    )
    assert [line.partition(",")[0] for line in others] == ["Against local", "Against random"]
    times = table_of(report, "Time to a loss, against full")
    assert [column.title for column in times.columns] == [
        "heads",
        *(f"to {bits} bits" for bits in BITS),
    ]
    verdicts = [text.partition(" ")[0] for text in cells(times, "routing (causal)")]
    assert verdicts == ["faster", "faster", "faster", "not"], "it ends above full attention"
    assert cells(times, "local")[-2:] == ["not reached"] * 2
    row = next(row for row in times.rows if row["heads"] == "routing (causal)")
    low, ratio, high = (row[f"share of time to 2.36{end}"] for end in (", low", "", ", high"))
    assert low <= ratio <= high
    equal = table_of(report, "Loss at equal time, against full")
    assert cells(equal, "routing (causal)")[0] == "13.3 min"
    assert cells(equal, "routing (causal)")[-1].startswith("better \N{MINUS SIGN}0.")
    assert cli.main(["report", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith(" ".join([report.headline, *report.lines]))
    page = (tmp_path / "report" / "report.md").read_text()
    parts = (report.headline, report.lines[-1], "](time.png)", "## Scores by kind of heads")
    places = [page.index(part) for part in (*parts, "](curves.png)")]
    assert places == sorted(places) and page.count(".png)") == 2
    exported = json.loads((tmp_path / "report" / "report.json").read_text())
    assert exported["lines"] == report.lines


BITS = ("2.60", "2.48", "2.36", "2.24")
"""What full attention reaches between a tenth of its time and its end, evenly spread."""


def write_speeds(folder: Path, causal: float, above: float, seeds: int = 5, **facts: Any) -> None:
    write_row(folder, FULL, pace=1.0, seeds=seeds)
    write_row(folder, CAUSAL, pace=causal, above=above, seeds=seeds, **facts)


@pytest.mark.parametrize(
    ("causal", "above", "start"),
    [
        (0.5, -0.1, "routing (causal) wins: 2.24 bits in 0.2"),
        (2.0, -0.1, "routing (causal) wins: 2.24 bits in"),
        (2.0, -0.01, "full attention wins: routing (causal) takes 1."),
        (2.0, 0.05, "full attention wins: routing (causal) takes 2."),
        (0.9, 1.0, "full attention wins by 1.000"),
    ],
)
def test_headlines_name_the_winner_in_twenty_words(
    tmp_path: Path,
    causal: float,
    above: float,
    start: str,
) -> None:
    write_speeds(tmp_path, causal, above)
    headline = without_plots(tmp_path).headline
    assert headline.startswith(f"At length 2,048, {start}"), headline
    assert len(headline.split()) <= 20


def test_too_few_seeds_have_numbers_and_no_verdict(tmp_path: Path) -> None:
    write_speeds(tmp_path, 0.5, 0.0, seeds=4)
    report = without_plots(tmp_path)
    assert (
        report.headline.startswith("Not certain: ")
        and "a verdict takes 5 seeds; here 4" in report.headline
    )
    assert "2.24 bits in 0.50 of its time (too few seeds)" in report.lines[0]
    assert (
        cells(table_of(report, "Time to a loss"), "routing (causal)") == ["0.50, too few seeds"] * 4
    )


@pytest.mark.parametrize(
    ("values", "facts", "why"),
    [
        ({}, {"threads": 4}, "other threads"),
        ({}, {"host": "elsewhere"}, "other machine"),
        ({"hardware__attention": "torch"}, {}, "other attention engine"),
        ({"trainer__val_windows": 8}, {}, "other validation windows"),
    ],
)
def test_seconds_of_other_machines_threads_and_engines_are_told_apart(
    tmp_path: Path, values: dict[str, Any], facts: dict[str, Any], why: str
) -> None:
    write_row(tmp_path, FULL, pace=1.0, environment={"host": "here"})
    write_row(tmp_path, LOCAL, pace=0.5, above=0.1, environment={"host": "here"})
    write_row(tmp_path, {**CAUSAL, **values}, pace=0.5, environment={"host": "here", **facts})
    report = with_captions(tmp_path)
    times = table_of(report, "Time to a loss, against full")
    assert cells(times, "routing (causal)") == ["no ratio"] * 4
    assert f"routing (causal): no ratio, {why} than full." in times.lines
    assert cells(times, "local")[0].startswith("slower") or cells(times, "local")[0].startswith(
        "faster"
    )
    assert "times not compared" in report.lines[0]
    assert "5 runs with other machine, threads or engine left out" in report.plots[0].caption


def test_a_run_that_was_resumed_elsewhere_is_compared_with_none(tmp_path: Path) -> None:
    write_row(tmp_path, FULL, pace=1.0, environment={"host": "here"})
    write_row(tmp_path, CAUSAL, pace=0.5, seeds=6, environment={"host": "here"})
    moved = next(
        cell
        for cell in collect([tmp_path]).cells
        if cell.seed == "3" and cell.config["routing.heads"]
    )
    (moved.folder / "resumes.jsonl").write_text(json.dumps({"host": "there", "changed": {}}) + "\n")
    times = table_of(without_plots(tmp_path), "Time to a loss")
    assert cells(times, "routing (causal)") == ["0.50, too few seeds"] * 4
    assert times.lines[-1].startswith(
        "routing (causal): 2 runs without a run of full with the same seed, machine"
    )


def test_seconds_of_older_runs_are_steps_over_a_pace_and_its_error_is_in_the_verdicts(
    tmp_path: Path,
) -> None:
    for values, above in ((FULL, 0.0), (CAUSAL, 0.3)):
        for seed in range(5):
            made = config("far_text heads=causal", seed=seed, **values)
            speed = 4.0 if values is FULL else 12.0
            write_run(tmp_path, made, bits=2.0 + above + 0.01 * (seed * 3 % 5), speed=speed)
    times = table_of(without_plots(tmp_path), "Time to a loss")
    assert (
        "Seconds were not recorded: they are steps over the median pace of each run." in times.lines
    )
    at_own_pace = cells(times, "routing (causal)")[0]
    assert at_own_pace.startswith("faster 0.3")
    rows = [
        timed_row(100.0, "far_text heads=causal", **FULL),
        timed_row(200.0, "far_text heads=causal", **CAUSAL),
    ]
    del rows[0]["config"]["routing"]["merge"]  # as of a version without this key
    write_record(tmp_path, steps_record(*rows))
    times = table_of(without_plots(tmp_path), "Time to a loss")
    assert (
        "steps over a pace timed in turn (CPU, 1 thread); its error is in the verdicts."
        in times.lines[1]
    )
    assert cells(times, "routing (causal)")[0].startswith("slower 2.")
    rows[1]["ms_turns"] = [20.0, 200.0, 2000.0]
    write_record(tmp_path, steps_record(*rows, time="2027"), "b")
    assert cells(table_of(without_plots(tmp_path), "Time to a loss"), "routing (causal)")[
        0
    ].startswith("tied 2.")
    rows[1]["reason"] = "ids drawn at random"
    write_record(tmp_path, steps_record(*rows, time="2028"), "c")
    assert "routing (causal): no ratio, timed in another way than full." in (
        table_of(without_plots(tmp_path), "Time to a loss").lines
    )


def test_a_rate_that_decays_is_told_beside_losses_at_equal_time(tmp_path: Path) -> None:
    for values in (FULL, CAUSAL):
        write_row(tmp_path, {**values, "optimizer__schedule": "cosine"}, pace=1.0)
    assert (
        "The learning rate is not constant"
        in table_of(without_plots(tmp_path), "Loss at equal time").lines[0]
    )


def simulated(
    rng: np.random.Generator, rows: int, seeds: int, paired: bool, faster: float = 1.0
) -> list[Runs]:
    """Return rows of like curves: bits fall as a power of the step.

    Seeds and rows move the bits and their paces; paired rows share what a seed does to all. Row 1
    may take `faster` times as long for a step.
    """
    shared = rng.normal(size=seeds) * paired
    steps = np.arange(1, 11) / 10
    found = []
    for row in range(rows):
        curves = {}
        for seed in range(seeds):
            level = 2 + 0.03 * (shared[seed] + rng.normal())
            bits = (
                level
                + 0.6 * (steps ** -(0.5 + 0.05 * rng.normal()) - 1)
                + 0.01 * rng.normal(size=len(steps))
            )
            pace = math.exp(0.1 * rng.normal()) * (faster if row == 1 else 1.0)
            curves[str(seed), "here"] = Curve((100 * pace * steps).tolist(), bits.tolist())
        found.append(Runs(curves))
    return found


def tables(runs: list[Runs]) -> list[dict[tuple[str, float], Finding]]:
    """Return the findings of both tables of all rows against the first."""
    rival, *others = runs
    times = {}
    gaps = {}
    for number, own in enumerate(others, start=1):
        for loss in losses_of(rival):
            times[str(number), loss] = times_to(loss, own, rival)
        for share, seconds in zip(BUDGETS, budgets_of(own, rival), strict=True):
            gaps[str(number), share] = losses_after(seconds, own, rival)
    return [findings_of(times), findings_of(gaps)]


FASTER_TABLES = 100
"""How many simulated tables have a faster row: few suffice, since most of them show it."""


@pytest.mark.parametrize("seeds", [5, 10])
@pytest.mark.parametrize(("rows", "count"), [(2, 600), (5, 200)])
@pytest.mark.parametrize("paired", [True, False], ids=["shared", "apart"])
def test_equal_rows_have_a_false_verdict_in_one_table_of_twenty_at_most(
    rows: int, count: int, seeds: int, paired: bool
) -> None:
    rng = np.random.default_rng(rows + seeds)
    false = np.zeros(2)
    for _ in range(count):
        for at, table in enumerate(tables(simulated(rng, rows, seeds, paired))):
            false[at] += any(
                one.comparison.verdict in ("better", "behind") for one in table.values()
            )
    power = np.zeros(2)
    for _ in range(FASTER_TABLES):
        for at, table in enumerate(tables(simulated(rng, rows, seeds, paired, faster=0.5))):
            power[at] += any(
                table[key].comparison.verdict == "better" for key in table if key[0] == "1"
            )
    shares = ", ".join(
        f"{wrong:.1%} false, {right:.0%} found"
        for wrong, right in zip(false / count, power / FASTER_TABLES, strict=True)
    )
    print(
        f"{rows} rows, {seeds} seeds (time to a loss; loss at equal time, half the time): {shares}"
    )
    bound = 0.05 + 3 * (0.05 * 0.95 / count) ** 0.5
    assert max(false / count) <= bound and min(power / FASTER_TABLES) > 0.5


def test_a_tie_in_time_does_not_hide_who_ends_ahead(tmp_path: Path) -> None:
    for seed in range(5):
        for values, above in ((LOCAL, 0.0), (CAUSAL, -0.2)):
            pace = 1.0 + 3.0 * ((seed + len(values)) % 3)  # of a busy machine
            curve = {
                step: (pace * step, 2.0 + above + (step / 100) ** -0.5)
                for step in range(100, 2001, 100)
            }
            made = config("far_text heads=causal", seed=seed, **values)
            write_run(tmp_path, made, bits=curve[2000][1] + 0.002 * (seed * 3 % 5), curve=curve)
    headline = without_plots(tmp_path).headline
    assert headline.startswith("At length 2,048, routing (causal) ends 0.200 ± ")
    assert headline.endswith("bits/byte ahead of local; time to 2.23 bits tied.")
    assert len(headline.split()) <= 20


def test_runs_that_share_no_machine_have_tables_without_a_ratio_in_every_format(
    tmp_path: Path,
) -> None:
    write_row(tmp_path, FULL, pace=1.0, environment={"host": "here"})
    write_row(tmp_path, CAUSAL, pace=0.5, above=0.1, environment={"host": "there"})
    assert cli.main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report" / "report.md").read_text()
    assert "5 runs with other machine, threads or engine left out" in page
    report = without_plots(tmp_path)
    apart = "0.100 ± 0.000 bits/byte in the closing score"
    assert (
        report.headline == f"At length 2,048, full attention wins by {apart} over routing (causal)."
    )
    for start in ("Time to a loss, against full", "Loss at equal time, against full"):
        table = table_of(report, start)
        assert {text for text in cells(table, "routing (causal)") if text} == {"no ratio"}
        assert "routing (causal): no ratio, other machine than full." in table.lines


def duel(time: Comparison | None, score: float, gap: float = 0.0, why: str = "") -> Duel:
    """Return a duel with local+full attention; `why`: why there is no time to 1.99 bits."""
    half = 0.01
    at_end = Finding("", gap, Comparison(gap, half))
    missed = 1.99 if why else None
    finding = Finding("", time.difference, time) if time else None
    closing = Comparison(score, half)
    return Duel(
        "routing (causal)",
        "local+full",
        2048,
        "bits/byte",
        closing,
        loss=2.31,
        time=finding,
        next_loss=missed,
        why=why,
        gap=at_end,
        seconds=60.0,
    )


FASTER = Comparison(-0.8, 0.1)
EQUAL = Comparison(0.17, 0.4)
SLOWER = Comparison(0.8, 0.1)
PARTLY = "reached by 4 of 5 seeds"


RIVAL = "local+full attention"
ONE = "routing (causal)"
SCORED = "0.200 ± 0.010 bits/byte"
AT_END = "0.100 ± 0.010 bits/byte"


@pytest.mark.parametrize(
    ("one", "start", "end"),
    [
        (duel(FASTER, -0.2), f"{ONE} wins: 2.31 bits in 0.45 (0.41", f"of {RIVAL}'s time"),
        (duel(FASTER, 0.0, why=NOT_REACHED), f"{ONE} reaches", ", but misses 1.99"),
        (duel(FASTER, 0.0, why=PARTLY), f"{ONE} reaches", ", but sometimes misses 1.99"),
        (duel(FASTER, 0.2, why=NOT_REACHED), f"{ONE} reaches", "but ends 0.200 bits behind"),
        (duel(FASTER, 0.0, gap=0.1), f"{ONE} reaches", "but ends 0.100 bits behind"),
        (duel(SLOWER, 0.2), f"{RIVAL} wins: {ONE} takes 2.23 (2.01", " as long to 2.31 bits"),
        (duel(SLOWER, -0.2, gap=0.1), f"{RIVAL} wins: {ONE} takes", "to 2.31 bits"),
        (duel(SLOWER, -0.2), f"{ONE} ends {SCORED} ahead of {RIVAL},", "2.31 bits (2.23)"),
        (duel(EQUAL, 0.2), f"{RIVAL} wins: {ONE} ends {SCORED} behind", "2.31 bits tied"),
        (duel(EQUAL, -0.2, gap=0.1), f"{RIVAL} wins: {ONE} ends", f"{AT_END} behind at equal time"),
        (duel(EQUAL, -0.2), f"{ONE} ends {SCORED} ahead of", "; time to 2.31 bits tied"),
        (duel(EQUAL, 0.0, gap=-0.1), f"{ONE} ends {AT_END} ahead of", "at equal time"),
        (duel(EQUAL, 0.0), f"no winner shown: {ONE} reaches", f"of {RIVAL}'s time"),
        (duel(EQUAL, 0.0, why=PARTLY), f"no winner: {ONE}", "time, sometimes misses 1.99"),
        (duel(None, 0.0), f"no winner shown: closing scores of {ONE} and", "bits/byte apart"),
        (duel(None, -0.2), f"{ONE} wins by {SCORED} in the closing score", f"over {RIVAL}"),
        (duel(None, 0.2), f"{RIVAL} wins by {SCORED} in the closing score", f"over {ONE}"),
    ],
)
def test_every_verdict_names_a_winner_or_none_in_seventeen_words(
    one: Duel,
    start: str,
    end: str,
) -> None:
    verdict = verdict_on(one)
    assert verdict.startswith(start) and verdict.endswith(end), verdict
    assert len(verdict.split()) <= 17, verdict


def test_a_rival_that_learns_nothing_leaves_no_loss_and_the_line_says_so(tmp_path: Path) -> None:
    assert losses_of(Runs({("0", "c"): Curve([1.0, 2.0], [6.004, 6.003])})) == []
    for values, bits in ((FULL, 6.004), (CAUSAL, 3.0)):
        for seed in range(5):
            made = config("far_text heads=causal", seed=seed, **values)
            write_run(tmp_path, made, bits=bits, curve={100: (10.0, bits), 200: (20.0, bits)})
    report = without_plots(tmp_path)
    assert "routing (causal): times not compared; after 20 s each," in report.lines[0]
    times = table_of(report, "Time to a loss")
    assert cells(times, "routing (causal)") == []
    assert times.shown(brief=True) == [], "a terminal has no table without a comparison"
    assert table_of(report, "Loss at equal time").shown(brief=True)


def test_rows_without_a_seed_in_common_are_not_compared_in_time(tmp_path: Path) -> None:
    for values, first in ((FULL, 0), (CAUSAL, 5)):
        for seed in range(first, first + 5):
            made = config("far_text heads=causal", seed=seed, **values)
            write_run(tmp_path, made, curve={100: (10.0, 4.0), 200: (20.0, 3.0)})
    notes = table_of(without_plots(tmp_path), "Time to a loss").lines
    assert "routing (causal): no ratio, no seed in common with full." in notes


def test_seconds_that_fall_or_are_no_numbers_are_left_out_of_a_curve(tmp_path: Path) -> None:
    points = {100: (10.0, 4.0), 200: (9.0, 3.0), 300: (math.inf, 2.0)}
    points |= {400: (12.0, math.nan), 500: (13.0, 2.5)}
    run = write_run(tmp_path, config("far_text heads=causal"), curve=points)
    (cell,) = collect([run]).cells
    curve = curve_of(cell, None)
    assert curve == Curve([10.0, 13.0], [4.0, 2.5])
    assert curve_of(replace(cell, curve={}), None) is None
    assert curve_of(replace(cell, trained={}), None) is None, "neither seconds nor a pace"


def test_an_interval_beyond_all_floats_is_printed_in_short() -> None:
    finding = Finding("", 0.0, Comparison(0.0, 2000.0))
    assert ratio_and_interval(finding).endswith("1e+304)")


def test_a_short_span_of_seconds_has_marks_too() -> None:
    assert marks_of_time(9.0, 120.0) == [10.0, 20.0, 50.0, 100.0]
    assert marks_of_time(3.0, 4.0) == [3.0, 4.0]
