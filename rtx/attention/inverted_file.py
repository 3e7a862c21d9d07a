"""Inverted files: which cluster each key is in, and which clusters each query probes.

`rtx.attention.probed` explains the method, with an example; this file has it for many queries at
once. C centroids divide the keys of a head into clusters. A query takes the clusters in the order
of its products with the centroids, until they hold m keys that it may read, or none is left.

Rounding differs between a forward pass and a stream, so scores within a margin of each other count
as equal (ties.py). Of equal clusters, the one with the lower number comes first.

Shapes: B sequences, H heads, X = B * H of them or some of those, C clusters, N positions, D head
size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.engine.triton_probing import Reach
from rtx.attention.members import products
from rtx.attention.pieces import pieces
from rtx.attention.reads import starts_around
from rtx.attention.ties import tie_margin
from rtx.attention.top_keys import last_readable
from rtx.attention.typed_torch import vector_norm

# The cluster of each key.


def finite(score: Tensor) -> Tensor:
    """Return finite scores, whose differences are never NaN.

    Infinite ones become the largest or least number of the type, and NaN the least.
    """
    largest = torch.finfo(score.dtype).max
    return score.nan_to_num(-largest, largest, -largest)


def largest_norm(centroid_XCD: Tensor) -> Tensor:
    """Return the largest norm of each head's centroids, `[X, 1, 1]`."""
    norm_XC1 = vector_norm(centroid_XCD, dim=-1, keepdim=True)
    return norm_XC1.amax(1, keepdim=True)


def clusters_by_distance(centroid_XCD: Tensor, k_XND: Tensor) -> Tensor:
    """Return the cluster whose centroid is closest to each key, `[X, N]`; the first of equal ones.

    The closest centroid c has the largest k . c - |c|^2 / 2. (For routing heads, the *nearest*
    cluster is the one with the largest product k . c.) Scores are equal to the largest within
    64 units in the last place of (|k| + r) r, where r is the largest norm of a centroid.
    """
    square_XC = centroid_XCD.square().sum(-1)
    half_square_X1C = square_XC[:, None] / 2
    score_XNC = products(k_XND, centroid_XCD) - half_square_X1C
    score_XNC = finite(score_XNC)
    largest_X11 = largest_norm(centroid_XCD)
    norm_XN1 = vector_norm(k_XND, dim=-1, keepdim=True)
    margin_XN1 = finite_margin(norm_XN1 + largest_X11, largest_X11, k_XND.dtype)
    top_XN1 = score_XNC.amax(-1, keepdim=True)
    is_nearest_XNC = score_XNC >= top_XN1 - margin_XN1
    return is_nearest_XNC.to(torch.uint8).argmax(-1)


def finite_margin(norm: Tensor, other_norm: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tie_margin`, or 0 where it is not a number or infinite."""
    margin = tie_margin(norm, other_norm, dtype)
    return margin.nan_to_num(0.0, 0.0)


def clusters_of(centroid_HCD: Tensor, k_BHND: Tensor) -> Tensor:
    """Return the cluster of each key, `[B, H, N]`, by the scores of some heads at a time."""
    B, H, N, _ = k_BHND.shape
    C = centroid_HCD.shape[1]
    centroid_HCD = centroid_HCD.to(k_BHND.dtype)
    centroid_XCD = centroid_HCD.repeat(B, 1, 1)
    k_XND = k_BHND.flatten(0, 1)
    clusters = [k_XND.new_empty(0, N, dtype=torch.int64)]
    scores_of_head = N * C
    for heads in pieces(B * H, scores_of_head):
        some_centroid_XCD = centroid_XCD[heads]
        some_k_XND = k_XND[heads]
        clusters.append(clusters_by_distance(some_centroid_XCD, some_k_XND))
    return torch.cat(clusters).view(B, H, N)


# The clusters that each query probes.


def query_margins(centroid_XCD: Tensor, q_XND: Tensor) -> Tensor:
    """Return the margin within which the products of a query count as equal, `[X, N, 1]`."""
    norm_XN1 = vector_norm(q_XND, dim=-1, keepdim=True)
    largest_X11 = largest_norm(centroid_XCD)
    return finite_margin(norm_XN1, largest_X11, q_XND.dtype)


def probed_clusters(
    score_XNC: Tensor,
    margin_XN1: Tensor,
    readable_XNC: Tensor,
    target: int,
) -> Tensor:
    """Return which clusters each query probes, `[X, N, C]`, bool.

    The clusters are sorted by score and cut into groups where neighbours are further apart than the
    margin. Within a group they count as equal, so they are sorted by number.

    Example: the scores of the clusters 0 to 2 are 5, 6.9999 and 7, and the margin is 0.001. Sorted,
    they are 7, 6.9999 and 5. The steps between them are 0.0001 and 1.9999, of which the second is a
    cut, so their groups are 0, 0 and 1. The numbers group * C + cluster are 2, 1 and 3. Sorted,
    they are 1, 2 and 3, which are the clusters 1, 2 and 0. If a query may read 2, 1 and 4 keys of
    the clusters 0 to 2, and its target is 3, it probes 1 and 2.

    Args:
        score_XNC: the products of queries and centroids.
        margin_XN1: see `query_margins`.
        readable_XNC: the number of each cluster's keys that each query may read.
        target: m.
    """
    is_unreadable_XNC = readable_XNC == 0
    score_XNC = finite(score_XNC).masked_fill(is_unreadable_XNC, -math.inf)
    cluster_XNC = clusters_in_order(score_XNC, margin_XN1)
    takeable_XNC = readable_XNC.clamp(max=target)
    taken_XNC = takeable_XNC.gather(-1, cluster_XNC)
    taken_before_XNC = taken_XNC.cumsum(-1) - taken_XNC
    needs_more_XNC = taken_before_XNC < target
    is_taken_XNC = (taken_XNC > 0) & needs_more_XNC
    is_probed_XNC = torch.zeros_like(is_taken_XNC)
    return is_probed_XNC.scatter(-1, cluster_XNC, is_taken_XNC)


def clusters_in_order(score_XNC: Tensor, margin_XN1: Tensor) -> Tensor:
    """Return the clusters in the order in which each query takes them, `[X, N, C]`.

    `probed_clusters` has an example.
    """
    C = score_XNC.shape[-1]
    sorted_XNC, cluster_XNC = score_XNC.sort(dim=-1, descending=True, stable=True)
    step_XNC = sorted_XNC[..., :-1] - sorted_XNC[..., 1:]
    is_cut_XNC = step_XNC > margin_XN1
    cuts_XNC = is_cut_XNC.cumsum(-1)
    group_XNC = F.pad(cuts_XNC, (1, 0))
    number_XNC = group_XNC * C + cluster_XNC
    sorted_number_XNC = number_XNC.sort(dim=-1).values
    return sorted_number_XNC % C


# Clusters of keys and scores of queries, for some heads at a time.


class Search(NamedTuple):
    """The inverted files of some heads' keys, and the scores of their queries."""

    q_XND: Tensor
    k_XND: Tensor
    cluster_XN: Tensor
    """The cluster of each key."""
    first_X1C: Tensor
    """The number of the head's keys in the clusters before each one."""
    readable_XNC: Tensor
    """The number of each cluster's keys that each query may read, int32."""
    stop_XNC: Tensor
    """The number of each cluster's keys up to the last that each query takes if it probes the
    cluster, int32. A causal query takes the last ones that it may read: `readable_XNC`."""
    score_XNC: Tensor
    """The products of queries and centroids."""
    margin_XN1: Tensor
    """Within which margin a query's scores are equal."""

    def probed_XNC(self, target: int) -> Tensor:
        """Return which clusters each query probes, for m = `target`."""
        return probed_clusters(
            self.score_XNC,
            self.margin_XN1,
            self.readable_XNC,
            target,
        )

    def order_XN(self) -> Tensor:
        """Return the positions of the keys, cluster after cluster."""
        return self.cluster_XN.sort(dim=-1, stable=True).indices


def make_search(centroid_XCD: Tensor, q_XND: Tensor, k_XND: Tensor, reach: Reach) -> Search:
    """Return the files and scores of some heads."""
    C = centroid_XCD.shape[1]
    cluster_XN = clusters_by_distance(centroid_XCD, k_XND)
    cluster_C = torch.arange(C, device=q_XND.device)
    is_member_XNC = cluster_XN[..., None] == cluster_C
    count_XNC = is_member_XNC.cumsum(1, dtype=torch.int32)
    total_X1C = is_member_XNC.sum(1, keepdim=True)
    if reach.causal:
        position_N = torch.arange(q_XND.shape[1], device=q_XND.device)
        last_N = last_readable(position_N, reach.attend_self)
        readable_XNC = count_XNC[:, last_N]
        stop_XNC = readable_XNC
    else:
        readable_XNC = total_X1C.int().expand_as(count_XNC)
        before_XNC = count_XNC - is_member_XNC.int()
        stop_XNC = stops_around(before_XNC, readable_XNC, reach.target)
    return Search(
        q_XND=q_XND,
        k_XND=k_XND,
        cluster_XN=cluster_XN,
        first_X1C=total_X1C.cumsum(-1) - total_X1C,
        readable_XNC=readable_XNC,
        stop_XNC=stop_XNC,
        score_XNC=products(q_XND, centroid_XCD),
        margin_XN1=query_margins(centroid_XCD, q_XND),
    )


def stops_around(before_XNC: Tensor, total_XNC: Tensor, target: int) -> Tensor:
    """Return `Search.stop_XNC` of queries that take the m keys of a cluster around them.

    Args:
        before_XNC: the number of each cluster's keys before each query.
        total_XNC: the number of each cluster's keys.
        target: m.
    """
    first_XNC = torch.zeros_like(total_XNC)
    start_XNC = starts_around(before_XNC, first_XNC, total_XNC, target)
    return (start_XNC + target).minimum(total_XNC)


def searches(
    centroid_HCD: Tensor,
    q_BHND: Tensor,
    k_BHND: Tensor,
    reach: Reach,
) -> Iterator[tuple[slice, Search]]:
    """Yield slices of the B * H heads, whose scores are in memory at once, and their searches."""
    B, H, N, _ = q_BHND.shape
    centroid_HCD = centroid_HCD.to(q_BHND.dtype)
    q_XND = q_BHND.flatten(0, 1)
    k_XND = k_BHND.flatten(0, 1)
    C = centroid_HCD.shape[1]
    head_of_all_X = torch.arange(B * H, device=q_BHND.device) % H
    scores_of_head = N * C
    for heads in pieces(B * H, scores_of_head):
        head_X = head_of_all_X[heads]
        search = make_search(
            centroid_HCD[head_X],
            q_XND[heads],
            k_XND[heads],
            reach,
        )
        yield heads, search


def early_count(reach: Reach, length: int) -> int:
    """Return how many positions are early: those whose queries may read m keys or fewer.

    Such a query probes all clusters, and so all keys that it may read. With causal=False no query
    counts as early.
    """
    if not reach.causal:
        return 0
    if reach.attend_self:
        return reach.target
    return min(length, reach.target + 1)


def max_probed(target: int, length: int) -> int:
    """Return how many keys a query probes at most: m - 1, and then m of one more cluster."""
    return min(2 * target - 1, length)
