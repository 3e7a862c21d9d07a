"""Lists of clusters, for queries that read all keys that they probe.

A head has a list for each cluster. Its key members are the keys of the cluster, and its query
members are the queries that probe it; each reads the last m keys of the list that it may read
(reads.py explains lists, members and ranges). The early positions of a head (`early_count`) have
one more list, in which each reads all keys up to its position. In the lists of clusters each of
them would be a member of all C.

`native_lists` and `triton_lists` are made by kernels of ours, and have both kinds of lists.
`dynamic_lists` and `lists_with_capacity` are made by torch's operations and have the lists of
clusters; `early_lists` has the others. Lists with a capacity have a number of query members that
follows from shapes, so that the CPU does not wait for a GPU (capacity.py).

Shapes: B sequences, H heads, X = B * H of them or some of those, C clusters, N positions, R = B *
H * N rows, L = B * H * C lists, M = R key members, P query members.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.engine import native, static_selection, triton_probing
from rtx.attention.engine.by_triton import LISTS
from rtx.attention.engine.lists import KernelLists, readers, row_members
from rtx.attention.engine.triton_probing import Reach
from rtx.attention.inverted_file import Search, early_count, searches
from rtx.attention.once import cached_by_shape
from rtx.attention.reads import (
    MemberLists,
    RangeReads,
    Reads,
    members_read,
    order_numbers,
    pack,
    ranges_around,
    without_self_inside,
)
from rtx.attention.top_keys import last_readable


def early_lists(shape: torch.Size, reach: Reach, device: torch.device) -> list[Reads]:
    """Return the lists of early positions, which are cached for each shape.

    Args:
        shape: `[B, H, N, D]`.
    """
    B, H, N, _ = shape
    early = early_count(reach, N)
    make = partial(make_early_lists, B * H, N, early, reach.attend_self)
    form = ("early", B, H, N, early, reach.attend_self)
    return cached_by_shape(form, device, make)


def make_early_lists(
    heads: int,
    length: int,
    early: int,
    attend_self: bool,
    device: torch.device,
) -> list[Reads]:
    """Return one list for each head: the early positions, which read all keys up to themselves.

    Args:
        heads: X.
        length: N.
    """
    row_R = torch.arange(heads * length, device=device)
    row_XN = row_R.view(heads, length)
    early_row_XN = row_XN[:, :early]
    count_X = torch.full((heads,), early, device=device)
    lists = MemberLists(early_row_XN.flatten(), count_X)
    window = max(1, early)
    return [members_read(lists, lists, length, window, attend_self)]


def native_lists(centroid_HCD: Tensor, q_BHND: Tensor, k_BHND: Tensor, reach: Reach) -> RangeReads:
    """Return all lists, made by the compiled kernel for CPUs."""
    N = q_BHND.shape[2]
    early = early_count(reach, N)
    lists = native.probe(
        centroid_HCD,
        q_BHND,
        k_BHND,
        candidates=reach.target,
        early=early,
        attend_self=reach.attend_self,
    )
    return RangeReads(
        query=lists.query,
        key=lists.key,
        start_P=lists.start_P,
        stop_P=lists.stop_P,
        length=N,
        most=early,
    )


def triton_lists(
    files: triton_probing.Files,
    probes: triton_probing.Probes,
    reach: Reach,
    capacity: int,
) -> RangeReads:
    """Return all lists, made by the kernels for GPUs.

    Args:
        files: the keys of each cluster.
        probes: the clusters that each query probes.
        capacity: the largest number of query members of clusters' lists together.
    """
    lists = triton_probing.pack_members(files, probes, reach, capacity)
    rows = files.cluster_XN.numel()
    query_count_L = triton_probing.member_counts(probes.tally, files.early, capacity)
    key_count_L = triton_probing.member_counts(files.tally, files.early, rows)
    return RangeReads(
        query=MemberLists(lists.query_row_P, query_count_L),
        key=MemberLists(lists.key_row_M, key_count_L),
        start_P=lists.start_P,
        stop_P=lists.stop_P,
        length=files.cluster_XN.shape[1],
        most=files.early,
        derived={LISTS: lists},
    )


# Lists by torch's operations. `number_P` and `number_M` are the numbers list * N + position of
# members (`reads.order_numbers`). Members in the order of these numbers are in the order of lists,
# and within a list in the order of positions.


def dynamic_lists(centroid_HCD: Tensor, q_BHND: Tensor, k_BHND: Tensor, reach: Reach) -> RangeReads:
    """Return the lists of clusters, of the exact length: every query member is real."""
    B, H, N, _ = q_BHND.shape
    C = centroid_HCD.shape[1]
    numbers: list[Tensor] = []
    clusters: list[Tensor] = []
    for heads, search in searches(centroid_HCD, q_BHND, k_BHND, reach):
        is_probed_XCN = late_probes(search, reach)
        number_J = is_probed_XCN.flatten().nonzero()[:, 0]
        first_number = heads.start * C * N
        numbers.append(number_J + first_number)
        clusters.append(search.cluster_XN)
    number_P = torch.cat(numbers)
    count_L = torch.bincount(number_P // N, minlength=B * H * C)
    queries = MemberLists(rows_of(number_P, C, N), count_L)
    cluster_BHN = torch.cat(clusters).view(B, H, N)
    keys = pack(cluster_BHN, C, complete=True)
    start_P, stop_P = probed_ranges(number_P, keys, N, reach)
    part = RangeReads(
        query=queries,
        key=keys,
        start_P=start_P,
        stop_P=stop_P,
        length=N,
        most=reach.target,
    )
    if reach.causal or reach.attend_self:
        return part
    (others,) = without_self_inside([part], B * H * N)
    return others


def late_probes(search: Search, reach: Reach) -> Tensor:
    """Return which queries that are not early probe which clusters, `[X, C, N]`, bool."""
    is_probed_XNC = search.probed_XNC(reach.target)
    N = is_probed_XNC.shape[1]
    early = early_count(reach, N)
    is_probed_XNC[:, :early] = False
    return is_probed_XNC.mT


def rows_of(number_P: Tensor, clusters: int, length: int) -> Tensor:
    """Return the row of each query member.

    Args:
        number_P: list * N + position.
        clusters: C.
        length: N.
    """
    head_P = number_P // (length * clusters)
    return head_P * length + number_P % length


def probed_ranges(
    number_P: Tensor,
    keys: MemberLists,
    length: int,
    reach: Reach,
) -> tuple[Tensor, Tensor]:
    """Return the starts and stops of query members: the last m keys that each may read.

    With causal=False they are the m keys around it, its own key included.

    Args:
        number_P: list * N + position.
        length: N.
    """
    if not reach.causal:
        return ranges_around(number_P, keys, length, reach.target)
    list_P = number_P // length
    position_P = number_P % length
    last_P = last_readable(position_P, reach.attend_self)
    last_number_P = list_P * length + last_P
    number_M = order_numbers(keys, length)
    stop_P = torch.searchsorted(number_M, last_number_P, right=True)
    first_of_list_L = keys.first_L()
    start_P = first_of_list_L[list_P].maximum(stop_P - reach.target)
    return start_P, stop_P


class ProbedMembers(NamedTuple):
    """The members of clusters' lists, with a capacity of P query members."""

    number_P: Tensor
    """list * N + position of each query member, ascending; 0 after the last real one."""
    count_L: Tensor
    """The query members of each list, those beyond the capacity included."""
    count_1: Tensor
    """The query members of all lists, those beyond the capacity included."""
    keys: MemberLists


def collect_members(
    centroid_HCD: Tensor,
    q_BHND: Tensor,
    k_BHND: Tensor,
    reach: Reach,
    capacity: int,
) -> ProbedMembers:
    """Return the members of clusters' lists.

    Args:
        capacity: P.
    """
    B, H, N, _ = q_BHND.shape
    C = centroid_HCD.shape[1]
    # The last slot receives all members beyond the capacity.
    number_P1 = torch.zeros(capacity + 1, dtype=torch.int64, device=q_BHND.device)
    count_1 = torch.zeros(1, dtype=torch.int64, device=q_BHND.device)
    counts: list[Tensor] = []
    clusters: list[Tensor] = []
    for heads, search in searches(centroid_HCD, q_BHND, k_BHND, reach):
        is_probed_XCN = late_probes(search, reach)
        is_probed = is_probed_XCN.flatten()
        first_number = heads.start * C * N
        count_1 = static_selection.collect(is_probed, first_number, number_P1, count_1)
        counts.append(is_probed_XCN.sum(-1).flatten())
        clusters.append(search.cluster_XN)
    cluster_BHN = torch.cat(clusters).view(B, H, N)
    keys = pack(cluster_BHN, C, complete=True)
    return ProbedMembers(
        number_P=number_P1[:capacity],
        count_L=torch.cat(counts),
        count_1=count_1,
        keys=keys,
    )


def lists_with_capacity(
    members: ProbedMembers, clusters: int, length: int, reach: Reach
) -> RangeReads:
    """Return lists of fixed capacity; `derived` has them as kernels read them.

    Query members after the last real one belong to no row. Their ranges are empty, and start after
    all keys, so that starts and stops never fall.

    Args:
        clusters: C.
        length: N.
    """
    keys = members.keys
    rows = len(keys.row_M)
    capacity = len(members.number_P)
    row_P = rows_of(members.number_P, clusters, length)
    start_P, stop_P = probed_ranges(members.number_P, keys, length, reach)
    place_P = torch.arange(capacity, device=row_P.device)
    is_real_P = place_P < members.count_1
    lists = lists_for_kernels(
        torch.where(is_real_P, row_P, rows),
        keys.row_M,
        torch.where(is_real_P, start_P, rows).int(),
        torch.where(is_real_P, stop_P, rows).int(),
        members.count_1.clamp(max=capacity),
    )
    count_L = static_selection.bounds(members.count_L, capacity).diff()
    return RangeReads(
        query=MemberLists(lists.query_row_P, count_L),
        key=keys,
        start_P=lists.start_P,
        stop_P=lists.stop_P,
        length=length,
        most=reach.target,
        derived={LISTS: lists},
    )


def lists_for_kernels(
    row_P: Tensor,
    row_M: Tensor,
    start_P: Tensor,
    stop_P: Tensor,
    count_1: Tensor,
) -> KernelLists:
    """Return lists as kernels read them, see engine/lists.py.

    Args:
        row_P: the rows of query members; M for those that belong to no row.
        row_M: the rows of key members, all of them real.
        start_P, stop_P: the ranges, int32.
        count_1: the number of real query members.
    """
    M = len(row_M)
    low_M, high_M = readers(start_P, stop_P, M)
    key_count_1 = count_1.new_full((1,), M, dtype=torch.int32)
    return KernelLists(
        query_row_P=torch.where(row_P < M, row_P, 0).int(),
        key_row_M=row_M.int(),
        start_P=start_P,
        stop_P=stop_P,
        low_M=low_M,
        high_M=high_M,
        query_members=row_members(row_P, M),
        key_members=row_members(row_M, M),
        count_2=torch.cat([count_1.int(), key_count_1]),
    )
