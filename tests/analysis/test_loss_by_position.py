"""Loss by position and context, and the price of the future, against the model run by plain loops."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rtx.analysis import loss_by_position as losses
from rtx.analysis.loss_by_position import RERUN, STREAMING, TEACHER_FORCED
from rtx.evaluation.protocols import Window, windows
from tests.model.tiny_models import VOCABULARY, tiny_model

LENGTH, POSITIONS = 24, np.array([0, 1, 7, 15, 23])
TOKENS = np.random.default_rng(0).integers(VOCABULARY, size=80).astype(np.uint8)
WINDOWS = [Window(start, start + LENGTH, start) for start in (0, 24, 50)]


def test_ranges_of_position_cover_the_window_with_their_errors() -> None:
    rows = losses.by_position(np.array([[1.0] * 10, [3.0] * 10]), 4)
    assert [(row["first"], row["last"]) for row in rows] == [(0, 2), (3, 5), (6, 7), (8, 9)]
    assert all(row["bits"] == 2 and row["error"] == pytest.approx(1) for row in rows)
    assert [row["error"] for row in losses.by_position(np.ones((1, 3)), 16)] == [None] * 3


@pytest.mark.parametrize("length", [17, 32, 100, 3072])
def test_each_level_scores_the_second_half_once_behind_enough_context_and_gains_are_paired(length: int) -> None:
    levels: list[list[int]] = []

    def score(spans: Sequence[Window]) -> list[np.ndarray]:
        """A unit costs one bit more for each that it lacks of 16 before it."""
        context = spans[0].first - spans[0].start
        assert all(span.first - span.start == context >= span.stop - span.first for span in spans)
        levels.append([at for span in spans for at in range(span.first, span.stop)])
        return [np.array([16.0 - min(16, at - span.start) for at in range(span.first, span.stop)]) for span in spans]

    rows, half = losses.by_context(score, windows(2 * length, length)), length // 2
    assert levels == [[*range(length - half, length), *range(2 * length - half, 2 * length)]] * len(rows)
    assert [row["context"][0] for row in rows] == ([half >> n for n in range(8) if half >> n >= 8] if half > 15 else [])
    if length == 32:
        first, second = rows
        assert (first["context"], first["bits"], first["gain"]) == ([16, 31], 0, 0)
        assert (second["context"], second["gain"], second["gain_error"]) == ([8, 15], 4.5, 0)


@torch.no_grad()
def test_bits_are_those_of_the_model() -> None:
    model = tiny_model(selection="causal")
    (bits,) = losses.unit_bits(model, TOKENS, [Window(30, 54, 40)])
    rows, _ = model.loss(torch.from_numpy(TOKENS[30:54].astype(np.int64))[None])
    np.testing.assert_allclose(bits, rows[0, 10:].numpy() / math.log(2), rtol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("selection", ["topk", "causal"])
def test_each_way_of_scoring_is_what_it_says_and_who_sees_no_future_pays_nothing(selection: str) -> None:
    model = tiny_model(length=LENGTH, selection=selection, layers=2, routing_window=4)
    paid = losses.price(model, TOKENS, WINDOWS, POSITIONS)
    for k, (start, _, _) in enumerate(WINDOWS):
        window_BN = torch.from_numpy(TOKENS[start : start + LENGTH].astype(np.int64))[None]
        whole, streamed = (model.loss(window_BN, streaming)[0][0] for streaming in (False, True))
        for at, p in enumerate(POSITIONS.tolist()):
            alone = model.loss(window_BN[:, : p + 1])[0][0, p]
            found = [paid[way][k, at] * math.log(2) for way in (RERUN, TEACHER_FORCED, STREAMING)]
            assert found == pytest.approx([float(alone), float(whole[p]), float(streamed[p])], rel=1e-12)
    leak, competing, together = (found["bits"] for found in losses.differences(paid).values())
    assert together == pytest.approx((paid[STREAMING] - paid[TEACHER_FORCED]).mean(), abs=1e-12)
    assert leak + competing == pytest.approx(together, abs=1e-12)
    assert (abs(leak) > 1e-4) == (np.abs(paid[STREAMING] - paid[RERUN]).max() > 1e-3) == (selection == "topk")


def test_standard_errors_are_over_positions_and_over_windows() -> None:
    base, rerun = np.zeros((2, 3)), np.array([[1.0, 2, 3], [5, 6, 7]])
    found = losses.differences({TEACHER_FORCED: base, RERUN: rerun, STREAMING: base})["leak_gives"]
    assert found["bits"] == pytest.approx(4)
    assert found["over_positions"] == pytest.approx(math.sqrt(28 / 5 / 6))
    assert found["over_windows"] == pytest.approx(2)
