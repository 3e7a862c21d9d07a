"""How long a run takes: waiting for data, stepping, and everything together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from torch import Tensor


class Fetches:
    """A loader whose waiting time is measured.

    Args:
        loader: yields the micro-batches.
        batches: how many it yields.
    """

    def __init__(self, loader: Iterable[Tensor], batches: int) -> None:
        self.loader, self.batches = loader, batches
        self.seconds = 0.0
        """Time spent waiting for batches so far."""

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Tensor]:
        batches = iter(self.loader)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch


class Clock:
    """Seconds of training over all processes of a run, and the seconds of stepping since the last row.

    Args:
        before: seconds of training in earlier processes of the run.
    """

    def __init__(self, before: float) -> None:
        self.before = before
        self.began = self.mark = time.monotonic()
        self.paused = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the first step, validation and checkpoints included, and those of earlier processes."""
        return self.before + time.monotonic() - self.began

    @property
    def lap(self) -> float:
        """Seconds of stepping since the last row."""
        return max(1e-9, time.monotonic() - self.mark - self.paused)

    def start(self) -> None:
        """Begin to count at the first step."""
        self.began = time.monotonic()
        self.next_lap()

    def next_lap(self) -> None:
        """Begin a new row."""
        self.mark, self.paused = time.monotonic(), 0.0

    def __enter__(self) -> None:
        """Pause the lap, as a context: what happens inside is no stepping."""
        self.entered = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.paused += time.monotonic() - self.entered
