"""How many products of two vectors a query of a pretrained model takes part in, by a count.

Shapes: N positions.
"""

import numpy as np

from rtx.hf.choice import Choice


def pairs_scored(choice: Choice | None, length: int, keys: float) -> float:
    """Return how many products of two vectors a query takes part in, on average, nominally.

    Products with the keys that it reads, and with what it compares in order to choose them:
    centroids, block means or candidates. A key's products with centroids count, too.

    Args:
        choice: None: dense.
        length: N.
        keys: that a query reads on average, its window included.
    """
    if choice is None:
        return (length + 1) / 2
    return keys + compared_for(choice, length)


def compared_for(choice: Choice, length: int) -> float:
    """Return how many products a query takes part in besides those with the keys that it reads."""
    far_N = np.clip(np.arange(length) + 1.0 - choice.near, 0, None)
    read_N = np.minimum(far_N, choice.keys)
    centroids = 2 * choice.cluster_count
    match choice.selection:
        case "exact":
            compared = float((far_N - read_N).mean())
        case "probed":
            candidate_N = np.minimum(far_N, choice.candidate_count)
            compared = centroids + float((candidate_N - read_N).mean())
        case "causal" | "nearest" | "topk":
            compared = float(centroids)
        case "blocks":
            compared = float((far_N // choice.block_size).mean())
        case "lsh":
            # A hash has a column for each two buckets.
            compared = float(choice.rounds * choice.buckets)
        case _:
            compared = 0.0
    return compared
