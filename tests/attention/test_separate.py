"""Queries and keys with memberships of their own, or one by W_R (q + k), against the oracle; blocks and counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle_cases import PLAIN, Case, assert_same, cases, leaves
from padding_cases import padding
from routing_cases import How, fast, truth

from rtx.attention.kmeans import Centroids, orthonormal
from rtx.attention.lists import pack
from rtx.attention.routing import RoutingHeads, normalise, routing
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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", ["separate", "projected"])
@pytest.mark.parametrize("selection", ["topk", "causal", "nearest"])
def test_the_heads_are_the_function(selection: str, keys: str, causal: bool) -> None:
    case = PLAIN._replace(B=2, H=2, attend_self=False)
    x, mask_BN = leaves(case), padding(case)
    store = Centroids(2, 3, 4, window=5, length=13, decay=0.9, thresholds=True, keys=keys)
    options: dict[str, Any] = {"selection": selection, "attend_self": False, "causal": causal}
    if not causal and selection != "topk":
        with pytest.raises(ValueError, match="only topk has a meaning without a causal mask"):
            RoutingHeads(store, scale=0.5, **options)
        return
    heads = RoutingHeads(store, scale=0.5, **options).eval()
    options |= {"threshold_HC": store.threshold_HC, "key_threshold_HC": store.key_threshold_HC, "mask_BN": mask_BN}
    options["projection_HDD"] = store.projection_HDD
    expected = routing(x["q"], x["k"], x["v"], store.centroid_HCD, window=5, **options)
    torch.testing.assert_close(heads(x["q"], x["k"], x["v"], mask_BN=mask_BN)[0], expected, rtol=1e-12, atol=0)
    if not causal:
        with pytest.raises(ValueError, match="a stream has no later positions"):
            heads.start()


def test_commitment_pulls_queries_and_keys() -> None:
    x = leaves(PLAIN)
    q_BHND, k_BHND = x["q"].requires_grad_(), x["k"].requires_grad_()
    store = Centroids(1, 3, 4, window=5, length=13, decay=0.9, keys="separate")
    _, loss = RoutingHeads(store, selection="topk", scale=1.0, commitment=0.25)(q_BHND, k_BHND, x["v"])
    terms = []
    for x_ND in (normalise(q_BHND)[0, 0], normalise(k_BHND)[0, 0]):
        nearest_N = (x_ND @ store.centroid_HCD[0].double().T).argmax(-1)
        terms.append((x_ND - store.centroid_HCD[0].double()[nearest_N]).square())
    expected = 0.25 * torch.cat(terms).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(value, (q_BHND, k_BHND), retain_graph=True) for value in (loss, expected)]
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


def test_data_starts_the_centroids_of_projected_keys() -> None:
    x = leaves(PLAIN)
    store = Centroids(1, 3, 4, window=5, length=13, decay=0.9, keys="projected", thresholds=True)
    store.seed_with_next = True
    before = store.centroid_HCD.clone()
    heads = RoutingHeads(store, selection="causal", scale=1.0).eval()
    first = heads(x["q"], x["k"], x["v"])[0]
    assert not torch.equal(before, store.centroid_HCD) and not store.seed_with_next
    assert torch.equal(first, heads(x["q"], x["k"], x["v"])[0]), "the centroids of data route their own sequence"


def test_the_projection_is_orthonormal() -> None:
    w_HDD = orthonormal(3, 8)
    torch.testing.assert_close(w_HDD @ w_HDD.transpose(-1, -2), torch.eye(8).expand(3, 8, 8), rtol=0, atol=1e-5)
    assert not torch.equal(w_HDD[0], w_HDD[1])
