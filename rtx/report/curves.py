"""Validation curves of runs over seconds of training, and two comparisons of a row with a rival.

A *row* is a set of runs that differ by their seeds. A *loss* is a number of bits of a validation.

- *Time to a loss*: the first time at which the best validation so far is as low as the loss.
- *Loss at equal time*: the best validation so far at some time.

Between two validations the best loss is a straight line over the logarithm of the seconds. Bits
fall fast at first and then ever more slowly, about so; a line over seconds would put a loss between
two early validations too late. If every step of a run took k times as long, its times to a loss
would be exactly k times as long.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from rtx.report.ranking import SEEDS, Comparison, Error, compare, mean

EARLY = 0.1
"""Times are compared at losses below what the rival has reached after this share of its time."""
LOSS_COUNT = 4
"""How many losses times are compared at."""
BUDGETS = (1 / 8, 1 / 4, 1 / 2, 1.0)
"""At which shares of the shortest training time losses are compared."""

NOT_REACHED = "not reached"
TOO_EARLY = "before a first validation"
NO_VALIDATION = "no validation yet"


@dataclass(frozen=True)
class Curve:
    """The validations of a run, at least one: seconds of training, strictly rising, and bits."""

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
        """The seconds of the last validation."""
        return self.seconds[-1]

    def reaches(self, loss: float) -> bool:
        """Tell whether some validation is as low as a loss."""
        return self.best[-1] <= loss

    def begins_below(self, loss: float) -> bool:
        """Tell whether the first validation is below a loss, so that the time to it is unknown."""
        return self.best[0] < loss

    def time_to(self, loss: float) -> float:
        """Return the seconds to a loss, which the curve must reach and not begin below."""
        assert self.reaches(loss) and not self.begins_below(loss)
        after = next(index for index, bits in enumerate(self.best) if bits <= loss)
        if after == 0:
            return self.seconds[0]
        before = after - 1
        share = (self.best[before] - loss) / (self.best[before] - self.best[after])
        log_ratio = math.log(self.seconds[after] / self.seconds[before])
        return self.seconds[before] * math.exp(share * log_ratio)

    def loss_at(self, seconds: float) -> float | None:
        """Return the best bits up to a time: None before the first validation.

        After the last validation it is the best of the run.
        """
        if seconds < self.seconds[0]:
            return None
        if seconds >= self.total:
            return self.best[-1]
        after = bisect.bisect_right(self.seconds, seconds)
        before = after - 1
        log_ratio = math.log(self.seconds[after] / self.seconds[before])
        share = math.log(seconds / self.seconds[before]) / log_ratio
        return self.best[before] + share * (self.best[after] - self.best[before])


@dataclass(frozen=True)
class Runs:
    """The curves of a row by seed and clock.

    Seconds of two runs may be compared where their clocks are equal: machine, threads, engine and
    so on, in one text (`times.clock_of`).

    `pace_error`: the error of the logarithm of steps a second, where the seconds of all curves are
    steps over one pace that was timed apart.
    """

    curves: Mapping[tuple[str, str], Curve]
    pace_error: Error | None = None


class Pair(NamedTuple):
    """A run of a row and one of its rival, of equal seed and clock."""

    seed: str
    row: Curve
    rival: Curve


@dataclass(frozen=True)
class PairedValues:
    """Values of a row and of its rival at one loss or time, by seed; empty where there are none.

    `why`: the reason why there are none; `errors`: those that the paces of row and rival make in
    the means of the values.
    """

    why: str = ""
    row: Mapping[str, float] = field(default_factory=dict)
    rival: Mapping[str, float] = field(default_factory=dict)
    errors: Sequence[Error | None] = (None, None)


@dataclass(frozen=True)
class Finding:
    """The difference of a row from its rival at one loss or time, and the verdict on it.

    `why`: the reason why there is no number; `difference`: the mean over seeds, of the logarithm of
    seconds or of bits.
    """

    why: str = ""
    difference: float | None = None
    comparison: Comparison = field(default_factory=Comparison)


def pairs_of(row: Runs, rival: Runs) -> list[Pair]:
    """Return all pairs of runs, in order of their seeds."""
    shared = sorted(row.curves.keys() & rival.curves.keys())
    return [Pair(key[0], row.curves[key], rival.curves[key]) for key in shared]


def losses_of(rival: Runs) -> list[float]:
    """Return the losses at which times are compared, from the highest, in bits with two decimals.

    They divide the span between two losses in equal parts: what all runs of the rival have reached
    after a tenth of their time, or at their first validation, which is left out; and what all of
    them have reached at their end, which is the last one. Where the span is less than a hundredth
    of a bit there may be none.
    """
    curves = list(rival.curves.values())
    early = [curve.loss_at(max(EARLY * curve.total, curve.seconds[0])) for curve in curves]
    start = max(bits for bits in early if bits is not None)
    end = max(curve.best[-1] for curve in curves)
    step = (end - start) / LOSS_COUNT
    losses = []
    for number in range(1, LOSS_COUNT + 1):
        hundredths = round(100 * (start + number * step), 6)
        loss = math.ceil(hundredths) / 100  # up: the rival reaches it
        if loss <= start and loss not in losses:
            losses.append(loss)
    return losses


def budgets_of(row: Runs, rival: Runs) -> list[float]:
    """Return the seconds at which losses are compared: shares of the shortest run's."""
    totals = []
    for pair in pairs_of(row, rival):
        totals += [pair.row.total, pair.rival.total]
    shortest = min(totals, default=0.0)
    return [share * shortest for share in BUDGETS]


def times_to(loss: float, row: Runs, rival: Runs) -> PairedValues:
    """Return the logarithms of the seconds to a loss, which is one of `losses_of(rival)`.

    Where a run does not reach it, or begins below it, there are none.
    """
    pairs = pairs_of(row, rival)
    seeds = {pair.seed for pair in pairs}
    missed = {pair.seed for pair in pairs if not pair.row.reaches(loss)}
    if missed and missed == seeds:
        return PairedValues(NOT_REACHED)
    if missed:
        return PairedValues(f"reached by {len(seeds) - len(missed)} of {len(seeds)} seeds")
    if any(pair.row.begins_below(loss) or pair.rival.begins_below(loss) for pair in pairs):
        return PairedValues(TOO_EARLY)
    values_of_row = [(pair.seed, math.log(pair.row.time_to(loss))) for pair in pairs]
    values_of_rival = [(pair.seed, math.log(pair.rival.time_to(loss))) for pair in pairs]
    return PairedValues(
        row=by_seed(values_of_row),
        rival=by_seed(values_of_rival),
        errors=(row.pace_error, rival.pace_error),
    )


def losses_after(seconds: float, row: Runs, rival: Runs) -> PairedValues:
    """Return the best bits up to a time; where a run has no validation by then, there are none."""
    pairs = pairs_of(row, rival)
    values_of_row = []
    values_of_rival = []
    for pair in pairs:
        bits_of_row = pair.row.loss_at(seconds)
        bits_of_rival = pair.rival.loss_at(seconds)
        if bits_of_row is None or bits_of_rival is None:
            return PairedValues(NO_VALIDATION)
        values_of_row.append((pair.seed, bits_of_row))
        values_of_rival.append((pair.seed, bits_of_rival))
    error_of_row = error_in_bits(seconds, [pair.row for pair in pairs], row.pace_error)
    error_of_rival = error_in_bits(seconds, [pair.rival for pair in pairs], rival.pace_error)
    return PairedValues(
        row=by_seed(values_of_row),
        rival=by_seed(values_of_rival),
        errors=(error_of_row, error_of_rival),
    )


def error_in_bits(
    seconds: float,
    curves: Sequence[Curve],
    pace_error: Error | None,
) -> Error | None:
    """Return the error of the mean of bits at a time that an error of the pace makes.

    It is how far bits change while the time changes by one standard error of its logarithm.
    """
    if pace_error is None:
        return None
    changes = []
    for curve in curves:
        late = min(seconds, curve.total)
        early = max(late * math.exp(-pace_error.size), curve.seconds[0])
        early_bits = curve.loss_at(early)
        late_bits = curve.loss_at(late)
        assert early_bits is not None and late_bits is not None
        changes.append(early_bits - late_bits)
    return Error(mean(changes), pace_error.freedom)


def by_seed(values: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of each seed's values: a seed that ran more than once counts once."""
    grouped: dict[str, list[float]] = {}
    for seed, value in values:
        grouped.setdefault(seed, []).append(value)
    return {seed: mean(group) for seed, group in grouped.items()}


def findings_of(
    paired: Mapping[tuple[str, float], PairedValues],
) -> dict[tuple[str, float], Finding]:
    """Return a finding for each row and loss or time, paired by seed.

    Holm's correction is over all of them that have a verdict; fewer than five seeds have a number
    and no verdict.
    """
    values: dict[str, Mapping[str, float]] = {}
    errors: dict[str, Error] = {}
    names: dict[tuple[str, float], tuple[str, str]] = {}
    for number, (key, one) in enumerate(paired.items()):
        if len(one.row) < SEEDS:
            continue
        names[key] = (f"row {number}", f"rival {number}")
        values |= zip(names[key], (one.row, one.rival), strict=True)
        for name, error in zip(names[key], one.errors, strict=True):
            if error is not None:
                errors[name] = error
    compared = compare(values, list(names.values()), errors)
    findings = {}
    for key, one in paired.items():
        comparison = compared[names[key]] if key in names else Comparison()
        findings[key] = Finding(one.why, mean_difference(one), comparison)
    return findings


def mean_difference(paired: PairedValues) -> float | None:
    """Return the mean over seeds of a row's value less its rival's; None without values."""
    differences = [value - paired.rival[seed] for seed, value in paired.row.items()]
    return mean(differences) if differences else None
