"""Loss by position and by context: every unit once at each level."""

from __future__ import annotations

import pytest

from rtx.analysis.context import bin_edges, contexts, spans_with


@pytest.mark.parametrize("length", [17, 24, 100, 3072])
@pytest.mark.parametrize("whole", [False, True])
def test_each_level_scores_the_second_half_once_behind_enough_context(length: int, whole: bool) -> None:
    for context in contexts(length):
        scored = []
        for span in spans_with(context, 1000, length, whole):
            assert context == span.first - span.start
            assert span.last - span.first <= context, "at most twice the context"
            assert span.stop - span.start == length if whole else span.stop == span.last
            scored += range(span.first, span.last)
        assert scored == list(range(1000 + length - length // 2, 1000 + length))


def test_levels_halve_down_to_a_few_units() -> None:
    assert contexts(100) == [50, 25, 12]
    assert contexts(10) == [5], "too short to leave context out"
    assert len(contexts(1 << 20)) == 8


def test_ranges_of_position_cover_the_window() -> None:
    assert bin_edges(10, 4) == [0, 2, 5, 8, 10]
    assert bin_edges(3, 16) == [0, 1, 2, 3]
