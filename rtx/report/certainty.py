"""How certain a table of scores is, in words.

Sentences on the seeds, on the noise of a score, and on how far apart the rows are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rtx.errors import plural
from rtx.report.ranking import SEEDS, Comparison, Names, compare, mean
from rtx.report.score_rows import Row
from rtx.tables import Table

TWO_DEVIATIONS = 2 * math.sqrt(2)
"""Two standard errors of the difference of two independent scores, in those of one score."""
LEAST_SHOWN = 0.0005
"""The smallest number of bits that three decimals can show."""
ADD_SEEDS = f"Add seed={','.join(map(str, range(SEEDS)))} for a verdict."


@dataclass(frozen=True)
class Certainty:
    """Sentences on the verdict, or why there is none, and on the noise of a score.

    `noise` is empty where no run has a score.
    """

    verdict: str
    noise: str


def certainty(
    rows: Sequence[Row], unit: str, kinds: Table | None = None, headline: str = ""
) -> Certainty:
    """Return how certain the scores of finished rows of one protocol are.

    Args:
        unit: that of the bits, such as `bits/byte`.
        kinds: the ranking of the kinds of heads; None: there is one kind.
        headline: the verdict on that ranking; empty: there is none.
    """
    scored = [row for row in rows if row.scores]
    if not scored:
        return Certainty("Not certain: no run has ended with a score.", "")
    seeds = [len(row.values()) for row in scored]
    if max(seeds) == 1:
        verdict = headline or single_seed(len(scored))
        return Certainty(verdict, f"{noise(scored, unit)} {ADD_SEEDS}")
    if headline:
        verdict = headline
    elif len(scored) == 1:
        verdict = f"Nothing to compare: one row, of {plural(seeds[0], 'seed')}."
    elif min(seeds) < SEEDS:
        needed = f"a verdict takes {SEEDS} seeds a row"
        verdict = f"Not certain: {needed}, and here are {span(seeds)}."
    else:
        verdict = lowest_of_one_kind(scored)
    enough_seeds = min(seeds) >= SEEDS
    has_verdict = enough_seeds if kinds is None else has_verdicts(kinds)
    return Certainty(verdict, noise(scored, unit, has_verdict=has_verdict and len(scored) > 1))


def has_verdicts(kinds: Table) -> bool:
    """Tell whether any row of a ranking of kinds of heads has a verdict."""
    words: set[str] = set()
    for row in kinds.rows:
        words |= {value for key, value in row.items() if key.startswith("against_")}
    return not words.isdisjoint(("better", "behind", "tied"))


def single_seed(rows: int) -> str:
    """Return that rows of one seed have no verdict."""
    if rows > 1:
        return "Not certain: 1 seed a row; no verdict."
    return "Not certain: 1 row of 1 seed; no verdict."


def span(numbers: Sequence[int]) -> str:
    """Return the least and the largest of some numbers, as `2 to 5`, or the one that all are."""
    low = min(numbers)
    high = max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def lowest_of_one_kind(rows: Sequence[Row]) -> str:
    """Return which row has the lowest mean, and than how many others it is better.

    Verdicts are corrected over all pairs of rows.
    """
    # Rows are identified by number, because their names may be equal.
    values = {str(number): row.values() for number, row in enumerate(rows)}
    compared = compare(values, list(itertools.combinations(values, 2)))
    lowest = min(values, key=lambda number: mean(values[number].values()))
    others = [number for number in values if number != lowest]
    worse = [other for other in others if is_better(compared, lowest, other)]
    name = rows[int(lowest)].name
    better_than = f"better than {len(worse)} of {plural(len(others), 'other row')}"
    corrected = f"Holm's correction over {plural(len(compared), 'pair')}"
    return f"Lowest mean: {name}; {better_than} ({corrected})."


def is_better(compared: Mapping[Names, Comparison], row: str, other: str) -> bool:
    """Tell whether a row is better than another, in whatever order they were compared."""
    if (row, other) in compared:
        return compared[row, other].verdict == "better"
    return compared[other, row].verdict == "behind"


def noise(rows: Sequence[Row], unit: str, has_verdict: bool = False) -> str:
    """Return the standard error of a score, what it means for differences, and the rows' spread.

    Rows of one protocol are scored on the same windows, so what these have in common cancels in a
    difference: the bound is conservative. Verdicts over seeds are for these windows only.
    """
    apart = spread(rows, unit)
    error = standard_error(rows)
    if error is None:
        return f"The standard error of a score is not recorded{apart}."
    over = windows_phrase(rows)
    if has_verdict:
        moves = "on other data a score may move by its standard error"
        size = f"{bits_text(error)} {unit} {over}"
        return f"Verdicts are for the windows scored: {moves}, {size}{apart}."
    size = f"its standard error {bits_text(error)} {over}"
    return f"Differences {below_noise(error, unit)} ({size}){apart}."


def below_noise(error: float, unit: str) -> str:
    """Return from what size on differences are no noise; `error` is the standard error of a score.

    It is a part of a sentence: "below about 0.057 bits/byte are within the noise of a score".
    """
    bound = bits_text(TWO_DEVIATIONS * error)
    return f"below about {bound} {unit} are within the noise of a score"


def standard_error(rows: Sequence[Row]) -> float | None:
    """Return the standard error of a score over its windows, in bits, the mean over all runs.

    None: it is not recorded.
    """
    errors = []
    for row in rows:
        errors += [score.error for score in row.scores if score.error is not None]
    return mean(errors) if errors else None


def windows_phrase(rows: Sequence[Row]) -> str:
    """Return over how many windows the scores of rows are: `over 64 windows`."""
    counts: set[int | None] = set()
    for row in rows:
        counts |= {score.windows for score in row.scores}
    count = counts.pop() if len(counts) == 1 else None
    return f"over {plural(count, 'window')}" if count else "over the windows"


def spread(rows: Sequence[Row], unit: str) -> str:
    """Return how far apart the means of rows are, as the end of a sentence.

    Rows that see the future do not count, if two others are left.
    """
    legal = [row for row in rows if not row.sees_future]
    compared = legal if len(legal) > 1 else rows
    if len(compared) < 2:
        return ""
    means = [mean(row.values().values()) for row in compared]
    apart = f"{bits_text(max(means) - min(means))} {unit} apart"
    if len(compared) < len(rows):
        return f"; the means of the {len(compared)} rows that see no future are up to {apart}"
    return f"; the means of the {len(compared)} rows are up to {apart}"


def bits_text(bits: float) -> str:
    """Return a number of bits with three digits behind the point, or a tiny one with one digit."""
    return f"{bits:.3f}" if bits >= LEAST_SHOWN else f"{bits:.1g}"
