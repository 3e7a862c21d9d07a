"""Packed lists and their blocks: every member is a query once, with the keys that its window allows."""

from __future__ import annotations

import pytest
import torch

from rtx.attention.clusters import attend_members, blocks, visible
from rtx.attention.lists import pack


def test_pack_lists_positions_in_order() -> None:
    member_BHCN = torch.rand(2, 3, 4, 11, generator=torch.Generator().manual_seed(0)) < 0.4
    members = pack(member_BHCN)
    rows = []
    for b in range(2):
        for h in range(3):
            for c in range(4):
                rows += [(b * 3 + h) * 11 + i for i in range(11) if member_BHCN[b, h, c, i]]
    assert members.row_M.tolist() == rows
    assert members.count_L.tolist() == member_BHCN.sum(-1).flatten().tolist()


@pytest.mark.parametrize("attend_self", [True, False])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 7, 9, 16])
def test_blocks_show_each_member_its_window(window: int, attend_self: bool) -> None:
    counts = [0, 1, 2, window - 1, window, window + 1, 2 * window, 3 * window + 2, 0, 40]
    count_L = torch.tensor(counts)
    first, seen = 0, {}
    expected = {}
    for count in counts:
        for i in range(first, first + count):
            keys = list(range(max(first, i - window + 1), i + 1))
            expected[i] = keys if attend_self else keys[:-1] or keys
        first += count
    for block in blocks(count_L, window):
        mask_QK = visible(block, window, attend_self)
        mask_QK = block.distance_QK >= 0 if mask_QK is None else mask_QK
        assert mask_QK.any(-1).all()
        for query_Q, key_K, real_Q in zip(block.query_GQ, block.key_GK, block.real_GQ, strict=True):
            for query, mask_K, real in zip(query_Q.tolist(), mask_QK, real_Q.tolist(), strict=True):
                if real:
                    assert query not in seen
                    seen[query] = key_K[mask_K].tolist()
    assert seen == expected


def test_work_follows_the_counts() -> None:
    window, counts = 64, [3, 10, 64, 65, 400]
    slots = sum(block.query_GQ.numel() for block in blocks(torch.tensor(counts), window))
    assert slots <= sum(counts) + 2 * 16 * len(counts)


def test_a_position_in_two_clusters_gets_the_mean() -> None:
    x = torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(0))
    one = torch.tensor([True, True, False, True, True, False])
    other = torch.tensor([False, True, True, True, False, False])
    parts = [attend_members(x, x, x, pack(m.view(1, 1, 1, 6)), window=3, scale=0.5) for m in (one, other)]
    both = attend_members(x, x, x, pack(torch.stack([one, other]).view(1, 1, 2, 6)), window=3, scale=0.5)
    times = (one.int() + other.int()).clamp(min=1)[:, None]
    torch.testing.assert_close(both, (parts[0] + parts[1]) / times)
    assert (both[0, 0, 5] == 0).all()


def test_keys_need_not_be_the_queries() -> None:
    q, k, v = torch.randn(3, 1, 1, 9, 4, generator=torch.Generator().manual_seed(0))
    members = pack(torch.ones(1, 1, 1, 9, dtype=torch.bool))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend_members(q, k, v, members, window=9, scale=0.5), expected)
