"""Every unit of windows is scored once, in any batches; far repeats are counted apart."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rtx.data.windows import Window, batches_by_length, sample_windows, windows
from rtx.evaluation.far_repeats import RUN_LENGTH, far_repeated
from rtx.evaluation.scores import Score, score_windows


class Counter(nn.Module):
    """A model whose nats at a position follow from the unit and its place in the window."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.calls: list[tuple[int, ...]] = []

    def loss(self, tokens_BN: Tensor, streaming: bool = False) -> tuple[Tensor, Tensor]:
        assert not torch.is_grad_enabled()
        self.calls.append((*tokens_BN.shape, streaming))
        place_N = torch.arange(tokens_BN.shape[1])
        return tokens_BN.float() + place_N / 1024, torch.zeros(())


TOKENS = np.resize(np.random.default_rng(0).integers(0, 256, 50), 1_003).astype(np.uint8)
"""The same fifty units again and again."""


def by_hand(cut: list[Window]) -> float:
    return sum(
        float(TOKENS[i]) + (i - window.start) / 1024
        for window in cut
        for i in range(window.first, window.stop)
    )


def by_a_loop(tokens: list[int], reach: int) -> list[bool]:
    """Look back from each unit for the nearest place with the same units before it."""
    found = []
    for i in range(len(tokens)):
        before = (
            j
            for j in range(i - 1, RUN_LENGTH - 1, -1)
            if tokens[j - RUN_LENGTH : j] == tokens[i - RUN_LENGTH : i]
        )
        last = next(before, None) if i >= RUN_LENGTH else None
        found.append(last is not None and i - last > reach)
    return found


@pytest.mark.parametrize("stride", [64, 48, 7])
@pytest.mark.parametrize("batch_size", [1, 3, None])
def test_each_unit_is_scored_once_and_where_it_stands_far_repeats_apart(
    stride: int, batch_size: int | None
) -> None:
    cut = list(windows(len(TOKENS), 64, stride))
    seen = []
    how = {"batch_size": batch_size, "reach": 40}
    score = score_windows(Counter(), TOKENS, cut, **how, on_progress=lambda *at: seen.append(at))
    assert score.units == len(TOKENS)
    assert score.nats == by_hand(cut)
    assert score.bits == pytest.approx(by_hand(cut) / len(TOKENS) / math.log(2), rel=1e-15)
    assert seen[-1] == (len(cut), len(cut))
    far = [
        float(TOKENS[start + n]) + n / 1024
        for start, stop, first in cut
        for n, is_far in enumerate(by_a_loop(TOKENS[start:stop].tolist(), 40))
        if is_far and n >= first - start
    ]
    assert score.far_K2 is not None and score.far_K2.sum(0).tolist() == [len(far), sum(far)]
    assert 0 < len(far) < score.units


def test_windows_of_another_length_are_batched_apart() -> None:
    cut = [Window(0, 8, 0), Window(8, 16, 8), Window(16, 19, 16), Window(19, 22, 20)]
    assert batches_by_length(cut, 8) == [[0, 1], [2, 3]]
    model = Counter()
    score = score_windows(model, TOKENS, cut, batch_size=8, streaming=True)
    assert model.calls == [(2, 8, True), (2, 3, True)]
    assert score.nats == by_hand(cut)


def test_a_sample_is_the_same_each_time_and_in_order() -> None:
    cut = windows(len(TOKENS), 16)
    few = sample_windows(cut, 10)
    assert list(few) == list(sample_windows(cut, 10)) == sorted(few)
    assert len(set(few)) == 10
    assert list(few) != list(sample_windows(cut, 10, seed=1))
    assert sample_windows(cut, None) is cut is sample_windows(cut, len(cut))


def test_the_standard_error_is_that_of_the_mean_of_windows() -> None:
    nats = np.array([10.0, 12.0, 11.0, 15.0])
    score = Score(np.full(4, 8.0), nats)
    assert score.standard_error == pytest.approx(nats.std(ddof=1) / 2 / 8 / math.log(2))
    assert math.isnan(Score(np.array([8.0]), np.array([9.0])).standard_error)


@pytest.mark.parametrize("length", [3, 8, 9, 120])
@pytest.mark.parametrize("kinds", [1, 2, 60_000])
def test_far_repeats_are_those_of_a_plain_loop(length: int, kinds: int) -> None:
    generator = np.random.default_rng(length)
    tokens = generator.integers(kinds, size=(5, length))
    tokens[1, 60:90] = tokens[1, 10:40][: len(tokens[1, 60:90])]
    tokens[2, 80:] = tokens[2, : max(0, length - 80)]
    tokens[2, 50:60] = tokens[2, 45:55][: len(tokens[2, 50:60])]
    for reach in (0, 25, 60):
        assert far_repeated(tokens, reach).tolist() == [
            by_a_loop(row.tolist(), reach) for row in tokens
        ]
