"""Loss by position and by context: every unit once at each level, and what causal models say of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rtx.analysis.context import Span, bin_edges, contexts, mean_and_error, spans_with, unit_nats
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


@torch.no_grad()
def test_nats_are_those_of_the_model_and_whole_spans_change_nothing_of_a_causal_one() -> None:
    model, tokens = tiny_model(selection="causal"), np.random.default_rng(0).integers(11, size=200).astype(np.uint8)
    (nats,) = unit_nats(model, tokens, [Span(30, 54, 40, 50)])
    rows, _ = model.loss(torch.from_numpy(tokens[30:54].astype(np.int64))[None])
    np.testing.assert_allclose(nats, rows[0, 10:20].numpy(), rtol=1e-12)
    for context in (12, 5):
        done: list[int] = []
        short, long = (
            np.concatenate(unit_nats(model, tokens, spans_with(context, 30, 24, whole), on_progress=done.append))
            for whole in (False, True)
        )
        assert len(short) == 12 and done[-1] == len(spans_with(context, 30, 24, True))
        np.testing.assert_allclose(short, long, rtol=1e-9)
    (whole_window,) = unit_nats(model, tokens, [Span(30, 54, 42, 54)])
    at_most = np.concatenate(unit_nats(model, tokens, spans_with(12, 30, 24, False)))
    np.testing.assert_allclose(at_most, whole_window, rtol=1e-9)


def test_ranges_of_position_cover_the_window() -> None:
    assert bin_edges(10, 4) == [0, 2, 5, 8, 10]
    assert bin_edges(3, 16) == [0, 1, 2, 3]


def test_errors_are_over_windows() -> None:
    mean, error = mean_and_error(np.array([1.0, 3.0]))
    assert mean == 2.0 and error == pytest.approx(1.0)
    assert mean_and_error(np.array([1.0])) == (1.0, None)
