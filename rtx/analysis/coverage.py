"""Coverage: the share of full heads' attention that each selection retains at equal keys.

No model is trained for it. Only keys at least `back` positions back count: a pattern chooses among
them by its own rule, for queries that are moved so much earlier, and so sees nothing else.

Shapes: K sequences, N positions, P of them measured, H heads, S selections, Z sizes, D head size.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rtx.analysis.attention_weights import Heads, groups_of, layer_inputs, weight_blocks
from rtx.analysis.loss_by_position import estimate
from rtx.attention.centroids import after_step
from rtx.attention.clusters import Routing
from rtx.attention.grouped import expanded
from rtx.attention.pattern import Pattern
from rtx.attention.probed import Probed
from rtx.attention.reads import QueriesKeys
from rtx.model.heads import HeadGroup, make_pattern
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer
from rtx.settings.derived import ROUTED, full_group
from rtx.settings.names import SELECTIONS
from rtx.settings.schema import Config, RoutingConfig, with_values

DRAWN = "drawn keys"
"""Keys that are drawn one by one."""
NEXT = "next keys"
"""The last keys before those left out, as a longer window reads them."""
NAMES = (*(name for name in SELECTIONS if name != "indexer"), DRAWN, NEXT)
"""All selections but the indexer, which gradients train."""

DECAY = 0.9
"""Of centroids, which are fitted in tens of steps."""
MAX_POSITIONS = 256
"""The most positions that are measured in a sequence."""


def selections(config: Config, layer: int, sizes: list[int], block: int) -> nn.ModuleList:
    """Return S * Z patterns with as many heads as are full in a layer, or none if none is.

    Their clusters are not fitted yet.
    """
    patterns = nn.ModuleList()
    _, heads = full_group(config, layer)
    if not heads:
        return patterns
    for name in NAMES:
        for size in sizes:
            patterns.append(selection(name, heads, config, layer, size, block))
    return patterns


def selection(name: str, heads: int, config: Config, layer: int, size: int, block: int) -> Pattern:
    """Return heads of one of `NAMES`.

    Args:
        size: keys that a query reads.
        block: keys of a block, at most.
    """
    kind = name
    block = min(block, size)
    if name == DRAWN:
        # Random blocks of one key each.
        kind = "blocks_random"
        block = 1
    if name == NEXT:
        with_window = with_values(config, {"model.window": size})
        return make_pattern("local", heads, with_window, layer)
    routing = RoutingConfig(
        selection=kind,
        keys="separate",
        window=size,
        block=block,
        decay=DECAY,
    )
    with_routing = with_values(config, {"routing": routing})
    pattern = make_pattern(ROUTED, heads, with_routing, layer)
    if isinstance(pattern, Routing):
        pattern.centroids.seed_with_next = True
    return pattern


class FullHeads(NamedTuple):
    """The full heads of a layer, with the patterns that are compared with them."""

    attention: MultiheadAttention
    number: int
    """Of their group in the layer."""
    x_BNE: Tensor
    """The input of the attention."""
    patterns: nn.ModuleList

    @property
    def group(self) -> HeadGroup:
        """Their group."""
        return self.attention.head_groups()[self.number]


def full_heads(
    config: Config,
    model: Transformer,
    patterns: nn.ModuleList,
    tokens_BN: Tensor,
) -> Iterator[FullHeads]:
    """Yield the full heads of each layer that has some.

    Args:
        patterns: `selections` of every layer.
    """
    layers = zip(patterns, layer_inputs(model, tokens_BN), strict=True)
    for layer, (layer_patterns, (attention, x_BNE)) in enumerate(layers):
        assert isinstance(layer_patterns, nn.ModuleList)
        if len(layer_patterns):
            number, _ = full_group(config, layer)
            yield FullHeads(attention, number, x_BNE, layer_patterns)


@torch.no_grad()
def fit(config: Config, model: Transformer, patterns: nn.ModuleList, tokens_BN: Tensor) -> None:
    """Move centroids and thresholds as a training step does, by the vectors of full heads.

    Args:
        patterns: `selections` of every layer.
    """
    for full in full_heads(config, model, patterns.train(), tokens_BN):
        projections = full.attention.project(full.x_BNE)
        q_BHND, k_BHND, _ = projections[full.number]
        q_BHND, k_BHND, _ = full.group.queries_and_keys(q_BHND, k_BHND)
        assert k_BHND is not None
        k_BHND = expanded(k_BHND, full.group.queries_of_key_head)
        for pattern in full.patterns:
            if isinstance(pattern, Routing):
                qk = pattern.inputs(q_BHND, k_BHND, None)
                pattern.observe(qk, False)
            if isinstance(pattern, Probed):
                # Probed keys are those that the logits read.
                qk = pattern.inputs(q_BHND, k_BHND, full.group.rotate)
                pattern.observe(qk, False)
    after_step(patterns)


Retained = tuple[float, float, float]
"""Means over queries: their weight on keys that are far enough back, the part of it that a
selection of these keys retains, and the number of keys that it reads."""


@torch.no_grad()
def measure(
    config: Config,
    model: Transformer,
    patterns: nn.ModuleList,
    tokens_1N: Tensor,
    back: int,
) -> list[list[Retained]]:
    """Return what `selections` retain, for each layer with full heads, `[., S * Z, 3]`."""
    position_P = measured_positions(tokens_1N, back)
    layers = []
    for full in full_heads(config, model, patterns.eval(), tokens_1N):
        groups = groups_of(full.attention, full.x_BNE)
        heads = groups[full.group.name]
        weight_HPN = weights_on_keys(heads, position_P)
        of_layer = []
        for pattern in full.patterns:
            assert isinstance(pattern, Pattern)
            qk = pattern.inputs(heads.qk.q_BHND, heads.qk.k_BHND, full.group.rotate)
            of_pattern = retained(pattern, qk, weight_HPN, position_P, back)
            of_layer.append(of_pattern)
        layers.append(of_layer)
    return layers


def measured_positions(tokens_1N: Tensor, back: int) -> Tensor:
    """Return evenly spaced positions from `back` on, at most `MAX_POSITIONS`, `[P]`."""
    N = tokens_1N.shape[1]
    positions = min(MAX_POSITIONS, N - back)
    position_P = torch.linspace(
        back,
        N - 1,
        positions,
        device=tokens_1N.device,
    )
    return position_P.round().long()


def weights_on_keys(heads: Heads, position_P: Tensor) -> Tensor:
    """Return the weights of some positions on all keys, `[H, P, N]`."""
    blocks = list(weight_blocks(heads, position_P))
    return torch.cat(blocks, dim=-1)


def retained(
    pattern: Pattern,
    qk: QueriesKeys,
    weight_HPN: Tensor,
    position_P: Tensor,
    back: int,
) -> Retained:
    """Return what a pattern retains of the weights of full heads on keys at least `back` back."""
    moved = with_queries_moved(qk, back)
    keys = moved.k_BHND.shape[2]
    # Without queries every key that is read has the same weight.
    equal = moved._replace(rotated_q_BHND=torch.zeros_like(moved.rotated_q_BHND))
    parts = pattern.reads(moved, False)
    heads = Heads(pattern, equal, parts, relative=None)
    last_far_P = position_P - back
    is_read_HPN = weights_on_keys(heads, last_far_P) > 0
    key_N = torch.arange(keys, device=position_P.device)
    last_far_P1 = last_far_P[:, None]
    is_far_PN = key_N <= last_far_P1
    far_HPN = weight_HPN[..., :keys] * is_far_PN
    return (
        mean_over_queries(far_HPN),
        mean_over_queries(far_HPN * is_read_HPN),
        mean_over_queries(is_read_HPN),
    )


def with_queries_moved(qk: QueriesKeys, back: int) -> QueriesKeys:
    """Return the queries from position `back` on as if they were `back` positions earlier.

    The last keys, which no moved query reads, are left out.
    """
    keys = qk.k_BHND.shape[2] - back
    return QueriesKeys(
        qk.q_BHND[:, :, back:],
        qk.k_BHND[:, :, :keys],
        qk.rotated_q_BHND[:, :, back:],
        qk.rotated_k_BHND[:, :, :keys],
    )


def mean_over_queries(x_HPN: Tensor) -> float:
    """Return the mean over heads and positions of the sum over keys."""
    sum_HP = x_HPN.double().sum(-1)
    return float(sum_HP.mean())


def at_keys(retained_KZ3: np.ndarray, keys: float) -> dict[str, Any]:
    """Return the share of weight that a selection retains with this many keys.

    It is linear between sizes. `error` is its standard error over sequences, and `of all` the share
    of all weight, near keys included.

    Args:
        retained_KZ3: `Retained` of each sequence and size.
    """
    mean_keys_Z = retained_KZ3[..., 2].mean(0)
    order_Z = mean_keys_Z.argsort()
    retained_KZ3 = retained_KZ3[:, order_Z]
    mean_keys_Z = retained_KZ3[..., 2].mean(0)
    far_weight_K = retained_KZ3[:, 0, 0]
    retained_KZ = retained_KZ3[..., 1]
    # Without keys no weight is retained.
    keys_Z = [0.0, *mean_keys_Z]
    weights = []
    for retained_Z in retained_KZ:
        weights_Z = [0.0, *retained_Z]
        weight = np.interp(keys, keys_Z, weights_Z)
        weights.append(weight)
    weight_K = np.array(weights)
    share, error = estimate(weight_K / far_weight_K)
    return {
        "keys": min(keys, keys_Z[-1]),
        "share": share,
        "error": error,
        "of all": float(weight_K.mean()),
    }
