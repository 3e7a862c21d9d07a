"""Packed lists as GPU kernels read them: static shapes, int32, everything on the device.

The kernels never wait for the CPU, so every tensor has room for a fixed number of members, and a
count on the device says how many of them are real.

Shapes: R rows (row = (b * H + h) * N + n), P query members, M key members.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.packed import Hidden, Reads


class RowMembers(NamedTuple):
    """The members of each row: those of row r are member_M[first_R1[r]] to member_M[first_R1[r + 1] - 1]."""

    first_R1: Tensor
    """`[R + 1]`, ascending."""
    member_M: Tensor
    """Numbers of members, in ascending order within a row."""


class KernelLists(NamedTuple):
    """Who reads whom, for a kernel that works on query members or on key members.

    Query member p reads the key members start_P[p] to stop_P[p] - 1. Neither bound falls from p to
    p + 1, so the query members that read key member m are a range as well: low_M[m] to
    high_M[m] - 1. Members behind the count have row 0 and an empty range.
    """

    query_row_P: Tensor
    key_row_M: Tensor
    start_P: Tensor
    stop_P: Tensor
    low_M: Tensor
    high_M: Tensor
    query_members: RowMembers
    key_members: RowMembers
    count_2: Tensor
    """How many query members and how many key members are real, `[2]`."""
    hidden: Hidden | None = None
    """What of the ranges is not read."""


def row_members(row_M: Tensor, rows: int) -> RowMembers:
    """Return the members of each row, by one stable sort of the members' rows."""
    sorted_M, member_M = row_M.sort(stable=True)
    bound_R1 = torch.arange(rows + 1, device=row_M.device, dtype=row_M.dtype)
    first_R1 = torch.searchsorted(sorted_M, bound_R1, out_int32=True)
    return RowMembers(first_R1, member_M.int())


def kernel_lists(part: Reads, rows: int) -> KernelLists:
    """Return the packed lists of `part` as kernels read them; every member is real."""
    query_row_P = part.query.row_M.int()
    key_row_M = query_row_P if part.key is part.query else part.key.row_M.int()
    query_members = row_members(query_row_P, rows)
    key_members = query_members if part.key is part.query else row_members(key_row_M, rows)
    start_P = part.start_P.int().contiguous()
    stop_P = part.stop_P.int().contiguous()
    every_M = torch.arange(len(key_row_M), device=start_P.device, dtype=torch.int32)
    low_M = torch.searchsorted(stop_P, every_M, right=True, out_int32=True)
    high_M = torch.searchsorted(start_P, every_M, right=True, out_int32=True)
    # Filled on the device: a copy of numbers from the CPU would wait for the GPU.
    counts = [start_P.new_full((1,), len(x)) for x in (query_row_P, key_row_M)]
    count_2 = torch.cat(counts)
    return KernelLists(
        query_row_P,
        key_row_M,
        start_P,
        stop_P,
        low_M,
        high_M,
        query_members,
        key_members,
        count_2,
        part.hidden,
    )
