"""Queries of one sequence over keys of another of any length, padded or not, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle_cases import PLAIN, Case, Leaves, assert_same, cases, leaves
from routing_cases import centroids
from torch import nn

from rtx.attention.content import normalise
from rtx.attention.cross import CrossRoutingHeads, cross_routing
from rtx.attention.kmeans import Centroids, initialise_from_data, update_centroids

Masks = tuple[torch.Tensor, torch.Tensor]


def inputs_of(case: Case, length: int) -> Leaves:
    """Queries of the case, and keys and values of another length."""
    context = leaves(case._replace(N=length, seed=case.seed + 1, distances=0))
    return {"q": leaves(case)["q"], "k": context["k"], "v": context["v"]}


def masks(case: Case, length: int) -> Masks:
    """Masks `[B, N]` and `[B, M]`; the last context may be padding alone."""
    generator = torch.Generator().manual_seed(case.seed)
    mask_BN, context_BM = (torch.rand(case.B, n, generator=generator) < 0.7 for n in (case.N, length))
    if case.seed % 3 == 0:
        context_BM[-1] = False
    return mask_BN, context_BM


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", cases(10))
def test_oracle(case: Case, masked: bool) -> None:
    for length, context_window in ((case.N, None), (2 * case.N + 1, 3), (max(1, case.N // 2), case.W + 2)):
        pair = masks(case, length)

        def read(x: Leaves, backend: str, pair: Masks = pair, context_window: int | None = context_window) -> Any:
            options: dict[str, Any] = {"mask_BN": pair[0], "context_mask_BM": pair[1]} if masked else {}
            options |= {"window": case.W, "context_window": context_window, "scale": case.scale, "backend": backend}
            return cross_routing(x["q"], x["k"], x["v"], centroids(case), **options)

        assert_same(lambda x, f=read: f(x, "torch"), lambda x, f=read: f(x, "reference"), inputs_of(case, length))


def test_the_heads_are_the_function_and_count_both_sequences() -> None:
    case = PLAIN._replace(B=2, H=2)
    x, (mask_BN, context_BM) = inputs_of(case, 21), masks(case, 21)
    store = Centroids(2, 3, 4, window=5, length=13, decay=0.9, keys="separate")
    heads = CrossRoutingHeads(store, context_window=7)
    before = store.centroid_HCD.clone()
    given: dict[str, Any] = {"mask_BN": mask_BN, "context_mask_BM": context_BM}
    out = heads(x["q"], x["k"], x["v"], **given)
    expected = cross_routing(x["q"], x["k"], x["v"], before, window=5, context_window=7, **given)
    assert torch.equal(out, expected)
    assert store.count_HC.sum() == 2 * (mask_BN.sum() + context_BM.sum())
    update_centroids(heads)
    assert not torch.equal(store.centroid_HCD, before)
    heads.eval()(x["q"], x["k"], x["v"])
    assert all((total == 0).all() for total in store.sums())


class Reader(nn.Module):
    """The least that `initialise_from_data` asks of a model: a loss of tokens; queries and keys of two lengths."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        store = Centroids(2, 3, 4, window=5, length=13, decay=0.9, keys="separate", thresholds=True)
        self.heads, self.masked = CrossRoutingHeads(store), masked
        self.x = inputs_of(PLAIN._replace(B=2, H=2), 21)

    def loss(self, tokens_BN: torch.Tensor) -> torch.Tensor:
        batch = {name: self.x[name][: len(tokens_BN)] for name in "qkv"}
        mask_BN, context_BM = (pair[: len(tokens_BN)] for pair in masks(PLAIN._replace(B=2, seed=1), 21))
        given: dict[str, Any] = {"mask_BN": mask_BN, "context_mask_BM": context_BM} if self.masked else {}
        return self.heads(*batch.values(), **given).sum()


@pytest.mark.parametrize("masked", [False, True])
def test_data_start_the_centroids(masked: bool) -> None:
    model = Reader(masked).train()
    store = model.heads.centroids
    initialise_from_data(model, torch.zeros(2, 13, dtype=torch.int64))
    assert not store.seed_with_next and model.training
    real_N = masks(PLAIN._replace(B=2, seed=1), 21)[0][0] if masked else torch.ones(13, dtype=torch.bool)
    apart_HCN = torch.cdist(store.centroid_HCD, normalise(model.x["q"][0]).float()[:, real_N])
    assert (apart_HCN.amin(-1) < 1e-3).all(), "each stands at a real query of the first sequence"
    before = store.centroid_HCD.clone()
    model.loss(torch.zeros(2, 13, dtype=torch.int64))
    assert torch.equal(store.centroid_HCD, before)


def test_refusals() -> None:
    x = inputs_of(PLAIN, 9)
    centroid_HCD = centroids(PLAIN)
    with pytest.raises(ValueError, match="context_window=0: must be at least 1"):
        cross_routing(x["q"], x["k"], x["v"], centroid_HCD, window=4, context_window=0)
    with pytest.raises(ValueError, match="context_mask_BM has the shape"):
        mask_BM = torch.ones(1, 13, dtype=torch.bool)
        cross_routing(x["q"], x["k"], x["v"], centroid_HCD, window=4, context_mask_BM=mask_BM)
    with pytest.raises(ValueError, match="keys='shared': must be 'separate'"):
        CrossRoutingHeads(Centroids(1, 3, 4, window=5, length=13, decay=0.9))
