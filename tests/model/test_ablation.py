"""Ablations take routing away and nothing else: the rest of the model computes as before, in both modes."""

from __future__ import annotations

import pytest
import torch
from test_decoding import streamed_nats
from tiny_models import BY_QUERY, EVERY, tiny_config, tiny_model, tokens
from torch import nn

from rtx.attention.patterns import Local
from rtx.attention.selection import normalise
from rtx.errors import UserError
from rtx.model.ablation import ablate, check_ablation
from rtx.model.transformer import Transformer

TOKENS_BN = tokens()


def ablated(how: str, **options: object) -> Transformer:
    """The same weights for every ablation."""
    model = tiny_model(**options)  # type: ignore[arg-type]
    ablate(model, tiny_config(**options), how)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("selection", EVERY)
@pytest.mark.parametrize("how", ["routing", "local", "random"])
@pytest.mark.parametrize("positions", ["rotary", "shaw"])
def test_an_ablated_model_streams_as_it_scores(selection: str, how: str, positions: str) -> None:
    if how == selection:
        return
    options = {"selection": selection, "positions": positions, **BY_QUERY.get(selection, {})}
    model = ablated(how, **options)
    with torch.no_grad():
        parallel_BN, _ = model.loss(TOKENS_BN)
        prefix_BN, _ = model.loss(TOKENS_BN, prefix=True)
        plain_BN, _ = ablated("none", **options).loss(TOKENS_BN)
    torch.testing.assert_close(prefix_BN, parallel_BN, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(streamed_nats(model, TOKENS_BN), parallel_BN, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(plain_BN, parallel_BN)


def test_silent_heads_are_the_model_with_the_output_columns_of_routing_heads_zero() -> None:
    with torch.no_grad():
        silent_BN, _ = ablated("routing").loss(TOKENS_BN)
        by_hand = tiny_model()
        for block in list(by_hand.blocks)[1:]:
            block.attention.out.weight[:, 8:] = 0.0  # type: ignore[union-attr,index] # two of four heads of four units
        expected_BN, _ = by_hand.loss(TOKENS_BN)
    torch.testing.assert_close(silent_BN, expected_BN, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attend_self", [True, False])
def test_the_local_swap_reads_the_last_window_of_queries(attend_self: bool) -> None:
    model = ablated("local", routing_attend_self=attend_self)
    heads: nn.Module = model.blocks[1].attention.groups["routed"]  # type: ignore
    torch.manual_seed(0)
    q_BHND, v_BHND = torch.randn(2, 2, 2, 17, 4, dtype=torch.float64)
    out_BHND, _ = heads(q_BHND, None, v_BHND)
    q_BHND = normalise(q_BHND)
    if attend_self:
        expected_BHND, _ = Local(window=6)(q_BHND, q_BHND, v_BHND)
    else:
        distance_NN = torch.arange(17)[:, None] - torch.arange(17)
        seen_NN = (distance_NN > 0) & (distance_NN < 6)
        seen_NN[0, 0] = True
        weights = (q_BHND @ q_BHND.mT / 2).masked_fill(~seen_NN, -torch.inf).softmax(-1)
        expected_BHND = weights @ v_BHND
    torch.testing.assert_close(out_BHND, expected_BHND, rtol=1e-12, atol=1e-12)


def test_only_routing_layers_change_and_none_changes_nothing() -> None:
    plain, untouched, silent = tiny_model(), ablated("none"), ablated("routing")
    assert torch.equal(plain.loss(TOKENS_BN)[0], untouched.loss(TOKENS_BN)[0])
    with torch.no_grad():
        x_BNE = plain.embedding(TOKENS_BN)
        assert torch.equal(plain.blocks[0](x_BNE)[0], silent.blocks[0](x_BNE)[0])
        assert not torch.equal(plain.blocks[1](x_BNE)[0], silent.blocks[1](x_BNE)[0])


@pytest.mark.parametrize("how", ["routing", "local", "random"])
@pytest.mark.parametrize("sizes", [{"routing_heads": 0}, {"routing_layers": 0}])
def test_a_model_without_routing_heads_is_refused(how: str, sizes: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"ablate={how}: the model has no routing heads"):
        check_ablation(tiny_config(**sizes), how)  # type: ignore[arg-type]


def test_random_heads_have_no_random_swap() -> None:
    with pytest.raises(UserError, match="random members already"):
        check_ablation(tiny_config(selection="random"), "random")
    check_ablation(tiny_config(selection="random"), "routing")
