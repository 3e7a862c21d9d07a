"""Memberships against the oracle, ties included, and the score a threshold must have."""

from __future__ import annotations

import math

import pytest
import torch

from rtx.attention import reference
from rtx.attention.selection import nearest_members, threshold_members, topk_members, window_scores


@pytest.mark.parametrize("values", [2, 5, 10**6])
@pytest.mark.parametrize("window", [1, 2, 7, 19, 20, 33])
def test_topk(window: int, values: int) -> None:
    score_BHCN = torch.randint(values, (2, 2, 3, 20), generator=torch.Generator().manual_seed(window)).float()
    member_BHCN = topk_members(score_BHCN, window)
    for member_CN, score_CN in zip(member_BHCN.flatten(0, 1), score_BHCN.flatten(0, 1), strict=True):
        assert torch.equal(member_CN, reference.topk_members(score_CN, window))


def test_a_threshold_takes_equal_scores_in() -> None:
    score_BHCN = torch.tensor([0.0, 1, 2, 1]).expand(2, 1, 3, 4)
    member_BHCN = threshold_members(score_BHCN, torch.tensor([[1.0, 2.0, 3.0]]))
    assert member_BHCN[1, 0].tolist() == [[False, True, True, True], [False, False, True, False], [False] * 4]


@pytest.mark.parametrize(("n", "length"), [(20, 20), (13, 20), (1, 20), (20, 13), (8, 32)])
def test_window_scores(n: int, length: int) -> None:
    score_BHCN = torch.randn(2, 1, 3, n, generator=torch.Generator().manual_seed(n))
    for window in (1, 3, 5, length):
        rank = min(n, math.ceil(window * n / length))
        expected = score_BHCN.sort(dim=-1, descending=True).values[..., rank - 1]
        assert torch.equal(window_scores(score_BHCN, window, length), expected)


def test_nearest() -> None:
    score_BHCN = torch.randint(3, (2, 2, 4, 20), generator=torch.Generator().manual_seed(0)).float()
    member_BHCN = nearest_members(score_BHCN)
    assert (member_BHCN.sum(2) == 1).all()
    for member_CN, score_CN in zip(member_BHCN.flatten(0, 1), score_BHCN.flatten(0, 1), strict=True):
        assert torch.equal(member_CN, reference.nearest_members(score_CN))


def test_window_scores_of_real_positions() -> None:
    score_BHCN = torch.randn(4, 2, 3, 20, generator=torch.Generator().manual_seed(0))
    mask_BN = torch.rand(4, 20, generator=torch.Generator().manual_seed(1)) < 0.6
    mask_BN[2] = False
    found = window_scores(score_BHCN, 7, 20, mask_BN)
    for b in (0, 1, 3):
        assert torch.equal(found[b], window_scores(score_BHCN[b : b + 1, ..., mask_BN[b]], 7, 20)[0])
    assert (found[2] == 0).all()
