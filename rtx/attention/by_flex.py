"""backend="flex": patterns that choose by position, by PyTorch's FlexAttention with a block mask.

Placeholder.
"""

from __future__ import annotations

from torch import Tensor

from rtx.attention.weights import Distances


def flex_refusal(
    pattern: str,
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHND: Tensor,
    dropout: float,
    relative: Distances | None,
) -> str | None:
    return f"{pattern}: not yet"
