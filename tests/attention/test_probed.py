"""Probed keys: the worked example of their module, the kernel, centroids, and what is refused."""

import copy
import math

import pytest
import torch

from rtx.attention import Exact, Probed, after_step
from rtx.attention.centroids import SPREAD, statistics_paused
from rtx.attention.engine import native
from rtx.attention.reads import IndexReads
from rtx.training.hardware import has_compiler
from tests.helpers.cases import Case, drawn, run, stream

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")


def example(**options: int) -> tuple[Probed, torch.Tensor, torch.Tensor]:
    """Return the pattern, queries and keys of the module's example.

    The centroids of a, b and c are the units 0, 1 and 2; unit 3 and small numbers tell keys of one
    cluster apart.
    """
    pattern = Probed(1, 4, clusters=3, decay=0.9, **options).double().eval()
    pattern.centroids.centroid_HCD.copy_(torch.eye(4)[:3])
    k_1NC = torch.eye(4, dtype=torch.float64)[[0, 1, 0, 2, 0, 1]]
    k_1NC[:, 3] = torch.tensor([0.3, 0.0, 0.1, 0.0, 0.15, 0.0])
    # By the first three numbers c comes before a, and a before b.
    q_D = torch.tensor([2.0, 1.0, 3.0, 5.0], dtype=torch.float64)
    return pattern, q_D.expand(6, 4)[None, None].contiguous(), k_1NC[None, None]


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({"window": 3}, [0, 2, 3, 4]),
        ({"window": 2, "candidates": 3}, [0, 3]),
        ({"window": 4}, [0, 2, 3, 4]),
    ],
)
def test_the_worked_example(options: dict[str, int], read: list[int]) -> None:
    pattern, q, k = example(**options)
    mask_1NN = pattern.rule(pattern.inputs(q, k, None), 0, False)
    assert mask_1NN[0, 5].nonzero()[:, 0].tolist() == read
    v = torch.eye(6, dtype=torch.float64)[None, None]
    assert pattern(q, k, v)[0][0, 0, 5].nonzero()[:, 0].tolist() == read


def test_of_a_large_cluster_the_last_keys_are_read() -> None:
    pattern, q, _ = example(window=2)
    k = torch.eye(4, dtype=torch.float64)[[0, 0, 0, 0, 1, 2]][None, None]
    q = q.clone()
    q[..., 0] = 9.0
    mask_1NN = pattern.rule(pattern.inputs(q, k, None), 0, False)
    assert mask_1NN[0, 5].nonzero()[:, 0].tolist() == [2, 3]


def test_centroids_start_at_keys_and_move_to_the_means_of_theirs() -> None:
    pattern, here = drawn("probed", Case(B=2, N=20, C=3, W=4, D=4), torch.float32)
    assert isinstance(pattern, Probed)
    store = pattern.centroids
    k = here["k"].detach()
    assert store.seed_with_next
    run(pattern.train(), here)
    start = store.centroid_HCD.clone()
    assert not store.seed_with_next
    for head, centroid_CD in enumerate(start):
        assert all((k[0, head] == centroid_D).all(-1).any() for centroid_D in centroid_CD)
    after_step(pattern)
    for head, centroid_CD in enumerate(start):
        cluster_BN = (k[:, head] @ centroid_CD.T - centroid_CD.square().sum(-1) / 2).argmax(-1)
        for c, centroid_D in enumerate(centroid_CD):
            mean_D = k[:, head][cluster_BN == c].mean(0)
            torch.testing.assert_close(store.centroid_HCD[head, c], 0.9 * centroid_D + 0.1 * mean_D)
    before = store.centroid_HCD.clone()
    with statistics_paused():
        run(pattern, here)
    run(pattern.eval(), here)
    after_step(pattern)
    assert torch.equal(store.centroid_HCD, before)  # nothing was gathered
    given = pattern.train().inputs(here["q"], here["k"], None)
    pattern.reads(given, False)
    assert not any(
        bool(x.any()) for x in store.statistics
    )  # which query reads which keys is no statistic


def test_clusters_without_keys_share_those_of_the_largest_and_nan_moves_nothing() -> None:
    pattern, here = drawn("probed", Case(B=1, H=1, N=20, C=5, W=4, D=4), torch.float32)
    assert isinstance(pattern, Probed)
    store = pattern.centroids
    store.seed_with_next = False
    k = torch.zeros(1, 1, 20, 4)
    k[:, :, :12, 0] = 1.0
    k[:, :, 12:, 0] = -1.0
    here["k"] = k
    store.centroid_HCD.copy_(torch.tensor([[1.0, 9, 9, -1, 9]])[..., None] * torch.eye(4)[0])
    run(pattern.train(), here)
    after_step(pattern)
    moved = store.centroid_HCD[0, :, 0].tolist()
    near = 1 + SPREAD
    assert moved == pytest.approx([1.0, near, -near, -1.0, 1 + 2 * SPREAD])
    before = store.centroid_HCD.clone()
    here["k"] = k.masked_fill(torch.arange(20)[:, None] == 7, math.nan)
    run(pattern, here)
    after_step(pattern)
    assert torch.equal(store.centroid_HCD, before)


def test_centroids_of_a_checkpoint_do_not_start_anew() -> None:
    pattern, here = drawn("probed", Case(), torch.float32)
    other = copy.deepcopy(pattern)
    assert isinstance(pattern, Probed) and isinstance(other, Probed)
    other.load_state_dict(pattern.state_dict())
    assert other.centroids.seed_with_next  # it has no keys yet
    run(pattern.train(), here)
    for _ in range(2):  # before the first step, and after it
        other.centroids.seed_with_next = True
        other.load_state_dict(pattern.state_dict())
        assert not other.centroids.seed_with_next
        assert torch.equal(other.centroids.centroid_HCD, pattern.centroids.centroid_HCD)
        after_step(pattern)
    other.load_state_dict(pattern.state_dict())
    assert set(pattern.state_dict()) == {"centroids.centroid_HCD", "centroids.steps"}
    assert torch.equal(other.centroids.centroid_HCD, pattern.centroids.centroid_HCD)
    assert pattern.bfloat16().centroids.centroid_HCD.dtype == torch.float32


def members(pattern: Probed, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return how often each query reads each key, `[R, N]`."""
    N = q.shape[2]
    times_RN = torch.zeros(q.shape[:3].numel(), N, dtype=torch.int64)
    for part in pattern.reads(pattern.inputs(q, k, None), False):
        if isinstance(part, IndexReads):
            row_S, column_S = (part.index_RK >= 0).nonzero(as_tuple=True)
            position_S = part.index_RK[row_S, column_S] % N
            times_RN.index_put_((row_S, position_S), torch.tensor(1), accumulate=True)
            continue
        ranges_P3 = torch.stack([part.query.row_M, part.start_P, part.stop_P], dim=-1)
        for row, start, stop in ranges_P3.tolist():
            times_RN[row, part.key.row_M[start:stop].long() % N] += 1
    return times_RN


@needs_compiler
@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("attend_self", [True, False])
@pytest.mark.parametrize("candidates", [None, 40])
@pytest.mark.parametrize("C, D", [(1, 6), (5, 64), (40, 33)])
def test_the_kernel_probes_what_torch_probes(
    C: int, D: int, candidates: int | None, attend_self: bool, returns: bool
) -> None:
    generator = torch.Generator().manual_seed(C)
    N = 300
    q, k = torch.randn(2, 2, 3, N, D, generator=generator)
    if returns:  # few different vectors, up to rounding
        unit_N = torch.randint(12, (N,), generator=generator)
        rounding = 1 + 1e-7 * torch.randn(2, 3, N, D, generator=generator)
        q = q[:, :, unit_N]
        k = k[:, :, unit_N] * rounding
    pattern = Probed(
        3,
        D,
        clusters=C,
        decay=0.9,
        window=9,
        candidates=candidates,
        attend_self=attend_self,
    ).eval()
    pattern.centroids.seed_from([k])
    pattern.centroids.centroid_HCD[:, -1] = pattern.centroids.centroid_HCD[:, 0]
    pattern.backend = "torch"
    expected_RN = members(pattern, q, k)
    assert int(expected_RN.max()) == 1 and bool((expected_RN.sum(-1) > 0).all())
    pattern.backend = "native"
    assert torch.equal(members(pattern, q, k), expected_RN)


@needs_compiler
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_more_candidates_than_positions_take_no_more_memory(backend: str) -> None:
    pattern, here = drawn("exact", Case(N=20, W=5), torch.float32, backend=backend)
    expected = run(pattern, here)
    assert isinstance(pattern, Exact)
    pattern = Probed(
        2,
        4,
        clusters=3,
        decay=0.9,
        window=5,
        candidates=10**12,
        qk_norm=pattern.qk_norm,
        backend=backend,
    ).eval()
    torch.testing.assert_close(run(pattern, here), expected)
    torch.testing.assert_close(stream(pattern, here, 7), expected)


@needs_compiler
def test_the_kernel_gathers_what_torch_gathers() -> None:
    x = torch.randn(2, 3, 200, 8)
    centroid_HCD = torch.randn(3, 7, 8)
    pattern = Probed(3, 8, clusters=7, decay=0.9, window=9, backend="torch")
    pattern.centroids.centroid_HCD.copy_(centroid_HCD)
    by_kernel = native.cluster_keys(centroid_HCD, x)
    by_torch = pattern.clustered_keys(x)
    assert torch.equal(by_kernel.row_M, by_torch.row_M)
    assert torch.equal(by_kernel.count_L, by_torch.count_L)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": 3}, "window=4: must be from 1 to candidates=3"),
        ({"candidates": 0}, "candidates=0: must be at least 1"),
        ({"clusters": 0}, "clusters=0: must be at least 1"),
        ({"decay": 1.5}, "decay=1.5: must be from 0 to 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    arguments = {"clusters": 2, "decay": 0.9, "window": 4} | options
    with pytest.raises(ValueError, match=message):
        Probed(1, 4, **arguments)  # type: ignore[arg-type]
