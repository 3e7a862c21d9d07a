"""Products by oneDNN: float32 results, torch's switch left as it was, and attention the same with them and without."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rtx.attention.products
import rtx.attention.weights
from rtx.attention.full import full
from rtx.attention.products import MIN_FACTOR, SWITCH, has_wide_kernels, is_exact, trusted, wide_products
from rtx.attention.selection import nearest_clusters
from rtx.attention.weights import attend


def switch() -> str:
    """Return torch's setting."""
    return SWITCH.fp32_precision


def test_the_switch_is_turned_inside_alone_and_for_float32_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx.attention.products, "_trusted", True)
    before = switch()
    large = torch.ones(MIN_FACTOR)
    with wide_products(large):
        assert switch() == "bf16"
    for like in (large.double(), large.bfloat16(), large.to("meta"), large[1:]):
        with wide_products(like):
            assert switch() == before
    with pytest.raises(ZeroDivisionError), wide_products(large):
        raise ZeroDivisionError
    assert switch() == before
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_last_of_several_users_turns_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx.attention.products, "_trusted", True)
    before = switch()
    first, second = wide_products(torch.ones(MIN_FACTOR)), wide_products(torch.ones(MIN_FACTOR))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert switch() == "bf16"
    second.__exit__(None, None, None)
    assert switch() == before


def test_a_precision_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx.attention.products, "_trusted", True)
    before = switch()
    SWITCH.fp32_precision = "tf32"
    try:
        with wide_products(torch.ones(MIN_FACTOR)):
            assert switch() == "tf32"
        assert switch() == "tf32"
    finally:
        SWITCH.fp32_precision = before


@pytest.mark.skipif(not has_wide_kernels(), reason="no processor with AVX-512 and without AMX")
def test_the_verdict_does_not_depend_on_where_it_is_asked_for() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert is_exact()
    with torch.device("meta"):
        assert is_exact()


def test_is_left_alone_where_it_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx.attention.products, "_trusted", False)
    before = switch()
    with wide_products(torch.ones(MIN_FACTOR)):
        assert switch() == before


def test_products_that_round_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    true_product = torch.Tensor.__matmul__

    def rounded(x: Tensor, y: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return true_product(x, y)
        return true_product(x.bfloat16().float(), y.bfloat16().float())

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert not is_exact()


def test_trust_needs_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels, exact in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(rtx.attention.products, "_trusted", None)
        monkeypatch.setattr(rtx.attention.products, "has_wide_kernels", lambda answer=kernels: answer)
        monkeypatch.setattr(rtx.attention.products, "is_exact", lambda answer=exact: answer)
        assert trusted() == (kernels and exact)


@pytest.mark.skipif(not has_wide_kernels(), reason="no processor with AVX-512 and without AMX")
@pytest.mark.parametrize("shape", [(2, 300, 64, 300), (7, 33, 19, 65), (1, 1024, 128, 512)])
def test_products_are_float32_s(shape: tuple[int, int, int, int]) -> None:
    G, rows, inner, columns = shape
    x, y = torch.randn(G, rows, inner), torch.randn(G, inner, columns)
    with wide_products(x):
        wide = x @ y
    plain = x @ y
    truth = x.double() @ y.double()
    assert (wide - truth).abs().max() <= 2 * (plain - truth).abs().max() + 1e-6


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of a function of all of it."""
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [(3, 48, 48), (2, 64, 130), (1, 200, 200)])
def test_tiles_agree_with_torch_s_kernel(sizes: tuple[int, int, int], masked: bool, monkeypatch) -> None:
    monkeypatch.setattr(rtx.attention.weights, "trusted", lambda: True)
    G, Q, K = sizes
    q, k, v = (torch.randn(G, n, 16, requires_grad=True) for n in (Q, K, K))
    distance_QK = torch.arange(Q)[:, None] + K - Q - torch.arange(K)[None]
    mask_QK = (distance_QK >= 0) & (distance_QK < (40 if masked else K))
    plain = Q == K and not masked
    ours = attend(q, k, v, 0.3, mask_QK=None if plain else mask_QK)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_QK, scale=0.3)
    for mine, torchs in zip(gradients(ours, [q, k, v]), gradients(theirs, [q, k, v]), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-5)


def test_long_causal_attention_agrees_with_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx.attention.weights, "trusted", lambda: True)
    monkeypatch.setattr(rtx.attention.weights, "MOST_KEYS", 16)
    q, k, v = (torch.randn(2, 3, 40, 8, requires_grad=True) for _ in range(3))
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    turned = [x.mT.contiguous().mT for x in (q, k, v)]
    torch.testing.assert_close(full(*turned), theirs, rtol=1e-4, atol=1e-5)
    for mine, torchs in zip(gradients(full(q, k, v), [q, k, v]), gradients(theirs, [q, k, v]), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-5)


def test_nearest_cluster_is_the_first_of_equals() -> None:
    score_GCN = torch.randint(0, 3, (6, 5, 40)).float()
    assert torch.equal(nearest_clusters(score_GCN), score_GCN.argmax(1))
