"""The selection of a GPU, without a wait, gives the members, ranges and statistics of torch's own
on a CPU.

Its kernels run on the GPU where there is one, else in Triton's interpreter.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

# torch has no public name for fake tensors.
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

pytest.importorskip("triton", reason="our GPU kernels need Triton")

from rtx.attention.engine import static_selection, triton_selection
from rtx.attention.engine.lists import KernelLists, kernel_lists
from rtx.attention.engine.static_selection import Selected
from rtx.attention.members import best_members, normalise, select_by_torch
from rtx.attention.reads import MemberLists, members_read, pack
from rtx.attention.ties import best_places, centroid_margin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu
WAYS = pytest.mark.parametrize("way", [triton_selection, static_selection], ids=["triton", "torch"])


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
    Case(1, 2, 70, 16, 5, 12),
    Case(2, 1, 40, 6, 34, 20, attend_self=True),
    Case(1, 1, 33, 80, 70, 7),
    Case(1, 1, 50, 16, 1, 1),
    Case(1, 1, 5, 3, 2, 9, attend_self=True),
    Case(1, 1, 40, 64, 36, 9, repeated=True),
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


def expected(
    data: Drawn, case: Case, has_thresholds: bool
) -> tuple[MemberLists, Tensor, Tensor | None]:
    """Return the members, the nearest clusters and the moments of torch's own selection."""
    threshold_HC = data.threshold_HC if has_thresholds else None
    window = case.W if has_thresholds else 0
    found = select_by_torch(
        data.centroid_HCD, data.x_BHND, threshold_HC, window=window, nearest=True
    )
    row_M, count_L, nearest_BHN, moment_2BHC = found
    if nearest_BHN is None:
        nearest_BHN = torch.zeros(data.x_BHND.shape[:3], dtype=torch.int64, device=DEVICE)
    lists = MemberLists(row_M, count_L) if has_thresholds else pack(nearest_BHN, case.C)
    return lists, nearest_BHN, moment_2BHC


def select(way: ModuleType, data: Drawn, case: Case, has_thresholds: bool, room: int) -> Selected:
    """Return what a way of selection gives."""
    return way.by_thresholds(
        data.centroid_HCD,
        data.x_BHND,
        data.threshold_HC if has_thresholds else None,
        data.margin_HC,
        window=case.W,
        attend_self=case.attend_self,
        capacity=room,
    )


def nearest(way: ModuleType, data: Drawn) -> Tensor:
    """Return the nearest clusters that a way of selection gives."""
    return way.nearest_clusters(data.centroid_HCD, data.x_BHND, data.margin_HC).long()


def check_lists(lists: KernelLists, wanted: KernelLists) -> None:
    """Compare lists with those in which every member is real; members behind the count are read by
    none.
    """
    P = len(wanted.query_row_P)
    M = len(wanted.key_row_M)
    assert lists.count_2.tolist() == [P, M]
    for name in ("query_row_P", "start_P", "stop_P"):
        assert torch.equal(getattr(lists, name)[:P], getattr(wanted, name)), name
    assert torch.equal(lists.key_row_M[:M], wanted.key_row_M)
    has_readers = wanted.low_M < wanted.high_M
    assert torch.equal(lists.low_M[:M] < lists.high_M[:M], has_readers)
    for name in ("low_M", "high_M"):
        assert torch.equal(
            getattr(lists, name)[:M][has_readers], getattr(wanted, name)[has_readers]
        ), name
    for ours, theirs in (
        (lists.query_members, wanted.query_members),
        (lists.key_members, wanted.key_members),
    ):
        assert torch.equal(ours.first_R1, theirs.first_R1)
        assert torch.equal(ours.member_M[: len(theirs.member_M)], theirs.member_M)
    for name, count in (("start_P", P), ("stop_P", P), ("low_M", M), ("high_M", M)):
        behind = getattr(lists, name)[count:]
        assert bool(
            (behind == len(lists.key_row_M if name.endswith("P") else lists.query_row_P)).all()
        ), name
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
    check_lists(
        found.lists,
        kernel_lists(members_read(packed, packed, case.N, case.W, case.attend_self), rows),
    )
    assert torch.equal(nearest(way, data), nearest_BHN)
    of_nearest = way.nearest_members(data.centroid_HCD, data.x_BHND, data.margin_HC)
    packed_nearest = pack(nearest_BHN, case.C)
    assert torch.equal(of_nearest.count_L, packed_nearest.count_L)
    assert torch.equal(of_nearest.row_M, packed_nearest.row_M)
    if moment_2BHC is not None:
        ours_2BHC = way.score_moments(data.centroid_HCD, data.x_BHND)
        torch.testing.assert_close(ours_2BHC, moment_2BHC, rtol=1e-5, atol=1e-4)


@WAYS
@pytest.mark.parametrize("case", CASES[:2])
@pytest.mark.parametrize("share", [0, 1, 0.4])
def test_without_room_the_members_of_the_last_rows_are_left_out(
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
    # Of a row whose members do not all find room, it is those of the last clusters.
    keeps_M = torch.zeros(members, dtype=torch.bool, device=DEVICE)
    keeps_M[packed.row_M.argsort(stable=True)[:room]] = True
    count_L = packed.list_M()[keeps_M].bincount(minlength=len(packed.count_L))
    assert torch.equal(found.bound_L1.diff(), count_L)
    cut = MemberLists(packed.row_M[keeps_M], count_L)
    rows = data.x_BHND.shape[:3].numel()
    check_lists(
        found.lists, kernel_lists(members_read(cut, cut, case.N, case.W, case.attend_self), rows)
    )


@WAYS
def test_the_example_of_the_documentation(way: ModuleType) -> None:
    """Scores are 1 where a position joins: 0, 1 and 3 cluster 0, 2 and 3 cluster 1."""
    x_BHND = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], device=DEVICE)[
        None, None
    ]
    data = Drawn(
        centroid_HCD=torch.eye(2, device=DEVICE)[None],
        x_BHND=x_BHND,
        threshold_HC=torch.full((1, 2), 0.5, device=DEVICE),
        margin_HC=torch.zeros(1, 2, device=DEVICE),
    )
    case = Case(B=1, H=1, N=4, D=2, C=2, W=2, attend_self=True)
    selected = select(way, data, case, has_thresholds=True, room=6)
    lists = selected.lists
    assert selected.row_M.tolist() == [0, 1, 3, 2, 3, 0]
    assert lists.start_P.tolist() == [0, 0, 1, 3, 3, 6]
    assert lists.stop_P.tolist() == [1, 2, 3, 4, 5, 6]
    assert lists.low_M.tolist() == [0, 1, 2, 3, 4, 6]
    assert lists.high_M.tolist() == [2, 3, 3, 5, 5, 6]
    assert lists.query_members.first_R1.tolist() == [0, 1, 2, 3, 5]
    assert lists.query_members.member_M.tolist() == [0, 1, 3, 2, 4, 5]
    assert selected.count_L.tolist() == [3, 2]
    assert selected.bound_L1.tolist() == [0, 3, 5]


def test_collect_appends_numbers_and_counts_those_without_room() -> None:
    number_M1 = torch.tensor([7, 0, 0])
    takes_S = torch.tensor([False, True, True])
    done = static_selection.collect(takes_S, 10, number_M1, torch.ones(1, dtype=torch.int64))
    assert number_M1[:2].tolist() == [7, 11]
    assert done.tolist() == [3]


def test_earliest_takes_the_earlier_of_two_tied_scores() -> None:
    score_XN = torch.tensor([[5.0, 3.0, 4.9, 9.0]])
    best_XK = torch.tensor([[9.0, 5.0, 4.9]])
    edge_X2 = torch.tensor([[4.9, 5.0]])
    places = static_selection.earliest(score_XN, best_XK, edge_X2, torch.tensor([[0.2]]))
    assert places.tolist() == [[0, 3]]


@WAYS
@pytest.mark.parametrize("case", [CASES[0]])
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
        assert torch.equal(nearest(way, data), nearest_BHN)


@WAYS
@pytest.mark.parametrize("level", [math.inf, -math.inf])
def test_infinite_thresholds_take_all_positions_or_give_all_to_the_first_cluster(
    way: ModuleType, level: float
) -> None:
    case = CASES[0]
    data = drawn(case)
    data.threshold_HC.fill_(level)
    packed, _, _ = expected(data, case, True)
    found = select(way, data, case, True, len(packed.row_M))
    assert torch.equal(found.row_M.long(), packed.row_M)


@WAYS
def test_of_tied_clusters_the_first_wins_however_far_apart_they_are(way: ModuleType) -> None:
    """Chains of near ties: a later cluster is better, and tied with an earlier one, but not with
    the first.
    """
    D = 16
    C = 100
    case = Case(1, 1, 40, D, C, 5)
    x_BHND = normalise(torch.randn(1, 1, 40, D, generator=torch.Generator().manual_seed(1)))
    margin_HC = torch.full((1, C), 0.1)
    for better in (
        {3: 0.0, 40: 0.09, 99: 0.15},
        {3: 0.0, 5: 0.05, 70: 0.12},
        {1: 0.0, 2: 0.09, 3: 0.18, 98: 0.05},
    ):
        centroid_HCD = -x_BHND[0, :, :1].repeat(1, C, 1)
        for cluster, more in better.items():
            centroid_HCD[0, cluster] = x_BHND[0, 0, 0] * (1 + more / D)
        data = Drawn(*(x.to(DEVICE) for x in (centroid_HCD, x_BHND, torch.zeros(1, C), margin_HC)))
        score_CN = data.centroid_HCD[0] @ data.x_BHND[0, 0].T
        first_N = (score_CN + 0.1 >= score_CN.amax(0)).to(torch.uint8).argmax(0)
        assert torch.equal(nearest(way, data)[0, 0], first_N)
        found = select(way, data, case, False, 40)
        assert torch.equal(found.row_M.long(), first_N.argsort(stable=True))


@WAYS
def test_the_deviation_of_scores_that_hardly_differ_survives(way: ModuleType) -> None:
    case = Case(1, 1, 1000, 16, 3, 100)
    data = drawn(case)
    shift = 1e-4 * torch.randn(1000, 16, generator=torch.Generator().manual_seed(1))
    x_BHND = (1 + shift)[None, None].to(DEVICE)
    data = data._replace(x_BHND=x_BHND, centroid_HCD=data.centroid_HCD.abs())
    mean_HC, square_HC = way.score_moments(data.centroid_HCD, data.x_BHND)[:, 0] / 1000
    deviation_HC = (square_HC - mean_HC.square()).sqrt()
    score_HCN = data.centroid_HCD.double() @ x_BHND[0].double().mT
    torch.testing.assert_close(deviation_HC, score_HCN.std(-1, correction=0), rtol=0.01, atol=0)


@WAYS
@pytest.mark.parametrize("case", CASES)
def test_ranges_between_members_of_queries_and_of_keys_are_those_of_members_read(
    way: ModuleType, case: Case
) -> None:
    both = [drawn(case, seed) for seed in (0, 1)]
    packed = [expected(data, case, True)[0] for data in both]
    rows = both[0].x_BHND.shape[:3].numel()
    rooms = [len(packed[0].row_M), len(packed[1].row_M) + 7]
    found = [select(way, data, case, True, room) for data, room in zip(both, rooms, strict=True)]
    for attend_self in (True, False):
        for one, other in ((0, 1), (1, 0)):
            lists = static_selection.separate_lists(
                found[one], found[other], case.N, case.W, attend_self
            )
            wanted = members_read(packed[one], packed[other], case.N, case.W, attend_self)
            check_lists(lists, kernel_lists(wanted, rows))


SCORES = {
    "normal": lambda score_XCN: score_XCN,
    "equal": lambda score_XCN: score_XCN.round(),
    "all equal": torch.zeros_like,
    "hidden": lambda score_XCN: score_XCN.masked_fill(score_XCN < 1, -math.inf),
    "infinite": lambda score_XCN: score_XCN.masked_fill(score_XCN > 0.5, math.inf),
    "broken": lambda score_XCN: score_XCN.round().masked_fill(score_XCN > 1, math.nan),
    "mostly broken": lambda score_XCN: score_XCN.masked_fill(score_XCN > -1, math.nan),
}
"""Scores to choose from, made of normal ones."""


def scores(name: str, N: int, seed: int = 0) -> Tensor:
    """Return scores `[2, 3, N]`."""
    generator = torch.Generator().manual_seed(seed)
    return SCORES[name](torch.randn(2, 3, N, generator=generator)).to(DEVICE)


def check_best(score: Tensor, ours: Tensor, theirs: Tensor, any_equals: bool = False) -> None:
    """Compare ascending places; of equal infinities or NaN, or of all equals, torch takes any, but
    as many.
    """
    assert bool((ours.diff(dim=-1) > 0).all())
    our_score, their_score = (score.gather(-1, x.long()) for x in (ours, theirs))
    torch.testing.assert_close(
        our_score.sort(dim=-1).values, their_score.sort(dim=-1).values, equal_nan=True
    )
    for places, other in ((ours, theirs), (theirs, ours)):
        taken, taken_too = (torch.zeros_like(score, dtype=torch.bool) for _ in range(2))
        taken.scatter_(-1, places.long(), True)
        taken_too.scatter_(-1, other.long(), True)
        assert not bool((taken & ~taken_too & score.isfinite()).any()) or any_equals


@WAYS
@pytest.mark.parametrize("window", [1, 40, 99, 130])
@pytest.mark.parametrize("name", SCORES)
def test_the_best_members_are_those_of_a_choice_from_sorted_scores(
    way: ModuleType, name: str, window: int
) -> None:
    """Margins of 0, some, and so many that everything is tied."""
    score_XCN = scores(name, 100)
    for margin in (0.0, 0.3, math.inf, math.nan):
        margin_XC = torch.full((2, 3), margin, device=DEVICE)
        ours = way.top_members(score_XCN, margin_XC, window)
        assert ours.shape == (2, 3, min(window, 100))
        number_M = best_members(score_XCN, margin_XC, window)
        theirs = number_M.view(ours.shape) - torch.arange(6, device=DEVICE).view(2, 3, 1) * 100
        check_best(
            score_XCN.nan_to_num(-math.inf, math.inf, -math.inf), ours, theirs, math.isnan(margin)
        )


def sampling(sample: int) -> Any:
    """Let short rows be chosen from by samples of so many scores."""
    return mock.patch.multiple(triton_selection, MIN_SAMPLED=0, SAMPLE=sample)


@pytest.mark.parametrize(
    ("name", "window"),
    [*((name, 40) for name in SCORES), ("normal", 1), ("normal", 99), ("equal", 99)],
)
def test_a_sample_leads_to_the_same_members(name: str, window: int) -> None:
    """Rows whose candidates are too few or too many are there, too."""
    score_XCN = scores(name, 100)[:, :2]
    margin_XC = torch.tensor([[0.0, 0.1], [math.inf, math.nan]], device=DEVICE)
    wanted = static_selection.top_members(score_XCN, margin_XC, window)
    with sampling(32):
        assert torch.equal(triton_selection.top_members(score_XCN, margin_XC, window), wanted)


@pytest.mark.parametrize("room", [0, 8])
def test_candidates_of_any_number_lead_to_the_same_members(room: int) -> None:
    """The rows are random, ascending, and descending with ties.

    So the sample has scores of all sizes, the lowest or the highest.
    """
    score_N = scores("normal", 100)[0, 0]
    falling_N = score_N.round().sort(descending=True).values
    score_XCN = torch.stack([score_N, score_N.sort().values, falling_N])[None]
    margin_XC = torch.full((1, 3), 0.05, device=DEVICE)
    rank = max(1, room)
    with (
        sampling(32),
        mock.patch.object(triton_selection, "sampled", lambda length, window: (rank, 1 << room)),
    ):
        for window in (2, 20):
            wanted = static_selection.top_members(score_XCN, margin_XC, window)
            assert torch.equal(triton_selection.top_members(score_XCN, margin_XC, window), wanted)


@WAYS
@pytest.mark.parametrize("count", [1, 40, 100])
@pytest.mark.parametrize("name", SCORES)
def test_the_best_places_are_those_of_ties(way: ModuleType, name: str, count: int) -> None:
    score_XQN = scores(name, 100)
    margin_N = torch.linspace(0, 0.5, 100, device=DEVICE)

    def margin(place: Tensor) -> Tensor:
        return margin_N[place]

    ours = way.best_places(score_XQN, count, margin)
    assert ours.dtype == torch.int64
    theirs = best_places(score_XQN, count, margin).sort(dim=-1).values
    if name in (
        "normal",
        "hidden",
    ):  # of others the last one taken, whose margin counts, may be any of equals
        check_best(score_XQN, ours, theirs)
    assert ours.shape == theirs.shape


@WAYS
def test_long_rows_are_chosen_from_in_order(way: ModuleType) -> None:
    score_XCN = scores("equal", 3000)
    margin_XC = torch.full((2, 3), 0.1, device=DEVICE)
    number_M = best_members(score_XCN, margin_XC, 1500)
    theirs = number_M.view(2, 3, 1500) - torch.arange(6, device=DEVICE).view(2, 3, 1) * 3000
    assert torch.equal(way.top_members(score_XCN, margin_XC, 1500).long(), theirs)


@WAYS
@pytest.mark.parametrize("attend_self", [True, False])
@pytest.mark.parametrize("window", [1, 5, 30, 50])
def test_lists_of_as_many_members_each_follow_from_their_positions(
    way: ModuleType, window: int, attend_self: bool
) -> None:
    score_XCN = scores("normal", 30)
    position_XCW = static_selection.top_members(score_XCN, torch.zeros(2, 3, device=DEVICE), window)
    W = position_XCW.shape[-1]
    row_M = (position_XCW + torch.arange(2, device=DEVICE).view(2, 1, 1) * 30).flatten().long()
    packed = MemberLists(row_M, torch.full((6,), W, device=DEVICE))
    for positions in (position_XCW, position_XCW.view(2, 1, 3, W)):
        lists = way.top_lists(positions, 30, window, attend_self)
        check_lists(lists, kernel_lists(members_read(packed, packed, 30, window, attend_self), 60))


@WAYS
@pytest.mark.parametrize("case", [*CASES[1:3], *CASES[6:]])
def test_the_sums_of_lists_are_those_of_their_members(
    way: ModuleType, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each list is summed in 3 parts, some of which are empty for short lists.

    The time of Triton's interpreter grows with the number of parts.
    """
    monkeypatch.setattr(triton_selection, "PARTS_OF_SUM", 3)
    data = drawn(case)
    packed, _, _ = expected(data, case, True)
    x_RD = data.x_BHND.flatten(0, 2)
    members = len(packed.row_M)
    for room in (members + 9, members // 2):
        found = select(way, data, case, True, room)
        kept = MemberLists(found.row_M, found.bound_L1.diff())
        filled = int(found.bound_L1[-1])
        list_M = torch.repeat_interleave(
            torch.arange(len(kept.count_L), device=DEVICE), kept.count_L
        )
        wanted_LD = x_RD.new_zeros(len(packed.count_L), case.D, dtype=torch.float64)
        wanted_LD.index_add_(0, list_M, x_RD[kept.row_M[:filled]].double())
        ours_LD = way.list_sums(x_RD, kept.row_M, kept.count_L)
        torch.testing.assert_close(ours_LD, wanted_LD, rtol=1e-5, atol=1e-4)


def all_of(way: ModuleType, data: Drawn, case: Case) -> list[Tensor]:
    """Return what everything here makes of some vectors."""
    room = case.B * case.H * case.N * 2
    found = [select(way, data, case, has_thresholds, room) for has_thresholds in (True, False)]
    separate = static_selection.separate_lists(found[0], found[1], case.N, case.W, case.attend_self)
    score_XCN = data.centroid_HCD @ data.x_BHND.mT
    position_XCW = way.top_members(score_XCN, data.margin_HC.expand(case.B, -1, -1), case.W)
    top = way.top_lists(position_XCW, case.N, case.W, case.attend_self)
    sum_LD = way.list_sums(data.x_BHND.flatten(0, 2), found[0].row_M, found[0].bound_L1.diff())
    lists = [x for one in (found[0].lists, separate, top) for x in one[:6]]
    moment_2BHC = way.score_moments(data.centroid_HCD, data.x_BHND)
    return [
        found[0].row_M,
        found[0].count_L,
        found[0].lost,
        moment_2BHC,
        position_XCW,
        sum_LD,
        *lists,
    ]


@WAYS
def test_a_graph_takes_all_of_it_without_a_break(way: ModuleType) -> None:
    case = Case(1, 1, 40, 16, 3, 12)
    data = drawn(case)
    compiled = torch.compile(all_of, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(way, data, case), all_of(way, data, case))


class Launches:
    """Takes the place of the kernels' module: kernels that take anything and do nothing."""

    CLUSTERS = SimpleNamespace(value=32)

    def __getattr__(self, name: str) -> dict[Any, Callable[..., None]]:
        return defaultdict(lambda: lambda *arguments, **options: None)


def test_nothing_waits_for_numbers() -> None:
    """Tensors without numbers go through what is around the kernels, and through torch's way.

    Custom operators have no public name for the function that they wrap, which is `_init_fn`.
    """
    with (
        FakeTensorMode(),
        mock.patch.multiple(
            triton_selection,
            kernels=Launches,
            top_kernels=Launches,
            nearest_by_kernel=triton_selection.nearest_by_kernel._init_fn,
            entries_by_thresholds=triton_selection.entries_by_thresholds._init_fn,
            ranges_by_kernel=triton_selection.ranges_by_kernel._init_fn,
            top_ranges=triton_selection.top_ranges._init_fn,
            moments_by_kernels=triton_selection.moments_by_kernels._init_fn,
            earliest=triton_selection.earliest_by_kernel,
            list_sums=triton_selection.sums_by_kernel,
            top_by_sample=triton_selection.top_by_kernels,
        ),
    ):
        case = CASES[1]
        shapes = (
            (case.H, case.C, case.D),
            (case.B, case.H, case.N, case.D),
            (case.H, case.C),
            (case.H, case.C),
        )
        data = Drawn(*(torch.empty(shape, device=DEVICE) for shape in shapes))
        for way in (triton_selection, static_selection):
            assert len(all_of(way, data, case)) == 24
        with sampling(32):
            all_of(triton_selection, data, case)
        with pytest.raises(DataDependentOutputException):
            data.threshold_HC.sum().item()


def test_operators_have_the_shapes_and_types_that_they_announce() -> None:
    data = drawn(CASES[0])
    tests = "test_schema", "test_faketensor"
    for as_lists in (True, False):
        arguments = data.centroid_HCD, data.x_BHND, data.margin_HC, as_lists
        torch.library.opcheck(triton_selection.nearest_by_kernel, arguments, test_utils=tests)
    torch.library.opcheck(
        triton_selection.moments_by_kernels, (data.centroid_HCD, data.x_BHND), test_utils=tests
    )
    torch.library.opcheck(triton_selection.entries_by_thresholds, (*data, 300), test_utils=tests)
    entries = static_selection.Entries(*triton_selection.entries_by_thresholds(*data, 300))
    list_M, slot_M = entries.list_S.sort(stable=True)
    bound_L1 = torch.searchsorted(list_M, torch.arange(11, dtype=list_M.dtype, device=DEVICE))
    arguments = list_M, slot_M, entries.row_S, bound_L1, 12, False
    torch.library.opcheck(triton_selection.ranges_by_kernel, arguments, test_utils=tests)
    sums = data.x_BHND.flatten(0, 2), entries.row_S, bound_L1.diff()
    torch.library.opcheck(triton_selection.list_sums, sums, test_utils=tests)
    position_XCW = torch.arange(8, device=DEVICE, dtype=torch.int32).expand(2, 5, 8)
    torch.library.opcheck(
        triton_selection.top_ranges, (position_XCW, 90, 5, True), test_utils=tests
    )
    score_XN = scores("normal", 50)[0]
    value_XK = score_XN.topk(5).values
    arguments = score_XN, value_XK, value_XK[:, -2:].flip(1), torch.zeros(3, 1, device=DEVICE)
    torch.library.opcheck(triton_selection.earliest, arguments, test_utils=tests)
    with sampling(16):
        arguments = score_XN, torch.zeros(3, device=DEVICE), 5
        torch.library.opcheck(triton_selection.top_by_sample, arguments, test_utils=tests)
