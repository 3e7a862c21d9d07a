"""Seconds that a run spends in optimizer steps, over all the processes that have trained it."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any


class StepClock:
    """Counts the seconds of optimizer steps, without those of validations, rows and checkpoints.

    The first step of a process compiles, builds and allocates. Its seconds are not counted: it is
    taken to last as long as the mean of all counted steps.

    Time is that of `time.monotonic`. On Linux and macOS it does not go on while the machine is
    suspended, but does while the process alone is stopped (Ctrl-Z).

    Args:
        step: the number of steps that earlier processes have taken.
    """

    def __init__(self, step: int = 0) -> None:
        self.first_step = step
        self.earlier_seconds = 0.0
        """Of the counted steps of earlier processes."""
        self.earlier_steps = 0
        self.startup_seconds: float | None = None
        """Of the first step of this process; None until it has ended."""
        self._seconds_before_stop = 0.0
        """In this process, up to the last stop."""
        self._started_at: float | None = None
        """None: the clock is stopped."""

    def start(self) -> None:
        """Let the clock run, if it is stopped."""
        if self._started_at is None:
            self._started_at = time.monotonic()

    def stop(self) -> None:
        """Stop the clock, if it runs."""
        if self._started_at is not None:
            self._seconds_before_stop += time.monotonic() - self._started_at
            self._started_at = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock in this block; it runs after it if it ran before."""
        ran = self._started_at is not None
        self.stop()
        yield
        if ran:
            self.start()

    @property
    def elapsed(self) -> float:
        """The seconds of steps in this process, its first step included."""
        running = 0.0
        if self._started_at is not None:
            running = time.monotonic() - self._started_at
        return self._seconds_before_stop + running

    def end_of_step(self) -> None:
        """Note the end of a step, which for the first one is the end of start-up."""
        if self.startup_seconds is None:
            self.startup_seconds = self.elapsed

    def counted(self, step: int) -> tuple[float, int]:
        """Return the seconds and the number of counted steps up to the current step."""
        if self.startup_seconds is None:
            return self.earlier_seconds, self.earlier_steps
        seconds = self.elapsed - self.startup_seconds
        steps = step - self.first_step - 1
        return self.earlier_seconds + seconds, self.earlier_steps + steps

    def seconds(self, step: int) -> float | None:
        """Return the seconds of training up to `step`; None before a step is counted."""
        seconds, steps = self.counted(step)
        return seconds * step / steps if steps else None

    def state(self, step: int) -> dict[str, Any]:
        """Return the sums that a checkpoint holds."""
        seconds, steps = self.counted(step)
        return {"seconds": seconds, "steps": steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with the sum of earlier processes. `TypeError`: the state is not one of a clock."""
        match state:
            case {"seconds": float(seconds), "steps": int(steps)}:
                self.earlier_seconds = seconds
                self.earlier_steps = steps
            case _:
                raise TypeError("its seconds of training steps")


class RunClock:
    """Times of a run: all seconds since its first step, and those of optimizer steps alone.

    Args:
        first_step: the number of steps that earlier processes have taken.
        tokens_per_step: of all processes together.
    """

    def __init__(self, first_step: int = 0, tokens_per_step: int = 0) -> None:
        self.steps = StepClock(first_step)
        self.step = first_step
        self.tokens_per_step = tokens_per_step
        self.tokens_per_second = 0.0
        """Since the last row, start-up, validations and checkpoints left out."""
        self.earlier_seconds = 0.0
        """Of earlier processes."""
        self.validation_seconds = 0.0
        """Of the last validation."""
        self._started_at = time.monotonic()
        self._validation_at = 0.0
        self._row_step = first_step
        self._row_elapsed = 0.0

    @property
    def seconds(self) -> float:
        """All seconds since the first step, validations and checkpoints included."""
        return self.earlier_seconds + time.monotonic() - self._started_at

    @property
    def training_seconds(self) -> float | None:
        """The seconds of optimizer steps alone; None as long as they are unknown."""
        return self.steps.seconds(self.step)

    @property
    def seconds_since_row(self) -> float:
        """The seconds of optimizer steps since the last row."""
        return self.steps.elapsed - self._row_elapsed

    def start(self) -> None:
        """Begin to count."""
        self._started_at = time.monotonic()
        self.steps.start()

    def end_of_step(self, step: int) -> None:
        """Note the end of a step."""
        self.step = step
        self.steps.end_of_step()
        tokens = (step - self._row_step) * self.tokens_per_step
        self.tokens_per_second = tokens / max(1e-9, self.seconds_since_row)

    def mark_row(self) -> None:
        """Note that a row is written."""
        self._row_step = self.step
        self._row_elapsed = self.steps.elapsed

    def start_of_validation(self) -> None:
        """Note the start of a validation, which is no part of a step."""
        self.steps.stop()
        self._validation_at = time.monotonic()

    def end_of_validation(self) -> None:
        """Note the end of a validation."""
        self.validation_seconds = time.monotonic() - self._validation_at
