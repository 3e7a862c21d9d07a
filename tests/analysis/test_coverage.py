"""What selections keep of full heads' attention: against the patterns' rules, and of attention made by hand."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rtx.analysis import coverage
from rtx.analysis.attention_weights import groups_of, layer_inputs
from rtx.attention import oracle
from rtx.attention.choices import Blocks, Exact
from rtx.attention.pattern import Pattern
from rtx.attention.patterns import Full, Local
from tests.model.tiny_models import tiny_config, tiny_model, tokens

LENGTH, SIZES = 24, [1, 4, 9, 24]
FULL = {"base": "full", "routing_layers": 0, "positions": "none"}
ONE_CLUSTER = {"routing_layers": 3, "routing_heads": 4, "routing_clusters": 1, "routing_window": LENGTH}
LOOKING_BACK = {**ONE_CLUSTER, "routing_keys": "tied", "routing_key_shift": 1, "routing_rotary": False}


def full_weights(q_BHND: Tensor, k_BHND: Tensor, given_by: Pattern) -> Tensor:
    """Return the oracle's weights of full heads of one sequence, `[H, N, N]`."""
    given = given_by.inputs(q_BHND, k_BHND, None)
    terms, rule = given_by.terms(q_BHND.shape[-1], None), given_by.rule(given, 0, False)
    heads = zip(q_BHND[0], k_BHND[0], strict=True)
    return torch.stack([oracle.dense(q_ND, k_ND, k_ND, rule, terms)[1][0] for q_ND, k_ND in heads])


@torch.no_grad()
@pytest.mark.parametrize(
    ("back", "options"), [(0, FULL), (5, FULL), (5, {**LOOKING_BACK, "selection": "nearest"})], ids=str
)
def test_what_is_kept_is_what_the_rule_reads(back: int, options: Any) -> None:
    model, config, N = tiny_model(**options), tiny_config(**options), LENGTH - back
    made = nn.ModuleList(coverage.selections(config, layer, SIZES, block=2) for layer in range(3))
    for seed in range(4):
        coverage.fit(config, model, made, tokens(batch=3, seed=seed))
    ids_1N = tokens(batch=1, seed=9)
    found_LSZ3 = np.reshape(coverage.measure(config, model, made, ids_1N, back), (3, -1, len(SIZES), 3))
    attention, x_1NE = list(layer_inputs(model, ids_1N))[-1]  # below, units that return have equal scores
    pattern, given, *_ = list(groups_of(attention, x_1NE).values())[coverage.full_group(config, 2)[0]]
    weight_HNN = full_weights(given.q_BHND, given.k_BHND, pattern)[:, back:, :N].tril()
    of = zip(itertools.product(range(len(coverage.NAMES)), range(len(SIZES))), made[-1], strict=True)  # type: ignore[arg-type]
    for (s, z), each in of:
        moved = each.inputs(given.q_BHND[:, :, back:], given.k_BHND[:, :, :N], None)
        read_HNN = torch.stack([each.rule(moved, head, False).any(0) for head in range(4)])
        expected = [float(x.double().sum(-1).mean()) for x in (weight_HNN, weight_HNN * read_HNN, read_HNN)]
        np.testing.assert_allclose(found_LSZ3[-1, s, z], expected, rtol=1e-9, err_msg=f"{coverage.NAMES[s]} {SIZES[z]}")
    assert found_LSZ3[:, :, -1, 1] == pytest.approx(found_LSZ3[:, :, -1, 0]), "as many keys as there are keep all"


def test_one_far_key_is_found_by_its_product_and_by_the_mean_of_its_block() -> None:
    q_1HND, k_1HND, back = torch.zeros(1, 1, 40, 4), torch.zeros(1, 1, 40, 4), 8
    q_1HND[..., 0], k_1HND[0, 0, 5, 0] = 1.0, 40.0
    weight_HNN, at_P = full_weights(q_1HND, k_1HND, Full()), torch.arange(20, 40)
    kept = [
        coverage.kept(pattern, pattern.inputs(q_1HND, k_1HND, None), weight_HNN[:, at_P], at_P, back)
        for pattern in (Exact(window=1), Blocks(1, 4, window=2, block=2), Local(window=4))
    ]
    assert all(far > 0.99 for far, _, _ in kept)
    assert [share > 0.99 for _, share, _ in kept] == [True, True, False]
    assert [keys for _, _, keys in kept] == [1, 3.5, 4], "a block, and the own one up to the query"


def test_shares_at_equal_keys_are_linear_between_sizes() -> None:
    found_KZ3 = np.array([[[0.5, 0.1, 2.0], [0.5, 0.3, 4.0]], [[0.4, 0.2, 2.0], [0.4, 0.4, 4.0]]])
    at_three = coverage.at_keys(found_KZ3, 3)
    assert at_three == pytest.approx({"keys": 3, "share": (0.4 + 0.75) / 2, "error": 0.175, "of all": 0.25})
    assert coverage.at_keys(found_KZ3[:1, ::-1], 1) == pytest.approx(
        {"keys": 1, "share": 0.1, "error": None, "of all": 0.05}
    )
    assert coverage.at_keys(found_KZ3, 9)["keys"] == 4, "no more than the largest size reads"
