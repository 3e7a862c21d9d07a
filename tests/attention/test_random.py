"""Random heads against the oracle, their memberships, and positions beyond N."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracle_cases import PLAIN, Case, Leaves, assert_same, cases, leaves, plain_rotate, tables
from padding_cases import padding

from rtx.attention import reference, selection
from rtx.attention.random import RandomHeads, random
from rtx.attention.selection import random_positions
from rtx.model.positions import Rotary


def make(case: Case, length: int, seed: int = 5) -> RandomHeads:
    """Random heads of a case."""
    options = {"window": case.W, "length": length, "seed": seed, "scale": case.scale, "attend_self": case.attend_self}
    return RandomHeads(case.H, case.C, **options)


def truth(case: Case, inputs: Leaves, length: int) -> torch.Tensor:
    return fast(case, inputs, length, backend="reference")


def fast(case: Case, inputs: Leaves, length: int, backend: str = "torch") -> torch.Tensor:
    heads = make(case, length)
    heads.backend = backend
    rotate = plain_rotate if backend == "reference" else Rotary(case.D)
    options = {"rotate": rotate if case.rotary else None, "relative": tables(inputs)}
    return heads(inputs["q"], None, inputs["v"], **options)[0]


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


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("case", cases(5))
def test_padding_own_keys_and_slot_distances(case: Case, slots: bool) -> None:
    mask_BN = padding(case)

    def read(x: Leaves, backend: str, rotate: Callable[..., torch.Tensor]) -> torch.Tensor:
        heads = make(case, case.N)
        heads.slot_distance, heads.backend = slots, backend
        options = {"rotate": rotate if case.rotary else None, "relative": tables(x), "mask_BN": mask_BN}
        return heads(x["q"], x["k"], x["v"], **options)[0]

    assert_same(lambda x: read(x, "torch", Rotary(case.D)), lambda x: read(x, "reference", plain_rotate), leaves(case))


def test_memberships_are_a_function_of_seed_head_and_length() -> None:
    position_HCW = random_positions(3, 4, 40, 10, seed=9)
    assert torch.equal(position_HCW, random_positions(3, 4, 40, 10, seed=9))
    assert position_HCW.shape == (3, 4, 10) and (position_HCW.diff(dim=-1) > 0).all()
    assert position_HCW.min() >= 0 and position_HCW.max() < 40
    assert torch.equal(position_HCW[:2], random_positions(2, 4, 40, 10, seed=9))
    assert not torch.equal(position_HCW, random_positions(3, 4, 40, 10, seed=10))
    assert not torch.equal(position_HCW[0], position_HCW[1])


def test_memberships_are_those_of_one_draw_for_all_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_LN = torch.rand(12, 40, generator=torch.Generator().manual_seed(9))
    expected = reference.topk_members(draw_LN, 10).nonzero()[:, 1].view(3, 4, 10)
    for most in (selection.MAX_DRAWS, 100, 1):
        monkeypatch.setattr(selection, "MAX_DRAWS", most)
        assert torch.equal(random_positions(3, 4, 40, 10, seed=9), expected)


def test_the_function_is_the_heads() -> None:
    case = PLAIN._replace(B=2, H=2, N=30, distances=6)
    x, mask_BN = leaves(case), padding(case._replace(seed=1))
    given = {"relative": tables(x), "mask_BN": mask_BN}
    expected = make(case, 30)(x["q"], None, x["v"], **given)[0]
    options = {"clusters": case.C, "window": case.W, "seed": 5, "scale": case.scale}
    assert torch.equal(random(x["q"], None, x["v"], **options, **given), expected)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clusters=0: must be at least 1"):
        random(x["q"], None, x["v"], clusters=0, window=4, seed=1)


def test_memberships_leave_the_global_generator_alone_and_are_not_saved() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    heads = make(PLAIN, 13)
    assert torch.equal(before, torch.get_rng_state())
    assert heads.state_dict() == {}
