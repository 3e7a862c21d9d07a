"""The clock of optimizer steps: what it leaves out, and that its sum goes on in a later process."""

import pytest

from rtx.training import step_clock
from rtx.training.step_clock import StepClock


class Time:
    """What the clock reads, which the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(step_clock.time, "monotonic", lambda: self.now)


def steps(clock: StepClock, time: Time, *seconds: float) -> None:
    """Let the clock see steps of some seconds each."""
    clock.start()
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
    assert clock.seconds(1) is None, "the first step is not counted"
    steps(clock, time, 2.0, 4.0)
    clock.stop()
    time.now += 1000.0  # a validation
    assert clock.seconds(3) == pytest.approx(9.0)
    steps(clock, time, 3.0)
    assert clock.seconds(4) == pytest.approx(12.0)
    assert clock.elapsed == pytest.approx(69.0)


def test_the_sum_goes_on_in_a_later_process(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    first = StepClock()
    steps(first, time, 60.0, 2.0, 2.0, 2.0)
    second = StepClock(4)
    second.restore(first.state(4))
    assert second.seconds(4) == pytest.approx(8.0)
    steps(second, time, 50.0, 5.0)
    assert second.seconds(6) == pytest.approx(6 * (2 + 2 + 2 + 5) / 4)
    for state in ({"seconds": 1.0}, {"seconds": "1", "steps": 2}):
        with pytest.raises(TypeError, match="seconds of training steps"):
            second.restore(state)


def test_a_process_that_ends_within_its_first_step_adds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = Time(monkeypatch)
    first = StepClock()
    steps(first, time, 60.0, 2.0, 2.0)
    first.stop()
    second = StepClock(3)
    second.restore(first.state(3))
    second.start()
    time.now += 70.0
    assert second.state(3) == first.state(3) == {"seconds": 4.0, "steps": 2}
    third = StepClock(3)
    third.restore(second.state(3))
    steps(third, time, 50.0)
    assert third.seconds(4) == pytest.approx(8.0), "four steps at the mean of the two counted ones"


def test_a_stopped_clock_stays_stopped_behind_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    clock = StepClock()
    steps(clock, time, 1.0, 2.0)
    with clock.stopped():
        time.now += 10.0  # a checkpoint
    time.now += 3.0
    clock.stop()
    with clock.stopped():
        time.now += 10.0
    time.now += 10.0
    assert clock.elapsed == pytest.approx(6.0)
