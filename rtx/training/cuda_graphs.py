"""The forward and the backward pass of a loss as CUDA graphs: the CPU starts all kernels of a pass at once.

A step of a small model is some hundred kernels, and a CPU takes longer to start them one by one than a GPU to run them.
`torch.cuda.make_graphed_callables` records the kernels of both passes once, with the places of their inputs and outputs
in memory, and replays them. What it records has no shape that depends on numbers and waits for none.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rtx.attention.routing import all_centroids


class Loss(nn.Module):
    """A loss as a module that holds the weights it is differentiated by, which is what can be recorded."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, tokens_BN: Tensor) -> Any:
        return self.loss(tokens_BN)


class RecordedLoss:
    """`loss(tokens)`, replayed for batches of the shape that it was recorded with; others run without graphs.

    It is recorded again where the lists of a pattern have got more room (`rtx.attention.routing.make_room`). Gradients
    are written where the backward pass before has written its own, so they have to be used and forgotten in between.

    Args:
        model: what the loss is a method of, on a GPU.
        loss: compiled or not; what it has to compile or to make is compiled and made.
        tokens_BN: a batch.

    Raises:
        RuntimeError: something in the passes cannot be recorded.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any], tokens_BN: Tensor) -> None:
        self.model = model
        self.loss = loss
        self.shape = tokens_BN.shape
        self.record(tokens_BN)

    def record(self, tokens_BN: Tensor) -> None:
        """Record both passes. They run some times before; what these gather is forgotten."""
        self.rooms = rooms(self.model)
        statistics = [centroids.total_T for centroids in all_centroids(self.model)]
        statistics += [module.lost_members for module in losing(self.model)]
        kept = [numbers.clone() for numbers in statistics]
        module = Loss(self.model, self.loss).train()
        devices = [tokens_BN.device] if tokens_BN.is_cuda else []
        with torch.random.fork_rng(devices):
            self.replay = torch.cuda.make_graphed_callables(
                module,
                (tokens_BN.clone(),),
                allow_unused_input=True,
            )
        for numbers, before in zip(statistics, kept, strict=True):
            numbers.copy_(before)

    def __call__(self, tokens_BN: Tensor) -> Any:
        if tokens_BN.shape != self.shape:
            return self.loss(tokens_BN)
        if rooms(self.model) != self.rooms:
            self.record(tokens_BN)
        return self.replay(tokens_BN)


def losing(model: nn.Module) -> list[Any]:
    """Return the heads of a model whose lists may lack room."""
    return [module for module in model.modules() if getattr(module, "may_lose_members", False)]


def rooms(model: nn.Module) -> list[int]:
    """Return how much room the lists of each of these heads have."""
    return [module.room_factor for module in losing(model)]


def without_cast_cache(loss: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return the loss under autocast to a type, if any, that casts weights anew in each pass.

    Casts that autocast has kept from a pass before would be missing from a recorded one.
    """
    if dtype is None:
        return loss

    def call(*arguments: Any, **named: Any) -> Any:
        with torch.autocast("cuda", dtype, cache_enabled=False):
            return loss(*arguments, **named)

    return call
