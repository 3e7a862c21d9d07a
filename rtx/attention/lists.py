"""Packed lists of members: which positions each cluster has, one list for each sequence, head and cluster.

Shapes: B sequences, H heads, C clusters, N positions, L = B * H * C lists, M members of all lists together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Members(NamedTuple):
    """All lists, packed one behind the other, each in order of position."""

    row_M: Tensor
    """Which row of the flattened `[B * H * N]` positions each member is."""
    count_L: Tensor
    """Members of each list."""
    length: int
    """N."""
    rows: int
    """B * H * N."""

    def times(self) -> Tensor:
        """Return in how many clusters each row is, `[B * H * N]`."""
        return torch.bincount(self.row_M, minlength=self.rows)

    def first_L(self) -> Tensor:
        """Return where in M each list begins."""
        return self.count_L.cumsum(0) - self.count_L

    def list_M(self) -> Tensor:
        """Return the list of every member."""
        number_L = torch.arange(len(self.count_L), device=self.row_M.device)
        return torch.repeat_interleave(number_L, self.count_L, output_size=len(self.row_M))

    def position_M(self) -> Tensor:
        """Return the position of every member."""
        return self.row_M % max(1, self.length)

    def mask(self) -> Tensor:
        """Return the membership mask `[L, N]`, which takes far more memory than the lists."""
        mask_LN = torch.zeros(len(self.count_L), self.length, dtype=torch.bool, device=self.row_M.device)
        mask_LN[self.list_M(), self.position_M()] = True
        return mask_LN

    def of_first_sequence(self, heads: int) -> Members:
        """Return the lists of the first sequence alone, as tensors of their own."""
        rows = heads * self.length
        lists = len(self.count_L) * rows // max(1, self.rows)
        count_L = self.count_L[:lists].clone()
        return Members(self.row_M[: int(count_L.sum())].clone(), count_L, self.length, rows)


def pack(member_BHCN: Tensor) -> Members:
    """Return the packed lists of a membership mask."""
    B, H, C, N = member_BHCN.shape
    list_M, position_M = member_BHCN.flatten(0, 2).nonzero(as_tuple=True)
    return Members(list_M // C * N + position_M, member_BHCN.sum(-1).flatten(), N, B * H * N)


def last_members(members: Members, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which members (numbers into M) are among the last `window` of their lists, their lists, and slots 0, …"""
    list_M = members.list_M()
    rank_M = torch.arange(len(list_M), device=list_M.device) - members.first_L()[list_M]
    slot_M = rank_M - (members.count_L - window).clamp(min=0)[list_M]
    kept_J = (slot_M >= 0).nonzero()[:, 0]
    return kept_J, list_M[kept_J], slot_M[kept_J]


def padded(count_L: Tensor, which_G: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the numbers of the members of some lists (of all) in as many slots as the longest needs, and who is real.

    Slots behind the last member of a list repeat it; those of an empty list point anywhere in 0 to M - 1.
    """
    last = max(0, int(count_L.sum()) - 1)
    first_L = count_L.cumsum(0) - count_L
    if which_G is not None:
        first_L, count_L = first_L[which_G], count_L[which_G]
    slot_1Q = torch.arange(int(count_L.max()) if len(count_L) else 0, device=count_L.device)[None]
    number_GQ = first_L[:, None] + slot_1Q.minimum((count_L - 1).clamp(min=0)[:, None])
    return number_GQ.clamp(max=last), slot_1Q < count_L[:, None]
