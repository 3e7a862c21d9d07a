"""Selection of the members of clusters by their scores.

A score is the dot product of a centroid with a normalised vector, in float32 or wider. Nothing here
has a gradient. `ties.py` defines which scores count as equal.

`choose_members` selects the members of each cluster by the scores of whole sequences, and
`nearest_clusters` the cluster of each position. The helpers of other choices by content
(`normalise`, `products`) are here, too.

At C = N / W clusters the scores of a head take 4 N^2 / W bytes, which are in memory at once.

Shapes: B sequences, H heads, X = B * H of them or some of those, C clusters, N positions, D head
size, W attention window, L = B * H * C lists, M members of all lists together, J of some.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.engine import native, norm
from rtx.attention.engine.static_selection import Selected, memberships
from rtx.attention.pieces import pieces
from rtx.attention.precision import no_autocast, wide_type, widened
from rtx.attention.reads import MemberLists, pack
from rtx.attention.static import is_static, selection_functions
from rtx.attention.ties import best_places, centroid_margin, highest_clusters


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


class ClusterMembers(NamedTuple):
    """The members of all clusters in one role."""

    lists: MemberLists
    """The members of each cluster, without those that exceed the capacity of the lists."""
    count_L: Tensor
    """The number of members of each cluster, with those that exceed the capacity."""
    nearest: MemberLists | None = None
    """Lists in which each position is a member of its highest-scoring cluster alone; None: not
    computed."""
    moment_2BHC: Tensor | None = None
    """For each cluster the sum of the scores of all positions, and the sum of the squared scores;
    None: not computed."""
    selected: Selected | None = None
    """The same members in static shapes; None: they were not selected in static shapes."""


def choose_members(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor | None,
    *,
    window: int,
    nearest: bool,
    backend: str,
) -> ClusterMembers:
    """Return the members of all clusters in one role, in lists whose lengths depend on the scores.

    Args:
        x_BHND: the vectors of the role.
        threshold_HC: the lowest score of a member in each cluster; None: the members of a cluster
            are the `window` positions with the highest scores.
        nearest: also compute `ClusterMembers.nearest`.
    """
    selection = select(
        centroid_HCD,
        x_BHND,
        threshold_HC,
        window=window,
        nearest=nearest,
        backend=backend,
    )
    nearest_lists = None
    if selection.nearest_BHN is not None:
        nearest_lists = lists_of_clusters(selection.nearest_BHN, centroid_HCD)
    lists = MemberLists(selection.row_M, selection.count_L)
    return ClusterMembers(lists, lists.count_L, nearest_lists, selection.moment_2BHC)


def nearest_clusters(centroid_HCD: Tensor, x_BHND: Tensor, backend: str) -> Tensor:
    """Return the highest-scoring cluster of each position, `[B, H, N]`."""
    if is_static(x_BHND, backend):
        functions = selection_functions(x_BHND, backend)
        margin_HC = centroid_margin(centroid_HCD, x_BHND.dtype)
        cluster_BHN = functions.nearest_clusters(centroid_HCD, x_BHND, margin_HC)
        return cluster_BHN.long()
    selection = select(
        centroid_HCD,
        x_BHND,
        None,
        window=0,
        nearest=True,
        backend=backend,
    )
    assert selection.nearest_BHN is not None
    return selection.nearest_BHN


def nearest_members(centroid_HCD: Tensor, x_BHND: Tensor, backend: str) -> MemberLists:
    """Return lists in which each position is a member of its highest-scoring cluster alone."""
    if not is_static(x_BHND, backend):
        cluster_BHN = nearest_clusters(centroid_HCD, x_BHND, backend)
        return lists_of_clusters(cluster_BHN, centroid_HCD)
    functions = selection_functions(x_BHND, backend)
    margin_HC = centroid_margin(centroid_HCD, x_BHND.dtype)
    return functions.nearest_members(centroid_HCD, x_BHND, margin_HC)


def lists_of_clusters(cluster_BHN: Tensor, centroid_HCD: Tensor) -> MemberLists:
    """Return lists in which each position is a member of one cluster, `cluster_BHN`."""
    C = centroid_HCD.shape[1]
    return pack(cluster_BHN, C, complete=True)


def as_cluster_members(selected: Selected) -> ClusterMembers:
    """Return members that were selected in static shapes as `ClusterMembers`."""
    lists = MemberLists(
        row_M=selected.row_M,
        count_L=selected.bound_L1.diff(),
    )
    return ClusterMembers(lists, selected.count_L, selected=selected)


def with_rows_of(lists: MemberLists, length: int, new_length: int) -> MemberLists:
    """Return the same members with the rows of heads of `new_length` positions.

    Args:
        length: the number of positions of a head by which rows are numbered in `lists`.
    """
    head_M = lists.row_M // max(1, length)
    row_M = lists.row_M + head_M * (new_length - length)
    return MemberLists(row_M, lists.count_L)


def select(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor | None,
    *,
    window: int,
    nearest: bool,
    backend: str,
) -> native.Selection:
    """Return the members of every cluster by scores, see `native.select`.

    The compiled kernel computes them if it can run and the backend allows it, otherwise
    `select_by_torch`.
    """
    N = x_BHND.shape[2]
    fits_kernel = x_BHND.is_cpu and x_BHND.dtype == torch.float32
    choose = select_by_torch
    if fits_kernel and native.wanted(backend, N):
        choose = native.select
    return choose(
        centroid_HCD,
        x_BHND,
        threshold_HC,
        window=window,
        nearest=nearest,
    )


def select_by_torch(
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
    margin_HC = centroid_margin(centroid_HCD, x_BHND.dtype)
    places = [x_BHND.new_zeros(0, dtype=torch.int64)]
    nearest_XN = x_BHND.new_zeros(B * H, N, dtype=torch.int64)
    moment_2XC = x_BHND.new_zeros(2, B * H, C, dtype=torch.float64)
    for heads, head_X, score_XCN in scores_of_heads(centroid_HCD, x_BHND):
        margin_XC = margin_HC[head_X]
        threshold_XC = None
        if threshold_HC is not None:
            threshold_XC = threshold_HC[head_X]
            moment_2XC[:, heads] = moments(score_XCN)
        place_J = places_of_members(score_XCN, threshold_XC, margin_XC, window)
        first_place = heads.start * C * N
        places.append(place_J + first_place)
        if nearest:
            nearest_XN[heads] = highest_clusters(score_XCN, margin_XC)
    lists = lists_of_places(torch.cat(places), B * H, C, N)
    selection = native.Selection(lists.row_M, lists.count_L, nearest_BHN=None, moment_2BHC=None)
    if nearest:
        nearest_BHN = nearest_XN.view(B, H, N)
        selection = selection._replace(nearest_BHN=nearest_BHN)
    if threshold_HC is not None:
        moment_2BHC = moment_2XC.view(2, B, H, C)
        selection = selection._replace(moment_2BHC=moment_2BHC)
    return selection


def places_of_members(
    score_XCN: Tensor,
    threshold_XC: Tensor | None,
    margin_XC: Tensor,
    window: int,
) -> Tensor:
    """Return the members of some clusters, as places in their flat scores, ascending.

    Args:
        threshold_XC: the lowest score of a member; None: the members are the `window` best.
    """
    if threshold_XC is not None:
        joins_XCN = memberships(score_XCN, threshold_XC, margin_XC)
        return joins_XCN.flatten().nonzero()[:, 0]
    if window:
        return best_members(score_XCN, margin_XC, window)
    return score_XCN.new_zeros(0, dtype=torch.int64)


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

    # `best_places` asks for the margin at some places; here it is that of the cluster at each.
    def margin(_: Tensor) -> Tensor:
        return margin_XC[..., None]

    score_XCN = score_XCN.nan_to_num(-math.inf, math.inf, -math.inf)
    position_XCW = best_places(score_XCN, window, margin)
    position_XCW = position_XCW.sort(dim=-1).values
    list_L = torch.arange(X * C, device=score_XCN.device)
    first_place_L = list_L * N
    place_XCW = first_place_L.view(X, C, 1) + position_XCW
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
