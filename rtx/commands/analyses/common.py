"""What analyses share: the result that they record, and the windows that they read."""

from collections.abc import Sequence
from typing import Any

from rtx.data.store import Store
from rtx.data.windows import Window, sample_windows, windows

Result = dict[str, Any]
"""What is recorded. `picture`, a PNG, becomes a file of its own."""


def whole_windows(store: Store, split: str, length: int) -> Sequence[Window]:
    """Return windows of a split in which every unit is scored.

    Units after the last of them are left out. A split below `length` is one window.
    """
    units = len(store.split(split))
    count = max(1, units // length)
    return windows(units, length)[:count]


def sampled_windows(
    store: Store,
    split: str,
    length: int,
    count: int,
    seed: int,
) -> Sequence[Window]:
    """Return a sample of the windows of a split, drawn by a seed."""
    cut = windows(len(store.split(split)), length)
    return sample_windows(cut, count, seed)
