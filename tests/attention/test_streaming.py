"""Streams: prefill and single steps give what one pass with `prefix` gives, at every position, for every pattern."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, KINDS, Case, make, run, tensors
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from rtx.attention import Pattern


def stream(pattern: Pattern, given: dict, prompt: int) -> Tensor:
    """Return the outputs of a prompt in one pass and of the positions behind it one at a time."""
    q, k, v, rotate = given["q"], given["k"], given["v"], given["rotate"]
    cache = pattern.start(given["relative"])

    def inputs(here: slice):
        return pattern.inputs(q[:, :, here], None if k is None else k[:, :, here], rotate, here.start)

    head = {**given, "q": q[:, :, :prompt], "k": None if k is None else k[:, :, :prompt], "v": v[:, :, :prompt]}
    outs = [run(pattern, head, prefix=True)]
    cache.prefill(inputs(slice(0, prompt)), v[:, :, :prompt])
    for position in range(prompt, q.shape[2]):
        outs.append(cache.decode(inputs(slice(position, position + 1)), v[:, :, position : position + 1], position))
    return torch.cat(outs, dim=2)


@pytest.mark.parametrize("kind", KINDS)
@given(case=CASES)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@torch.no_grad()
def test_a_stream_gives_what_one_pass_gives(kind: str, case: Case) -> None:
    pattern = make(kind, case)
    here = tensors(pattern, case)
    whole = run(pattern, here, prefix=True)
    for prompt in {0, case.seed % (case.N + 1), case.N}:
        torch.testing.assert_close(stream(pattern, here, prompt), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["local", "span", "lsh", "random", "causal-shared", "topk-separate", "nearest-shared"])
@torch.no_grad()
def test_what_a_stream_keeps_is_bounded(kind: str) -> None:
    case = Case(N=200, W=6)
    pattern = make(kind, case)
    sizes = []
    for length in (100, 200):
        here = tensors(pattern, case)
        cache = pattern.start()
        k = None if here["k"] is None else here["k"][:, :, :length]
        cache.prefill(pattern.inputs(here["q"][:, :, :length], k, None), here["v"][:, :, :length])
        sizes.append(sum(x.numel() for x in vars(cache).values() if isinstance(x, Tensor)))
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("kind", ["exact", "indexer", "blocks"])
@torch.no_grad()
def test_of_equal_keys_the_earlier_is_read_however_long_the_sequence(kind: str) -> None:
    case = Case(B=1, H=2, N=64, W=8, D=4)
    pattern = make(kind, case)
    here = tensors(pattern, case)
    here |= {name: here[name][:, :, torch.arange(64) % 4].round() for name in ("q", "k")}  # whole numbers: exact ties
    whole = run(pattern, here)
    torch.testing.assert_close(
        run(pattern, {n: x[:, :, :40] if n in "qkv" else x for n, x in here.items()}), whole[:, :, :40]
    )
    torch.testing.assert_close(stream(pattern, here, 10), whole)
