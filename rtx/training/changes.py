"""In what two configurations differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the fields (dotted names) whose values differ between two configurations, with both values."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found |= differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found[prefix + key] = (before, after)
    return found
