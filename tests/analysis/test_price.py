"""The price in bits against the model run on each prefix by a plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rtx.analysis.price import RERUN, STREAMING, TEACHER_FORCED, differences, price, sample_positions
from rtx.model.transformer import Transformer
from tests.model.tiny_models import VOCABULARY, tiny_model

LENGTH = 24
STARTS = [0, 24, 50]
POSITIONS = np.array([0, 1, 7, 15, 23])


def priced(selection: str) -> tuple[Transformer, np.ndarray, dict[str, np.ndarray]]:
    """A model with random output weights, the units, and the price."""
    model = tiny_model(length=LENGTH, selection=selection, layers=2, routing_window=4)
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=80).astype(np.uint8)
    return model, tokens, price(model, tokens, STARTS, LENGTH, POSITIONS)


@pytest.mark.parametrize("selection", ["topk", "causal"])
def test_each_way_is_what_it_says(selection: str) -> None:
    model, tokens, paid = priced(selection)
    for k, start in enumerate(STARTS):
        window_BN = torch.from_numpy(tokens[start : start + LENGTH].astype(np.int64))[None]
        with torch.no_grad():
            whole, streamed = (model.loss(window_BN, streaming)[0][0] for streaming in (False, True))
            for at, p in enumerate(POSITIONS.tolist()):
                alone = model.loss(window_BN[:, : p + 1])[0][0, p]
                assert paid[RERUN][k, at] == pytest.approx(float(alone), rel=1e-12)
                assert paid[TEACHER_FORCED][k, at] == pytest.approx(float(whole[p]), rel=1e-12)
                assert paid[STREAMING][k, at] == pytest.approx(float(streamed[p]), rel=1e-12)


@pytest.mark.parametrize("selection", ["causal", "random"])
def test_who_sees_no_future_pays_nothing(selection: str) -> None:
    _, _, paid = priced(selection)
    assert all(abs(found["bits"]) < 1e-12 for found in differences(paid).values())


def test_top_w_has_its_price() -> None:
    _, _, paid = priced("topk")
    assert np.abs(paid[RERUN] - paid[TEACHER_FORCED]).max() > 1e-3
    assert np.abs(paid[STREAMING] - paid[RERUN]).max() > 1e-3
    leak, competing, together = (found["bits"] for found in differences(paid).values())
    assert leak + competing == pytest.approx(together)
    assert together == pytest.approx((paid[STREAMING] - paid[TEACHER_FORCED]).mean() / math.log(2))


def test_standard_errors() -> None:
    base = np.zeros((2, 3))
    rerun = np.log(2.0) * np.array([[1.0, 2, 3], [5, 6, 7]])
    estimate = differences({TEACHER_FORCED: base, RERUN: rerun, STREAMING: base})["leak_gives"]
    assert estimate["bits"] == pytest.approx(4)
    assert estimate["over_positions"] == pytest.approx(math.sqrt(28 / 5 / 6))
    assert estimate["over_windows"] == pytest.approx(2)


def test_positions_are_spread_and_seeded() -> None:
    candidates = np.arange(100, 200)
    some = sample_positions(candidates, 10, seed=1)
    assert [int(p) // 10 for p in some] == list(range(10, 20))
    assert (some == sample_positions(candidates, 10, seed=1)).all()
    assert (some != sample_positions(candidates, 10, seed=2)).any()
    assert (sample_positions(candidates, 500, seed=1) == candidates).all()
