"""Loss by position and by context: every unit once at each level, and the nats of the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rtx.analysis.loss_by_position import Span, by_context, by_position, contexts, estimate, spans_with, unit_nats
from tests.model.tiny_models import tiny_model


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


def test_ranges_of_position_cover_the_window_with_their_errors() -> None:
    rows = by_position(np.array([[1.0] * 10, [3.0] * 10]), 4)
    assert [(row["first"], row["last"]) for row in rows] == [(0, 1), (2, 4), (5, 7), (8, 9)]
    assert all(row["bits"] == 2 and row["error"] == pytest.approx(1) for row in rows)
    assert len(by_position(np.ones((1, 3)), 16)) == 3
    assert estimate(np.array([1.0])) == (1.0, None)


def test_gains_are_paired_and_windows_without_room_are_left_out() -> None:
    def score(spans: Sequence[Span]) -> list[np.ndarray]:
        """A unit costs one bit more for each that it lacks of 16 before it."""
        return [np.array([16.0 - min(16, at - span.start) for at in range(span.first, span.last)]) for span in spans]

    first, second = by_context(score, [0, 32], 32, 64, whole=False)
    assert (first["context"], first["bits"], first["gain"], first["windows"]) == ([16, 31], 0, 0, 2)
    assert (second["context"], second["gain"], second["gain_error"]) == ([8, 15], 4.5, 0)
    assert [row["windows"] for row in by_context(score, [0, 32], 32, 64, whole=True)] == [1, 1]
    assert by_context(score, [32], 32, 64, whole=True) == [], "no room behind it"
    assert by_context(score, [0, 32], 10, 64, whole=False) == [], "too short to leave context out"


@torch.no_grad()
def test_nats_are_those_of_the_model_and_whole_spans_change_nothing_of_a_causal_one() -> None:
    model, tokens = tiny_model(selection="causal"), np.random.default_rng(0).integers(11, size=200).astype(np.uint8)
    (nats,) = unit_nats(model, tokens, [Span(30, 54, 40, 50)])
    rows, _ = model.loss(torch.from_numpy(tokens[30:54].astype(np.int64))[None])
    np.testing.assert_allclose(nats, rows[0, 10:20].numpy(), rtol=1e-12)
    for context in (12, 5):
        short, long = (
            np.concatenate(unit_nats(model, tokens, spans_with(context, 30, 24, whole))) for whole in (False, True)
        )
        assert len(short) == 12
        np.testing.assert_allclose(short, long, rtol=1e-9)
    (whole_window,) = unit_nats(model, tokens, [Span(30, 54, 42, 54)])
    np.testing.assert_allclose(unit_nats(model, tokens, spans_with(12, 30, 24, False))[0], whole_window, rtol=1e-9)
