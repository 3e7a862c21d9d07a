"""First derivatives alone: what a fast path does not offer is an error, never a wrong number."""

from __future__ import annotations

import pytest
import torch
from public_calls import FUNCTIONS, Arguments, arguments, call
from torch import Tensor

import rtx.attention.weights
from rtx.attention.kernel import CausalKernel

TILED = [name for name in FUNCTIONS if not name.startswith(("lsh", "adaptive_span"))]
"""Functions whose dropout is worked out in tiles on a CPU."""


def penalty(name: str, given: Arguments, **changes: object) -> Tensor:
    """Return the gradient, by the queries, of a loss that holds a gradient itself."""
    leaf = given["q_BHND"].clone().requires_grad_()
    out = call(name, given, q_BHND=leaf, **changes)
    (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), leaf)[0]


@pytest.mark.parametrize("name", TILED)
def test_a_second_derivative_through_tiles_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match="create_graph=True: this attention has first derivatives alone"):
        penalty(name, arguments(name), dropout=0.5)


def test_a_second_derivative_through_the_long_kernel_is_refused() -> None:
    q_BHND = torch.randn(1, 1, 8, 4, requires_grad=True)
    out = CausalKernel.apply(q_BHND, q_BHND, q_BHND, 0.5)
    assert isinstance(out, Tensor)
    with pytest.raises(RuntimeError, match="first derivatives alone"):
        torch.autograd.grad(out.sum(), q_BHND, create_graph=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_reference_has_second_derivatives(name: str) -> None:
    given = {n: x.double() if isinstance(x, Tensor) else x for n, x in arguments(name).items()}
    given["q_BHND"] = given["q_BHND"][:1, :, :6]
    for other in ("k_BHND", "v_BHND"):
        if given.get(other) is not None:
            given[other] = given[other][:1, :, :6]
    for other in ("k_BHMD", "v_BHMD"):
        if other in given:
            given[other] = given[other][:1]
    options = {"backend": "reference"}
    second = penalty(name, given, **options)

    def squared(q_BHND: Tensor) -> Tensor:
        leaf = q_BHND.clone().requires_grad_()
        (grad,) = torch.autograd.grad(call(name, given, q_BHND=leaf, **options).square().sum(), leaf)
        return grad.square().sum()

    step = 1e-6 * torch.randn(given["q_BHND"].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rise = (squared(given["q_BHND"] + step) - squared(given["q_BHND"] - step)) / 2
    assert float((second * step).sum()) == pytest.approx(float(rise), rel=1e-4)


@pytest.mark.parametrize("name", TILED)
def test_functional_transforms_of_tiles_raise(name: str) -> None:
    given = arguments(name)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda q_BHND: call(name, given, q_BHND=q_BHND, dropout=0.5).sum())(given["q_BHND"])


def test_a_plain_gradient_needs_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx.attention.weights, "worked_in_tiles", lambda *given: True)
    given = arguments("full")
    leaf = given["q_BHND"].clone().requires_grad_()
    (grad,) = torch.autograd.grad(call("full", given, q_BHND=leaf).sum(), leaf)
    assert not grad.requires_grad
