"""RMSNorm, normalised queries and keys, and grouped queries in whole models."""

from typing import Literal

import pytest
import torch

from rtx.analysis.cost import cost
from rtx.errors import UserError
from rtx.model.ablation import ablate
from rtx.model.norm import make_norm, without_gradient
from rtx.settings.schema import ModelConfig
from tests.helpers.tiny_models import (
    SHALLOW,
    TIED,
    VOCABULARY,
    Kind,
    check_alike,
    check_streams,
    each_kind,
    gradients,
    tiny_config,
    tiny_model,
    tokens,
)

MODERN: Kind = {"norm_kind": "rmsnorm", "ffn": "swiglu", "qk_norm": True, "sinks": True}
GROUPED: list[Kind] = [
    {"kv_heads": 2, "selection": selection, "routing_keys": "separate", "routing_group": group}
    for group, selections in (
        ("shared", ("causal", "exact", "blocks", "indexer")),
        ("own", ("causal", "topk", "random", "probed", "exact")),
    )
    for selection in selections
]
KINDS: list[Kind] = [
    MODERN,
    {**MODERN, "norm": "post", "base": "lsh", "hash_buckets": 4, "window": 6},
    {**MODERN, "selection": "exact", **TIED},
    *({**MODERN, **kind} for kind in GROUPED),
    {"kv_heads": 2, "selection": "causal", **TIED},
    {"kv_heads": 2, "selection": "probed", "routing_group": "own", **TIED, "positions": "shaw"},
    {"kv_heads": 2, "selection": "topk", "routing_keys": "shared"},
    {"kv_heads": 2, "selection": "causal", "routing_keys": "projected"},
    {"kv_heads": 2, "selection": "blocks", "routing_compressed": True},
    {"kv_heads": 2, "base": "strided", "positions": "learned"},
    {"kv_heads": 2, "base": "adaptive_span", "attend_self": True},
    {"kv_heads": 1, "base": "local", "routing_heads": 4},
]


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_are_those_of_their_definitions(kind: Literal["layernorm", "rmsnorm"]) -> None:
    norm = make_norm(ModelConfig(norm_kind=kind, norm_eps=0.1), 6).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    x = torch.randn(2, 3, 6, dtype=torch.float64).requires_grad_()
    weight = norm.get_parameter("weight")
    if kind == "layernorm":
        centred = x - x.mean(-1, keepdim=True)
        expected = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
        expected = expected + norm.get_parameter("bias")
    else:
        expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    check_alike(norm(x), expected, [x, *norm.parameters()], 1e-12)
    detached = without_gradient(norm, x)
    assert torch.equal(detached, norm(x))
    gradient = torch.autograd.grad(detached.sum(), [x, weight], allow_unused=True)
    assert gradient[0] is not None and gradient[1] is None


@each_kind(KINDS)
def test_streams_give_what_a_pass_gives(kind: Kind) -> None:
    check_streams(tiny_model(**SHALLOW, **kind), tokens(length=13), 9)


@each_kind(KINDS)
def test_every_parameter_gets_a_finite_gradient_and_the_plan_counts_them_all(kind: Kind) -> None:
    kind = SHALLOW | kind
    model = tiny_model(**kind).train()
    found = gradients(model, tokens())
    names = {name for name, _ in model.named_parameters()}
    assert names == {*found} and all(gradient.isfinite().all() for gradient in found.values())
    assert cost(tiny_config(**kind), VOCABULARY).parameters == model.count_parameters()


@each_kind([kind for kind in KINDS if kind.get("selection") != "topk"])
def test_later_tokens_move_nothing_earlier(kind: Kind) -> None:
    model = tiny_model(**SHALLOW, **kind)
    one = tokens()
    other = one.clone()
    other[:, 15:] = (other[:, 15:] + 1) % VOCABULARY
    with torch.no_grad():
        ours, theirs = (model.loss(x)[0] for x in (one, other))
    torch.testing.assert_close(ours[:, :15], theirs[:, :15], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(ours[:, 15:], theirs[:, 15:])


def test_queries_and_keys_have_unit_mean_squares_before_they_are_rotated() -> None:
    model = tiny_model(base="full", routing_heads=0, routing_layers=0, qk_norm=True)
    (group,) = model.attentions()[0].head_groups()
    q, k = (torch.randn(1, 4, 5, 4, dtype=torch.float64) * 100 for _ in range(2))
    qk = group.inputs(q, k)
    for x in (qk.q_BHND, qk.k_BHND, qk.rotated_q_BHND, qk.rotated_k_BHND):
        square = x.square().mean(-1)
        torch.testing.assert_close(square, torch.ones_like(square), rtol=1e-4, atol=1e-4)


def test_grouped_queries_have_fewer_weights_and_copies_of_them_give_the_same() -> None:
    """A model with groups is the model whose heads of keys and values are copies."""
    kind: Kind = {"base": "local", "routing_heads": 0, "routing_layers": 0}
    small = tiny_model(kv_heads=2, **kind)
    large = tiny_model(**kind)
    tensors = small.state_dict()
    for name, weight in large.state_dict().items():
        if not name.endswith("qkv.weight"):
            continue
        queries, keys, values = tensors[name].split([16, 8, 8])
        copies = [
            x.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1) for x in (keys, values)
        ]
        tensors[name] = torch.cat([queries, *copies])
        assert tensors[name].shape == weight.shape
    large.load_state_dict(tensors)
    with torch.no_grad():
        torch.testing.assert_close(
            large.loss(tokens())[0], small.loss(tokens())[0], rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("how", ["routing", "local", "random"])
@pytest.mark.parametrize("group", ["shared", "own"])
def test_ablated_heads_keep_their_groups(how: str, group: str) -> None:
    kind: Kind = {"kv_heads": 2, "routing_keys": "separate", "routing_group": group}
    model = tiny_model(**kind)
    with torch.no_grad():
        before = model.loss(tokens())[0]
        ablate(model, tiny_config(**kind), how)
        after = model.loss(tokens())[0]
    assert after.isfinite().all() and not torch.allclose(before, after)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"kv_heads": 3}, "model.kv_heads=3 must divide model.heads=4"),
        ({"kv_heads": 8}, "model.kv_heads=8 must divide model.heads=4"),
        (
            {"kv_heads": 1, "routing_keys": "separate"},
            "model.kv_heads=1: 4 heads share keys, so every pattern needs a multiple of that, "
            "not 2 local heads",
        ),
        (
            {"kv_heads": 2, "routing_group": "own"},
            "routing.group=own is not for routing.keys=shared, where queries stand for keys",
        ),
        (
            {"kv_heads": 2, "routing_keys": "separate", "routing_key_loss": 0.1},
            "model.kv_heads=2 is not for routing.key_loss",
        ),
    ],
)
def test_groups_that_have_no_meaning_are_refused(kind: Kind, message: str) -> None:
    with pytest.raises(UserError) as refused:
        tiny_config(**kind)
    assert message in str(refused.value)
