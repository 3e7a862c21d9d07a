"""What every kind of head offers a layer: a forward over a sequence, and a state that a stream keeps.

Shapes: B sequences or streams, H heads of one kind, N positions, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rtx.attention.arguments import check_turned
from rtx.attention.weights import Distances

Rotate = Callable[[Tensor], Tensor]
"""Turns queries and keys by their positions; a choice of keys by content always reads them unturned."""


RotateFrom = Callable[..., Tensor]
"""The same with the position of the first vector behind it: `rotate(x_BHND, first=0)`."""


class HeadState:
    """What a stream keeps of heads of one kind."""

    def fill(self, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor, rotate: RotateFrom | None = None) -> None:
        """Take in positions 0 to N - 1 of each stream, before any step: what N steps would leave behind, in one pass.

        The outputs of these positions are those of the heads' forward with `streaming`.
        """
        raise NotImplementedError

    def step(
        self, q_BHD: Tensor, k_BHD: Tensor | None, v_BHD: Tensor, position: int, rotate: Rotate | None = None
    ) -> Tensor:
        """Take in the next position of each stream and return its output `[B, H, D]`."""
        raise NotImplementedError


class Heads(nn.Module):
    """H heads of one pattern. Heads whose queries stand for keys are called with None for keys.

    Their `backend` is that of the forward over a sequence; the steps of a stream have one implementation.
    """

    def forward(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor | None,
        v_BHND: Tensor,
        *,
        rotate: Rotate | None = None,
        relative: Distances | None = None,
        streaming: bool = False,
        mask_BN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs `[B, H, N, D]` and an auxiliary loss, zero where the pattern has none.

        `streaming`: every decision is made from the prefix alone, for patterns that would else see the future.
        `mask_BN`: true at real positions; padding is not read, and its own output is zero. Streams have no padding.
        """
        raise NotImplementedError

    def start(self, relative: Distances | None = None) -> HeadState:
        """Return the state of a stream (or a batch of them) at position 0."""
        raise NotImplementedError


class PositionHeads(Heads):
    """Heads with keys of their own that choose by position alone: queries and keys are turned before all else."""

    scale: float | None
    dropout: float
    backend: str

    def read(self, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, **options: Any) -> Tensor:
        """Return the outputs `[B, H, N, D]` for turned queries and keys.

        The options are those of all patterns: `scale`, `dropout`, `relative`, `mask_BN` and `backend`.
        """
        raise NotImplementedError

    def loss(self, like_BHND: Tensor) -> Tensor:
        """Return the auxiliary loss."""
        return like_BHND.new_zeros(())

    def forward(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor | None,
        v_BHND: Tensor,
        *,
        rotate: Rotate | None = None,
        relative: Distances | None = None,
        streaming: bool = False,
        mask_BN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Heads.forward`."""
        if k_BHND is None:
            raise ValueError("k_BHND=None: these heads need keys of their own")
        q_BHND, k_BHND = turn(q_BHND, rotate), turn(k_BHND, rotate)
        options = {"scale": self.scale, "dropout": self.dropout if self.training else 0.0, "backend": self.backend}
        out_BHND = self.read(q_BHND, k_BHND, v_BHND, relative=relative, mask_BN=mask_BN, **options)
        return out_BHND, self.loss(q_BHND)


def turn(x_BHND: Tensor, rotate: Rotate | None) -> Tensor:
    """Return the vectors, turned where there is anything to turn by.

    Raises:
        ValueError: they have another shape then.
    """
    if rotate is None:
        return x_BHND
    turned_BHND = rotate(x_BHND)
    check_turned(turned_BHND, x_BHND)
    return turned_BHND


def turn_step(x_BHD: Tensor, rotate: Rotate | None) -> Tensor:
    """As `turn`, for the vectors of one position."""
    return turn(x_BHD[:, :, None], rotate)[:, :, 0]


def last_slots(x_BHND: Tensor, slots: int) -> Tensor:
    """Return `[B, H, slots, D]`: the last vectors, position i in slot i mod `slots`, zeros where there is none."""
    B, H, N, D = x_BHND.shape
    kept_N = torch.arange(max(0, N - slots), N, device=x_BHND.device)
    room_BHWD = x_BHND.new_zeros(B, H, slots, D)
    room_BHWD[:, :, kept_N % slots] = x_BHND[:, :, kept_N]
    return room_BHWD
