"""Choices of single keys and of blocks: the worked examples of their modules, and drawn blocks."""

import pytest
import torch

from rtx.attention import Blocks, Exact, RandomBlocks


def keys_read(
    pattern: Exact | Blocks, q: torch.Tensor, k: torch.Tensor, position: int
) -> list[int]:
    """Return the positions that a query reads, once rule and forward pass agree on them."""
    mask_1NN = pattern.rule(pattern.inputs(q, k, None), 0, False)
    by_rule = mask_1NN[0, position].nonzero()[:, 0].tolist()
    v = torch.eye(q.shape[2], dtype=q.dtype)[None, None]
    out, _ = pattern(q, k, v)
    assert out[0, 0, position].nonzero()[:, 0].tolist() == by_rule
    return by_rule


def test_the_best_keys_up_to_a_query_are_read() -> None:
    k = torch.tensor([5.0, 1.0, 4.0, 2.0], dtype=torch.float64)[None, None, :, None]
    q = torch.ones_like(k)
    assert keys_read(Exact(window=2), q, k, 3) == [0, 2]
    assert keys_read(Exact(window=2), q, k, 1) == [0, 1]
    assert keys_read(Exact(window=2, attend_self=False), q, k, 1) == [0]


@pytest.mark.parametrize(
    ("attend_self", "read"), [(True, [0, 1, 4, 5, 6, 7]), (False, [0, 1, 4, 5, 6])]
)
def test_the_best_blocks_before_a_query_are_read(attend_self: bool, read: list[int]) -> None:
    means = torch.tensor([3.0, 1.0, 2.0, 9.0], dtype=torch.float64)
    k = means.repeat_interleave(2) + torch.tensor([0.5, -0.5]).repeat(4)
    k = k[None, None, :, None]
    pattern = Blocks(1, 1, window=4, block=2, attend_self=attend_self).double()
    assert keys_read(pattern, torch.ones_like(k), k, 7) == read


def test_blocks_are_drawn_from_every_seed() -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 4)
    outs = [
        RandomBlocks(2, 4, window=4, block=2, seed=s)(q, k, v)[0]
        for s in (-(1 << 63), 3, (1 << 64) - 1)
    ]
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
