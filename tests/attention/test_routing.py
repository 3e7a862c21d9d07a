"""Routing attention against the oracle: both selections, any counts, ties, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle_cases import PLAIN, Case, assert_same, cases, leaves
from padding_cases import padding
from routing_cases import How, fast, truth

from rtx.attention import reference
from rtx.attention.kmeans import Centroids
from rtx.attention.routing import RoutingHeads, normalise, routing


@pytest.mark.parametrize("selection", ["topk", "causal", "nearest"])
@pytest.mark.parametrize("case", cases())
def test_oracle(case: Case, selection: str) -> None:
    how = How(selection)
    assert_same(lambda x: fast(case, x, how), lambda x: truth(case, x, how), leaves(case))


@pytest.mark.parametrize("attend_self", [True, False])
@pytest.mark.parametrize("level", ["all", "most", "some"])
def test_lists_of_any_length(level: str, attend_self: bool) -> None:
    how = How("causal", level=level)
    for window in (1, 2, 5, 7, 30):
        case = PLAIN._replace(N=25, B=1, C=2, W=window, attend_self=attend_self, distances=6)
        assert_same(lambda x: fast(case, x, how), lambda x: truth(case, x, how), leaves(case))  # noqa: B023


@pytest.mark.parametrize("selection", ["topk", "causal", "nearest"])
@pytest.mark.parametrize("case", cases(9))
def test_padding(case: Case, selection: str) -> None:
    how = How(selection, masked=True)
    assert_same(lambda x: fast(case, x, how), lambda x: truth(case, x, how), leaves(case))


@pytest.mark.parametrize("how", [How("topk", slots=True), How("causal", slots=True, masked=True)])
@pytest.mark.parametrize("case", [case for case in cases(30) if case.distances])
def test_slot_distances(case: Case, how: How) -> None:
    assert_same(lambda x: fast(case, x, how), lambda x: truth(case, x, how), leaves(case))


@pytest.mark.parametrize("keys", ["shared", "separate", "projected"])
@pytest.mark.parametrize("selection", ["topk", "causal", "nearest"])
def test_what_stands_in_padding_goes_nowhere(selection: str, keys: str) -> None:
    case = PLAIN._replace(B=3, H=2, N=21)
    clean, how = leaves(case), How(selection, keys, masked=True, level="some")
    padding_B1N1 = ~padding(case)[:, None, :, None]
    poisoned = {name: x.masked_fill(padding_B1N1, float("nan")) for name, x in clean.items()}
    results = []
    for inputs in (clean, poisoned):
        copies = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        out_BHND = fast(case, copies, how)
        out_BHND.square().sum().backward()
        assert (out_BHND[padding_B1N1.expand_as(out_BHND)] == 0).all()
        grads = [x.grad for x in copies.values() if x.grad is not None]
        results.append([out_BHND.detach(), *grads])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", ["shared", "separate", "projected"])
@pytest.mark.parametrize("selection", ["topk", "causal", "nearest"])
def test_narrow_types_stay_close_and_finite(selection: str, keys: str, dtype: torch.dtype) -> None:
    case, how = PLAIN._replace(B=2, H=2, N=40, C=4, D=8, W=8), How(selection, keys, level="half", masked=True)
    narrow = {name: x.to(dtype).requires_grad_() for name, x in leaves(case).items()}
    out_BHND = fast(case, narrow, how)
    out_BHND.float().square().sum().backward()
    # The same rounded inputs: memberships are chosen in float32 whatever the type.
    expected = fast(case, {name: x.detach().double() for name, x in narrow.items()}, how)
    assert out_BHND.dtype == dtype
    torch.testing.assert_close(out_BHND.double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05)
    assert all(x.grad is None or x.grad.isfinite().all() for x in narrow.values())


def test_no_members_at_all_gives_zero() -> None:
    inputs = leaves(PLAIN)
    assert torch.equal(fast(PLAIN, inputs, How("causal", level="none")), torch.zeros_like(inputs["v"]))


@pytest.mark.parametrize("keys", ["shared", "separate", "projected"])
@pytest.mark.parametrize("selection", ["topk", "causal", "nearest"])
def test_an_empty_batch(selection: str, keys: str) -> None:
    case = PLAIN._replace(B=0)
    assert fast(case, leaves(case), How(selection, keys)).shape == (0, 1, 13, 4)


@pytest.mark.parametrize("selection", ["topk", "causal"])
def test_identical_rows(selection: str) -> None:
    # Scores against one-hot centroids have no rounding, so identical rows tie exactly.
    row_4D = torch.tensor([[3.0, 1, 0, 0], [0, 2, 1, 0], [1, 1, 1, 0], [0, 0, 1, 5]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    q_BHND = row_4D[torch.randint(4, (2, 1, 23), generator=generator)]
    v_BHND = torch.randn(q_BHND.shape, generator=generator, dtype=torch.float64)
    centroid_HCD = torch.eye(4, dtype=torch.float64)[None]
    # The threshold is one of the scores: "at or above" takes all its ties in.
    threshold_HC = normalise(q_BHND)[0, :, 0] if selection == "causal" else None
    expected = true_ties(q_BHND, v_BHND, centroid_HCD, threshold_HC, window=5)
    out_BHND = routing(q_BHND, None, v_BHND, centroid_HCD, window=5, selection=selection, threshold_HC=threshold_HC)
    torch.testing.assert_close(out_BHND, expected, rtol=1e-10, atol=1e-12)


def true_ties(
    q_BHND: torch.Tensor, v_BHND: torch.Tensor, centroid_HCD: torch.Tensor, limits: torch.Tensor | None, window: int
) -> torch.Tensor:
    """The oracle with scores of its own for one head and one-hot centroids (where the dot product is a pick)."""
    outputs = []
    for q_ND, v_ND in zip(normalise(q_BHND)[:, 0], v_BHND[:, 0], strict=True):
        score_CN = q_ND.T
        if limits is None:
            member_CN = reference.topk_members(score_CN, window)
        else:
            member_CN = reference.threshold_members(score_CN, limits[0])
        sets = lambda i, member_CN=member_CN: reference.cluster_sets(i, member_CN, window, True)  # noqa: E731
        outputs.append(reference.read(q_ND, q_ND, v_ND, sets, q_ND.shape[1] ** -0.5, None))
    return torch.stack(outputs)[:, None]


def test_centroids_of_any_norm_select_alike_in_topk() -> None:
    inputs = leaves(PLAIN)
    centroid_HCD = torch.randn(1, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    options = {"window": 4, "selection": "topk"}
    one = routing(inputs["q"], None, inputs["v"], centroid_HCD, **options)  # type: ignore[arg-type]
    assert torch.equal(one, routing(inputs["q"], None, inputs["v"], 4 * centroid_HCD, **options))  # type: ignore[arg-type]


def test_the_heads_are_the_function() -> None:
    case = PLAIN._replace(B=2, H=2, attend_self=False)
    inputs = leaves(case)
    centroids = Centroids(2, 3, 4, window=5, length=13, decay=0.9, thresholds=True)
    for selection in ("topk", "causal"):
        heads = RoutingHeads(centroids, selection=selection, scale=0.5, attend_self=False).eval()
        out_BHND, loss = heads(inputs["q"], None, inputs["v"])
        options = {"window": 5, "selection": selection, "threshold_HC": centroids.threshold_HC, "attend_self": False}
        expected = routing(inputs["q"], None, inputs["v"], centroids.centroid_HCD, **options)
        torch.testing.assert_close(out_BHND, expected, rtol=1e-12, atol=0)
        assert loss == 0


def test_commitment_pulls_queries_to_the_nearest_centroid() -> None:
    inputs = leaves(PLAIN._replace(B=2, H=2))
    q_BHND = inputs["q"].requires_grad_()
    centroids = Centroids(2, 3, 4, window=5, length=13, decay=0.9)
    centroids.centroid_HCD.mul_(3)  # as update=sum may leave them; the pull is towards the sphere
    heads = RoutingHeads(centroids, selection="topk", scale=1.0, commitment=0.25)
    _, loss = heads(q_BHND, None, inputs["v"])
    terms = []
    for b in range(2):
        for h in range(2):
            for x_D in normalise(q_BHND)[b, h]:
                unit_CD = centroids.centroid_HCD[h].double()
                best_D = unit_CD[(unit_CD @ x_D).argmax()]
                terms.append((x_D - 2 * best_D / best_D.norm()).square())
    expected = 0.25 * torch.cat(terms).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(x, q_BHND, retain_graph=True)[0] for x in (loss, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-9)


def test_dropout_is_for_training() -> None:
    inputs = leaves(PLAIN)
    heads = RoutingHeads(Centroids(1, 3, 4, window=13, length=13, decay=0.9), selection="topk", scale=1.0, dropout=0.5)
    calm = heads.eval()(inputs["q"], None, inputs["v"])[0]
    assert torch.equal(calm, heads(inputs["q"], None, inputs["v"])[0])
    assert not torch.equal(calm, heads.train()(inputs["q"], None, inputs["v"])[0])


def test_refusals() -> None:
    inputs = leaves(PLAIN)
    centroid_HCD = torch.ones(1, 3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="selection='neares': must be one of causal, topk, nearest"):
        routing(inputs["q"], None, inputs["v"], centroid_HCD, window=4, selection="neares")
    with pytest.raises(ValueError, match="needs threshold_HC"):
        routing(inputs["q"], None, inputs["v"], centroid_HCD, window=4, selection="causal")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_BHND": torch.ones(1, 1, 12, 4)}, r"v_BHND has the shape \(1, 1, 12, 4\): must be \(1, 1, 13, 4\)"),
        ({"k_BHND": torch.ones(1, 1, 13, 5)}, "k_BHND has the shape"),
        ({"k_BHND": torch.ones(1, 1, 13, 4)}, "k_BHND is of torch.float32: must be of torch.float64"),
        ({"centroid_HCD": torch.ones(2, 3, 4)}, r"centroid_HCD has the shape \(2, 3, 4\): must be \(1, 3, 4\)"),
        ({"window": 0}, "window=0: must be at least 1"),
        ({"mask_BN": torch.ones(1, 12, dtype=torch.bool)}, "mask_BN has the shape"),
        ({"mask_BN": torch.ones(1, 13)}, "mask_BN is of torch.float32: must be of torch.bool"),
        ({"projection_HDD": torch.ones(1, 4, 4)}, "projection_HDD needs k_BHND"),
        ({"causal": False, "selection": "nearest"}, "causal=False with selection='nearest': only topk"),
        ({"causal": False, "streaming": True}, "causal=False with streaming=True"),
        (
            {"selection": "causal", "k_BHND": torch.ones(1, 1, 13, 4, dtype=torch.float64)},
            "selection=causal with k_BHND needs key_threshold_HC",
        ),
    ],
)
def test_refused_with_a_sentence(change: dict[str, Any], message: str) -> None:
    inputs = leaves(PLAIN)
    given = {"q_BHND": inputs["q"], "k_BHND": None, "v_BHND": inputs["v"], "centroid_HCD": torch.ones(1, 3, 4)}
    options = {"window": 4, "selection": "topk", "threshold_HC": torch.zeros(1, 3)}
    with pytest.raises(ValueError, match=message):
        routing(**(given | options | change))
