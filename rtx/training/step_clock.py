"""Seconds that a run spends in optimizer steps, over all the processes that have trained it."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any


class StepClock:
    """Counts the seconds of optimizer steps and stands still during all else, such as validations and checkpoints.

    The first step of a process is start-up: it compiles, builds and allocates. It counts as long as the mean of all
    other steps.
    """

    def __init__(self, step: int = 0) -> None:
        self.counted_seconds = 0.0  # of the counted steps of earlier processes
        self.counted_steps = 0
        self.began_at = step  # the step that this process goes on from
        self.first_seconds: float | None = None  # that the first step of this process took
        self._finished_seconds = 0.0  # from the start of this process to the last halt
        self._since: float | None = None  # when the clock last went on; None: it is halted

    def go(self) -> None:
        """Go on, unless the clock runs."""
        if self._since is None:
            self._since = time.monotonic()

    def halt(self) -> None:
        """Stand still, unless the clock does."""
        if self._since is not None:
            self._finished_seconds += time.monotonic() - self._since
            self._since = None

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """Stand still for a while, and go on if the clock ran before."""
        ran = self._since is not None
        self.halt()
        yield
        if ran:
            self.go()

    @property
    def elapsed(self) -> float:
        """Seconds of steps in this process, its first step included."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._finished_seconds + running

    def end_of_step(self) -> None:
        """Take the first step of this process as start-up; to be called after each step."""
        if self.first_seconds is None:
            self.first_seconds = self.elapsed

    def counted(self, step: int) -> tuple[float, int]:
        """Return seconds and number of the counted steps up to `step`, where this process is now."""
        if self.first_seconds is None:
            return self.counted_seconds, self.counted_steps
        here = step - self.began_at - 1
        return self.counted_seconds + self.elapsed - self.first_seconds, self.counted_steps + here

    def seconds(self, step: int) -> float | None:
        """Return the seconds of training up to `step`; None where no step but first ones has been made."""
        seconds, steps = self.counted(step)
        return seconds * step / steps if steps else None

    def state(self, step: int) -> dict[str, Any]:
        """Return what a later process goes on with."""
        seconds, steps = self.counted(step)
        return {"seconds": seconds, "steps": steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with the sum of earlier processes. `TypeError`: the state is not one of a clock."""
        match state:
            case {"seconds": float(seconds), "steps": int(steps)}:
                self.counted_seconds = seconds
                self.counted_steps = steps
            case _:
                raise TypeError("its seconds of training steps")
