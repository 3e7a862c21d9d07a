"""What a run costs, from its configuration alone: parameters, and operations (multiplications and additions apart).

Attention is counted by the pairs of positions that patterns read, not by what a kernel computes and throws away.
"""

from dataclasses import dataclass

import numpy as np
import torch

from rtx.model.transformer import Transformer
from rtx.settings.derived import ROUTED, hash_buckets, layer_patterns, memory_slots
from rtx.settings.schema import Config

INDEXER_UNITS = 16  # of a head's queries and keys by which selection=indexer chooses


@dataclass(frozen=True)
class Cost:
    """The cost of a configuration; operations are for one sequence, forward only."""

    parameters: int
    embedding_parameters: int
    dense: float  # matrix products with weights
    attention: float  # logits and weighted sums of the pairs that are read
    selection: float  # scores of centroids, blocks or keys, as heads choose what to read (without an indexer's loss)
    full_attention: float  # what `attention` would be if every head read everything before it

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
    N, layers, size = (
        config.data.length,
        config.model.layers,
        config.model.hidden // config.model.heads,
    )
    if (softmax := model.softmax) is None:
        outside = [model.embedding.table_VS, model.output_VS, model.output_bias_V]
        output = model.output_VS
    else:  # as if no word were of a rarer band
        outside = [*model.embedding.bands.parameters(), *softmax.parameters()]  # type: ignore[union-attr]
        output = softmax.bands.tables[0]
    tables = {id(parameter) for parameter in outside}
    matrices = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)
    )
    products = (
        6.0 if config.model.positions == "xl" else 4.0
    )  # with keys, with keys of distances, with values
    again = sum(block.attention.qkv.weight.numel() for block in model.blocks)  # type: ignore[union-attr,operator,misc]
    groups = [group for layer in range(layers) for group in layer_patterns(config, layer).items()]
    heads = {name: head_cost(name, config) for name, _ in groups}
    return Cost(
        parameters=model.count_parameters(),
        embedding_parameters=sum(p.numel() for p in model.parameters() if id(p) in tables),
        dense=2.0 * (N * (matrices + output.numel()) + memory_slots(config.model) * again),
        attention=sum(products * size * count * heads[name][0] for name, count in groups),
        selection=sum(count * heads[name][1] for name, count in groups),
        full_attention=4.0 * size * config.model.heads * layers * triangle(N),
    )


def head_cost(name: str, config: Config) -> tuple[float, float]:
    """Return the pairs that a head of a group reads in one sequence, and the operations with which it chooses them.

    Clusters and buckets are taken as evenly filled, and no pair as shown by two rounds of hashing.
    """
    N, model, routing, size = (
        config.data.length,
        config.model,
        config.routing,
        config.model.hidden / config.model.heads,
    )
    if name == "lsh":  # one product for a bucket and its opposite
        buckets = model.hash_rounds * hash_buckets(config)
        return buckets * window_pairs(N / hash_buckets(config), model.window), buckets * size * N
    if name == "strided":
        return strided_pairs(N, model.stride), 0.0
    if name in (
        "fixed",
        "fixed_block",
        "fixed_summary",
    ):  # of summary columns those of earlier blocks
        block = 0.0 if name != "fixed_summary" else fixed_pairs(N, model.stride, 0)
        return fixed_pairs(N, model.stride, model.summary * (name != "fixed_block")) - block, 0.0
    if name == "recurrent":
        return N * memory_slots(model) + (0 if model.same_length else triangle(N)), 0.0
    if name != ROUTED:
        return triangle(N) if name == "full" else window_pairs(N, model.window), 0.0
    if routing.selection == "exact":
        return window_pairs(N, routing.window), 2 * size * triangle(N)
    if routing.selection == "indexer":
        return window_pairs(N, routing.window), 2 * INDEXER_UNITS * (triangle(N) + 2 * size * N)
    if routing.selection in ("blocks", "blocks_random"):
        finished = finished_blocks(N, routing.block, N)
        read = routing.block * finished_blocks(N, routing.block, routing.window // routing.block)
        read += finished if routing.compressed else 0  # each as one key, its mean
        choice = 2 * size * finished if routing.selection == "blocks" else 0.0
        return fixed_pairs(N, routing.block, 0) + read, choice
    C = routing.clusters or 0
    if (
        routing.selection == "probed"
    ):  # of clusters of equal size; each key's cluster, each query's clusters
        probed = window_pairs(N, routing.candidates or routing.window)
        choice = 2 * size * (2 * N * C + (probed if routing.candidates else 0))
        return window_pairs(N, routing.window), choice
    read = C * (
        window_pairs(N / C, routing.window)
        if routing.selection == "nearest"
        else triangle(min(routing.window, N))
    )
    vectors = {"shared": C, "separate": 2 * C, "tied": 2 * C, "projected": C + size}[routing.keys]
    return read, 0.0 if routing.selection == "random" else 2 * size * N * vectors


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
    """Pairs j <= i among n positions in one block, or with j among the `summary` columns of an earlier block."""
    i = np.arange(n)
    return float((i % block + 1 + i // block * summary).sum())


def finished_blocks(n: int, block: int, most: int) -> float:
    """Blocks that end before a position, `most` of them at the most, over n positions."""
    return float((np.arange(n) // block).clip(max=most).sum())
