"""What analyses share: the result that they record, and the windows that they read."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rtx.data.store import Store
from rtx.data.windows import Window, sample_windows, windows
from rtx.errors import UserError
from rtx.settings.schema import DataConfig

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
    data: DataConfig,
    count: int,
    seed: int,
) -> Sequence[Window]:
    """Return a sample of the windows of a split, drawn by a seed."""
    cut = windows(len(store.split(split)), data.length)
    return sample_windows(of_one_document(cut, store, split, data), count, seed)


def of_one_document(
    cut: Sequence[Window],
    store: Store,
    split: str,
    data: DataConfig,
) -> Sequence[Window]:
    """Return the windows that lie in one document each; all, if documents are not kept apart.

    Raises UserError if there are none.
    """
    starts = store.document_starts(split, data)
    if starts is None:
        return cut
    whole = []
    for window in cut:
        first, last = np.searchsorted(starts, [window.start + 1, window.stop])
        if first == last:
            whole.append(window)
    if not whole:
        none = f"no window of {data.length:,} units of split {split} lies in one document"
        raise UserError(f"data.documents=true: {none}; rtx analyze context reads all of them")
    return whole
