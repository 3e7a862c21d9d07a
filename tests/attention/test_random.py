"""Random heads against the oracle, their memberships, and positions beyond N."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from oracle_cases import PLAIN, Case, Leaves, assert_same, cases, leaves, oracle, plain_normalise, tables

from rtx.attention import reference
from rtx.attention.random import RandomHeads
from rtx.attention.selection import random_members
from rtx.model.positions import Rotary


def make(case: Case, length: int, seed: int = 5) -> RandomHeads:
    """Random heads of a case."""
    options = {"window": case.W, "length": length, "seed": seed, "scale": case.scale, "attend_self": case.attend_self}
    return RandomHeads(case.H, case.C, **options)


def truth(case: Case, inputs: Leaves, length: int) -> torch.Tensor:
    member_HCN = random_members(case.H, case.C, length, case.W, 5)
    member_HCN = member_HCN[..., torch.arange(case.N) % length]
    q_BHND = plain_normalise(inputs["q"])
    return oracle(
        Rotary(case.D)(q_BHND) if case.rotary else q_BHND,
        Rotary(case.D)(q_BHND) if case.rotary else q_BHND,
        inputs["v"],
        lambda b, h: partial(
            reference.cluster_sets, member_CN=member_HCN[h], window=case.W, attend_self=case.attend_self
        ),
        case.scale,
        tables(inputs),
    )


def fast(case: Case, inputs: Leaves, length: int) -> torch.Tensor:
    rotate = Rotary(case.D) if case.rotary else None
    return make(case, length)(inputs["q"], None, inputs["v"], rotate=rotate, relative=tables(inputs))[0]


@pytest.mark.parametrize("case", cases())
def test_oracle(case: Case) -> None:
    # As long as N, shorter, and longer, so that the memberships repeat.
    length = (case.N, case.N + 4, max(1, case.N // 2))[case.seed % 3]
    assert_same(lambda x: fast(case, x, length), lambda x: truth(case, x, length), leaves(case))


@pytest.mark.parametrize("case", cases(5))
def test_streaming(case: Case) -> None:
    inputs = leaves(case)
    heads = make(case, length=8)
    rotary = Rotary(case.D)
    state = heads.start(tables(inputs))
    steps = []
    for i in range(case.N):
        rotate = partial(rotary, first=i) if case.rotary else None
        steps.append(state.step(inputs["q"][:, :, i], None, inputs["v"][:, :, i], i, rotate))
    expected = heads(inputs["q"], None, inputs["v"], rotate=rotary if case.rotary else None, relative=tables(inputs))[0]
    torch.testing.assert_close(torch.stack(steps, 2), expected, rtol=1e-10, atol=1e-12)


def test_memberships_are_a_function_of_seed_head_and_length() -> None:
    member_HCN = random_members(3, 4, 40, 10, seed=9)
    assert torch.equal(member_HCN, random_members(3, 4, 40, 10, seed=9))
    assert (member_HCN.sum(-1) == 10).all()
    assert torch.equal(member_HCN[:2], random_members(2, 4, 40, 10, seed=9))
    assert not torch.equal(member_HCN, random_members(3, 4, 40, 10, seed=10))
    assert not torch.equal(member_HCN[0], member_HCN[1])


def test_memberships_leave_the_global_generator_alone_and_are_not_saved() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    heads = make(PLAIN, 13)
    assert torch.equal(before, torch.get_rng_state())
    assert heads.state_dict() == {}
