"""What follows from the values of a configuration: sizes, clusters, which heads a layer has."""

import math
from collections.abc import Mapping
from typing import Any

from rtx.settings.data_sets import SETS
from rtx.settings.schema import TEXTS, Config, DataConfig, ModelConfig, RoutingConfig

ROUTED = "routed"
"""The group of the heads that `routing` describes; other groups have the name of their pattern."""

ZETA = 2.0
"""The exponent of the frequencies of data=counting, as in RULER's task of frequent words."""


def question_length(data: DataConfig) -> int:
    """Tokens of all questions and answers of a long-context task."""
    if data.name == "needles":
        return data.queries * (1 + data.needle_values)
    if data.name == "tracking":
        return data.queries * 2
    return 1 + data.queries


def context_length(data: DataConfig) -> int:
    """Tokens of a long-context task in which its evidence may be."""
    return data.length - data.distance - question_length(data)


def counts_of_values(data: DataConfig) -> list[int]:
    """How often data=counting has each value, the most frequent first.

    The shares are those of a zeta distribution, of which filler has the first rank.
    """
    shares = [rank**-ZETA for rank in range(1, data.values + 2)]
    tokens = max(0, context_length(data))
    return [int(tokens * share / sum(shares)) for share in shares[1:]]


def image_side(data: DataConfig) -> int | None:
    """Height and width of a set's images: data.size, or fixed ones; None: unknown."""
    return data.size or SETS[data.name].side


def memory_slots(model: ModelConfig) -> int:
    """Positions before its segment that a layer reads: memory and compressed memory."""
    return model.memory + model.compressed


def embedding_width(model: ModelConfig) -> int:
    """Width of the embeddings that the first block widens, and that the output matrix reads."""
    if isinstance(model.embedding, int):
        return model.embedding
    return model.hidden


def sizes_of(text: str | None) -> tuple[int, ...]:
    """The numbers of model.axes or model.cutoffs, such as 32x32x3.

    Empty where the text is not whole numbers of at most nine digits joined by x.
    """
    parts = (text or "").split("x")
    if all(part.isdecimal() and len(part) < 10 for part in parts):
        return tuple(map(int, parts))
    return ()


def hash_buckets(config: Config) -> int:
    """Buckets of a hash round: model.hash_buckets.

    Unset: the even number nearest to 2 N / model.window.
    """
    if config.model.hash_buckets is not None:
        return config.model.hash_buckets
    half = round(config.data.length / config.model.window)
    return max(2, 2 * half)


def reads_self(routing: RoutingConfig) -> bool:
    """Whether routing heads always read their own position: routing.attend_self.

    Unset: whether the key of a position differs from its query.
    """
    if routing.attend_self is not None:
        return routing.attend_self
    return routing.keys in ("separate", "projected") or routing.key_shift > 0


def queries_of_key_head(model: ModelConfig) -> int:
    """Query heads that share a head of keys and values: model.heads / model.kv_heads."""
    if model.kv_heads is None:
        return 1
    return model.heads // model.kv_heads


def clusters(config: Config) -> int:
    """Clusters C of a routing head: routing.clusters; unset: ceil(N / W)."""
    if config.routing.clusters is not None:
        return config.routing.clusters
    return math.ceil(config.data.length / config.routing.window)


def routes(config: Config) -> bool:
    """Whether any head routes."""
    return bool(config.routing.heads and config.routing.layers)


def spans(values: Mapping[str, Any]) -> tuple[int, int]:
    """Return length and stride of the windows by which a model is scored.

    `values` are those of a configuration by dotted keys. A model with a memory reads as many tokens
    before those that a window scores.
    """
    length = values["data.length"]
    stride = values["trainer.val_stride"] or length
    memory = values.get("model.memory") or 0
    rate = values.get("model.compression_rate") or 1
    memory += (values.get("model.compressed") or 0) * rate
    if memory:
        length = stride + memory
    return length, stride


def local_reach(config: Config) -> int | None:
    """Return how many units back stacked local heads read; None for data that is no text.

    It is layers times model.window, whatever the heads of this model are.
    """
    if config.data.name not in TEXTS:
        return None
    return config.model.layers * config.model.window


def layer_patterns(config: Config, layer: int) -> dict[str, int]:
    """Return the groups of a layer's heads, each with its number of heads, `ROUTED` last.

    Layer 0 is the lowest; routing layers are the topmost ones.
    """
    is_routing_layer = layer >= config.model.layers - config.routing.layers
    routed = config.routing.heads if is_routing_layer else 0
    patterns = config.model.base.split("+")
    share = (config.model.heads - routed) // len(patterns)
    groups = {}
    if share:
        groups = {name: share * patterns.count(name) for name in patterns}
    if routed:
        groups[ROUTED] = routed
    return groups


def full_group(config: Config, layer: int) -> tuple[int, int]:
    """Return the number of a layer's group that reads all of its prefix, and its heads.

    These are full heads, or routing heads with keys apart from the queries and one cluster that is
    as wide as the sequence, each with keys for itself. Without such a group the number of heads is
    0.
    """
    groups = layer_patterns(config, layer)
    routing = config.routing
    has_one_cluster = (
        routing.selection == "nearest"
        and clusters(config) == 1
        and routing.window >= config.data.length
    )
    name = "full"
    has_keys = routing.keys != "shared" and queries_of_key_head(config.model) == 1
    if has_one_cluster and has_keys and ROUTED in groups:
        name = ROUTED
    return [*groups, name].index(name), groups.get(name, 0)
