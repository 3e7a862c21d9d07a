"""The kernels that probe choose the clusters of the rule; queries read the keys of the rule.

They run on the GPU where there is one, else in Triton's interpreter.
"""

import math
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.helpers import cases

pytest.importorskip("triton", reason="our GPU kernels need Triton")

from rtx.attention import Probed, oracle
from rtx.attention.engine import triton_probing
from rtx.attention.engine.by_triton import LISTS
from rtx.attention.engine.lists import KernelLists, readers, row_members
from rtx.attention.inverted_file import (
    clusters_by_distance,
    make_search,
    probed_clusters,
    query_margins,
)
from rtx.attention.members import products
from rtx.attention.reads import RangeReads

OVERFLOWS = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
"""numpy warns where numbers of GPUs become infinite."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu


class Case(NamedTuple):
    """What is probed, and how."""

    B: int
    H: int
    N: int
    D: int
    C: int
    W: int
    attend_self: bool = True
    repeated: bool = False
    """Whether vectors and centroids come several times, up to rounding."""


CASES = [
    Case(1, 2, 35, 16, 5, 7),
    Case(2, 1, 34, 6, 35, 9, attend_self=False),
    Case(1, 1, 33, 20, 40, 3, repeated=True),
    Case(1, 1, 34, 80, 70, 16, attend_self=False, repeated=True),
    Case(1, 1, 20, 16, 1, 1),
    Case(1, 2, 33, 16, 3, 31),
]


class Drawn(NamedTuple):
    """The pattern, and queries and keys."""

    pattern: Probed
    q_BHND: Tensor
    k_BHND: Tensor


def drawn(case: Case, seed: int = 0) -> Drawn:
    """Return a pattern in evaluation mode, whose centroids are at keys, and what it reads."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, case.B, case.H, case.N, case.D, generator=generator)
    if case.repeated:
        unit_N = torch.randint(9, (case.N,), generator=generator)
        rounding = 1 + 1e-7 * torch.randn(k.shape, generator=generator)
        q = q[:, :, unit_N]
        k = k[:, :, unit_N] * rounding
    options = {"window": case.W, "attend_self": case.attend_self, "backend": "triton"}
    pattern = Probed(case.H, case.D, clusters=case.C, decay=0.9, **options)
    at_C = torch.randint(case.N, (case.C,), generator=generator)
    pattern.centroids.centroid_HCD.copy_(k[0][:, at_C])
    pattern.centroids.seed_with_next = False
    return Drawn(pattern.to(DEVICE).eval(), q.to(DEVICE), k.to(DEVICE))


def lists_of(data: Drawn) -> tuple[RangeReads, KernelLists]:
    """Return which query reads which keys, by the kernels."""
    (part,) = data.pattern.reads(data.pattern.inputs(data.q_BHND, data.k_BHND, None), False)
    assert isinstance(part, RangeReads) and part.derived is not None
    return part, part.derived[LISTS]


def pairs(row_P: Tensor, start_P: Tensor, stop_P: Tensor, row_M: Tensor) -> list[tuple[int, int]]:
    """Return the rows of all queries and keys of which one reads the other, sorted."""
    found = []
    for row, start, stop in torch.stack([row_P, start_P, stop_P], dim=-1).tolist():
        found += [(row, key) for key in row_M[start:stop].tolist()]
    return sorted(found)


def expected_pairs(data: Drawn) -> list[tuple[int, int]]:
    """Return the same by torch's operations."""
    pattern = data.pattern
    with mock.patch.object(pattern, "backend", "torch"):
        parts = pattern.reads(pattern.inputs(data.q_BHND, data.k_BHND, None), False)
    found = []
    for part in parts:
        assert isinstance(part, RangeReads)
        found += pairs(part.query.row_M, part.start_P, part.stop_P, part.key.row_M)
    return sorted(found)


@pytest.mark.parametrize("case", CASES)
def test_lists_say_who_reads_whom_and_are_as_kernels_read_them(case: Case) -> None:
    data = drawn(case)
    part, lists = lists_of(data)
    assert pairs(lists.query_row_P, lists.start_P, lists.stop_P, lists.key_row_M) == expected_pairs(
        data
    )
    rows = data.q_BHND.shape[:3].numel()
    M = len(lists.key_row_M)
    filled, keys = lists.count_2.tolist()
    assert keys == M == int(part.key.count_L.sum())
    assert filled == int(part.query.count_L.sum()) <= len(lists.query_row_P)
    for bound_P in (lists.start_P, lists.stop_P):
        assert bool((bound_P.diff() >= 0).all()) and bool((bound_P[filled:] == M).all())
    assert not lists.query_row_P[filled:].any()
    key_members = row_members(lists.key_row_M, rows)
    assert torch.equal(lists.key_members.first_R1, key_members.first_R1)
    assert torch.equal(lists.key_members.member_M, key_members.member_M)
    query_members = row_members(lists.query_row_P[:filled], rows)
    assert torch.equal(lists.query_members.first_R1, query_members.first_R1)
    assert torch.equal(lists.query_members.member_M[:filled], query_members.member_M)
    low_M, high_M = readers(lists.start_P, lists.stop_P, M)
    is_read_M = low_M < high_M
    assert torch.equal(lists.low_M < lists.high_M, is_read_M)
    assert torch.equal(lists.low_M[is_read_M], low_M[is_read_M])
    assert torch.equal(lists.high_M[is_read_M], high_M[is_read_M])
    assert part.key is not part.query
    assert part.most is not None and int((lists.stop_P - lists.start_P).max()) <= part.most


@pytest.mark.parametrize("case", CASES)
def test_clusters_are_those_of_the_rule(case: Case) -> None:
    data = drawn(case)
    pattern = data.pattern
    head_X = torch.arange(case.B * case.H, device=DEVICE) % case.H
    centroid_XCD = pattern.centroids.centroid_HCD[head_X]
    q_XND = data.q_BHND.flatten(0, 1)
    k_XND = data.k_BHND.flatten(0, 1)
    files = pattern.file_keys(data.k_BHND)
    assert torch.equal(files.cluster_XN.long(), clusters_by_distance(centroid_XCD, k_XND))
    probes = probes_of(data, files)
    readable_XNC = make_search(centroid_XCD, q_XND, k_XND, pattern.reach(case.N)).readable_XNC
    score_XNC = products(q_XND, centroid_XCD)
    margin_XN1 = query_margins(centroid_XCD, q_XND)
    is_taken_XNC = probed_clusters(
        score_XNC, margin_XN1, readable_XNC, pattern.reach(case.N).target
    )
    is_taken_XNC[:, : files.early] = False
    assert torch.equal(taken(probes, case.C), is_taken_XNC)


def probes_of(data: Drawn, files: triton_probing.Files) -> triton_probing.Probes:
    """Return which clusters the queries take."""
    pattern = data.pattern
    reach = pattern.reach(data.q_BHND.shape[2])
    return triton_probing.probe_files(pattern.centroids.centroid_HCD, data.q_BHND, files, reach)


def taken(probes: triton_probing.Probes, clusters: int) -> Tensor:
    """Return which clusters queries take, `[X, N, C]`, by the bits."""
    shift_32 = torch.arange(32, device=DEVICE)
    is_taken_XWN32 = (probes.bits[..., None] >> shift_32 & 1).bool()
    return is_taken_XWN32.transpose(1, 2).flatten(2)[..., :clusters]


def test_scores_in_pieces_lead_to_the_same_choice() -> None:
    data = drawn(CASES[3])
    files = data.pattern.file_keys(data.k_BHND)
    expected = probes_of(data, files)
    with mock.patch.object(triton_probing, "MAX_SCORES", 1):
        found = probes_of(data, files)
    assert torch.equal(found.bits, expected.bits)


def chosen(score_C: list[float], count_C: list[int], margin: float, target: int) -> list[int]:
    """Return the clusters that a query with these scores takes, by the kernel.

    The keys of all clusters come first, and the query behind them.
    """
    C = len(score_C)
    N = sum(count_C) + 1
    cluster_1N = torch.arange(C).repeat_interleave(torch.tensor(count_C))
    cluster_1N = torch.cat([cluster_1N, torch.zeros(1, dtype=torch.int64)])[None].int().to(DEVICE)
    tally = triton_probing.launch_tally(cluster_1N, 1, N, C, of_keys=True, most=N)
    score_NC = torch.tensor(score_C, device=DEVICE).expand(1, N, C).contiguous()
    margin_N = torch.full((1, N), margin, device=DEVICE)
    bits = cluster_1N.new_empty(1, triton_probing.whole_pieces(C, 32), N)
    tiles = tally.last_XCT.shape[-1]
    triton_probing.kernels().probe_kernel[(1, triton_probing.whole_pieces(N, 8))](
        score_NC, margin_N, tally.word_XTC, tally.last_XCT, tally.bound_L1, bits, 0, N, C, tiles, N,
        target, N - 1, QUERIES=8, BC=max(32, triton_probing.power_of_two(C)), SELF=False,
    )  # fmt: skip
    is_taken_1NC = taken(triton_probing.Probes(bits, tally), C)
    assert not is_taken_1NC[:, :-1].any()
    return is_taken_1NC[0, -1].nonzero()[:, 0].tolist()


@OVERFLOWS
@pytest.mark.parametrize(
    ("score", "count", "margin", "target", "wanted"),
    [
        ([5.0, 6.9999, 7.0], [2, 1, 4], 0.001, 3, [1, 2]),  # the example of `probed_clusters`
        ([5.0, 6.9999, 7.0], [2, 3, 4], 0.001, 3, [1]),
        ([7.0, 7.0, 7.0], [1, 0, 5], 0.0, 2, [0, 2]),
        ([1.0, 2.0, 3.0, 4.0], [9, 9, 9, 9], 1.0, 10, [0, 1]),  # a chain: all are tied
        ([1.0, 2.0, 3.5, 4.5], [9, 9, 9, 9], 1.0, 10, [2, 3]),
        ([1.0, 2.0, 3.5, 4.5], [9, 9, 9, 9], 1.0, 19, [0, 2, 3]),
        ([1.0, 2.0, 3.5, 4.5], [9, 9, 9, 9], 1.0, 36, [0, 1, 2, 3]),
        ([-3e38, 3e38, -3e38], [1, 1, 1], 0.0, 2, [0, 1]),
        ([0.0, -0.0, 1e-45, -1e-45], [1, 1, 1, 1], 0.0, 2, [0, 2]),
        ([0.5, 0.25], [40, 1], 0.0, 1, [0]),
        ([0.25, 0.5], [40, 1], 0.0, 2, [0, 1]),
    ],
)
def test_of_tied_clusters_the_first_are_taken(
    score: list[float], count: list[int], margin: float, target: int, wanted: list[int]
) -> None:
    assert chosen(score, count, margin, target) == wanted
    count_11C = torch.tensor(count)[None, None]
    by_torch = probed_clusters(
        torch.tensor(score)[None, None], torch.tensor(margin), count_11C, target
    )
    assert by_torch[0, 0].nonzero()[:, 0].tolist() == wanted


def test_choices_from_many_drawn_scores_are_those_of_the_rule() -> None:
    generator = torch.Generator().manual_seed(0)
    for step in (0.1, 1e-3):
        for target in (1, 5, 40):
            score_C = (torch.randn(50, generator=generator) / step).round() * step
            count_C = torch.randint(4, (50,), generator=generator)
            margin = torch.tensor(step / 2)
            by_torch = probed_clusters(score_C[None, None], margin, count_C[None, None], target)
            wanted = by_torch[0, 0].nonzero()[:, 0].tolist()
            assert chosen(score_C.tolist(), count_C.tolist(), float(margin), target) == wanted


@pytest.mark.parametrize("case", CASES[:2])
def test_queries_without_room_are_the_last_of_the_last_lists(case: Case) -> None:
    data = drawn(case)
    files = data.pattern.file_keys(data.k_BHND)
    probes = probes_of(data, files)
    reach = data.pattern.reach(case.N)
    total = int(probes.count_1())
    rows = case.B * case.H * case.N
    of_early = case.B * case.H * files.early
    whole = triton_probing.pack_members(files, probes, reach, total)
    for room in (0, total // 2, total - 1, total + 5):
        lists = triton_probing.pack_members(files, probes, reach, room)
        filled = of_early + min(room, total)
        assert lists.count_2.tolist() == [filled, len(files.row_M)]
        for name in ("query_row_P", "start_P", "stop_P"):
            assert torch.equal(getattr(lists, name)[:filled], getattr(whole, name)[:filled])
        by_row = row_members(lists.query_row_P[:filled], rows)
        assert torch.equal(lists.query_members.first_R1, by_row.first_R1)
        assert torch.equal(lists.query_members.member_M[:filled], by_row.member_M)
        low_M, high_M = readers(lists.start_P, lists.stop_P, len(files.row_M))
        is_read_M = low_M < high_M
        assert torch.equal(lists.low_M < lists.high_M, is_read_M)
        assert torch.equal(lists.high_M[is_read_M], high_M[is_read_M])
        count_L = triton_probing.member_counts(probes.tally, files.early, room)
        assert int(count_L.sum()) == filled


def test_equal_inputs_give_equal_bits() -> None:
    data = drawn(CASES[5])
    _, once = lists_of(data)
    _, again = lists_of(data)
    for x, y in zip(tensors_of(once), tensors_of(again), strict=True):
        assert torch.equal(x, y)


def tensors_of(lists: KernelLists) -> list[Tensor]:
    """Return all tensors of lists."""
    return [*lists[:6], *lists.query_members, *lists.key_members, lists.count_2]


@OVERFLOWS
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_vectors_of_no_finite_numbers_are_probed_as_the_rule_does(wrong: float) -> None:
    data = drawn(CASES[0]._replace(N=20))
    data.k_BHND[0, 0, 11] = wrong
    data.q_BHND[0, 1, 17] = wrong
    _, lists = lists_of(data)
    assert pairs(lists.query_row_P, lists.start_P, lists.stop_P, lists.key_row_M) == expected_pairs(
        data
    )


def test_the_clusters_that_centroids_gather_by_are_found_once() -> None:
    data = drawn(CASES[5])
    pattern = data.pattern.train()
    calls = []
    launch = triton_probing.launch_cluster

    def counted(*tensors: Tensor) -> Tensor:
        calls.append(tensors)
        return launch(*tensors)

    with mock.patch.object(triton_probing, "launch_cluster", counted):
        pattern(data.q_BHND, data.k_BHND, data.k_BHND)
    assert len(calls) == 1
    assert pattern.files is None


def test_outputs_and_gradients_are_those_of_the_oracle() -> None:
    case = cases.Case(B=2, H=2, N=20, D=16, C=4, W=5, attend_self=False, seed=4)
    pattern, wide = cases.drawn("probed", case)
    out = cases.run(partial(oracle.attend_by_rule, pattern), wide)
    expected = {"out": out, **cases.gradients(pattern, wide, out)}
    pattern, here = cases.drawn("probed", case, torch.float32, backend="triton")
    out = cases.run(pattern, here)
    found = {"out": out, **cases.gradients(pattern, here, out)}
    for name, x in expected.items():
        torch.testing.assert_close(found[name].double(), x, rtol=2e-5, atol=2e-6)
