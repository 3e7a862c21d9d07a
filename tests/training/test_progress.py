"""The progress line, and lines beside it that are never a reason to fail."""

from __future__ import annotations

import io
import math
import sys

import pytest

from rtx.training.progress import clock, say, training_line


def test_the_line() -> None:
    line = training_line(1_200, 4_000, 2.713, 2.9e-3, 84_210, 201, 1_234_567_890)
    assert line == "step 1,200/4,000 | 2.713 bits | lr 2.9e-03 | 84,210 units/s | 3:21 left | 1.2 GB"
    unknown = training_line(1, 4_000, math.nan, 2.9e-3, 84_210, 201, 1_234_567_890)
    assert unknown == "step 1/4,000 | lr 2.9e-03 | 84,210 units/s | 3:21 left | 1.2 GB"


def test_a_reader_that_has_gone_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    say("a")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (61, "1:01"), (3_600, "1:00:00"), (3_799, "1:03:19"), (176_601, "2d 1:03:21"), (-5, "0:00")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
