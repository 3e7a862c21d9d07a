"""Where the centroids change: statistics, both updates, thresholds, revival, and what is saved.

Shapes: B sequences, H heads, C clusters, N positions, D head size.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rtx.attention.kmeans import Centroids, statistics_paused, to_sphere, update_centroids
from rtx.attention.routing import RoutingHeads, normalise

H, C, N, D, W = 2, 3, 20, 4, 6


def make(**changes: object) -> Centroids:
    """Centroids with thresholds, the same at every call."""
    torch.manual_seed(0)
    options = {"window": W, "length": N, "decay": 0.9, "thresholds": True} | changes
    return Centroids(H, C, D, **options)  # type: ignore[arg-type]


def queries(seed: int, batch: int = 2, length: int = N) -> Tensor:
    """Normalised queries `[B, H, N, D]`."""
    return normalise(torch.randn(batch, H, length, D, generator=torch.Generator().manual_seed(seed)))


def watch(centroids: Centroids, *batches: Tensor) -> Centroids:
    """Let centroids observe batches, without an update."""
    for q_BHND in batches:
        centroids.observe(q_BHND, centroids.look(q_BHND))
    return centroids


def members(centroids: Centroids, q_BHND: Tensor, h: int, c: int) -> Tensor:
    """The queries of a head whose best centroid is c, from all sequences."""
    x_MD = q_BHND[:, h].reshape(-1, D)
    return x_MD[(x_MD @ centroids.centroid_HCD[h].T).argmax(-1) == c].double()


def near(centroids: Centroids, clusters: list[int], seed: int) -> Tensor:
    """Queries that lie close to some of the centroids of their head."""
    around_HND = centroids.centroid_HCD[:, clusters * (N // len(clusters))]
    return to_sphere(around_HND + 0.1 * queries(seed))


def test_mean_update() -> None:
    centroids, q = make(), queries(1)
    old = centroids.centroid_HCD.clone()
    expected = old.double()
    for h in range(H):
        for c in range(C):
            moved = 0.9 * old[h, c].double() + 0.1 * members(centroids, q, h, c).mean(0)
            expected[h, c] = math.sqrt(D) * moved / moved.norm()
    update_centroids(watch(centroids, q))
    torch.testing.assert_close(centroids.centroid_HCD, expected.float(), rtol=1e-6, atol=1e-7)


def test_sum_update_is_algorithm_1_for_each_sequence() -> None:
    centroids, q = make(update="sum"), queries(1, batch=1)
    old = centroids.centroid_HCD.clone()
    expected = old.double()
    for h in range(H):
        for c in range(C):
            total = members(centroids, q, h, c).sum(0)
            expected[h, c] = 0.9 * old[h, c].double() + 0.1 * total / 2 + 0.1 * total / 2
    update_centroids(watch(centroids, q))
    torch.testing.assert_close(centroids.centroid_HCD, expected.float(), rtol=1e-6, atol=1e-7)
    # The same sequence three times over moves them no further.
    thrice = make(update="sum")
    update_centroids(watch(thrice, q.expand(3, -1, -1, -1)))
    torch.testing.assert_close(thrice.centroid_HCD, centroids.centroid_HCD)


def test_an_empty_cluster_keeps_its_centroid() -> None:
    centroids = make()
    before = centroids.centroid_HCD.clone()
    update_centroids(watch(centroids, near(centroids, [0, 2], seed=1)))
    assert torch.equal(centroids.centroid_HCD[:, 1], before[:, 1])
    assert not torch.isclose(centroids.centroid_HCD[:, [0, 2]], before[:, [0, 2]]).any()
    assert centroids.idle_HC.tolist() == [[0, 1, 0]] * H


def test_nothing_seen_changes_nothing() -> None:
    centroids = make()
    before = {name: x.clone() for name, x in centroids.state_dict().items()}
    update_centroids(centroids)
    assert all(torch.equal(x, before[name]) for name, x in centroids.state_dict().items())


def true_window_score(centroids: Centroids, q_BHND: Tensor, rank: int) -> Tensor:
    """The mean over sequences of the rank-th best score of each centroid."""
    score_BHCN = torch.einsum("hcd,bhnd->bhcn", centroids.centroid_HCD.double(), q_BHND.double())
    return score_BHCN.sort(dim=-1, descending=True).values[..., rank - 1].mean(0)


def test_thresholds_are_set_by_the_first_batch_and_then_a_running_mean() -> None:
    centroids = make(threshold_decay=0.75)
    first = true_window_score(centroids, queries(1), W)
    update_centroids(watch(centroids, queries(1)))
    torch.testing.assert_close(centroids.threshold_HC.double(), first, rtol=1e-6, atol=1e-6)
    second = true_window_score(centroids, queries(2), W)
    update_centroids(watch(centroids, queries(2)))
    torch.testing.assert_close(centroids.threshold_HC.double(), 0.75 * first + 0.25 * second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [1, 7, 10, 19])
def test_a_short_sequence_keeps_its_share(length: int) -> None:
    centroids, q = make(), queries(3, length=length)
    expected = true_window_score(centroids, q, math.ceil(W * length / N))
    update_centroids(watch(centroids, q))
    torch.testing.assert_close(centroids.threshold_HC.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [1, 6, 19, 20])
def test_thresholds_start_where_random_directions_keep_the_window(window: int) -> None:
    torch.manual_seed(0)
    centroids = Centroids(4, 8, 32, window=window, length=20, decay=0.9, thresholds=True)
    q = normalise(torch.randn(20, 4, 50, 32))
    share = (centroids.scores(q) >= centroids.threshold_HC[None, :, :, None]).float().mean()
    assert abs(share - window / 20) < 0.02


def test_thresholds_hold_window_of_length_positions_on_average() -> None:
    centroids = make(decay=1.0)
    for seed in range(200):
        update_centroids(watch(centroids, queries(seed)))
    q = queries(1000, batch=400)
    share_HC = (centroids.scores(q) >= centroids.threshold_HC[None, :, :, None]).float().mean((0, 3))
    assert (share_HC - W / N).abs().max() < 0.05


def test_without_thresholds_they_stay() -> None:
    centroids = make(thresholds=False)
    before = centroids.threshold_HC.clone()
    update_centroids(watch(centroids, queries(1)))
    assert torch.equal(centroids.threshold_HC, before)


@pytest.mark.parametrize("update", ["mean", "sum"])
def test_micro_batches_add_up_to_the_joined_batch(update: str) -> None:
    one, two = make(update=update), make(update=update)
    parts = queries(1), queries(2)
    watch(one, *parts)
    watch(two, torch.cat(parts))
    for a, b in zip(one.sums(), two.sums(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    update_centroids(one)
    update_centroids(two)
    for name, x in one.state_dict().items():
        torch.testing.assert_close(x, two.state_dict()[name], rtol=1e-6, atol=1e-6)


def test_statistics_are_for_training_and_not_for_recomputation() -> None:
    centroids = make()
    heads = RoutingHeads(centroids, selection="causal", scale=0.5)
    q, v = torch.randn(2, 2, H, N, D)
    heads.eval()(q, None, v)
    assert all((x == 0).all() for x in centroids.sums())
    heads.train()
    with statistics_paused():
        heads(q, None, v)
    assert all((x == 0).all() for x in centroids.sums())
    heads(q, None, v)
    assert centroids.count_HC.sum() == 2 * H * N and centroids.sequences == 2


def test_the_sums_are_empty_after_an_update() -> None:
    centroids = watch(make(), queries(1))
    update_centroids(centroids)
    assert all((x == 0).all() for x in centroids.sums())
    assert centroids.steps == 1


def test_buffers_stay_float32() -> None:
    centroids = watch(make(), queries(1))
    update_centroids(centroids)
    before = {name: x.clone() for name, x in centroids.state_dict().items()}
    for name, x in centroids.double().half().bfloat16().to(torch.float64).state_dict().items():
        assert torch.equal(x, before[name]) and x.dtype == before[name].dtype
    assert centroids.centroid_HCD.dtype == centroids.threshold_HC.dtype == torch.float32
    update_centroids(watch(centroids, queries(2).double()))
    assert centroids.centroid_HCD.dtype == torch.float32


def test_what_is_saved() -> None:
    centroids = watch(make(), queries(1))
    assert set(centroids.state_dict()) == {"centroid_HCD", "threshold_HC", "idle_HC", "steps"}
    update_centroids(centroids)
    other = make()
    other.load_state_dict(centroids.state_dict())
    update_centroids(watch(centroids, queries(2)))
    update_centroids(watch(other, queries(2)))
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in centroids.state_dict().items())


def test_revival() -> None:
    centroids = make(revive_after=3)
    idle_HD = centroids.centroid_HCD[:, 2].clone()
    for step in range(3):
        assert torch.equal(centroids.centroid_HCD[:, 2], idle_HD), step
        update_centroids(watch(centroids, near(centroids, [0, 0, 0, 1], seed=step)))
    for h in range(H):
        unit_CD = centroids.centroid_HCD[h]
        torch.testing.assert_close(unit_CD[2].norm(), torch.tensor(2.0))
        assert unit_CD[2] @ unit_CD[0] / D > 0.9
    assert torch.equal(centroids.threshold_HC[:, 2], centroids.threshold_HC[:, 0])
    assert centroids.idle_HC.tolist() == [[0, 0, 0]] * H


def watch_both(centroids: Centroids, q_BHND: Tensor, k_BHND: Tensor, mask_BN: Tensor | None = None) -> Centroids:
    """Let centroids observe queries and keys of one batch, without an update."""
    centroids.observe(q_BHND, centroids.look(q_BHND, mask_BN), mask_BN)
    centroids.observe_keys(k_BHND, centroids.look(k_BHND, mask_BN), mask_BN)
    return centroids


@pytest.mark.parametrize("update", ["mean", "sum"])
def test_separate_keys_count_as_queries_do(update: str) -> None:
    centroids, q, k = make(update=update, keys="separate"), queries(1), queries(2)
    old = centroids.centroid_HCD.double()
    expected = old.clone()
    for h in range(H):
        for c in range(C):
            of_q, of_k = members(centroids, q, h, c), members(centroids, k, h, c)
            if update == "mean":
                moved = 0.9 * old[h, c] + 0.1 * torch.cat([of_q, of_k]).mean(0)
                expected[h, c] = math.sqrt(D) * moved / moved.norm()
            else:  # two sequences: the mean of their sums
                expected[h, c] = 0.9 * old[h, c] + 0.1 * of_q.sum(0) / 2 / 2 + 0.1 * of_k.sum(0) / 2 / 2
    limits = true_window_score(centroids, q, W), true_window_score(centroids, k, W)
    update_centroids(watch_both(centroids, q, k))
    torch.testing.assert_close(centroids.centroid_HCD, expected.float(), rtol=1e-6, atol=1e-7)
    assert centroids.key_threshold_HC is not None
    torch.testing.assert_close(centroids.threshold_HC.double(), limits[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(centroids.key_threshold_HC.double(), limits[1], rtol=1e-6, atol=1e-6)
    assert {"key_threshold_HC"} < set(centroids.state_dict())


def test_padding_is_in_no_statistics() -> None:
    lengths, q, k = (13, 20, 0, 1), queries(1, batch=4), queries(2, batch=4)
    mask_BN = torch.arange(N) < torch.tensor(lengths)[:, None]
    padded, cut = make(keys="separate"), make(keys="separate")
    watch_both(padded, q.masked_fill(~mask_BN[:, None, :, None], 0.0), k, mask_BN)
    for b, n in enumerate(lengths):
        if n:
            watch_both(cut, q[b : b + 1, :, :n], k[b : b + 1, :, :n])
    for a, b in zip(padded.sums(), cut.sums(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert padded.sequences == 3


@pytest.mark.parametrize("keys", ["shared", "separate", "projected"])
def test_padding_moves_no_centroid_and_no_commitment(keys: str) -> None:
    results = []
    for rest in (0.0, 7.0):
        centroids = make(keys=keys)
        heads = RoutingHeads(centroids, selection="causal", scale=0.5, commitment=0.5)
        q, k, v = torch.randn(3, 2, H, N, D, generator=torch.Generator().manual_seed(0))
        mask_BN = torch.arange(N) < torch.tensor([[15], [9]])
        q, k, v = (x + rest * ~mask_BN[:, None, :, None] for x in (q, k, v))
        out, loss = heads(q, None if keys == "shared" else k, v, mask_BN=mask_BN)
        update_centroids(heads)
        results.append([out, loss, *centroids.state_dict().values()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_the_projection_is_saved_and_kept_in_float32() -> None:
    centroids = make(keys="projected")
    assert "projection_HDD" in centroids.state_dict()
    before = centroids.projection_HDD
    assert before is not None
    other = make(keys="projected").half()
    other.load_state_dict(centroids.state_dict())
    assert other.projection_HDD is not None and torch.equal(other.projection_HDD, before)
    update_centroids(watch(centroids, queries(1)))
    assert torch.equal(centroids.projection_HDD, other.projection_HDD), "it is fixed"  # type: ignore[arg-type]


def test_data_starts_thresholds_of_keys_too() -> None:
    centroids, q, k = make(keys="separate"), queries(1), queries(2)
    mask_BN = torch.arange(N) < 14
    centroids.seed_from(q, k, mask_BN.expand(2, N))
    apart_CN = torch.cdist(centroids.centroid_HCD[0], q[0, 0, :14])
    assert (apart_CN.amin(-1) < 1e-3).all()
    rank = math.ceil(W * 14 / N)
    for threshold_HC, x in ((centroids.threshold_HC, q), (centroids.key_threshold_HC, k)):
        expected = true_window_score(centroids, x[:1, :, :14], rank)
        torch.testing.assert_close(threshold_HC, expected.float(), rtol=1e-6, atol=1e-6)


def test_scores_are_not_rounded_under_autocast() -> None:
    centroids, q = make(), queries(1)
    expected = centroids.centroid_HCD @ q.transpose(-1, -2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(centroids.scores(q), expected)
    assert centroids.scores(q.double()).dtype == torch.float64


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("update", ["mean", "sum"])
def test_a_batch_that_is_not_finite_moves_the_other_heads_alone(update: str, value: float) -> None:
    centroids, clean = make(update=update), make(update=update)
    q, spoilt = queries(1), queries(1)
    spoilt[0, 0, 3] = value
    update_centroids(watch(centroids, spoilt))
    update_centroids(watch(clean, q))
    before = make(update=update)
    for name in ("centroid_HCD", "threshold_HC"):
        ours, theirs, old = (getattr(each, name) for each in (centroids, clean, before))
        assert torch.equal(ours[0], old[0])
        assert torch.equal(ours[1], theirs[1]) and not torch.equal(ours[1], old[1])
    update_centroids(watch(centroids, q))
    assert centroids.centroid_HCD.isfinite().all() and centroids.threshold_HC.isfinite().all()
    assert not torch.equal(centroids.centroid_HCD[0], before.centroid_HCD[0])
