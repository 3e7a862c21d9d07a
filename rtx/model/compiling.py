"""torch.compile of the loss, and activation checkpointing of blocks."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rtx.attention.centroids import statistics_paused
from rtx.attention.pattern import Pattern

RECOMPUTED_ONCE = "skip_fwd_side_effects_in_bwd_under_checkpoint"
"""torch's option by which a compiled, recomputed block does not gather statistics twice."""

Shapes = tuple[torch.Size | None, ...]
"""The shape of each argument of a call; None for one that is no tensor."""


def compile_loss(model: nn.Module, loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return `loss`, a method of `model`, compiled at its first call.

    On a GPU attention and selection are operators with static shapes, and the loss is one graph. On
    a CPU the sizes of a selection depend on data, so patterns run eagerly (the `forward` of each is
    replaced), and matrices, norms and activations around them are compiled.
    """
    return CompiledLoss(model, loss)


class CompiledLoss:
    """What `compile_loss` returns."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        self.model = model
        self.loss = loss
        self.compiled: Callable[..., Any] | None = None
        self.shapes_seen: set[Shapes] = set()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        device = next(self.model.parameters()).device
        if device.type != "cpu":
            self.make_lists(device, *arguments, **named)
        if self.compiled is None:
            # Not in `__init__`: the model may be moved to another device after that.
            if device.type == "cpu":
                exclude_patterns(self.model)
            self.compiled = torch.compile(self.loss)
        with compiler_options():
            return self.compiled(*arguments, **named)

    def make_lists(self, device: torch.device, *arguments: Any, **named: Any) -> None:
        """Fill the cache of lists that follow from shapes alone, if these shapes are new.

        torch.compile cannot trace how lists are made, but treats cached lists as constants.
        """
        shapes = shapes_of(*arguments, *named.values())
        if shapes in self.shapes_seen:
            return
        self.shapes_seen.add(shapes)
        run_without_effects(device, self.loss, *arguments, **named)


def compiler_options() -> contextlib.AbstractContextManager[None]:
    """Return a context in which torch.compile has RECOMPUTED_ONCE, if torch has this option."""
    # The compiler takes a second to import, and its options have no public name.
    import torch._dynamo

    options = {}
    if hasattr(torch._dynamo.config, RECOMPUTED_ONCE):
        options[RECOMPUTED_ONCE] = True
    return torch._dynamo.config.patch(options)


def shapes_of(*values: Any) -> Shapes:
    """Return the shape of each tensor, and None for other values."""
    shapes = []
    for value in values:
        shape = None
        if isinstance(value, Tensor):
            shape = value.shape
        shapes.append(shape)
    return tuple(shapes)


@torch.no_grad()
def run_without_effects(
    device: torch.device,
    function: Callable[..., Any],
    *arguments: Any,
    **named: Any,
) -> None:
    """Call a function without gathering statistics or changing the state of random generators."""
    devices = []
    if device.type == "cuda":
        devices = [device]
    with statistics_paused(), torch.random.fork_rng(devices):
        function(*arguments, **named)


def exclude_patterns(model: nn.Module) -> None:
    """Exclude the patterns of a model from compilation, except those with backend="triton".

    Our Triton kernels are operators that torch.compile does not trace into.
    """
    for pattern in model.modules():
        if isinstance(pattern, Pattern) and pattern.backend != "triton":
            pattern.forward = torch.compiler.disable(pattern.forward)  # type: ignore[method-assign]


def recomputed_block(block: nn.Module, *inputs: Any) -> Any:
    """Return `block(*inputs)` with activation checkpointing.

    The backward pass computes it again, without gathering statistics a second time.
    """
    if torch.compiler.is_compiling():
        # torch.compile does not support `context_fn`; `RECOMPUTED_ONCE` has the same effect.
        return checkpoint(block, *inputs, use_reentrant=False)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=recompute_contexts)


Contexts = tuple[
    contextlib.AbstractContextManager[None],
    contextlib.AbstractContextManager[None],
]


def recompute_contexts() -> Contexts:
    """Return the contexts of the forward pass and of its recomputation, without statistics."""
    return contextlib.nullcontext(), statistics_paused()
