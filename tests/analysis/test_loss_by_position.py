"""Loss by position and context, and the price of the future, against the model run by plain loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rtx.analysis.loss_by_position import (
    RERUN,
    STREAMING,
    TEACHER_FORCED,
    Span,
    by_context,
    by_position,
    differences,
    price,
    spans_with,
    unit_bits,
)
from tests.model.tiny_models import VOCABULARY, tiny_model

LENGTH, STARTS, POSITIONS = 24, [0, 24, 50], np.array([0, 1, 7, 15, 23])
TOKENS = np.random.default_rng(0).integers(VOCABULARY, size=80).astype(np.uint8)


@pytest.mark.parametrize("length", [17, 24, 100, 3072])
@pytest.mark.parametrize("whole", [False, True])
def test_each_level_scores_the_second_half_once_behind_enough_context(length: int, whole: bool) -> None:
    for context in (length // 2, length // 4):
        scored = []
        for span in spans_with(context, 1000, length, whole):
            assert context == span.first - span.start
            assert span.last - span.first <= context, "at most twice the context"
            assert span.stop - span.start == length if whole else span.stop == span.last
            scored += range(span.first, span.last)
        assert scored == list(range(1000 + length - length // 2, 1000 + length))


def test_ranges_of_position_cover_the_window_with_their_errors() -> None:
    rows = by_position(np.array([[1.0] * 10, [3.0] * 10]), 4)
    assert [(row["first"], row["last"]) for row in rows] == [(0, 1), (2, 4), (5, 7), (8, 9)]
    assert all(row["bits"] == 2 and row["error"] == pytest.approx(1) for row in rows)
    assert [row["error"] for row in by_position(np.ones((1, 3)), 16)] == [None] * 3


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
def test_bits_are_those_of_the_model_and_whole_spans_change_nothing_of_a_causal_one() -> None:
    model = tiny_model(selection="causal")
    (bits,) = unit_bits(model, TOKENS, [Span(30, 54, 40, 50)])
    rows, _ = model.loss(torch.from_numpy(TOKENS[30:54].astype(np.int64))[None])
    np.testing.assert_allclose(bits, rows[0, 10:20].numpy() / math.log(2), rtol=1e-12)
    for context in (12, 5):
        spans = [spans_with(context, 30, 24, whole) for whole in (False, True)]
        short, long = (np.concatenate(unit_bits(model, TOKENS, of_kind)) for of_kind in spans)
        assert len(short) == 12
        np.testing.assert_allclose(short, long, rtol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("selection", ["topk", "causal"])
def test_each_way_of_scoring_is_what_it_says_and_who_sees_no_future_pays_nothing(selection: str) -> None:
    model = tiny_model(length=LENGTH, selection=selection, layers=2, routing_window=4)
    paid = price(model, TOKENS, STARTS, LENGTH, POSITIONS)
    for k, start in enumerate(STARTS):
        window_BN = torch.from_numpy(TOKENS[start : start + LENGTH].astype(np.int64))[None]
        whole, streamed = (model.loss(window_BN, streaming)[0][0] for streaming in (False, True))
        for at, p in enumerate(POSITIONS.tolist()):
            alone = model.loss(window_BN[:, : p + 1])[0][0, p]
            found = [paid[way][k, at] * math.log(2) for way in (RERUN, TEACHER_FORCED, STREAMING)]
            assert found == pytest.approx([float(alone), float(whole[p]), float(streamed[p])], rel=1e-12)
    leak, competing, together = (found["bits"] for found in differences(paid).values())
    assert together == pytest.approx((paid[STREAMING] - paid[TEACHER_FORCED]).mean(), abs=1e-12)
    assert leak + competing == pytest.approx(together, abs=1e-12)
    assert (abs(leak) > 1e-4) == (np.abs(paid[STREAMING] - paid[RERUN]).max() > 1e-3) == (selection == "topk")


def test_standard_errors_are_over_positions_and_over_windows() -> None:
    base, rerun = np.zeros((2, 3)), np.array([[1.0, 2, 3], [5, 6, 7]])
    found = differences({TEACHER_FORCED: base, RERUN: rerun, STREAMING: base})["leak_gives"]
    assert found["bits"] == pytest.approx(4)
    assert found["over_positions"] == pytest.approx(math.sqrt(28 / 5 / 6))
    assert found["over_windows"] == pytest.approx(2)
