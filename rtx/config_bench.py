"""The part of the schema that `rtx bench` reads; as in `rtx/config.py`, docstrings become help."""

from __future__ import annotations

from dataclasses import dataclass

from rtx.limits import ranged


@dataclass
class BenchConfig:
    """Timing the training steps of several rows in turn (rtx bench steps)."""

    turns: int = ranged(5, low=1, high=10_000)
    """Turns: in each of them every row takes its steps, one row after the other, so that drift reaches all alike."""
    per_turn: int = ranged(2, low=1, high=10_000)
    """Timed steps of a row in each turn; a time is the mean of a turn, and the median over turns counts."""
    warmup: int = ranged(2, low=0, high=10_000)
    """Steps of a row, not timed, when its process begins."""
    together: bool = True
    """Keep every row's process between its turns; false: one at a time, begun anew each turn, for rows that fill
    the memory."""
