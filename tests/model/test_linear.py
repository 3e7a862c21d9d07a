"""The product with a weight matrix is that of torch, by whichever kernel it is made."""

import pytest
import torch
import torch.nn.functional as F

from rtx.model import linear as products
from rtx.model.linear import MIN_ROWS, Linear, linear


def results(function, x, weight, bias, gradient, dtype):
    """Return the output and all gradients of a product."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight, bias) if t is not None]
    out = function(*leaves)
    out.backward(gradient.to(dtype))
    return [out, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(2, MIN_ROWS, 24), (MIN_ROWS + 7, 17), (3, 5, 24), (0, 24)])
def test_agrees_with_torch_in_float64(shape, with_bias, monkeypatch):
    monkeypatch.setattr(products, "WIDE_CONVOLUTIONS", True)
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=generator), torch.randn(33, shape[-1], generator=generator)
    bias = torch.randn(33, generator=generator) if with_bias else None
    gradient = torch.randn(*shape[:-1], 33, generator=generator)
    all_ours = results(linear, x, weight, bias, gradient, torch.float32)
    for ours, truth in zip(all_ours, results(F.linear, x, weight, bias, gradient, torch.float64), strict=True):
        assert ours.shape == truth.shape
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(("rows", "parts"), [(1536, 16), (17 * 30, 17), (31 * 31, 31), (509, 1)])
def test_on_one_thread_rows_are_cut_into_images_that_onednn_takes(rows, parts, monkeypatch):
    monkeypatch.setattr(products, "WIDE_CONVOLUTIONS", True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert products.images(rows) == parts
    x, weight, bias = torch.randn(rows, 24), torch.randn(9, 24), torch.randn(9)
    all_ours = results(linear, x, weight, bias, torch.ones(rows, 9), torch.float32)
    for ours, truth in zip(
        all_ours, results(F.linear, x, weight, bias, torch.ones(rows, 9), torch.float64), strict=True
    ):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=2e-4)


def test_reads_vectors_that_do_not_lie_in_order(monkeypatch):
    monkeypatch.setattr(products, "WIDE_CONVOLUTIONS", True)
    x = torch.randn(16, 2 * MIN_ROWS).T
    weight = torch.randn(8, 16)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_take_torch_s_own_product(dtype, monkeypatch):
    monkeypatch.setattr(products, "WIDE_CONVOLUTIONS", True)
    x, weight = torch.randn(2 * MIN_ROWS, 16, dtype=dtype), torch.randn(8, 16, dtype=dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_is_left_to_autocast(monkeypatch):
    monkeypatch.setattr(products, "WIDE_CONVOLUTIONS", True)
    x, layer = torch.randn(2 * MIN_ROWS, 16), Linear(16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16


def test_few_rows_and_other_processors_take_torch_s_own_product(monkeypatch):
    x, weight = torch.randn(2 * MIN_ROWS, 16), torch.randn(8, 16)
    monkeypatch.setattr(products, "WIDE_CONVOLUTIONS", True)
    assert torch.equal(linear(x[: MIN_ROWS - 1], weight), F.linear(x[: MIN_ROWS - 1], weight))
    monkeypatch.setattr(products, "WIDE_CONVOLUTIONS", False)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
