"""Let queries probe clusters of keys with Triton kernels, in static shapes.

`rtx.attention.probed` has the method, `probing_kernels.py` the kernels and the tensors that one
writes for another. Three operators run them:

    file_keys       the lists of keys, which do not depend on queries
    probe_files     which clusters each query takes
    pack_members    the lists of queries, and which keys each query reads

The CPU launches kernels and never waits for the GPU. Members are numbered list after list: first
those of the lists of early positions, of which each head has one, then those of clusters' lists.

Shapes: B sequences, H heads, X = B * H, C clusters of a head, N positions, S of them at a time,
D head size, T tiles of 32 positions, L = X * C lists of clusters, L1 = L + 1, R = X * N rows,
R1 = R + 1, M = X * early + R key members, P = X * early + capacity slots of query members.
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
from rtx.attention.typed_torch import custom_op

TILE = 32
"""Positions of a tile, as `probing_kernels.TILE`, which only a machine with Triton can read."""
MAX_CLUSTERS = 4095
"""The most clusters of a head, see `probing_kernels.last_taken`."""
MAX_LENGTH = (1 << 20) - 1
"""The most positions of a sequence, see `probing_kernels.last_taken`."""
VECTORS = 64
"""Vectors that a program of `cluster_kernel` or `score_kernel` works on."""
POSITIONS = 128
"""Positions that a program of `key_kernel` or `reader_kernel` works on."""
TILES = 8
"""Tiles that a program of `tally_kernel` works on."""
SLOTS = 512
"""Slots that a program of `place_kernel` works on."""
WORD = 32
"""Clusters of a word of `Probes.bits`."""
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
    """How many first positions of each sequence are early: they have a list of their own."""

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
    causal: bool = True
    """Whether it probes keys up to its position alone; the kernels do not compute else."""


def file_keys(centroid_HCD: Tensor, k_BHND: Tensor, early: int) -> Files:
    """Return the lists of keys.

    Args:
        k_BHND: float32.
        early: how many first positions have a list of their own.
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
    kernels().key_kernel[(B * H, whole_pieces(N, POSITIONS))](
        cluster=cluster_XN,
        key_last=tally.last_XCT,
        key_word=tally.word_XTC,
        row_M=row_M,
        first_R1=first_R1,
        member_M=member_M,
        N=N,
        C=C,
        T=tiles,
        early=early,
        BN=POSITIONS,
        num_warps=4,
    )
    word_XTC, last_XCT, bound_L1 = tally
    return cluster_XN, word_XTC, last_XCT, bound_L1, row_M, first_R1, member_M


file_operator = custom_op("rtx::file_keys")(files_by_kernels)


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
        x=k_BHND,
        centroid=centroid_HCD,
        half_square=square_HC / 2,
        radius=radius_H,
        unit=unit_margin(radius_H),
        cluster=cluster_XN,
        N=N,
        H=H,
        C=C,
        **score_constants(D, precision(k_BHND.device)),
        num_warps=4,
        num_stages=1,
    )
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
    grid = heads, whole_pieces(tiles, TILES), whole_pieces(clusters, WORD)
    kernels().tally_kernel[grid](
        source=source,
        word=word_XTC,
        count=count_XCT,
        N=length,
        C=clusters,
        T=tiles,
        BT=TILES,
        KEYS=of_keys,
        num_warps=4,
    )
    # Lists follow one another, so one running sum goes through all of them.
    last = count_XCT.flatten().cumsum(0, dtype=sum_type(most))
    last_XCT = last.view(heads, clusters, tiles)
    end_L = last_XCT[..., -1].flatten()
    return Tally(word_XTC, last_XCT, bound_L1=F.pad(end_L, (1, 0)))


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
    B, H, N, _ = q_BHND.shape
    C = centroid_HCD.shape[1]
    keys = Tally._make(key_tally)
    bits = keys.word_XTC.new_empty(B * H, whole_pieces(C, WORD), N)
    S = positions_at_once(B * H, N, C)
    scores = Scores(
        score_XSC=q_BHND.new_empty(B * H, S, C),
        margin_XS=q_BHND.new_empty(B * H, S),
    )
    radius_H = centroid_HCD.square().sum(-1).amax(-1).sqrt()
    unit_H = unit_margin(radius_H)
    q_BHND = q_BHND.contiguous()
    centroid_HCD = centroid_HCD.contiguous()
    for begin in range(0, N, S):
        launch_score(centroid_HCD, q_BHND, unit_H, scores, begin)
        launch_probe(scores, keys, bits, begin, Reach(target, attend_self), early)
    most = most_members(B * H * N, C, target)
    tally = launch_tally(bits, B * H, N, C, of_keys=False, most=most)
    return bits, tally.word_XTC, tally.last_XCT, tally.bound_L1


class Scores(NamedTuple):
    """What `score_kernel` writes for S positions."""

    score_XSC: Tensor
    """The scores of queries with clusters."""
    margin_XS: Tensor
    """Within which scores of a query are tied."""


def launch_score(
    centroid_HCD: Tensor,
    q_BHND: Tensor,
    unit_H: Tensor,
    scores: Scores,
    begin: int,
) -> None:
    """Write the scores of the positions from `begin` on.

    Args:
        unit_H: the margins of queries of norm 1.
    """
    _, H, N, D = q_BHND.shape
    X, S, C = scores.score_XSC.shape
    kernels().score_kernel[(X, whole_pieces(S, VECTORS))](
        x=q_BHND,
        centroid=centroid_HCD,
        unit=unit_H,
        score=scores.score_XSC,
        margin=scores.margin_XS,
        begin_n=begin,
        N=N,
        H=H,
        C=C,
        S=S,
        **score_constants(D, precision(q_BHND.device)),
        num_warps=4,
        num_stages=1,
    )


def launch_probe(
    scores: Scores,
    keys: Tally,
    bits: Tensor,
    begin: int,
    reach: Reach,
    early: int,
) -> None:
    """Write the `bits` of the positions from `begin` on."""
    X, S, C = scores.score_XSC.shape
    N = bits.shape[-1]
    constants, options = probe_options(C)
    # No program after the last position: it would read words after those of the last tile.
    positions = min(S, N - begin)
    kernels().probe_kernel[(X, whole_pieces(positions, constants["QUERIES"]))](
        score=scores.score_XSC,
        margin=scores.margin_XS,
        key_word=keys.word_XTC,
        key_last=keys.last_XCT,
        key_bound=keys.bound_L1,
        bits=bits,
        begin_n=begin,
        N=N,
        C=C,
        T=keys.last_XCT.shape[-1],
        S=S,
        target=reach.target,
        early=early,
        **constants,
        SELF=reach.attend_self,
        **options,
    )


probe_operator = custom_op("rtx::probe_files")(probes_by_kernels)


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
    bits = q_BHND.new_empty(B * H, whole_pieces(C, WORD), N, dtype=torch.int32)
    most = most_members(B * H * N, C, target)
    tally = empty_tally(bits, N, C, sum_type(most))
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
    width = max(WORD, power_of_two(clusters))
    constants = {"QUERIES": TILE if width > 256 else 8, "BC": width}
    warps = max(1, width // 1024)
    return constants, {"num_warps": warps, "num_stages": 1, "maxnreg": REGISTERS}


def positions_at_once(heads: int, length: int, clusters: int) -> int:
    """Return S: how many positions of each head have scores in memory at once, whole tiles."""
    tiles = max(1, MAX_SCORES // (heads * clusters * TILE))
    return min(tiles, whole_pieces(length, TILE)) * TILE


def pack_members(files: Files, probes: Probes, reach: Reach, capacity: int) -> KernelLists:
    """Return which query members read which key members.

    Args:
        capacity: the slots for query members of clusters' lists; more members are left out.
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
        capacity,
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
    capacity: int,
) -> ListsTuple:
    """Return what `pack_members` takes over into `KernelLists`."""
    keys = Tally._make(key_tally)
    queries = Tally._make(query_tally)
    X, N = cluster_XN.shape
    _, C, tiles = keys.last_XCT.shape
    arguments = {
        **tally_arguments("query", queries),
        **tally_arguments("key", keys),
        "key_bound": keys.bound_L1,
        "capacity": capacity,
        "N": N,
        "C": C,
        "T": tiles,
        "target": target,
        "early": early,
        "SELF": attend_self,
    }
    written = launch_write(bits, X * early + capacity, arguments)
    total_1 = queries.bound_L1[-1:]
    members, count_2 = launch_place(written, total_1, X * early, len(row_M))
    low_M = torch.empty_like(row_M)
    high_M = torch.empty_like(row_M)
    kernels().reader_kernel[(X, whole_pieces(N, POSITIONS))](
        **arguments,
        cluster=cluster_XN,
        query_bound=queries.bound_L1,
        row_M=row_M,
        low_M=low_M,
        high_M=high_M,
        BN=POSITIONS,
        num_warps=4,
    )
    first_R1, member_P = members
    return (
        written.row_P,
        written.start_P,
        written.stop_P,
        low_M,
        high_M,
        first_R1,
        member_P,
        count_2,
    )


class Written(NamedTuple):
    """What `write_kernel` writes of query members."""

    row_P: Tensor
    start_P: Tensor
    stop_P: Tensor
    rank_P: Tensor
    times_R: Tensor


def launch_write(bits: Tensor, slots: int, arguments: dict[str, Any]) -> Written:
    """Return the query members; empty slots are not written.

    Args:
        slots: P.
        arguments: of `write_kernel`, by name, that `reader_kernel` has, too.
    """
    X, _, N = bits.shape
    written = Written(
        row_P=bits.new_empty(slots),
        start_P=bits.new_empty(slots),
        stop_P=bits.new_empty(slots),
        rank_P=bits.new_empty(slots),
        times_R=bits.new_empty(X * N),
    )
    kernels().write_kernel[(X, arguments["T"])](
        **arguments, **written._asdict(), bits=bits, num_warps=1
    )
    return written


def launch_place(
    written: Written, total_1: Tensor, early_members: int, key_members: int
) -> tuple[RowMembers, Tensor]:
    """Return the query members of each row, and `KernelLists.count_2`; fill empty slots.

    Args:
        total_1: the number of members of clusters' lists, those without a slot among them.
        early_members: X * early.
        key_members: M.
    """
    slots = len(written.row_P)
    first_R1 = written.times_R.new_zeros(len(written.times_R) + 1)
    torch.cumsum(written.times_R, 0, dtype=torch.int32, out=first_R1[1:])
    member_P = torch.empty_like(written.row_P)
    count_2 = member_P.new_empty(2)
    programs = max(1, whole_pieces(slots, SLOTS))
    kernels().place_kernel[(programs,)](
        row_P=written.row_P,
        start_P=written.start_P,
        stop_P=written.stop_P,
        rank_P=written.rank_P,
        first_R1=first_R1,
        total=total_1,
        member_P=member_P,
        count_2=count_2,
        capacity=slots - early_members,
        early_members=early_members,
        key_members=key_members,
        BP=SLOTS,
        num_warps=4,
    )
    return RowMembers(first_R1, member_P), count_2


def tally_arguments(name: str, tally: Tally) -> dict[str, Tensor]:
    """Return the words and running sums of a tally, by their names in the kernels."""
    return {f"{name}_word": tally.word_XTC, f"{name}_last": tally.last_XCT}


pack_operator = custom_op("rtx::pack_members")(lists_by_kernels)


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
    capacity: int,
) -> ListsTuple:
    X, N = cluster_XN.shape
    row_P = row_M.new_empty(X * early + capacity)
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


def member_counts(tally: Tally, early: int, capacity: int) -> Tensor:
    """Return the number of members of each list, those of early positions first; int64.

    Args:
        early: how many first positions are early.
        capacity: of clusters' lists; members without a slot do not count.
    """
    heads = len(tally.word_XTC)
    count_L = tally.bound_L1.clamp(max=capacity).diff().long()
    return torch.cat([count_L.new_full((heads,), early), count_L])
