"""Keys that look back: heads of keys of their own match what came before a token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KeyMix(nn.Module):
    """Shifts keys to later positions, and adds a causal convolution over keys.

    With a shift of 1 a head can match "the token before was A" (an induction head in one layer).
    Every column of a head has a convolution, with SiLU (Xiao et al. 2025), which starts at zero.

    Args:
        heads, size: H and D.
        shift: position j gets the key of position j - shift.
        width: keys that the convolution reads, the last of them that of position j - shift; 1: none.
    """

    def __init__(self, heads: int, size: int, shift: int, width: int) -> None:
        super().__init__()
        self.shift = shift
        self.width = width
        self.taps_HDK: nn.Parameter | None = None
        if width > 1:
            self.taps_HDK = nn.Parameter(torch.zeros(heads, size, width))

    def forward(self, k_BHND: Tensor, before_BHSD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the mixed keys `[B, H, N, D]`, and the keys that those after them look back at.

        Args:
            before_BHSD: the keys before these, of which there are S = shift + width - 1; None:
                these are the first, and the keys before them are zeros.
        """
        B, H, N, D = k_BHND.shape
        if before_BHSD is None:
            before_BHSD = k_BHND.new_zeros(B, H, self.shift + self.width - 1, D)
        longer_BHKD = torch.cat([before_BHSD, k_BHND], dim=2)
        last_BHSD = longer_BHKD[:, :, N:]
        shifted_BHND = longer_BHKD[:, :, self.width - 1 : self.width - 1 + N]
        if self.taps_HDK is None:
            return shifted_BHND, last_BHSD
        products = []
        for first, tap_HD in enumerate(self.taps_HDK.to(k_BHND.dtype).unbind(-1)):
            products.append(longer_BHKD[:, :, first : first + N] * tap_HD[:, None])
        return shifted_BHND + F.silu(torch.stack(products).sum(0)), last_BHSD
