"""Selection of the members of clusters by their scores.

A score is the dot product of a centroid with a normalised vector, in float32 or wider. Nothing here
has a gradient. `ties.py` defines which scores count as equal.

- `choose_members` selects the members of each cluster by the scores of whole sequences.
- `arrivals` selects, at each position, the best W of the positions so far. `PrefixTopK` does it
  position by position, as a stream does.

At C = N / W clusters the scores of a head take 4 N^2 / W bytes, which are in memory at once.

Shapes: B sequences, H heads, X = B * H of them or some of those, C clusters, N positions, D head
size, W attention window, L = B * H * C lists, M members of all lists together, J of some; Q
positions of a piece.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.engine import native, norm
from rtx.attention.engine.static_selection import memberships
from rtx.attention.pieces import piece_size, pieces
from rtx.attention.precision import no_autocast, wide_type, widened
from rtx.attention.reads import MemberLists
from rtx.attention.static import is_static, selection_functions
from rtx.attention.ties import best_places, centroid_margin, highest_clusters

EMPTY = 1 << 40
"""The position of an empty slot, which is later than all positions."""


def normalise(x_BHND: Tensor) -> Tensor:
    """Return LayerNorm(x) without scale or bias, in float32 or wider (Algorithm 1, line 7)."""
    x_BHND = widened(x_BHND)
    # With a scale of 1, torch takes its vectorised loop, which is twice as fast on a CPU.
    D = x_BHND.shape[-1]
    one_D = x_BHND.new_ones(D)
    return F.layer_norm(x_BHND, one_D.shape, one_D, eps=norm.EPSILON)


def normalise_twice(x_BHND: Tensor, backend: str) -> tuple[Tensor, Tensor | None]:
    """Return `normalise(x)`, and the same in the type of `x` or None.

    Our Triton kernel computes both in one pass. It runs on a GPU, and on a CPU with
    `backend="triton"`. Otherwise the second result is None.
    """
    is_for_kernel = backend != "torch" and is_static(x_BHND, backend)
    if not is_for_kernel or not norm.can_normalise(x_BHND):
        return normalise(x_BHND), None
    wide_BHND, narrow_BHND = norm.normalise(x_BHND)
    if x_BHND.dtype == wide_BHND.dtype:
        return wide_BHND, None
    return wide_BHND, narrow_BHND


def products(query: Tensor, key: Tensor) -> Tensor:
    """Return the dot products of rows, in float32 or wider, even under autocast.

    In bfloat16 or float16 too many scores would be equal.
    """
    wide = wide_type(key.dtype)
    query = query.to(wide)
    key = key.to(wide)
    with no_autocast(key):
        return query @ key.transpose(-1, -2)


# The members by whole sequences.


def choose_members(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor | None,
    *,
    window: int,
    nearest: bool,
    backend: str,
) -> native.Selection:
    """Return the members of every cluster by scores, see `native.select`.

    The compiled kernel computes them if it can run and the backend allows it, else `by_scores`.
    """
    N = x_BHND.shape[2]
    fits_kernel = x_BHND.is_cpu and x_BHND.dtype == torch.float32
    choose = by_scores
    if fits_kernel and native.wanted(backend, N):
        choose = native.select
    return choose(
        centroid_HCD,
        x_BHND,
        threshold_HC,
        window=window,
        nearest=nearest,
    )


def by_scores(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor | None,
    *,
    window: int,
    nearest: bool,
) -> native.Selection:
    """Return the result of `native.select`, computed with torch for some heads at a time."""
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    device = x_BHND.device
    margin_HC = centroid_margin(centroid_HCD, x_BHND.dtype)
    places = [torch.zeros(0, dtype=torch.int64, device=device)]
    nearest_XN = torch.zeros(B * H, N, dtype=torch.int64, device=device)
    moment_2XC = torch.zeros(2, B * H, C, dtype=torch.float64, device=device)
    for heads, head_X, score_XCN in scores_of_heads(centroid_HCD, x_BHND):
        margin_XC = margin_HC[head_X]
        first_place = heads.start * C * N
        if threshold_HC is not None:
            joins_XCN = memberships(score_XCN, threshold_HC[head_X], margin_XC)
            place_J = joins_XCN.flatten().nonzero()[:, 0]
            places.append(place_J + first_place)
            moment_2XC[:, heads] = moments(score_XCN)
        elif window:
            place_J = best_members(score_XCN, margin_XC, window)
            places.append(place_J + first_place)
        if nearest:
            nearest_XN[heads] = highest_clusters(score_XCN, margin_XC)
    lists = lists_of_places(torch.cat(places), B * H, C, N)
    selection = native.Selection(
        row_M=lists.row_M,
        count_L=lists.count_L,
        nearest_BHN=None,
        moment_2BHC=None,
    )
    if nearest:
        nearest_BHN = nearest_XN.view(B, H, N)
        selection = selection._replace(nearest_BHN=nearest_BHN)
    if threshold_HC is not None:
        moment_2BHC = moment_2XC.view(2, B, H, C)
        selection = selection._replace(moment_2BHC=moment_2BHC)
    return selection


def scores_of_heads(centroid_HCD: Tensor, x_BHND: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the scores of some of the B * H heads of all sequences at a time.

    Yields:
        The slice of these heads in B * H; their numbers from 0 to H - 1, `[X]`; and their scores,
        `[X, C, N]`.
    """
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    x_XND = x_BHND.flatten(0, 1)
    head_of_all_X = torch.arange(B * H, device=x_BHND.device) % H
    for heads in pieces(B * H, C * N):
        head_X = head_of_all_X[heads]
        centroid_XCD = centroid_HCD[head_X]
        yield heads, head_X, products(centroid_XCD, x_XND[heads])


def lists_of_places(place_M: Tensor, heads: int, clusters: int, length: int) -> MemberLists:
    """Return lists of members, from the places of their scores in the flat scores `[X, C, N]`."""
    # Without positions there are no places to divide.
    length = max(1, length)
    list_M = place_M // length
    position_M = place_M % length
    head_M = list_M // clusters
    row_M = head_M * length + position_M
    count_L = torch.bincount(list_M, minlength=heads * clusters)
    return MemberLists(row_M, count_L)


def moments(score_XCN: Tensor) -> Tensor:
    """Return the sums of scores and of their squares, `[2, X, C]`, float64.

    In float32, rounding would hide the variance of scores that are nearly equal.
    """
    score_XCN = score_XCN.double()
    sum_XC = score_XCN.sum(-1)
    square_sum_XC = score_XCN.square().sum(-1)
    return torch.stack([sum_XC, square_sum_XC])


def best_members(score_XCN: Tensor, margin_XC: Tensor, window: int) -> Tensor:
    """Return the `window` best positions of each cluster, as places in the flat scores, ascending.

    NaN counts as the lowest score.
    """
    X, C, N = score_XCN.shape

    def margin(_: Tensor) -> Tensor:
        return margin_XC[..., None]

    score_XCN = score_XCN.nan_to_num(-math.inf, math.inf, -math.inf)
    position_XCW = best_places(score_XCN, window, margin)
    position_XCW = position_XCW.sort(dim=-1).values
    list_L = torch.arange(X * C, device=score_XCN.device)
    list_XC1 = list_L.view(X, C, 1)
    place_XCW = list_XC1 * N + position_XCW
    return place_XCW.flatten()


def sums_of_lists(x_BHND: Tensor, lists: MemberLists, backend: str) -> Tensor:
    """Return the sum of the vectors of the members of each list, `[L, D]`; `x` is not empty."""
    D = x_BHND.shape[-1]
    x_RD = x_BHND.reshape(-1, D)
    if is_static(x_BHND, backend):
        functions = selection_functions(x_BHND, backend)
        return functions.list_sums(x_RD, lists.row_M, lists.count_L)
    first_L = lists.first_L()
    return F.embedding_bag(lists.row_M, x_RD, first_L, mode="sum")


# The members of every prefix.


class Offer(NamedTuple):
    """The result of offering one position to each list."""

    joins_L: Tensor
    """Whether the position becomes a member of the list."""
    slot_L: Tensor
    """The slot that it gets in the list."""
    replaced_L: Tensor
    """The position that it replaces; `EMPTY` or near to it: none."""


class PrefixTopK:
    """The best W scores of each list so far, and their positions.

    A full list takes a new position if its score exceeds the lowest score of the list by more than
    the margin. Of the members within the margin of the lowest score, it replaces the latest.

    Args:
        margin_L: the margin of each list, in the type of scores.
        window: W.
    """

    def __init__(self, margin_L: Tensor, window: int) -> None:
        lists = len(margin_L)
        self.margin_L1 = margin_L[:, None]
        self.score_LW = margin_L.new_full((lists, window), -math.inf)
        # Empty slots have late positions, slot 0 the latest. So they are replaced first, in the
        # order of their numbers.
        slot_W = torch.arange(window, device=margin_L.device)
        position_W = EMPTY - slot_W
        self.position_LW = position_W.expand(lists, window).clone()

    def bar(self) -> Tensor:
        """Return the score that a new member has to exceed, `[L, 1]`; it never decreases."""
        worst_L1 = self.score_LW.amin(-1, keepdim=True)
        return worst_L1 + self.margin_L1

    def offer(self, score_L: Tensor, position_L: Tensor) -> Offer:
        """Offer one position to each list: it becomes a member if its score is high enough."""
        score_L1 = score_L[:, None]
        position_L1 = position_L[:, None]
        bar_L1 = self.bar()
        joins_L1 = score_L1 > bar_L1
        is_replaceable_LW = self.score_LW <= bar_L1
        replaceable_LW = torch.where(is_replaceable_LW, self.position_LW, -1)
        slot_L1 = replaceable_LW.argmax(-1, keepdim=True)
        old_score_L1 = self.score_LW.gather(-1, slot_L1)
        old_position_L1 = self.position_LW.gather(-1, slot_L1)
        new_score_L1 = torch.where(joins_L1, score_L1, old_score_L1)
        new_position_L1 = torch.where(joins_L1, position_L1, old_position_L1)
        self.score_LW.scatter_(-1, slot_L1, new_score_L1)
        self.position_LW.scatter_(-1, slot_L1, new_position_L1)
        return Offer(
            joins_L=joins_L1[:, 0],
            slot_L=slot_L1[:, 0],
            replaced_L=old_position_L1[:, 0],
        )

    def members(self, clusters: int, length: int) -> MemberLists:
        """Return the members of each list, in order of slots.

        Args:
            clusters, length: C and N, by which rows are numbered.
        """
        is_filled_LW = self.position_LW < length
        list_M, slot_M = is_filled_LW.nonzero(as_tuple=True)
        head_M = list_M // clusters
        row_M = head_M * length + self.position_LW[list_M, slot_M]
        return MemberLists(row_M, is_filled_LW.sum(-1))


class Arrivals(NamedTuple):
    """The members of every prefix: the positions i that are among the best W of 0 to i."""

    lists: MemberLists
    leaves_M: Tensor
    """The position at which each member is replaced; N: never."""
    best: PrefixTopK
    """The best W of the whole sequence."""


class Newcomers(NamedTuple):
    """Some new members, each in one list."""

    list_J: Tensor
    position_J: Tensor
    replaced_J: Tensor
    """The position of the member that each one replaces; `EMPTY` or near to it: none."""


@torch.no_grad()
def arrivals(centroid_HCD: Tensor, x_BHND: Tensor, window: int) -> Arrivals:
    """Return the positions that become members of each cluster, and when each is replaced.

    Position i reads the members j <= i that have not been replaced at i or before.
    """
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    margin_HC = centroid_margin(centroid_HCD, x_BHND.dtype)
    margin_L = margin_HC.repeat(B, 1, 1).flatten()
    best = PrefixTopK(margin_L, window)
    none_J = torch.zeros(0, dtype=torch.int64, device=x_BHND.device)
    joined = [Newcomers(none_J, none_J, none_J)]
    most = piece_size(B * H * C)
    first = 0
    while first < N:
        # A quarter of the prefix at most. If scores are independent, about W / 4 of these positions
        # exceed the bar.
        count = min(most, max(window, first // 4))
        stop = min(N, first + count)
        x_BHQD = x_BHND[:, :, first:stop]
        score_BHCQ = products(centroid_HCD, x_BHQD)
        score_LQ = score_BHCQ.flatten(0, 2)
        joined += newcomers(best, score_LQ, first)
        first = stop
    lists, leaves_M = arrival_lists(joined, B * H, C, N)
    return Arrivals(lists, leaves_M, best)


def arrival_lists(
    joined: list[Newcomers],
    heads: int,
    clusters: int,
    length: int,
) -> tuple[MemberLists, Tensor]:
    """Return the lists of all new members, and the position at which each is replaced (N: never).

    Args:
        heads, clusters, length: X, C and N.
    """
    list_J = torch.cat([some.list_J for some in joined])
    position_J = torch.cat([some.position_J for some in joined])
    replaced_J = torch.cat([some.replaced_J for some in joined])
    # Numbers list * N + position ascend from list to list, and with the positions within a list.
    first_number_J = list_J * length
    number_M, order_M = (first_number_J + position_J).sort()
    has_replaced_J = replaced_J < length
    replaced_number_J = first_number_J + replaced_J
    replaced_member_J = torch.searchsorted(number_M, replaced_number_J[has_replaced_J])
    leaves_M = torch.full_like(number_M, length)
    leaves_M[replaced_member_J] = position_J[has_replaced_J]
    head_J = list_J // clusters
    row_J = head_J * length + position_J
    count_L = torch.bincount(list_J, minlength=heads * clusters)
    return MemberLists(row_J[order_M], count_L), leaves_M


def newcomers(best: PrefixTopK, score_LQ: Tensor, first: int) -> list[Newcomers]:
    """Offer a piece of positions, which starts at `first`, to all lists; return the new members.

    The bar never decreases. So only scores above the bar before the piece are candidates. In each
    turn, every list gets an offer of its next candidate.
    """
    may_join_LQ = score_LQ > best.bar()
    count_L = may_join_LQ.sum(-1)
    first_L = count_L.cumsum(0) - count_L
    # The candidates of all lists, list after list.
    candidate_J = may_join_LQ.nonzero()[:, 1]
    turns = 0
    if len(count_L):
        turns = int(count_L.max())
    joined = []
    for turn in range(turns):
        # A list without further candidates is offered some position with the score -inf.
        is_over_L = turn >= count_L
        number_L = (first_L + turn).clamp(max=len(candidate_J) - 1)
        candidate_L = candidate_J[number_L]
        score_L1 = score_LQ.gather(1, candidate_L[:, None])
        score_L = score_L1[:, 0].masked_fill(is_over_L, -math.inf)
        position_L = candidate_L + first
        offer = best.offer(score_L, position_L)
        some = Newcomers(
            list_J=offer.joins_L.nonzero()[:, 0],
            position_J=position_L[offer.joins_L],
            replaced_J=offer.replaced_L[offer.joins_L],
        )
        joined.append(some)
    return joined
