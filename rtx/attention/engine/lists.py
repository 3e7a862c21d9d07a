"""Packed lists as GPU kernels read them, in int32 tensors on the device.

`rtx.attention.reads` explains rows, lists and members. Queries and keys have separate lists, or
share them.

Example: 6 rows, and two lists that queries and keys share, [0, 2, 5] and [2, 3]. Each member reads
itself and the one before it in its list. Members are p as queries and m as keys:

    list                    0  0  0   1  1
    member, p or m          0  1  2   3  4
    row                     0  2  5   2  3
    start_P                 0  0  1   3  3      query member 2 reads the key members
    stop_P                  1  2  3   4  5      start = 1 to stop - 1 = 2
    low_M                   0  1  2   3  4      key member 1 is read by the query members
    high_M                  2  3  3   5  5      low = 1 to high - 1 = 2

Numbers of rows and members are int32, so R, P and M must be below 2^31: about 16,000 heads of all
sequences at 131,072 positions.

Starts and stops never decrease. Therefore the query members that read one key member are
consecutive as well: low to high - 1. The kernel of the keys' gradients loops over them.

The members of each row are stored as in a compressed sparse row (CSR) matrix:

    row                     0  1  2  3  4  5
    first_R1                0  1  1  3  4  4  5
    member_M                0  1  3  4  2       row 2 has the members at places 1 and 2: 1 and 3

If the number of members depends on content, the CPU would have to wait for the GPU to learn it. So
`static_selection.py` and `triton_selection.py` make tensors with slots for a fixed number P or M of
members, of which the first are real. The others have row 0 and the ranges start = stop = M and
low = high = P, which are empty and keep the bounds ascending; `RowMembers` leaves them out.
`count_2` has the numbers of real members. The attention kernels do not read it, because empty
ranges need no work.

If every list is one whole sequence, in order, then member p is row p (`in_order`). Kernels then
read no row numbers, and their outputs by member are by row already.

Shapes: R rows, R1 = R + 1, P query members, M key members.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.reads import Holes, RangeReads


class RowMembers(NamedTuple):
    """The members of each row: of row r, those at the places first_R1[r] to first_R1[r + 1] - 1."""

    first_R1: Tensor
    """`[R + 1]`, ascending."""
    member_M: Tensor
    """`[M]`, of query members `[P]`: numbers of members, ascending within a row."""


class KernelLists(NamedTuple):
    """Which query members read which key members; the module has an example.

    All tensors but `holes` are int32.
    """

    query_row_P: Tensor
    """The row of each query member."""
    key_row_M: Tensor
    """The row of each key member; the same object as `query_row_P` if lists are shared."""
    start_P: Tensor
    """The first key member that a query member reads."""
    stop_P: Tensor
    """The key member after the last one."""
    low_M: Tensor
    """The first query member that reads a key member."""
    high_M: Tensor
    """The query member after the last one."""
    query_members: RowMembers
    key_members: RowMembers
    count_2: Tensor
    """The numbers of real query members and real key members, `[2]`."""
    holes: Holes | None = None
    """Pairs within the ranges that are not read."""
    in_order: bool = False
    """Whether queries and keys share the lists, and each list is one whole sequence in order.

    It follows from how lists are made, never from numbers in tensors.
    """


def row_members(row_M: Tensor, rows: int) -> RowMembers:
    """Return the members of each row.

    Args:
        row_M: the members' rows. `rows` or more: of no row.
        rows: R.
    """
    sorted_row_M, member_M = row_M.sort(stable=True)
    every_row_R1 = torch.arange(rows + 1, device=row_M.device, dtype=row_M.dtype)
    first_R1 = torch.searchsorted(sorted_row_M, every_row_R1, out_int32=True)
    return RowMembers(first_R1, member_M.int())


def readers(start_P: Tensor, stop_P: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Return `low_M` and `high_M` of `KernelLists` for the ranges of query members.

    p reads m where start_P[p] <= m < stop_P[p]. Both ascend. So the second condition holds for p
    from the first stop above m on, and the first one for p before the first start above m.

    Args:
        keys: M.
    """
    member_M = torch.arange(keys, device=start_P.device, dtype=torch.int32)
    low_M = torch.searchsorted(stop_P, member_M, right=True, out_int32=True)
    high_M = torch.searchsorted(start_P, member_M, right=True, out_int32=True)
    return low_M, high_M


def kernel_lists(part: RangeReads, rows: int) -> KernelLists:
    """Return the lists of `part` as kernels read them, without empty slots: every member is real.

    Args:
        rows: R.
    """
    query_row_P = part.query.row_M.int()
    query_members = row_members(query_row_P, rows)
    key_row_M = query_row_P
    key_members = query_members
    shared = part.key is part.query
    if not shared:
        key_row_M = part.key.row_M.int()
        key_members = row_members(key_row_M, rows)
    start_P = part.start_P.int().contiguous()
    stop_P = part.stop_P.int().contiguous()
    low_M, high_M = readers(start_P, stop_P, len(key_row_M))
    # Filled on the device: a copy of numbers from the CPU would wait for the GPU.
    query_count_1 = start_P.new_full((1,), len(query_row_P))
    key_count_1 = start_P.new_full((1,), len(key_row_M))
    return KernelLists(
        query_row_P=query_row_P,
        key_row_M=key_row_M,
        start_P=start_P,
        stop_P=stop_P,
        low_M=low_M,
        high_M=high_M,
        query_members=query_members,
        key_members=key_members,
        count_2=torch.cat([query_count_1, key_count_1]),
        holes=part.holes,
        in_order=shared and part.window is not None and part.window.memory == 0,
    )
