"""Gradients of zero for tensors that a result does not depend on."""

from collections.abc import Iterable

from torch import Tensor


def with_zero_gradients(x: Tensor, others: Iterable[Tensor | None]) -> Tensor:
    """Return x; the backward pass then also has gradients of other tensors, which are zeros.

    Autograd fails if nothing requires a gradient, and DDP if a parameter has none.

    Args:
        others: None and tensors that require no gradient are left out.
    """
    for other in others:
        if other is not None and other.requires_grad:
            # The sum of an empty slice is 0.
            x = x + other[..., :0].sum()
    return x
