"""Which positions belong to which cluster, by torch's kernels, in static shapes and without a wait.

Everything here follows from the shapes of what it gets, so that a GPU is never asked how many members
there are: lists have room for a fixed number of members, and a count on the device says how many of
them are real. `selection.py` has the same functions by Triton's kernels.

Shapes: B sequences, H heads, X = B * H, C clusters of a head, N positions, D head size, W attention
window, L = B * H * C lists, R = B * H * N rows (row = (b * H + h) * N + n), M room for members, P for
query members.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.engine.lists import KernelLists, RowMembers, row_members
from rtx.attention.ties import highest

MAX_SCORES = 1 << 26
"""Scores held at once, but for those of one head."""


class Selected(NamedTuple):
    """The members of every list, and who reads whom where queries stand for keys."""

    row_M: Tensor
    """Their rows, int32, list after list in order of position; 0 behind the count."""
    count_L: Tensor
    """The members of each list, int64, those included for which there is no room."""
    lists: KernelLists
    lost: Tensor
    """How many of the last members of the last lists there is no room for, int64 `[1]`."""
    nearest_BHN: Tensor | None
    """The cluster that scores each position highest, int32."""
    moment_2BHC: Tensor | None
    """With thresholds the sums of all scores of a centroid and of their squares, float64."""


def shared_lists(row_M: Tensor, ranges: tuple[Tensor, ...], by_row: RowMembers, count: Tensor) -> KernelLists:
    """Return lists whose query members are their key members: `ranges` are start, stop, low and high."""
    return KernelLists(row_M, row_M, *ranges, by_row, by_row, count.expand(2).contiguous())


def by_thresholds(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor | None,
    margin_HC: Tensor,
    *,
    window: int,
    attend_self: bool,
    room: int,
    nearest: bool = False,
) -> Selected:
    """Return the members of every cluster, each decided by its position alone.

    A position joins every cluster that scores it at or above its threshold, and in any case the one
    whose score less threshold is highest; without thresholds that with the highest score alone. Of
    scores within a cluster's margin the first cluster wins, and cluster 0 where one is NaN (`ties.py`).

    Args:
        centroid_HCD, x_BHND: what is multiplied to scores, float32 or wider.
        threshold_HC, margin_HC: of the clusters, in the scores' type.
        window: the last `window` members of its list up to itself are read by a member.
        attend_self: without, a member that is not alone among these reads the others only.
        room: the number of members that lists have room for; B * H * N suffice without thresholds.
        nearest: whether to return the cluster with the highest score.
    """
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    device = x_BHND.device
    number_M = torch.zeros(room + 1, dtype=torch.int64, device=device)
    count_XC = torch.zeros(B * H, C, dtype=torch.int64, device=device)
    nearest_XN = torch.zeros(B * H, N, dtype=torch.int32, device=device)
    moment_2XC = torch.zeros(2, B * H, C, dtype=torch.float64, device=device)
    done = torch.zeros(1, dtype=torch.int64, device=device)
    piece = max(1, MAX_SCORES // max(1, C * N))
    for first in range(0, B * H, piece):
        of = torch.arange(first, min(first + piece, B * H), device=device)
        head = of % H
        x_XND = x_BHND.flatten(0, 1)[first : first + piece]
        with torch.autocast(device.type, enabled=False):
            score_XCN = centroid_HCD[head].to(x_XND.dtype) @ x_XND.mT
        margin_XC = margin_HC[head]
        joins_XCN = joined(score_XCN, None if threshold_HC is None else threshold_HC[head], margin_XC)
        count_XC[first : first + piece] = joins_XCN.sum(-1)
        done = collect(joins_XCN.flatten(), first * C * N, number_M, done)
        if nearest:
            nearest_XN[first : first + piece] = highest(score_XCN, margin_XC).int()
        if threshold_HC is not None:
            moment_2XC[:, first : first + piece] = moments(score_XCN)
    number_M = number_M[:room]
    row_M = (number_M // max(1, C * N) * N + number_M % max(1, N)).int()
    lists = lists_of_members(row_M, count_XC.flatten(), B * H * N, window, attend_self)
    lost = (done - room).clamp(min=0)
    return Selected(
        row_M,
        count_XC.flatten(),
        lists,
        lost,
        nearest_XN.view(B, H, N) if nearest else None,
        moment_2XC.view(2, B, H, C) if threshold_HC is not None else None,
    )


def joined(score_XCN: Tensor, threshold_XC: Tensor | None, margin_XC: Tensor) -> Tensor:
    """Return the memberships by thresholds, or without them of the highest score alone."""
    if threshold_XC is None:
        above_XCN = score_XCN
        joins_XCN = torch.zeros_like(score_XCN, dtype=torch.bool)
    else:
        above_XCN = score_XCN - threshold_XC[..., None]
        joins_XCN = above_XCN >= -margin_XC[..., None]
    return joins_XCN.scatter(-2, highest(above_XCN, margin_XC)[..., None, :], True)


def moments(score_XCN: Tensor) -> Tensor:
    """Return the sums of scores and of their squares, `[2, X, C]`, float64."""
    wide_XCN = score_XCN.double()
    return torch.stack([wide_XCN.sum(-1), wide_XCN.square().sum(-1)])


def collect(takes_S: Tensor, offset: int, number_M: Tensor, done: Tensor) -> Tensor:
    """Write the numbers of what is taken, plus an offset, behind those done; return how many are done.

    The last slot of `number_M` takes what is not taken or finds no room.
    """
    slot_S = done + takes_S.cumsum(0) - 1
    room = len(number_M) - 1
    slot_S = torch.where(takes_S & (slot_S < room), slot_S, room)
    number_M.scatter_(0, slot_S, torch.arange(offset, offset + len(takes_S), device=number_M.device))
    return done + takes_S.sum()


def lists_of_members(row_M: Tensor, count_L: Tensor, rows: int, window: int, attend_self: bool) -> KernelLists:
    """Return who reads whom where queries stand for keys; members behind the count are read by none."""
    room = len(row_M)
    bound_L1 = bounds(count_L, room)
    member_M = torch.arange(room, device=row_M.device)
    list_M = list_of(bound_L1, member_M)
    start_M = bound_L1[list_M].maximum(member_M + 1 - window)
    behind_M = bound_L1[(list_M + 1).clamp(max=len(count_L))]
    ranges = ranges_around(member_M, start_M, behind_M, window, attend_self)
    is_real_M = member_M < bound_L1[-1]
    ranges = tuple(torch.where(is_real_M, x_M, room).int() for x_M in ranges)
    by_row = row_members(torch.where(is_real_M, row_M, rows), rows)
    return shared_lists(row_M, ranges, by_row, bound_L1[-1:].int())


def bounds(count_L: Tensor, room: int) -> Tensor:
    """Return where each list begins, and where the last ends, `[L + 1]`, as far as there is room."""
    return F.pad(count_L.cumsum(0), (1, 0)).clamp(max=room)


def list_of(bound_L1: Tensor, member_M: Tensor) -> Tensor:
    """Return the list of each member; L for those behind the count."""
    return torch.searchsorted(bound_L1[1:], member_M, right=True)


def ranges_around(
    member_M: Tensor, start_M: Tensor, behind_M: Tensor, window: int, attend_self: bool
) -> tuple[Tensor, ...]:
    """Return start, stop, low and high of members by the starts of their ranges and the ends of their lists."""
    high_M = behind_M.minimum(member_M + window)
    if attend_self:
        return start_M, member_M + 1, member_M, high_M
    # A member reads itself where it reads nothing else.
    other_M = (start_M < member_M).long()
    return start_M, member_M + 1 - other_M, member_M + other_M, high_M


def separate_lists(queries: Selected, keys: Selected, length: int, window: int, attend_self: bool) -> KernelLists:
    """Return who reads whom where queries and keys have members of their own, as `members_read` says.

    Queries and keys behind their counts have no range and no reader.
    """
    query_room = len(queries.row_M)
    key_room = len(keys.row_M)
    bound_L1 = bounds(keys.count_L, key_room)
    order_P, list_P, is_real_P = orders(queries, length)
    order_M, _, is_real_M = orders(keys, length)
    stop_P = torch.searchsorted(order_M, order_P, right=True).minimum(bound_L1[-1])
    start_P = bound_L1[list_P].maximum(stop_P - window)
    stop_P = stop_P.maximum(start_P)
    if not attend_self and key_room:
        last_is_self_P = keys.row_M[(stop_P - 1).clamp(min=0)] == queries.row_M
        stop_P = stop_P - (last_is_self_P & (stop_P - start_P > 1)).long()
    start_P = torch.where(is_real_P, start_P, key_room)
    stop_P = torch.where(is_real_P, stop_P, key_room)
    member_M = torch.arange(key_room, device=start_P.device)
    low_M = torch.searchsorted(stop_P, member_M, right=True)
    high_M = torch.searchsorted(start_P, member_M, right=True)
    ranges = start_P, stop_P, *(torch.where(is_real_M, x_M, query_room) for x_M in (low_M, high_M))
    return KernelLists(
        queries.row_M,
        keys.row_M,
        *(x.int() for x in ranges),
        queries.lists.query_members,
        keys.lists.query_members,
        torch.cat([queries.lists.count_2[:1], keys.lists.count_2[:1]]),
    )


def orders(selected: Selected, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return an ascending number of each member's list and position, its list, and whether it is real.

    What is not real comes behind all lists.
    """
    bound_L1 = bounds(selected.count_L, len(selected.row_M))
    member_M = torch.arange(len(selected.row_M), device=bound_L1.device)
    list_M = list_of(bound_L1, member_M)
    return list_M * length + selected.row_M % max(1, length), list_M, member_M < bound_L1[-1]
