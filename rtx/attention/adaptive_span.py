"""Adaptive attention span: local heads that learn how far back they attend.

Shapes: H heads, N positions, M distances.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.arguments import check_number, check_positive
from rtx.attention.engine.softmax import LogitTerms, RelativeTables
from rtx.attention.pairs import window_pairs
from rtx.attention.pattern import Cache
from rtx.attention.positional import ContiguousPattern, PositionCache
from rtx.attention.precision import widened
from rtx.attention.reads import QueriesKeys, Reads


class AdaptiveSpan(ContiguousPattern):
    """Local heads that each learn how far back they attend (Sukhbaatar et al. 2019, section 2).

    In the softmax of a head with the span z, the exponential of a key at distance x is multiplied
    by the soft mask m_z(x) = clamp((R + z - x) / R, 0, 1). It is 1 up to the span, falls to 0 over
    a ramp of R positions after it, and is 0 at distances of `window` and more.

    The parameter is z / `window`, so that one learning rate suits any window. It starts at 0, as in
    the released code: a head then reads the R positions of the ramp. Cost and memory are N times
    the longest reach (span plus ramp).

    With causal=False a head reads as far after a position as before it; x is |i - j|. The cost then
    doubles.

    Args:
        heads: H.
        window: the largest number of positions that a query reads, itself included; with
            causal=False that on each side.
        ramp: R.
        cost: the weight in the loss of the heads' mean span, in positions (the paper's lambda). The
            losses of several layers add up.
    """

    reads_all_cached = True
    may_be_bidirectional = True

    def __init__(
        self,
        heads: int,
        *,
        window: int,
        ramp: int = 32,
        cost: float = 0.0,
        **options: Any,
    ) -> None:
        # The key of the query itself is the only one whose weight is never 0.
        super().__init__(attend_self=True, **options)
        check_positive(0, heads=heads)
        check_positive(window=window, ramp=ramp)
        check_number("cost", cost, "finite and at least 0", lambda x: 0 <= x < math.inf)
        self.heads = heads
        self.window = window
        self.ramp = ramp
        self.cost = cost
        self.share_H = nn.Parameter(torch.zeros(heads))

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        """Return whether m_z is above 0 for the head's span."""
        distance = (i - j).abs()
        span = self.spans()[head]
        is_in_window = distance < self.window
        is_in_reach = distance < self.ramp + span
        return is_in_window & is_in_reach

    def spans(self) -> Tensor:
        """Return the spans in positions, `[H]`, in float32 or wider."""
        share_H = widened(self.share_H)
        inside_H = share_H.clamp(0, 1)
        return inside_H * self.window

    @torch.no_grad()
    def reach(self) -> int:
        """Return how many positions a query of the longest span reads, itself included.

        With causal=False that is the number on each side.

        On a GPU it is the window, an upper bound, so that the CPU need not wait for the spans.
        """
        if not self.share_H.is_cpu:
            return self.window
        # There may be no heads, so a span of 0 is added.
        spans_and_zero = F.pad(self.spans(), (0, 1))
        longest = float(spans_and_zero.max())
        reach = self.ramp + longest
        if reach < self.window:
            return math.ceil(reach)
        return self.window

    def form(self) -> tuple[int, bool]:
        """Return the reach and `causal`: besides shapes, nothing else matters for what is read."""
        return self.reach(), self.causal

    def since(self, i: Tensor) -> Tensor:
        return i + 1 - self.reach()

    def until(self, i: Tensor) -> Tensor:
        if self.causal:
            return super().until(i)
        return i + self.reach()

    def terms(self, size: int, relative: RelativeTables | None) -> LogitTerms:
        """Return the terms with ln m_z(distance) for each head; -inf where m_z is 0."""
        distances = self.reach() + 1
        distance_M = torch.arange(distances, device=self.share_H.device)
        span_H1 = self.spans()[:, None]
        ramp_left_HM = self.ramp + span_H1 - distance_M
        mask_HM = (ramp_left_HM / self.ramp).clamp(0, 1)
        is_in_window_M = distance_M < self.window
        is_read_HM = (mask_HM > 0) & is_in_window_M
        # Take the logarithm of 1 where the mask is 0, as that of 0 has the gradient NaN.
        mask_HM = mask_HM.masked_fill(~is_read_HM, 1)
        log_HM = mask_HM.log()
        bias_HM = log_HM.masked_fill(~is_read_HM, -math.inf)
        terms = super().terms(size, relative)
        return terms._replace(bias_HM=bias_HM)

    def loss(self, qk: QueriesKeys, parts: list[Reads]) -> Tensor:
        """Return the weighted mean span in training, otherwise zero."""
        if not self.training:
            return super().loss(qk, parts)
        span_H = self.spans()
        heads = max(1, len(span_H))
        total = span_H.sum()
        weighted = self.cost * total
        return weighted / heads

    def pairs_of_head(self, length: int) -> float:
        """Return the number of pairs of a head with the longest span, an upper bound."""
        pairs = window_pairs(length, self.window)
        if self.causal:
            return pairs
        # Both sides have the pairs of a position with itself.
        return 2 * pairs - length

    @torch.no_grad()
    def after_step(self) -> None:
        """Clamp the spans to [0, window], as the released code does.

        Outside of that range they have no gradient.
        """
        self.share_H.clamp_(0, 1)

    def start(self, relative: RelativeTables | None = None) -> Cache:
        """See `Pattern.start`; the spans must stay the same while a stream lasts."""
        ring = self.reach()
        return PositionCache(self, relative, ring)
