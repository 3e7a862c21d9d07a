"""What a run costs, from its configuration alone: parameters, floating-point operations and memory.

A multiplication and an addition count as two operations. Attention is counted by the pairs of positions that the
pattern reads, not by what a kernel computes and throws away.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from rtx.attention.chunked import MIN_ROWS
from rtx.attention.products import trusted
from rtx.attention.weights import MOST_KEYS
from rtx.config import Config, hash_buckets
from rtx.model.likelihood import MAX_LOGITS
from rtx.model.patterns import ROUTED, layer_patterns
from rtx.model.transformer import Transformer


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
    """Scores of every centroid for every position."""
    full_attention: float
    """What `attention` would be if every head read everything before it."""

    @property
    def forward(self) -> float:
        """All operations of one sequence, forward."""
        return self.dense + self.attention + self.selection

    def step(self, config: Config) -> float:
        """Operations of one optimizer step: forward, twice that backward, and once more with model.recompute."""
        passes = 4 if config.model.recompute else 3
        return config.trainer.batch_size * (passes * (self.dense + self.attention) + self.selection)


def cost(config: Config, vocabulary: int) -> Cost:
    """Return the cost of a resolved configuration; no weight is allocated."""
    with torch.device("meta"):
        model = Transformer(config, vocabulary)
    N, layers, hidden = config.data.length, config.model.layers, config.model.hidden
    size = hidden // config.model.heads
    tables = {id(model.embedding.table_VS), id(model.output_VS), id(model.output_bias_V)}
    embedding = sum(p.numel() for p in model.parameters() if id(p) in tables)
    matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    groups = [layer_patterns(config, layer) for layer in range(layers)]
    return Cost(
        parameters=model.count_parameters(),
        embedding_parameters=embedding,
        dense=2.0 * N * (matrices + model.output_VS.numel()),
        attention=sum(4.0 * size * count * pairs(name, config) for layer in groups for name, count in layer.items()),
        selection=sum(count * selection(name, config) for layer in groups for name, count in layer.items()),
        full_attention=4.0 * size * config.model.heads * layers * triangle(N),
    )


def pairs(name: str, config: Config) -> float:
    """Return how many pairs of positions a head of a group reads in one sequence (for causal selection, on average)."""
    N = config.data.length
    if name == ROUTED:
        clusters, window = config.routing.clusters or 0, config.routing.window
        if config.routing.selection == "nearest":  # evenly filled clusters
            return clusters * window_pairs(N / clusters, window)
        return clusters * triangle(min(window, N))
    if name == "lsh":
        return config.model.hash_rounds * hashed_pairs(config)
    if name == "strided":
        return strided_pairs(N, config.model.stride)
    if name == "fixed":
        return fixed_pairs(N, config.model.stride, config.model.summary)
    return triangle(N) if name == "full" else window_pairs(N, config.model.window)


def selection(name: str, config: Config) -> float:
    """Return the operations with which a head of a group chooses what to read in one sequence."""
    if name == "lsh":  # one product for a bucket and its opposite
        buckets = config.model.hash_rounds * hash_buckets(config)
        return buckets * config.model.hidden / config.model.heads * config.data.length
    if name != ROUTED or config.routing.selection == "random":
        return 0.0
    size, clusters = config.model.hidden / config.model.heads, config.routing.clusters or 0
    products = {"shared": clusters, "separate": 2 * clusters, "projected": clusters + size}[config.routing.keys]
    return 2.0 * size * config.data.length * products


def hashed_pairs(config: Config) -> float:
    """Return the pairs that a hash round shows, where the buckets are evenly filled and no pair is shown before."""
    buckets = hash_buckets(config)
    return buckets * window_pairs(config.data.length / buckets, config.model.window)


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


def memory(config: Config, total: Cost, micro_batch: int, vocabulary: int) -> dict[str, float]:
    """Return an estimate of one device's memory in bytes: weights, gradients, optimizer state, activations, logits."""
    wide = 8 if config.hardware.precision == "fp64" else 4
    narrow = 2 if config.hardware.precision == "bf16" else wide
    moments = 0.01 if config.optimizer.name == "adafactor" else 2.0
    rows = micro_batch * config.data.length
    per_layer = [
        narrow * activations(config, layer) + LISTED * listed_pairs(config, layer)
        for layer in range(config.model.layers)
    ]
    # With recomputation a block keeps its input, and one block at a time is whole.
    inputs = narrow * len(per_layer) * config.model.hidden
    kept = inputs + max(per_layer) if config.model.recompute else sum(per_layer)
    return {
        "weights": float(wide * total.parameters),
        "gradients": float(wide * total.parameters),
        "optimizer": wide * moments * total.parameters,
        "activations": float(rows * kept),
        "logits": 3.0 * wide * min(rows * vocabulary, MAX_LOGITS),
    }


def activations(config: Config, layer: int) -> float:
    """Return how many values one block keeps for the backward pass, per position.

    Attention keeps queries, keys and values, whatever the dropout and Shaw's terms, and torch's kernel its outputs:
    weights are worked out again.
    """
    model = config.model
    hidden, size = model.hidden, model.hidden // model.heads
    groups = layer_patterns(config, layer)
    routed = groups.get(ROUTED, 0)
    base = model.heads - routed
    kept = sum(count for name, count in groups.items() if name != ROUTED and not in_tiles(name, config))
    rotated = 1 if model.positions == "rotary" else 0
    dropped = sum(rate > 0 for rate in (model.dropout, model.dropout))
    own_keys = 1 if config.routing.keys != "shared" else 0
    # Clusters hold copies: a position in two of them is there twice.
    copies = (4 - in_tiles(ROUTED, config) + 3 * own_keys) * clusters_of_a_position(config)
    attention = size * (base * (5 + 2 * rotated) + kept + routed * (4 + rotated + own_keys * rotated + copies))
    inner = model.ffn_hidden * {"gelu": 2, "relu": 1, "geglu": 4}[model.ffn]
    inner += model.ffn_hidden if model.ffn_dropout else 0
    return (4 + dropped) * hidden + hidden + attention + inner


def in_tiles(name: str, config: Config) -> bool:
    """Tell whether a group's attention will be worked out in tiles (`rtx.attention.chunked`), which keep no outputs.

    As `rtx.attention.weights.worked_in_tiles` decides for tensors; groups without a name here are taken to keep theirs.
    """
    wish, keys = config.hardware, {"full": config.data.length, "local": config.model.window}
    keys[ROUTED] = config.routing.window
    if name not in keys or wish.name == "gpu" or (wish.name != "cpu" and torch.cuda.device_count()):
        return False
    usual = MIN_ROWS <= keys[name] <= MOST_KEYS
    return config.model.attention_dropout > 0 or (wish.precision == "fp32" and usual and trusted())


def clusters_of_a_position(config: Config) -> float:
    """Return how many clusters a position is in, on average."""
    if config.routing.selection == "nearest":
        return 1.0
    return (config.routing.clusters or 0) * min(1.0, config.routing.window / config.data.length)


LISTED = 16
"""Bytes of a listed pair: two row numbers."""


def listed_pairs(config: Config, layer: int) -> float:
    """Return the pairs of one block, per position, that Shaw's terms of routing heads list: members of a cluster that
    are near enough for a row of their own.

    The members are taken to lie evenly: W in N positions, and W / 2 of them before a member on average.
    """
    model, routing = config.model, config.routing
    if model.positions != "shaw" or routing.slot_distance:
        return 0.0
    near = min(routing.window / 2, model.max_distance * routing.window / config.data.length)
    return layer_patterns(config, layer).get(ROUTED, 0) * near


def full_attention_twin(config: Config) -> Config:
    """Return the same configuration with full attention in every head."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, base="full"),
        routing=dataclasses.replace(config.routing, heads=0, layers=0),
    )
