"""Intervals of scores, and verdicts on rows that hold when many rows are compared.

Two rows are compared by their differences seed by seed where five seeds match (a paired t-test),
else by Welch's t-test; then Holm's correction is made over all comparisons of a table. A row of
fewer than five seeds gets no verdict. Less is better.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

SEEDS = 5
"""The least number of seeds for a verdict."""
LEVEL = 0.05
"""The share of tables of equal rows that may have a false verdict."""
FEW = "too few seeds"
OPPOSITE = {"better": "behind", "behind": "better"}
"""The verdict on the other of two rows."""

Values = Mapping[str, float]
"""A score by seed."""
Names = tuple[str, str]
"""A row, and the row that it is compared with."""


@dataclass(frozen=True)
class Error:
    """A standard error and its degrees of freedom."""

    size: float
    freedom: float


@dataclass(frozen=True)
class Comparison:
    """A row compared with another.

    Args:
        difference: the mean of the row less that of the other; None: too few seeds.
        half: half the interval of the difference, at the level of Holm's correction. The interval
            includes 0 where the two rows tie.
        chance: p after Holm's correction.
    """

    difference: float | None = None
    half: float = 0.0
    chance: float = 1.0

    @property
    def verdict(self) -> str:
        """One of better, behind, tied and too few seeds."""
        if self.difference is None:
            return FEW
        # The interval of scores beyond 1e150 is no number, which compares as False.
        is_apart = abs(self.difference) > self.half
        if not is_apart:
            return "tied"
        return "better" if self.difference < 0 else "behind"


@dataclass(frozen=True)
class Difference:
    """The difference of two means."""

    mean: float
    error: Error

    @property
    def chance(self) -> float:
        """p of Student's two-sided test, without a correction."""
        from scipy.special import stdtr

        if not self.error.size:
            return 0.0 if self.mean else 1.0
        return 2 * float(stdtr(self.error.freedom, -abs(self.mean) / self.error.size))

    def half(self, level: float) -> float:
        """Return half the confidence interval of the difference at a level of significance."""
        from scipy.special import stdtrit

        return float(-stdtrit(self.error.freedom, level / 2) * self.error.size)


@dataclass(frozen=True)
class Corrected:
    """A comparison after Holm's correction: the level at which it is tested, and its p."""

    level: float
    chance: float


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


@dataclass(frozen=True)
class Moments:
    """The mean and the variance of a sample of at least two values."""

    mean: float
    variance: float


def moments(sample: Sequence[float]) -> Moments:
    """Return the moments of a sample.

    Tables of many rows compare thousands of pairs, and numpy is slow for a few values.
    """
    middle = sum(sample) / len(sample)
    # A product may become infinite, while a power of large numbers raises OverflowError.
    squares = [(value - middle) * (value - middle) for value in sample]
    return Moments(middle, sum(squares) / (len(sample) - 1))


def half_interval(values: Sequence[float]) -> float | None:
    """Return half the 95% interval of a mean; None for fewer than two values."""
    from scipy.special import stdtrit

    count = len(values)
    if count < 2:
        return None
    return -float(stdtrit(count - 1, LEVEL / 2) * np.std(values, ddof=1) / math.sqrt(count))


def compare(
    rows: Mapping[str, Values],
    pairs: Sequence[Names],
    errors: Mapping[str, Error] | None = None,
) -> dict[Names, Comparison]:
    """Return the comparison of each pair, after Holm's correction over all of them.

    `errors`: further errors of the means of rows, such as those of their paces at equal time.
    """
    known_errors = errors or {}
    differences = {}
    for pair in pairs:
        further = [known_errors[name] for name in pair if name in known_errors]
        one = difference(rows[pair[0]], rows[pair[1]], further)
        if one is not None:
            differences[pair] = one
    corrections = holm([one.chance for one in differences.values()])
    comparisons = dict.fromkeys(pairs, Comparison())
    for (pair, one), corrected in zip(differences.items(), corrections, strict=True):
        half = one.half(corrected.level)
        comparisons[pair] = Comparison(one.mean, half, corrected.chance)
    return comparisons


def holm(chances: Sequence[float]) -> list[Corrected]:
    """Return p values after Holm's correction (1979), in their order.

    From the smallest p on, each is tested at `LEVEL` over the number of those left. Once one is
    above its level, all later ones are tested at that same level.
    """
    corrected = [Corrected(0.0, 0.0)] * len(chances)
    level = 0.0
    largest = 0.0
    before = 0.0
    for rank, number in enumerate(np.argsort(chances, kind="stable")):
        left = len(chances) - rank
        if before <= level:
            level = LEVEL / left
        before = chances[number]
        largest = max(largest, min(1.0, left * before))
        corrected[number] = Corrected(level, largest)
    return corrected


def difference(row: Values, other: Values, errors: Sequence[Error] = ()) -> Difference | None:
    """Return the difference of the means of two rows; None: too few seeds.

    `errors`: further errors of the two means. Degrees of freedom are those of Welch and
    Satterthwaite.
    """
    shared = sorted(row.keys() & other.keys())
    if len(shared) >= SEEDS:
        samples = [[row[seed] - other[seed] for seed in shared]]
    elif min(len(row), len(other)) >= SEEDS:
        samples = [list(row.values()), list(other.values())]
    else:
        return None
    variances = []
    freedoms = []
    means = []
    for sample in samples:
        of_sample = moments(sample)
        means.append(of_sample.mean)
        variances.append(of_sample.variance / len(sample))
        freedoms.append(len(sample) - 1.0)
    for error in errors:
        variances.append(error.size * error.size)
        freedoms.append(error.freedom)
    middle = means[0] - sum(means[1:])
    total = sum(variances)
    if not total:
        return Difference(middle, Error(0.0, 1.0))
    # Shares of the total: squares of the variances themselves may be too large, or 0.
    parts = []
    for variance, freedom in zip(variances, freedoms, strict=True):
        share = variance / total
        parts.append(share * share / freedom)
    return Difference(middle, Error(math.sqrt(total), 1 / sum(parts)))


def chosen(rows: Mapping[str, Values]) -> tuple[str, dict[str, float]]:
    """Return the name of the best of several rows, and its scores by seeds that did not choose it.

    The seeds that all rows have choose the row. If no row has more, the first half of them does.
    If the rows share no seed, each row's own mean counts, and no score is left.
    """
    seeds = set.intersection(*(set(values) for values in rows.values()))
    if not seeds:
        return min(rows, key=lambda name: mean(rows[name].values())), {}
    choosing = sorted(seeds, key=lambda seed: (len(seed), seed))
    if all(len(values) == len(seeds) for values in rows.values()):
        choosing = choosing[: max(1, len(choosing) // 2)]
    best = min(rows, key=lambda name: mean(rows[name][seed] for seed in choosing))
    left = {seed: value for seed, value in rows[best].items() if seed not in choosing}
    return best, left
