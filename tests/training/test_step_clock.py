"""The clock of optimizer steps: what it leaves out, and that its sum goes on in a later process."""

import pytest

from rtx.training import step_clock
from rtx.training.step_clock import StepClock


class Time:
    """A clock on the wall that goes on when it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(step_clock.time, "monotonic", lambda: self.now)


def steps(clock: StepClock, time: Time, *seconds: float) -> None:
    """Let the clock see steps of some seconds each."""
    clock.go()
    for duration in seconds:
        time.now += duration
        clock.end_of_step()


def test_validations_do_not_count_and_the_first_step_counts_as_the_mean_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = Time(monkeypatch)
    clock = StepClock()
    assert clock.seconds(0) is None
    steps(clock, time, 60.0)
    assert clock.seconds(1) is None, "of start-up alone nothing is known"
    steps(clock, time, 2.0, 4.0)
    clock.halt()
    time.now += 1000.0  # a validation
    assert clock.seconds(3) == pytest.approx(9.0)
    steps(clock, time, 3.0)
    assert clock.seconds(4) == pytest.approx(12.0)
    assert clock.elapsed == pytest.approx(69.0)


def test_the_sum_goes_on_in_a_later_process(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    first = StepClock()
    steps(first, time, 60.0, 2.0, 2.0, 2.0)
    kept = first.state(4)
    second = StepClock(4)
    second.restore(kept)
    assert second.seconds(4) == pytest.approx(8.0)
    steps(second, time, 50.0, 5.0)
    assert second.seconds(6) == pytest.approx(6 * (2 + 2 + 2 + 5) / 4)
    for state in ({"seconds": 1.0}, {"seconds": "1", "steps": 2}):
        with pytest.raises(TypeError, match="seconds of training steps"):
            second.restore(state)
