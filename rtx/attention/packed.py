"""Who reads whom, as packed lists: every query reads a contiguous range of one list of keys.

The rows are the positions of all sequences and heads, row = (b * H + h) * N + n. A list holds rows of one sequence and
head in order of position; lists stand one behind the other, in the order of their sequences and heads.

Shapes: B sequences, H heads, C lists of a head, N positions, R = B * H * N rows, L lists, P query members and M key
members of all lists together, K keys of a query at the most.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """Lists of rows."""

    row_M: Tensor
    count_L: Tensor
    """Members of each list."""

    def first_L(self) -> Tensor:
        """Return where in M each list begins."""
        return self.count_L.cumsum(0) - self.count_L

    def list_M(self) -> Tensor:
        """Return the list of every member."""
        number_L = torch.arange(len(self.count_L), device=self.row_M.device)
        return torch.repeat_interleave(number_L, self.count_L, output_size=len(self.row_M))

    def keep(self, kept_R: Tensor) -> Packed:
        """Return the lists without the rows that are not kept."""
        kept_M = kept_R[self.row_M]
        count_L = torch.bincount(self.list_M()[kept_M], minlength=len(self.count_L))
        return Packed(self.row_M[kept_M], count_L)


class Hidden(NamedTuple):
    """What is not read of ranges: by p not m where low_XP[x, p] <= value_XM[x, m] < high_XP[x, p] for any x."""

    value_XM: Tensor
    low_XP: Tensor
    high_XP: Tensor


class Window(NamedTuple):
    """Every list is one whole sequence; a position reads the last `keys` positions up to itself."""

    length: int
    """N, the memory included."""
    keys: int
    memory: int
    """Positions in front that are read, but do not read."""


class Reads(NamedTuple):
    """Query member p reads the key members start_P[p] to stop_P[p] - 1, in its list; neither falls from p to p + 1."""

    query: Packed
    key: Packed
    start_P: Tensor
    stop_P: Tensor
    length: int
    """N."""
    hidden: Hidden | None = None
    """What of the ranges is not read; nowhere all of a range, where outputs are means over lists."""
    most: int | None = None
    """Keys of a range at the most, as far as shapes tell."""
    window: Window | None = None
    """Set where the lists are whole sequences with a window."""
    derived: dict[str, Any] | None = None
    """What engines derive from the lists, by name, where these serve many passes, or made with them; else None."""

    def times_R(self, rows: int) -> Tensor:
        """Return in how many lists each row has a range."""
        times_R = torch.zeros(rows, dtype=torch.int64, device=self.start_P.device)
        return times_R.index_add_(0, self.query.row_M, (self.stop_P > self.start_P).long())


class Indexed(NamedTuple):
    """Row r reads the rows index_RK[r] of its head, each once and none behind itself; -1 stands for none."""

    index_RK: Tensor
    length: int


Part = Reads | Indexed


def pack(list_BHN: Tensor, lists: int, complete: bool = False) -> Packed:
    """Return the lists of positions that each belong to one list of their head, or to none (-1).

    Args:
        complete: every position belongs to a list. The number of members then follows from shapes.
    """
    B, H, N = list_BHN.shape
    head_X1 = torch.arange(B * H, device=list_BHN.device)[:, None]
    list_XN = list_BHN.reshape(B * H, N)
    # Positions of no list are counted as a last one of their head, and cut off. Short numbers are sorted faster.
    number_R = (torch.where(list_XN < 0, lists, list_XN) + head_X1 * (lists + 1)).flatten()
    few = B * H * (lists + 1) < 1 << 15
    number_M, row_M = number_R.to(torch.int16 if few else torch.int64).sort(stable=True)
    bound_L = torch.arange(B * H * (lists + 1) + 1, device=list_BHN.device, dtype=number_M.dtype)
    count_XL = torch.searchsorted(number_M, bound_L).diff().view(B * H, lists + 1)
    if not complete and bool((list_XN < 0).any()):
        row_M = row_M[(list_XN >= 0).flatten()[row_M]]
    return Packed(row_M, count_XL[:, :lists].flatten())


def members_read(queries: Packed, keys: Packed, length: int, window: int, attend_self: bool = True) -> Reads:
    """Every query reads the last `window` keys of its list up to its position; without `attend_self` others alone.

    Itself only where there is no other among them.
    """
    if queries is keys:
        stop_P = torch.arange(1, len(keys.row_M) + 1, device=keys.row_M.device)
    else:
        key_order_M, query_order_P = (x.list_M() * length + x.row_M % max(1, length) for x in (keys, queries))
        stop_P = torch.searchsorted(key_order_M, query_order_P, right=True)
    start_P = keys.first_L()[queries.list_M()].maximum(stop_P - window)
    stop_P = stop_P.maximum(start_P)
    if not attend_self and len(keys.row_M):
        last_is_self_P = keys.row_M[(stop_P - 1).clamp(min=0)] == queries.row_M
        stop_P = stop_P - (last_is_self_P & (stop_P - start_P > 1)).long()
    return Reads(queries, keys, start_P, stop_P, length, most=min(window, length))


def without_self(parts: list[Reads], rows: int) -> list[Reads]:
    """Let no row read itself, the last of a range, but where it reads nothing else in any part."""
    read_R = torch.zeros(rows, dtype=torch.int64, device=parts[0].query.row_M.device)
    for part in parts:
        read_R.index_add_(0, part.query.row_M, part.stop_P - part.start_P)
    found = []
    for part in parts:
        row_P, some_P = part.query.row_M, part.stop_P > part.start_P
        if len(part.key.row_M):
            some_P = some_P & (part.key.row_M[(part.stop_P - 1).clamp(min=0)] == row_P) & (read_R[row_P] > 1)
        found.append(part._replace(stop_P=part.stop_P - some_P.long()))
    return found


def bounded_read(queries: Packed, keys: Packed, length: int, since_N: Tensor, until_N: Tensor) -> Reads:
    """Every query at position n reads the keys of its list at the positions since_N[n] to until_N[n] - 1."""
    key_order_M = keys.list_M() * length + keys.row_M % max(1, length)
    base_P, position_P = queries.list_M() * length, queries.row_M % max(1, length)
    start_P = torch.searchsorted(key_order_M, base_P + since_N[position_P].clamp(0, length))
    stop_P = torch.searchsorted(key_order_M, base_P + until_N[position_P].clamp(0, length))
    return Reads(queries, keys, start_P, stop_P.maximum(start_P), length)
