"""From scores to the members of clusters.

A score is the dot product of a centroid with a normalised vector, in float32 or wider. Nothing here
is differentiated. `ties.py` says which scores are equal.

- `choose_members`: who is a member of which cluster, by the scores of whole sequences.
- `arrivals`: who is, at each position, among the best W of the positions so far. `PrefixTopK`
  decides it position by position, as a stream does.

At C = N / W clusters the scores of a head take 4 N^2 / W bytes, which are in memory at once.

Shapes: B sequences, H heads, X = B * H of them or some of those, C clusters, N positions, D head
size, W attention window, L = B * H * C lists, M members of all lists together, J of some; T
positions of a piece.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.autocast import no_autocast
from rtx.attention.engine import native, norm
from rtx.attention.engine.static_selection import memberships
from rtx.attention.pieces import piece_size, pieces
from rtx.attention.reads import MemberLists
from rtx.attention.static import is_static, selection_functions
from rtx.attention.ties import best_places, centroid_margin, highest_clusters

EMPTY = 1 << 40
"""The position of an empty slot, which is later than all positions."""


def normalise(x_BHND: Tensor) -> Tensor:
    """Return LayerNorm(x) without scale or bias, in float32 or wider (Algorithm 1, line 7)."""
    x_BHND = x_BHND.to(torch.promote_types(x_BHND.dtype, torch.float32))
    # With a scale of 1, torch takes its vectorised loop, which is twice as fast on a CPU.
    one_D = x_BHND.new_ones(x_BHND.shape[-1:])
    return F.layer_norm(x_BHND, one_D.shape, one_D, eps=norm.EPSILON)


def normalise_twice(x_BHND: Tensor, backend: str) -> tuple[Tensor, Tensor | None]:
    """Return `normalise(x)`, and the same in the type of `x` if our kernels make it on the way.

    They do on a GPU, and on a CPU with `backend="triton"`; else the second result is None.
    """
    by_kernel = backend != "torch" and is_static(x_BHND, backend) and norm.can_normalise(x_BHND)
    if not by_kernel:
        return normalise(x_BHND), None
    wide_BHND, narrow_BHND = norm.normalise(x_BHND)
    if x_BHND.dtype == wide_BHND.dtype:
        return wide_BHND, None
    return wide_BHND, narrow_BHND


def products(query: Tensor, key: Tensor) -> Tensor:
    """Return the dot products of rows, in float32 or wider, also under autocast.

    In narrow types far too many are equal.
    """
    wide = torch.promote_types(key.dtype, torch.float32)
    with no_autocast(key):
        return query.to(wide) @ key.to(wide).transpose(-1, -2)


# Of whole sequences.


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

    By the compiled kernel, if the backend takes it, else by `by_scores`.
    """
    choose = by_scores
    fits_kernel = x_BHND.is_cpu and x_BHND.dtype == torch.float32
    if fits_kernel and native.wanted(backend, x_BHND.shape[2]):
        choose = native.select
    return choose(centroid_HCD, x_BHND, threshold_HC, window=window, nearest=nearest)


def by_scores(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor | None,
    *,
    window: int,
    nearest: bool,
) -> native.Selection:
    """Return what `native.select` does, by torch's operations, for some heads at a time."""
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    margin_HC = centroid_margin(centroid_HCD, x_BHND.dtype)
    places = [torch.zeros(0, dtype=torch.int64, device=x_BHND.device)]
    nearest_XN = places[0].new_zeros(B * H, N)
    moment_2XC = places[0].new_zeros(2, B * H, C, dtype=torch.float64)
    for some, head_X, score_XCN in scores_of_heads(centroid_HCD, x_BHND):
        margin_XC = margin_HC[head_X]
        first_place = some.start * C * N
        if threshold_HC is not None:
            joins_XCN = memberships(score_XCN, threshold_HC[head_X], margin_XC)
            places.append(joins_XCN.flatten().nonzero()[:, 0] + first_place)
            moment_2XC[:, some] = moments(score_XCN)
        elif window:
            places.append(best_members(score_XCN, margin_XC, window) + first_place)
        if nearest:
            nearest_XN[some] = highest_clusters(score_XCN, margin_XC)
    lists = lists_of_places(torch.cat(places), B * H, C, N)
    selection = native.Selection(lists.row_M, lists.count_L, None, None)
    if nearest:
        selection = selection._replace(nearest_BHN=nearest_XN.view(B, H, N))
    if threshold_HC is not None:
        selection = selection._replace(moment_2BHC=moment_2XC.view(2, B, H, C))
    return selection


def scores_of_heads(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield some of the B * H heads of all sequences at a time.

    Yields:
        Which of them, as a slice; their numbers, `[X]`, from 0 to H - 1; and their scores `[X, C,
        N]`.
    """
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    x_XND = x_BHND.flatten(0, 1)
    for some in pieces(B * H, C * N):
        head_X = torch.arange(some.start, some.stop, device=x_BHND.device) % H
        yield some, head_X, products(centroid_HCD[head_X], x_XND[some])


def lists_of_places(
    place_M: Tensor,
    heads: int,
    clusters: int,
    length: int,
) -> MemberLists:
    """Return the lists of members by the places of their scores in all scores `[X, C, N]`."""
    list_M = place_M // max(1, length)
    position_M = place_M % max(1, length)
    row_M = list_M // clusters * length + position_M
    return MemberLists(row_M, torch.bincount(list_M, minlength=heads * clusters))


def moments(score_XCN: Tensor) -> Tensor:
    """Return the sums of scores, and of their squares, `[2, X, C]`, float64.

    A float32 sum of squares would lose the deviation of scores that hardly differ.
    """
    wide_XCN = score_XCN.double()
    return torch.stack([wide_XCN.sum(-1), wide_XCN.square().sum(-1)])


def best_members(score_XCN: Tensor, margin_XC: Tensor, window: int) -> Tensor:
    """Return the places in the scores of each cluster's `window` best positions, ascending.

    NaN is worse than every score.
    """
    X, C, N = score_XCN.shape

    def margin(_: Tensor) -> Tensor:
        return margin_XC[..., None]

    sound_XCN = score_XCN.nan_to_num(-math.inf, math.inf, -math.inf)
    position_XCW = best_places(sound_XCN, window, margin).sort(dim=-1).values
    first_place_XC1 = torch.arange(X * C, device=score_XCN.device).view(X, C, 1) * N
    return (position_XCW + first_place_XC1).flatten()


def sums_of_lists(x_BHND: Tensor, lists: MemberLists, backend: str) -> Tensor:
    """Return the sum of the vectors of each list's members, `[L, D]`; there are some vectors."""
    x_RD = x_BHND.reshape(-1, x_BHND.shape[-1])
    if is_static(x_BHND, backend):
        list_sums = selection_functions(x_BHND, backend).list_sums
        return list_sums(x_RD, lists.row_M, lists.count_L)
    return F.embedding_bag(lists.row_M, x_RD, lists.first_L(), mode="sum")


# Of every prefix.


class PrefixTopK:
    """The best W scores of each list so far, and their positions.

    A list that is full takes a newcomer that beats its worst score by more than the margin. The
    newcomer replaces the latest of the members that are no better than the worst by more than that.

    Args:
        margin_L: the margin of each list, in the type of scores.
        window: W.
    """

    def __init__(self, margin_L: Tensor, window: int) -> None:
        self.margin_L1 = margin_L[:, None]
        self.score_LW = margin_L.new_full((len(margin_L), window), -math.inf)
        # Empty slots count as members that came late, slot 0 as the latest. So they are taken
        # first, and in order.
        position_W = EMPTY - torch.arange(window, device=margin_L.device)
        self.position_LW = position_W.expand(self.score_LW.shape).clone()

    def bar(self) -> Tensor:
        """Return the score that a newcomer has to exceed, `[L, 1]`; it never falls."""
        return self.score_LW.amin(-1, keepdim=True) + self.margin_L1

    def offer(self, score_L: Tensor, position_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Offer one position to each list.

        Returns:
            Which lists take theirs, the slot that it gets there, and the position that it replaces.
        """
        bar_L1 = self.bar()
        joins_L1 = score_L[:, None] > bar_L1
        replaceable_LW = torch.where(self.score_LW <= bar_L1, self.position_LW, -1)
        slot_L1 = replaceable_LW.argmax(-1, keepdim=True)
        old_score_L1 = self.score_LW.gather(-1, slot_L1)
        old_position_L1 = self.position_LW.gather(-1, slot_L1)
        new_score_L1 = torch.where(joins_L1, score_L[:, None], old_score_L1)
        new_position_L1 = torch.where(joins_L1, position_L[:, None], old_position_L1)
        self.score_LW.scatter_(-1, slot_L1, new_score_L1)
        self.position_LW.scatter_(-1, slot_L1, new_position_L1)
        return joins_L1[:, 0], slot_L1[:, 0], old_position_L1[:, 0]

    def members(self, clusters: int, length: int) -> MemberLists:
        """Return the members of each list, in order of slots.

        Args:
            clusters, length: C and N, by which rows are numbered.
        """
        list_M, slot_M = (self.position_LW < length).nonzero(as_tuple=True)
        row_M = list_M // clusters * length + self.position_LW[list_M, slot_M]
        return MemberLists(row_M, torch.bincount(list_M, minlength=len(self.position_LW)))


class Arrivals(NamedTuple):
    """The members of every prefix: each position that was among the best W when it came."""

    lists: MemberLists
    leaves_M: Tensor
    """The position at which each member is replaced; N: never."""
    best: PrefixTopK
    """The best W of the whole sequence."""


class Newcomers(NamedTuple):
    """Some members, on arrival."""

    list_J: Tensor
    position_J: Tensor
    replaced_J: Tensor
    """The position of the member that each one replaces; `EMPTY` or near to it: none."""


@torch.no_grad()
def arrivals(centroid_HCD: Tensor, x_BHND: Tensor, window: int) -> Arrivals:
    """Return who becomes a member of each cluster on arrival, and until when it remains one.

    Position i reads the members j <= i that have not left by i.
    """
    B, H, N, _ = x_BHND.shape
    C = centroid_HCD.shape[1]
    margin_HC = centroid_margin(centroid_HCD, x_BHND.dtype)
    best = PrefixTopK(margin_HC.repeat(B, 1, 1).flatten(), window)
    none_J = torch.zeros(0, dtype=torch.int64, device=x_BHND.device)
    joined = [Newcomers(none_J, none_J, none_J)]
    most = piece_size(B * H * C)
    first = 0
    while first < N:
        # At most a quarter of the prefix: if scores are normal, about W / 4 of it may still join.
        end = min(N, first + most, first + max(window, first // 4))
        score_BHCT = products(centroid_HCD, x_BHND[:, :, first:end])
        joined += newcomers(best, score_BHCT.flatten(0, 2), first)
        first = end
    arrived = Newcomers(*(torch.cat(parts) for parts in zip(*joined, strict=True)))
    # Numbers list * N + position ascend from list to list, and with the positions within a list.
    number_M, order_M = (arrived.list_J * N + arrived.position_J).sort()
    has_replaced_J = arrived.replaced_J < N
    replaced_number_J = (arrived.list_J * N + arrived.replaced_J)[has_replaced_J]
    leaves_M = torch.full_like(number_M, N)
    leaves_M[torch.searchsorted(number_M, replaced_number_J)] = arrived.position_J[has_replaced_J]
    row_M = (arrived.list_J // C * N + arrived.position_J)[order_M]
    count_L = torch.bincount(arrived.list_J, minlength=B * H * C)
    return Arrivals(MemberLists(row_M, count_L), leaves_M, best)


def newcomers(
    best: PrefixTopK,
    score_LT: Tensor,
    first: int,
) -> list[Newcomers]:
    """Offer the positions of a piece, from position `first` on, and return those that join.

    The bar never falls. So a score that does not exceed the bar before the piece is not offered,
    and in each turn every list is offered the next of its other scores.
    """
    list_S, at_S = (score_LT > best.bar()).nonzero(as_tuple=True)
    count_L = torch.bincount(list_S, minlength=len(score_LT))
    first_L = count_L.cumsum(0) - count_L
    turns = int(count_L.max()) if len(count_L) else 0
    joined = []
    for turn in range(turns):
        has_more_L = turn < count_L
        at_L = at_S[(first_L + turn).clamp(max=len(at_S) - 1)]
        score_L = score_LT.gather(1, at_L[:, None])[:, 0]
        score_L = score_L.masked_fill(~has_more_L, -math.inf)
        joins_L, _, replaced_L = best.offer(score_L, at_L + first)
        list_J = joins_L.nonzero()[:, 0]
        joined.append(Newcomers(list_J, at_L[joins_L] + first, replaced_L[joins_L]))
    return joined
