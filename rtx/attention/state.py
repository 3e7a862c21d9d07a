"""The streaming state of clusters: W slots each, whatever rule fills them.

Shapes: B streams, H heads, C clusters, W slots, D head size, J clusters joined at this position (over all streams).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtx.attention.lists import Members, last_members
from rtx.attention.weights import Distances, attend, logit_scale


class ClusterState:
    """Keys, values and positions of at most `window` members of every cluster; memory does not grow."""

    def __init__(
        self,
        window: int,
        scale: float | None,
        attend_self: bool,
        relative: Distances | None,
        slot_distance: bool = False,
    ) -> None:
        self.window, self.scale, self.attend_self, self.relative = window, scale, attend_self, relative
        self.slot_distance = slot_distance
        self.keys_BHCWD: Tensor | None = None

    def allocate(self, k_BHD: Tensor, v_BHD: Tensor, clusters: int) -> None:
        """Make room for all streams; empty slots have position -1."""
        B, H, D = k_BHD.shape
        self.keys_BHCWD = k_BHD.new_zeros(B, H, clusters, self.window, D)
        self.values_BHCWD = v_BHD.new_zeros(B, H, clusters, self.window, D)
        self.position_BHCW = torch.full((B, H, clusters, self.window), -1, device=k_BHD.device)

    def fill(self, k_BHND: Tensor, v_BHND: Tensor, members: Members) -> None:
        """Take in the members among positions 0 to N - 1, of each cluster the last `window`, in order of position."""
        B, H, N, D = k_BHND.shape
        if not B * H * N:
            return
        self.allocate(k_BHND[:, :, 0], v_BHND[:, :, 0], len(members.count_L) // (B * H))
        assert self.keys_BHCWD is not None
        kept_J, list_J, slot_J = last_members(members, self.window)
        row_J = members.row_M[kept_J]
        self.keys_BHCWD.flatten(0, 2)[list_J, slot_J] = k_BHND.reshape(-1, D)[row_J]
        self.values_BHCWD.flatten(0, 2)[list_J, slot_J] = v_BHND.reshape(-1, v_BHND.shape[-1])[row_J]
        self.position_BHCW.flatten(0, 2)[list_J, slot_J] = row_J % N

    def oldest_slot(self, joins_BHC: Tensor) -> Tensor:
        """Return for each cluster the slot that its next member takes: an empty one, else that of its oldest member."""
        if self.keys_BHCWD is None:
            return torch.zeros_like(joins_BHC, dtype=torch.int64)
        return self.position_BHCW.argmin(-1)

    def step(
        self,
        q_BHD: Tensor,
        k_BHD: Tensor,
        v_BHD: Tensor,
        joins_BHC: Tensor,
        slot_BHC: Tensor,
        position: int,
        query_joins_BHC: Tensor | None = None,
    ) -> Tensor:
        """Put the position's key into its clusters, read there, and return the mean over clusters, `[B, H, D]`.

        The query reads the clusters that it joins by `query_joins_BHC` (None: those of its key) and that hold a key.
        """
        if self.keys_BHCWD is None:
            self.allocate(k_BHD, v_BHD, joins_BHC.shape[-1])
        assert self.keys_BHCWD is not None
        b_J, h_J, c_J = joins_BHC.nonzero(as_tuple=True)
        slot_J = slot_BHC[b_J, h_J, c_J]
        self.keys_BHCWD[b_J, h_J, c_J, slot_J] = k_BHD[b_J, h_J]
        self.values_BHCWD[b_J, h_J, c_J, slot_J] = v_BHD[b_J, h_J]
        self.position_BHCW[b_J, h_J, c_J, slot_J] = position
        if query_joins_BHC is not None:
            joins_BHC = query_joins_BHC & (self.position_BHCW >= 0).any(-1)
            b_J, h_J, c_J = joins_BHC.nonzero(as_tuple=True)
        out_BHD = torch.zeros_like(v_BHD)
        if not len(b_J):
            return out_BHD
        position_JW = self.position_BHCW[b_J, h_J, c_J]
        out_JD = attend(
            q_BHD[b_J, h_J][:, None, None],
            self.keys_BHCWD[b_J, h_J, c_J][:, None],
            self.values_BHCWD[b_J, h_J, c_J][:, None],
            logit_scale(self.scale, q_BHD.shape[-1]),
            mask_QK=self.readable(position_JW, position)[:, None, None],
            relative=self.relative,
            distance_QK=self.distance(position_JW, position)[:, None, None],
        )[:, 0, 0]
        share_J1 = joins_BHC.sum(-1)[b_J, h_J].to(out_JD.dtype).reciprocal()[:, None]
        # Under autocast the outputs are of another type than the values.
        return out_BHD.index_put((b_J, h_J), (out_JD * share_J1).to(out_BHD.dtype), accumulate=True)

    def distance(self, position_JW: Tensor, position: int) -> Tensor:
        """Return the true distances of the slots' positions, or how many of the cluster's members are later."""
        if self.relative is None or not self.slot_distance:
            return position - position_JW
        return position_JW.argsort(-1, descending=True).argsort(-1)

    def readable(self, position_JW: Tensor, position: int) -> Tensor:
        """Return which slots the position reads: all members, or all but itself where there are others."""
        filled_JW = position_JW >= 0
        if self.attend_self:
            return filled_JW
        others_JW = filled_JW & (position_JW != position)
        return others_JW | (filled_JW & ~others_JW.any(-1, keepdim=True))
