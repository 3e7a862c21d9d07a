"""Numbers of pairs (query, key), by which plans count operations."""

from rtx.attention.reads import IndexReads, Reads


def triangle(n: float) -> float:
    """Return the number of pairs j <= i among n positions."""
    return n * (n + 1) / 2


def window_pairs(n: float, window: float) -> float:
    """Return the number of pairs i - window < j <= i among n positions."""
    window = min(window, n)
    return triangle(window) + (n - window) * window


def pairs_within(n: float, window: float, causal: bool) -> float:
    """Return the number of pairs if each of n positions reads up to `window` of the readable keys.

    Args:
        causal: whether these are the keys up to the position, or all.
    """
    if causal:
        return window_pairs(n, window)
    return n * min(window, n)


def count_pairs(parts: list[Reads]) -> int:
    """Return the number of pairs in the results of `Pattern.reads`, holes included."""
    pairs = 0
    for part in parts:
        if isinstance(part, IndexReads):
            is_key_RK = part.index_RK >= 0
            pairs += int(is_key_RK.sum())
        else:
            count_P = part.stop_P - part.start_P
            pairs += int(count_P.sum())
    return pairs
