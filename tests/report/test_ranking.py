"""Verdicts by simulation: seldom false where rows are equal, and what they find where one is better."""

import numpy as np
import pytest

from rtx.report.ranking import Values, chosen, compare, half_interval, mean

TABLES = {2: 3000, 5: 1000, 27: 200}
"""Simulated tables by rows; chance alone moves a share of 5% by one standard error of 0.4 to 1.5 points."""


def simulated(rng: np.random.Generator, rows: int, seeds: int, paired: bool, better: float = 0.0) -> dict[str, Values]:
    """Rows of one mean; paired ones share what a seed does to all. Row 1 may be better by some deviations."""
    scores = rng.normal(size=(rows, seeds)) + (rng.normal(size=seeds) if paired else 0.0)
    scores[1] -= better
    names = [[str(seed) if paired else f"{row}.{seed}" for seed in range(seeds)] for row in range(rows)]
    return {str(row): dict(zip(names[row], map(float, scores[row]), strict=True)) for row in range(rows)}


def against(rows: int) -> list[tuple[str, str]]:
    """What a table of kinds compares: all with row 0 and all with row 2, as with local and random heads."""
    return [
        (str(row), other) for other in ("0", "2")[: rows - 1] for row in range(rows) if str(row) not in (other, "0")
    ]


@pytest.mark.parametrize("seeds", [5, 10])
@pytest.mark.parametrize("rows", [2, 5, 27])
@pytest.mark.parametrize("paired", [True, False], ids=["paired", "welch"])
def test_equal_rows_have_a_false_verdict_in_one_table_of_twenty_at_most(rows: int, seeds: int, paired: bool) -> None:
    rng, tables = np.random.default_rng(rows + seeds), TABLES[rows]
    false = power = 0
    for _ in range(tables):
        found = compare(simulated(rng, rows, seeds, paired), against(rows))
        false += any(one.verdict != "tied" for one in found.values())
        found = compare(simulated(rng, rows, seeds, paired, better=2.0), against(rows))
        power += found["1", "0"].verdict == "better"
        for one in found.values():
            assert one.difference is not None
            assert (one.verdict == "tied") == (-one.half <= one.difference <= one.half), "the interval says the same"
            assert (one.verdict == "tied") == (one.chance > 0.05), "and so does p"
    print(f"{rows} rows, {seeds} seeds: false {false / tables:.1%}; two deviations found in {power / tables:.0%}")
    assert false / tables <= 0.05 + 3 * (0.05 * 0.95 / tables) ** 0.5
    assert power / tables > (0.6 if rows == 2 or (rows == 5 and seeds == 10) else 0.01)


def test_intervals_are_those_of_students_t_and_equal_rows_tie() -> None:
    assert half_interval([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / 3**0.5)
    assert half_interval([1.0]) is None
    rows = {"a": dict.fromkeys("12345", 1.0), "b": dict.fromkeys("12345", 1.0), "c": dict.fromkeys("12345", 2.0)}
    found = compare(rows, [("b", "a"), ("c", "a"), ("a", "c")])
    assert [one.verdict for one in found.values()] == ["tied", "behind", "better"]


def test_the_best_of_many_is_reported_by_other_seeds_than_those_that_chose_it() -> None:
    rng, reported = np.random.default_rng(0), []
    for _ in range(400):
        _, values = chosen(simulated(rng, 24, 10, paired=False))
        assert not values  # they share no seed, so that nothing chose on equal terms
        _, values = chosen(simulated(rng, 24, 10, paired=True))
        assert len(values) == 5
        reported.append(mean(values.values()))
    assert abs(mean(reported)) < 0.1, "the least of 24 means of five would be at -0.9"
    assert chosen({"a": {"0": 1.0}, "b": {"0": 2.0, "1": 5.0}}) == ("a", {})
    assert chosen({"a": {"0": 1.0, "1": 3.0}, "b": {"0": 2.0}}) == ("a", {"1": 3.0})
