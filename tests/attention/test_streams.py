"""Streams: a prompt in one pass, then one position after the other; they know their position."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from rtx.attention import (
    ROUTING_CLASSES,
    Centroids,
    Exact,
    Local,
    Pattern,
    Random,
    RelativeTables,
    Routing,
)
from rtx.model.positions import rotate

B = 2
H = 2
N = 20
D = 8


def routing(selection: str) -> Routing:
    """Return routing heads whose queries and keys have separate memberships."""
    centroids = Centroids(H, 3, D, window=6, length=N, decay=0.9, keys="separate")
    return ROUTING_CLASSES[selection](centroids)


PATTERNS = {
    "local": lambda: Local(window=5),
    "exact": lambda: Exact(window=4),
    "random": lambda: Random(H, 3, window=5, length=N, seed=0, has_keys=True),
    "causal": lambda: routing("causal"),
    "topk": lambda: routing("topk"),
}


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, B, H, N, D, generator=generator, dtype=torch.float64).unbind(0)
    return q, k, v


def positions(qkv: tuple[Tensor, ...], first: int, stop: int) -> list[Tensor]:
    """Return the queries, keys and values of some positions."""
    return [x[:, :, first:stop] for x in qkv]


@pytest.mark.parametrize("prompt", [0, 1, 11, N])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_stream_returns_what_the_forward_pass_returns(
    name: str, prompt: int, qkv: tuple[Tensor, Tensor, Tensor]
) -> None:
    pattern: Pattern = PATTERNS[name]().eval()
    expected, _ = pattern(*qkv, rotate=rotate, streaming=True)
    stream = pattern.stream(rotate=rotate)
    outputs = [stream.prefill(*positions(qkv, 0, prompt))]
    assert stream.position == prompt
    for n in range(prompt, N):
        outputs.append(stream.decode(*positions(qkv, n, n + 1)))
    assert stream.position == N
    torch.testing.assert_close(torch.cat(outputs, dim=2), expected)


def test_a_stream_adds_distance_tables(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    tables = RelativeTables(*torch.randn(2, 7, D, dtype=torch.float64))
    pattern = Local(window=5).eval()
    expected, _ = pattern(*qkv, relative=tables)
    stream = pattern.stream(relative=tables)
    stream.prefill(*positions(qkv, 0, N - 1))
    last = stream.decode(*positions(qkv, N - 1, N))
    torch.testing.assert_close(last, expected[:, :, -1:])


def test_a_stream_refuses_a_position_that_it_has_read(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    stream = Local(window=5).eval().stream()
    stream.prefill(*positions(qkv, 0, 3))
    with pytest.raises(ValueError, match="this one is at position 3: use decode"):
        stream.prefill(*positions(qkv, 0, 3))


def test_decode_takes_one_position(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    stream = Local(window=5).eval().stream()
    with pytest.raises(ValueError, match="has 2 positions: decode reads one at a time"):
        stream.decode(*positions(qkv, 0, 2))


def test_a_stream_refuses_another_batch(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    stream = Local(window=5).eval().stream()
    stream.prefill(*positions(qkv, 0, 3))
    with pytest.raises(ValueError, match="B=1, H=2: this stream has B=2, H=2"):
        stream.decode(*(x[:1] for x in positions(qkv, 3, 4)))


def test_a_prompt_is_prepared_once(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    pattern = routing("causal").eval()
    stream = pattern.stream()
    with mock.patch.object(pattern, "prepare", wraps=pattern.prepare) as prepare:
        stream.prefill(*positions(qkv, 0, 5))
    assert prepare.call_count == 1
