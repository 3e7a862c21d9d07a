"""What `rtx analyze` measures, against plain loops.

What heads read: the weights by the rules of the patterns, divergences, telemetry, and what
selections retain. Losses by position and by context, and the price of the future.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from torch import Tensor, nn

from rtx.analysis import attention_weights as weights
from rtx.analysis import coverage, divergence
from rtx.analysis import loss_by_position as losses
from rtx.analysis.loss_by_position import RERUN, STREAMING, TEACHER_FORCED
from rtx.analysis.telemetry import read_telemetry
from rtx.attention import oracle
from rtx.attention.adaptive_span import AdaptiveSpan
from rtx.attention.clusters import Routing
from rtx.attention.reads import RangeReads
from rtx.data.windows import Window, windows
from tests.helpers.tiny_models import (
    OTHERS,
    OWN_KEYS,
    TIED,
    VOCABULARY,
    Kind,
    covering,
    each_kind,
    tiny_config,
    tiny_model,
    tokens,
)

AT = torch.tensor([0, 1, 7, 8, 20, 23])
LENGTH = 24
WINDOW = 5
CLUSTERS = 4
OPTIONS: list[Kind] = [
    *covering([kind for kind in OTHERS + OWN_KEYS if "routing_compressed" not in kind]),
    {
        "selection": "topk",
        "routing_keys": "separate",
        "routing_attend_self": False,
        "routing_key_shift": 1,
    },
    {"selection": "random", "routing_attend_self": False, "positions": "shaw"},
    {"selection": "topk", "base": "local+full"},
    {"base": "strided+fixed", "positions": "shaw", "norm": "post"},
    {"base": "adaptive_span"},
    {"base": "lsh"},
    {"base": "lsh", "positions": "shaw", "hash_rounds": 1, "lsh": "reformer"},
]


def oracle_weights(heads: weights.Heads) -> list[Tensor]:
    pattern = heads.pattern
    qk = heads.qk
    terms = pattern.terms(qk.q_BHND.shape[-1], heads.relative)
    weights_H = []
    for head in range(qk.q_BHND.shape[1]):
        q_ND = qk.rotated_q_BHND[0, head]
        k_ND = qk.rotated_k_BHND[0, head]
        mask_PNN = pattern.rule(qk, head, False)
        if not pattern.attend_self:
            mask_PNN = oracle.others_if_any(mask_PNN)
        _, weight_PNN = oracle.dense(q_ND, k_ND, k_ND, mask_PNN, terms, head)
        weights_H.append(weight_PNN.sum(0))
    if heads.head_H is None:
        return weights_H
    return [weights_H[head] for head in heads.head_H.tolist()]


@torch.no_grad()
@each_kind(OPTIONS)
def test_weights_are_those_of_the_oracle(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    monkeypatch.setattr(weights, "KEYS", 10)
    attention, x_1NE = list(weights.layer_inputs(tiny_model(**kind), tokens(batch=1)))[2]
    for group in weights.groups_of(attention, x_1NE).values():
        blocks = list(weights.weight_blocks(group, AT))
        expected = oracle_weights(group)
        assert [block.shape[-1] for block in blocks] == [10, 10, 4]
        for head, weight_PN in enumerate(torch.cat(blocks, dim=-1)):
            torch.testing.assert_close(weight_PN, expected[head][AT], rtol=0, atol=1e-12)


def test_what_a_head_reads_on_average() -> None:
    weight_PN = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.25, 0.0, 0.25, 0.5]])
    told = weights.summary(weight_PN, torch.tensor([0, 3]))
    assert told == {"reads_share": 0.5, "keys": 3, "distance": 1, "farthest": 3, "self_weight": 0.5}
    assert weights.summary(weight_PN[:1], torch.tensor([0])) == {"reads_share": 0}


def apart(p_NN: Tensor, q_NN: Tensor) -> float:
    """Return the mean divergence where both read something; scipy gives its root."""
    both_N = (p_NN.sum(-1) > 0.5) & (q_NN.sum(-1) > 0.5)
    return float(np.mean(jensenshannon(p_NN[both_N].T, q_NN[both_N].T) ** 2))


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{"positions": "rotary"}, {"selection": "topk", "positions": "shaw"}], ids=str
)
def test_each_draw_is_a_mean_where_both_read(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    model = tiny_model(**options)
    tokens_BN = tokens(batch=2)
    monkeypatch.setattr(weights, "KEYS", 7)
    rows = divergence.divergences(model, tokens_BN, draws=3, seed=5)
    kinds = (("local", "local"), ("local", "routed"), ("routed", "routed"))
    assert [(row["layer"], *row["kind"]) for row in rows] == [
        (0, *kinds[0]),
        *((n, *k) for n in (1, 2) for k in kinds),
    ]
    inputs = list(weights.layer_inputs(model, tokens_BN))
    for row in rows:
        attention, x_BNE = inputs[row["layer"]]
        for r, nats in enumerate(row["nats_R"]):
            groups = weights.groups_of(attention, x_BNE[r % 2][None])
            first, second = (oracle_weights(groups[name]) for name in row["kind"])
            same = row["kind"][0] == row["kind"][1]
            pairs = itertools.combinations(first, 2) if same else itertools.product(first, second)
            assert min(abs(apart(p, q) - nats) for p, q in pairs) < 1e-9
    local = next(
        row for row in divergence.mean_over_layers(rows) if row["kind"] == ["local", "local"]
    )
    draws_LR = [row["nats_R"] for row in rows if row["kind"] == ["local", "local"]]
    assert local["mean"] == pytest.approx(np.mean(draws_LR))
    assert local["deviation"] == pytest.approx(np.mean(draws_LR, axis=0).std(ddof=1))
    assert divergence.divergences(model, tokens_BN, draws=3, seed=5) == rows
    assert divergence.divergences(tiny_model(heads=1, hidden=8, routing_heads=0), tokens()) == [], (
        "one head is no pair"
    )


@pytest.mark.parametrize("keys", ["shared", "separate", "projected"])
@pytest.mark.parametrize("selection", ["causal", "topk", "nearest"])
def test_telemetry_counts_the_members_of_a_whole_batch(selection: str, keys: str) -> None:
    sizes = {
        "layers": 1,
        "heads": 2,
        "routing_layers": 1,
        "routing_window": WINDOW,
        "positions": "none",
    }
    model = tiny_model(selection=selection, routing_keys=keys, **sizes).train()
    model.loss(tokens(batch=3, seed=1))
    told = read_telemetry(model)
    ((attention, x_BNE),) = weights.layer_inputs(model, tokens(batch=3, seed=1))
    times = []
    counts = []
    for b in range(3):
        heads = weights.groups_of(attention, x_BNE[b : b + 1])["routed"]
        (part,) = heads.parts
        assert isinstance(part, RangeReads) and isinstance(heads.pattern, Routing)
        times += torch.bincount(part.query.row_M, minlength=2 * LENGTH).tolist()
        counts += part.key.count_L.tolist()
    assert len(counts) == 3 * 2 * CLUSTERS
    expected = {
        "in_none": times.count(0) / len(times),
        "in_one": times.count(1) / len(times),
        "in_many": sum(t > 1 for t in times) / len(times),
        "empty_share": counts.count(0) / len(counts),
        "member_share": sum(counts) / len(counts) / WINDOW,
        "member_most": max(counts) / WINDOW,
    }
    assert told == pytest.approx(
        {f"routing/{name}": value for name, value in expected.items()}, rel=1e-4
    )


def test_spans_are_told_in_positions_and_nothing_without_routing() -> None:
    model = tiny_model(
        layers=2, heads=2, window=10, base="adaptive_span", routing_heads=0, routing_layers=0
    )
    spans = [heads for heads in model.modules() if isinstance(heads, AdaptiveSpan)]
    with torch.no_grad():
        spans[0].share_H.copy_(torch.tensor([0.1, 0.7]))
        spans[1].share_H.copy_(torch.tensor([-0.2, 0.2]))
    assert read_telemetry(model) == pytest.approx({"span/mean": 2.5, "span/max": 7})


SIZES = [1, 6, 24]
FULL = {"base": "full", "routing_layers": 0, "positions": "none"}
ONE_CLUSTER = {
    "selection": "nearest",
    "routing_layers": 3,
    "routing_heads": 4,
    "routing_clusters": 1,
}
LOOKING_BACK = {**ONE_CLUSTER, **TIED, "routing_window": LENGTH}


@torch.no_grad()
@pytest.mark.parametrize(("back", "options"), [(0, FULL), (5, LOOKING_BACK)], ids=str)
def test_what_is_kept_is_what_the_rule_reads(back: int, options: Any) -> None:
    model = tiny_model(**options)
    config = tiny_config(**options)
    N = LENGTH - back
    made = nn.ModuleList(coverage.selections(config, layer, SIZES, block=2) for layer in range(3))
    for seed in range(2):
        coverage.fit(config, model, made, tokens(batch=3, seed=seed))
    ids_1N = tokens(batch=1, seed=9)
    found_LSZ3 = np.reshape(
        coverage.measure(config, model, made, ids_1N, back), (3, -1, len(SIZES), 3)
    )
    attention, x_1NE = list(weights.layer_inputs(model, ids_1N))[
        -1
    ]  # below, units that return have equal scores
    group = list(weights.groups_of(attention, x_1NE).values())[coverage.full_group(config, 2)[0]]
    given = group[1]
    weight_HNN = torch.stack(oracle_weights(group))[:, back:, :N].tril()
    pairs = itertools.product(range(len(coverage.NAMES)), range(len(SIZES)))
    of = zip(pairs, made[-1], strict=True)  # type: ignore[arg-type]
    for (s, z), each in of:
        moved = each.inputs(given.q_BHND[:, :, back:], given.k_BHND[:, :, :N], None)
        read_HNN = torch.stack([each.rule(moved, head, False).any(0) for head in range(4)])
        expected = [
            float(x.double().sum(-1).mean()) for x in (weight_HNN, weight_HNN * read_HNN, read_HNN)
        ]
        np.testing.assert_allclose(
            found_LSZ3[-1, s, z], expected, rtol=1e-9, err_msg=f"{coverage.NAMES[s]} {SIZES[z]}"
        )
    assert found_LSZ3[:, :, -1, 1] == pytest.approx(found_LSZ3[:, :, -1, 0]), (
        "as many keys as there are keep all"
    )


def test_shares_at_equal_keys_are_linear_between_sizes() -> None:
    found_KZ3 = np.array([[[0.5, 0.1, 2.0], [0.5, 0.3, 4.0]], [[0.4, 0.2, 2.0], [0.4, 0.4, 4.0]]])
    at_three = coverage.at_keys(found_KZ3, 3)
    assert at_three == pytest.approx(
        {"keys": 3, "share": (0.4 + 0.75) / 2, "error": 0.175, "of all": 0.25}
    )
    assert coverage.at_keys(found_KZ3[:1, ::-1], 1) == pytest.approx(
        {"keys": 1, "share": 0.1, "error": None, "of all": 0.05}
    )
    assert coverage.at_keys(found_KZ3, 9)["keys"] == 4, "no more than the largest size reads"


POSITIONS = np.array([0, 1, 7, 15, 23])
TOKENS = np.random.default_rng(0).integers(VOCABULARY, size=80).astype(np.uint8)
WINDOWS = [Window(start, start + LENGTH, start) for start in (0, 24, 50)]


def test_ranges_of_position_cover_the_window_with_their_errors() -> None:
    rows = losses.by_position(np.array([[1.0] * 10, [3.0] * 10]), 4)
    assert [(row["first"], row["last"]) for row in rows] == [(0, 2), (3, 5), (6, 7), (8, 9)]
    assert all(row["bits"] == 2 and row["error"] == pytest.approx(1) for row in rows)
    assert [row["error"] for row in losses.by_position(np.ones((1, 3)), 16)] == [None] * 3


@pytest.mark.parametrize("length", [17, 32, 100, 3072])
def test_each_level_scores_the_second_half_once_behind_enough_context_and_gains_are_paired(
    length: int,
) -> None:
    levels: list[list[int]] = []

    def score(spans: Sequence[Window]) -> list[np.ndarray]:
        """A unit costs one bit more for each that it lacks of 16 before it."""
        context = spans[0].first - spans[0].start
        assert all(span.first - span.start == context >= span.stop - span.first for span in spans)
        levels.append([at for span in spans for at in range(span.first, span.stop)])
        return [
            np.array([16.0 - min(16, at - span.start) for at in range(span.first, span.stop)])
            for span in spans
        ]

    rows = losses.by_context(score, windows(2 * length, length))
    half = length // 2
    assert levels == [[*range(length - half, length), *range(2 * length - half, 2 * length)]] * len(
        rows
    )
    assert [row["context"][0] for row in rows] == (
        [half >> n for n in range(8) if half >> n >= 8] if half > 15 else []
    )
    if length == 32:
        first, second = rows
        assert (first["context"], first["bits"], first["gain"]) == ([16, 31], 0, 0)
        assert (second["context"], second["gain"], second["gain_error"]) == ([8, 15], 4.5, 0)


@torch.no_grad()
@pytest.mark.parametrize("selection", ["topk", "causal"])
def test_each_way_of_scoring_is_what_it_says_and_who_sees_no_future_pays_nothing(
    selection: str,
) -> None:
    model = tiny_model(length=LENGTH, selection=selection, layers=2, routing_window=4)
    paid = losses.price(model, TOKENS, WINDOWS, POSITIONS)
    for k, (start, _, _) in enumerate(WINDOWS):
        window_BN = torch.from_numpy(TOKENS[start : start + LENGTH].astype(np.int64))[None]
        whole, streamed = (model.loss(window_BN, streaming)[0][0] for streaming in (False, True))
        for at, p in enumerate(POSITIONS.tolist()):
            alone = model.loss(window_BN[:, : p + 1])[0][0, p]
            found = [paid[way][k, at] * math.log(2) for way in (RERUN, TEACHER_FORCED, STREAMING)]
            assert found == pytest.approx(
                [float(alone), float(whole[p]), float(streamed[p])], rel=1e-12
            )
    leak, competing, together = (found["bits"] for found in losses.differences(paid).values())
    assert together == pytest.approx((paid[STREAMING] - paid[TEACHER_FORCED]).mean(), abs=1e-12)
    assert leak + competing == pytest.approx(together, abs=1e-12)
    assert (
        (abs(leak) > 1e-4)
        == (np.abs(paid[STREAMING] - paid[RERUN]).max() > 1e-3)
        == (selection == "topk")
    )


def test_standard_errors_are_over_positions_and_over_windows() -> None:
    base = np.zeros((2, 3))
    rerun = np.array([[1.0, 2, 3], [5, 6, 7]])
    found = losses.differences({TEACHER_FORCED: base, RERUN: rerun, STREAMING: base})["leak_gives"]
    assert found["bits"] == pytest.approx(4)
    assert found["over_positions"] == pytest.approx(math.sqrt(28 / 5 / 6))
    assert found["over_windows"] == pytest.approx(2)
