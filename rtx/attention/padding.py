"""Attention over padded sequences: remove the padding, attend, and write the outputs back.

Windows, distances and rotary angles are then those of the real positions alone. For example, of two
sequences of the positions 0 to 3 the first is real at 0, 1 and 3. It is attended as a sequence of
three positions; its outputs return to 0, 1 and 3, and position 2 gets zero.

Sequences with padding at the same positions form a group, which is attended in one pass. Documents
of equal length form groups as well (documents.py).

Shapes: B sequences, H heads, N positions, D head size, U groups of sequences that are padded alike,
J real positions of all sequences, group after group; a row is a position of a sequence, b * N + n.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.typed_torch import tolist, unique_rows

QKV = tuple[Tensor, Tensor | None, Tensor]
"""Queries, keys (None where queries serve as keys) and values, `[B, H, N, D]`."""
Attend = Callable[[QKV, int], tuple[Tensor, Tensor]]
"""Returns outputs and auxiliary loss of sequences, from their queries, keys and values and from the
length of their memory."""


class Group(NamedTuple):
    """Sequences that are attended in one pass: those that are padded alike, or some documents."""

    sequences: int
    length: int
    """The number of real positions of a sequence."""
    memory: int
    """The number of these that are in the memory."""

    def positions(self) -> int:
        """Return the number of real positions of all its sequences."""
        return self.sequences * self.length


def attend_padded(
    attend: Attend,
    qkv: QKV,
    real_BN: Tensor,
    memory: int,
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[B, H, N, D]` of the positions after a memory, and the auxiliary loss.

    Padding gets zero. The loss is the mean over all real positions.

    Args:
        attend: for sequences without padding.
        real_BN: false at padding.
        memory: see `Pattern.forward`.
    """
    groups, row_J = groups_padded_alike(real_BN, memory)
    return attend_groups(attend, qkv, groups, row_J, memory)


def attend_groups(
    attend: Attend,
    qkv: QKV,
    groups: list[Group],
    row_J: Tensor,
    memory: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[B, H, N, D]` of the positions after a memory, and the auxiliary loss.

    Positions in no group get zero. The loss is the mean over the positions of all groups.

    Args:
        attend: see `attend_padded`.
        row_J: the rows of the positions of all groups, group after group.
        memory: see `Pattern.forward`.
    """
    # One gather and one write for all groups, so that gradients are added up once.
    inputs = inputs_of_groups(qkv, row_J, groups)
    real_positions = max(1, len(row_J))
    outs: list[Tensor] = []
    losses: list[Tensor] = []
    for group, qkv_of_group in zip(groups, inputs, strict=True):
        out_BHND, loss = attend(qkv_of_group, group.memory)
        # The positions of the memory have no outputs.
        before_outputs = (0, 0, group.memory, 0)
        out_BHND = F.pad(out_BHND, before_outputs)
        outs.append(by_rows(out_BHND))
        share = group.positions() / real_positions
        losses.append(loss * share)
    q_BHND, _, _ = qkv
    B, _, N, _ = q_BHND.shape
    out_BHND = scattered(torch.cat(outs), row_J, B, N)
    total_loss = torch.stack(losses).sum()
    return out_BHND[:, :, memory:], total_loss


def inputs_of_groups(qkv: QKV, row_J: Tensor, groups: list[Group]) -> list[QKV]:
    """Return the queries, keys and values of each group."""
    q_BHND, k_BHND, v_BHND = qkv
    queries = real_parts(q_BHND, row_J, groups)
    values = real_parts(v_BHND, row_J, groups)
    keys: list[Tensor] | list[None] = [None for _ in groups]
    if k_BHND is not None:
        keys = real_parts(k_BHND, row_J, groups)
    return list(zip(queries, keys, values, strict=True))


def by_rows(x_BHND: Tensor) -> Tensor:
    """Return the vectors of one row after the other, `[B * N, H, D]`."""
    x_BNHD = x_BHND.transpose(1, 2)
    return x_BNHD.flatten(0, 1)


def scattered(out_JHD: Tensor, row_J: Tensor, B: int, N: int) -> Tensor:
    """Return the outputs at their rows, and zeros in all others, `[B, H, N, D]`."""
    _, H, D = out_JHD.shape
    out_RHD = out_JHD.new_zeros(B * N, H, D)
    out_RHD = out_RHD.index_copy(0, row_J, out_JHD)
    out_BNHD = out_RHD.view(B, N, H, D)
    return out_BNHD.transpose(1, 2)


def groups_padded_alike(real_BN: Tensor, memory: int) -> tuple[list[Group], Tensor]:
    """Return the groups that have real positions, and the rows of these positions, `[J]`."""
    real_UN, group_B = unique_rows(real_BN)
    sequences = tolist(group_B.bincount())
    lengths = tolist(real_UN.sum(1))
    memory_UN = real_UN[:, :memory]
    memories = tolist(memory_UN.sum(1))
    groups: list[Group] = []
    for number, length in enumerate(lengths):
        group = Group(
            sequences=sequences[number],
            length=length,
            memory=memories[number],
        )
        if group.length:
            groups.append(group)
    if not groups:
        # One group of length 0, so that outputs and loss still have gradients.
        groups = [Group(sequences=len(real_BN), length=0, memory=0)]
    return groups, rows_of_groups(real_BN, group_B)


def rows_of_groups(real_BN: Tensor, group_B: Tensor) -> Tensor:
    """Return the rows of real positions, group after group, `[J]`.

    Args:
        group_B: the number of the group of each sequence.
    """
    B, N = real_BN.shape
    row_R = torch.arange(B * N, device=real_BN.device)
    row_BN = row_R.view(B, N)
    order_B = group_B.argsort(stable=True)
    ordered_row_BN = row_BN[order_B]
    ordered_real_BN = real_BN[order_B]
    return ordered_row_BN[ordered_real_BN]


def real_parts(x_BHND: Tensor, row_J: Tensor, groups: list[Group]) -> list[Tensor]:
    """Return the vectors of each group, `[B, H, N, D]`: its sequences, at their real positions."""
    x_RHD = by_rows(x_BHND)
    x_JHD = x_RHD[row_J]
    counts = [group.positions() for group in groups]
    pieces = torch.split(x_JHD, counts)
    parts: list[Tensor] = []
    for group, piece_JHD in zip(groups, pieces, strict=True):
        shape_BN = (group.sequences, group.length)
        x_BNHD = torch.unflatten(piece_JHD, 0, shape_BN)
        parts.append(x_BNHD.transpose(1, 2))
    return parts
