"""What the heads of a pretrained model read: the options, and the pattern of rtx that chooses.

Shapes: H heads, D head size.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from dataclasses import dataclass

from rtx.attention import (
    Blocks,
    Centroids,
    Exact,
    Local,
    Nearest,
    Pattern,
    Probed,
    Random,
    RandomBlocks,
    Thresholds,
    TopK,
)
from rtx.hf.hashed import HashedKeys

NAMES = {
    "exact": "the keys with the largest q k^T",
    "probed": "the best of the candidates in the clusters of keys that match the query best",
    "causal": "keys of the clusters whose threshold the query reaches",
    "nearest": "keys of the query's nearest cluster",
    "topk": "keys of the clusters whose best positions so far include the query",
    "blocks": "blocks of keys, by the mean of each block",
    "blocks_random": "blocks of keys, drawn at random",
    "lsh": "keys with the query's hash",
    "random": "keys of random clusters",
    "drawn": "keys drawn one by one",
    "next": "the keys before the window, as a longer window reads them",
    "none": "no other keys",
}
"""The selections, and which keys a query reads beside its window and the sinks."""
FITTED = ("probed", "causal", "nearest", "topk")
"""The selections with centroids, which are fitted to text before use."""
PER = ("head", "group")
ROTARY = ("after", "before")

DECAY = 0.5
"""Of the centroids of clusters, which are fitted in some ten steps to the same text."""
THRESHOLD_RATE = 0.3
"""How fast their thresholds move."""


@dataclass(frozen=True)
class Choice:
    """What each head reads.

    Raises:
        ValueError: an option out of its range; the message names it.
    """

    selection: str = "exact"
    """One of `NAMES`."""
    window: int = 64
    """The number of last positions that every head reads, its own included."""
    keys: int = 64
    """The number of other keys that the selection may choose for a query (W of its pattern)."""
    sinks: int = 4
    """The number of first positions that every head reads."""
    dense_layers: int = 0
    """The number of first layers that stay dense."""
    per: str = "head"
    """head: every query head chooses. group: the query heads of a key-value head read the same
    keys, chosen by the mean of their queries."""
    rotary: str = "after"
    """Whether the choice compares queries and keys after or before their rotary angles."""
    clusters: int | None = None
    """Clusters of a head; None: 128 for probed, else `length` / `keys`."""
    candidates: int | None = None
    """Keys that probed compares with a query at least; None: four times `keys`."""
    block: int = 16
    """Keys of a block, at most `keys`."""
    rounds: int = 4
    """Hash rounds; each reads the last `keys` / `rounds` keys with the query's hash."""
    buckets: int = 32
    """Hash values of a round, an even number."""
    length: int = 2048
    """The length that random clusters and thresholds are meant for."""
    seed: int = 0
    """Seed of what is drawn."""

    def __post_init__(self) -> None:
        check_word("selection", self.selection, NAMES)
        check_word("per", self.per, PER)
        check_word("rotary", self.rotary, ROTARY)
        check_at_least(1, window=self.window, keys=self.keys, block=self.block)
        check_at_least(1, rounds=self.rounds, length=self.length)
        check_at_least(0, sinks=self.sinks, dense_layers=self.dense_layers, seed=self.seed)
        if self.clusters is not None:
            check_at_least(1, clusters=self.clusters)
        if self.candidates is not None:
            check_at_least(self.keys, candidates=self.candidates)
        if self.buckets < 2 or self.buckets % 2:
            raise ValueError(f"buckets={self.buckets}: must be even, at least 2")

    @property
    def is_fitted(self) -> bool:
        """Whether the selection has centroids, which must be fitted."""
        return self.selection in FITTED

    @property
    def near(self) -> int:
        """The number of positions from which on a query has keys to choose among."""
        return self.window + self.sinks

    @property
    def cluster_count(self) -> int:
        """The number of clusters of a head."""
        if self.clusters is not None:
            return self.clusters
        if self.selection == "probed":
            return 128
        return max(1, self.length // self.keys)

    @property
    def candidate_count(self) -> int:
        """The number of keys that a query of `probed` compares at least."""
        if self.candidates is not None:
            return self.candidates
        return 4 * self.keys

    @property
    def block_size(self) -> int:
        """The number of keys of a block."""
        return min(self.block, self.keys)


def check_word(name: str, word: str, allowed: Collection[str]) -> None:
    """Raise ValueError unless a word is one of those allowed."""
    if word in allowed:
        return
    close = difflib.get_close_matches(str(word), list(allowed), n=1)
    hint = ""
    if close:
        hint = f" (did you mean '{close[0]}'?)"
    raise ValueError(f"{name}={word}: must be one of {', '.join(allowed)}{hint}")


def check_at_least(least: int, **numbers: int) -> None:
    """Raise ValueError for a number below the least one, or one that is no integer."""
    for name, number in numbers.items():
        if not isinstance(number, int) or number < least:
            raise ValueError(f"{name}={number}: must be an integer, at least {least}")


def make_pattern(choice: Choice, heads: int, size: int, layer: int) -> Pattern:
    """Return the pattern that chooses the far keys of a layer.

    Args:
        heads, size: H and D.
        layer: the number of the layer, which changes what is drawn.
    """
    seed = choice.seed * 1_000 + layer
    return MAKERS[choice.selection](choice, heads, size, seed)


def make_exact(choice: Choice, heads: int, size: int, seed: int) -> Pattern:
    return Exact(window=choice.keys)


def make_next(choice: Choice, heads: int, size: int, seed: int) -> Pattern:
    return Local(window=choice.keys)


def make_probed(choice: Choice, heads: int, size: int, seed: int) -> Pattern:
    return Probed(
        heads,
        size,
        clusters=choice.cluster_count,
        decay=0.0,  # every step is one of Lloyd's iterations
        candidates=choice.candidate_count,
        window=choice.keys,
    )


def make_causal(choice: Choice, heads: int, size: int, seed: int) -> Pattern:
    return Thresholds(make_centroids(choice, heads, size, THRESHOLD_RATE))


def make_nearest(choice: Choice, heads: int, size: int, seed: int) -> Pattern:
    return Nearest(make_centroids(choice, heads, size, 0.0))


def make_topk(choice: Choice, heads: int, size: int, seed: int) -> Pattern:
    return TopK(make_centroids(choice, heads, size, 0.0))


def make_blocks(choice: Choice, heads: int, size: int, seed: int) -> Pattern:
    return Blocks(heads, size, block=choice.block_size, window=choice.keys)


def make_random_blocks(choice: Choice, heads: int, size: int, seed: int) -> Pattern:
    return RandomBlocks(heads, size, seed=seed, block=choice.block_size, window=choice.keys)


def make_drawn(choice: Choice, heads: int, size: int, seed: int) -> Pattern:
    return RandomBlocks(heads, size, seed=seed, block=1, window=choice.keys)


def make_random(choice: Choice, heads: int, size: int, seed: int) -> Pattern:
    return Random(
        heads,
        choice.cluster_count,
        length=choice.length,
        seed=seed,
        has_keys=True,
        window=choice.keys,
    )


def make_lsh(choice: Choice, heads: int, size: int, seed: int) -> Pattern:
    return HashedKeys(
        heads,
        size,
        rounds=choice.rounds,
        buckets=choice.buckets,
        seed=seed,
        window=max(1, choice.keys // choice.rounds),
    )


MAKERS: dict[str, Callable[[Choice, int, int, int], Pattern]] = {
    "exact": make_exact,
    "probed": make_probed,
    "causal": make_causal,
    "nearest": make_nearest,
    "topk": make_topk,
    "blocks": make_blocks,
    "blocks_random": make_random_blocks,
    "lsh": make_lsh,
    "random": make_random,
    "drawn": make_drawn,
    "next": make_next,
}
"""The function that makes each selection, with the seed of its draws."""


def make_centroids(choice: Choice, heads: int, size: int, threshold_rate: float) -> Centroids:
    """Return centroids that the next batch in training initialises."""
    centroids = Centroids(
        heads,
        choice.cluster_count,
        size,
        window=min(choice.keys, choice.length),
        length=choice.length,
        decay=DECAY,
        threshold_rate=threshold_rate,
        keys="separate",
    )
    centroids.seed_with_next = True
    return centroids
