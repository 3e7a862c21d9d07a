"""How certain a table of scores is, in words: seeds, the noise of a score, and how far apart its rows lie."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rtx.errors import plural
from rtx.report.ranking import SEEDS, Comparison, compare, mean
from rtx.report.run_records import Score
from rtx.report.score_rows import Row
from rtx.report.tables import Table

TWO_DEVIATIONS = 2 * math.sqrt(2)
"""Two standard errors of the difference of two independent scores, in standard errors of one score."""
LEAST_SHOWN = 0.0005  # the smallest number of bits that three decimals can show
ADD_SEEDS = f"Add seed={','.join(map(str, range(SEEDS)))} for a verdict."


@dataclass(frozen=True)
class Certainty:
    """Sentences on the verdict, or why there is none, and on the noise of a score, which may be empty."""

    verdict: str
    noise: str


def certainty(
    rows: Sequence[Row], unit: str, kinds: Table | None = None, said: str = ""
) -> Certainty:
    """Return how certain the scores of finished rows of one protocol are.

    `unit` is that of the bits, such as `bits/byte`; `kinds` the table of kinds of heads, if there are several, and
    `said` the verdict on it.
    """
    scored = [row for row in rows if row.scores]
    if not scored:
        return Certainty("Not certain: no run has ended with a score.", "")
    seeds = [len(row.values()) for row in scored]
    if max(seeds) == 1:
        return Certainty(said or single_seed(len(scored)), f"{noise(scored, unit)} {ADD_SEEDS}")
    if said:
        verdict = said
    elif len(scored) == 1:
        verdict = f"Nothing to compare: one row, of {plural(seeds[0], 'seed')}."
    elif min(seeds) < SEEDS:
        verdict = (
            f"Not certain: a verdict takes {SEEDS} seeds a row, and here are {numbers(seeds)}."
        )
    else:
        verdict = lowest_of_one_kind(scored)
    enough_seeds = min(seeds) >= SEEDS
    has_verdict = enough_seeds if kinds is None else has_verdicts(kinds)
    return Certainty(verdict, noise(scored, unit, has_verdict=has_verdict and len(scored) > 1))


def has_verdicts(kinds: Table) -> bool:
    """Tell whether any row of a table of kinds has a verdict."""
    words = {
        value for row in kinds.rows for key, value in row.items() if key.startswith("against_")
    }
    return not words.isdisjoint(("better", "behind", "tied"))


def single_seed(rows: int) -> str:
    """Return that rows of one seed have no verdict."""
    return (
        "Not certain: 1 seed a row; no verdict."
        if rows > 1
        else "Not certain: 1 row of 1 seed; no verdict."
    )


def numbers(seeds: Sequence[int]) -> str:
    """Return the least and the largest of some numbers."""
    low, high = min(seeds), max(seeds)
    return str(low) if low == high else f"{low} to {high}"


def lowest_of_one_kind(rows: Sequence[Row]) -> str:
    """Return which row has the lowest mean, and of how many others it is ahead, corrected over all pairs of rows."""
    values = {str(at): row.values() for at, row in enumerate(rows)}  # names may be alike
    found = compare(values, list(itertools.combinations(values, 2)))
    lowest = min(values, key=lambda at: mean(values[at].values()))
    ahead = [other for other in values if other != lowest and is_ahead(found, lowest, other)]
    others = plural(len(rows) - 1, "other row")
    corrected = f"Holm's correction over {plural(len(found), 'pair')}"
    return f"Lowest mean: {rows[int(lowest)].name}; better than {len(ahead)} of {others} ({corrected})."


def is_ahead(found: Mapping[tuple[str, str], Comparison], one: str, other: str) -> bool:
    """Tell whether a row is better than another, whichever of the two the comparison names first."""
    if (one, other) in found:
        return found[one, other].verdict == "better"
    return found[other, one].verdict == "behind"


def noise(rows: Sequence[Row], unit: str, has_verdict: bool = False) -> str:
    """Return the standard error of a score, what it means for differences, and how far apart the rows lie.

    Rows of one protocol are scored on the same windows, so what these have in common cancels in a difference: the bound
    is conservative. Verdicts over seeds apply to these windows only.
    """
    apart = spread(rows, unit)
    error = standard_error(rows)
    if error is None:
        return f"The standard error of a score is not recorded{apart}."
    over = windows_said([score for row in rows for score in row.scores])
    if has_verdict:
        moves = f"on other data a score may move by its standard error, {bits_said(error)} {unit} {over}"
        return f"Verdicts are for the windows scored: {moves}{apart}."
    hidden = f"Differences below about {bits_said(TWO_DEVIATIONS * error)} {unit} are within the noise of a score"
    return f"{hidden} (its standard error {bits_said(error)} {over}){apart}."


def standard_error(rows: Sequence[Row]) -> float | None:
    """Return the standard error of a score over its windows, in bits, the mean over all runs; None: not recorded."""
    errors = [score.error for row in rows for score in row.scores if score.error is not None]
    return mean(errors) if errors else None


def windows_said(scores: Sequence[Score]) -> str:
    """Return over how many windows scores are."""
    counts = {score.windows for score in scores}
    known = counts.pop() if len(counts) == 1 else None
    return f"over {plural(known, 'window')}" if known else "over the windows"


def spread(rows: Sequence[Row], unit: str) -> str:
    """Return how far apart the means of rows are, as the end of a sentence; rows that see the future do not count."""
    legal = [row for row in rows if not row.sees_future]
    compared = legal if len(legal) > 1 else rows
    if len(compared) < 2:
        return ""
    means = [mean(row.values().values()) for row in compared]
    apart = f"{bits_said(max(means) - min(means))} {unit} apart"
    if len(compared) < len(rows):
        return f"; the means of the {len(compared)} rows that see no future are up to {apart}"
    return f"; the means of the {len(compared)} rows are up to {apart}"


def bits_said(bits: float) -> str:
    """Return a number of bits with three digits behind the point, or with one digit where it is tiny."""
    return f"{bits:.3f}" if bits >= LEAST_SHOWN else f"{bits:.1g}"
