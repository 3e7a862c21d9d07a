"""What a run costs, from its configuration alone: parameters and floating-point operations.

A multiplication and an addition count as two operations. Attention is counted by the pairs of positions that the
pattern reads, not by what a kernel computes and throws away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rtx.config import Config, hash_buckets
from rtx.model.layer_heads import ROUTED, layer_patterns
from rtx.model.transformer import Transformer

INDEXER_UNITS = 16
"""Units of a head's queries and keys by which selection=indexer chooses."""


@dataclass(frozen=True)
class Cost:
    """The cost of a configuration; operations are for one sequence, forward only."""

    parameters: int
    embedding_parameters: int
    dense: float
    """Matrix products with weights."""
    attention: float
    """Logits and weighted sums of the pairs that are read."""
    selection: float
    """Scores of centroids, of blocks or of keys, as the heads choose what to read (without an indexer's loss)."""
    full_attention: float
    """What `attention` would be if every head read everything before it."""

    @property
    def forward(self) -> float:
        """All operations of one sequence, forward."""
        return self.dense + self.attention + self.selection

    def step(self, config: Config) -> float:
        """Operations of one optimizer step: forward, twice that backward, and once more with model.recompute."""
        passes = 4 if config.model.recompute is True else 3
        return config.trainer.batch_size * (passes * (self.dense + self.attention) + self.selection)


def cost(config: Config, vocabulary: int) -> Cost:
    """Return the cost of a resolved configuration; no weight is allocated."""
    with torch.device("meta"):
        model = Transformer(config, vocabulary)
    N, layers, size = config.data.length, config.model.layers, config.model.hidden // config.model.heads
    tables = {id(model.embedding.table_VS), id(model.output_VS), id(model.output_bias_V)}
    matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    groups = [group for layer in range(layers) for group in layer_patterns(config, layer).items()]
    return Cost(
        parameters=model.count_parameters(),
        embedding_parameters=sum(p.numel() for p in model.parameters() if id(p) in tables),
        dense=2.0 * N * (matrices + model.output_VS.numel()),
        attention=sum(4.0 * size * count * pairs(name, config) for name, count in groups),
        selection=sum(count * selection(name, config) for name, count in groups),
        full_attention=4.0 * size * config.model.heads * layers * triangle(N),
    )


def pairs(name: str, config: Config) -> float:
    """Return how many pairs of positions a head of a group reads in one sequence (for causal selection, on average)."""
    N, model, routing = config.data.length, config.model, config.routing
    clusters, window = routing.clusters or 0, routing.window
    if name == "lsh":  # buckets evenly filled, and no pair shown by two rounds
        buckets = hash_buckets(config)
        return model.hash_rounds * buckets * window_pairs(N / buckets, model.window)
    if name == "strided":
        return strided_pairs(N, model.stride)
    if name == "fixed":
        return fixed_pairs(N, model.stride, model.summary)
    if name != ROUTED:
        return triangle(N) if name == "full" else window_pairs(N, model.window)
    if routing.selection in ("exact", "indexer"):
        return window_pairs(N, window)
    if routing.selection in ("blocks", "blocks_random"):
        chosen = routing.block * finished_blocks(N, routing.block, window // routing.block)
        # The branch over means reads every finished block as one key.
        means = finished_blocks(N, routing.block, N) if routing.compressed else 0
        return fixed_pairs(N, routing.block, 0) + chosen + means
    if routing.selection == "nearest":  # evenly filled clusters
        return clusters * window_pairs(N / clusters, window)
    return clusters * triangle(min(window, N))


def selection(name: str, config: Config) -> float:
    """Return the operations with which a head of a group chooses what to read in one sequence."""
    routing, N, size = config.routing, config.data.length, config.model.hidden / config.model.heads
    if name == "lsh":  # one product for a bucket and its opposite
        return config.model.hash_rounds * hash_buckets(config) * size * N
    if name != ROUTED or routing.selection in ("random", "blocks_random"):
        return 0.0
    if routing.selection == "exact":
        return 2.0 * size * triangle(N)
    if routing.selection == "blocks":
        return 2.0 * size * finished_blocks(N, routing.block, N)
    if routing.selection == "indexer":
        return 2.0 * INDEXER_UNITS * (triangle(N) + 2 * size * N)
    clusters = routing.clusters or 0
    return 2.0 * size * N * {"shared": clusters, "separate": 2 * clusters, "projected": clusters + size}[routing.keys]


def finished_blocks(n: int, block: int, most: int) -> float:
    """Blocks that end before a position, `most` of them at the most, over n positions."""
    return float(sum(min(most, i // block) for i in range(n)))


def triangle(n: float) -> float:
    """Pairs j <= i among n positions."""
    return n * (n + 1) / 2


def window_pairs(n: float, window: float) -> float:
    """Pairs i - window < j <= i among n positions."""
    window = min(window, n)
    return triangle(window) + (n - window) * window


def strided_pairs(n: int, stride: int) -> float:
    """Pairs j <= i among n positions with a distance that is a multiple of the stride."""
    rows, longer = divmod(n, stride)
    return longer * triangle(rows + 1) + (stride - longer) * triangle(rows)


def fixed_pairs(n: int, block: int, summary: int) -> float:
    """Pairs j <= i among n positions in one block, or with j among the `summary` columns of an earlier block."""
    blocks, rest = divmod(n, block)
    return blocks * triangle(block) + triangle(rest) + summary * (block * triangle(blocks - 1) + rest * blocks)
