"""How a layer's heads are shared out among patterns, and what each head is."""

from __future__ import annotations

import pytest
import torch
from tiny_models import BY_QUERY, tiny_config, tiny_model, tokens

from rtx.attention import oracle
from rtx.attention.centroids import all_centroids
from rtx.attention.pattern import Pattern
from rtx.attention.patterns import Local, Random
from rtx.attention.routing import Routing
from rtx.attention.softmax import Terms
from rtx.errors import UserError
from rtx.model.layer_heads import layer_patterns, routing_heads
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer


def attention(model: Transformer, layer: int) -> MultiheadAttention:
    """The attention of a layer."""
    return model.blocks[layer].attention  # type: ignore[union-attr,return-value]


def routed(model: Transformer, layer: int) -> Pattern:
    """The heads of a layer that `routing` describes."""
    return attention(model, layer).groups["routed"]  # type: ignore[return-value]


def test_base_patterns_share_the_heads_that_do_not_route() -> None:
    config = tiny_config(base="local+full", routing_heads=2)
    assert layer_patterns(config, 0) == {"local": 2, "full": 2}
    assert layer_patterns(config, 1) == {"local": 1, "full": 1, "routed": 2}
    assert tiny_model(base="local+full").loss(tokens())[0].isfinite().all()


def test_a_base_pattern_named_twice_takes_two_shares() -> None:
    sizes = {"base": "local+lsh+local", "heads": 6, "hidden": 24}
    config = tiny_config(**sizes, routing_heads=3)
    assert layer_patterns(config, 0) == {"local": 4, "lsh": 2}
    assert layer_patterns(config, 1) == {"local": 2, "lsh": 1, "routed": 3}
    assert tiny_model(**sizes, routing_heads=3).loss(tokens())[0].isfinite().all()
    with pytest.raises(UserError, match="needs in every layer a multiple of 3 heads that do not route"):
        tiny_config(**sizes, routing_heads=2)


def test_routing_layers_are_on_top() -> None:
    config = tiny_config(routing_layers=2, routing_heads=3)
    assert [routing_heads(config, layer) for layer in range(3)] == [0, 3, 3]


def test_routing_heads_have_no_key_matrix() -> None:
    model = tiny_model(routing_heads=3)
    assert attention(model, 0).qkv.weight.shape == (3 * 16, 16)
    assert attention(model, 1).qkv.weight.shape == (16 + 4 + 16, 16)
    assert isinstance(routed(model, 1), Routing) and list(attention(model, 0).groups) == ["local"]


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


@pytest.mark.parametrize("keys", ["separate", "projected"])
def test_the_loss_of_keys_bounds_how_far_queries_and_keys_of_a_position_are_apart(keys: str) -> None:
    """In loops by its definition, with gradients; and equation 14 of the ICLR version."""
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


@pytest.mark.parametrize("selection", ["topk", "causal", "nearest"])
def test_on_the_unit_ball_the_members_are_the_same_and_logits_those_of_unit_vectors(selection: str) -> None:
    heads = routed(tiny_model(selection=selection, positions="none", routing_logit_scale="unit"), 1)
    q_BHND, v_BHND = torch.randn(2, 1, 2, 24, 4, dtype=torch.float64)
    given, (store,) = heads.inputs(q_BHND, None, None), all_centroids(heads)
    unit = given._replace(q_BHND=given.q_BHND / 2)
    torch.testing.assert_close(unit.q_BHND.norm(dim=-1), torch.ones(1, 2, 24).double(), rtol=0, atol=1e-2)
    rules, out_BHND = [heads.rule(given, head, False) for head in range(2)], heads(q_BHND, None, v_BHND)[0]
    store.centroid_HCD /= 2
    store.threshold_HC /= 4
    for head, (unit_ND, rule) in enumerate(zip(unit.q_BHND[0], rules, strict=True)):
        assert torch.equal(heads.rule(unit, head, False), rule)
        expected_ND, _ = oracle.dense(unit_ND, unit_ND, v_BHND[0, head], rule, Terms(scale=1.0))
        torch.testing.assert_close(out_BHND[0, head], expected_ND)


def test_random_heads_differ_by_layer_and_seed_alone() -> None:
    layers = [routed(tiny_model(selection="random", seed=s), n) for s in (0, 1) for n in (1, 2)]
    members = [layer.position_HCW for layer in layers if isinstance(layer, Random)]
    assert torch.equal(members[0], members[2]) and torch.equal(members[1], members[3]), "weights do not matter"
    assert not torch.equal(members[0], members[1])


def test_all_heads_may_route() -> None:
    model = tiny_model(routing_heads=4, routing_layers=3)
    assert all(list(attention(model, n).groups) == ["routed"] for n in range(3))
    assert model.loss(tokens())[0].isfinite().all()


def test_attention_dropout_reaches_every_kind_of_head() -> None:
    x_BNE = torch.randn(1, 24, 16, dtype=torch.float64)
    for selection in ("causal", "random", *BY_QUERY):
        layer = attention(tiny_model(attention_dropout=0.5, selection=selection), 1)
        layer.out.weight.data.copy_(torch.eye(16))
        calm = layer.eval()(x_BNE)[0]
        differs = (layer.train()(x_BNE)[0] != calm)[0].any(0).unflatten(0, (4, 4)).any(-1)
        assert differs.all() and torch.equal(layer.eval()(x_BNE)[0], calm)
