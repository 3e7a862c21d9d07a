"""Which query reads which keys: as packed lists (`RangeReads`), or as an index (`IndexReads`).

In packed lists every query reads a contiguous range of one list of keys; an index names the keys of
each query. A query *reads* a key if it attends to it.

A *row* is a position of one sequence and head: row = (b * H + h) * N + n. A *list* holds rows of
one sequence and head, in order of position. Lists follow one another in one tensor, in the order of
their sequences and heads. For example, one sequence of one head with six positions (rows 0 to 5) in
two lists, where every query reads the last two keys of its list:

    list              0      1
    row_M           0 2 3  1 4 5
    member number   0 1 2  3 4 5
    start_P         0 0 1  3 3 4
    stop_P          1 2 3  4 5 6

A *member* is one place in one list; members are numbered over all lists. *Query member* 2 is row 3;
it reads the *key members* 1 and 2 (start_P[2] to stop_P[2] - 1), which are the rows 2 and 3. A row
in two lists is two members.

Shapes: B sequences, H heads, X = B * H, C lists of a head, N positions, R = B * H * N rows, L lists
of all heads, P query members and M key members of all lists together, K keys of a query at most, i
conditions of holes, x copies of sequences (grouped.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rtx.attention.documents import Documents


class QueriesKeys(NamedTuple):
    """The queries and keys of some positions of each sequence."""

    q_BHND: Tensor
    k_BHND: Tensor
    """Before rotation; most selections by content compare these."""
    rotated_q_BHND: Tensor
    rotated_k_BHND: Tensor
    """After rotation, for the logits; without rotary positions the same tensors."""
    memory: int = 0
    """The number of positions at the start that belong to earlier segments and serve as keys and
    values alone."""
    narrow_q_BHND: Tensor | None = None
    """`rotated_q_BHND` rounded to the type of the inputs; None: not computed yet."""
    narrow_k_BHND: Tensor | None = None
    each_q_xHND: Tensor | None = None
    """The queries of every query head, as `grouped.heads_to_copies` returns them, if query heads
    choose together (`rtx.attention.grouped`): `q_BHND` has their means. Otherwise None."""
    rotated_each_q_xHND: Tensor | None = None
    """The same after rotation."""
    documents: Documents | None = None
    """Documents that reads must keep to; None: each sequence is one document."""
    counts: tuple[int, int] | None = None
    """In cross-attention the numbers of queries and of keys, without the zeros that make both N.

    None: both are N.
    """

    def numbers(self) -> tuple[int, int]:
        """Return the numbers of queries and of keys; see `counts`."""
        if self.counts is not None:
            return self.counts
        N = self.q_BHND.shape[2]
        return N, N


class MemberLists(NamedTuple):
    """Packed lists of rows."""

    row_M: Tensor
    """The row of each member, list after list."""
    count_L: Tensor
    """The number of members of each list."""

    def first_L(self) -> Tensor:
        """Return the number of each list's first member."""
        return self.count_L.cumsum(0) - self.count_L

    def list_M(self) -> Tensor:
        """Return the list of every member."""
        lists = len(self.count_L)
        members = len(self.row_M)
        number_L = torch.arange(lists, device=self.row_M.device)
        return torch.repeat_interleave(number_L, self.count_L, output_size=members)

    def keep(self, remains_R: Tensor) -> MemberLists:
        """Return the lists without the members whose row is false in `remains_R`, bool."""
        lists = len(self.count_L)
        remains_M = remains_R[self.row_M]
        list_J = self.list_M()[remains_M]
        count_L = torch.bincount(list_J, minlength=lists)
        return MemberLists(self.row_M[remains_M], count_L)


class Holes(NamedTuple):
    """Exceptions from ranges, by i conditions.

    Query member p does not read key member m, although it is in its range, if for any condition i

        low_iP[i, p] <= value_iM[i, m] < high_iP[i, p].
    """

    value_iM: Tensor
    low_iP: Tensor
    high_iP: Tensor


class Window(NamedTuple):
    """Every list is one whole sequence; a position reads the last `keys` positions up to itself."""

    length: int
    """N, the memory included."""
    keys: int
    memory: int
    """The number of positions at the start that serve as keys and values alone."""


class RangeReads(NamedTuple):
    """Packed lists: query member p reads the key members start_P[p] to stop_P[p] - 1.

    A range lies within the list of its query member. Starts and stops never decrease from one query
    member to the next. A range with start = stop is empty.
    """

    query: MemberLists
    key: MemberLists
    """The same object as `query` where queries and keys share their lists."""
    start_P: Tensor
    stop_P: Tensor
    length: int
    """N."""
    holes: Holes | None = None
    """Key members within the ranges that are not read.

    With merge="mean", holes must not exclude all keys of a range, because `times_R` would still
    count that range.
    """
    most: int | None = None
    """An upper bound on the length of a range, known from shapes alone; None: unknown."""
    window: Window | None = None
    """Set if the lists are whole sequences with a window, without holes."""
    derived: dict[str, Any] | None = None
    """Tables that engines compute from the lists, by name.

    A dictionary if lists serve several passes (`rtx.attention.once` fills it), or if the tables are
    made together with the lists. None: engines compute the tables again in every pass.
    """

    def times_R(self, rows: int) -> Tensor:
        """Return in how many lists each row has a range that is not empty, `[R]`."""
        reads_some_P = self.stop_P > self.start_P
        times_R = self.start_P.new_zeros(rows, dtype=torch.int64)
        return times_R.index_add_(0, self.query.row_M, reads_some_P.long())

    def lists_read_P(self, rows: int) -> Tensor:
        """Return in how many lists the row of each query member reads something; at least 1."""
        times_R = self.times_R(rows).clamp(min=1)
        return times_R[self.query.row_M]


class IndexReads(NamedTuple):
    """An index: row r reads the rows index_RK[r].

    They belong to the same sequence and head as r, have positions up to that of r, and occur once.
    An entry of -1 names no row.
    """

    index_RK: Tensor
    length: int
    """N."""
    both_sides: bool = False
    """Whether rows may have positions after that of r, too."""


Reads = RangeReads | IndexReads


def first_rows(B: int, H: int, N: int, device: torch.device) -> Tensor:
    """Return the row of position 0 of each sequence and head, `[B, H, 1, 1]`."""
    head_X = torch.arange(B * H, device=device)
    row_X = head_X * N
    return row_X.view(B, H, 1, 1)


def pack(list_BHN: Tensor, lists: int, complete: bool = False) -> MemberLists:
    """Return packed lists, from the number of the list that each position belongs to.

    Args:
        list_BHN: the position's list, 0 to C - 1; -1: none.
        lists: C.
        complete: no position has -1. The number of members is then B * H * N, so that the CPU need
            not wait for a GPU to learn it.
    """
    B, H, N = list_BHN.shape
    list_XN = list_BHN.reshape(B * H, N)
    # Each head gets one more list, for the positions with -1, which is removed at the end.
    lists_of_head = lists + 1
    has_none_XN = list_XN < 0
    list_of_head_XN = torch.where(has_none_XN, lists, list_XN)
    row_M, count_L = sorted_by_list(list_of_head_XN, lists_of_head)
    count_XC = count_L.view(B * H, lists_of_head)
    count_L = count_XC[:, :lists].flatten()
    if not complete and bool(has_none_XN.any()):
        has_list_R = ~has_none_XN.flatten()
        row_M = row_M[has_list_R[row_M]]
    return MemberLists(row_M, count_L)


def sorted_by_list(list_XN: Tensor, lists_of_head: int) -> tuple[Tensor, Tensor]:
    """Return the rows of all positions, list after list, and the number of rows of each list.

    Args:
        list_XN: the list of each position, from 0 to `lists_of_head` - 1.
    """
    X = len(list_XN)
    device = list_XN.device
    lists = X * lists_of_head
    # Short numbers are sorted faster.
    dtype = torch.int64
    if lists < 1 << 15:
        dtype = torch.int16
    head_X = torch.arange(X, device=device)
    number_XN = head_X[:, None] * lists_of_head + list_XN
    number_R = number_XN.flatten().to(dtype)
    number_M, row_M = number_R.sort(stable=True)
    bound = torch.arange(lists + 1, device=device, dtype=dtype)
    first = torch.searchsorted(number_M, bound)
    return row_M, first.diff()


def order_numbers(members: MemberLists, length: int) -> Tensor:
    """Return list * N + position of each member, `[M]`; it ascends from member to member."""
    position_M = positions(members, length)
    return members.list_M() * length + position_M


def positions(members: MemberLists, length: int) -> Tensor:
    """Return the position of each member in its sequence, `[M]`.

    Args:
        length: N; without positions there are no members.
    """
    return members.row_M % max(1, length)


def members_read(
    queries: MemberLists,
    keys: MemberLists,
    length: int,
    window: int,
    attend_self: bool = True,
) -> RangeReads:
    """Return ranges: every query reads the last `window` keys of its list up to its position.

    Args:
        length: N.
        attend_self: False: a query leaves out its own key, unless that is the only one.
    """
    if queries is keys:
        members = len(keys.row_M)
        stop_P = torch.arange(1, members + 1, device=keys.row_M.device)
    else:
        key_order_M = order_numbers(keys, length)
        query_order_P = order_numbers(queries, length)
        stop_P = torch.searchsorted(key_order_M, query_order_P, right=True)
    first_of_list_L = keys.first_L()
    first_of_list_P = first_of_list_L[queries.list_M()]
    start_P = first_of_list_P.maximum(stop_P - window)
    stop_P = stop_P.maximum(start_P)
    most = min(window, length)
    if not attend_self and len(keys.row_M):
        is_self_P = last_is_self(queries, keys, stop_P)
        has_others_P = stop_P - start_P > 1
        stop_P = stop_P - (is_self_P & has_others_P).long()
    return RangeReads(queries, keys, start_P, stop_P, length, most=most)


def members_around(
    queries: MemberLists,
    keys: MemberLists,
    length: int,
    window: int,
    attend_self: bool = True,
) -> RangeReads:
    """Return ranges: every query reads the `window` keys of its list that are around its position.

    Half of them are before it. If a list has fewer there, the query reads more of the later ones,
    and the other way round. A list with at most `window` keys is read whole.

    Args:
        length: N.
        attend_self: False: a query leaves out its own key, unless that is the only one.
    """
    query_order_P = order_numbers(queries, length)
    start_P, stop_P = ranges_around(query_order_P, keys, length, window)
    most = min(window, length)
    part = RangeReads(queries, keys, start_P, stop_P, length, most=most)
    if attend_self:
        return part
    return with_holes_at_self(part)


def ranges_around(
    order_P: Tensor,
    keys: MemberLists,
    length: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Return the starts and stops of the ranges of `members_around`.

    Args:
        order_P: the numbers list * N + position of the query members, ascending.
        length: N.
    """
    key_order_M = order_numbers(keys, length)
    list_P = order_P // max(1, length)
    first_P = keys.first_L()[list_P]
    stop_of_list_P = first_P + keys.count_L[list_P]
    next_key_P = torch.searchsorted(key_order_M, order_P)
    start_P = starts_around(next_key_P, first_P, stop_of_list_P, window)
    return start_P, (start_P + window).minimum(stop_of_list_P)


def starts_around(next_key: Tensor, first: Tensor, stop: Tensor, window: int) -> Tensor:
    """Return where the `window` keys of a list start that are around a position.

    Half of them are before it. If there are fewer on one side, there are more on the other.

    Args:
        next_key: the first key of the list that is not before the position, or the list's stop.
        first, stop: the list's first key, and the one after its last.
    """
    start = (next_key - window // 2).maximum(first)
    last_start = (stop - window).maximum(first)
    return start.minimum(last_start)


def with_holes_at_self(part: RangeReads, has_others_P: Tensor | None = None) -> RangeReads:
    """Return ranges in which no query reads its own key, unless it has no others.

    The value of a key member in the holes is its row, so a query excludes the row that it has.

    Args:
        has_others_P: whether query members read other keys, too; None: whether their ranges have
            others.
    """
    row_P = part.query.row_M
    if has_others_P is None:
        has_others_P = part.stop_P - part.start_P > 1
    # If there are no others, the hole ends where it begins, and excludes nothing.
    end_P = row_P + has_others_P.long()
    holes = Holes(
        value_iM=part.key.row_M[None],
        low_iP=row_P[None],
        high_iP=end_P[None],
    )
    return part._replace(holes=holes)


def last_is_self(queries: MemberLists, keys: MemberLists, stop_P: Tensor) -> Tensor:
    """Return whether the last key before each stop has the query's row; `keys` is not empty."""
    last_P = (stop_P - 1).clamp(min=0)
    return keys.row_M[last_P] == queries.row_M


def without_self_inside(parts: list[RangeReads], rows: int) -> list[RangeReads]:
    """Return parts in which no row reads itself, unless it reads nothing else in any part.

    The own key of a query may be anywhere in its range; see `without_self` for ranges that end
    with it.

    Args:
        rows: R.
    """
    read_R = counts_read(parts, rows)
    return [with_holes_at_self(part, read_R[part.query.row_M] > 1) for part in parts]


def counts_read(parts: list[RangeReads], rows: int) -> Tensor:
    """Return how many keys each row reads in all parts, `[R]`.

    Args:
        rows: R.
    """
    read_R = parts[0].start_P.new_zeros(rows, dtype=torch.int64)
    for part in parts:
        count_P = part.stop_P - part.start_P
        read_R.index_add_(0, part.query.row_M, count_P)
    return read_R


def without_self(parts: list[RangeReads], rows: int) -> list[RangeReads]:
    """Return parts in which no row reads itself, unless it reads nothing else in any part.

    Args:
        parts: a range that contains the query's own key must end with it.
        rows: R.
    """
    read_R = counts_read(parts, rows)
    others: list[RangeReads] = []
    for part in parts:
        leaves_out_P = part.stop_P > part.start_P
        if len(part.key.row_M):
            read_P = read_R[part.query.row_M]
            has_others_P = read_P > 1
            is_self_P = last_is_self(part.query, part.key, part.stop_P)
            leaves_out_P = leaves_out_P & is_self_P & has_others_P
        stop_P = part.stop_P - leaves_out_P.long()
        others.append(part._replace(stop_P=stop_P))
    return others


def mask_without_self(mask_XK: Tensor, is_self_XK: Tensor) -> Tensor:
    """Return the mask without the query's own key, unless that is the only one that it reads.

    X stands for any dimensions.
    """
    others_XK = mask_XK & ~is_self_XK
    return torch.where(others_XK.any(-1, keepdim=True), others_XK, mask_XK)


def within_documents(part: RangeReads, first_R: Tensor) -> RangeReads:
    """Return ranges without the keys of other documents than that of the query.

    If `part` leaves out the own key of a query, because it reads others there, and none of these
    others remain, the query reads its own key.

    Args:
        part: ranges of keys up to the position of the query, without holes.
        first_R: the row of the first token of the document of each row.
    """
    assert part.holes is None
    N = part.length
    key_order_M = order_numbers(part.key, N)
    first_row_P = first_R[part.query.row_M]
    first_position_P = first_row_P % max(1, N)
    first_order_P = part.query.list_M() * N + first_position_P
    first_key_P = torch.searchsorted(key_order_M, first_order_P)
    start_P = part.start_P.maximum(first_key_P)
    stop_P = part.stop_P.maximum(start_P)
    members = len(key_order_M)
    if members:
        # If a range is empty now, the query reads its own key. That is the one after the range, if
        # `part` has left it out.
        next_P = stop_P.clamp(max=members - 1)
        is_self_P = key_order_M[next_P] == order_numbers(part.query, N)
        is_empty_P = stop_P == start_P
        stop_P = stop_P + (is_self_P & is_empty_P).long()
    return RangeReads(
        query=part.query,
        key=part.key,
        start_P=start_P,
        stop_P=stop_P,
        length=N,
        most=part.most,
    )


def ranges_between(
    queries: MemberLists,
    keys: MemberLists,
    length: int,
    since_N: Tensor,
    until_N: Tensor,
) -> RangeReads:
    """Return ranges: a query at n reads the keys of its list at since_N[n] to until_N[n] - 1.

    n and both bounds are positions.

    Args:
        length: N.
        since_N, until_N: `[N]`, or `[R]` for bounds that depend on the sequence.
    """
    key_order_M = order_numbers(keys, length)
    first_order_P = queries.list_M() * length
    # The entry of each query member in the bounds: its position, or its row.
    entry_P = positions(queries, length)
    if len(since_N) != length:
        entry_P = queries.row_M
    since_P = since_N[entry_P].clamp(0, length)
    until_P = until_N[entry_P].clamp(0, length)
    start_P = torch.searchsorted(key_order_M, first_order_P + since_P)
    stop_P = torch.searchsorted(key_order_M, first_order_P + until_P)
    stop_P = stop_P.maximum(start_P)
    return RangeReads(queries, keys, start_P, stop_P, length)
