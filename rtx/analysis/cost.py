"""What a run costs, from its configuration alone: parameters, and operations.

Multiplications and additions count as one operation each. Attention is counted by the pairs of
positions that patterns read, not by what a kernel computes and discards.

Letters: N positions, C clusters.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from rtx.attention import indexer
from rtx.model.heads import head_size
from rtx.model.transformer import Transformer
from rtx.settings.derived import (
    ROUTED,
    hash_buckets,
    layer_patterns,
    memory_slots,
    queries_of_key_head,
)
from rtx.settings.schema import Config


@dataclass(frozen=True)
class Cost:
    """The cost of a configuration; operations are for one sequence, forward only."""

    parameters: int
    embedding_parameters: int
    matrix_parameters: int
    """Weights of the matrices in the blocks."""
    dense: float
    """Operations of matrix products with weights."""
    attention: float
    """Operations of logits and weighted sums of the pairs that are read."""
    selection: float
    """Operations of scores of centroids, blocks or keys, by which heads choose what to read; an
    indexer's loss is left out."""
    full_attention: float
    """What `attention` would be if every head read everything before it."""

    @property
    def forward(self) -> float:
        """All operations of one sequence, forward."""
        return self.dense + self.attention + self.selection

    def step(self, config: Config) -> float:
        """Operations of one optimizer step; a selection is not computed backward."""
        passes = passes_of_step(config)
        each_sequence = passes * (self.dense + self.attention) + self.selection
        return config.trainer.batch_size * each_sequence


def passes_of_step(config: Config) -> int:
    """Return how many forward passes have the operations of a step.

    A backward pass counts twice, and recomputation once.
    """
    if config.model.recompute is True:
        return 4
    return 3


def cost(config: Config, vocabulary: int) -> Cost:
    """Return the cost of a resolved configuration; no weight is allocated."""
    with torch.device("meta"):
        model = Transformer(config, vocabulary)
    attention = 0.0
    selection = 0.0
    operations_of_pair = products_of_pair(config) * 2.0 * head_size(config)
    for layer in range(config.model.layers):
        for name, heads in layer_patterns(config, layer).items():
            head = head_cost(name, config)
            attention += operations_of_pair * heads * head.pairs
            choosing = heads
            if name == ROUTED and config.routing.group == "shared":
                choosing = heads // queries_of_key_head(config.model)
            selection += choosing * head.choice
    all_heads = config.model.heads * config.model.layers
    N = config.data.length
    return Cost(
        parameters=model.count_parameters(),
        embedding_parameters=sum(parameter.numel() for parameter in vocabulary_parameters(model)),
        matrix_parameters=matrix_parameters(model),
        dense=dense_operations(model, config),
        attention=attention,
        selection=selection,
        full_attention=4.0 * head_size(config) * all_heads * triangle(N),
    )


def matrix_parameters(model: Transformer) -> int:
    """Return the number of weights of the linear layers in the blocks."""
    weights = 0
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            weights += module.weight.numel()
    return weights


def products_of_pair(config: Config) -> int:
    """Return the products of D numbers for each pair: with its key, its value, and its distance."""
    if config.model.positions == "xl":
        return 3
    return 2


def vocabulary_parameters(model: Transformer) -> list[nn.Parameter]:
    """Return the parameters whose number depends on the vocabulary, each once."""
    if model.softmax is None:
        parameters = [model.embedding.table_VS, model.output_VS, model.output_bias_V]
    else:
        assert model.embedding.bands is not None
        parameters = [*model.embedding.bands.parameters(), *model.softmax.parameters()]
    return list({id(parameter): parameter for parameter in parameters}.values())


def dense_operations(model: Transformer, config: Config) -> float:
    """Return the operations of matrix products with weights.

    Of an adaptive softmax they are counted as if no token were of a rarer band.
    """
    weights = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weights += module.weight.numel()
    if model.softmax is None:
        weights += model.output_VS.numel()
    else:
        weights += model.softmax.bands.tables[0].numel()
    # A memory gets queries, keys and values again.
    projections = 0
    for attention in model.attentions():
        projections += attention.qkv.weight.numel()
    return 2.0 * (config.data.length * weights + memory_slots(config.model) * projections)


class HeadCost(NamedTuple):
    """The cost of one head in one sequence."""

    pairs: float
    """Pairs of positions that it reads."""
    choice: float = 0.0
    """Operations by which it chooses them."""


def head_cost(name: str, config: Config) -> HeadCost:
    """Return the cost of a head of a group.

    Clusters and buckets are taken as equally filled, and no pair as read in two rounds of hashing.
    """
    if name == ROUTED:
        return selection_cost(config)
    model = config.model
    N = config.data.length
    match name:
        case "full":
            return HeadCost(triangle(N))
        case "lsh":
            return hashing_cost(config)
        case "strided":
            return HeadCost(strided_pairs(N, model.stride))
        case "fixed":
            return HeadCost(fixed_pairs(N, model.stride, model.summary))
        case "fixed_block":
            return HeadCost(fixed_pairs(N, model.stride, 0))
        case "fixed_summary":
            # Its summary columns are those of earlier blocks.
            all_pairs = fixed_pairs(N, model.stride, model.summary)
            return HeadCost(all_pairs - fixed_pairs(N, model.stride, 0))
        case "recurrent":
            pairs = float(N * memory_slots(model))
            if not model.same_length:
                pairs += triangle(N)
            return HeadCost(pairs)
    return HeadCost(window_pairs(N, model.window))


def hashing_cost(config: Config) -> HeadCost:
    """Return the cost of a head of LSH attention: one product for a bucket and its opposite."""
    N = config.data.length
    size = config.model.hidden / config.model.heads
    buckets_of_round = hash_buckets(config)
    buckets = config.model.hash_rounds * buckets_of_round
    pairs = buckets * window_pairs(N / buckets_of_round, config.model.window)
    return HeadCost(pairs, buckets * size * N)


def selection_cost(config: Config) -> HeadCost:
    """Return the cost of a routing head."""
    routing = config.routing
    N = config.data.length
    size = config.model.hidden / config.model.heads
    match routing.selection:
        case "exact":
            return HeadCost(window_pairs(N, routing.window), 2 * size * triangle(N))
        case "indexer":
            # Scores of all pairs, and the matrices of its queries and keys.
            choice = 2 * indexer.WIDTH * (triangle(N) + 2 * size * N)
            return HeadCost(window_pairs(N, routing.window), choice)
        case "blocks" | "blocks_random":
            return block_cost(config)
        case "probed":
            return probed_cost(config)
    return cluster_cost(config)


def block_cost(config: Config) -> HeadCost:
    """Return the cost of a head that chooses among finished blocks, and reads its own so far."""
    routing = config.routing
    N = config.data.length
    size = config.model.hidden / config.model.heads
    finished = finished_blocks(N, routing.block, N)
    chosen = finished_blocks(N, routing.block, routing.window // routing.block)
    pairs = fixed_pairs(N, routing.block, 0) + routing.block * chosen
    if routing.compressed:
        # Each finished block is one more key, its mean.
        pairs += finished
    choice = 0.0
    if routing.selection == "blocks":
        choice = 2 * size * finished
    return HeadCost(pairs, choice)


def probed_cost(config: Config) -> HeadCost:
    """Return the cost of a head of probed clusters, which are taken as equally filled."""
    routing = config.routing
    N = config.data.length
    C = routing.clusters or 0
    size = config.model.hidden / config.model.heads
    # The cluster of each key, and the clusters of each query.
    choice = 2 * size * 2 * N * C
    if routing.candidates:
        choice += 2 * size * window_pairs(N, routing.candidates)
    return HeadCost(window_pairs(N, routing.window), choice)


def cluster_cost(config: Config) -> HeadCost:
    """Return the cost of a head whose queries and keys belong to clusters."""
    routing = config.routing
    N = config.data.length
    C = routing.clusters or 0
    size = config.model.hidden / config.model.heads
    pairs_of_cluster = triangle(min(routing.window, N))
    if routing.selection == "nearest":
        pairs_of_cluster = window_pairs(N / C, routing.window)
    choice = 0.0
    if routing.selection != "random":
        vectors = {"shared": C, "separate": 2 * C, "tied": 2 * C, "projected": C + size}
        choice = 2 * size * N * vectors[routing.keys]
    return HeadCost(C * pairs_of_cluster, choice)


def triangle(n: float) -> float:
    """Pairs j <= i among n positions."""
    return n * (n + 1) / 2


def window_pairs(n: float, window: float) -> float:
    """Pairs i - window < j <= i among n positions."""
    window = min(window, n)
    return triangle(window) + (n - window) * window


def strided_pairs(n: int, stride: int) -> float:
    """Pairs j <= i among n positions with a distance that is a multiple of the stride."""
    return float((np.arange(n) // stride + 1).sum())


def fixed_pairs(n: int, block: int, summary: int) -> float:
    """Pairs j <= i among n positions in one block, or with j in a summary column of an earlier one.

    Args:
        summary: number of summary columns of a block.
    """
    i = np.arange(n)
    return float((i % block + 1 + i // block * summary).sum())


def finished_blocks(n: int, block: int, most: int) -> float:
    """Blocks that end before a position, at most `most` of them, summed over n positions."""
    return float((np.arange(n) // block).clip(max=most).sum())
