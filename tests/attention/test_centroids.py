"""How centroids change: statistics, three updates, thresholds, revival. (All ranks alike:
test_many_processes.py.)

Shapes: B sequences, H heads, C clusters, N positions, D head size.
"""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

# torch has no public names for the counts of its compiler and for modes that see each operation.
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode

from rtx.attention import ROUTING_CLASSES, Routing, Thresholds, centroids
from rtx.attention.centroids import Centroids, after_step, moved, statistics_paused, to_sphere
from rtx.attention.indexer import Indexer
from rtx.attention.members import normalise, products
from rtx.training.hardware import has_compiler

H = 2
C = 3
N = 24
D = 4
W = 8


def make(selection: str = "causal", **changes: object) -> Routing:
    torch.manual_seed(0)
    options = {"window": W, "length": N, "decay": 0.9} | changes
    return ROUTING_CLASSES[selection](Centroids(H, C, D, **options))  # type: ignore[arg-type]


def queries(seed: int, batch: int = 2, length: int = N) -> Tensor:
    return torch.randn(batch, H, length, D, generator=torch.Generator().manual_seed(seed))


def see(pattern: Routing, q: Tensor, real_BN: Tensor | None = None) -> Routing:
    pattern(q, q if pattern.has_keys else None, q, real_BN=real_BN)
    return pattern


def step(pattern: Routing, q: Tensor) -> Centroids:
    after_step(see(pattern, q))
    return pattern.centroids


@pytest.mark.parametrize("update", ["members", "nearest", "sum"])
def test_a_centroid_moves_towards_its_members_or_those_nearest_to_it_or_their_sum(
    update: str,
) -> None:
    """The sum: Algorithm 1, the mean over sequences, not put back on the sphere."""
    pattern = make("topk", update=update)
    q = queries(1)
    x = normalise(q)
    old = pattern.centroids.centroid_HCD.clone()
    expected = old.double().clone()
    score_BHCN = products(old, x)
    for h in range(H):
        for c in range(C):
            member_BN = score_BHCN[:, h].argmax(1) == c
            if update == "members":
                member_BN = torch.zeros(2, N, dtype=torch.bool)
                member_BN.scatter_(1, score_BHCN[:, h, c].topk(W).indices, True)
            x_MD = x[:, h][member_BN].double()
            if update == "sum":
                expected[h, c] = 0.9 * expected[h, c] + 0.1 * x_MD.sum(0) / 2
            elif len(x_MD):
                new_D = 0.9 * expected[h, c] + 0.1 * x_MD.mean(0)
                expected[h, c] = math.sqrt(D) * new_D / new_D.norm()
    assert torch.allclose(step(pattern, q).centroid_HCD.double(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("decay", "dead", "tilt", "steps"), [(0.99, 0, 1.0, 100), (0.9, C - 1, 4.0, 40)]
)
def test_counts_come_to_the_window_and_no_cluster_stays_dead(
    decay: float, dead: int, tilt: float, steps: int
) -> None:
    """Within 100 steps, nobody left out; centroids that start far from all data find members, and
    follow them.
    """
    pattern = make(threshold_rate=0.1, decay=decay)
    tilt_D = tilt * torch.tensor([1.0, 0.3, -0.2, -1.1])
    pattern.centroids.centroid_HCD[:, C - dead :] = to_sphere(-normalise(tilt_D).expand(H, dead, D))
    counts = []
    for number in range(steps + 40):
        see(pattern, tilt_D + queries(number, batch=4))
        assert pattern.last_members is not None
        assert (
            int(pattern.last_members[0][0].row_M.bincount(minlength=pattern.last_members[1]).min())
            >= 1
        )
        counts.append(pattern.centroids.statistics.role_sums_2_3_HC[0, 0] / 4)
        after_step(pattern)
    late_SHC = torch.stack(counts[steps:])
    assert (counts[0] == 0).any() == (dead > 0) and late_SHC.min() > 0
    if not dead:
        assert abs(float(late_SHC.mean()) / W - 1) < 0.1
        assert (late_SHC.mean(0) / W - 1).abs().max() < 0.35


@pytest.mark.parametrize("tilt", [0.0, 2.0])
def test_no_cluster_of_the_nearest_stays_without_members(tilt: float) -> None:
    pattern = make(selection="nearest", decay=0.9)
    counts = []
    for number in range(70):
        see(pattern, tilt * torch.tensor([1.0, 0.3, -0.2, -1.1]) + queries(number, batch=4))
        counts.append(pattern.centroids.statistics.count_HC.clone())
        after_step(pattern)
    assert (counts[0] == 0).any() == (tilt > 0) and torch.stack(counts[50:]).sum(0).min() > 0


def test_only_real_positions_of_training_are_gathered_and_a_pause_gathers_nothing() -> None:
    short = make(threshold_rate=0.1)
    padded = make(threshold_rate=0.1)
    q = queries(1)
    after_step(see(short, q[:, :, :15]))
    after_step(see(padded, q, torch.arange(N).expand(2, N) < 15))
    torch.testing.assert_close(padded.state_dict(), short.state_dict())
    before = {name: x.clone() for name, x in short.state_dict().items()}
    with statistics_paused():
        see(short, queries(1))
    short.start().prefill(short.inputs(queries(1), None, None), queries(1))
    see(short.eval(), queries(2))
    after_step(short)
    assert all(torch.equal(x, before[name]) for name, x in short.state_dict().items())


def test_a_head_with_nan_keeps_what_it_has() -> None:
    pattern = make(threshold_rate=0.1)
    q = queries(1)
    q[0, 0, 3] = float("nan")
    before = pattern.centroids.centroid_HCD.clone()
    after = step(pattern, q)
    assert torch.equal(after.centroid_HCD[0], before[0]) and not torch.equal(
        after.centroid_HCD[1], before[1]
    )
    assert after.threshold_HC.isfinite().all()


def test_neither_autocast_nor_a_model_in_float64_changes_the_precision_of_statistics() -> None:
    sums = []
    for enabled in (False, True):
        pattern = make()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            see(pattern, queries(1))
        sums.append(pattern.centroids.statistics.sum_HCD)
    assert torch.equal(*sums)
    store = pattern.double().centroids
    assert store.centroid_HCD.dtype == store.threshold_HC.dtype == torch.float32


@pytest.mark.parametrize("deviation", [0.02, 0.006])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_thresholds_know_the_deviation_of_scores_that_hardly_differ(
    backend: str, deviation: float
) -> None:
    """Scores of mean 63 in float32, of a head whose vectors have collapsed; the first step tells
    mean and deviation.
    """
    if backend == "native" and not has_compiler():
        pytest.skip("no C++ compiler on this machine")
    units = 64
    positions = 1024
    draw = torch.Generator().manual_seed(3)
    basis_3D = torch.randn(3, units, generator=draw).double()
    basis_3D = torch.linalg.qr(
        (basis_3D - basis_3D.mean(-1, keepdim=True)).T
    ).Q.T  # LayerNorm changes them no more
    cosine_N1 = (63 + deviation * torch.randn(positions, 1, generator=draw).double()) / units
    aside_N1 = (1 - cosine_N1.square()).sqrt()
    q_BHND = (8 * (cosine_N1 * basis_3D[0] + aside_N1 * basis_3D[1]))[None, None].float()
    store = Centroids(1, 2, units, window=64, length=positions, decay=1.0, threshold_rate=0.1)
    store.centroid_HCD[0] = 8 * basis_3D[::2]
    after_step(see(Thresholds(store, backend=backend), q_BHND))
    score_N = normalise(q_BHND).double()[0, 0] @ store.centroid_HCD[0, 0].double()
    found = (float(store.threshold_HC[0, 0]) - float(score_N.mean())) / store.quantile()
    assert abs(float(score_N.mean()) - 63) < 0.01
    assert found == pytest.approx(float(score_N.std(correction=0)), rel=0.01)


@pytest.mark.parametrize("update", ["members", "nearest", "sum"])
@pytest.mark.parametrize(
    ("selection", "keys"), [("causal", "shared"), ("causal", "separate"), ("topk", "projected")]
)
def test_layers_move_together_as_each_would_alone(update: str, selection: str, keys: str) -> None:
    """Bit for bit; a layer that has gathered nothing stays, and so does its count of steps."""
    changes = {"update": update, "keys": keys, "threshold_rate": 0.1 * (selection == "causal")}
    layers = [make(selection, **changes) for _ in range(4)]
    for number, layer in enumerate(layers):
        layer.centroids.centroid_HCD.copy_(to_sphere(torch.randn(H, C, D)))
        layer.register_buffer("number", torch.tensor(number))
    for turn in range(3):
        for number, layer in enumerate(layers[: 4 - (turn == 1)]):
            see(layer, queries(10 * turn + number))
        alone = copy.deepcopy(layers)
        for layer in alone:
            after_step(layer)
        after_step(nn.ModuleList(layers))
        assert [int(layer.centroids.steps) for layer in layers] == [turn + 1] * 3 + [
            turn + (turn == 0)
        ]
        for layer, single in zip(layers, alone, strict=True):
            for name, x in layer.state_dict().items():
                assert torch.equal(x, single.state_dict()[name]), name
            assert not any(total.any() for total in layer.centroids.statistics)


class Calls(TorchDispatchMode):
    """Records the names of the kernels that are called, but for those that only look at a tensor
    another way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated"
)  # a use of torch's own
@pytest.mark.parametrize(("selection", "keys"), [("causal", "separate"), ("topk", "shared")])
def test_all_layers_move_in_twenty_launches_and_no_number_is_read(
    selection: str, keys: str
) -> None:
    if not has_compiler():
        pytest.skip("no C++ compiler on this machine")
    rate = 0.1 * (selection == "causal")
    layers = nn.ModuleList(make(selection, keys=keys, threshold_rate=rate) for _ in range(6))
    for number, layer in enumerate(layers):
        see(layer, queries(number))  # type: ignore[arg-type]
    alike = copy.deepcopy(layers)
    third = copy.deepcopy(layers)
    with Calls() as eager:
        after_step(layers)
    assert "aten._local_scalar_dense.default" not in eager.names
    with Calls() as around:
        after_step(third, lambda rule, state, total_YZ: state)
    metrics.reset()
    after_step(alike, torch.compile(moved, dynamic=False, fullgraph=True))
    assert metrics.generated_kernel_count + len(around.names) <= 20
    torch.testing.assert_close(alike.state_dict(), layers.state_dict())


def test_an_indexer_counts_steps_without_reading_its_buffer() -> None:
    pattern = Indexer(H, D, window=W, warmup=2)
    state = pattern.state_dict()
    with Calls() as calls:
        for wanted in (True, True, False):
            assert pattern.is_dense == wanted
            after_step(pattern)
    assert "aten._local_scalar_dense.default" not in calls.names
    assert int(state["steps"]) == 3
    other = Indexer(H, D, window=W, warmup=2)
    other.load_state_dict(state)
    assert not other.is_dense


def test_training_without_after_step_warns_once_and_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(centroids, "MOST_PASSES", 3)
    pattern = make()
    q = queries(1)
    for _ in range(4):
        step(pattern, q)
    for _ in range(4):
        see(pattern.eval(), q)
    pattern.train()
    for _ in range(2):
        see(pattern, q)
    with pytest.warns(RuntimeWarning, match=r"3 training .* rtx\.attention\.after_step\(model\)"):
        see(pattern, q)
    see(pattern, q)


def test_centroids_do_not_warn_where_a_step_has_any_number_of_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(centroids, "MOST_PASSES", 3)
    pattern = make()
    pattern.centroids.warns = False
    for _ in range(4):
        see(pattern, queries(1))
