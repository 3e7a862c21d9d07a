"""What scores allow to be said: intervals, and verdicts that stay right when many rows are compared.

Two rows are compared by their differences seed by seed where they share seeds, else as Welch does it; t quantiles;
Holm's correction over all comparisons of a table, so that at most one table in twenty of equal rows has a false
verdict. A row with fewer than five seeds gets none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

SEEDS = 5
"""Seeds from which on there is a verdict."""

LEVEL = 0.05
"""Share of tables of equal rows that may have a false verdict."""

FEW = "too few seeds"

Values = Mapping[str, float]
"""A score for each seed."""


@dataclass(frozen=True)
class Comparison:
    """A row against another: less is better."""

    difference: float | None = None
    """Mean of the row less that of the other; None: too few seeds."""
    half: float = 0.0
    """Half the interval of the difference, at the level that Holm's correction leaves it: it holds 0 where they tie."""
    p: float = 1.0
    paired: bool = False

    @property
    def verdict(self) -> str:
        """One of better, behind, tied and too few seeds."""
        if self.difference is None:
            return FEW
        return "tied" if abs(self.difference) <= self.half else "better" if self.difference < 0 else "behind"


def mean(values: Iterable[float]) -> float:
    """Return the mean."""
    return float(np.mean(list(values)))


def half_interval(values: Sequence[float]) -> float | None:
    """Return half the 95% interval of a mean; None for fewer than two values."""
    from scipy.stats import t

    count = len(values)
    return float(t.ppf(1 - LEVEL / 2, count - 1) * np.std(values, ddof=1) / math.sqrt(count)) if count > 1 else None


def compare(
    rows: Mapping[str, Values],
    pairs: Sequence[tuple[str, str]],
    errors: Mapping[str, tuple[float, float]] | None = None,
) -> dict[tuple[str, str], Comparison]:
    """Return the comparison of each pair, corrected over all of them.

    Args:
        rows: the scores of each row by seed.
        pairs: a row and what it is compared with.
        errors: standard error and degrees of freedom of what else is uncertain in a row's mean, as its pace is at equal
            time.
    """
    from scipy.stats import t

    known = errors or {}
    found = {pair: difference(rows[pair[0]], rows[pair[1]], [known.get(name) for name in pair]) for pair in pairs}
    sure = [(pair, entry) for pair, entry in found.items() if entry is not None]
    gaps, spreads, freedoms = np.array([entry[:3] for _, entry in sure]).reshape(-1, 3).T
    scores = np.divide(abs(gaps), spreads, out=np.where(gaps == 0, 0.0, np.inf), where=spreads > 0)
    chances, order = 2 * t.sf(scores, freedoms), np.argsort(2 * t.sf(scores, freedoms), kind="stable")
    levels = LEVEL / (len(sure) - np.arange(len(sure)))
    refused = np.flatnonzero(chances[order] > levels)
    levels[refused[0] if len(refused) else len(sure) :] = levels[refused[0]] if len(refused) else LEVEL
    halves = t.ppf(1 - levels / 2, freedoms[order]) * spreads[order]
    result = dict.fromkeys(pairs, Comparison())
    for half, at in zip(halves, order, strict=True):
        pair, (gap, _, _, paired) = sure[at]
        result[pair] = Comparison(gap, float(half), float(chances[at]), paired)
    return result


def difference(
    first: Values, second: Values, errors: Sequence[tuple[float, float] | None] = ()
) -> tuple[float, float, float, bool] | None:
    """Return the difference of two means, its standard error, degrees of freedom, and whether it is paired by seed."""
    shared = sorted(first.keys() & second.keys())
    if paired := len(shared) >= SEEDS:
        gaps = np.array([first[seed] - second[seed] for seed in shared])
        gap, parts = float(gaps.mean()), [(float(gaps.var(ddof=1)) / len(gaps), len(gaps) - 1.0)]
    elif min(len(first), len(second)) >= SEEDS:
        sides = [np.array(list(values.values())) for values in (first, second)]
        gap = float(sides[0].mean() - sides[1].mean())
        parts = [(float(side.var(ddof=1)) / len(side), len(side) - 1.0) for side in sides]
    else:
        return None
    parts += [(entry[0] ** 2, entry[1]) for entry in errors if entry]
    total = sum(variance for variance, _ in parts)
    freedom = total**2 / sum(variance**2 / degrees for variance, degrees in parts) if total else 1.0
    return gap, math.sqrt(total), freedom, paired


def all_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return each pair once: what to compare where no row is the natural one to compare with."""
    return list(itertools.combinations(names, 2))


def standings(rows: Mapping[str, Values]) -> dict[str, str]:
    """Return for each row best, behind, tied or too few seeds, by comparisons of all with all."""
    found = compare(rows, all_pairs(list(rows)))
    verdicts: dict[str, list[str]] = {name: [] for name in rows}
    opposite = {"better": "behind", "behind": "better"}
    for (first, second), entry in found.items():
        verdicts[first].append(entry.verdict)
        verdicts[second].append(opposite.get(entry.verdict, entry.verdict))
    return {name: word_of(verdicts[name], len(values)) for name, values in rows.items()}


def word_of(verdicts: Sequence[str], seeds: int) -> str:
    """Return what the comparisons of a row with all others come to."""
    if seeds < SEEDS:
        return FEW
    return "behind" if "behind" in verdicts else "best" if verdicts and set(verdicts) == {"better"} else "tied"


def chosen(rows: Mapping[str, Values]) -> tuple[str, dict[str, float]]:
    """Return the best of several rows, and its scores by seeds that did not choose it.

    The seeds that all rows share choose where some rows have more, else the first half of them do.
    """
    shared = sorted(set.intersection(*(set(values) for values in rows.values())), key=lambda seed: (len(seed), seed))
    if not shared:  # nothing to choose by on equal terms: each by its own
        best = min(rows, key=lambda name: mean(rows[name].values()))
        return best, {}
    if not any(rows[name].keys() - set(shared) for name in rows):
        shared = shared[: max(1, len(shared) // 2)]
    best = min(rows, key=lambda name: mean(rows[name][seed] for seed in shared))
    return best, {seed: value for seed, value in rows[best].items() if seed not in shared}
