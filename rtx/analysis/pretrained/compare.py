"""What selections cost in a pretrained model whose weights stay: loss, and attention kept.

The attention of all layers is replaced (`rtx.hf`), in turn by each of some choices, and the model
scores the same windows of text.

Shapes: N positions, B windows, H query heads, G key-value heads, Q = K = N queries and keys, P
positions whose attention is measured, Y layers, V choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from rtx.errors import RunFailed, UserError
from rtx.hf import Choice, FarKeys
from rtx.hf.interface import check_mask, check_options, joined_masks, masked_attention
from rtx.hf.rotary import turned_back, watch

NAME = "rtx_compared"
"""The name of the attention implementation during an analysis."""
POSITIONS = 64
"""The most positions of a window whose attention is measured."""
CHECKED = 24
"""Tokens of the pass that checks a model."""
CAUSAL = 1e-4
"""How far logits may move with later tokens, relative to the largest."""
SAME = 1e-3
"""How far the logits of both implementations may differ, relative to the largest."""
SAME_IF_NARROW = 0.05
"""The same, of models in bfloat16 or float16."""


@dataclass
class Coverage:
    """Sums over the measured positions of one window, `[Y, H]`."""

    sinks: list[Tensor] = field(default_factory=list)
    """The attention weight on the sinks."""
    far: list[Tensor] = field(default_factory=list)
    """The weight on far keys: neither in the window nor sinks."""
    kept: dict[Choice, list[Tensor]] = field(default_factory=dict)
    """The part of `far` on the keys that a choice reads."""


@dataclass(frozen=True)
class Scores:
    """How a model scores a window with one choice."""

    bits: float
    """Mean bits of a token."""
    late_bits: float
    """The same, of the second half of the window."""
    keys: float
    """Keys that a query reads, on average over all layers and heads."""


class Compared:
    """A model whose attention is that of one of some choices.

    Args:
        model: in evaluation mode; its attention implementation is changed.
        choices: what is compared. Those that differ only in `dense_layers` share their centroids.

    Raises:
        UserError: the model's attention cannot be replaced, or is another than the softmax of
            scaled products.
    """

    def __init__(self, model: PreTrainedModel, choices: Sequence[Choice]) -> None:
        self.model = model
        self.choices = choices
        self.layers: dict[tuple[int, Choice], FarKeys] = {}
        self.choice: Choice | None = None
        """The choice of the current pass; None: dense."""
        self.fit_steps = 0
        """How often centroids move in the current pass."""
        self.coverage: Coverage | None = None
        """What the current pass adds its attention weights to."""
        self.keys_read: list[float] = []
        """Mean keys of a query, of each layer of the current pass."""
        self.replace_attention()

    @property
    def fitted_choices(self) -> list[Choice]:
        """The choices, each once, with no layers left dense."""
        return list(dict.fromkeys(every_layer(choice) for choice in self.choices))

    def replace_attention(self) -> None:
        """Replace the model's attention, and check that dense attention scores as before."""
        vocabulary = self.model.config.get_text_config().vocab_size
        device = self.model.device
        tokens_1N = torch.arange(CHECKED, device=device)[None] % vocabulary
        kind = type(self.model).__name__
        before_1NV = self.logits(tokens_1N)
        earlier = CHECKED // 2
        changed_1N = tokens_1N.clone()
        changed_1N[:, earlier:] = 0
        changed_1NV = self.logits(changed_1N)
        if differ(changed_1NV[:, :earlier], before_1NV[:, :earlier]) > CAUSAL:
            raise UserError(f"{kind} is no causal decoder: later tokens move earlier scores")
        allowed = SAME
        if before_1NV.dtype in (torch.bfloat16, torch.float16):
            allowed = SAME_IF_NARROW
        AttentionInterface.register(NAME, self.attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        self.model.set_attn_implementation(NAME)
        watch(self.model)
        after_1NV = self.logits(tokens_1N)
        if not self.keys_read:
            raise UserError(f"{kind}: its attention cannot be replaced")
        if differ(after_1NV, before_1NV) > allowed:
            raise UserError(f"{kind}: its attention is more than a softmax of scaled products")

    @torch.no_grad()
    def logits(self, tokens_1N: Tensor) -> Tensor:
        """Return the model's logits, `[1, N, vocabulary]`."""
        self.keys_read = []
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
        return Scores(float(bits_N.mean()), float(late_N.mean()), float(np.mean(self.keys_read)))

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
        """Return the outputs `[B, Q, H, D]` of a layer; see `rtx.hf.interface.attention`."""
        try:
            check_options(module, options)
            check_mask(attention_mask, query, key, options.get("sliding_window"))
        except ValueError as error:
            raise UserError(str(error)) from error
        layer = self.layer_number(module)
        if self.fit_steps:
            self.each_choice(module, query, key, self.fit_choice)
        if self.coverage is not None:
            self.add_coverage(module, query, key, scaling)
        N = query.shape[2]
        mask_BHNN = None
        keys = (N + 1) / 2
        if self.choice is not None and layer >= self.choice.dense_layers:
            far_keys = self.far_keys(self.choice, layer, query, key)
            mask_BHNN = far_keys.mask(*compared_vectors(self.choice, module, query, key))
            queries = mask_BHNN.shape[:3].numel()
            keys = int(mask_BHNN.count_nonzero()) / queries
        self.keys_read.append(keys)
        mask_BHNN = joined_masks(mask_BHNN, attention_mask)
        out_BHND = masked_attention(query, key, value, mask_BHNN, scaling, dropout)
        return out_BHND.transpose(1, 2).contiguous(), None

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
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        use: Callable[[FarKeys, Tensor, Tensor], None],
    ) -> None:
        """Call a function with the patterns of each choice, and the vectors that it compares."""
        layer = self.layer_number(module)
        for choice in self.fitted_choices:
            vectors = compared_vectors(choice, module, query, key)
            use(self.far_keys(choice, layer, query, key), *vectors)

    def fit_choice(self, far_keys: FarKeys, query: Tensor, key: Tensor) -> None:
        """Fit the centroids of a choice in one layer."""
        far_keys.fit(query, key, self.fit_steps)

    def add_coverage(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        scaling: float | None,
    ) -> None:
        """Add the attention weights of a layer to the coverage of the current pass."""
        coverage = self.coverage
        assert coverage is not None
        choice = self.choices[0]
        N = query.shape[2]
        first = min(choice.near, N - 1)
        positions = min(POSITIONS, N - first)
        position_P = torch.linspace(first, N - 1, positions, device=query.device).round().long()
        weight_HPN = dense_weights(query[0], key[0], position_P, scaling)
        key_N = torch.arange(N, device=query.device)
        is_far_PN = key_N <= position_P[:, None] - choice.window
        is_far_PN = is_far_PN & (key_N >= choice.sinks)
        far_HPN = weight_HPN * is_far_PN
        coverage.sinks.append(sum_of_heads(weight_HPN[..., : choice.sinks]) / positions)
        coverage.far.append(sum_of_heads(far_HPN) / positions)

        def add_kept(far_keys: FarKeys, query: Tensor, key: Tensor) -> None:
            mask_HPN = far_keys.far_mask_at(query, key, position_P)[0]
            kept_H = sum_of_heads(far_HPN * mask_HPN) / positions
            coverage.kept.setdefault(far_keys.choice, []).append(kept_H)

        self.each_choice(module, query, key, add_kept)


def every_layer(choice: Choice) -> Choice:
    """Return a choice with no layers left dense."""
    return replace(choice, dense_layers=0)


def differ(logits: Tensor, other: Tensor) -> float:
    """Return the largest difference of logits, relative to the largest of them."""
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
    q_HND: Tensor, k_GND: Tensor, position_P: Tensor, scaling: float | None
) -> Tensor:
    """Return the attention weights of some positions on all keys, `[H, P, N]`, float32."""
    k_HND = k_GND.repeat_interleave(len(q_HND) // len(k_GND), dim=0).float()
    scale = scaling or q_HND.shape[-1] ** -0.5
    logit_HPN = scale * q_HND[:, position_P].float() @ k_HND.mT
    key_N = torch.arange(k_HND.shape[1], device=k_HND.device)
    is_later_PN = key_N > position_P[:, None]
    return logit_HPN.masked_fill(is_later_PN, -math.inf).softmax(-1)


def sum_of_heads(weight_HPN: Tensor) -> Tensor:
    """Return the sum of weights of each head, `[H]`, float64 on the CPU."""
    return weight_HPN.double().sum((1, 2)).cpu()
