"""Memberships against the oracle, ties included, and the score a threshold must have."""

from __future__ import annotations

import math

import pytest
import torch

from rtx.attention import reference
from rtx.attention.selection import nearest_clusters, threshold_members, topk_members, window_scores


@pytest.mark.parametrize("values", [2, 5, 10**6])
@pytest.mark.parametrize("window", [1, 2, 7, 19, 20, 33])
def test_topk(window: int, values: int) -> None:
    score_BHCN = torch.randint(values, (2, 2, 3, 20), generator=torch.Generator().manual_seed(window)).float()
    member_BHCN = topk_members(score_BHCN, window)
    for member_CN, score_CN in zip(member_BHCN.flatten(0, 1), score_BHCN.flatten(0, 1), strict=True):
        assert torch.equal(member_CN, reference.topk_members(score_CN, window))


def test_a_threshold_takes_equal_scores_in() -> None:
    score_GCN = torch.tensor([0.0, 1, 2, 1]).expand(2, 3, 4)
    member_GCN = threshold_members(score_GCN, torch.tensor([[1.0, 2.0, 3.0]]))
    assert member_GCN[1].tolist() == [[False, True, True, True], [False, False, True, False], [False] * 4]


@pytest.mark.parametrize(("n", "length"), [(20, 20), (13, 20), (1, 20), (20, 13), (8, 32)])
def test_window_scores(n: int, length: int) -> None:
    score_GCN = torch.randn(2, 3, n, generator=torch.Generator().manual_seed(n))
    for window in (1, 3, 5, length):
        rank = min(n, math.ceil(window * n / length))
        expected = score_GCN.sort(dim=-1, descending=True).values[..., rank - 1]
        assert torch.equal(window_scores(score_GCN, window, length), expected)


def test_nearest() -> None:
    score_GCN = torch.randint(3, (4, 4, 20), generator=torch.Generator().manual_seed(0)).float()
    for number_N, score_CN in zip(nearest_clusters(score_GCN), score_GCN, strict=True):
        assert torch.equal(number_N, reference.nearest_members(score_CN).int().argmax(0))


def test_window_scores_of_real_positions() -> None:
    score_GCN = torch.randn(4, 3, 20, generator=torch.Generator().manual_seed(0))
    real_GN = torch.rand(4, 20, generator=torch.Generator().manual_seed(1)) < 0.6
    real_GN[2] = False
    found = window_scores(score_GCN, 7, 20, real_GN)
    for b in (0, 1, 3):
        assert torch.equal(found[b], window_scores(score_GCN[b : b + 1, :, real_GN[b]], 7, 20)[0])
    assert (found[2] == 0).all()


@pytest.mark.parametrize("window", [1, 7, 19])
def test_a_score_that_is_no_number_is_the_last_and_empties_nothing(window: int) -> None:
    score_GCN = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(window))
    spoilt_GCN = score_GCN.clone()
    spoilt_GCN[0, :, 4] = float("nan")
    member_GCN = topk_members(spoilt_GCN, window)
    assert torch.equal(member_GCN[1], topk_members(score_GCN, window)[1])
    assert torch.equal(member_GCN[0], reference.topk_members(spoilt_GCN[0], window))
    assert (member_GCN.sum(-1) == window).all() and not member_GCN[0, :, 4].any()
