"""The nats of each unit of spans, and standard errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rtx.analysis.context import spans_with
from rtx.analysis.spans import Span, standard_error, unit_nats
from tests.model.tiny_models import tiny_model


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


@pytest.mark.parametrize("training", [False, True])
def test_a_model_is_put_back_into_the_mode_it_had(training: bool) -> None:
    model, tokens = tiny_model(selection="causal").train(training), np.zeros(24, np.uint8)
    unit_nats(model, tokens, [Span(0, 24, 0, 24)])
    assert model.training == training


def test_standard_errors_are_of_the_mean() -> None:
    assert standard_error(np.array([1.0, 3.0])) == pytest.approx(1.0)
    assert standard_error(np.array([1.0])) is None
