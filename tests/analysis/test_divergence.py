"""The divergence of heads' attention: against the definition, its bounds, and what it is of known patterns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rtx.analysis import divergence
from rtx.analysis.divergence import divergences, drawn_pairs
from rtx.analysis.reading import groups_of, heads_of, layer_inputs
from rtx.model.block import Block
from rtx.model.transformer import Transformer
from tests.model.tiny_models import tiny_model, tokens


def by_definition(p_NM: Tensor, q_NM: Tensor) -> Tensor:
    """Return (KL(p | m) + KL(q | m)) / 2 of each row, with m = (p + q) / 2."""
    m_NM = (p_NM + q_NM) / 2
    entropy = lambda x: torch.xlogy(x, x).sum(-1)  # noqa: E731
    return (entropy(p_NM) + entropy(q_NM)) / 2 - entropy(m_NM)


@torch.no_grad()
def whole_weights(model: Transformer, layer: int, tokens_BN: Tensor) -> dict[tuple[str, int], Tensor]:
    """Return the weights `[B, N, N]` of every head of a layer."""
    attention, x_BNE = list(layer_inputs(model, tokens_BN))[layer]
    every_N = torch.arange(tokens_BN.shape[1])
    of_sequences = [groups_of(attention, x_1NE) for x_1NE in x_BNE.split(1)]
    return {
        (name, head): torch.stack([groups[name].read(head, every_N)[0] for groups in of_sequences])
        for name, heads in heads_of(attention).items()
        for head in range(heads)
    }


def test_the_sum_over_shared_keys_is_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    p_NM, q_NM = torch.rand(2, 7, 12, generator=generator, dtype=torch.float64).unbind()
    p_NM[:, ::3] = 0
    q_NM[2, :6] = 0
    p_NM, q_NM = p_NM / p_NM.sum(-1, keepdim=True), q_NM / q_NM.sum(-1, keepdim=True)
    torch.testing.assert_close(divergence.divergence(p_NM, q_NM), by_definition(p_NM, q_NM), rtol=1e-12, atol=1e-12)
    p_NM[3] = 0  # reads nothing
    assert len(divergence.divergence(p_NM, q_NM)) == 6


@pytest.mark.parametrize("positions", ["rotary", "shaw", "none"])
@pytest.mark.parametrize("selection", ["causal", "topk", "random"])
def test_each_draw_is_the_mean_over_positions_where_both_read(
    monkeypatch: pytest.MonkeyPatch, selection: str, positions: str
) -> None:
    model = tiny_model(selection=selection, positions=positions)
    tokens_BN = tokens(batch=2)
    monkeypatch.setattr(divergence, "MAX_PAIRS", 24 * 4 * 7)  # at least 7 positions at a time
    found = {(one.layer, one.kind): one for one in divergences(model, tokens_BN, draws=3, seed=5)}
    assert set(found) == {(0, ("local", "local"))} | {
        (layer, kind) for layer in (1, 2) for kind in (("local", "local"), ("local", "routed"), ("routed", "routed"))
    }
    for layer in (0, 1, 2):
        block = model.blocks[layer]
        assert isinstance(block, Block)
        weights = whole_weights(model, layer, tokens_BN)
        pairs = drawn_pairs(block.attention, 3, divergence.np.random.default_rng([5, layer]))
        for kind, of_kind in pairs.items():
            for r, (a, b) in enumerate(of_kind):
                p_NN, q_NN = weights[a][r % 2], weights[b][r % 2]
                both_N = (p_NN.sum(-1) > 0.5) & (q_NN.sum(-1) > 0.5)
                expected = by_definition(p_NN, q_NN)[both_N].mean()
                assert found[layer, kind].nats_R[r] == pytest.approx(float(expected), abs=1e-9)
    assert all(0 <= nats <= math.log(2) + 1e-12 for one in found.values() for nats in one.nats_R)


def test_weights_of_every_head_that_reads_sum_to_one() -> None:
    model = tiny_model(selection="causal", positions="shaw")
    for weight_BNN in whole_weights(model, 2, tokens()).values():
        total_BN = weight_BNN.sum(-1)
        assert bool(((total_BN - 1).abs().lt(1e-9) | total_BN.eq(0)).all())


def test_equal_heads_do_not_diverge_and_heads_of_other_keys_do_by_ln_2() -> None:
    p_NM = torch.eye(4, dtype=torch.float64)
    for q_NM, expected in ((p_NM, 0.0), (p_NM.roll(1, dims=1), math.log(2))):
        told_N = divergence.divergence(p_NM, q_NM)
        torch.testing.assert_close(told_N, torch.full((4,), expected, dtype=torch.float64))


def test_a_layer_of_one_head_has_no_pair() -> None:
    model = tiny_model(heads=1, hidden=8, routing_heads=0)
    assert divergences(model, tokens()) == []
