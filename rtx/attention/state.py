"""The streaming state of clusters: W slots each, whatever rule fills them.

Shapes: B streams, H heads, C clusters, W slots, D head size, L = B * H * C lists, R = B * H rows,
J clusters joined at this position (over all streams).
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
        self.keys_LWD: Tensor | None = None

    def allocate(self, k_BHD: Tensor, v_BHD: Tensor, clusters: int) -> None:
        """Make room for all streams; empty slots have position -1."""
        B, H, D = k_BHD.shape
        lists = B * H * clusters
        self.keys_LWD = k_BHD.new_zeros(lists, self.window, D)
        self.values_LWD = v_BHD.new_zeros(lists, self.window, D)
        self.position_LW = torch.full((lists, self.window), -1, device=k_BHD.device)
        self.joined_L = torch.zeros(lists, dtype=torch.int64, device=k_BHD.device)

    def fill(self, k_BHND: Tensor, v_BHND: Tensor, members: Members) -> None:
        """Take in the members among positions 0 to N - 1, of each cluster the last `window`, in order of position."""
        B, H, N, D = k_BHND.shape
        if not B * H * N:
            return
        self.allocate(k_BHND[:, :, 0], v_BHND[:, :, 0], len(members.count_L) // (B * H))
        assert self.keys_LWD is not None
        kept_J, list_J, slot_J = last_members(members, self.window)
        row_J = members.row_M[kept_J]
        self.keys_LWD[list_J, slot_J] = k_BHND.reshape(-1, D)[row_J]
        self.values_LWD[list_J, slot_J] = v_BHND.reshape(-1, v_BHND.shape[-1])[row_J]
        self.position_LW[list_J, slot_J] = row_J % N
        self.joined_L = members.count_L.clamp(max=self.window)  # the slot of the oldest is the next to be taken

    def step(
        self,
        q_BHD: Tensor,
        k_BHD: Tensor,
        v_BHD: Tensor,
        joins_BHC: Tensor,
        position: int,
        slot_BHC: Tensor | None = None,
        query_joins_BHC: Tensor | None = None,
    ) -> Tensor:
        """Put the position's key into its clusters, read there, and return the mean over clusters, `[B, H, D]`.

        The key takes the slots given, or else an empty one, then that of the oldest member. The query reads the
        clusters that it joins by `query_joins_BHC` (None: those of its key) and that hold a key.
        """
        clusters = joins_BHC.shape[-1]
        if self.keys_LWD is None:
            self.allocate(k_BHD, v_BHD, clusters)
        assert self.keys_LWD is not None
        joins_L = joins_BHC.flatten()
        list_J = joins_L.nonzero()[:, 0]
        if len(list_J):
            row_J = list_J // clusters
            slot_J = self.joined_L[list_J] % self.window if slot_BHC is None else slot_BHC.flatten()[list_J]
            self.joined_L += joins_L
            self.keys_LWD[list_J, slot_J] = k_BHD.flatten(0, 1)[row_J]
            self.values_LWD[list_J, slot_J] = v_BHD.flatten(0, 1)[row_J]
            self.position_LW[list_J, slot_J] = position
        if query_joins_BHC is not None:
            joins_L = query_joins_BHC.flatten() & (self.joined_L > 0)
            list_J = joins_L.nonzero()[:, 0]
        out_BHD = torch.zeros_like(v_BHD)
        if not len(list_J):
            return out_BHD
        row_J = list_J // clusters
        position_JW = self.position_LW[list_J]
        out_JD = attend(
            q_BHD.flatten(0, 1)[row_J][:, None, None],
            self.keys_LWD[list_J][:, None],
            self.values_LWD[list_J][:, None],
            logit_scale(self.scale, q_BHD.shape[-1]),
            mask_QK=self.readable(position_JW, position)[:, None, None],
            relative=self.relative,
            distance_QK=self.distance(position_JW, position)[:, None, None],
        )[:, 0, 0]
        wide = torch.promote_types(out_JD.dtype, torch.float32)
        total_RD = out_BHD.flatten(0, 1).to(wide).index_put_((row_J,), out_JD.to(wide), accumulate=True)
        count_R1 = joins_L.view(len(total_RD), clusters).sum(-1, keepdim=True).clamp(min=1)
        return (total_RD / count_R1).to(v_BHD.dtype).view_as(v_BHD)

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
