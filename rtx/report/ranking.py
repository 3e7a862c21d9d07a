"""What scores allow to be said: intervals, and verdicts that stay right when many rows are compared.

Two rows are compared by their differences seed by seed where five seeds match, else as Welch does it; t quantiles;
Holm's correction over all comparisons of a table. A row with fewer than five seeds gets no verdict.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

SEEDS = 5  # seeds from which on there is a verdict
LEVEL = 0.05  # share of tables of equal rows that may have a false verdict
FEW = "too few seeds"
OPPOSITE = {"better": "behind", "behind": "better"}
Values = Mapping[str, float]  # a score for each seed


@dataclass(frozen=True)
class Comparison:
    """A row against another: less is better."""

    difference: float | None = None  # mean of the row less that of the other; None: too few seeds
    half: float = 0.0  # half its interval, at the level that Holm's correction leaves it: it holds 0 where they tie
    chance: float = (
        1.0  # p after Holm's correction: the least level at which the difference would be told
    )

    @property
    def verdict(self) -> str:
        """One of better, behind, tied and too few seeds."""
        if self.difference is None:
            return FEW
        return (
            "tied"
            if abs(self.difference) <= self.half
            else "better"
            if self.difference < 0
            else "behind"
        )


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def half_interval(values: Sequence[float]) -> float | None:
    """Return half the 95% interval of a mean; None for fewer than two values."""
    from scipy.special import stdtrit

    count = len(values)
    return (
        -float(stdtrit(count - 1, LEVEL / 2) * np.std(values, ddof=1) / math.sqrt(count))
        if count > 1
        else None
    )


def compare(
    rows: Mapping[str, Values],
    pairs: Sequence[tuple[str, str]],
    errors: Mapping[str, tuple[float, float]] | None = None,
) -> dict[tuple[str, str], Comparison]:
    """Return the comparison of each pair (a row and what it is compared with), corrected over all of them.

    `errors`: standard error and degrees of freedom of what else is uncertain in a row's mean, as its pace is at equal
    time.
    """
    from scipy.special import stdtr, stdtrit  # Student's t: its distribution and its quantiles

    known = errors or {}
    found = {
        (one, other): difference(
            rows[one], rows[other], [known[name] for name in (one, other) if name in known]
        )
        for one, other in pairs
    }
    sure = [pair for pair in pairs if found[pair]]
    gaps, spreads, freedoms = np.array([found[pair] for pair in sure]).reshape(-1, 3).T
    with np.errstate(divide="ignore", invalid="ignore"):
        chances = 2 * stdtr(freedoms, -np.nan_to_num(abs(gaps) / spreads))
    order, level, levels, corrected = (
        np.argsort(chances, kind="stable"),
        0.0,
        np.zeros(len(sure)),
        np.zeros(len(sure)),
    )
    for rank, at in enumerate(order):
        if (
            not rank or chances[order[rank - 1]] <= level
        ):  # Holm's levels grow until one is not reached
            level = LEVEL / (len(sure) - rank)
        levels[at] = level
        corrected[at] = min(1.0, max(corrected.max(), (len(sure) - rank) * chances[at]))
    halves = -stdtrit(freedoms, levels / 2) * spreads
    told = zip(gaps.tolist(), halves.tolist(), corrected.tolist(), strict=True)
    return dict.fromkeys(pairs, Comparison()) | {
        pair: Comparison(*one) for pair, one in zip(sure, told, strict=True)
    }


def difference(
    first: Values, second: Values, errors: Sequence[tuple[float, float]] = ()
) -> tuple[float, float, float] | None:
    """Return the difference of two means, its standard error and its degrees of freedom; None: too few seeds."""
    shared = sorted(first.keys() & second.keys())
    if len(shared) >= SEEDS:
        gap = mean(first[seed] - second[seed] for seed in shared)
        samples = [[first[seed] - second[seed] for seed in shared]]
    elif min(len(first), len(second)) >= SEEDS:
        gap = mean(first.values()) - mean(second.values())
        samples = [list(first.values()), list(second.values())]
    else:
        return None
    parts = [(float(np.var(sample, ddof=1)) / len(sample), len(sample) - 1.0) for sample in samples]
    parts += [(error**2, degrees) for error, degrees in errors]
    total = sum(variance for variance, _ in parts)
    freedom = total**2 / sum(variance**2 / degrees for variance, degrees in parts) if total else 1.0
    return gap, math.sqrt(total), freedom


def chosen(rows: Mapping[str, Values]) -> tuple[str, dict[str, float]]:
    """Return the best of several rows, and its scores by seeds that did not choose it.

    The seeds that all rows share choose where some rows have more, else the first half of them do.
    """
    shared = sorted(
        set.intersection(*(set(values) for values in rows.values())),
        key=lambda seed: (len(seed), seed),
    )
    if not shared:  # nothing to choose by on equal terms: each by its own
        return min(rows, key=lambda name: mean(rows[name].values())), {}
    if all(len(values) == len(shared) for values in rows.values()):
        shared = shared[: max(1, len(shared) // 2)]
    best = min(rows, key=lambda name: mean(rows[name][seed] for seed in shared))
    return best, {seed: value for seed, value in rows[best].items() if seed not in shared}
