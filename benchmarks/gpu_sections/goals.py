"""What is expected of a GPU, beside what was measured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from .journal import Found

Rows = dict[str, Found]


class Goal(NamedTuple):
    """A number that is to be reached; `measure` returns None where rows are missing."""

    name: str
    target: float
    measure: Callable[[Rows], float | None]
    at_most: bool = False

    def met(self, value: float) -> bool:
        return value <= self.target if self.at_most else value >= self.target


def goals() -> list[Goal]:
    """Return all goals."""
    found = [faster(kind, 4096, 1.0) for kind in ("local", "topk", "causal")]
    found += [
        faster(kind, 8192, times) for kind, times in (("local", 5), ("causal", 2.5), ("topk", 2.5))
    ]
    found += [
        faster(kind, 65_536, times) for kind, times in (("local", 25), ("causal", 15), ("topk", 8))
    ]
    found.append(
        Goal(
            "time of random over topk less its selection, N=65,536",
            1.1,
            random_to_topk,
            at_most=True,
        )
    )
    for N, how, times in (
        (8192, "eager", 1.3),
        (8192, "recorded", 1.6),
        (32_768, "recorded", 3),
        (65_536, "recorded", 5),
    ):
        found.append(whole("6x512", N, how, times))
    found.append(whole("rt24", 8192, "recorded", 1.4))
    found.append(
        Goal(
            "MFU of rt12 causal, N=8,192, recorded",
            0.35,
            functools.partial(value, "steps/rt12/causal/8192/recorded", "mfu"),
        )
    )
    found.append(Goal("waits in a training step", 0, waits, at_most=True))
    found.append(Goal("worst difference of plan and peak", 0.1, plan_error, at_most=True))
    return found


def value(key: str, field: str, rows: Rows) -> float | None:
    """Return a number of a row, None where it has none."""
    found = rows.get(key, {}).get(field)
    return None if found is None else float(found)


def ratio(key: str, other: str, field: str, rows: Rows) -> float | None:
    """Return how many times as large a number of the first row is as that of the other."""
    above = value(key, field, rows)
    below = value(other, field, rows)
    return above / below if above is not None and below else None


def faster(kind: str, N: int, times: float) -> Goal:
    """Return the goal of a pattern beside SDPA, by GPU time."""
    measure = functools.partial(ratio, f"alone/sdpa/{N}", f"alone/{kind}/{N}", "graph_ms")
    return Goal(f"{kind} as many times as fast as SDPA, N={N:,}", times, measure)


def whole(base: str, N: int, how: str, times: float) -> Goal:
    """Return the goal of whole steps with causal routing beside full heads."""
    measure = functools.partial(
        ratio, f"steps/{base}/full/{N}/{how}", f"steps/{base}/causal/{N}/{how}", "ms"
    )
    return Goal(
        f"step of {base} causal as many times as fast as full, N={N:,}, {how}", times, measure
    )


def random_to_topk(rows: Rows) -> float | None:
    """Return the time of random members in relation to that of topk without its selection."""
    names = ("random", "topk", "topk_selection")
    random, topk, selection = (value(f"alone/{name}/65536", "graph_ms", rows) for name in names)
    if random is None or topk is None or selection is None:
        return None
    return random / (topk - selection)


def waits(rows: Rows) -> float | None:
    """Return how many of the training steps that were looked at wait for the GPU."""
    found = [
        row["waits"]
        for key, row in rows.items()
        if key.startswith("correct/waits/") and "waits" in row
    ]
    return float(sum(found)) if found else None


def plan_error(rows: Rows) -> float | None:
    """Return the largest difference of the planned memory and the peak, in relation to the peak."""
    peaks = [row for key, row in rows.items() if key.startswith("steps/") and row.get("peak_bytes")]
    return max((abs(row["plan_bytes"] / row["peak_bytes"] - 1) for row in peaks), default=None)


def judged(rows: Rows) -> list[Found]:
    """Return each goal with what was measured, and whether it is met (None: not measured)."""
    found = []
    for goal in goals():
        measured = goal.measure(rows)
        met = None if measured is None else goal.met(measured)
        sign = "<=" if goal.at_most else ">="
        rounded = None if measured is None else round(measured, 3)
        found.append(
            {
                "goal": goal.name,
                "target": f"{sign} {goal.target:g}",
                "measured": rounded,
                "met": met,
            }
        )
    return found


def with_ratios(rows: Rows) -> list[Found]:
    """Return the rows; those of attention alone with how many times as fast they are as SDPA."""
    found = []
    for key, row in rows.items():
        N = key.rpartition("/")[2]
        against = {}
        if key.startswith("alone/"):
            fields = ("graph_ms", "python_ms", "forward_graph_ms")
            ratios = {field: ratio(f"alone/sdpa/{N}", key, field, rows) for field in fields}
            against = {
                f"sdpa_over_{field}": round(times, 2) for field, times in ratios.items() if times
            }
        found.append(row | against)
    return found
