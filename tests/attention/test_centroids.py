"""Where the centroids change: statistics, three updates, thresholds, revival, what is saved, and all ranks alike.

Shapes: B sequences, H heads, C clusters, N positions, D head size.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rtx.attention.centroids import Centroids, after_step, initialise_from_data, statistics_paused, to_sphere
from rtx.attention.routing import Routing
from rtx.attention.selection import centroid_scores, joins, normalise

H, C, N, D, W = 2, 3, 24, 4, 8


def make(selection: str = "causal", **changes: object) -> Routing:
    """Routing heads in training, the same at every call."""
    torch.manual_seed(0)
    options = {"window": W, "length": N, "decay": 0.9} | changes
    return Routing(Centroids(H, C, D, **options), selection=selection)  # type: ignore[arg-type]


def queries(seed: int, batch: int = 2, length: int = N) -> Tensor:
    """Queries `[B, H, N, D]`."""
    return torch.randn(batch, H, length, D, generator=torch.Generator().manual_seed(seed))


def see(pattern: Routing, q: Tensor, real_BN: Tensor | None = None) -> Routing:
    """Let the heads observe a training batch."""
    pattern(q, q if pattern.has_keys else None, q, real_BN=real_BN)
    return pattern


def step(pattern: Routing, *batches: Tensor) -> Centroids:
    """Take one optimizer step over some micro-batches."""
    for q in batches:
        see(pattern, q)
    after_step(pattern)
    return pattern.centroids


def moved(old_D: Tensor, members_MD: Tensor, decay: float = 0.9) -> Tensor:
    """Return a centroid moved towards the mean of some vectors, back on the sphere."""
    new_D = decay * old_D.double() + (1 - decay) * members_MD.double().mean(0)
    return math.sqrt(D) * new_D / new_D.norm()


@pytest.mark.parametrize("update", ["members", "nearest"])
def test_a_centroid_moves_to_the_mean_of_its_members_or_of_those_nearest_to_it(update: str) -> None:
    pattern, q = make("topk", update=update), queries(1)
    old, x = pattern.centroids.centroid_HCD.clone(), normalise(q)
    expected = old.double().clone()
    score_BHCN = centroid_scores(old, x)
    for h in range(H):
        for c in range(C):
            if update == "members":
                member_BN = torch.zeros(2, N, dtype=torch.bool)
                member_BN.scatter_(1, score_BHCN[:, h, c].topk(W).indices, True)
            else:
                member_BN = score_BHCN[:, h].argmax(1) == c
            if member_BN.any():
                expected[h, c] = moved(old[h, c], x[:, h][member_BN])
    assert torch.allclose(step(pattern, q).centroid_HCD.double(), expected, atol=1e-6)


def test_sum_update_is_algorithm_1_for_each_sequence() -> None:
    pattern, q = make("topk", update="sum"), queries(1, batch=1)
    old, x = pattern.centroids.centroid_HCD.clone(), normalise(q)
    nearest_HN = centroid_scores(old, x)[0].argmax(1)
    expected = 0.9 * old.double()
    for h in range(H):
        for c in range(C):
            total = x[0, h][nearest_HN[h] == c].double().sum(0)
            expected[h, c] += 0.1 * total / 2 + 0.1 * total / 2
    assert torch.allclose(step(pattern, q).centroid_HCD.double(), expected, atol=1e-6)
    thrice = make("topk", update="sum")  # the same sequence three times over moves them no further
    assert torch.allclose(step(thrice, q.expand(3, -1, -1, -1)).centroid_HCD.double(), expected, atol=1e-6)


def test_no_cluster_stays_dead() -> None:
    """Centroids that start far from all data find members, and follow them."""
    pattern = make(threshold_rate=0.1)
    around_D = torch.tensor([3.0, 1.0, -1.0, -3.0])
    pattern.centroids.centroid_HCD[:, 1:] = to_sphere(-normalise(around_D).expand(H, C - 1, D))
    empty = []
    for number in range(300):
        see(pattern, around_D + 0.7 * queries(number, batch=4))
        empty.append(float((pattern.centroids.seen_XHC[0, 0] == 0).double().mean()))
        after_step(pattern)
    assert empty[0] > 0.3 and max(empty[-50:]) == 0.0


def test_counts_come_to_the_window_within_100_steps_and_nobody_is_left_out() -> None:
    pattern = make(threshold_rate=0.1, decay=0.99)
    tilt_D = torch.tensor([1.0, 0.3, -0.2, -1.1])
    counts = []
    for number in range(140):
        see(pattern, tilt_D + queries(number, batch=4))
        assert pattern.snapshot is not None
        assert int(pattern.snapshot.lists[0].row_M.bincount(minlength=H * N).min()) >= 1
        counts.append(pattern.centroids.seen_XHC[0, 0] / 4)
        after_step(pattern)
    late_HC = torch.stack(counts[100:]).mean(0)
    assert abs(float(late_HC.mean()) / W - 1) < 0.1
    assert (late_HC / W - 1).abs().max() < 0.35


def test_a_batch_is_routed_by_the_thresholds_it_finds() -> None:
    pattern, q = make(threshold_rate=1.0), queries(1)
    before = pattern.centroids.threshold_HC.clone()
    see(pattern, q)
    assert torch.equal(pattern.centroids.threshold_HC, before)
    member_LN = joins(centroid_scores(pattern.centroids.centroid_HCD, normalise(q)).flatten(0, 1), before.repeat(2, 1))
    assert pattern.snapshot is not None
    assert torch.equal(pattern.snapshot.lists[0].count_L, member_LN[:H].sum(-1).flatten())
    after_step(pattern)
    assert not torch.equal(pattern.centroids.threshold_HC, before)


def test_separate_keys_have_thresholds_of_their_own() -> None:
    pattern = make(keys="separate", threshold_rate=0.5)
    q, k = queries(1), 0.2 + 3 * queries(2)
    for _ in range(3):
        pattern(q, k, q)
        after_step(pattern)
    assert pattern.centroids.key_threshold_HC is not None
    assert not torch.allclose(pattern.centroids.threshold_HC, pattern.centroids.key_threshold_HC)


def test_micro_batches_add_up_to_the_joined_batch() -> None:
    one, two = make(threshold_rate=0.1), make(threshold_rate=0.1)
    parts = queries(1), queries(2)
    step(one, *parts)
    step(two, torch.cat(parts))
    for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_padding_is_not_counted() -> None:
    short, padded = make(threshold_rate=0.1), make(threshold_rate=0.1)
    q = queries(1)
    real_BN = torch.arange(N).expand(2, N) < 15
    after_step(see(short, q[:, :, :15]))
    after_step(see(padded, q, real_BN))
    for a, b in zip(short.state_dict().values(), padded.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_only_training_gathers_and_a_pause_gathers_nothing() -> None:
    pattern = make(threshold_rate=0.1)
    before = {name: x.clone() for name, x in pattern.state_dict().items()}
    with statistics_paused():
        see(pattern, queries(1))
    see(pattern.eval(), queries(2))
    after_step(pattern)
    assert all(torch.equal(x, before[name]) for name, x in pattern.state_dict().items())


def test_a_head_with_nan_keeps_what_it_has() -> None:
    pattern, q = make(threshold_rate=0.1), queries(1)
    q[0, 0, 3] = float("nan")
    before = pattern.centroids.centroid_HCD.clone()
    after = step(pattern, q)
    assert torch.equal(after.centroid_HCD[0], before[0]) and not torch.equal(after.centroid_HCD[1], before[1])
    assert after.threshold_HC.isfinite().all()


def test_buffers_stay_float32_and_move_in_place() -> None:
    pattern = make(threshold_rate=0.1).double()
    store = pattern.centroids
    assert store.centroid_HCD.dtype == store.threshold_HC.dtype == torch.float32
    place = store.centroid_HCD.data_ptr()
    step(pattern, queries(1).double())
    assert store.centroid_HCD.data_ptr() == place


class Model(nn.Module):
    """One layer of routing heads in the place of a transformer."""

    def __init__(self, pattern: Routing) -> None:
        super().__init__()
        self.pattern = pattern

    def loss(self, tokens_BN: Tensor) -> Tensor:
        """Attend over vectors drawn by the tokens."""
        q = queries(int(tokens_BN[0, 0]), batch=len(tokens_BN))
        return self.pattern(q, None, q)[0]


def test_centroids_wait_for_training_data_alone() -> None:
    pattern = make(threshold_rate=0.1)
    model = Model(pattern)
    pattern.centroids.seed_with_next = True
    before = pattern.centroids.centroid_HCD.clone()
    model.eval()
    model.loss(torch.tensor([[7]]))  # a validation batch
    assert torch.equal(pattern.centroids.centroid_HCD, before) and pattern.centroids.seed_with_next
    model.train()
    initialise_from_data(model, torch.tensor([[3]]))
    assert not pattern.centroids.seed_with_next and model.training and pattern.training
    x_HND = normalise(queries(3, batch=1))[0]
    apart_HCN = (pattern.centroids.centroid_HCD[:, :, None] - to_sphere(x_HND)[:, None]).norm(dim=-1)
    assert (apart_HCN.amin(-1) < 1e-5).all()
    assert float(pattern.centroids.sequences) == 0, "what seeds is not observed"


def two_ranks(rank: int, path: str) -> None:
    """Train one step on half a batch each, and keep the centroids."""
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2)
    step(pattern := make(threshold_rate=0.1), queries(rank))
    torch.save(pattern.state_dict(), f"{path}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_move_alike_from_the_joined_batch(tmp_path) -> None:
    torch.multiprocessing.spawn(  # pyright: ignore[reportPrivateImportUsage]
        two_ranks, (str(tmp_path),), nprocs=2
    )
    whole = make(threshold_rate=0.1)
    step(whole, torch.cat([queries(0), queries(1)]))
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keys": "other"}, "keys='other': must be one of shared, separate, projected"),
        ({"update": "mean"}, "update='mean': must be one of members, nearest, sum"),
        ({"decay": 1.5}, "decay=1.5: must be from 0 to 1"),
        ({"threshold_rate": -1.0}, "threshold_rate=-1.0: must be at least 0"),
        ({"window": 0}, "window=0: must be at least 1"),
    ],
)
def test_bad_options_are_named(changes: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**changes)


def test_autocast_rounds_no_statistics() -> None:
    sums = []
    for enabled in (False, True):
        pattern = make()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            see(pattern, queries(1))
        sums.append(pattern.centroids.sum_HCD)
    assert torch.equal(*sums)
