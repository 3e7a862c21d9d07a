"""The feed-forward layer in parts: the whole to rounding, with less kept for the backward pass."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_models import gradients, tiny_config, tiny_model, tokens
from torch import Tensor

from rtx.model.block import FeedForward


def layer(parts: int, ffn: str = "gelu", dropout: float = 0.0) -> FeedForward:
    """Return a float64 layer with weights that do not depend on the parts."""
    torch.manual_seed(0)
    config = dataclasses.replace(tiny_config().model, ffn=ffn, ffn_parts=parts, ffn_dropout=dropout)
    return FeedForward(config).double()


def run(feed_forward: FeedForward, x_BNE: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the input and of every weight."""
    x_BNE = x_BNE.clone().requires_grad_()
    out_BNE = feed_forward(x_BNE)
    (out_BNE * torch.arange(out_BNE.numel()).view(out_BNE.shape)).sum().backward()
    assert x_BNE.grad is not None
    return [out_BNE.detach(), x_BNE.grad, *(p.grad for p in feed_forward.parameters() if p.grad is not None)]


@pytest.mark.parametrize("ffn", ["gelu", "relu", "geglu"])
@pytest.mark.parametrize("parts", [2, 3, 14, 4096])
def test_parts_equal_the_whole(ffn: str, parts: int) -> None:
    x_BNE = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for mine, whole in zip(run(layer(parts, ffn), x_BNE), run(layer(1, ffn), x_BNE), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(layer(parts, ffn)(x_BNE), layer(1, ffn)(x_BNE), rtol=1e-12, atol=1e-12)


def test_the_backward_pass_drops_the_units_that_the_forward_pass_dropped() -> None:
    feed_forward = layer(3, dropout=0.5).train()
    x_BNE = torch.randn(2, 7, 16, dtype=torch.float64).requires_grad_()
    losses = []
    for step in (1e-6, -1e-6):
        torch.manual_seed(5)
        losses.append(float(feed_forward(x_BNE.detach() + step * torch.ones_like(x_BNE)).sum().detach()))
    torch.manual_seed(5)
    (slope_BNE,) = torch.autograd.grad(feed_forward(x_BNE).sum(), x_BNE)
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(float(slope_BNE.sum()), rel=1e-5)


def test_the_wide_units_are_not_kept() -> None:
    kept = {}
    for parts in (1, 7):
        sizes: list[int] = []
        feed_forward, x_BNE = layer(parts), torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            feed_forward(x_BNE)
        kept[parts] = sum(sizes)
    assert kept[7] < 2 * 7 * 24 <= kept[1]


def test_a_whole_model_has_the_same_gradients() -> None:
    whole, parts = (
        gradients(tiny_model(ffn_parts=parts, recompute=recompute).train(), tokens())
        for parts, recompute in ((1, False), (5, True))
    )
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-9, atol=1e-12)
