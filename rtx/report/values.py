"""Values of records as they should be: whatever a damaged file holds instead becomes nothing."""

from __future__ import annotations


def whole(value: object) -> int:
    """Return a whole number of a record, or 0."""
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return value if abs(value) < 2**63 else 0


def real(value: object) -> float | None:
    """Return a finite number of a record, or None: a run that diverged has NaN among them."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None
