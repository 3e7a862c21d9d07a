"""Position terms: rotary angles, Shaw's tables of relative keys and values, learned absolute positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rtx.attention.weights import Distances


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021): pairs of units of a head turn by position times a fixed frequency.

    A dot product of two rotated vectors depends on their distance alone. It is defined for every position.
    """

    def __init__(self, size: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.size, self.base = size, base
        self.kept: tuple[object, tuple[Tensor, Tensor]] = (None, (torch.empty(0), torch.empty(0)))
        """The angles of the last call that began at position 0, and what they were made for."""

    def angles(self, first: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[count, D / 2]` for positions from `first` on, in the type of `like`."""
        made_for = (count, like.dtype, like.device)
        if first == 0 and self.kept[0] == made_for:
            return self.kept[1]
        # Not from a buffer of frequencies: `.float()` or `.half()` would round it and turn far positions wrongly.
        position_N = torch.arange(first, first + count, device=like.device, dtype=torch.float64)
        exponent_F = torch.arange(0, self.size, 2, device=like.device, dtype=torch.float64) / self.size
        angle_NF = position_N[:, None] * self.base**-exponent_F
        made = angle_NF.cos().to(like.dtype), angle_NF.sin().to(like.dtype)
        if first == 0:
            self.kept = (made_for, made)
        return made

    def forward(self, x_BHND: Tensor, first: int = 0) -> Tensor:
        """Return rotated vectors; the first of them stands at position `first`."""
        cos_NF, sin_NF = self.angles(first, x_BHND.shape[-2], x_BHND)
        low_BHNF, high_BHNF = x_BHND.chunk(2, dim=-1)
        return torch.cat([low_BHNF * cos_NF - high_BHNF * sin_NF, high_BHNF * cos_NF + low_BHNF * sin_NF], dim=-1)


class Shaw(nn.Module):
    """Relative keys and values for distances 0 to `max_distance`, shared by the heads of one kind in one layer."""

    def __init__(self, max_distance: int, size: int) -> None:
        super().__init__()
        self.keys_MD = nn.Parameter(torch.randn(max_distance + 1, size) * 0.02)
        self.values_MD = nn.Parameter(torch.randn(max_distance + 1, size) * 0.02)

    def forward(self) -> Distances:
        """Return the tables."""
        return Distances(self.keys_MD, self.values_MD)


class LearnedPositions(nn.Module):
    """One learned vector for each of `length` positions, added to the embeddings."""

    def __init__(self, length: int, hidden: int) -> None:
        super().__init__()
        self.table_NE = nn.Parameter(torch.randn(length, hidden) * 0.02)

    def forward(self, first: int, count: int) -> Tensor:
        """Return the vectors of positions `first` to `first + count - 1`.

        Raises:
            ValueError: a position beyond the table.
        """
        if first + count > len(self.table_NE):
            raise ValueError(
                f"position {first + count - 1}: learned positions cover 0 to {len(self.table_NE) - 1} (data.length)"
            )
        return self.table_NE[first : first + count]
