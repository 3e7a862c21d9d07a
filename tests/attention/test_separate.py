"""Queries and keys with memberships of their own, or one by W_R (q + k), against the oracle; blocks and counts."""

from __future__ import annotations

import pytest
import torch
from oracle_cases import PLAIN, Case, assert_same, cases, leaves
from routing_cases import How, fast, truth

from rtx.attention.clusters import pack
from rtx.attention.kmeans import orthonormal
from rtx.attention.separate import attend_lists, blocks, readers

HOWS = [
    How("topk", "separate"),
    How("causal", "separate"),
    How("nearest", "separate"),
    How("topk", "projected"),
    How("causal", "projected"),
    How("nearest", "projected"),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("case", cases(5))
def test_oracle(case: Case, how: How, masked: bool) -> None:
    how = how._replace(masked=masked)
    assert_same(lambda x: fast(case, x, how), lambda x: truth(case, x, how), leaves(case))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", ["separate", "projected", "shared"])
@pytest.mark.parametrize("case", cases(2))
def test_without_a_causal_mask(case: Case, keys: str, masked: bool) -> None:
    case, how = case._replace(distances=0), How("topk", keys, causal=False, masked=masked)
    assert_same(lambda x: fast(case, x, how), lambda x: truth(case, x, how), leaves(case))


@pytest.mark.parametrize("how", [How("topk", "separate", slots=True), How("causal", "separate", slots=True)])
@pytest.mark.parametrize("case", [case for case in cases(10) if case.distances])
def test_slot_distances(case: Case, how: How) -> None:
    assert_same(lambda x: fast(case, x, how), lambda x: truth(case, x, how), leaves(case))


@pytest.mark.parametrize("attend_self", [True, False])
@pytest.mark.parametrize("level", ["all", "most", "half", "some"])
def test_lists_of_any_length(level: str, attend_self: bool) -> None:
    how = How("causal", "separate", level=level)
    for window in (1, 2, 5, 7, 30):
        case = PLAIN._replace(N=41, B=1, C=2, W=window, attend_self=attend_self, distances=6)
        assert_same(lambda x: fast(case, x, how), lambda x: truth(case, x, how), leaves(case))  # noqa: B023


def test_memberships_apart_equal_shared_ones_where_queries_and_keys_are_equal() -> None:
    case = PLAIN._replace(N=40, B=2, H=2)
    inputs = leaves(case)
    inputs["k"] = inputs["q"]
    for selection in ("topk", "nearest"):
        apart, shared = (fast(case, inputs, How(selection, keys)) for keys in ("separate", "shared"))
        torch.testing.assert_close(apart, shared, rtol=1e-12, atol=1e-14)


def test_a_query_that_sees_no_key_gets_zero() -> None:
    x = torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(0))
    queries = pack(torch.tensor([[1, 1, 1, 0, 1, 1], [1, 0, 0, 0, 0, 1]]).bool()[None, None])
    keys = pack(torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]]).bool()[None, None])
    out = attend_lists(x, x, x, queries, keys, window=1, scale=0.5)[0, 0]
    assert (out[[0, 1, 3]] == 0).all()
    # Position 5 reads key 3 in one cluster and itself in the other; position 4 is in one cluster that shows it a key.
    expected = torch.stack([x[0, 0, 2], x[0, 0, 3], (x[0, 0, 3] + x[0, 0, 5]) / 2])
    torch.testing.assert_close(out[[2, 4, 5]], expected)


def test_work_follows_the_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    member_BHCN, key_member_BHCN = torch.rand(2, 1, 1, 8, 2_000, generator=generator) < 0.2
    queries, keys = pack(member_BHCN), pack(key_member_BHCN)
    read = readers(queries, keys, causal=True)
    window = 64
    forms = list(blocks(read, keys.count_L, window))
    assert sum(int(block.real_GQ.sum()) for block in forms) == len(read.row_P)
    scores = sum(block.query_GQ.shape[1] * block.key_GK.numel() for block in forms)
    assert scores < 4 * window * len(read.row_P)


def test_the_projection_is_orthonormal() -> None:
    w_HDD = orthonormal(3, 8)
    torch.testing.assert_close(w_HDD @ w_HDD.transpose(-1, -2), torch.eye(8).expand(3, 8, 8), rtol=0, atol=1e-5)
    assert not torch.equal(w_HDD[0], w_HDD[1])
