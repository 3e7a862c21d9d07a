"""Key mix: shifted and convolved keys, by which a head can match the tokens before a position."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention import Documents


class KeyMix(nn.Module):
    """Shifts keys to later positions, and adds a causal convolution over keys.

    With a shift of 1 a head can match "the token before was A" (an induction head in one layer).
    Every column of a head has a convolution, with SiLU (Xiao et al. 2025), which starts at zero.

    Args:
        heads, size: H and D.
        shift: position j gets the key of position j - shift.
        width: the number of keys that the convolution reads, up to that of position j - shift.
            1: no convolution.
    """

    def __init__(self, heads: int, size: int, shift: int, width: int) -> None:
        super().__init__()
        self.shift = shift
        self.width = width
        self.taps_HDK: nn.Parameter | None = None
        if width > 1:
            zero_HDK = torch.zeros(heads, size, width)
            self.taps_HDK = nn.Parameter(zero_HDK)

    def forward(
        self,
        k_BHND: Tensor,
        before_BHSD: Tensor | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the mixed keys `[B, H, N, D]`, and `before_BHSD` of the next call.

        Args:
            before_BHSD: the S = shift + width - 1 keys before these; None: zeros, at position 0.
            documents: a position gets zeros in place of keys of earlier documents.
        """
        N = k_BHND.shape[2]
        if before_BHSD is None:
            before_BHSD = self.zeros_before(k_BHND)
        # K = S + N keys. Those that a tap reads at N positions are N successive ones of them.
        longer_BHKD = torch.cat([before_BHSD, k_BHND], dim=2)
        last_BHSD = longer_BHKD[:, :, N:]
        first = self.width - 1
        stop = first + N
        shifted_BHND = longer_BHKD[:, :, first:stop]
        if documents is not None:
            shifted_BHND = keys_of_document(shifted_BHND, documents, self.shift)
        if self.taps_HDK is None:
            return shifted_BHND, last_BHSD
        convolved_BHND = self.convolve(longer_BHKD, self.taps_HDK, N, documents)
        return shifted_BHND + F.silu(convolved_BHND), last_BHSD

    def zeros_before(self, k_BHND: Tensor) -> Tensor:
        """Return zeros for the keys before the first position, `[B, H, S, D]`."""
        B, H, _, D = k_BHND.shape
        earlier = self.shift + self.width - 1
        return k_BHND.new_zeros(B, H, earlier, D)

    def convolve(
        self,
        longer_BHKD: Tensor,
        taps_HDK: Tensor,
        N: int,
        documents: Documents | None,
    ) -> Tensor:
        """Return the causal convolution of N positions, `[B, H, N, D]`."""
        products = []
        taps_HDK = taps_HDK.to(longer_BHKD.dtype)
        for first, tap_HD in enumerate(taps_HDK.unbind(-1)):
            stop = first + N
            window_BHND = longer_BHKD[:, :, first:stop]
            if documents is not None:
                back = self.shift + self.width - 1 - first
                window_BHND = keys_of_document(window_BHND, documents, back)
            products.append(window_BHND * tap_HD[:, None])
        return torch.stack(products).sum(0)


def keys_of_document(earlier_BHND: Tensor, documents: Documents, back: int) -> Tensor:
    """Return keys of `back` positions earlier, with zeros in place of those of other documents."""
    is_other_BN = documents.position_BN < back
    is_other_B1N1 = is_other_BN[:, None, :, None]
    return earlier_BHND.masked_fill(is_other_B1N1, 0.0)
