"""Rounding up of whole numbers."""

from typing import TypeVar

from torch import Tensor

Count = TypeVar("Count", int, Tensor)


def whole_pieces(count: Count, size: int) -> Count:
    """Return in how many pieces of at most `size` a count can be cut: count / size, rounded up."""
    return -(-count // size)


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
