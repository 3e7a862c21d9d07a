"""Functions of torch with types, where torch declares none, or declares a part of them.

Pyright checks this library in strict mode, in which a value of an unknown type is an error. So the
other files call these functions instead of torch's.
"""

# Only in this file:
# pyright: reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Function = TypeVar("Function", bound=Callable[..., object])
Result_co = TypeVar("Result_co", covariant=True)


class Operator(Protocol[Arguments, Result_co]):
    """An operator of PyTorch (`torch.library.CustomOpDef`), with the types of its function."""

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result_co: ...

    def register_fake(self, function: Function, /) -> Function: ...

    def register_autograd(
        self,
        backward: Callable[..., object],
        /,
        *,
        setup_context: Callable[..., None],
    ) -> None: ...


def operator(
    name: str,
) -> Callable[[Callable[Arguments, Result_co]], Operator[Arguments, Result_co]]:
    """Return a decorator that makes an operator of a function which changes no argument.

    Source: `torch.library.custom_op`.
    """
    decorator: Any = torch.library.custom_op(name, mutates_args=())
    return decorator


def to_list(x: Tensor) -> list[Any]:
    """Return the numbers of a vector, the rows of a matrix as lists of numbers, and so on."""
    return x.tolist()


def vector_norm(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the Euclidean norms along a dimension; None: the norm of all numbers."""
    return cast(Tensor, x.norm(dim=dim, keepdim=keepdim))


def unique(x: Tensor) -> Tensor:
    """Return the different numbers of a tensor, in ascending order."""
    return x.unique()


def unique_with_counts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different numbers of a tensor, in ascending order, and how often each occurs."""
    return x.unique(return_counts=True)


def unique_rows(x_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different rows of a matrix, `[U, N]`, and the number of each row among them."""
    return x_BN.unique(dim=0, return_inverse=True)


def run_lengths(x: Tensor) -> Tensor:
    """Return the lengths of the runs of equal numbers in a vector."""
    _, lengths = x.unique_consecutive(return_counts=True)
    return lengths


def qr(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors Q and R of matrices, the last two dimensions of a tensor."""
    return torch.linalg.qr(x)
