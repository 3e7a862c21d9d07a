"""The windows in which a split is scored: every unit exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload


class Window(NamedTuple):
    """Units `[start, stop)` of a split are read, and of those the units `[first, stop)` are scored."""

    start: int
    stop: int
    first: int


class Windows(Sequence[Window]):
    """All windows of a split in order, made when asked for: a stride of 1 would make a list of millions."""

    def __init__(self, units: int, length: int, stride: int) -> None:
        assert units >= 1 and 1 <= stride <= length, (units, length, stride)
        self.units, self.length, self.stride = units, min(length, units), stride

    def __len__(self) -> int:
        return 1 + -((self.length - self.units) // self.stride)

    @overload
    def __getitem__(self, index: int) -> Window: ...
    @overload
    def __getitem__(self, index: slice) -> list[Window]: ...
    def __getitem__(self, index: int | slice) -> Window | list[Window]:
        if isinstance(index, slice):
            return [self._window(k) for k in range(*index.indices(len(self)))]
        return self._window(range(len(self))[index])

    def _window(self, k: int) -> Window:
        stop = self._stop(k)
        return Window(stop - self.length, stop, self._stop(k - 1) if k > 0 else 0)

    def _stop(self, k: int) -> int:
        return min(k * self.stride + self.length, self.units)


def windows(units: int, length: int, stride: int | None = None) -> Windows:
    """Return the windows of `length` units that advance by `stride` (unset: `length`) over a split of `units` units.

    Each window scores only the units that no earlier one scored; the last ends at the split's end (so it may overlap
    more than the stride asks); a split shorter than `length` is one short window. Their scored parts tile the split.
    """
    return Windows(units, length, length if stride is None else stride)
