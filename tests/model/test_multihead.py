"""How a layer's heads are shared out among patterns, and what each head is."""

import pytest
import torch
from tiny_models import BY_QUERY, Kind, tiny_config, tiny_model, tokens

from rtx.attention.pattern import Pattern
from rtx.attention.patterns import Local, Random
from rtx.model.multihead import MultiheadAttention, layer_patterns
from rtx.model.transformer import Transformer


def attention(model: Transformer, layer: int) -> MultiheadAttention:
    return model.blocks[layer].attention  # type: ignore[union-attr,return-value]


def routed(model: Transformer, layer: int) -> Pattern:
    return attention(model, layer).groups["routed"]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("options", "first", "routing"),
    [
        ({"base": "local+full"}, {"local": 2, "full": 2}, {"local": 1, "full": 1, "routed": 2}),
        (
            {"base": "local+lsh+local", "heads": 6, "hidden": 24, "routing_heads": 3},
            {"local": 4, "lsh": 2},
            {"local": 2, "lsh": 1, "routed": 3},
        ),
        ({"routing_heads": 4, "routing_layers": 3}, {"routed": 4}, {"routed": 4}),
    ],
)
def test_base_patterns_share_the_heads_that_do_not_route_and_routing_layers_are_on_top(
    options: Kind, first: dict[str, int], routing: dict[str, int]
) -> None:
    config = tiny_config(**options)
    assert [layer_patterns(config, layer) for layer in range(3)] == [first, routing, routing]
    assert tiny_model(**options).loss(tokens())[0].isfinite().all()


def test_a_layer_joins_its_heads_in_order() -> None:
    model = tiny_model(positions="none")
    layer, heads = attention(model, 1), routed(model, 1)
    x_BNE = torch.randn(2, 24, 16, dtype=torch.float64)
    q, k, v = layer.qkv(x_BNE).split([16, 8, 16], dim=-1)
    q, k, v = (x.unflatten(-1, (-1, 4)).transpose(1, 2) for x in (q, k, v))
    base, _ = Local(window=5, scale=0.5)(q[:, :2], k, v[:, :2])
    content, _ = heads(q[:, 2:], None, v[:, 2:])
    joined = torch.cat([base, content], dim=1).transpose(1, 2).reshape(2, 24, 16)
    torch.testing.assert_close(layer(x_BNE)[0], joined @ layer.out.weight.T)


def test_the_logit_scale_is_that_of_the_configuration() -> None:
    for wish, scale in (("none", 1.0), ("sqrt_d", 0.5), ("unit", 0.25)):
        for selection in ("topk", "random", *BY_QUERY):
            assert routed(tiny_model(selection=selection, routing_logit_scale=wish), 1).scale == scale
    heads = routed(tiny_model(selection="topk", routing_logit_scale="unit"), 1)
    q_BHND = heads.inputs(torch.randn(1, 2, 24, 4, dtype=torch.float64), None, None).q_BHND
    torch.testing.assert_close(q_BHND.norm(dim=-1), torch.full((1, 2, 24), 4**0.5).double(), rtol=0, atol=2e-2)


@pytest.mark.parametrize("keys", ["separate", "projected"])
def test_the_loss_of_keys_bounds_how_far_queries_and_keys_of_a_position_are_apart(keys: str) -> None:
    layer = attention(tiny_model(routing_keys=keys, routing_key_loss=0.5), 1).train()
    weight, x_BNE = layer.qkv.weight, torch.randn(2, 24, 16, dtype=torch.float64)
    apart = [torch.stack([(weight[8 + u, e] - weight[24 + u, e]).abs() for e in range(16)]).sum() for u in range(8)]
    norms = [torch.stack(head).max() for head in (apart[:4], apart[4:])]
    loss, expected = layer(x_BNE)[1], 0.25 * (norms[0] + norms[1])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(each, weight)[0] for each in (loss, expected)))
    gap_BNHD = (x_BNE @ (weight[8:16] - weight[24:32]).T).abs().unflatten(-1, (2, 4))
    assert (gap_BNHD.amax(-1) <= torch.stack(norms) * x_BNE.abs().amax(-1, keepdim=True)).all()
    assert layer.eval()(x_BNE)[1] == 0


def test_random_heads_differ_by_layer_and_seed_alone() -> None:
    layers = [routed(tiny_model(selection="random", seed=s), n) for s in (0, 1) for n in (1, 2)]
    members = [layer.position_HCW for layer in layers if isinstance(layer, Random)]
    assert torch.equal(members[0], members[2]) and torch.equal(members[1], members[3]), "weights do not matter"
    assert not torch.equal(members[0], members[1])


def test_attention_dropout_reaches_every_kind_of_head() -> None:
    x_BNE = torch.randn(1, 24, 16, dtype=torch.float64)
    for selection in ("causal", "random", *BY_QUERY):
        layer = attention(tiny_model(attention_dropout=0.5, selection=selection), 1)
        layer.out.weight.data.copy_(torch.eye(16))
        calm = layer.eval()(x_BNE)[0]
        differs = (layer.train()(x_BNE)[0] != calm)[0].any(0).unflatten(0, (4, 4)).any(-1)
        assert differs.all() and torch.equal(layer.eval()(x_BNE)[0], calm)
