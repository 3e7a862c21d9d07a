"""One pass over the scores in blocks: what it finds is what all scores at once say, however small the blocks are.

Shapes: B sequences, H heads, C clusters, N positions, D head size, W attention window.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rtx.attention import choice, reference
from rtx.attention.choice import Rule, Wish, cuts, read_scores
from rtx.attention.lists import last_members, pack
from rtx.attention.selection import window_scores

B, H, C, N, D, W = 2, 3, 5, 40, 6, 7


def vectors(seed: int) -> tuple[Tensor, Tensor]:
    """Vectors and centroids of small whole numbers: exact scores, many of them equal."""
    generator = torch.Generator().manual_seed(seed)
    x_BHND = torch.randint(-2, 3, (B, H, N, D), generator=generator).float()
    return x_BHND, torch.randint(-1, 2, (H, C, D), generator=generator).float()


def expected_members(score_BHCN: Tensor, rule: Rule) -> Tensor:
    """The oracle's memberships of real positions, `[B, H, C, N]`."""
    member_BHCN = torch.zeros(score_BHCN.shape, dtype=torch.bool)
    for b in range(B):
        for h in range(H):
            if rule.selection == "topk":
                member_BHCN[b, h] = reference.topk_members(score_BHCN[b, h], rule.window)
            elif rule.selection == "nearest":
                member_BHCN[b, h] = reference.nearest_members(score_BHCN[b, h])
            else:
                assert rule.threshold_HC is not None
                member_BHCN[b, h] = reference.threshold_members(score_BHCN[b, h], rule.threshold_HC[h])
    return member_BHCN & (score_BHCN > -torch.inf)


@pytest.mark.parametrize("most", [1, N, 3 * N, C * N, 2 * C * N, 1 << 23])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("selection", ["topk", "causal", "nearest"])
def test_blocks_change_nothing(selection: str, masked: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "MAX_SCORES_CPU", most)
    x_BHND, centroid_HCD = vectors(seed=most)
    mask_BN = torch.rand(B, N, generator=torch.Generator().manual_seed(1)) < 0.6 if masked else None
    rule = Rule(selection, W, torch.arange(H * C).view(H, C).float() - 4)
    wish = Wish(rule, scores=selection != "nearest", nearest=True, window_of=(W, N))
    found = read_scores(centroid_HCD, x_BHND, mask_BN, wish)
    score_BHCN = centroid_HCD @ x_BHND.mT
    if mask_BN is not None:
        score_BHCN = score_BHCN.masked_fill(~mask_BN[:, None, None], -torch.inf)
    member_BHCN = expected_members(score_BHCN, rule)
    expected = pack(member_BHCN)
    assert found.members is not None and found.nearest_BHN is not None and found.window_score_BHC is not None
    assert torch.equal(found.members.row_M, expected.row_M) and torch.equal(found.members.count_L, expected.count_L)
    assert found.members[2:] == (N, B * H * N) and torch.equal(found.members.mask().view(B, H, C, N), member_BHCN)
    if found.score_M is not None:
        assert torch.equal(found.score_M, score_BHCN[member_BHCN])
    assert torch.equal(found.nearest_BHN, score_BHCN.argmax(2))
    real_GN = None if mask_BN is None else mask_BN.repeat_interleave(H, 0)
    window_score_GC = window_scores(score_BHCN.flatten(0, 1), W, N, real_GN)
    assert torch.equal(found.window_score_BHC, window_score_GC.view(B, H, C))


@pytest.mark.parametrize("most", [1, 99, 100, 250, 700, 5000])
def test_blocks_are_small_and_hold_every_score_once(most: int) -> None:
    seen_GC = torch.zeros(6, 7, dtype=torch.int64)
    for heads, clusters in cuts(6, 7, 100, most):
        seen_GC[heads, clusters] += 1
        assert seen_GC[heads, clusters].numel() * 100 <= max(most, 100)
    assert (seen_GC == 1).all()


def test_the_last_members_of_lists() -> None:
    member_LN = torch.rand(12, 30, generator=torch.Generator().manual_seed(0)) < torch.linspace(0, 1, 12)[:, None]
    members = pack(member_LN.view(2, 2, 3, 30))
    kept_J, list_J, slot_J = last_members(members, 8)
    found = [(int(i), int(s), int(n)) for i, s, n in zip(list_J, slot_J, members.position_M()[kept_J], strict=True)]
    last = [member_N.nonzero()[-8:, 0].tolist() for member_N in member_LN]
    assert found == [(i, slot, n) for i, numbers in enumerate(last) for slot, n in enumerate(numbers)]
    first = members.of_first_sequence(2)
    assert torch.equal(first.mask(), member_LN[:6]) and first.rows == 60
