"""What every kind of head offers a layer: a forward over a sequence, and a state that a stream keeps.

Shapes: B sequences or streams, H heads of one kind, N positions, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from rtx.attention.weights import Distances

Rotate = Callable[[Tensor], Tensor]
"""Turns queries and keys by their positions; a choice of keys by content always reads them unturned."""


class HeadState(Protocol):
    """What a stream keeps of heads of one kind."""

    def step(
        self, q_BHD: Tensor, k_BHD: Tensor | None, v_BHD: Tensor, position: int, rotate: Rotate | None = None
    ) -> Tensor:
        """Take in the next position of each stream and return its output `[B, H, D]`."""
        ...


class Heads(nn.Module):
    """H heads of one pattern. Heads whose queries stand for keys are called with None for keys."""

    def forward(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor | None,
        v_BHND: Tensor,
        *,
        rotate: Rotate | None = None,
        relative: Distances | None = None,
        streaming: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs `[B, H, N, D]` and an auxiliary loss, zero where the pattern has none.

        `streaming`: every decision is made from the prefix alone, for patterns that would else see the future.
        """
        raise NotImplementedError

    def start(self, relative: Distances | None = None) -> HeadState:
        """Return the state of a stream (or a batch of them) at position 0."""
        raise NotImplementedError


def turn_step(x_BHD: Tensor, rotate: Rotate | None) -> Tensor:
    """Return the vectors of one position, turned where there is anything to turn by."""
    return x_BHD if rotate is None else rotate(x_BHD[:, :, None])[:, :, 0]
