"""Nats of every position, in parts or at once."""

from __future__ import annotations

import pytest
import torch

from rtx.model import likelihood
from rtx.model.likelihood import token_nats


def inputs() -> list[torch.Tensor]:
    """Hidden states, weights and biases that want gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 7, 5), (11, 5), (11,))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("rows", [1, 3, 4, 13, 14])
def test_parts_equal_the_whole(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target_BN = torch.arange(14).view(2, 7) % 11
    results = []
    for largest in (1 << 24, rows * 11):
        monkeypatch.setattr(likelihood, "MAX_LOGITS", largest)
        hidden, weight, bias = inputs()
        nats_BN = token_nats(hidden, weight, bias, target_BN)
        (nats_BN * torch.arange(14).view(2, 7)).sum().backward()
        results.append((nats_BN.detach(), hidden.grad, weight.grad, bias.grad))
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


def test_nats_are_minus_the_logarithm_of_the_share() -> None:
    hidden, weight, bias = inputs()
    target_BN = torch.arange(14).view(2, 7) % 11
    share_BNV = (hidden @ weight.T + bias).softmax(-1)
    expected = -share_BNV.gather(-1, target_BN[..., None])[..., 0].log()
    torch.testing.assert_close(token_nats(hidden, weight, bias, target_BN), expected)


def test_no_more_logits_at_once_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    linear = torch.nn.functional.linear

    def watched(*arguments: torch.Tensor) -> torch.Tensor:
        sizes.append(linear(*arguments).numel())
        return linear(*arguments)

    monkeypatch.setattr(likelihood.F, "linear", watched)
    monkeypatch.setattr(likelihood, "MAX_LOGITS", 40)
    hidden, weight, bias = inputs()
    token_nats(hidden, weight, bias, torch.zeros(2, 7, dtype=torch.int64)).sum().backward()
    assert max(sizes) <= 40 and sum(sizes) == 2 * 14 * 11, "once forward, once again backward"
