"""What selections cost in a pretrained model with unchanged weights: loss, and lost attention.

The attention of every layer is replaced (`rtx.hf`) by that of each choice in turn, and the model
scores the same windows of text.

Shapes: B windows, N positions (queries and keys), H query heads, G key-value heads, D head size, P
positions whose attention is measured, Y layers, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from rtx.analysis.pretrained.pairs import pairs_scored
from rtx.errors import RunFailed, UserError
from rtx.hf import Choice, FarKeys
from rtx.hf.interface import (
    causal_mask,
    check_mask,
    check_options,
    joined_masks,
    masked_attention,
)
from rtx.hf.rotary import turned_back, watch

NAME = "rtx_compared"
"""The name of the attention implementation during an analysis."""
MOST_POSITIONS = 64
"""The most positions of a window whose attention is measured."""
CHECKED_TOKENS = 24
"""Tokens of the pass that checks a model."""
CAUSAL_TOLERANCE = 1e-4
"""How far logits may move with later tokens, relative to the largest."""
SAME_TOLERANCE = 1e-3
"""How far the logits of both implementations may differ, relative to the largest."""
SAME_TOLERANCE_16_BIT = 0.05
"""The same, of models in bfloat16 or float16."""


@dataclass
class Coverage:
    """Attention weights of one window, means over the measured positions: for each layer `[H]`."""

    sinks: list[Tensor] = field(default_factory=list)
    """The attention weight on the sinks."""
    far: list[Tensor] = field(default_factory=list)
    """The weight on far keys: neither in the window nor sinks."""
    kept: dict[Choice, list[Tensor]] = field(default_factory=dict)
    """The weight on the far keys that each choice reads."""


@dataclass(frozen=True)
class Scores:
    """How a model scores a window with one choice."""

    bits: float
    """Mean bits of a token."""
    late_bits: float
    """The same, of the second half of the window."""
    keys: float
    """Keys that a query reads, on average over all layers and heads."""
    pairs: float
    """Products of two vectors that a query takes part in, on average over all layers."""


class Compared:
    """A model whose attention can be dense, or that of each of several choices.

    Args:
        model: in evaluation mode; its attention implementation is changed.
        choices: what is compared, at least one; all have the same window and sinks. Those that
            differ only in `dense_layers` share their centroids.

    Raises:
        UserError: the model is no causal decoder, its attention cannot be replaced, or it is not a
            softmax of scaled dot products.
    """

    def __init__(self, model: PreTrainedModel, choices: Sequence[Choice]) -> None:
        self.model = model
        self.choices = choices
        self.distinct_choices = list(dict.fromkeys(every_layer(choice) for choice in choices))
        """The choices, each once, with no layers left dense."""
        self.layers: dict[tuple[int, Choice], FarKeys] = {}
        self.choice: Choice | None = None
        """The choice of the current pass; None: dense."""
        self.fit_steps = 0
        """Steps of fitting in the current pass; 0: centroids are not fitted."""
        self.coverage: Coverage | None = None
        """What the current pass adds its attention weights to."""
        self.keys_read: list[float] = []
        """Mean keys of a query, of each layer of the current pass."""
        self.pairs: list[float] = []
        """Mean products that a query takes part in, of each layer of the current pass."""
        self.replace_attention()

    def replace_attention(self) -> None:
        """Replace the model's attention, and check that dense attention scores as before."""
        vocabulary = self.model.config.get_text_config().vocab_size
        device = self.model.device
        tokens_1N = torch.arange(CHECKED_TOKENS, device=device)[None] % vocabulary
        kind = type(self.model).__name__
        before_1NV = self.logits(tokens_1N)
        earlier = CHECKED_TOKENS // 2
        changed_1N = tokens_1N.clone()
        changed_1N[:, earlier:] = 0
        changed_1NV = self.logits(changed_1N)
        if (
            relative_difference(changed_1NV[:, :earlier], before_1NV[:, :earlier])
            > CAUSAL_TOLERANCE
        ):
            raise UserError(f"{kind} is no causal decoder: later tokens move earlier scores")
        allowed = SAME_TOLERANCE
        if before_1NV.dtype in (torch.bfloat16, torch.float16):
            allowed = SAME_TOLERANCE_16_BIT
        AttentionInterface.register(NAME, self.attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        self.model.set_attn_implementation(NAME)
        watch(self.model)
        after_1NV = self.logits(tokens_1N)
        if not self.keys_read:
            raise UserError(f"{kind}: its attention cannot be replaced")
        if relative_difference(after_1NV, before_1NV) > allowed:
            raise UserError(f"{kind}: its attention is more than a softmax of scaled products")

    @torch.no_grad()
    def logits(self, tokens_1N: Tensor) -> Tensor:
        """Return the model's logits, `[1, N, V]`."""
        self.keys_read = []
        self.pairs = []
        return self.model(tokens_1N, use_cache=False).logits

    @torch.no_grad()
    def fit(self, tokens_BN: Tensor, steps: int) -> None:
        """Fit the centroids of all choices in all layers, in one pass with dense attention."""
        self.fit_steps = steps
        self.model.base_model(tokens_BN, use_cache=False)
        self.fit_steps = 0

    def score(self, tokens_1N: Tensor, choice: Choice | None) -> Scores:
        """Return the scores of a window with a choice; None: dense.

        Raises:
            RunFailed: the scores are no numbers.
        """
        self.choice = choice
        logits_NV = self.logits(tokens_1N)[0]
        self.choice = None
        nats_N = F.cross_entropy(logits_NV[:-1].float(), tokens_1N[0, 1:], reduction="none")
        if not bool(nats_N.isfinite().all()):
            kind = type(self.model).__name__
            raise RunFailed(f"{kind}: its scores are no numbers; hardware.precision=fp32 may help")
        bits_N = nats_N.double() / math.log(2)
        late_N = bits_N[len(bits_N) // 2 :]
        return Scores(
            bits=float(bits_N.mean()),
            late_bits=float(late_N.mean()),
            keys=float(np.mean(self.keys_read)),
            pairs=float(np.mean(self.pairs)),
        )

    def measure(self, tokens_1N: Tensor) -> tuple[Scores, Coverage]:
        """Return the dense scores of a window, and the attention weight that choices keep."""
        self.coverage = Coverage()
        scores = self.score(tokens_1N, None)
        coverage = self.coverage
        self.coverage = None
        return scores, coverage

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return the outputs `[B, N, H, D]` of a layer; see `rtx.hf.interface.attention`."""
        try:
            check_options(module, options)
            check_mask(attention_mask, query, key, options.get("sliding_window"))
        except ValueError as error:
            raise UserError(str(error)) from error
        layer = self.layer_number(module)
        if self.fit_steps:
            for far_keys, some_query, some_key in self.each_choice(module, query, key):
                far_keys.fit(some_query, some_key, self.fit_steps)
        if self.coverage is not None:
            self.add_coverage(module, query, key, scaling, attention_mask)
        choice = self.choice
        if choice is not None and layer < choice.dense_layers:
            choice = None
        mask_BHNN = None
        if choice is not None:
            far_keys = self.far_keys(choice, layer, query, key)
            mask_BHNN = far_keys.mask(*compared_vectors(choice, module, query, key))
        mask_BHNN = joined_masks(mask_BHNN, attention_mask)
        self.add_counts(choice, mask_BHNN, attention_mask, query.shape[2])
        out_BHND = masked_attention(query, key, value, mask_BHNN, scaling, dropout)
        return out_BHND.transpose(1, 2).contiguous(), None

    def add_counts(
        self,
        choice: Choice | None,
        mask_BHNN: Tensor | None,
        attention_mask: Tensor | None,
        length: int,
    ) -> None:
        """Add the mean keys and products of a query of a layer to those of the current pass.

        Args:
            choice: of the layer; None: dense.
            mask_BHNN: which keys are read; None: all up to the position of their query.
            attention_mask: which keys the model lets queries read, `[B, 1, N, N]`; None: the same.
            length: N.
        """
        visible_N = np.arange(1, length + 1)
        if attention_mask is not None:
            visible_N = attention_mask[0, 0].sum(-1).cpu().numpy()
        keys = float(visible_N.mean())
        if mask_BHNN is not None:
            queries = mask_BHNN.shape[:3].numel()
            keys = int(mask_BHNN.count_nonzero()) / queries
        self.keys_read.append(keys)
        self.pairs.append(pairs_scored(choice, visible_N, keys))

    def layer_number(self, module: nn.Module) -> int:
        """Return the number of a module's layer."""
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise UserError(f"{type(module).__name__}: does not say which layer it is of")
        return layer

    def far_keys(self, choice: Choice, layer: int, query: Tensor, key: Tensor) -> FarKeys:
        """Return the patterns of a layer for a choice, made in its first call."""
        place = (layer, every_layer(choice))
        if place not in self.layers:
            heads = query.shape[1]
            key_heads = key.shape[1]
            self.layers[place] = FarKeys(place[1], heads, key_heads, query.shape[-1], layer)
        return self.layers[place]

    def each_choice(
        self, module: nn.Module, query: Tensor, key: Tensor
    ) -> Iterator[tuple[FarKeys, Tensor, Tensor]]:
        """Yield the patterns of each choice, and the queries and keys that it compares."""
        layer = self.layer_number(module)
        vectors: dict[str, tuple[Tensor, Tensor]] = {}
        for choice in self.distinct_choices:
            if choice.rotary not in vectors:
                vectors[choice.rotary] = compared_vectors(choice, module, query, key)
            yield self.far_keys(choice, layer, query, key), *vectors[choice.rotary]

    def add_coverage(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        scaling: float | None,
        attention_mask: Tensor | None,
    ) -> None:
        """Add the attention weights of a layer to the coverage of the current pass.

        Keys that the model hides, because they are before its own sliding window, have no weight.
        """
        coverage = self.coverage
        assert coverage is not None
        choice = self.choices[0]
        N = query.shape[2]
        first = min(choice.near, N - 1)
        positions = min(MOST_POSITIONS, N - first)
        position_P = torch.linspace(first, N - 1, positions, device=query.device).round().long()
        visible_NN = causal_mask(N, N, query.device)
        if attention_mask is not None:
            visible_NN = attention_mask[0, 0]
        weight_HPN = dense_weights(query[0], key[0], position_P, visible_NN[position_P], scaling)
        key_N = torch.arange(N, device=query.device)
        is_far_PN = key_N <= position_P[:, None] - choice.window
        is_far_PN = is_far_PN & (key_N >= choice.sinks)
        far_HPN = weight_HPN * is_far_PN
        coverage.sinks.append(sum_of_heads(weight_HPN[..., : choice.sinks]) / positions)
        coverage.far.append(sum_of_heads(far_HPN) / positions)
        for far_keys, some_query, some_key in self.each_choice(module, query, key):
            mask_HPN = far_keys.far_mask_at(some_query, some_key, position_P)[0]
            kept_H = sum_of_heads(far_HPN * mask_HPN) / positions
            coverage.kept.setdefault(far_keys.choice, []).append(kept_H)


def every_layer(choice: Choice) -> Choice:
    """Return a choice with no layers left dense."""
    return replace(choice, dense_layers=0)


def relative_difference(logits: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference of logits, relative to the largest of `other`."""
    return float((logits - other).abs().max() / other.abs().max())


def compared_vectors(
    choice: Choice,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the queries and keys that a choice compares: after or before rotary angles."""
    if choice.rotary == "after":
        return query, key
    try:
        return turned_back(module, query, key)
    except ValueError as error:
        raise UserError(str(error)) from error


def dense_weights(
    q_HND: Tensor,
    k_GND: Tensor,
    position_P: Tensor,
    visible_PN: Tensor,
    scaling: float | None,
) -> Tensor:
    """Return the attention weights of some positions on all keys, `[H, P, N]`, float32.

    Args:
        visible_PN: which keys the queries at these positions may read.
    """
    k_HND = k_GND.repeat_interleave(len(q_HND) // len(k_GND), dim=0).float()
    scale = scaling or q_HND.shape[-1] ** -0.5
    logit_HPN = scale * q_HND[:, position_P].float() @ k_HND.mT
    return logit_HPN.masked_fill(~visible_PN, -math.inf).softmax(-1)


def sum_of_heads(weight_HPN: Tensor) -> Tensor:
    """Return the sum of weights of each head, `[H]`, float64 on the CPU."""
    return weight_HPN.double().sum((1, 2)).cpu()
