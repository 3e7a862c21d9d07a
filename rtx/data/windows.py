"""Windows of a split that together score each unit once, and batches of them.

Shapes: B windows of a batch, N units of a window.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rtx.data.sampler import with_documents

BATCH_UNITS = 16_384
"""Units of a batch, unless the user says otherwise."""


class Window(NamedTuple):
    """The units from `start` to `stop` - 1 of a split; those from `first` on are scored."""

    start: int
    stop: int
    first: int


def windows(units: int, length: int, stride: int | None = None) -> list[Window]:
    """Return windows that together score each unit of a split once.

    Each window scores the units that no earlier window scored. The last one ends with the split. A
    split shorter than `length` is one window.

    Args:
        units: of the split.
        length: units of a window.
        stride: units from one window to the next; None: `length`.
    """
    length = min(length, units)
    stops = [0, *range(length, units, stride or length), units]
    cut = []
    for before, stop in itertools.pairwise(stops):
        cut.append(Window(start=stop - length, stop=stop, first=before))
    return cut


def sample_windows(windows: Sequence[Any], count: int | None, seed: int = 0) -> Sequence[Any]:
    """Return `count` of the windows in their order, drawn by a seed, or all if there are fewer."""
    if count is None or count >= len(windows):
        return windows
    generator = np.random.default_rng(seed)
    numbers = generator.choice(len(windows), size=count, replace=False)
    return [windows[int(number)] for number in np.sort(numbers)]


def batches_by_length(windows: Sequence[Window], batch_size: int | None) -> list[list[int]]:
    """Return the numbers of the windows in batches of neighbours of equal length.

    A batch has at most `batch_size` windows, or by default `BATCH_UNITS` units.
    """
    batches: list[list[int]] = []
    lengths = [window.stop - window.start for window in windows]
    for length, group in itertools.groupby(range(len(windows)), lambda number: lengths[number]):
        numbers = list(group)
        most = batch_size or max(1, BATCH_UNITS // length)
        for first in range(0, len(numbers), most):
            batches.append(numbers[first : first + most])
    return batches


def tokens_and_documents(units: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return tokens `[B, N]`, and the position of the first token of each one's document, or None.

    Args:
        units: tokens `[B, N]`, or with documents both, `[B, 2, N]`.
    """
    if units.dim() == 2:
        return units, None
    tokens_BN, first_BN = units.unbind(1)
    return tokens_BN, first_BN


def read_windows(
    tokens: np.ndarray,
    windows: Sequence[Window],
    starts: np.ndarray | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the tokens of windows of equal length, `[B, N]`, and how many are not scored, `[B]`.

    Both are int64. Those that are not scored come first.

    Args:
        starts: where documents start; the first result is then for `tokens_and_documents`.
    """
    rows = []
    for window in windows:
        if starts is None:
            rows.append(tokens[window.start : window.stop])
        else:
            rows.append(with_documents(tokens, starts, window.start, window.stop))
    skipped_B = torch.tensor([window.first - window.start for window in windows])
    return torch.from_numpy(np.stack(rows).astype(np.int64)), skipped_B
