"""What runs had reached after seconds of training: curves, interpolation, and two comparisons of pairs of runs.

A *time to a loss* is the first time at which the best validation so far is at most the loss. A *loss at equal
time* is the best validation so far at some time. Between two validations both lie on a straight line over the
logarithm of the seconds: bits fall fast at first and ever more slowly, about as a straight line over log time, so
a line over seconds would put a loss between two early validations too late. Where all steps of a run take k times
as long, its times to a loss are exactly k times as long, too.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rtx.report.ranking import SEEDS, Comparison, compare, mean

EARLY = 0.1
"""The share of its time after which what a rival has reached is the first of the losses that are looked at."""
LOSSES = 4
BUDGETS = (1 / 8, 1 / 4, 1 / 2, 1.0)
"""Shares of the shorter of two training times, at which losses are compared."""

NOT_REACHED = "not reached"
TOO_EARLY = "before a first validation"
NO_VALIDATION = "no validation yet"


@dataclass(frozen=True)
class Curve:
    """The validations of a run: seconds of training, which rise, and bits."""

    seconds: Sequence[float]
    bits: Sequence[float]

    @cached_property
    def best(self) -> list[float]:
        """The least bits up to each validation."""
        least: list[float] = []
        for bits in self.bits:
            least.append(min([bits, *least[-1:]]))
        return least

    @property
    def total(self) -> float:
        return self.seconds[-1]

    def reaches(self, loss: float) -> bool:
        return self.best[-1] <= loss

    def begins_below(self, loss: float) -> bool:
        """Tell whether the loss was reached before the first validation, nobody knows when."""
        return self.best[0] < loss

    def time_to(self, loss: float) -> float:
        """Return the seconds after which the loss was first reached, which the curve must do after its beginning."""
        assert self.reaches(loss) and not self.begins_below(loss)
        after = next(at for at, bits in enumerate(self.best) if bits <= loss)
        if after == 0:
            return self.seconds[0]
        before = after - 1
        share = (self.best[before] - loss) / (self.best[before] - self.best[after])
        steepness = math.log(self.seconds[after] / self.seconds[before])
        return self.seconds[before] * math.exp(share * steepness)

    def loss_at(self, seconds: float) -> float | None:
        """Return the best bits after so many seconds; None before the first validation.

        After the last one the best is that of the whole run.
        """
        if seconds < self.seconds[0]:
            return None
        if seconds >= self.total:
            return self.best[-1]
        after = bisect.bisect_right(self.seconds, seconds)
        before = after - 1
        share = math.log(seconds / self.seconds[before]) / math.log(self.seconds[after] / self.seconds[before])
        return self.best[before] + share * (self.best[after] - self.best[before])


@dataclass(frozen=True)
class Runs:
    """The curves of a row by seed and clock: what a machine, its threads and its engine make of seconds.

    `pace_error`: standard error of the logarithm of the row's pace, and its degrees of freedom, where the seconds of
    all curves come from one pace that was timed apart.
    """

    curves: Mapping[tuple[str, str], Curve]
    pace_error: tuple[float, float] | None = None


@dataclass(frozen=True)
class Finding:
    """A row against a rival at one loss or budget.

    `why`: a reason for which there is no number; `middle`: the mean difference over seeds, of log seconds or bits.
    """

    why: str = ""
    middle: float | None = None
    comparison: Comparison = field(default_factory=Comparison)


@dataclass(frozen=True)
class Paired:
    """A row's values and a rival's at one loss or budget, seed by seed, and the error of their paces in them."""

    why: str = ""
    own: Mapping[str, float] = field(default_factory=dict)
    theirs: Mapping[str, float] = field(default_factory=dict)
    errors: Sequence[tuple[float, float] | None] = (None, None)


def pairs_of(own: Runs, rival: Runs) -> list[tuple[str, Curve, Curve]]:
    """Return seed, curve and the rival's curve of all pairs of runs of one seed and clock."""
    shared = sorted(own.curves.keys() & rival.curves.keys())
    return [(key[0], own.curves[key], rival.curves[key]) for key in shared]


def losses_of(rival: Runs) -> list[float]:
    """Return the losses at which times to a loss are compared, from the highest, in bits with two decimals.

    They are evenly spread between what all runs of the rival have reached after a tenth of their time, or at their
    first validation, which itself is left out, and what all of them have reached at their end.
    """
    curves = rival.curves.values()
    early = [curve.loss_at(max(EARLY * curve.total, curve.seconds[0])) for curve in curves]
    start = max(bits for bits in early if bits is not None)
    end = max(curve.best[-1] for curve in curves)
    found = [start + (end - start) * number / LOSSES for number in range(1, LOSSES + 1)]
    rounded = [math.ceil(round(100 * loss, 6)) / 100 for loss in found]  # up: the rival does reach it
    return [loss for loss in dict.fromkeys(rounded) if loss <= start]


def budgets_of(own: Runs, rival: Runs) -> list[float]:
    """Return the seconds at which a row and a rival are compared: shares of the shortest of all their times."""
    pairs = pairs_of(own, rival)
    shortest = min(curve.total for _, *both in pairs for curve in both) if pairs else 0.0
    return [share * shortest for share in BUDGETS]


def times_to(loss: float, own: Runs, rival: Runs) -> Paired:
    """Return the logarithms of the seconds to a loss by seed; where a seed does not reach it, why there are none."""
    pairs = pairs_of(own, rival)
    missed = {seed for seed, curve, _ in pairs if not curve.reaches(loss)}
    seeds = {seed for seed, *_ in pairs}
    if missed:
        reached = f"reached by {len(seeds) - len(missed)} of {len(seeds)} seeds"
        return Paired(NOT_REACHED if missed == seeds else reached)
    if any(curve.begins_below(loss) for _, *both in pairs for curve in both):
        return Paired(TOO_EARLY)
    ours = [(seed, math.log(curve.time_to(loss))) for seed, curve, _ in pairs]
    theirs = [(seed, math.log(curve.time_to(loss))) for seed, _, curve in pairs]
    return Paired("", by_seed(ours), by_seed(theirs), (own.pace_error, rival.pace_error))


def losses_after(seconds: float, own: Runs, rival: Runs) -> Paired:
    """Return the bits after so many seconds by seed; where a seed has no validation by then, why there are none."""
    pairs = pairs_of(own, rival)
    ours, theirs = [], []
    for seed, curve, other in pairs:
        bits = curve.loss_at(seconds)
        bits_of_rival = other.loss_at(seconds)
        if bits is None or bits_of_rival is None:
            return Paired(NO_VALIDATION)
        ours.append((seed, bits))
        theirs.append((seed, bits_of_rival))
    errors = [
        error_in_bits(seconds, [curve for _, curve, _ in pairs], own.pace_error),
        error_in_bits(seconds, [other for *_, other in pairs], rival.pace_error),
    ]
    return Paired("", by_seed(ours), by_seed(theirs), errors)


def error_in_bits(
    seconds: float, curves: Sequence[Curve], pace_error: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Return the standard error that the error of a pace makes in the bits at some time, and its degrees of freedom."""
    if pace_error is None:
        return None
    error, freedom = pace_error
    moved = []
    for curve in curves:
        at = min(seconds, curve.total)
        earlier = curve.loss_at(max(at * math.exp(-error), curve.seconds[0]))
        now = curve.loss_at(at)
        assert earlier is not None and now is not None
        moved.append(earlier - now)
    return mean(moved), freedom


def by_seed(values: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of each seed's values: a seed that ran more than once counts once."""
    found: dict[str, list[float]] = {}
    for seed, value in values:
        found.setdefault(seed, []).append(value)
    return {seed: mean(of_seed) for seed, of_seed in found.items()}


def judged(paired: Mapping[tuple[str, float], Paired]) -> dict[tuple[str, float], Finding]:
    """Return a finding for each row and loss or budget, by Holm's correction over all that have a verdict.

    Differences are paired by seed. Fewer than five seeds give a number, and no verdict.
    """
    rows: dict[str, Mapping[str, float]] = {}
    errors: dict[str, tuple[float, float]] = {}
    pairs: dict[tuple[str, float], tuple[str, str]] = {}
    for number, (key, one) in enumerate(paired.items()):
        names = (f"{number} own", f"{number} rival")
        for name, values, error in zip(names, (one.own, one.theirs), one.errors, strict=True):
            rows[name] = values
            if error is not None:
                errors[name] = error
        if len(one.own) >= SEEDS:
            pairs[key] = names
    compared = compare(rows, list(pairs.values()), errors)
    found = {}
    for key, one in paired.items():
        middle = mean(one.own[seed] - one.theirs[seed] for seed in one.own) if one.own else None
        comparison = compared[pairs[key]] if key in pairs else Comparison()
        found[key] = Finding(one.why, middle, comparison)
    return found
