"""How many products of two vectors a query of a pretrained model takes part in, by a count.

Shapes: N positions.
"""

import numpy as np

from rtx.hf.choice import Choice


def pairs_scored(choice: Choice | None, visible_N: np.ndarray, keys: float) -> float:
    """Return how many products of two vectors a query takes part in, on average, nominally.

    Products with the keys that it reads, and with what it compares in order to choose them:
    centroids, block means or candidates. A key's products with centroids count, too. Keys that the
    model hides are not compared.

    Args:
        choice: None: dense.
        visible_N: how many keys the model lets the query at each position read.
        keys: that a query reads on average, its window included.
    """
    if choice is None:
        return keys
    if choice.selection == "exact":
        return float(visible_N.mean())
    return keys + compared_for(choice, visible_N)


def compared_for(choice: Choice, visible_N: np.ndarray) -> float:
    """Return how many products a query takes part in besides those with the keys that it reads."""
    far_N = np.clip(visible_N - choice.near, 0, None)
    centroids = 2 * choice.cluster_count
    match choice.selection:
        case "probed":
            candidate_N = np.minimum(far_N, choice.candidate_count)
            read_N = np.minimum(far_N, choice.keys)
            return centroids + float((candidate_N - read_N).mean())
        case "causal" | "nearest" | "topk":
            return centroids
        case "blocks":
            return float((far_N // choice.block_size).mean())
        case "lsh":
            # A hash has a column for each two buckets.
            return choice.rounds * choice.buckets
        case _:
            return 0.0
