"""Streaming top-w: one pass equals the oracle that chooses anew for every prefix, and differs from teacher-forced."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from oracle_cases import PLAIN, Case, Leaves, cases, leaves, tables
from routing_cases import How, centroids, fast, projection, thresholds, truth

from rtx.attention import prefix, reference
from rtx.attention.by_reference import read_heads
from rtx.attention.kmeans import Centroids
from rtx.attention.lists import Members
from rtx.attention.prefix import Arrivals, attend_prefix_topk
from rtx.attention.routing import RoutingHeads
from rtx.attention.routing_state import RoutingState
from rtx.attention.selection import BestOfPrefix, prefix_members, topk_members
from rtx.model.positions import Rotary

STREAM = How(streaming=True)


@pytest.mark.parametrize("how", [STREAM, STREAM._replace(keys="separate"), STREAM._replace(keys="projected")])
@pytest.mark.parametrize("case", cases(5))
def test_oracle(case: Case, how: How) -> None:
    inputs = leaves(case)
    for variant in (how, how._replace(slots=True, masked=True)):
        expected = truth(case, inputs, variant)
        torch.testing.assert_close(fast(case, inputs, variant), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [1, 2, 5, 40])
@pytest.mark.parametrize("attend_self", [True, False])
def test_ties(window: int, attend_self: bool) -> None:
    generator = torch.Generator().manual_seed(window)
    score_BHCN = torch.randint(4, (2, 2, 3, 33), generator=generator).double()
    q, v = torch.randn(2, 2, 2, 33, 4, generator=generator, dtype=torch.float64)
    rule = {"window": window, "attend_self": attend_self}

    def sets(b: int, h: int) -> reference.Sets:
        return partial(reference.streaming_topk_sets, score_CN=score_BHCN[b, h], **rule)

    list_M, position_M, leaves_M = prefix_members([score_BHCN.flatten(0, 2)], window)
    count_L = torch.bincount(list_M, minlength=12)
    every = Arrivals(Members(list_M // 3 * 33 + position_M, count_L, 33, 4 * 33), leaves_M)
    out = attend_prefix_topk(q, q, v, every, every, window=window, scale=0.5, attend_self=attend_self)
    torch.testing.assert_close(out, read_heads(q, q, v, sets, 0.5), rtol=1e-10, atol=1e-12)


def test_membership_of_every_prefix() -> None:
    score_LN = torch.randint(5, (7, 29), generator=torch.Generator().manual_seed(2)).float()
    for parts in ([score_LN], score_LN.split(10, dim=1), score_LN.split(1, dim=1)):
        list_M, position_M, leaves_M = prefix_members(parts, 4)
        number_M = list_M * 29 + position_M
        assert (number_M.diff() > 0).all()
        for i in range(29):
            held_M = (position_M <= i) & (leaves_M > i)
            expected = reference.topk_members(score_LN[:, : i + 1], 4)
            assert torch.equal(torch.stack([list_M[held_M], position_M[held_M]], dim=1), expected.nonzero())


def test_the_best_of_a_prefix_hold_their_positions() -> None:
    score_LN = torch.randint(3, (3, 20), generator=torch.Generator().manual_seed(4)).float()
    best = BestOfPrefix((3,), 6, score_LN)
    for i in range(20):
        best.offer(score_LN[:, i], i)
        expected = reference.topk_members(score_LN[:, : i + 1], 6)
        for held_W, member_N in zip(best.position_W, expected, strict=True):
            assert sorted(p for p in held_W.tolist() if p <= i) == member_N.nonzero()[:, 0].tolist()


def test_lists_in_small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    case = PLAIN._replace(N=30, B=2, H=2, C=4)
    inputs = leaves(case)
    whole = fast(case, inputs, STREAM)
    monkeypatch.setattr(prefix, "MAX_SCORES", 1)
    torch.testing.assert_close(fast(case, inputs, STREAM), whole, rtol=1e-12, atol=0)


def test_it_differs_from_teacher_forced() -> None:
    case = PLAIN._replace(N=40)
    inputs = leaves(case)
    assert not torch.allclose(fast(case, inputs, STREAM), fast(case, inputs, How()))


def stepped(heads: RoutingHeads, case: Case, inputs: Leaves) -> tuple[torch.Tensor, RoutingState]:
    """The outputs of a stream through routing heads, one position at a time, and its last state."""
    state, rotary = heads.start(tables(inputs)), Rotary(case.D)
    steps = []
    for i in range(case.N):
        rotate = partial(rotary, first=i) if case.rotary else None
        k_BHD = None if heads.centroids.keys == "shared" else inputs["k"][:, :, i]
        steps.append(state.step(inputs["q"][:, :, i], k_BHD, inputs["v"][:, :, i], i, rotate))
    return torch.stack(steps, 2), state


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("keys", ["shared", "separate", "projected"])
@pytest.mark.parametrize("selection", ["topk", "causal", "nearest"])
@pytest.mark.parametrize("case", cases(0))
def test_a_stream_equals_one_pass(case: Case, selection: str, keys: str, slots: bool) -> None:
    inputs, how = leaves(case), How(selection, keys, slots=slots, streaming=True)
    store = Centroids(
        case.H, case.C, case.D, window=case.W, length=max(case.N, case.W), decay=0.9, thresholds=True, keys=keys
    )
    store.centroid_HCD.copy_(centroids(case))
    store.threshold_HC.copy_(thresholds(case, "mixed"))
    if store.key_threshold_HC is not None:
        store.key_threshold_HC.copy_(thresholds(case, "mixed", seed=50))
    if store.projection_HDD is not None:
        store.projection_HDD.copy_(projection(case))
    options = {"selection": selection, "scale": case.scale, "attend_self": case.attend_self, "slot_distance": slots}
    heads = RoutingHeads(store, **options).eval()
    rotate = Rotary(case.D) if case.rotary else None
    k_BHND = None if keys == "shared" else inputs["k"]
    given = {"rotate": rotate, "relative": tables(inputs), "streaming": True}
    expected = heads(inputs["q"], k_BHND, inputs["v"], **given)[0]
    out, state = stepped(heads, case, inputs)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(out, truth(case, inputs, how), rtol=1e-5, atol=1e-5)
    assert state.clusters.keys_LWD is not None
    assert state.clusters.keys_LWD.shape == (case.B * case.H * case.C, case.W, case.D)


def test_scores_that_are_equal_but_for_rounding_stay_with_the_first() -> None:
    exact_LN = torch.randint(3, (5, 40), generator=torch.Generator().manual_seed(1)).float()
    noise_LN = 1e-5 * torch.rand(5, 40, generator=torch.Generator().manual_seed(2))
    list_M, position_M, leaves_M = prefix_members([exact_LN], 4)
    for noisy_LN in (exact_LN + noise_LN, exact_LN - noise_LN):
        found = prefix_members([noisy_LN], 4, torch.full((5,), 1e-4))
        assert all(torch.equal(*pair) for pair in zip(found, (list_M, position_M, leaves_M), strict=True))
        # What steps leave is the choice from the whole prefix.
        member_LN = topk_members(noisy_LN, 4, torch.full((5,), 1e-4))
        assert torch.equal(member_LN, reference.topk_members(exact_LN, 4))
    assert not torch.equal(prefix_members([exact_LN + noise_LN], 4)[1], position_M)
