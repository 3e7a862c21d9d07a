"""Coverage: what share of full heads' attention each selection keeps at equal keys, without training a model for it.

Of keys at least `back` positions back a pattern chooses by its own rule, over queries that stand so much earlier: all
it sees is that far back. Shapes: K sequences, N positions, P of them looked at, H heads, S selections, Z sizes.
"""

from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rtx.analysis.attention_weights import groups_of, layer_inputs, weight_blocks
from rtx.analysis.loss_by_position import estimate
from rtx.attention.centroids import after_step
from rtx.attention.pattern import Pattern
from rtx.attention.probed import Probed
from rtx.attention.reads import QueriesKeys
from rtx.attention.routing import Routing
from rtx.model.heads import make_pattern
from rtx.model.transformer import Transformer
from rtx.settings.derived import ROUTED, full_group
from rtx.settings.names import SELECTIONS
from rtx.settings.schema import Config, RoutingConfig, with_values

NAMES = (*(name for name in SELECTIONS if name != "indexer"), "drawn keys", "next keys")
"""Selections but the one that gradients train; keys drawn one by one; the last keys, as a longer window reads them."""


def selections(config: Config, layer: int, sizes: list[int], block: int) -> nn.ModuleList:
    """Return S * Z patterns of as many heads as are full in a layer, or none; their clusters are yet to be fitted."""
    (_, heads), made = full_group(config, layer), nn.ModuleList()
    for name, size in product(NAMES, sizes if heads else ()):
        kind, width = ("blocks_random", 1) if name == "drawn keys" else (name, min(block, size))
        routing = RoutingConfig(
            selection=kind, keys="separate", window=size, block=width, decay=0.9
        )  # tens of steps
        asked = with_values(config, {"routing": routing, "model.window": size})
        made.append(
            pattern := make_pattern("local" if name == "next keys" else ROUTED, heads, asked, layer)
        )
        if isinstance(pattern, Routing):
            pattern.centroids.seed_with_next = True
    return made


@torch.no_grad()
def fit(config: Config, model: Transformer, made: Any, ids_BN: Tensor) -> None:
    """Move centroids and thresholds of the `selections` of every layer as training does, by what full heads see."""
    for layer, (patterns, (attention, x_BNE)) in enumerate(
        zip(made.train(), layer_inputs(model, ids_BN), strict=True)
    ):
        for pattern in (each for each in patterns if isinstance(each, Routing | Probed)):
            number, _ = full_group(config, layer)
            group = attention.head_groups()[number]
            q_BHND, k_BHND, _ = attention.project(x_BNE)[number]
            q_BHND, k_BHND, _ = group.queries_and_keys(q_BHND, k_BHND)
            # Probed keys are those that the logits read.
            rotary = group.rotate if isinstance(pattern, Probed) else None
            qk = pattern.inputs(q_BHND, k_BHND, rotary)
            pattern.observe(qk, False)
    after_step(made)


@torch.no_grad()
def measure(
    config: Config, model: Transformer, made: Any, ids_1N: Tensor, back: int
) -> list[list[tuple[float, ...]]]:
    """Return what `selections` keep, at up to 256 positions, by layers with full heads, `[., S * Z, 3]`; see `kept`."""
    found, N = [], ids_1N.shape[1]
    at_P = torch.linspace(back, N - 1, min(256, N - back), device=ids_1N.device).round().long()
    for layer, (patterns, (attention, x_1NE)) in enumerate(
        zip(made.eval(), layer_inputs(model, ids_1N), strict=True)
    ):
        if len(patterns):
            number, _ = full_group(config, layer)
            group = attention.head_groups()[number]
            heads = groups_of(attention, x_1NE)[group.name]
            weight_HPN = torch.cat(list(weight_blocks(heads, at_P)), dim=-1)
            q, k, *_ = heads[1]
            found.append(
                [kept(p, p.inputs(q, k, group.rotate), weight_HPN, at_P, back) for p in patterns]
            )
    return found


def kept(
    pattern: Pattern, qk: QueriesKeys, weight_HPN: Tensor, at_P: Tensor, back: int
) -> tuple[float, ...]:
    """Return what a query puts on keys at least `back` back, what of it a selection of these keeps, and how many."""
    N = weight_HPN.shape[-1] - back
    queries, keys = (qk.q_BHND, qk.rotated_q_BHND), (qk.k_BHND, qk.rotated_k_BHND)
    (q, turned_q), (k, turned_k) = (x[:, :, back:] for x in queries), (x[:, :, :N] for x in keys)
    moved = QueriesKeys(q, k, turned_q, turned_k)
    alike = moved._replace(
        rotated_q_BHND=torch.zeros_like(moved.rotated_q_BHND)
    )  # what is read then has equal weights
    heads = pattern, alike, pattern.reads(moved, False), None
    read_HPN = torch.cat(list(weight_blocks(heads, at_P - back)), dim=-1) > 0
    far_HPN = weight_HPN[..., :N] * (torch.arange(N, device=at_P.device) <= at_P[:, None] - back)
    return tuple(float(x.double().sum(-1).mean()) for x in (far_HPN, far_HPN * read_HPN, read_HPN))


def at_keys(found_KZ3: np.ndarray, keys: float) -> dict[str, Any]:
    """Return the share kept with so many keys, its standard error, and that of all weight; linear between sizes."""
    found_KZ3 = found_KZ3[:, found_KZ3[..., 2].mean(0).argsort()]
    keys_Z = [0.0, *found_KZ3[..., 2].mean(0)]
    kept_K = np.array([np.interp(keys, keys_Z, [0.0, *kept_Z]) for kept_Z in found_KZ3[..., 1]])
    share, error = estimate(kept_K / found_KZ3[:, 0, 0])
    return {
        "keys": min(keys, keys_Z[-1]),
        "share": share,
        "error": error,
        "of all": float(kept_K.mean()),
    }
