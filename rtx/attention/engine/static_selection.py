"""Which positions belong to which cluster, by torch's kernels, in static shapes and without a wait.

Everything here follows from the shapes of what it gets, so that a GPU is never asked how many members
there are: lists have room for a fixed number of members, and a count on the device says how many of
them are real. `triton_selection.py` has the same functions by Triton's kernels.

Shapes: B sequences, H heads, X = B * H, C clusters of a head, N positions, D head size, W attention
window, L = B * H * C lists, R = B * H * N rows (row = (b * H + h) * N + n), M room for members, P for
query members.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.autocast import no_autocast
from rtx.attention.engine.lists import KernelLists, RowMembers, row_members
from rtx.attention.ties import highest

MAX_SCORES = 1 << 24
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
    start_M, stop_M, low_M, high_M = ranges
    count_2 = count.expand(2).contiguous()
    return KernelLists(row_M, row_M, start_M, stop_M, low_M, high_M, by_row, by_row, count_2)


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
        with no_autocast(x_XND):
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
    low_M = torch.where(is_real_M, low_M, query_room)
    high_M = torch.where(is_real_M, high_M, query_room)
    return KernelLists(
        queries.row_M,
        keys.row_M,
        start_P.int(),
        stop_P.int(),
        low_M.int(),
        high_M.int(),
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


def top_members(score_XCN: Tensor, margin_XC: Tensor, window: int) -> Tensor:
    """Return the positions of the `window` best scores of each cluster, `[X, C, W]`, ascending, int32.

    Of scores within the margin of the last one taken the earliest are taken; NaN is worse than every
    score. All positions are taken where there are no more than `window`.
    """
    return top_members_by(best_places, score_XCN, margin_XC, window)


def top_members_by(best: Callable[..., Tensor], score_XCN: Tensor, margin_XC: Tensor, window: int) -> Tensor:
    """Return what `top_members` does by a function like `best_places`."""
    sound_XCN = score_XCN.nan_to_num(-math.inf, math.inf, -math.inf)
    return best(sound_XCN, window, lambda _: margin_XC[..., None]).int()


def best_places(score: Tensor, count: int, margin: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what `ties.best_places` does, in ascending order; of equal infinities or NaN the earliest."""
    return best_places_by(earliest, score, count, margin)


def best_places_by(
    earliest: Callable[..., Tensor], score: Tensor, count: int, margin: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return what `best_places` does by a function like `earliest`."""
    N = score.shape[-1]
    if count >= N:
        return torch.arange(N, device=score.device).expand(score.shape)
    value, at = score.topk(count + 1, dim=-1, sorted=False)
    # The best that is not taken, and the last that is.
    worst, slot = value.topk(2, dim=-1, largest=False)
    margins = margin(at.gather(-1, slot[..., 1:])).expand_as(worst[..., 1:])
    flat = (x.reshape(-1, x.shape[-1]) for x in (score, value, worst, margins))
    return earliest(*flat).long().view(*score.shape[:-1], count)


def earliest(score_XN: Tensor, value_XK: Tensor, worst_X2: Tensor, margin_X1: Tensor) -> Tensor:
    """Return the places `[X, K - 1]`, int32, of all scores above the last one taken, then of the earliest tied with it.

    Args:
        value_XK: the best scores, one more than are taken.
        worst_X2: of these the two worst: the first that is not taken, and the last that is.
        margin_X1: within which scores are tied with the last one taken.
    """
    count = value_XK.shape[1] - 1
    left_out_X1, last_X1 = worst_X2.split(1, dim=-1)
    is_tied_X1 = (left_out_X1 >= last_X1 - margin_X1) & left_out_X1.isfinite() & last_X1.isfinite()
    margin_X1 = torch.where(is_tied_X1, margin_X1, 0)
    better_XN = ~(score_XN <= last_X1 + margin_X1) & ~last_X1.isnan()  # NaN, too: it is the best
    equal_XN = (score_XN >= last_X1 - margin_X1) | last_X1.isnan() & score_XN.isnan()
    equal_XN = equal_XN & ~better_XN
    room_X1 = count - better_XN.sum(-1, keepdim=True)
    takes_XN = better_XN | equal_XN & (equal_XN.cumsum(-1) <= room_X1)
    slot_XN = torch.where(takes_XN, takes_XN.cumsum(-1) - 1, count)
    place_N = torch.arange(score_XN.shape[1], dtype=torch.int32, device=score_XN.device)
    place_XK = place_N.new_zeros(value_XK.shape)
    return place_XK.scatter_(1, slot_XN, place_N.expand(score_XN.shape))[:, :count]


def top_lists(position_XCW: Tensor, length: int, window: int, attend_self: bool) -> KernelLists:
    """Return who reads whom in lists of `W` members each at ascending positions, all of them real.

    Queries stand for keys. X: B * H sequences and heads in this order, as one dimension or two.
    """
    device = position_XCW.device
    C, W = position_XCW.shape[-2:]
    X = position_XCW.shape[:-2].numel()
    first_X11 = torch.arange(X, device=device).view(X, 1, 1) * length
    row_M = (position_XCW.reshape(X, C, W) + first_X11).flatten().int()
    member_M = torch.arange(X * C * W, device=device)
    first_M = member_M - member_M % max(1, W)
    start_M = first_M.maximum(member_M + 1 - window)
    ranges = ranges_around(member_M, start_M, first_M + W, window, attend_self)
    count = torch.full((1,), X * C * W, dtype=torch.int32, device=device)
    return shared_lists(row_M, tuple(x_M.int() for x_M in ranges), row_members(row_M, X * length), count)


def list_sums(x_RD: Tensor, row_M: Tensor, count_L: Tensor) -> Tensor:
    """Return the sums of the members' vectors of each list, `[L, D]`, float64.

    Lists stand one behind the other; those of their members are summed for which there is room.
    """
    bound_L1 = bounds(count_L, len(row_M)).to(row_M.dtype)
    if not len(x_RD):
        return x_RD.new_zeros(len(count_L), x_RD.shape[1], dtype=torch.float64)
    # The last bag has what is behind all lists.
    return F.embedding_bag(row_M, x_RD, bound_L1, mode="sum")[:-1].double()
