"""Select the members of clusters with torch operations, in static shapes.

How many members a cluster has depends on scores. A GPU would have to finish its queue before the
CPU could read that number. So no shape here depends on scores. A tensor of members has M slots, its
*capacity*. The members fill the first slots, list after list and in order of position; the other
slots are *empty*. A number on the device is that of the filled slots. If there are more members
than slots, the members of the last rows are left out, and counted as *lost*.

Members are found row after row (`Entries`), then sorted by list.

`triton_selection.py` has the same functions as Triton kernels.

Example: one sequence, one head, two clusters, four positions, a window of 2, and a capacity
of 6 members. The positions 0, 1 and 3 are members of cluster 0, the positions 2 and 3 of cluster 1:

    slot        0  1  2  3  4  5
    row_S       0  1  2  3  3  0       in order of rows
    list_S      0  0  1  0  1  2       empty slots have the number of lists
    first_R1    0  1  2  3  5          where the members of each row begin

    member      0  1  2    3  4  5
    list        0  0  0    1  1    empty slot
    row_M       0  1  3    2  3    0   in order of lists
    start_M     0  0  1    3  3    6       member m reads the members start_M[m] to stop_M[m] - 1
    stop_M      1  2  3    4  5    6
    low_M       0  1  2    3  4    6       the members low_M[m] to high_M[m] - 1 read member m
    high_M      2  3  3    5  5    6
    member_S    0  1  3  2  4  5       the member in each slot

    count_L     3  2                       members of each list
    bound_L1    0  3  5                    where lists begin; then the number of filled slots

Members 0 and 1 are the rows 0 and 1; member 1 reads both, as the window is 2. Member 2 (position 3)
reads members 1 and 2. Lists do not read each other. In empty slots the four range tensors hold M,
which makes all ranges empty.

Shapes: B sequences, H heads, X = B * H of these or some of them, C clusters of a head, N positions,
D head size, W attention window, L = B * H * C lists, L1 = L + 1, R = B * H * N rows (row = (b * H +
h) * N + n), R1 = R + 1, M slots of members in order of lists, S as many slots in order of rows.
If queries and keys have separate lists, M are the slots of key members and P those of query
members. J some scores, flattened; M1 = M + 1; X1, L11 and so on have an axis of size 1.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.engine.lists import KernelLists, RowMembers, row_members
from rtx.attention.precision import no_autocast
from rtx.attention.reads import MemberLists
from rtx.attention.ties import highest_clusters

MAX_SCORES = 1 << 24
"""The most scores that are in memory at once; one head's scores are, even if there are more."""


class Selected(NamedTuple):
    """The members of all lists, and the ranges by which they read each other."""

    row_M: Tensor
    """The members' rows, int32, list after list in order of position; 0 in empty slots."""
    count_L: Tensor
    """The number of members of each list, int64; lost ones are counted, too."""
    bound_L1: Tensor
    """Where the members of each list begin, int64, then the number of filled slots: list
    l has the members bound_L1[l] to bound_L1[l + 1] - 1."""
    lists: KernelLists
    """The members as query members and as key members, for the attention kernels."""
    lost: Tensor
    """How many members have no slot, int64 `[1]`: those of the last rows."""


class Entries(NamedTuple):
    """The members in order of rows, those of a row in order of clusters."""

    row_S: Tensor
    """Their rows, int32; any number in empty slots, which are the last."""
    list_S: Tensor
    """Their lists, of `list_type`; L in empty slots."""
    first_R1: Tensor
    """Where the members of each row begin, then the number of filled slots, int32."""
    count_L: Tensor | None
    """See `Selected`. None: as many as have slots."""
    lost: Tensor
    """See `Selected`."""


def list_type(lists: int) -> torch.dtype:
    """Return the type of numbers of lists, up to `lists` itself; short ones are sorted faster."""
    return torch.int16 if lists < 1 << 15 else torch.int32


def by_thresholds(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor | None,
    margin_HC: Tensor,
    *,
    window: int,
    attend_self: bool,
    capacity: int,
) -> Selected:
    """Return the members of every cluster by thresholds, or of every position's nearest cluster.

    The membership of a position depends on its own scores alone. With thresholds a position is a
    member of every cluster whose threshold its score reaches, and also of the cluster where
    score - threshold is highest, so of one at least. Without thresholds it is a member of the
    cluster with the highest score alone.

    Rounding does not decide (`rtx.attention.ties`): a score within the cluster's margin below a
    threshold reaches it. Scores within the margin of the highest are tied, and the first cluster
    wins; cluster 0 wins where a score is NaN.

    Args:
        centroid_HCD, x_BHND: float32 or wider; scores are their dot products.
        threshold_HC: in the type of the scores; None: the nearest cluster.
        margin_HC: within which scores are tied, in the type of the scores.
        window: a member reads the last `window` members of its list up to itself.
        attend_self: False: a member does not read itself, unless it would read nothing.
        capacity: the number of slots. Without thresholds it must be B * H * N at least.
    """
    lists = number_of_lists(centroid_HCD, x_BHND)
    if threshold_HC is None:
        list_R = nearest_lists(centroid_HCD, x_BHND, margin_HC)
        entries = entries_of_nearest(list_R, lists, capacity)
    else:
        entries = entries_by_thresholds(centroid_HCD, x_BHND, threshold_HC, margin_HC, capacity)
    return selected_with(ranged_members, entries, lists, window, attend_self)


def number_of_lists(centroid_HCD: Tensor, x_BHND: Tensor) -> int:
    """Return L."""
    H, C, _ = centroid_HCD.shape
    return len(x_BHND) * H * C


def heads_at_once(x_BHND: Tensor, C: int) -> list[slice]:
    """Return slices of the heads of all sequences whose scores may be in memory at once."""
    B, H, N, _ = x_BHND.shape
    scores_of_head = max(1, C * N)
    count = max(1, MAX_SCORES // scores_of_head)
    slices: list[slice] = []
    for first in range(0, B * H, count):
        slices.append(slice(first, min(first + count, B * H)))
    return slices


def head_numbers(some: slice, heads: int, device: torch.device) -> Tensor:
    """Return which of the H heads the heads of some of all sequences are, `[X]`.

    Args:
        heads: H.
    """
    return torch.arange(some.start, some.stop, device=device) % heads


def nearest_clusters(centroid_HCD: Tensor, x_BHND: Tensor, margin_HC: Tensor) -> Tensor:
    """Return the cluster with the highest score of each position, `[B, H, N]`, int32."""
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    x_XND = x_BHND.flatten(0, 1)
    nearest_XN = x_BHND.new_zeros(B * H, N, dtype=torch.int32)
    for some in heads_at_once(x_BHND, C):
        head_X = head_numbers(some, H, x_BHND.device)
        score_XCN = scores_of(centroid_HCD[head_X], x_XND[some])
        nearest_XN[some] = highest_clusters(score_XCN, margin_HC[head_X]).int()
    return nearest_XN.view(B, H, N)


def nearest_lists(centroid_HCD: Tensor, x_BHND: Tensor, margin_HC: Tensor) -> Tensor:
    """Return the list of each row if each position is a member of its nearest cluster alone.

    Returns:
        `[R]`, of `list_type`.
    """
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    nearest_BHN = nearest_clusters(centroid_HCD, x_BHND, margin_HC)
    number_X = torch.arange(B * H, dtype=torch.int32, device=x_BHND.device)
    first_list_X1 = (number_X * C)[:, None]
    list_XN = nearest_BHN.view(B * H, N) + first_list_X1
    return list_XN.flatten().to(list_type(B * H * C))


def entries_of_nearest(list_R: Tensor, lists: int, capacity: int) -> Entries:
    """Return the `Entries` by the result of `nearest_lists`."""
    rows = len(list_R)
    assert capacity >= rows, "each position is a member"
    device = list_R.device
    empty_slots = capacity - rows
    return Entries(
        row_S=torch.arange(capacity, dtype=torch.int32, device=device),
        list_S=F.pad(list_R, (0, empty_slots), value=lists),
        first_R1=torch.arange(rows + 1, dtype=torch.int32, device=device),
        count_L=None,
        lost=list_R.new_zeros(1, dtype=torch.int64),
    )


def nearest_members(centroid_HCD: Tensor, x_BHND: Tensor, margin_HC: Tensor) -> MemberLists:
    """Return the members of every cluster if each position is a member of its nearest one alone."""
    list_R = nearest_lists(centroid_HCD, x_BHND, margin_HC)
    _, row_M, bound_L1 = sorted_lists(list_R, number_of_lists(centroid_HCD, x_BHND))
    return MemberLists(row_M, bound_L1.diff())


def entries_by_thresholds(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor,
    margin_HC: Tensor,
    capacity: int,
) -> Entries:
    """Return the `Entries` by thresholds; as many heads at a time as `MAX_SCORES` allows."""
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    x_XND = x_BHND.flatten(0, 1)
    # Of each member: where its score is in scores [X, N, C], flattened.
    score_number_S1 = x_BHND.new_zeros(capacity + 1, dtype=torch.int64)
    members = score_number_S1.new_zeros(1)
    times_XN = score_number_S1.new_zeros(B * H, N)
    count_XC = score_number_S1.new_zeros(B * H, C)
    for some in heads_at_once(x_BHND, C):
        head_X = head_numbers(some, H, x_BHND.device)
        score_XCN = scores_of(centroid_HCD[head_X], x_XND[some])
        is_member_XCN = memberships(score_XCN, threshold_HC[head_X], margin_HC[head_X])
        first_score = some.start * C * N
        members = collect(is_member_XCN.mT.flatten(), first_score, score_number_S1, members)
        times_XN[some] = is_member_XCN.sum(-2)
        count_XC[some] = is_member_XCN.sum(-1)
    row_S, list_S = rows_and_lists(score_number_S1[:capacity], N, C)
    is_filled_S = torch.arange(capacity, device=x_BHND.device) < members
    lists = B * H * C
    return Entries(
        row_S=row_S.int(),
        list_S=torch.where(is_filled_S, list_S, lists).to(list_type(lists)),
        first_R1=bounds(times_XN.flatten(), capacity).int(),
        count_L=count_XC.flatten(),
        lost=(members - capacity).clamp(min=0),
    )


def rows_and_lists(score_number_S: Tensor, length: int, clusters: int) -> tuple[Tensor, Tensor]:
    """Return the rows and lists that scores are of, from their numbers in scores `[X, N, C]`.

    Args:
        length: N.
        clusters: C.
    """
    row_S = score_number_S // max(1, clusters)
    cluster_S = score_number_S % max(1, clusters)
    group_S = row_S // max(1, length)
    return row_S, group_S * clusters + cluster_S


def scores_of(centroid_XCD: Tensor, x_XND: Tensor) -> Tensor:
    """Return the dot products `[X, C, N]` of centroids and vectors, in the type of the vectors."""
    with no_autocast(x_XND):
        return centroid_XCD.to(x_XND.dtype) @ x_XND.mT


def memberships(score_XCN: Tensor, threshold_XC: Tensor, margin_XC: Tensor) -> Tensor:
    """Return which positions are members of which clusters, bool `[X, C, N]`.

    See `by_thresholds`.
    """
    value_XCN = score_XCN - threshold_XC[..., None]
    is_member_XCN = value_XCN >= -margin_XC[..., None]
    best_X1N = highest_clusters(value_XCN, margin_XC)[..., None, :]
    return is_member_XCN.scatter(-2, best_X1N, True)


def score_moments(centroid_HCD: Tensor, x_BHND: Tensor) -> Tensor:
    """Return the sums over all positions of a centroid's scores, and of their squares.

    The scores are not needed: with the sum s of all vectors x and the sum P of their products x x^T
    a centroid c has the sums c s and c P c. In float32 the deviation of scores that hardly differ
    would be lost.

    Returns:
        `[2, B, H, C]`, float64.
    """
    with no_autocast(x_BHND):
        wide_BHND = x_BHND.double()
        centroid_HCD = centroid_HCD.double()
        sum_BHC1 = centroid_HCD @ wide_BHND.sum(2)[..., None]
        product_BHDD = wide_BHND.mT @ wide_BHND
        along_BHCD = centroid_HCD @ product_BHDD
        square_BHC = (along_BHCD * centroid_HCD).sum(-1)
        return torch.stack([sum_BHC1[..., 0], square_BHC])


def collect(is_taken_J: Tensor, offset: int, number_M1: Tensor, done: Tensor) -> Tensor:
    """Append the number `offset + j` to `number_M1` for every j where `is_taken_J` is true.

    Example: is_taken_J = [0, 1, 1], offset = 10, number_M1 = [7, 0, 0], done = 1: one number is
    there, and the capacity is M = 2. This writes 11 into slot 1, has no slot for 12, and returns 3.

    Args:
        is_taken_J: bool.
        number_M1: numbers, int64, written in place. The last slot is not for numbers: it takes
            every write that is not wanted or has no slot.
        done: how many numbers have been appended before, int64 `[1]`. It may exceed the capacity,
            as numbers without a slot are counted, too.

    Returns:
        `done` with those of this call.
    """
    capacity = len(number_M1) - 1
    slot_J = done + is_taken_J.cumsum(0) - 1
    slot_J = torch.where(is_taken_J & (slot_J < capacity), slot_J, capacity)
    number_J = torch.arange(offset, offset + len(is_taken_J), device=number_M1.device)
    number_M1.scatter_(0, slot_J, number_J)
    return done + is_taken_J.sum()


class Ranges(NamedTuple):
    """Member m reads the members start_M[m] to stop_M[m] - 1.

    The members low_M[m] to high_M[m] - 1 read member m.
    """

    start_M: Tensor
    stop_M: Tensor
    low_M: Tensor
    high_M: Tensor


class Members(NamedTuple):
    """The members in order of lists, all int32."""

    row_M: Tensor
    """See `Selected`."""
    start_M: Tensor
    """With the next three the `Ranges`; the number of slots in empty ones."""
    stop_M: Tensor
    low_M: Tensor
    high_M: Tensor
    member_S: Tensor
    """The member in each slot of `Entries`."""

    @property
    def ranges(self) -> Ranges:
        """The members' ranges."""
        return Ranges(self.start_M, self.stop_M, self.low_M, self.high_M)


Ranged = Callable[[Tensor, Tensor, Tensor, Tensor, int, bool], Members]
"""A function with the arguments and the result of `ranged_members`: that one, or its Triton kernel.
The functions whose names end with `_with` take either."""


def selected_with(
    ranged: Ranged,
    entries: Entries,
    lists: int,
    window: int,
    attend_self: bool,
) -> Selected:
    """Return the members of `entries`, sorted by list.

    Args:
        ranged: an implementation of `ranged_members`.
        lists: L.
        window, attend_self: see `by_thresholds`.
    """
    list_M, slot_M, bound_L1 = sorted_lists(entries.list_S, lists)
    members = ranged(list_M, slot_M, entries.row_S, bound_L1, window, attend_self)
    # The members of a row are in order of clusters, so that their numbers ascend.
    by_row = RowMembers(entries.first_R1, members.member_S)
    filled_slots_1 = bound_L1[-1:].int()
    count_L = entries.count_L
    if count_L is None:
        count_L = bound_L1.diff()
    return Selected(
        row_M=members.row_M,
        count_L=count_L,
        bound_L1=bound_L1,
        lists=shared_lists(members.row_M, members.ranges, by_row, filled_slots_1),
        lost=entries.lost,
    )


def sorted_lists(list_S: Tensor, lists: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lists of slots, sorted; their slots; and where each list begins, `[L + 1]`.

    The members of a list stay in order of rows. Empty slots, which have list L, come last.
    """
    list_M, slot_M = list_S.sort(stable=True)
    number_L1 = torch.arange(lists + 1, dtype=list_M.dtype, device=list_M.device)
    return list_M, slot_M, torch.searchsorted(list_M, number_L1)


def ranged_members(
    list_M: Tensor,
    slot_M: Tensor,
    row_S: Tensor,
    bound_L1: Tensor,
    window: int,
    attend_self: bool,
) -> Members:
    """Return the members with the ranges of their lists.

    Args:
        list_M: the list of each member; L in empty slots, which come last.
        slot_M: its slot in order of rows.
        row_S: the row of each slot.
        bound_L1: see `Selected`.
        window, attend_self: see `by_thresholds`.
    """
    capacity = len(list_M)
    member_M = torch.arange(capacity, device=list_M.device)
    first_M = bound_L1[list_M.long()]
    # Empty slots have list L, whose end does not exist; their ranges are overwritten below.
    last_bound = len(bound_L1) - 1
    next_list_M = (list_M + 1).clamp(max=last_bound)
    end_M = bound_L1[next_list_M.long()]
    ranges = ranges_around(member_M, first_M, end_M, window, attend_self)
    is_filled_M = member_M < bound_L1[-1]
    member_S = torch.empty_like(member_M).scatter(0, slot_M, member_M)
    return Members(
        row_M=torch.where(is_filled_M, row_S[slot_M], 0),
        start_M=torch.where(is_filled_M, ranges.start_M, capacity).int(),
        stop_M=torch.where(is_filled_M, ranges.stop_M, capacity).int(),
        low_M=torch.where(is_filled_M, ranges.low_M, capacity).int(),
        high_M=torch.where(is_filled_M, ranges.high_M, capacity).int(),
        member_S=member_S.int(),
    )


def shared_lists(
    row_M: Tensor,
    ranges: Ranges,
    by_row: RowMembers,
    count_1: Tensor,
) -> KernelLists:
    """Return lists whose key members are their query members.

    Args:
        ranges: the members' ranges, int32.
        by_row: the members of each row.
        count_1: the number of filled slots, int32.
    """
    return KernelLists(
        query_row_P=row_M,
        key_row_M=row_M,
        start_P=ranges.start_M,
        stop_P=ranges.stop_M,
        low_M=ranges.low_M,
        high_M=ranges.high_M,
        query_members=by_row,
        key_members=by_row,
        count_2=count_1.expand(2).contiguous(),
    )


def bounds(count_L: Tensor, capacity: int) -> Tensor:
    """Return the first member of each list, then the number of filled slots, `[L + 1]`.

    List l has the members bound_L1[l] to bound_L1[l + 1] - 1. Example: counts 3, 2, 4 and a
    capacity of 6 give 0, 3, 5, 6.
    """
    return F.pad(count_L.cumsum(0), (1, 0)).clamp(max=capacity)


def list_of(bound_L1: Tensor, member_M: Tensor) -> Tensor:
    """Return the list of each member, by the lists' `bounds`; L for empty slots."""
    # The first bound, 0, counts once for every member. A search in bound_L1[1:] would not need the
    # subtraction, but torch 2.11 cannot compile a search in a slice.
    return torch.searchsorted(bound_L1, member_M, right=True) - 1


def ranges_around(
    member_M: Tensor,
    first_M: Tensor,
    end_M: Tensor,
    window: int,
    attend_self: bool,
) -> Ranges:
    """Return the ranges of members that read the last `window` members of their list.

    Args:
        member_M: 0 to M - 1.
        first_M: the first member of each member's list.
        end_M: the member after the last one of that list.
    """
    start_M = first_M.maximum(member_M + 1 - window)
    high_M = end_M.minimum(member_M + window)
    if attend_self:
        return Ranges(start_M, member_M + 1, member_M, high_M)
    # A member that reads others does not read itself: its range ends before it, and its first
    # reader is the next member.
    reads_others_M = (start_M < member_M).long()
    stop_M = member_M + 1 - reads_others_M
    low_M = member_M + reads_others_M
    return Ranges(start_M, stop_M, low_M, high_M)


def separate_lists(
    queries: Selected,
    keys: Selected,
    length: int,
    window: int,
    attend_self: bool,
) -> KernelLists:
    """Return separate lists of queries and of keys.

    A query member reads the last `window` key members of its list whose positions are not after
    its own. With `attend_self` False it does not read its own position, unless it would read
    nothing. These are the ranges of `rtx.attention.reads.members_read`, with empty slots: an empty
    slot reads nothing and is read by none.

    Args:
        length: N.
    """
    query_slots = len(queries.row_M)
    key_slots = len(keys.row_M)
    query_places = places_of(queries, length)
    key_places = places_of(keys, length)
    start_P, stop_P = key_ranges(queries, keys, query_places, key_places, window, attend_self)
    start_P = torch.where(query_places.is_filled_M, start_P, key_slots)
    stop_P = torch.where(query_places.is_filled_M, stop_P, key_slots)
    # Neither start_P nor stop_P falls from a query member to the next. So the readers of key member
    # m are those from the first whose stop is after m to the last whose start is not.
    member_M = torch.arange(key_slots, device=start_P.device)
    low_M = torch.searchsorted(stop_P, member_M, right=True)
    high_M = torch.searchsorted(start_P, member_M, right=True)
    low_M = torch.where(key_places.is_filled_M, low_M, query_slots)
    high_M = torch.where(key_places.is_filled_M, high_M, query_slots)
    query_count_1 = queries.lists.count_2[:1]
    key_count_1 = keys.lists.count_2[:1]
    return KernelLists(
        query_row_P=queries.row_M,
        key_row_M=keys.row_M,
        start_P=start_P.int(),
        stop_P=stop_P.int(),
        low_M=low_M.int(),
        high_M=high_M.int(),
        query_members=queries.lists.query_members,
        key_members=keys.lists.query_members,
        count_2=torch.cat([query_count_1, key_count_1]),
    )


class Places(NamedTuple):
    """Where members are."""

    order_M: Tensor
    """list * N + position, which ascends from member to member; higher still in empty slots."""
    list_M: Tensor
    """The member's list; L in empty slots."""
    is_filled_M: Tensor


def places_of(selected: Selected, length: int) -> Places:
    """Return where the members are.

    Args:
        length: N.
    """
    capacity = len(selected.row_M)
    bound_L1 = selected.bound_L1
    member_M = torch.arange(capacity, device=bound_L1.device)
    list_M = list_of(bound_L1, member_M)
    position_M = selected.row_M % max(1, length)
    order_M = list_M * length + position_M
    return Places(order_M, list_M, is_filled_M=member_M < bound_L1[-1])


def key_ranges(
    queries: Selected,
    keys: Selected,
    query_places: Places,
    key_places: Places,
    window: int,
    attend_self: bool,
) -> tuple[Tensor, Tensor]:
    """Return start and stop of the key members that queries read; any numbers in empty slots."""
    bound_L1 = keys.bound_L1
    stop_P = torch.searchsorted(key_places.order_M, query_places.order_M, right=True)
    stop_P = stop_P.minimum(bound_L1[-1])
    first_P = bound_L1[query_places.list_M]
    start_P = first_P.maximum(stop_P - window)
    # If no key of the list comes before the query, the search ends in an earlier list.
    stop_P = stop_P.maximum(start_P)
    if not attend_self and len(keys.row_M):
        last_P = (stop_P - 1).clamp(min=0)
        last_is_self_P = keys.row_M[last_P] == queries.row_M
        has_others_P = stop_P - start_P > 1
        stop_P = stop_P - (last_is_self_P & has_others_P).long()
    return start_P, stop_P


Earliest = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function with the arguments and the result of `earliest`: that one, or its Triton kernel. The
functions whose names end with `_with` take either."""


def top_members(score_XCN: Tensor, margin_XC: Tensor, window: int) -> Tensor:
    """Return the positions of each cluster's `window` best scores, `[X, C, W]`, ascending, int32.

    Of scores within the cluster's margin of the last one taken the earliest are taken. NaN is worse
    than every score. If there are no more than `window` positions, all are taken.
    """
    return top_members_with(earliest, score_XCN, margin_XC, window)


def top_members_with(
    choose_earliest: Earliest,
    score_XCN: Tensor,
    margin_XC: Tensor,
    window: int,
) -> Tensor:
    """Return what `top_members` does, by an implementation of `earliest`."""
    score_XCN = score_XCN.nan_to_num(-math.inf, math.inf, -math.inf)

    def margin_of_cluster(_: Tensor) -> Tensor:
        return margin_XC[..., None]

    return best_places_with(choose_earliest, score_XCN, window, margin_of_cluster).int()


def best_places(score: Tensor, count: int, margin: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the places of the `count` best along the last dimension, ascending, int64.

    These are all places if the dimension is no longer than that. The rule for ties is that of
    `ties.best_places`; of equal infinities, or of NaN, which is better than every score here, the
    earliest are taken.

    Args:
        margin: a function that takes places `[..., 1]` and returns within which margins scores are
            tied with the scores there, in a shape that broadcasts to that of the places.
    """
    return best_places_with(earliest, score, count, margin)


def best_places_with(
    choose_earliest: Earliest, score: Tensor, count: int, margin: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return what `best_places` does, by an implementation of `earliest`."""
    N = score.shape[-1]
    if count >= N:
        return torch.arange(N, device=score.device).expand(score.shape)
    best, best_place = score.topk(count + 1, dim=-1, sorted=False)
    # The two lowest of the best: the first score left out, then the last one taken.
    edge, edge_slot = best.topk(2, dim=-1, largest=False)
    last_place = best_place.gather(-1, edge_slot[..., 1:])
    last_margin = margin(last_place).expand_as(last_place)
    place_XK = choose_earliest(
        score.reshape(-1, N),
        best.reshape(-1, count + 1),
        edge.reshape(-1, 2),
        last_margin.reshape(-1, 1),
    )
    return place_XK.long().view(*score.shape[:-1], count)


def earliest(score_XN: Tensor, best_XK: Tensor, edge_X2: Tensor, margin_X1: Tensor) -> Tensor:
    """Return the places `[X, K - 1]`, int32, of the best scores of each row, ascending.

    These are all scores above the last one taken, then the earliest of those tied with it.
    Example: K - 1 = 2 of the scores 5, 3, 4.9, 9, with the margin 0.2. The best three are 9, 5 and
    4.9; 5 is the last one taken and 4.9 the first left out. They are tied; 5 is earlier. The result
    is 0, 3.

    Args:
        best_XK: the K best scores in any order, one more than are taken. Here only K is needed;
            Triton's version also counts, among these, the scores that are better than the last.
        edge_X2: the two lowest of these: the first that is left out, and the last that is taken.
        margin_X1: scores this close to the last one taken are tied with it, if the first one left
            out is; else, and beside infinities, only equal scores are.
    """
    count = best_XK.shape[1] - 1
    left_out_X1, last_X1 = torch.split(edge_X2, 1, dim=-1)
    are_tied_X1 = left_out_X1 >= last_X1 - margin_X1
    are_finite_X1 = left_out_X1.isfinite() & last_X1.isfinite()
    margin_X1 = torch.where(are_tied_X1 & are_finite_X1, margin_X1, 0)
    # torch.topk takes NaN for the best. If the last one taken is NaN, nothing is better, and NaN is
    # tied with it; else every NaN is better.
    last_is_nan_X1 = last_X1.isnan()
    is_better_XN = ~(score_XN <= last_X1 + margin_X1) & ~last_is_nan_X1
    reaches_XN = score_XN >= last_X1 - margin_X1
    both_are_nan_XN = last_is_nan_X1 & score_XN.isnan()
    is_tied_XN = (reaches_XN | both_are_nan_XN) & ~is_better_XN
    tied_taken_X1 = count - is_better_XN.sum(-1, keepdim=True)
    is_early_XN = is_tied_XN & (is_tied_XN.cumsum(-1) <= tied_taken_X1)
    return places_taken(is_better_XN | is_early_XN, count)


def places_taken(is_taken_XN: Tensor, count: int) -> Tensor:
    """Return the places where rows are true, ascending, int32: `count` in each row."""
    X, N = is_taken_XN.shape
    # One more slot after the last: all other places are written to it.
    slot_XN = torch.where(is_taken_XN, is_taken_XN.cumsum(-1) - 1, count)
    place_N = torch.arange(N, dtype=torch.int32, device=is_taken_XN.device)
    taken_XK = place_N.new_zeros(X, count + 1)
    taken_XK.scatter_(1, slot_XN, place_N.expand(X, N))
    return taken_XK[:, :count]


def top_lists(position_XCW: Tensor, length: int, window: int, attend_self: bool) -> KernelLists:
    """Return lists of W members each, which queries and keys share; no slot is empty.

    Args:
        position_XCW: the members' ascending positions. X may be one dimension, or two, B and H.
        length: N.
        window, attend_self: see `by_thresholds`.
    """
    device = position_XCW.device
    C, W = position_XCW.shape[-2:]
    X = position_XCW.shape[:-2].numel()
    first_row_X = torch.arange(X, device=device) * length
    row_XCW = position_XCW.reshape(X, C, W) + first_row_X[:, None, None]
    row_M = row_XCW.flatten().int()
    members = len(row_M)
    member_M = torch.arange(members, dtype=torch.int32, device=device)
    first_M = member_M - member_M % max(1, W)
    ranges = ranges_around(member_M, first_M, first_M + W, window, attend_self)
    ranges = Ranges(*(x_M.int() for x_M in ranges))
    count_1 = row_M.new_full((1,), members)
    return shared_lists(row_M, ranges, row_members(row_M, X * length), count_1)


def list_sums(x_RD: Tensor, row_M: Tensor, count_L: Tensor) -> Tensor:
    """Return the sum of the vectors of each list's members, `[L, D]`, float64.

    Args:
        row_M: the members' rows, list after list.
        count_L: how many members of each list are there; lost ones are not.
    """
    if not len(x_RD):
        return x_RD.new_zeros(len(count_L), x_RD.shape[1], dtype=torch.float64)
    bound_L1 = bounds(count_L, len(row_M)).to(row_M.dtype)
    sum_L1D = F.embedding_bag(row_M, x_RD, bound_L1, mode="sum")
    # The last of L + 1 bags begins at the first empty slot; its sum is dropped.
    return sum_L1D[:-1].double()
