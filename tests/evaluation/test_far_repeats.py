"""Far-repeated units: found as a plain loop finds them, and scored apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rtx.evaluation.protocols import REPEATED, far_repeated, windows
from rtx.evaluation.scores import score_windows


def by_a_loop(tokens: list[int], reach: int) -> list[bool]:
    """Look back from each unit for the nearest place with the same units before it."""
    found = []
    for i in range(len(tokens)):
        before = (j for j in range(i - 1, REPEATED - 1, -1) if tokens[j - REPEATED : j] == tokens[i - REPEATED : i])
        last = next(before, None) if i >= REPEATED else None
        found.append(last is not None and i - last > reach)
    return found


@pytest.mark.parametrize("length", [3, 8, 9, 120])
@pytest.mark.parametrize("kinds", [1, 2, 60_000])
def test_they_are_those_of_a_plain_loop(length: int, kinds: int) -> None:
    generator = np.random.default_rng(length)
    tokens = generator.integers(kinds, size=(5, length))
    tokens[1, 60:90] = tokens[1, 10:40][: len(tokens[1, 60:90])]
    tokens[2, 80:] = tokens[2, : max(0, length - 80)]
    tokens[2, 50:60] = tokens[2, 45:55][: len(tokens[2, 50:60])]
    for reach in (0, 25, 60):
        assert far_repeated(tokens, reach).tolist() == [by_a_loop(row.tolist(), reach) for row in tokens]


class Place(nn.Module):
    """A stand-in whose nats are the place in the window."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def loss(self, tokens_BN: Tensor, prefix: bool = False) -> tuple[Tensor, Tensor]:
        return torch.arange(tokens_BN.shape[1]).float().expand(tokens_BN.shape), torch.zeros(())


@pytest.mark.parametrize("stride", [100, 30])
def test_they_are_scored_once_each_with_what_their_window_holds(stride: int) -> None:
    text = np.random.default_rng(0).integers(60, size=50).astype(np.uint8)
    tokens = np.concatenate([text, text, text, text[:31]])
    cut = windows(len(tokens), 100, stride)
    score = score_windows(Place(), tokens, cut, batch_size=2, reach=40)
    units = nats = 0
    for start, stop, first in cut:
        found = by_a_loop(tokens[start:stop].tolist(), 40)[first - start :]
        units, nats = units + sum(found), nats + sum(n for n, far in enumerate(found, first - start) if far)
    assert score.far_K2 is not None and score.far_K2.sum(0).tolist() == [units, nats] and 0 < units < score.units
