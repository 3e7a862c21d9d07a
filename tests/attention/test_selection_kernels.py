"""The selection of a GPU, without a wait, gives the members, ranges and statistics of torch's own on a CPU.

Its kernels run on the GPU where there is one, else in Triton's interpreter.
"""

import math
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rtx.attention.engine import selection, static_selection
from rtx.attention.engine.lists import KernelLists, kernel_lists
from rtx.attention.engine.static_selection import Selected
from rtx.attention.packed import Packed, members_read, pack
from rtx.attention.selection import by_scores, normalise
from rtx.attention.ties import centroid_margin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = pytest.mark.parametrize("way", [selection, static_selection], ids=["triton", "torch"])


class Case(NamedTuple):
    """What is selected from, and how."""

    B: int
    H: int
    N: int
    D: int
    C: int
    W: int
    attend_self: bool = False
    repeated: bool = False
    """Whether vectors and centroids come several times."""


CASES = [
    Case(1, 2, 100, 16, 5, 12),
    Case(2, 1, 130, 6, 40, 20, attend_self=True),
    Case(1, 2, 64, 80, 70, 7),
    Case(1, 1, 50, 16, 1, 1),
    Case(1, 1, 5, 3, 2, 9, attend_self=True),
    Case(2, 1, 70, 64, 36, 9, repeated=True),
    Case(1, 2, 0, 16, 3, 4),
    Case(1, 0, 9, 16, 3, 4),
    Case(0, 2, 9, 16, 3, 4),
]


class Drawn(NamedTuple):
    """Centroids, vectors, thresholds and margins."""

    centroid_HCD: Tensor
    x_BHND: Tensor
    threshold_HC: Tensor
    margin_HC: Tensor


def drawn(case: Case, seed: int = 0) -> Drawn:
    """Return what is selected from; thresholds that about W positions reach."""
    generator = torch.Generator().manual_seed(seed)
    x_BHND = normalise(torch.randn(case.B, case.H, case.N, case.D, generator=generator))
    centroid_HCD = torch.randn(case.H, case.C, case.D, generator=generator)
    if case.repeated:
        x_BHND = x_BHND[:, :, torch.randint(7, (case.N,), generator=generator)]
        centroid_HCD = centroid_HCD[:, torch.randint(5, (case.C,), generator=generator)]
    level = math.sqrt(2 * case.D) * (1 - case.W / max(case.W, case.N))
    threshold_HC = level + torch.randn(case.H, case.C, generator=generator)
    if case.repeated and case.B * case.H:  # a score reaches its own threshold
        threshold_HC = (centroid_HCD * x_BHND[0, :, :1]).sum(-1)
    parts = centroid_HCD, x_BHND, threshold_HC, centroid_margin(centroid_HCD, torch.float32)
    return Drawn(*(x.to(DEVICE) for x in parts))


def expected(data: Drawn, case: Case, has_thresholds: bool) -> tuple[Packed, Tensor, Tensor | None]:
    """Return the members, the nearest clusters and the moments of torch's own selection."""
    threshold_HC = data.threshold_HC if has_thresholds else None
    window = case.W if has_thresholds else 0
    found = by_scores(data.centroid_HCD, data.x_BHND, threshold_HC, window=window, nearest=True)
    row_M, count_L, nearest_BHN, moment_2BHC = found
    if nearest_BHN is None:
        nearest_BHN = torch.zeros(data.x_BHND.shape[:3], dtype=torch.int64, device=DEVICE)
    lists = Packed(row_M, count_L) if has_thresholds else pack(nearest_BHN, case.C)
    return lists, nearest_BHN, moment_2BHC


def select(way: ModuleType, data: Drawn, case: Case, has_thresholds: bool, room: int, nearest: bool = True) -> Selected:
    """Return what a way of selection gives."""
    return way.by_thresholds(
        data.centroid_HCD,
        data.x_BHND,
        data.threshold_HC if has_thresholds else None,
        data.margin_HC,
        window=case.W,
        attend_self=case.attend_self,
        room=room,
        nearest=nearest,
    )


def check_lists(lists: KernelLists, wanted: KernelLists) -> None:
    """Compare lists with those in which every member is real; members behind the count are read by none."""
    P = len(wanted.query_row_P)
    M = len(wanted.key_row_M)
    assert lists.count_2.tolist() == [P, M]
    for name in ("query_row_P", "start_P", "stop_P"):
        assert torch.equal(getattr(lists, name)[:P], getattr(wanted, name)), name
    assert torch.equal(lists.key_row_M[:M], wanted.key_row_M)
    has_readers = wanted.low_M < wanted.high_M
    assert torch.equal(lists.low_M[:M] < lists.high_M[:M], has_readers)
    for name in ("low_M", "high_M"):
        assert torch.equal(getattr(lists, name)[:M][has_readers], getattr(wanted, name)[has_readers]), name
    for ours, theirs in ((lists.query_members, wanted.query_members), (lists.key_members, wanted.key_members)):
        assert torch.equal(ours.first_R1, theirs.first_R1)
        assert torch.equal(ours.member_M[: len(theirs.member_M)], theirs.member_M)
    for name, count in (("start_P", P), ("stop_P", P), ("low_M", M), ("high_M", M)):
        behind = getattr(lists, name)[count:]
        assert bool((behind == len(lists.key_row_M if name.endswith("P") else lists.query_row_P)).all()), name
    assert not bool(lists.query_row_P[P:].any())
    assert not bool(lists.key_row_M[M:].any())


@WAYS
@pytest.mark.parametrize("has_thresholds", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_members_ranges_and_statistics_are_those_of_the_scores(
    way: ModuleType, case: Case, has_thresholds: bool
) -> None:
    data = drawn(case)
    packed, nearest_BHN, moment_2BHC = expected(data, case, has_thresholds)
    room = len(packed.row_M) + 5 if has_thresholds else case.B * case.H * case.N
    found = select(way, data, case, has_thresholds, room)
    assert torch.equal(found.count_L, packed.count_L)
    assert found.lost.tolist() == [0]
    rows = data.x_BHND.shape[:3].numel()
    check_lists(found.lists, kernel_lists(members_read(packed, packed, case.N, case.W, case.attend_self), rows))
    assert found.nearest_BHN is not None
    assert torch.equal(found.nearest_BHN.long(), nearest_BHN)
    assert (found.moment_2BHC is None) == (not has_thresholds)
    if found.moment_2BHC is not None and moment_2BHC is not None:
        torch.testing.assert_close(found.moment_2BHC, moment_2BHC, rtol=1e-5, atol=1e-4)
    assert select(way, data, case, has_thresholds, room, nearest=False).nearest_BHN is None


@WAYS
@pytest.mark.parametrize("case", CASES[:3])
@pytest.mark.parametrize("share", [0, 1, 0.3, 0.8])
def test_without_room_the_last_members_of_the_last_lists_are_left_out(
    way: ModuleType, case: Case, share: float
) -> None:
    """A share of 1 stands for one member too many."""
    data = drawn(case)
    packed, _, _ = expected(data, case, True)
    members = len(packed.row_M)
    room = members - 1 if share == 1 else int(share * members)
    found = select(way, data, case, True, room)
    assert torch.equal(found.count_L, packed.count_L)
    assert found.lost.tolist() == [members - room]
    behind_L = packed.count_L.cumsum(0).clamp(max=room)
    cut = Packed(packed.row_M[:room], behind_L.diff(prepend=behind_L.new_zeros(1)))
    rows = data.x_BHND.shape[:3].numel()
    check_lists(found.lists, kernel_lists(members_read(cut, cut, case.N, case.W, case.attend_self), rows))


@WAYS
@pytest.mark.parametrize("case", [CASES[0], CASES[5]])
def test_nan_goes_to_the_first_cluster(way: ModuleType, case: Case) -> None:
    """Of a position all scores may be NaN, of a cluster those of all positions, and a threshold."""
    for spoiled in range(3):
        data = drawn(case)
        tensor = (data.x_BHND, data.centroid_HCD, data.threshold_HC)[spoiled]
        tensor[..., 2 if spoiled == 2 else 1, ...] = math.nan
        data = data._replace(margin_HC=centroid_margin(data.centroid_HCD, torch.float32))
        for has_thresholds in (True, False):
            packed, nearest_BHN, _ = expected(data, case, has_thresholds)
            found = select(way, data, case, has_thresholds, len(packed.row_M) + 3)
            assert torch.equal(found.count_L, packed.count_L)
            assert torch.equal(found.row_M[: len(packed.row_M)].long(), packed.row_M)
            assert found.nearest_BHN is not None
            assert torch.equal(found.nearest_BHN.long(), nearest_BHN)


@WAYS
@pytest.mark.parametrize("level", [math.inf, -math.inf])
def test_infinite_thresholds_take_all_positions_or_give_all_to_the_first_cluster(way: ModuleType, level: float) -> None:
    case = CASES[0]
    data = drawn(case)
    data.threshold_HC.fill_(level)
    packed, _, _ = expected(data, case, True)
    found = select(way, data, case, True, len(packed.row_M))
    assert torch.equal(found.row_M.long(), packed.row_M)


@WAYS
def test_of_tied_clusters_the_first_wins_however_far_apart_they_are(way: ModuleType) -> None:
    """Chains of near ties: a later cluster is better, and tied with an earlier one, but not with the first."""
    D, C = 16, 100
    case = Case(1, 1, 40, D, C, 5)
    x_BHND = normalise(torch.randn(1, 1, 40, D, generator=torch.Generator().manual_seed(1)))
    margin_HC = torch.full((1, C), 0.1)
    for better in ({3: 0.0, 40: 0.09, 99: 0.15}, {3: 0.0, 5: 0.05, 70: 0.12}, {1: 0.0, 2: 0.09, 3: 0.18, 98: 0.05}):
        centroid_HCD = -x_BHND[0, :, :1].repeat(1, C, 1)
        for cluster, more in better.items():
            centroid_HCD[0, cluster] = x_BHND[0, 0, 0] * (1 + more / D)
        data = Drawn(*(x.to(DEVICE) for x in (centroid_HCD, x_BHND, torch.zeros(1, C), margin_HC)))
        score_CN = data.centroid_HCD[0] @ data.x_BHND[0, 0].T
        first_N = (score_CN + 0.1 >= score_CN.amax(0)).to(torch.uint8).argmax(0)
        found = select(way, data, case, True, 10_000)
        assert found.nearest_BHN is not None
        assert torch.equal(found.nearest_BHN[0, 0].long(), first_N)
        found = select(way, data, case, False, 40)
        assert found.nearest_BHN is not None
        assert torch.equal(found.nearest_BHN[0, 0].long(), first_N)


@WAYS
def test_the_deviation_of_scores_that_hardly_differ_survives(way: ModuleType) -> None:
    case = Case(1, 1, 1000, 16, 3, 100)
    data = drawn(case)
    shift = 1e-4 * torch.randn(1000, 16, generator=torch.Generator().manual_seed(1))
    x_BHND = (1 + shift)[None, None].to(DEVICE)
    data = data._replace(x_BHND=x_BHND, centroid_HCD=data.centroid_HCD.abs())
    found = select(way, data, case, True, 3000)
    assert found.moment_2BHC is not None
    mean_HC, square_HC = found.moment_2BHC[:, 0] / 1000
    deviation_HC = (square_HC - mean_HC.square()).sqrt()
    score_HCN = data.centroid_HCD.double() @ x_BHND[0].double().mT
    torch.testing.assert_close(deviation_HC, score_HCN.std(-1, correction=0), rtol=0.01, atol=0)


@WAYS
@pytest.mark.parametrize("attend_self", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_ranges_between_members_of_queries_and_of_keys_are_those_of_members_read(
    way: ModuleType, case: Case, attend_self: bool
) -> None:
    both = [drawn(case, seed) for seed in (0, 1)]
    packed = [expected(data, case, True)[0] for data in both]
    wanted = members_read(*packed, case.N, case.W, attend_self)
    rows = both[0].x_BHND.shape[:3].numel()
    for more in (0, 7):
        found = [select(way, data, case, True, len(x.row_M) + more) for data, x in zip(both, packed, strict=True)]
        lists = static_selection.separate_lists(*found, case.N, case.W, attend_self)
        check_lists(lists, kernel_lists(wanted, rows))
