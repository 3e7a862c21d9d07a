"""The kernels that normalise vectors give LayerNorm and its gradient, on the GPU or else in
Triton's interpreter.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="our GPU kernels need Triton")

from rtx.attention.engine import norm
from rtx.attention.members import normalise, normalise_twice

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
SHAPES = [(2, 3, 37, 64), (1, 2, 50, 6), (1, 1, 3, 128), (1, 2, 4, 1), (0, 2, 5, 16), (2, 2, 0, 16)]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return vectors as a layer projects them: a view `[B, H, N, D]` of `[B, N, H, D]`."""
    B, H, N, D = shape
    x_BNHD = torch.randn(B, N, H, D, generator=torch.Generator().manual_seed(seed)) * 3 + 0.5
    return x_BNHD.to(DEVICE, dtype).transpose(1, 2)


def expected(x_BHND: Tensor) -> Tensor:
    """Return the normalised vectors in float64."""
    return F.layer_norm(x_BHND.double(), x_BHND.shape[-1:], eps=1e-6)


@TYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_vectors_and_gradients_are_those_of_layer_norm(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x_BHND = drawn(shape, dtype).requires_grad_()
    exact_BHND = expected(x_BHND)
    wide_BHND, narrow_BHND = normalise_twice(x_BHND, "triton")
    assert wide_BHND.dtype == torch.float32 and wide_BHND.is_contiguous()
    torch.testing.assert_close(wide_BHND.double(), exact_BHND, rtol=1e-6, atol=2e-6)
    weights = [drawn(shape, kind, seed) for seed, kind in ((1, torch.float32), (2, dtype))]
    loss = (wide_BHND * weights[0]).sum()
    exact_loss = (exact_BHND * weights[0]).sum()
    if narrow_BHND is not None:
        assert narrow_BHND.dtype == dtype
        # Triton's interpreter cuts digits off where a GPU rounds to bfloat16.
        torch.testing.assert_close(
            narrow_BHND.float(), wide_BHND, rtol=torch.finfo(dtype).eps, atol=1e-6
        )
        loss = loss + (narrow_BHND * weights[1]).sum()
        exact_loss = exact_loss + (exact_BHND * weights[1]).sum()
    (ours_BHND,) = torch.autograd.grad(loss, x_BHND)
    (theirs_BHND,) = torch.autograd.grad(exact_loss, x_BHND)
    assert ours_BHND.dtype == dtype and ours_BHND.stride() == torch.empty_like(x_BHND).stride()
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours_BHND, theirs_BHND, rtol=tolerance, atol=4 * tolerance)


@TYPES
def test_errors_are_not_above_those_of_torch(dtype: torch.dtype) -> None:
    x_BHND = drawn((1, 2, 300, 64), dtype)
    exact_BHND = expected(x_BHND)
    ours_BHND, _ = normalise_twice(x_BHND, "triton")
    errors = [float((y_BHND - exact_BHND).norm()) for y_BHND in (ours_BHND, normalise(x_BHND))]
    assert errors[0] <= 1.1 * errors[1]


def test_only_the_result_that_is_used_gives_a_gradient() -> None:
    x_BHND = drawn((1, 2, 9, 16), torch.bfloat16).requires_grad_()
    found = []
    for number in (0, 1):
        result = norm.normalise(x_BHND)[number].float()
        found.append(torch.autograd.grad((result * x_BHND.detach().cos()).sum(), x_BHND)[0])
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=0.02)
    assert bool(found[0].any())


VIEWS = {
    "transposed": lambda x_BHND: x_BHND.mT,
    "every other head": lambda x_BHND: x_BHND[:, ::2],
    "one head, repeated": lambda x_BHND: x_BHND[:, :1].expand(2, 3, 20, 16),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_vectors_may_be_any_view(make: Callable[[Tensor], Tensor]) -> None:
    x_BHND = make(drawn((2, 3, 20, 16), torch.float32)).detach().requires_grad_()
    wide_BHND, _ = normalise_twice(x_BHND, "triton")
    torch.testing.assert_close(wide_BHND, expected(x_BHND).float(), rtol=1e-5, atol=1e-5)
    weight_BHND = torch.randn_like(wide_BHND)
    ours, theirs = ((y * weight_BHND).sum() for y in (wide_BHND, expected(x_BHND)))
    grads = [torch.autograd.grad(loss, x_BHND)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-5)


@TYPES
def test_operators_have_the_shapes_and_types_that_they_announce(dtype: torch.dtype) -> None:
    tests = "test_schema", "test_faketensor", "test_autograd_registration"
    x_BHND = drawn((2, 2, 5, 16), dtype)
    wide_BHND, narrow_BHND = norm.normalise(x_BHND)
    torch.library.opcheck(norm.normalise, (x_BHND,), test_utils=tests)
    for gradients in ((wide_BHND, None), (None, narrow_BHND if narrow_BHND.numel() else None)):
        torch.library.opcheck(norm.normalise_backward, (x_BHND, *gradients), test_utils=tests[:2])


def test_it_is_one_graph() -> None:
    def loss(x_BHND: Tensor) -> Tensor:
        wide_BHND, narrow_BHND = normalise_twice(x_BHND, "triton")
        assert narrow_BHND is not None
        return (wide_BHND.detach() * narrow_BHND).square().sum()

    x_BHND = drawn((1, 2, 9, 16), torch.bfloat16).requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(function(x_BHND), x_BHND)[0] for function in (loss, compiled)]
    assert torch.equal(grads[0], grads[1])
