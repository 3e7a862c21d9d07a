"""Let queries probe clusters of keys with Triton kernels, in static shapes.

`rtx.attention.probed` has the method, `probing_kernels.py` the kernels and the tensors that one
writes for another. Three operators run them:

    file_keys       the lists of keys, which do not depend on queries
    probe_files     which clusters each query takes
    pack_members    the lists of queries, and which keys each query reads

The CPU launches kernels and never waits for the GPU. Members are numbered list after list: first
those of the lists of early positions, of which each head has one, then those of clusters' lists.

Shapes: B sequences, H heads, X = B * H, C clusters of a head, N positions, S of them at a time,
D head size, T tiles of 32 positions, E early positions, L = X * C lists of clusters, L1 = L + 1,
R = X * N rows, R1 = R + 1, M = X * E + R key members, P = X * E + room query members.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.engine.lists import KernelLists, RowMembers
from rtx.attention.engine.rounding import power_of_two, whole_pieces
from rtx.attention.engine.triton_selection import precision
from rtx.attention.reads import MemberLists
from rtx.attention.ties import tie_margin

TILE = 32
"""Positions of a tile, as `probing_kernels.TILE`, which only a machine with Triton can read."""
MAX_CLUSTERS = 4095
"""The most clusters of a head, see `probing_kernels.last_taken`."""
MAX_LENGTH = (1 << 20) - 1
"""The most positions of a sequence, see `probing_kernels.last_taken`."""
VECTORS = 64
"""Vectors that a program of `cluster_kernel` or `score_kernel` works on."""
REGISTERS = 168
"""The most that a thread has in `probe_kernel`. With more, fewer than 12 programs fit at once."""
MAX_SCORES = 1 << 26
"""Scores of queries with clusters that are in memory at once."""


@functools.cache
def kernels() -> ModuleType:
    """Return the module of the kernels, which needs Triton."""
    from rtx.attention.engine import probing_kernels

    return probing_kernels


class Tally(NamedTuple):
    """Members of clusters' lists: of keys, or of queries. `probing_kernels` has an example."""

    word_XTC: Tensor
    """Bit j: position j of the tile is a member."""
    last_XCT: Tensor
    """The number of members up to the end of the tile, those of the lists before included."""
    bound_L1: Tensor
    """The first member of each list, and after these the number of all members."""


class Files(NamedTuple):
    """The keys of each cluster, and what `KernelLists` say of keys."""

    cluster_XN: Tensor
    """The cluster of each key."""
    tally: Tally
    """Of keys."""
    row_M: Tensor
    """The rows of early keys, then those of the keys of clusters' lists."""
    members: RowMembers
    """The key members of each row."""
    early: int
    """E."""

    def packed(self) -> MemberLists:
        """Return the clusters' lists alone."""
        of_early = len(self.row_M) - self.cluster_XN.numel()
        return MemberLists(self.row_M[of_early:], self.tally.bound_L1.diff().long())


class Probes(NamedTuple):
    """Which clusters each query takes."""

    bits: Tensor
    """Bit i of word w, `[X, ceil(C / 32), N]`: the query takes cluster 32 w + i."""
    tally: Tally
    """Of queries."""

    def count_1(self) -> Tensor:
        """Return the number of members of clusters' lists as queries."""
        return self.tally.bound_L1[-1:].long()


class Reach(NamedTuple):
    """How far a query probes."""

    target: int
    """How many keys it probes for, and the most that it takes of a cluster."""
    attend_self: bool
    """Whether it may read the key of its own position."""


def file_keys(centroid_HCD: Tensor, k_BHND: Tensor, early: int) -> Files:
    """Return the lists of keys.

    Args:
        k_BHND: float32.
        early: E.
    """
    assert k_BHND.dtype == torch.float32, "the kernels compute in float32"
    tensors = file_operator(centroid_HCD.detach().float(), k_BHND.detach(), early)
    cluster_XN, word_XTC, last_XCT, bound_L1, row_M, first_R1, member_M = tensors
    tally = Tally(word_XTC, last_XCT, bound_L1)
    return Files(cluster_XN, tally, row_M, RowMembers(first_R1, member_M), early)


FilesTuple = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The type of what `file_operator` returns, for torch.library, which has no named tuples."""


def files_by_kernels(centroid_HCD: Tensor, k_BHND: Tensor, early: int) -> FilesTuple:
    """Return the tensors of `Files`."""
    C = centroid_HCD.shape[1]
    B, H, N, _ = k_BHND.shape
    cluster_XN = launch_cluster(centroid_HCD.contiguous(), k_BHND.contiguous())
    tally = launch_tally(cluster_XN, B * H, N, C, of_keys=True, most=B * H * N)
    row_M = cluster_XN.new_empty(B * H * (early + N))
    first_R1 = cluster_XN.new_empty(B * H * N + 1)
    member_M = torch.empty_like(row_M)
    tiles = tally.last_XCT.shape[-1]
    kernels().key_kernel[(B * H, whole_pieces(N, 128))](
        cluster_XN, tally.last_XCT, tally.word_XTC, row_M, first_R1, member_M, N, C, tiles, early,
        BN=128, num_warps=4,
    )  # fmt: skip
    word_XTC, last_XCT, bound_L1 = tally
    return cluster_XN, word_XTC, last_XCT, bound_L1, row_M, first_R1, member_M


file_operator = torch.library.custom_op("rtx::file_keys", files_by_kernels, mutates_args=())


@file_operator.register_fake
def _(centroid_HCD: Tensor, k_BHND: Tensor, early: int) -> FilesTuple:
    B, H, N, _ = k_BHND.shape
    cluster_XN = k_BHND.new_empty(B * H, N, dtype=torch.int32)
    word_XTC, last_XCT, bound_L1 = empty_tally(cluster_XN, N, centroid_HCD.shape[1], torch.int32)
    row_M = cluster_XN.new_empty(B * H * (early + N))
    first_R1 = cluster_XN.new_empty(B * H * N + 1)
    member_M = torch.empty_like(row_M)
    return cluster_XN, word_XTC, last_XCT, bound_L1, row_M, first_R1, member_M


def empty_tally(x: Tensor, length: int, clusters: int, dtype: torch.dtype) -> Tally:
    """Return a tally of shapes alone.

    Args:
        x: a tensor `[X, ...]` on the device of the tally.
        dtype: of the running sums.
    """
    X = len(x)
    tiles = whole_pieces(length, TILE)
    return Tally(
        word_XTC=x.new_empty(X, tiles, clusters, dtype=torch.int32),
        last_XCT=x.new_empty(X, clusters, tiles, dtype=dtype),
        bound_L1=x.new_empty(X * clusters + 1, dtype=dtype),
    )


def launch_cluster(centroid_HCD: Tensor, k_BHND: Tensor) -> Tensor:
    """Return the cluster of each key, `[X, N]`, int32."""
    B, H, N, D = k_BHND.shape
    C = centroid_HCD.shape[1]
    cluster_XN = k_BHND.new_empty(B * H, N, dtype=torch.int32)
    square_HC = centroid_HCD.square().sum(-1)
    radius_H = square_HC.amax(-1).sqrt()
    kernels().cluster_kernel[(B * H, whole_pieces(N, VECTORS))](
        k_BHND, centroid_HCD, square_HC / 2, radius_H, unit_margin(radius_H), cluster_XN, N, H, C,
        **score_constants(D, precision(k_BHND.device)), num_warps=4, num_stages=1,
    )  # fmt: skip
    return cluster_XN


def score_constants(size: int, exactness: str) -> dict[str, Any]:
    """Return constants of `cluster_kernel` and `score_kernel`, with which they hardly spill.

    Args:
        size: D.
        exactness: how products of float32 are computed, see `triton_selection.precision`.
    """
    is_fast = exactness == "tf32x3"
    chunk = 64 if is_fast and size <= 64 else 32
    return {
        "D": size,
        "CHUNK": min(chunk, max(16, power_of_two(size))),
        "BN": VECTORS,
        "BC": 64 if is_fast else 32,
        "PRECISION": exactness,
    }


def unit_margin(radius_H: Tensor) -> Tensor:
    """Return the margins of vectors of norm 1, from the largest norms of the centroids."""
    return tie_margin(radius_H, 1.0, radius_H.dtype)


def launch_tally(
    source: Tensor,
    heads: int,
    length: int,
    clusters: int,
    *,
    of_keys: bool,
    most: int,
) -> Tally:
    """Return a tally of keys or of queries.

    Args:
        source: the cluster of each key, or the `bits` of queries.
        heads: X.
        most: how many members there are at most.
    """
    tiles = whole_pieces(length, TILE)
    word_XTC = source.new_empty(heads, tiles, clusters)
    count_XCT = source.new_empty(heads, clusters, tiles)
    grid = heads, whole_pieces(tiles, 8), whole_pieces(clusters, 32)
    kernels().tally_kernel[grid](
        source, word_XTC, count_XCT, length, clusters, tiles, BT=8, KEYS=of_keys, num_warps=4
    )  # fmt: skip
    # Lists follow one another, so one running sum goes through all of them.
    last_XCT = count_XCT.flatten().cumsum(0, dtype=sum_type(most)).view(heads, clusters, tiles)
    end_L = last_XCT[..., -1].flatten()
    return Tally(word_XTC, last_XCT, F.pad(end_L, (1, 0)))


def sum_type(most: int) -> torch.dtype:
    """Return the type of running sums up to `most`."""
    return torch.int32 if most < 1 << 31 else torch.int64


def probe_files(centroid_HCD: Tensor, q_BHND: Tensor, files: Files, reach: Reach) -> Probes:
    """Return which clusters each query takes.

    Args:
        q_BHND: float32.
    """
    assert q_BHND.dtype == torch.float32, "the kernels compute in float32"
    tensors = probe_operator(
        centroid_HCD.detach().float(),
        q_BHND.detach(),
        list(files.tally),
        reach.target,
        files.early,
        reach.attend_self,
    )
    bits, word_XTC, last_XCT, bound_L1 = tensors
    return Probes(bits, Tally(word_XTC, last_XCT, bound_L1))


ProbesTuple = tuple[Tensor, Tensor, Tensor, Tensor]
"""The type of what `probe_operator` returns, for torch.library."""


def probes_by_kernels(
    centroid_HCD: Tensor,
    q_BHND: Tensor,
    key_tally: list[Tensor],
    target: int,
    early: int,
    attend_self: bool,
) -> ProbesTuple:
    """Return the tensors of `Probes`."""
    B, H, N, D = q_BHND.shape
    C = centroid_HCD.shape[1]
    word_XTC, last_XCT, bound_L1 = key_tally
    bits = word_XTC.new_empty(B * H, whole_pieces(C, 32), N)
    S = positions_at_once(B * H, N, C)
    score_XSC = q_BHND.new_empty(B * H, S, C)
    margin_XS = q_BHND.new_empty(B * H, S)
    unit_H = unit_margin(centroid_HCD.square().sum(-1).amax(-1).sqrt())
    q_BHND = q_BHND.contiguous()
    centroid_HCD = centroid_HCD.contiguous()
    constants, options = probe_options(C)
    for begin in range(0, N, S):
        kernels().score_kernel[(B * H, whole_pieces(S, VECTORS))](
            q_BHND, centroid_HCD, unit_H, score_XSC, margin_XS, begin, N, H, C, S,
            **score_constants(D, precision(q_BHND.device)), num_warps=4, num_stages=1,
        )  # fmt: skip
        # No program after the last position: it would read words after those of the last tile.
        programs = whole_pieces(min(S, N - begin), constants["QUERIES"])
        kernels().probe_kernel[(B * H, programs)](
            score_XSC, margin_XS, word_XTC, last_XCT, bound_L1, bits,
            begin, N, C, last_XCT.shape[-1], S, target, early,
            **constants, SELF=attend_self, **options,
        )  # fmt: skip
    most = most_members(B * H * N, C, target)
    tally = launch_tally(bits, B * H, N, C, of_keys=False, most=most)
    return bits, tally.word_XTC, tally.last_XCT, tally.bound_L1


probe_operator = torch.library.custom_op("rtx::probe_files", probes_by_kernels, mutates_args=())


@probe_operator.register_fake
def _(
    centroid_HCD: Tensor,
    q_BHND: Tensor,
    key_tally: list[Tensor],
    target: int,
    early: int,
    attend_self: bool,
) -> ProbesTuple:
    B, H, N, _ = q_BHND.shape
    C = centroid_HCD.shape[1]
    bits = q_BHND.new_empty(B * H, whole_pieces(C, 32), N, dtype=torch.int32)
    tally = empty_tally(bits, N, C, sum_type(most_members(B * H * N, C, target)))
    return bits, tally.word_XTC, tally.last_XCT, tally.bound_L1


def most_members(rows: int, clusters: int, target: int) -> int:
    """Return how many members as queries there are at most.

    A query takes every cluster once at most, and each that it takes holds at least one of the
    keys that it probes for.
    """
    return rows * min(clusters, target)


def probe_options(clusters: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return constants of `probe_kernel`, and options of its launch.

    A program reads the tally of a tile once for all of its queries, which speaks for many of them.
    With few clusters its time is that of steps that wait for one another, query after query, which
    speaks for few.
    """
    width = max(32, power_of_two(clusters))
    constants = {"QUERIES": TILE if width > 256 else 8, "BC": width}
    warps = max(1, width // 1024)
    return constants, {"num_warps": warps, "num_stages": 1, "maxnreg": REGISTERS}


def positions_at_once(heads: int, length: int, clusters: int) -> int:
    """Return S: how many positions of each head have scores in memory at once, whole tiles."""
    tiles = max(1, MAX_SCORES // (heads * clusters * TILE))
    return min(tiles, whole_pieces(length, TILE)) * TILE


def pack_members(files: Files, probes: Probes, reach: Reach, room: int) -> KernelLists:
    """Return which query members read which key members.

    Args:
        room: for how many members as queries clusters' lists have room; more are left out.
    """
    tensors = pack_operator(
        files.cluster_XN,
        list(files.tally),
        probes.bits,
        list(probes.tally),
        files.row_M,
        reach.target,
        files.early,
        reach.attend_self,
        room,
    )
    row_P, start_P, stop_P, low_M, high_M, first_R1, member_P, count_2 = tensors
    return KernelLists(
        query_row_P=row_P,
        key_row_M=files.row_M,
        start_P=start_P,
        stop_P=stop_P,
        low_M=low_M,
        high_M=high_M,
        query_members=RowMembers(first_R1, member_P),
        key_members=files.members,
        count_2=count_2,
    )


ListsTuple = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The type of what `pack_operator` returns, for torch.library."""


def lists_by_kernels(
    cluster_XN: Tensor,
    key_tally: list[Tensor],
    bits: Tensor,
    query_tally: list[Tensor],
    row_M: Tensor,
    target: int,
    early: int,
    attend_self: bool,
    room: int,
) -> ListsTuple:
    """Return what `pack_members` takes over into `KernelLists`."""
    X, N = cluster_XN.shape
    keys = Tally._make(key_tally)
    queries = Tally._make(query_tally)
    _, C, tiles = keys.last_XCT.shape
    row_P = row_M.new_empty(X * early + room)
    start_P = torch.empty_like(row_P)
    stop_P = torch.empty_like(row_P)
    rank_P = torch.empty_like(row_P)
    times_R = row_M.new_empty(X * N)
    sizes = N, C, tiles, target, early
    kernels().write_kernel[(X, tiles)](
        bits, queries.word_XTC, queries.last_XCT, keys.word_XTC, keys.last_XCT, keys.bound_L1,
        row_P, start_P, stop_P, rank_P, times_R, room, *sizes, SELF=attend_self, num_warps=1,
    )  # fmt: skip
    first_R1 = row_M.new_zeros(X * N + 1)
    torch.cumsum(times_R, 0, dtype=torch.int32, out=first_R1[1:])
    member_P = torch.empty_like(row_P)
    count_2 = row_P.new_empty(2)
    kernels().place_kernel[(max(1, whole_pieces(len(row_P), 512)),)](
        row_P, start_P, stop_P, rank_P, first_R1, queries.bound_L1[-1:], member_P, count_2,
        room, X * early, len(row_M), BP=512, num_warps=4,
    )  # fmt: skip
    low_M = torch.empty_like(row_M)
    high_M = torch.empty_like(row_M)
    kernels().reader_kernel[(X, whole_pieces(N, 128))](
        cluster_XN, queries.word_XTC, queries.last_XCT, queries.bound_L1,
        keys.word_XTC, keys.last_XCT, keys.bound_L1, row_M, low_M, high_M, room, *sizes,
        BN=128, SELF=attend_self, num_warps=4,
    )  # fmt: skip
    return row_P, start_P, stop_P, low_M, high_M, first_R1, member_P, count_2


pack_operator = torch.library.custom_op("rtx::pack_members", lists_by_kernels, mutates_args=())


@pack_operator.register_fake
def _(
    cluster_XN: Tensor,
    key_tally: list[Tensor],
    bits: Tensor,
    query_tally: list[Tensor],
    row_M: Tensor,
    target: int,
    early: int,
    attend_self: bool,
    room: int,
) -> ListsTuple:
    X, N = cluster_XN.shape
    row_P = row_M.new_empty(X * early + room)
    return (
        row_P,
        torch.empty_like(row_P),
        torch.empty_like(row_P),
        torch.empty_like(row_M),
        torch.empty_like(row_M),
        row_M.new_empty(X * N + 1),
        torch.empty_like(row_P),
        row_M.new_empty(2),
    )


def member_counts(tally: Tally, early: int, room: int) -> Tensor:
    """Return the number of members of each list, those of early positions first; int64.

    Args:
        early: E.
        room: of clusters' lists; members without room do not count.
    """
    heads = len(tally.word_XTC)
    count_L = tally.bound_L1.clamp(max=room).diff().long()
    return torch.cat([count_L.new_full((heads,), early), count_L])
