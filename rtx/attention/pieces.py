"""Cut work into pieces, to limit the number of scores that are in memory at once."""

MAX_SCORES = 1 << 23
"""The most scores of one piece. A piece of a single item, such as one head, may have more."""


def piece_size(scores: int) -> int:
    """Return the number of items of a piece, at least one.

    Args:
        scores: the number of scores of each item.
    """
    scores = max(1, scores)
    return max(1, MAX_SCORES // scores)


def pieces(count: int, scores: int) -> list[slice]:
    """Return the slices that cut `count` items into pieces.

    Args:
        scores: the number of scores of each item.
    """
    size = piece_size(scores)
    slices: list[slice] = []
    for first in range(0, count, size):
        stop = min(count, first + size)
        slices.append(slice(first, stop))
    return slices
