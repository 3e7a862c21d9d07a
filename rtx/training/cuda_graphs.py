"""Forward and backward pass of a loss as CUDA graphs: one call starts all kernels of a pass.

A step of a small model runs some hundred kernels. A CPU takes longer to start them one by one than
a GPU to run them. `torch.cuda.make_graphed_callables` records the kernels of both passes once, with
the addresses of their inputs and outputs, and replays them. So no shape in these passes may depend
on numbers on the GPU, and none may be waited for.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rtx.attention.capacity import patterns_with_capacity
from rtx.attention.centroids import all_centroids


class Loss(nn.Module):
    """A loss as a module: `make_graphed_callables` differentiates by the module's parameters."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, tokens_BN: Tensor) -> Any:
        return self.loss(tokens_BN)


class RecordedLoss:
    """`loss(tokens)` by replay for batches of the recorded shape, else without graphs.

    Every backward pass writes gradients to the same memory: use and drop them before the next one.
    Recorded passes have the capacity of lists at the time of recording
    (`rtx.attention.capacity.raise_capacities`).

    `make_graphed_callables` runs the passes a few times before it records them. Statistics and
    random streams are left as they were.

    Args:
        model: on a GPU.
        loss: a method of the model, compiled or not. What it makes or compiles at its first call,
            it makes in the passes that run before recording. It enters autocast by itself, see
            `without_cast_cache`.
        tokens_BN: a batch.

    Raises:
        RuntimeError: something in the passes cannot be recorded.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any], tokens_BN: Tensor) -> None:
        self.loss = loss
        self.shape = tokens_BN.shape
        statistics = statistics_of(model)
        kept = [numbers.clone() for numbers in statistics]
        module = Loss(model, loss).train()
        devices = [tokens_BN.device] if tokens_BN.is_cuda else []
        try:
            with torch.random.fork_rng(devices):
                self.replay: Any = torch.cuda.make_graphed_callables(
                    module,
                    (tokens_BN.clone(),),
                    allow_unused_input=True,
                )
        finally:
            for numbers, before in zip(statistics, kept, strict=True):
                numbers.copy_(before)

    def __call__(self, tokens_BN: Tensor) -> Any:
        if tokens_BN.shape != self.shape:
            return self.loss(tokens_BN)
        return self.replay(tokens_BN)


def statistics_of(model: nn.Module) -> list[Tensor]:
    """Return the tensors to which passes in training add what they see."""
    seen = [centroids.total_Z for centroids in all_centroids(model)]
    lost = [pattern.lost_members for pattern in patterns_with_capacity(model).values()]
    return seen + lost


def without_cast_cache(loss: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return the loss under autocast to `dtype` that casts weights anew in each pass.

    Autocast may keep a weight that an earlier pass has cast. Then the cast would be missing from
    what is recorded. None: return the loss itself.
    """
    if dtype is None:
        return loss

    def call(*arguments: Any, **named: Any) -> Any:
        with torch.autocast("cuda", dtype, cache_enabled=False):
            return loss(*arguments, **named)

    return call
