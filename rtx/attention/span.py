"""Adaptive span (Sukhbaatar et al. 2019): local attention in which every head learns how far back it reads.

Shapes: H heads, N positions, M distances.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from rtx.attention.arguments import check_positive
from rtx.attention.cache import Cache, PositionCache
from rtx.attention.packed import Part
from rtx.attention.pattern import Inputs, PositionPattern, Spread, options
from rtx.attention.softmax import Relative, Terms
from rtx.config import Config


class AdaptiveSpan(PositionPattern):
    """A key at distance x counts with the weight m_z(x) = clamp((R + z - x) / R, 0, 1) beside its softmax term.

    Fully up to the span z, fading out over the ramp of R positions behind it, never at `window` or farther. The
    parameter is the span's share of the window, which learning rates suit whatever the window; it starts at 0 (a head
    then reads the ramp), as in the released code. A span is held in [0, window]. Cost and memory grow with N times what
    the longest span reaches.

    Args:
        heads: H.
        window: keys that no span goes beyond, the own position included.
        ramp: R, positions over which the weight falls from 1 to 0.
        cost: weight, in the loss, of the heads' mean span in positions (the paper's lambda); the layers add up.
    """

    def __init__(self, heads: int, *, window: int, ramp: int = 32, cost: float = 0.0, **given: Any) -> None:
        super().__init__(**given)
        check_positive("heads", heads)
        check_positive("window", window)
        check_positive("ramp", ramp)
        self.window, self.ramp, self.cost = window, ramp, cost
        self.share_H = nn.Parameter(torch.zeros(heads))

    @classmethod
    def from_config(cls, config: Config, heads: int, layer: int) -> Self:
        model = config.model
        return cls(heads, window=model.window, ramp=model.span_ramp, cost=model.span_cost, **options(config))

    def spans(self) -> Tensor:
        """Return the spans in positions, `[H]`, at least in float32."""
        return self.share_H.to(torch.promote_types(self.share_H.dtype, torch.float32)).clamp(0, 1) * self.window

    @torch.no_grad()
    def after_step(self) -> None:
        """Hold the spans in [0, window], as the released code does: outside, a span would have no gradient."""
        self.share_H.clamp_(0, 1)

    @torch.no_grad()
    def reach(self) -> int:
        """Return how many keys, its own included, the head with the longest span reads: behind them weights are 0."""
        reach = self.ramp + max(float(self.spans().max()), 0.0)
        return math.ceil(reach) if reach < self.window else self.window

    def reads(self, given: Inputs, real_BN: Tensor | None, prefix: bool) -> list[Part]:
        if given.q_BHND.shape[1] != len(self.share_H):
            raise ValueError(f"q_BHND has {given.q_BHND.shape[1]} heads: must have {len(self.share_H)}, as the spans")
        return super().reads(given, real_BN, prefix)

    def spreads(self, position_N: Tensor, heads: int) -> list[Spread]:
        """One list, of which the longest reach is read."""
        one_N = torch.zeros_like(position_N)
        return [Spread(one_N, one_N, position_N + 1 - self.reach(), position_N + 1)]

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        """What the head's own weight does not make nothing."""
        return (i - j < self.window) & (i - j < self.ramp + self.spans()[head])

    def terms(self, size: int, relative: Relative | None) -> Terms:
        """Return the terms with log m_z(distance) for each head, -inf where the weight is 0."""
        distance_M = torch.arange(self.reach() + 1, device=self.share_H.device)
        weight_HM = ((self.ramp + self.spans()[:, None] - distance_M) / self.ramp).clamp(0, 1)
        seen_HM = (weight_HM > 0) & (distance_M < self.window)
        # The logarithm of 1 where nothing is seen: that of 0 would turn its gradient into NaN.
        bias_HM = weight_HM.masked_fill(~seen_HM, 1).log().masked_fill(~seen_HM, -math.inf)
        return super().terms(size, relative)._replace(bias_HM=bias_HM)

    def loss(self, given: Inputs, real_BN: Tensor | None) -> Tensor:
        """Return the weighted mean span, zero outside training."""
        return self.cost * self.spans().mean() if self.training else super().loss(given, real_BN)

    def start(self, relative: Relative | None = None) -> Cache:
        """See `Pattern.start`; the spans stay as they are now."""
        return PositionCache(self, relative, self.reach())
