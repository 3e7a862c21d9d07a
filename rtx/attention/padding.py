"""Attention over sequences with padding: sequences that are padded alike are attended without it.

Windows, distances and rotary angles are then those of the real positions alone. For example, of two
sequences of the positions 0 to 3 the first is real at 0, 1 and 3. It is attended as a sequence of
three positions; its outputs return to 0, 1 and 3, and position 2 gets zero.

Shapes: B sequences, H heads, N positions, D head size, G groups of sequences that are padded alike,
S real positions of all sequences, group after group; a row is a position of a sequence, b * N + n.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

QKV = tuple[Tensor, Tensor | None, Tensor]
"""Queries, keys (None where queries serve as keys) and values, `[B, H, N, D]`."""


class Group(NamedTuple):
    """Sequences that are real at the same positions."""

    sequences: int
    length: int
    """The number of real positions of a sequence."""
    memory: int
    """How many of these lie in the memory."""

    def positions(self) -> int:
        """Return the number of real positions of all its sequences."""
        return self.sequences * self.length


def attend_padded(
    attend: Callable[[QKV, int], tuple[Tensor, Tensor]],
    qkv: QKV,
    real_BN: Tensor,
    memory: int,
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[B, H, N, D]` of the positions after a memory, and the auxiliary loss.

    Padding gets zero. The loss is the mean over all real positions.

    Args:
        attend: returns outputs and loss of sequences without padding, from their queries, keys and
            values and from the length of their memory.
        real_BN: false at padding.
        memory: see `Pattern.forward`.
    """
    q_BHND, k_BHND, v_BHND = qkv
    groups, row_S = groups_padded_alike(real_BN, memory)
    # One gather and one write for all groups, so that gradients are added up once.
    queries = real_parts(q_BHND, row_S, groups)
    keys = [None] * len(groups) if k_BHND is None else real_parts(k_BHND, row_S, groups)
    values = real_parts(v_BHND, row_S, groups)
    outs = []
    losses = []
    for number, group in enumerate(groups):
        part = (queries[number], keys[number], values[number])
        out_BHND, loss = attend(part, group.memory)
        with_memory_BHND = F.pad(out_BHND, (0, 0, group.memory, 0))
        outs.append(with_memory_BHND.transpose(1, 2).flatten(0, 1))
        share = group.positions() / max(1, len(row_S))
        losses.append(loss * share)
    B, H, N, D = v_BHND.shape
    out_RHD = v_BHND.new_zeros(B * N, H, D)
    out_RHD = out_RHD.index_copy(0, row_S, torch.cat(outs))
    out_BHND = out_RHD.view(B, N, H, D).transpose(1, 2)
    return out_BHND[:, :, memory:], torch.stack(losses).sum()


def groups_padded_alike(real_BN: Tensor, memory: int) -> tuple[list[Group], Tensor]:
    """Return the groups that have real positions, and the rows of these positions, `[S]`."""
    B, N = real_BN.shape
    real_GN, group_B = real_BN.unique(dim=0, return_inverse=True)
    order_B = group_B.argsort(stable=True)
    row_BN = torch.arange(B * N, device=real_BN.device).view(B, N)
    row_S = row_BN[order_B][real_BN[order_B]]
    counts = (
        group_B.bincount().tolist(),
        real_GN.sum(1).tolist(),
        real_GN[:, :memory].sum(1).tolist(),
    )
    groups = [Group(*numbers) for numbers in zip(*counts, strict=True)]
    groups = [group for group in groups if group.length]
    if not groups:
        # An empty pass, so that outputs and loss depend on the inputs all the same.
        groups = [Group(sequences=B, length=0, memory=0)]
    return groups, row_S


def real_parts(
    x_BHND: Tensor,
    row_S: Tensor,
    groups: list[Group],
) -> list[Tensor]:
    """Return the vectors of each group's sequences at its real positions, `[B, H, N, D]` each."""
    x_SHD = x_BHND.transpose(1, 2).flatten(0, 1)[row_S]
    pieces = x_SHD.split([group.positions() for group in groups])
    parts = []
    for group, piece_SHD in zip(groups, pieces, strict=True):
        x_BNHD = piece_SHD.unflatten(0, (group.sequences, group.length))
        parts.append(x_BNHD.transpose(1, 2))
    return parts
