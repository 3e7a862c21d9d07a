"""Memberships by Triton kernels against torch: identical, on small whole numbers, whose dot products are exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE

from rtx.attention.choice import Rule, Wish, read_scores
from rtx.attention.clusters import attend_members

pytest.importorskip("triton", reason="triton is not installed (pip install 'rtx[triton]', Linux only)")

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
