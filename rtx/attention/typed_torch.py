"""Typed wrappers of torch functions whose annotations are missing or incomplete.

Pyright checks this library in strict mode, in which a value of an unknown type is an error. So the
other files call these functions in place of torch's. The docstring names torch's function where the
name here differs.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# These rules are off in this file alone.

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

Arguments = ParamSpec("Arguments")
Function = TypeVar("Function", bound=Callable[..., object])
Result = TypeVar("Result")


# Operators.


if TYPE_CHECKING:
    # The class of what `torch.library.custom_op` returns has no public name.
    from torch._library.custom_ops import CustomOpDef

    class Operator(CustomOpDef, Generic[Arguments, Result]):
        """An operator, with the types of its function."""

        def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result: ...

        def register_fake(self, fn: Function, /) -> Function: ...

        def register_autograd(
            self,
            backward: Callable[..., object],
            /,
            *,
            setup_context: Callable[..., None] | None = None,
        ) -> None: ...


def custom_op(
    name: str,
) -> Callable[[Callable[Arguments, Result]], Operator[Arguments, Result]]:
    """Return the decorator that makes an operator of a function that mutates no argument."""
    decorator: Any = torch.library.custom_op(name, mutates_args=())
    return decorator


# Tensors.


def tolist(x: Tensor) -> list[Any]:
    """Return a tensor as nested lists of numbers."""
    return x.tolist()


def vector_norm(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the Euclidean norms along a dimension, or of all numbers together (`Tensor.norm`)."""
    return cast(Tensor, x.norm(dim=dim, keepdim=keepdim))


def unique(x: Tensor) -> Tensor:
    """Return the distinct numbers of a tensor, in ascending order."""
    return x.unique()


def unique_with_counts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of `unique`, and how often each number occurs (`return_counts`)."""
    return x.unique(return_counts=True)


def unique_rows(x_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct rows of a matrix, and for each row the index of its distinct row, `[B]`.

    This is `unique` with `return_inverse`.
    """
    return x_BN.unique(dim=0, return_inverse=True)


def run_lengths(x: Tensor) -> Tensor:
    """Return the lengths of the runs of equal numbers in a vector (`unique_consecutive`)."""
    _, lengths = x.unique_consecutive(return_counts=True)
    return lengths


def qr(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors Q and R of a matrix, or of each matrix of several (`torch.linalg.qr`)."""
    return torch.linalg.qr(x)


# Modules.


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return an iterator over a module and all modules in it, with their names."""
    return model.named_modules()


def register_load_state_dict_post_hook(
    module: nn.Module,
    hook: Callable[[Any, object], None],
) -> None:
    """Call a hook after a state dict is loaded, with the module and the keys that did not fit."""
    module.register_load_state_dict_post_hook(hook)
