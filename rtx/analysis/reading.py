"""What chosen positions of one sequence read, head by head: the weight on every key, and the cluster it is read in.

Weights are asked of the patterns themselves (`rtx.analysis.weights`). Heads in clusters are asked once for each
cluster, all others emptied: then the values need be no wider than the cluster has members, and the answer says in which
cluster a key is read. Nothing here knows a pattern's rule of who reads whom.

Shapes: N positions, P of them looked at, H heads of a group, C clusters, D head size, M members of a cluster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rtx.analysis.weights import Head, read_values
from rtx.attention.hashing import hash_positions
from rtx.attention.heads import Heads
from rtx.attention.lists import Members
from rtx.attention.lsh import LshHeads
from rtx.attention.random import RandomHeads
from rtx.attention.routing import RoutingHeads
from rtx.attention.shaw import Distances
from rtx.model.multihead import MultiheadAttention

MAX_WEIGHTS = 1 << 25
"""Weights of a group's heads held at once, at all positions; those at the positions looked at are kept."""


@dataclass
class Reading:
    """What one head reads at the positions looked at; all on the CPU."""

    at_P: Tensor
    """The positions, ascending."""
    weight_PN: Tensor
    """Float32; 0: not read. A row sums to 1, or to 0 where the position reads nothing."""
    cluster_PN: Tensor
    """Int16: the cluster in which the key is read (with most weight, where in several); -1: not read, or no clusters.

    Of hashing heads cluster t * buckets + b is bucket b of round t, t the first round that puts both into one bucket.
    """
    clusters: int
    """How many clusters the head has; 0: its pattern has none."""


def read_heads(attention: MultiheadAttention, x_1NE: Tensor, at_P: Tensor, kept: set[Head]) -> dict[Head, Reading]:
    """Return what the heads in `kept` of a layer read of one sequence at the positions `at_P`."""
    found: dict[Head, Reading] = {}
    groups = zip(attention.groups, attention.each(), attention.relative(), attention.split(x_1NE), strict=True)
    for name, heads, relative, (q_1HND, k_1HND, _) in groups:
        mine = sorted(head for group, head in kept if group == name)
        if not mine:
            continue
        group = Group(attention, heads, relative, q_1HND, k_1HND)
        if isinstance(heads, RoutingHeads | RandomHeads):
            readings = clustered(group, heads, at_P, mine)
        else:
            readings = plain(group, at_P, mine)
        found |= {(name, head): reading for head, reading in zip(mine, readings, strict=True)}
    return found


@dataclass(frozen=True)
class Group:
    """Heads of one pattern with the queries and keys of one sequence."""

    attention: MultiheadAttention
    heads: Heads
    relative: Distances | None
    q_1HND: Tensor
    k_1HND: Tensor | None

    def read(self, v_1HNM: Tensor) -> Tensor:
        """Return the outputs for values of any width, `[H, N, M]`."""
        return read_values(self.attention, self.heads, self.relative, self.q_1HND, self.k_1HND, v_1HNM)[0]


def plain(group: Group, at_P: Tensor, mine: list[int]) -> list[Reading]:
    """Return what heads without clusters, or with buckets, read."""
    _, H, N, _ = group.q_1HND.shape
    weight_XPN = torch.zeros(len(mine), len(at_P), N)
    block = max(1, MAX_WEIGHTS // (N * H))
    at_device = at_P.to(group.q_1HND.device)
    for first in range(0, N, block):
        size = min(block, N - first)
        unit_NM = group.q_1HND.new_zeros(N, size)
        unit_NM[first : first + size] = torch.eye(size, dtype=unit_NM.dtype, device=unit_NM.device)
        out_HNM = group.read(unit_NM.expand(1, H, N, size))
        weight_XPN[..., first : first + size] = out_HNM[mine][:, at_device].float().cpu()
    if isinstance(group.heads, LshHeads):
        return hashed(group.heads, group.q_1HND, at_P, mine, weight_XPN)
    none_PN = torch.full(weight_XPN.shape[1:], -1, dtype=torch.int16)
    return [Reading(at_P, weight_PN, none_PN, 0) for weight_PN in weight_XPN]


def hashed(heads: LshHeads, q_1HND: Tensor, at_P: Tensor, mine: list[int], weight_XPN: Tensor) -> list[Reading]:
    """Return the readings of hashing heads, with the bucket of the first round that shows each pair."""
    bucket_THN = hash_positions(q_1HND, heads.rotation_HTDF)[:, 0].cpu()
    rounds, buckets = len(bucket_THN), 2 * heads.rotation_HTDF.shape[-1]
    readings = []
    for head, weight_PN in zip(mine, weight_XPN, strict=True):
        cluster_PN = torch.full(weight_PN.shape, -1, dtype=torch.int16)
        for t in reversed(range(rounds)):
            bucket_N = bucket_THN[t, head]
            mine_P1 = bucket_N[at_P][:, None]
            cluster_PN = torch.where(bucket_N == mine_P1, (t * buckets + mine_P1).short(), cluster_PN)
        readings.append(Reading(at_P, weight_PN, cluster_PN.masked_fill(weight_PN == 0, -1), rounds * buckets))
    return readings


def clustered(group: Group, heads: RoutingHeads | RandomHeads, at_P: Tensor, mine: list[int]) -> list[Reading]:
    """Return what heads in clusters read: the mean over the clusters in which a position sees a key."""
    N = group.q_1HND.shape[2]
    key_member_HCN = members(heads, group.q_1HND, group.k_1HND)
    clusters = key_member_HCN.shape[1]
    shape = len(mine), len(at_P), N
    weight_XPN, best_XPN = torch.zeros(shape), torch.zeros(shape)
    cluster_XPN = torch.full(shape, -1, dtype=torch.int16)
    times_XP = torch.zeros(shape[:2])
    for cluster in range(clusters):
        member_HN = key_member_HCN[:, cluster]
        total_XP = torch.zeros(shape[:2])
        for key_HN, inside_XPM in inside(group, heads, cluster, member_HN, at_P, mine):
            total_XP += inside_XPM.sum(-1)
            for x, head in enumerate(mine):
                key_M = key_HN[head].nonzero()[:, 0]
                inside_PM = inside_XPM[x, :, : len(key_M)]
                more_PM = inside_PM > best_XPN[x][:, key_M]
                weight_XPN[x][:, key_M] += inside_PM
                best_XPN[x][:, key_M] = best_XPN[x][:, key_M].maximum(inside_PM)
                cluster_XPN[x][:, key_M] = cluster_XPN[x][:, key_M].masked_fill(more_PM, cluster)
        times_XP += total_XP > 0.5
    weight_XPN /= times_XP.clamp(min=1)[..., None]
    return [Reading(at_P, weight_XPN[x], cluster_XPN[x], clusters) for x in range(len(mine))]


def inside(
    group: Group, heads: RoutingHeads | RandomHeads, cluster: int, member_HN: Tensor, at_P: Tensor, mine: list[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a cluster's keys part by part, as masks `[H, N]`, with the weights `[X, P, M]` on them inside it.

    The members that a head's mask marks stand in order in its columns; heads with fewer have columns of zeros.
    """
    H, N = member_HN.shape
    rank_HN = member_HN.cumsum(-1) - 1
    at_device = at_P.to(member_HN.device)
    block = max(1, MAX_WEIGHTS // (N * H))
    for first in range(0, int(member_HN.sum(-1).max()), block):
        key_HN = member_HN & (rank_HN >= first) & (rank_HN < first + block)
        size = int(key_HN.sum(-1).max())
        unit_1HNM = group.q_1HND.new_zeros(1, H, N, size)
        head_K, key_K = key_HN.nonzero(as_tuple=True)
        unit_1HNM[0, head_K, key_K, rank_HN[head_K, key_K] - first] = 1
        with only_cluster(heads, cluster):
            out_HNM = group.read(unit_1HNM)
        yield key_HN.cpu(), out_HNM[mine][:, at_device].float().cpu()


def members(heads: RoutingHeads | RandomHeads, q_1HND: Tensor, k_1HND: Tensor | None) -> Tensor:
    """Return which keys each cluster has, `[H, C, N]`, as the heads themselves choose them."""
    if isinstance(heads, RandomHeads):
        chosen = heads.members(1, q_1HND.shape[2])
    else:
        of_queries, of_keys = heads.choose(heads.read(q_1HND, k_1HND), None)
        chosen = (of_queries if of_keys is None else of_keys).members
    assert chosen is not None
    return chosen.mask().unflatten(0, (q_1HND.shape[1], -1))


@contextlib.contextmanager
def only_cluster(heads: RoutingHeads | RandomHeads, cluster: int) -> Iterator[None]:
    """Empty all clusters of some heads but one, for as long as the context lasts."""
    if isinstance(heads, RandomHeads):
        of_heads, clusters, name = heads.members, heads.position_HCW.shape[1], "members"

        def chosen(*given: Any, **settings: Any) -> Any:
            return alone(of_heads(*given, **settings), cluster, clusters)
    else:
        both, clusters, name = heads.choose, heads.centroids.centroid_HCD.shape[1], "choose"

        def chosen(*given: Any, **settings: Any) -> Any:
            every = both(*given, **settings)
            return tuple(
                found and found._replace(members=found.members and alone(found.members, cluster, clusters))
                for found in every
            )

    setattr(heads, name, chosen)
    try:
        yield
    finally:
        delattr(heads, name)


def alone(members: Members, cluster: int, clusters: int) -> Members:
    """Return the lists with those of all clusters but one emptied."""
    kept_L = torch.arange(len(members.count_L), device=members.count_L.device) % clusters == cluster
    row_M = members.row_M[kept_L[members.list_M()]]
    return members._replace(row_M=row_M, count_L=members.count_L * kept_L)
