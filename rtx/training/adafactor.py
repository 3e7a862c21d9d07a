"""Adafactor (Shazeer and Stern 2018) as torch has it, without a wait for the GPU.

In each step `torch.optim.Adafactor` reads the norm of every weight and of its update back to the
CPU. Here both norms stay on the device. Results are the same up to rounding, and so are the names
and shapes of the optimizer's state.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor with its arguments, but `eps` must hold two numbers.

    Gradients are dense and real, and `maximize` is off.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all weights that have a gradient; return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # `_init_group` makes the state of new weights. torch has no public method for this. The
            # lists that it fills are not used.
            self._init_group(group, [], [], [], [], [], [])
            for weight in group["params"]:
                if weight.grad is not None:
                    update(weight, weight.grad, self.state[weight], group)
        return loss


def update(
    weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
) -> None:
    """Change a weight and its state (Algorithms 4 and 5 with relative step sizes).

    Args:
        state: "step", which is on the CPU, and the mean squares of gradients: "row_var" and
            "col_var" of a matrix, "variance" of a vector.
        group: the options of torch's Adafactor, by their names.
    """
    state["step"] += 1
    step = state["step"].item()
    smallest, smallest_scale = group["eps"]
    rate = min(group["lr"], step**-0.5)
    scale = root_mean_square(weight).clamp(min=smallest_scale)
    if group["weight_decay"]:
        weight.mul_(1 - group["lr"] * group["weight_decay"])
    variance = mean_squares(gradient, state, step ** group["beta2_decay"], smallest)
    change = variance.clamp_(min=smallest**2).rsqrt_().mul_(gradient)
    clipping = (root_mean_square(change) / group["d"]).clamp(min=1.0)
    weight.sub_(change.mul_(rate * scale / clipping))


def mean_squares(
    gradient: Tensor, state: dict[str, Tensor], share: float, smallest: float
) -> Tensor:
    """Return the running mean squares of the gradient, in a new tensor, and update the state.

    Those of a matrix are estimated: the running mean squares of its rows, times those of its
    columns, divided by the mean of those of its rows.

    Args:
        share: the weight of this gradient in the running means, 1 - beta2.
    """
    if gradient.dim() <= 1:
        state["variance"].lerp_(gradient.square(), share)
        return state["variance"].clone()
    row = gradient.norm(dim=-1, keepdim=True).square_().div_(gradient.shape[-1])
    column = gradient.norm(dim=-2, keepdim=True).square_().div_(gradient.shape[-2])
    state["row_var"].lerp_(row, share)
    state["col_var"].lerp_(column, share)
    mean = state["row_var"].mean(dim=-2, keepdim=True).clamp_(min=smallest)
    return (state["row_var"] @ state["col_var"]).div_(mean)


def root_mean_square(x: Tensor) -> Tensor:
    """Return the root of the mean square of all numbers, a scalar on their device."""
    return x.norm() / x.numel() ** 0.5
