"""Division of whole numbers that rounds up, of integers and of tensors of integers."""

from typing import TypeVar

from torch import Tensor

Count = TypeVar("Count", int, Tensor)


def whole_pieces(count: Count, size: int) -> Count:
    """Return in how many pieces of at most `size` a count can be cut: count / size, rounded up."""
    return -(-count // size)
