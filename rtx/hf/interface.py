"""The attention function that transformers calls: `register`, `configure`, `fit`.

The options lie in the configuration of the model (`config.rtx`, a dictionary), so that
`save_pretrained` keeps them. The patterns of a layer are made in its first call, and lie beside the
module, not in its state: weights are saved and loaded as without rtx.

Shapes: B sequences, H query heads, G key-value heads, Q queries, K keys so far, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from rtx.hf.choice import Choice
from rtx.hf.far_keys import FarKeys
from rtx.hf.rotary import turned_back, watch

IMPLEMENTATION = "rtx"
"""The name of the attention implementation."""
LAYER = "rtx_far_keys"
"""The attribute of an attention module that has its `FarKeys`."""
QUERIES = 256
"""Queries whose logits are in memory at once."""


class Fitting:
    """How often centroids move in the calls of attention; 0: they do not."""

    steps = 0


fitting = Fitting()


def register() -> None:
    """Add `rtx` to the attention implementations of transformers."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    # Without a function for masks, transformers would pass none, and padding would be read.
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def configure(model: PreTrainedModel, **options: Any) -> Choice:
    """Let the heads of a model read by a selection, and return its options with their defaults.

    Centroids that were fitted before are dropped.

    Args:
        options: those of `Choice`.

    Raises:
        ValueError: an option out of its range, or a model whose attention cannot be replaced.
    """
    choice = Choice(**options)
    register()
    model.set_attn_implementation(IMPLEMENTATION)
    # transformers has no public name for what it took.
    if model.config._attn_implementation != IMPLEMENTATION:
        raise ValueError(f"{type(model).__name__}: its attention cannot be replaced")
    model.config.get_text_config().rtx = asdict(choice)
    for module in model.modules():
        if hasattr(module, LAYER):
            delattr(module, LAYER)
    if choice.rotary == "before":
        watch(model)
    return choice


@torch.no_grad()
def fit(model: PreTrainedModel, tokens_BN: Tensor, steps: int = 10) -> None:
    """Fit the centroids of all layers to sequences of tokens, with dense attention.

    Selections without centroids need no fit.

    Args:
        tokens_BN: tokens of the model, `[B, N]`, without padding.
        steps: how often the centroids move.
    """
    with centroids_fitted(steps):
        model.base_model(tokens_BN, use_cache=False)


@contextmanager
def centroids_fitted(steps: int) -> Iterator[None]:
    """Return a context in which calls of attention fit the centroids of their layers."""
    fitting.steps = steps
    try:
        yield
    finally:
        fitting.steps = 0


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the outputs `[B, Q, H, D]` of a layer, for transformers.

    Args:
        query, key, value: `[B, H, Q, D]` and `[B, G, K, D]`; the queries are the last Q positions.
        attention_mask: None, or a mask `[B, 1, Q, K]`, bool.
        options: what else the model passes.

    Raises:
        ValueError: padding, several sequences in one row, or options that change attention
            otherwise.
    """
    choice = choice_of(module)
    check_options(module, options)
    sliding_window = options.get("sliding_window")
    check_mask(attention_mask, query, key, sliding_window)
    check_cache(module, query, key, sliding_window)
    is_dense = getattr(module, "layer_idx", 0) < choice.dense_layers
    mask_BHQK = None
    if not is_dense:
        mask_BHQK = chosen_mask(module, choice, query, key)
    mask_BHQK = joined_masks(mask_BHQK, attention_mask)
    out_BHQD = masked_attention(query, key, value, mask_BHQK, scaling, dropout)
    return out_BHQD.transpose(1, 2).contiguous(), None


def choice_of(module: nn.Module) -> Choice:
    """Return the options in the configuration of a module's model, or the defaults."""
    config: Any = module.config
    return Choice(**getattr(config, "rtx", {}))


def chosen_mask(
    module: nn.Module,
    choice: Choice,
    query: Tensor,
    key: Tensor,
) -> Tensor | None:
    """Return which keys the heads of a layer read, `[B, H, Q, K]`; None while it is fitted."""
    far_keys = far_keys_of(module, choice, query, key)
    query = query.detach()
    key = key.detach()
    if choice.rotary == "before":
        query, key = turned_back(module, query, key)
    if fitting.steps:
        far_keys.fit(query, key, fitting.steps)
        return None
    return far_keys.mask(query, key)


def far_keys_of(module: nn.Module, choice: Choice, query: Tensor, key: Tensor) -> FarKeys:
    """Return the patterns of a layer, made in its first call."""
    far_keys = getattr(module, LAYER, None)
    if far_keys is None:
        layer = getattr(module, "layer_idx", 0)
        far_keys = FarKeys(choice, query.shape[1], key.shape[1], key.shape[3], layer)
        setattr(module, LAYER, far_keys)
    return far_keys


def check_options(module: nn.Module, options: dict[str, Any]) -> None:
    """Raise ValueError for options of a model that change its logits in a way rtx has not."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            kind = type(module).__name__
            raise ValueError(f"{kind}: its attention has {name}, which rtx does not compute")


def check_mask(
    mask_B1QK: Tensor | None,
    query: Tensor,
    key: Tensor,
    sliding_window: int | None,
) -> None:
    """Raise ValueError for a mask that is neither causal nor that of a sliding window."""
    if mask_B1QK is None:
        return
    visible_QK = causal_mask(query.shape[2], key.shape[2], query.device)
    if sliding_window is not None:
        visible_QK = visible_QK.triu(key.shape[2] - query.shape[2] - sliding_window + 1)
    is_bool = mask_B1QK.dtype == torch.bool
    if not is_bool or not bool((mask_B1QK == visible_QK).all()):
        rule = "takes sequences of equal length, one in each row"
        raise ValueError(f"rtx attention {rule}; without padding and without a static cache")


def check_cache(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    sliding_window: int | None,
) -> None:
    """Raise ValueError if the cache of a sliding window is full.

    It then drops the earliest key at each step, and keys are no longer at their positions.
    """
    cached = key.shape[2] - query.shape[2]
    if sliding_window is not None and cached == sliding_window - 1 > 0:
        kind = type(module).__name__
        problem = f"the cache of its sliding window of {sliding_window} drops keys"
        raise ValueError(f"{kind}: {problem}, which a selection needs; pass use_cache=False")


def joined_masks(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return which keys two masks allow; None allows all."""
    if mask is None:
        return other
    if other is None:
        return mask
    return mask & other


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return which keys are not after the last Q positions, `[Q, K]`."""
    position_K = torch.arange(keys, device=device)
    position_Q1 = position_K[keys - queries :, None]
    return position_K <= position_Q1


def masked_attention(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the outputs of causal attention, `[B, H, Q, D]`, for some queries at a time.

    Args:
        mask: which keys the queries read, in a shape that broadcasts to `[B, H, Q, K]`; None: all
            up to their positions.
    """
    Q = q_BHQD.shape[2]
    K = k_BGKD.shape[2]
    group_size = q_BHQD.shape[1] // k_BGKD.shape[1]
    k_BHKD = k_BGKD.repeat_interleave(group_size, dim=1)
    v_BHKD = v_BGKD.repeat_interleave(group_size, dim=1)
    if mask is None and Q == K:
        return F.scaled_dot_product_attention(
            q_BHQD,
            k_BHKD,
            v_BHKD,
            is_causal=True,
            dropout_p=dropout,
            scale=scaling,
        )
    if mask is None:
        mask = causal_mask(Q, K, q_BHQD.device)[None, None]
    outs = []
    for first in range(0, Q, QUERIES):
        last = min(first + QUERIES, Q)
        # No query of the piece reads a later key.
        keys = K - Q + last
        out_BHQD = F.scaled_dot_product_attention(
            q_BHQD[:, :, first:last],
            k_BHKD[:, :, :keys],
            v_BHKD[:, :, :keys],
            attn_mask=mask[..., first:last, :keys],
            dropout_p=dropout,
            scale=scaling,
        )
        outs.append(out_BHQD)
    return torch.cat(outs, dim=2)
