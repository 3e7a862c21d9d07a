"""The progress line: one line on a terminal, a few elsewhere, and never a reason to fail."""

from __future__ import annotations

import io

import pytest

from rtx.training.progress import Progress, clock, training_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_within_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    screen = Terminal()
    progress = Progress(screen)
    line = training_line(1_200, 4_000, 2.713, 2.9e-3, 84_210, 201, 1_234_567_890)
    assert line == "step 1,200/4,000 | 2.713 bits | lr 2.9e-03 | 84,210 units/s | 3:21 left | 1.2 GB"
    progress.show(line, force=True)
    progress.show("short", force=True)
    shown = screen.getvalue().split("\r")[1:]
    assert [len(text) for text in shown] == [39, 39]
    assert "\n" not in screen.getvalue()
    progress.say("a line that stays")
    assert screen.getvalue().endswith("\ra line that stays\n")


def test_elsewhere_lines_are_few_and_plain() -> None:
    file = io.StringIO()
    progress = Progress(file)
    for step in range(100):
        progress.show(f"step {step}")
    progress.show("last", force=True)
    assert file.getvalue() == "step 0\nlast\n"


def test_a_reader_that_has_gone_does_not_end_the_run() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    progress = Progress(Closed())
    progress.say("a")
    progress.show("b")


def test_other_ranks_are_quiet() -> None:
    file = io.StringIO()
    progress = Progress(file, quiet=True)
    progress.say("a")
    progress.show("b", force=True)
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (61, "1:01"), (3_600, "1:00:00"), (3_799, "1:03:19"), (176_601, "2d 1:03:21"), (-5, "0:00")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
