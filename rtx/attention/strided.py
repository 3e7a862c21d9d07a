"""Strided attention: position i reads every j <= i that lies a multiple of the stride before it.

The pattern of Child et al. 2019 for data with a period, such as the rows of an image.

Shapes: B sequences or streams, H heads, N positions, D head size, L stride, M positions of one remainder,
X = B * L pairs of a sequence and a remainder.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention import by_flex, by_reference, reference
from rtx.attention.arguments import check_attention, check_numbers, check_positive
from rtx.attention.backends import Call, check_backend, choose
from rtx.attention.heads import HeadState, PositionHeads, Rotate, RotateFrom, turn, turn_step
from rtx.attention.weights import Distances, attend, logit_scale, without_padding


def strided(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    *,
    stride: int,
    scale: float | None = None,
    dropout: float = 0.0,
    relative: Distances | None = None,
    mask_BN: Tensor | None = None,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """Return causal attention over the positions i, i - stride, i - 2 stride, ..., `[B, H, N, D]`.

    Any N and stride; a stride of N or more leaves every position alone. Positions of one remainder stand together, so
    that each remainder is causal attention over N / stride positions: cost N^2 / stride. Memory is linear in N, with
    `relative` or `mask_BN` N^2 / stride.

    Args:
        q_BHND, k_BHND, v_BHND: queries, keys and values.
        stride: L, at least 1.
        scale: factor on the logits (default 1 / sqrt(D)).
        dropout: share of the attention weights to drop.
        relative: Shaw's terms, by true distance.
        mask_BN: true at real positions; the others are not read, and their output is zero.
        backend: "auto", "reference", "torch" or "flex", see `rtx.attention.backends`; the same result from each.
        check_finite: refuse inputs that hold NaN or infinity (padding may). Without it such a value may spread inside
            one tile of a fast path; by backend="reference" it never reaches an earlier position.

    Raises:
        ValueError: tensors that do not go together, or a stride below 1.
    """
    given = {"mask_BN": mask_BN, "scale": scale, "dropout": dropout, "relative": relative}
    check_attention(q_BHND, k_BHND, v_BHND, **given, needs_keys=True, finite=check_finite)
    check_positive("stride", stride)
    chosen = choose(backend, Call("strided", q_BHND, k_BHND, v_BHND, dropout, relative))
    if chosen == "reference":
        options = {"scale": scale, "relative": relative, "mask_BN": mask_BN}
        sets = partial(reference.strided_sets, stride=stride)
        return by_reference.read_heads(q_BHND, k_BHND, v_BHND, lambda b, h: sets, **options)
    if chosen == "flex":
        return by_flex.strided(q_BHND, k_BHND, v_BHND, stride=stride, scale=scale, mask_BN=mask_BN)
    B, _, N, _ = q_BHND.shape
    stride = max(1, min(stride, N))
    q_BHND, k_BHND, v_BHND = (without_padding(x, mask_BN) for x in (q_BHND, k_BHND, v_BHND))
    q_XHMD, k_XHMD, v_XHMD = (by_remainder(x, stride) for x in (q_BHND, k_BHND, v_BHND))
    slot_M = torch.arange(q_XHMD.shape[2], device=q_BHND.device)
    distance_MM = (slot_M[:, None] - slot_M[None]) * stride
    visible = None if relative is None else distance_MM >= 0
    if mask_BN is not None:
        real_XM = F.pad(mask_BN, (0, -N % stride)).unflatten(1, (-1, stride)).transpose(1, 2).flatten(0, 1)
        # Padding reads itself, so that no softmax is empty; what it reads is thrown away.
        visible = (distance_MM >= 0) & (real_XM[:, None, None] | (distance_MM == 0))
    out_XHMD = attend(
        q_XHMD,
        k_XHMD,
        v_XHMD,
        logit_scale(scale, q_BHND.shape[-1]),
        mask_QK=visible,
        dropout=dropout,
        relative=relative,
        distance_QK=distance_MM,
    )
    out_BHND = out_XHMD.unflatten(0, (B, stride)).permute(0, 2, 3, 1, 4).flatten(2, 3)[:, :, :N]
    return without_padding(out_BHND, mask_BN)


def by_remainder(x_BHND: Tensor, stride: int) -> Tensor:
    """Return the vectors with the positions of one remainder together, `[B * L, H, M, D]`, zeros behind the end."""
    padded_BHND = F.pad(x_BHND, (0, 0, 0, -x_BHND.shape[2] % stride))
    return padded_BHND.unflatten(2, (-1, stride)).permute(0, 3, 1, 2, 4).flatten(0, 1)


class StridedHeads(PositionHeads):
    """Heads of `strided`; `stride`, `scale`, `dropout` (in training) and `backend` as there."""

    def __init__(self, *, stride: int, scale: float | None = None, dropout: float = 0.0, backend: str = "auto") -> None:
        super().__init__()
        check_positive("stride", stride)
        check_numbers(scale, dropout)
        check_backend(backend)
        self.stride, self.scale, self.dropout, self.backend = stride, scale, dropout, backend

    def read(self, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, **options: Any) -> Tensor:
        """See `PositionHeads`."""
        return strided(q_BHND, k_BHND, v_BHND, stride=self.stride, **options)

    def start(self, relative: Distances | None = None) -> StridedState:
        """See `Heads.start`."""
        return StridedState(self.stride, self.scale, relative)


class StridedState(HeadState):
    """What a streaming strided head keeps: every key and value, since each is read again a stride later.

    A step reads those of its own remainder alone, one for each stride passed, and copies none of them.
    """

    def __init__(self, stride: int, scale: float | None = None, relative: Distances | None = None) -> None:
        self.stride, self.scale, self.relative = stride, scale, relative
        self.keys_BHLMD: Tensor | None = None
        self.values_BHLMD: Tensor | None = None

    def fill(self, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor, rotate: RotateFrom | None = None) -> None:
        """See `HeadState`."""
        assert k_BHND is not None
        if not k_BHND.shape[2]:
            return
        padding = -k_BHND.shape[2] % self.stride
        self.keys_BHLMD, self.values_BHLMD = (
            F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, self.stride)).transpose(2, 3).contiguous()
            for x in (turn(k_BHND, rotate), v_BHND)
        )

    def step(
        self, q_BHD: Tensor, k_BHD: Tensor | None, v_BHD: Tensor, position: int, rotate: Rotate | None = None
    ) -> Tensor:
        """Take in the next position of each stream and return its output `[B, H, D]`."""
        assert k_BHD is not None
        q_BHD, k_BHD = turn_step(q_BHD, rotate), turn_step(k_BHD, rotate)
        if self.keys_BHLMD is None or self.values_BHLMD is None:
            shape = (*k_BHD.shape[:2], self.stride, 1, k_BHD.shape[-1])
            self.keys_BHLMD, self.values_BHLMD = k_BHD.new_zeros(shape), v_BHD.new_zeros(shape)
        slot, remainder = divmod(position, self.stride)
        if slot == self.keys_BHLMD.shape[3]:  # twice the room, so that growing costs little on average
            self.keys_BHLMD, self.values_BHLMD = (
                F.pad(x, (0, 0, 0, slot)) for x in (self.keys_BHLMD, self.values_BHLMD)
            )
        self.keys_BHLMD[:, :, remainder, slot] = k_BHD
        self.values_BHLMD[:, :, remainder, slot] = v_BHD
        distance_1K = (slot - torch.arange(slot + 1, device=q_BHD.device))[None] * self.stride
        out_BH1D = attend(
            q_BHD[:, :, None],
            self.keys_BHLMD[:, :, remainder, : slot + 1],
            self.values_BHLMD[:, :, remainder, : slot + 1],
            logit_scale(self.scale, q_BHD.shape[-1]),
            mask_QK=distance_1K >= 0,
            relative=self.relative,
            distance_QK=distance_1K,
        )
        return out_BH1D[:, :, 0]
