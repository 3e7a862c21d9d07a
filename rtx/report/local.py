"""The local row that a row's pace is set against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from rtx.report.matching import kind_of

SAME = ("data.length", "trainer.batch_size")
"""What two rows share, beside the machine, for their paces to give a ratio."""


class Timed(Protocol):
    """A row that has, or may have, a pace."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Every value by its dotted key."""
        ...

    @property
    def machine(self) -> tuple[str, ...]:
        """What its pace depends on but the model and the batch."""
        ...

    @property
    def speed(self) -> float | None:
        """Steps a second."""
        ...


AnyRow = TypeVar("AnyRow", bound=Timed)


def local_row(row: Timed, rows: Sequence[AnyRow]) -> AnyRow | None:
    """Return the timed local row to compare a row with: same machine, N and batch, and the fewest other differences."""
    able = [other for other in rows if kind_of(other.config) == "local" and comparable(row, other)]
    able.sort(key=lambda other: differences(row.config, other.config))
    return next((other for other in able if other.speed), None)


def local_speed(row: Timed, rows: Sequence[Timed]) -> float | None:
    """Return the steps a second of the local row that a row is compared with."""
    local = local_row(row, rows)
    return local.speed if local else None


def comparable(row: Timed, other: Timed) -> bool:
    """Tell whether the paces of two rows give a ratio."""
    return row.machine == other.machine and all(row.config.get(key) == other.config.get(key) for key in SAME)


def differences(config: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Return by how many keys two configurations differ."""
    return sum(config.get(key) != other.get(key) for key in config.keys() | other.keys())
