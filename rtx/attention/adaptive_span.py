"""Local heads that learn how far back they read.

Shapes: H heads, N positions, M distances.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.arguments import check_number, check_positive
from rtx.attention.cache import Cache
from rtx.attention.engine.softmax import LogitTerms, RelativeTables
from rtx.attention.positional import ContiguousPattern, PositionCache
from rtx.attention.reads import QueriesKeys, Reads


class AdaptiveSpan(ContiguousPattern):
    """Local heads that each learn how far back they read (Sukhbaatar et al. 2019).

    A key at distance x counts with the weight m_z(x) = clamp((R + z - x) / R, 0, 1) beside its softmax term.

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

    reads_all_kept = True

    def __init__(self, heads: int, *, window: int, ramp: int = 32, cost: float = 0.0, **options: Any) -> None:
        super().__init__(attend_self=True, **options)  # a key within reach may weigh nothing, the own one never
        check_positive(0, heads=heads)
        check_positive(window=window, ramp=ramp)
        check_number("cost", cost, "finite and at least 0", lambda x: 0 <= x < math.inf)
        self.heads, self.window, self.ramp, self.cost = heads, window, ramp, cost
        self.share_H = nn.Parameter(torch.zeros(heads))

    def spans(self) -> Tensor:
        """Return the spans in positions, `[H]`, at least in float32."""
        return self.share_H.to(torch.promote_types(self.share_H.dtype, torch.float32)).clamp(0, 1) * self.window

    @torch.no_grad()
    def after_step(self) -> None:
        """Hold the spans in [0, window], as the released code does: outside, a span would have no gradient."""
        self.share_H.clamp_(0, 1)

    @torch.no_grad()
    def reach(self) -> int:
        """Return how many keys, its own included, the head with the longest span reads: behind them weights are 0.

        On a GPU, which a CPU would have to wait for, the window, which no span exceeds.
        """
        if not self.share_H.is_cpu:
            return self.window
        reach = self.ramp + float(F.pad(self.spans(), (0, 1)).max())
        return math.ceil(reach) if reach < self.window else self.window

    def since(self, i: Tensor) -> Tensor:
        return i + 1 - self.reach()

    def form(self) -> tuple[int]:
        return (self.reach(),)

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        """What the head's own weight does not make nothing."""
        return (i - j < self.window) & (i - j < self.ramp + self.spans()[head])

    def terms(self, size: int, relative: RelativeTables | None) -> LogitTerms:
        """Return the terms with log m_z(distance) for each head, -inf where the weight is 0."""
        distance_M = torch.arange(self.reach() + 1, device=self.share_H.device)
        weight_HM = ((self.ramp + self.spans()[:, None] - distance_M) / self.ramp).clamp(0, 1)
        seen_HM = (weight_HM > 0) & (distance_M < self.window)
        # The logarithm of 1 where nothing is seen: that of 0 would turn its gradient into NaN.
        bias_HM = weight_HM.masked_fill(~seen_HM, 1).log().masked_fill(~seen_HM, -math.inf)
        return super().terms(size, relative)._replace(bias_HM=bias_HM)

    def loss(self, qk: QueriesKeys, parts: list[Reads]) -> Tensor:
        """Return the weighted mean span, zero outside training."""
        return self.cost * self.spans().sum() / max(1, len(self.share_H)) if self.training else super().loss(qk, parts)

    def start(self, relative: RelativeTables | None = None) -> Cache:
        """See `Pattern.start`; the spans stay as they are now."""
        return PositionCache(self, relative, self.reach())
