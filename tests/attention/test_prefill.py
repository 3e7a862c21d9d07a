"""A prompt taken in by one pass: states, later outputs and the outputs of the prompt are those of its steps."""

from __future__ import annotations

import random
from functools import partial
from typing import NamedTuple

import pytest
import torch
from test_edge_shapes import HEADS, inputs_for
from torch import Tensor

from rtx.attention import Distances, FixedHeads, LshHeads
from rtx.attention.fixed import FixedState
from rtx.attention.heads import Heads, HeadState
from rtx.attention.lsh import LshState
from rtx.model.positions import Rotary


class Stream(NamedTuple):
    """Queries, keys and values `[B, H, N, D]` of streams, and the position terms of their heads."""

    q_BHND: Tensor
    k_BHND: Tensor | None
    v_BHND: Tensor
    rotary: Rotary
    relative: Distances


def stream_of(name: str, B: int, N: int) -> Stream:
    tables = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(N), dtype=torch.float64)
    q_BHND, k_BHND, v_BHND = (None if x is None else x.double() for x in inputs_for(name, B, N))
    assert q_BHND is not None and v_BHND is not None
    return Stream(q_BHND, k_BHND, v_BHND, Rotary(4), Distances(*tables))


def fill(state: HeadState, stream: Stream, prompt: int) -> None:
    k_BHPD = None if stream.k_BHND is None else stream.k_BHND[:, :, :prompt]
    state.fill(stream.q_BHND[:, :, :prompt], k_BHPD, stream.v_BHND[:, :, :prompt], stream.rotary)


def step(state: HeadState, stream: Stream, first: int, last: int) -> Tensor:
    """Take positions `first` to `last - 1` one by one; return their outputs."""
    outputs = [torch.zeros_like(stream.v_BHND[:, :, :0])]
    for i in range(first, last):
        k_BHD = None if stream.k_BHND is None else stream.k_BHND[:, :, i]
        turn = partial(stream.rotary, first=i)
        outputs.append(state.step(stream.q_BHND[:, :, i], k_BHD, stream.v_BHND[:, :, i], i, turn)[:, :, None])
    return torch.cat(outputs, dim=2)


def check(heads: Heads, stream: Stream, prompt: int) -> tuple[HeadState, HeadState]:
    """Compare a prompt of some length in one pass with its steps; return both states behind it."""
    N = stream.q_BHND.shape[2]
    filled, stepped = heads.start(stream.relative), heads.start(stream.relative)
    fill(filled, stream, prompt)
    outputs = step(stepped, stream, 0, prompt)
    given = {"rotate": stream.rotary, "relative": stream.relative, "streaming": True}
    k_BHND = None if stream.k_BHND is None else stream.k_BHND[:, :, :prompt]
    whole = heads(stream.q_BHND[:, :, :prompt], k_BHND, stream.v_BHND[:, :, :prompt], **given)[0]
    torch.testing.assert_close(outputs, whole, rtol=1e-10, atol=1e-12)
    behind, expected = (step(state, stream, prompt, N) for state in (filled, stepped))
    torch.testing.assert_close(behind, expected, rtol=1e-10, atol=1e-12)
    filled, stepped = heads.start(stream.relative), heads.start(stream.relative)
    fill(filled, stream, prompt)
    step(stepped, stream, 0, prompt)
    return filled, stepped


@pytest.mark.parametrize("name", HEADS)
def test_a_prompt_of_any_length(name: str) -> None:
    heads, draw = HEADS[name]().double().eval(), random.Random(name)
    for prompt in (1, draw.randint(2, 12), draw.randint(13, 20)):
        check(heads, stream_of(name, 2, prompt + draw.randint(1, 9)), prompt)


@pytest.mark.parametrize("name", HEADS)
def test_no_prompt_goes_through_the_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, stream, taken = HEADS[name]().double().eval().start(), stream_of(name, 1, 11), []
    monkeypatch.setattr(type(state), "step", lambda *args: taken.append(args))
    fill(state, stream, 11)
    assert not taken


@pytest.mark.parametrize("seed", range(6))
def test_what_fixed_heads_keep(seed: int) -> None:
    draw = random.Random(seed)
    block = draw.randint(1, 9)
    heads = FixedHeads(block=block, summary=draw.randint(1, block)).eval()
    for prompt in (block, 2 * block, 2 * block + 1, draw.randint(1, 40)):
        filled, stepped = check(heads, stream_of("fixed", 2, prompt + 2 * block + 1), prompt)
        assert isinstance(filled, FixedState) and isinstance(stepped, FixedState)
        # Behind these slots is room, which each makes in its own way.
        used = (prompt - 1) // block * heads.summary + (prompt - 1) % block + 1
        assert torch.equal(filled.position_HK[:, :used], stepped.position_HK[:, :used])
        for kept, expected in ((filled.keys_BHKD, stepped.keys_BHKD), (filled.values_BHKD, stepped.values_BHKD)):
            assert kept is not None and expected is not None
            torch.testing.assert_close(kept[:, :, :used], expected[:, :, :used], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("variant", ["causal", "reformer"])
@pytest.mark.parametrize("seed", range(4))
def test_what_hashing_heads_keep(seed: int, variant: str) -> None:
    draw = random.Random(seed)
    window, rounds, buckets = draw.randint(1, 7), draw.randint(1, 3), 2 * draw.randint(1, 4)
    heads = LshHeads(3, 4, window=window, rounds=rounds, buckets=buckets, seed=seed, variant=variant).double().eval()
    for prompt in (1, draw.randint(2, 15), draw.randint(16, 40)):
        filled, stepped = check(heads, stream_of("lsh", 2, prompt + 5), prompt)
        assert isinstance(filled, LshState) and isinstance(stepped, LshState)
        for what in ("count_BHTC", "position_BHTCW", "code_BHTCWT"):
            assert torch.equal(getattr(filled, what), getattr(stepped, what)), what
        for what in ("keys_BHTCWD", "values_BHTCWD"):
            torch.testing.assert_close(getattr(filled, what), getattr(stepped, what), rtol=1e-12, atol=1e-14)
