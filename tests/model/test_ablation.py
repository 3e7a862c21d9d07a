"""Ablations take routing away and nothing else: the rest of the model computes as before, in both modes."""

import pytest
import torch
from test_decoding import streamed_nats
from tiny_models import BY_QUERY, EVERY, tiny_config, tiny_model, tokens
from torch import nn

from rtx.attention.patterns import Local
from rtx.attention.selection import normalise
from rtx.model.ablation import ablate
from rtx.model.transformer import Transformer

TOKENS_BN, HOWS = tokens(), ("routing", "local", "random")


def ablated(how: str, **options: object) -> Transformer:
    model = tiny_model(**options)  # type: ignore[arg-type]
    ablate(model, tiny_config(**options), how)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("selection", EVERY)
@pytest.mark.parametrize("how", HOWS)
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
    expected_BHND, _ = Local(window=6, attend_self=attend_self)(q_BHND, q_BHND, v_BHND)
    torch.testing.assert_close(out_BHND, expected_BHND, rtol=1e-12, atol=1e-12)
