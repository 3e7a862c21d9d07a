"""The part of the schema that sweeps read; as in `rtx/config.py`, docstrings become help."""

from __future__ import annotations

from dataclasses import dataclass

from rtx.limits import ranged


@dataclass
class SweepConfig:
    """Sweeps (-m); an experiment's file may also list axes under hydra.sweeper.params."""

    cells: str | None = None
    """Cells that are no grid: overrides with blanks between, and ; between cells; each goes with every other value."""
    parallel: int | None = ranged(None, low=1, high=1_000)
    """Cells side by side; unset: one after the other, or with hardware=slurm all of them, as the queue takes them."""
    retry: bool = False
    """Run failed cells again, from their checkpoint if there is one; otherwise they are reported as they failed."""
    once: bool = False
    """Print how a sweep stands and leave, instead of watching it until it ends (rtx sweep)."""
