"""Memberships by Triton kernels against torch: identical, on small whole numbers, whose dot products are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE

from rtx.attention.choice import Rule, Wish, read_scores
from rtx.attention.clusters import attend_members
from rtx.attention.kmeans import Centroids
from rtx.attention.lists import Members
from rtx.attention.routing import RoutingHeads, routing

pytest.importorskip("triton", reason="triton is not installed (pip install 'rtx[triton]', Linux only)")

from rtx.attention import triton_select
from rtx.attention.triton_clusters import attend_members_triton
from rtx.attention.triton_select import select_by_threshold, select_refusal


def drawn(B: int, H: int, C: int, N: int, D: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return vectors, centroids and thresholds of small whole numbers: many ties, some clusters with all or none."""
    generator = torch.Generator().manual_seed(B + 10 * C + 100 * N)
    x_BHND = torch.randint(-3, 4, (B, H, N, D), generator=generator).to(DEVICE, dtype)
    centroid_HCD = torch.randint(-2, 3, (H, C, D), generator=generator).float().to(DEVICE)
    threshold_HC = torch.randint(-8, 9, (H, C), generator=generator).float()
    threshold_HC[:, ::5] = 1e9
    threshold_HC[:, 2::5] = -torch.inf
    return x_BHND, centroid_HCD, threshold_HC.to(DEVICE)


def assert_identical(x_BHND: Tensor, centroid_HCD: Tensor, threshold_HC: Tensor, mask_BN: Tensor | None = None) -> None:
    """Compare lists, counts and nearest centroids with torch's."""
    found, nearest_BHN = select_by_threshold(x_BHND, centroid_HCD, threshold_HC, mask_BN)
    wish = Wish(Rule("causal", 1, threshold_HC), nearest=True)
    expected, _, nearest_of_torch_BHN, _ = read_scores(centroid_HCD, x_BHND, mask_BN, wish)
    assert expected is not None and nearest_of_torch_BHN is not None
    assert torch.equal(found.row_M, expected.row_M)
    assert torch.equal(found.count_L, expected.count_L)
    assert found.row_M.dtype == expected.row_M.dtype and found.count_L.dtype == expected.count_L.dtype
    assert found[2:] == expected[2:]
    assert torch.equal(nearest_BHN, nearest_of_torch_BHN)


@pytest.mark.parametrize(
    ("B", "H", "C", "N", "D"),
    [
        (1, 1, 1, 1, 1),
        (2, 3, 5, 40, 6),
        (1, 2, 33, 129, 16),
        (2, 1, 70, 300, 20),
        (1, 1, 3, 4100, 4),
        (1, 2, 16, 128, 8),
    ],
)
def test_lists_are_those_of_torch(B: int, H: int, C: int, N: int, D: int) -> None:
    assert_identical(*drawn(B, H, C, N, D))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scored_in_float32(dtype: torch.dtype) -> None:
    assert_identical(*drawn(1, 2, 7, 50, 16, dtype))


def test_padding_is_nowhere() -> None:
    mask_BN = torch.rand(3, 150, generator=torch.Generator().manual_seed(0)) < 0.6
    mask_BN[1] = False
    assert_identical(*drawn(3, 2, 9, 150, 8), mask_BN.to(DEVICE))


def test_nothing_to_select() -> None:
    assert_identical(*drawn(0, 2, 3, 5, 4))
    x_BHND, centroid_HCD, threshold_HC = drawn(1, 2, 3, 5, 4)
    assert_identical(x_BHND, centroid_HCD, torch.full_like(threshold_HC, 1e9))


def test_same_bits_at_every_run() -> None:
    generator = torch.Generator().manual_seed(0)
    x_BHND, centroid_HCD = (torch.randn(2, 2, n, 16, generator=generator).to(DEVICE) for n in (200, 8))
    runs = [select_by_threshold(x_BHND, centroid_HCD[0], torch.ones(2, 8, device=DEVICE)) for _ in range(2)]
    assert torch.equal(runs[0][0].row_M, runs[1][0].row_M) and torch.equal(runs[0][1], runs[1][1])


def test_its_lists_are_what_attention_takes() -> None:
    x_BHND, centroid_HCD, threshold_HC = drawn(1, 2, 4, 40, 8)
    lists, _ = select_by_threshold(x_BHND, centroid_HCD, threshold_HC)
    found = attend_members_triton(x_BHND, x_BHND, x_BHND, lists, window=9, scale=0.1)
    expected = attend_members(x_BHND, x_BHND, x_BHND, lists, window=9, scale=0.1)
    torch.testing.assert_close(found, expected)


def test_refusals() -> None:
    x_BHND, centroid_HCD, threshold_HC = drawn(1, 1, 2, 3, 4)
    assert select_refusal(x_BHND) is None
    with pytest.raises(ValueError, match=r"x_BHND is of torch\.float64"):
        select_by_threshold(x_BHND.double(), centroid_HCD, threshold_HC)


@pytest.mark.parametrize("keys", ["shared", "projected"])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_with_thresholds_choose_by_the_kernel(masked: bool, keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []

    def counted(x_BHND: Tensor, *rest: Any) -> tuple[Members, Tensor]:
        calls.append(x_BHND)
        return select_by_threshold(x_BHND, *rest)

    monkeypatch.setattr(triton_select, "select_by_threshold", counted)
    q, k, v = torch.randn(3, 2, 2, 40, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask_BN = (torch.arange(40) < torch.tensor([[40], [23]])).to(DEVICE) if masked else None
    told = {}
    for backend in ("torch", "triton"):
        torch.manual_seed(0)
        store = Centroids(2, 5, 8, window=9, length=40, decay=0.9, thresholds=True, keys=keys).to(DEVICE)
        heads = RoutingHeads(store, selection="causal", scale=0.3, backend=backend).train()
        out, _ = heads(q, None if keys == "shared" else k, v, mask_BN=mask_BN)
        assert heads.snapshot is not None
        given = {"centroid_HCD": store.centroid_HCD, "threshold_HC": store.threshold_HC, "mask_BN": mask_BN}
        rest = {"window": 9, "scale": 0.3, "backend": backend, "projection_HDD": store.projection_HDD}
        again = routing(q, None if keys == "shared" else k, v, **given, **rest)  # type: ignore[arg-type]
        told[backend] = [out, again, *store.sums(), heads.snapshot.members.row_M, heads.snapshot.nearest_HN]
        assert len(calls) == (2 if backend == "triton" else 0), "once for the heads, once for the function"
    for of_torch, of_triton in zip(told["torch"], told["triton"], strict=True):
        torch.testing.assert_close(of_triton, of_torch, rtol=1e-5, atol=1e-5)


def test_other_selections_do_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_select, "select_by_threshold", None)
    x_BHND = drawn(1, 2, 4, 30, 8)[0]
    for selection in ("topk", "nearest"):
        store = Centroids(2, 4, 8, window=9, length=30, decay=0.9).to(DEVICE)
        out, expected = (
            RoutingHeads(store, selection=selection, scale=0.3, backend=backend)(x_BHND, None, x_BHND)[0]
            for backend in ("triton", "torch")
        )
        torch.testing.assert_close(out, expected)
