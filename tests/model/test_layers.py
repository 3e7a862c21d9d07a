"""Layers by their definitions: feed-forward, likelihoods, bands, blocks, positions, heads."""

import dataclasses
import importlib.util
import itertools
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rtx.attention import Random
from rtx.attention.centroids import after_step
from rtx.attention.indexer import Indexer
from rtx.attention.pattern import Pattern
from rtx.attention.positional import Full
from rtx.model import likelihood, linear
from rtx.model.block import Block, FeedForward
from rtx.model.key_mix import KeyMix
from rtx.model.likelihood import AdaptiveSoftmax, Bands, token_nats
from rtx.model.linear import Linear
from rtx.model.multihead import MultiheadAttention
from rtx.model.positions import LearnedPositions, rotate
from rtx.model.transformer import Transformer
from rtx.settings.derived import layer_patterns
from rtx.settings.schema import HardwareConfig
from tests.helpers.tiny_models import (
    BY_QUERY,
    POSITIONS,
    TIED,
    Kind,
    check_alike,
    check_streams,
    tiny_config,
    tiny_model,
    tokens,
)


def feed_forward(parts: int, ffn: str = "gelu", dropout: float = 0.0) -> FeedForward:
    torch.manual_seed(0)
    return FeedForward(
        dataclasses.replace(tiny_config().model, ffn=ffn, ffn_parts=parts, ffn_dropout=dropout)
    ).double()


@pytest.mark.parametrize("ffn", ["gelu", "relu", "geglu", "swiglu"])
@pytest.mark.parametrize("parts", [1, 2, 3, 14, 4096])
def test_a_feed_forward_layer_in_any_number_of_parts_is_that_of_the_definition(
    ffn: str, parts: int
) -> None:
    layer = feed_forward(parts, ffn)
    x_BNE = torch.randn(2, 7, 16, dtype=torch.float64).requires_grad_()
    inner = F.linear(x_BNE, layer.inner.weight, layer.inner.bias)
    if ffn == "geglu":
        wide = inner[..., :24] * F.gelu(inner[..., 24:], approximate="tanh")
    elif ffn == "swiglu":
        gate = inner[..., 24:]
        wide = inner[..., :24] * gate / (1 + torch.exp(-gate))
    else:
        wide = (
            inner.clamp(min=0)
            if ffn == "relu"
            else 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
        )
    expected = F.linear(wide, layer.outer.weight, layer.outer.bias)
    check_alike(layer(x_BNE), expected, [x_BNE, *layer.parameters()], 1e-12)
    with torch.no_grad():
        torch.testing.assert_close(layer(x_BNE), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN on this machine"
)
@pytest.mark.parametrize("bias", [True, False])
def test_large_products_in_float32_are_onednns_and_those_of_the_definition(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "LARGE", 120 * 12 * 20)
    layer = Linear(12, 20, bias=bias)
    x_BNE = torch.randn(40, 3, 12).transpose(0, 1).requires_grad_()
    leaves = [x_BNE, *layer.parameters()]
    found = [layer(x_BNE)]
    for products in ("onednn", "torch"):
        config = dataclasses.replace(tiny_config(), hardware=HardwareConfig(products=products))
        assert {
            each.products for each in Transformer(config, 11).modules() if isinstance(each, Linear)
        } == {products}
    layer.products = "onednn"
    check_alike(layer(x_BNE), F.linear(*(leaf.double() for leaf in leaves)).float(), leaves, 1e-4)
    found += [layer(x_BNE), layer(x_BNE[:, 1:])]
    with torch.autocast("cpu", torch.bfloat16):
        found += [layer(x_BNE), layer.double()(x_BNE.double())]
    assert [type(y.grad_fn).__name__.startswith("Product") for y in found] == [
        False,
        True,
        False,
        False,
        False,
    ]


def test_the_backward_pass_drops_the_units_that_the_forward_pass_dropped() -> None:
    layer = feed_forward(3, dropout=0.5).train()
    x_BNE = torch.randn(2, 7, 16, dtype=torch.float64).requires_grad_()
    losses = []
    for step in (1e-6, -1e-6):
        torch.manual_seed(5)
        losses.append(float(layer(x_BNE.detach() + step).sum().detach()))
    torch.manual_seed(5)
    (slope_BNE,) = torch.autograd.grad(layer(x_BNE).sum(), x_BNE)
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(float(slope_BNE.sum()), rel=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 4, 13, 14, 99])
def test_nats_are_minus_the_logarithm_of_the_share_in_allowed_parts(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ((2, 7, 5), (11, 5), (11,))
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]
    hidden, weight, bias = leaves
    target_BN = torch.arange(14).view(2, 7) % 11
    expected = (
        -(hidden @ weight.T + bias).softmax(-1).gather(-1, target_BN[..., None])[..., 0].log()
    )
    sizes = []
    linear = F.linear
    monkeypatch.setattr(
        likelihood.F, "linear", lambda *given: sizes.append(len(given[0]) * 11) or linear(*given)
    )
    monkeypatch.setattr(likelihood, "MAX_LOGITS", rows * 11)
    check_alike(token_nats(hidden, weight, bias, target_BN), expected, leaves, 1e-12)
    assert max(sizes) <= rows * 11 and sum(sizes) == (1 if rows >= 14 else 2) * 14 * 11, (
        "once more backward"
    )


def test_vectors_of_bands_are_the_same_where_every_band_is_asked_for_all_words() -> None:
    """As a GPU computes them: no shape depends on which words there are."""
    torch.manual_seed(0)
    bands = likelihood.Bands([3, 7, 11], 16, 2).double()
    bands.initialise(as_output=False)
    ids = torch.tensor([[0, 2, 3, 6], [7, 10, 5, 10]])
    leaves = [*bands.parameters()]
    expected = bands.gathered(ids)
    found = bands.masked(ids)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(x.square().sum(), leaves) for x in (expected, found))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


LIGER = """
import torch
from rtx.model.likelihood import fused_mean_nats, token_nats

torch.manual_seed(0)
leaves = [torch.randn(size, requires_grad=True) for size in ((2, 7, 16), (11, 16), (11,))]
target_BN = torch.randint(11, (2, 7))
plain, fused = token_nats(*leaves, target_BN).mean(), fused_mean_nats(*leaves, target_BN)
torch.testing.assert_close(fused, plain)
for factor in (1.0, 0.5):
    expected = torch.autograd.grad(factor * plain, leaves, retain_graph=True)
    gradients = torch.autograd.grad(factor * fused, leaves, retain_graph=True)
    torch.testing.assert_close(gradients, expected)
    fused = fused_mean_nats(*leaves, target_BN)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="Liger-Kernel is not installed"
)
def test_the_fused_loss_and_its_gradients_are_those_of_the_mean() -> None:
    """Triton's interpreter runs its kernels; its variable must be set before they are imported."""
    subprocess.run(
        [sys.executable, "-c", LIGER], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True
    )


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_block_puts_its_norms_where_it_says(norm: str) -> None:
    block = tiny_model(norm=norm).blocks[0]
    assert isinstance(block, Block)
    x = torch.randn(2, 24, 16, dtype=torch.float64)
    first = block.attention_norm
    second = block.feed_forward_norm
    for each in (first, second):
        assert isinstance(each, nn.LayerNorm)
        torch.nn.init.normal_(each.weight)
    if norm == "pre":
        x1 = x + block.attention(first(x))[0]
        expected = x1 + block.feed_forward(second(x1))
    else:
        x1 = first(x + block.attention(x)[0])
        expected = second(x1 + block.feed_forward(x1))
    torch.testing.assert_close(block(x)[0], expected, rtol=1e-12, atol=1e-12)


def test_angles_are_exact_at_far_positions() -> None:
    x = torch.ones(1, 1, 1, 64)
    expected = rotate(x.double(), first=8191)
    torch.testing.assert_close(rotate(x, first=8191), expected.float(), rtol=1e-6, atol=1e-6)


def test_blocks_alone_ask_for_no_summary_columns() -> None:
    (group, *_) = MultiheadAttention(
        tiny_config(base="fixed_block", stride=4, summary=8), layer=0
    ).head_groups()
    assert group.pattern.cache_size == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("axes", [(10,), (2, 4, 3)])
def test_learned_positions_add_up_one_vector_for_each_axis_and_end(axes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    positions = LearnedPositions(axes, 4000)
    N = math.prod(axes)
    places = itertools.product(*map(range, axes))
    rows: list[Any] = [
        sum(table[i] for table, i in zip(positions.tables, at, strict=True)) for at in places
    ]
    expected = torch.stack(rows)
    assert positions.length == N and float(expected.detach().std()) == pytest.approx(0.02, rel=0.05)
    torch.testing.assert_close(positions(0, N), expected)
    torch.testing.assert_close(torch.cat([positions(i, 1) for i in range(N)]), expected)
    with pytest.raises(
        ValueError, match=rf"position {N}: learned positions cover 0 to {N - 1} \(data.length\)"
    ):
        positions(N - 3, 4)


@torch.no_grad()
@pytest.mark.parametrize("positions", POSITIONS)
def test_positions_matter(positions: str) -> None:
    # With full attention and no position terms, a permutation of the past changes nothing at the
    # last position.
    model = tiny_model(positions=positions, base="full", routing_layers=0, layers=1)
    swapped = tokens()
    swapped[:, [15, 21]] = swapped[:, [21, 15]]
    nats, other = (model.loss(x)[0][:, -1] for x in (tokens(), swapped))
    assert torch.allclose(nats, other, rtol=1e-12) == (positions == "none")


def attention(model: Transformer, layer: int) -> MultiheadAttention:
    return model.blocks[layer].attention  # type: ignore[union-attr,return-value]


def routed(model: Transformer, layer: int) -> Pattern:
    return attention(model, layer).groups["routed"].pattern  # type: ignore[return-value]


def test_base_patterns_share_the_heads_that_do_not_route_and_routing_layers_are_on_top() -> None:
    six: Kind = {"heads": 6, "hidden": 24, "routing_heads": 3}
    kinds: list[tuple[Kind, dict[str, int], dict[str, int]]] = [
        ({"base": "local+full"}, {"local": 2, "full": 2}, {"local": 1, "full": 1, "routed": 2}),
        (
            {"base": "local+lsh+local", **six},
            {"local": 4, "lsh": 2},
            {"local": 2, "lsh": 1, "routed": 3},
        ),
        ({"routing_heads": 4, "routing_layers": 3}, {"routed": 4}, {"routed": 4}),
    ]
    for options, first, routing in kinds:
        config = tiny_config(**options)
        assert [layer_patterns(config, layer) for layer in range(3)] == [first, routing, routing]
        assert tiny_model(**options).loss(tokens())[0].isfinite().all()


def test_the_logit_scale_is_that_of_the_configuration() -> None:
    for wish, scale in (("none", 1.0), ("sqrt_d", 0.5), ("unit", 0.25)):
        for selection in ("topk", "random", *BY_QUERY):
            assert (
                routed(tiny_model(selection=selection, routing_logit_scale=wish), 1).scale == scale
            )
    heads = routed(tiny_model(selection="topk", routing_logit_scale="unit"), 1)
    q_BHND = heads.inputs(torch.randn(1, 2, 24, 4, dtype=torch.float64), None, None).q_BHND
    torch.testing.assert_close(
        q_BHND.norm(dim=-1), torch.full((1, 2, 24), 4**0.5).double(), rtol=0, atol=2e-2
    )


@pytest.mark.parametrize("keys", ["separate", "projected"])
def test_the_loss_of_keys_bounds_how_far_queries_and_keys_of_a_position_are_apart(
    keys: str,
) -> None:
    layer = attention(tiny_model(routing_keys=keys, routing_key_loss=0.5), 1).train()
    weight = layer.qkv.weight
    x_BNE = torch.randn(2, 24, 16, dtype=torch.float64)
    apart = [
        torch.stack([(weight[8 + u, e] - weight[24 + u, e]).abs() for e in range(16)]).sum()
        for u in range(8)
    ]
    norms = [torch.stack(head).max() for head in (apart[:4], apart[4:])]
    loss = layer(x_BNE)[1]
    expected = 0.25 * (norms[0] + norms[1])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(each, weight)[0] for each in (loss, expected)))
    gap_BNHD = (x_BNE @ (weight[8:16] - weight[24:32]).T).abs().unflatten(-1, (2, 4))
    assert (gap_BNHD.amax(-1) <= torch.stack(norms) * x_BNE.abs().amax(-1, keepdim=True)).all()
    assert layer.eval()(x_BNE)[1] == 0


def test_random_heads_differ_by_layer_and_seed_alone() -> None:
    layers = [routed(tiny_model(selection="random", seed=s), n) for s in (0, 1) for n in (1, 2)]
    members = [layer.position_HCW for layer in layers if isinstance(layer, Random)]
    assert torch.equal(members[0], members[2]) and torch.equal(members[1], members[3]), (
        "weights do not matter"
    )
    assert not torch.equal(members[0], members[1])


def test_attention_dropout_reaches_every_kind_of_head() -> None:
    x_BNE = torch.randn(1, 24, 16, dtype=torch.float64)
    for selection in ("causal", "random", *BY_QUERY):
        layer = attention(tiny_model(attention_dropout=0.5, selection=selection), 1)
        layer.out.weight.data.copy_(torch.eye(16))
        layer.train()(x_BNE)  # centroids of probed keys start at those of the first pass
        calm = layer.eval()(x_BNE)[0]
        differs = (layer.train()(x_BNE)[0] != calm)[0].any(0).unflatten(0, (4, 4)).any(-1)
        assert differs.all() and torch.equal(layer.eval()(x_BNE)[0], calm)


K_BHND = torch.randn(3, 2, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shift", [0, 1, 2, 9])
@pytest.mark.parametrize("width", [1, 2, 3, 9])
def test_a_position_gets_the_key_so_far_back_and_the_convolution_adds_those_before(
    shift: int, width: int
) -> None:
    torch.manual_seed(0)
    mixed = KeyMix(2, 4, shift, width).double()
    if mixed.taps_HDK is not None:
        torch.nn.init.normal_(mixed.taps_HDK)
    expected = torch.zeros_like(K_BHND)
    for j in range(7):
        keys = [
            K_BHND[:, :, j - shift - back] if j >= shift + back else torch.zeros(2, 4)
            for back in range(width)
        ]
        expected[:, :, j] = keys[0]
        if mixed.taps_HDK is not None:
            conv = sum(mixed.taps_HDK[..., -1 - back] * key for back, key in enumerate(keys))
            expected[:, :, j] += F.silu(torch.as_tensor(conv))
    torch.testing.assert_close(mixed(K_BHND)[0], expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(KeyMix(2, 4, 0, width).double()(K_BHND)[0], K_BHND), "it starts at nothing"


def test_tied_keys_are_the_queries_before_them_at_any_distance() -> None:
    model = tiny_model(selection="exact", positions="rotary", **TIED)
    layer = attention(model, 2)
    assert layer.qkv.out_features == 16 + 8 + 16, "queries, keys of local heads alone, values"
    local, routed = layer.head_groups()
    projected = layer.project(torch.randn(2, 9, 16, dtype=torch.float64))
    q_BHND, k_BHND, _ = routed.queries_and_keys(*projected[1][:2])
    assert k_BHND is not None and torch.equal(k_BHND[:, :, 1:], q_BHND[:, :, :-1])
    assert local.rotate is not None and routed.rotate is None


@pytest.mark.parametrize("attend_self", [True, False])
def test_an_indexer_reads_everything_while_it_warms_up_and_then_a_window(attend_self: bool) -> None:
    model = tiny_model(selection="indexer", routing_warmup=2, routing_attend_self=attend_self)
    q, k, v = torch.randn(3, 2, 2, 24, 4, dtype=torch.float64)
    full, _ = Full(scale=0.5, attend_self=attend_self)(q, k, v)
    for step in range(4):
        for heads in (module for module in model.modules() if isinstance(module, Indexer)):
            out, _ = heads(q, k, v)
            read_N = heads.rule(heads.inputs(q, k, None), 0, False)[0].sum(-1)
            assert torch.equal(
                read_N, (torch.arange(24) + attend_self).clamp(1, 24 if step < 2 else 6)
            )
            if step < 2:
                torch.testing.assert_close(out, full, rtol=1e-10, atol=1e-10)
            else:
                assert not torch.isclose(out[:, :, 12:], full[:, :, 12:]).any()
        model.train().loss(tokens())
        after_step(model.eval())


@pytest.mark.parametrize("warmup", [0, 1000])
def test_an_indexer_learns_by_its_own_loss_alone(warmup: int) -> None:
    one_layer = {"layers": 1, "routing_layers": 1}
    options = {"selection": "indexer", "routing_warmup": warmup, "positions": "rotary"}
    model = tiny_model(**one_layer, **options).train()
    own = {
        name: p for name, p in model.named_parameters() if name.endswith(("query_HDE", "key_HDE"))
    }
    optimizer = torch.optim.Adam(own.values(), lr=0.03)
    losses = []
    for _ in range(30):
        model.zero_grad()
        _, auxiliary = model.loss(tokens())
        auxiliary.backward()
        for name, parameter in model.named_parameters():
            reached = parameter.grad is not None and bool((parameter.grad != 0).any())
            assert reached == (name in own), name
        optimizer.step()
        after_step(model)
        losses.append(float(auxiliary.detach()))
    assert 0 < losses[-1] < 0.7 * losses[0]
    assert float(model.eval().loss(tokens())[1]) == 0


@pytest.mark.parametrize("tied", [True, False])
def test_the_likelihood_is_that_of_the_definition_and_adds_up(tied: bool) -> None:
    torch.manual_seed(0)
    config = tiny_config(
        embedding="adaptive", cutoffs="3x7", band_factor=2, tie_embeddings=tied, norm="post"
    )
    model = Transformer(config, 11).double().eval()
    tokens_BN = tokens(batch=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    softmax = model.softmax
    hidden_RE = model(tokens_BN)[0].flatten(0, 1)
    assert softmax is not None and (softmax.bands is model.embedding.bands) == tied
    vectors = [
        table @ project_in.weight.T
        for table, project_in in zip(softmax.bands.tables, softmax.bands.project_in, strict=True)
    ]  # type: ignore[operator, union-attr]
    first, *rarer = (hidden_RE @ torch.cat(vectors).T + softmax.bias_V).split([3, 4, 4], dim=-1)
    head_RG = torch.cat(
        [first, hidden_RE @ softmax.other_bands.weight.T + softmax.other_bands.bias], dim=-1
    ).softmax(-1)
    bands = [head_RG[:, n, None] * band.softmax(-1) for n, band in enumerate(rarer, 3)]
    share_RV = torch.cat([head_RG[:, :3], *bands], dim=-1)
    torch.testing.assert_close(model.logits(hidden_RE).exp(), share_RV, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        share_RV.sum(-1), torch.ones(72, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )
    expected_BN = -share_RV.gather(1, tokens_BN.flatten()[:, None]).log().view(3, 24)
    nats_BN, _ = model.loss(tokens_BN)
    check_alike(nats_BN, expected_BN, (p for p in model.parameters() if p.requires_grad))
    read = model.embedding.bands
    assert read is not None and [table.shape for table in read.tables] == [(3, 16), (4, 8), (4, 4)]
    expected_E = read.project_in[1].weight @ read.tables[1][2]  # type: ignore[operator]
    torch.testing.assert_close(read(torch.arange(11))[5], expected_E, rtol=1e-12, atol=1e-12)
    check_streams(model, tokens_BN)


def test_rows_that_look_at_all_bands_are_one_graph_and_give_the_same_likelihood() -> None:
    torch.manual_seed(0)
    softmax = AdaptiveSoftmax(Bands([3, 7, 11], hidden=16, factor=2), 16).double()
    softmax.bands.initialise(as_output=True)
    hidden_RE = torch.randn(40, 16, dtype=torch.float64, requires_grad=True)
    target_R = torch.randint(0, 11, (40,))
    inputs = [hidden_RE, *softmax.parameters()]
    found = []
    graph = torch.compile(softmax.nats_of_all_bands, fullgraph=True, backend="aot_eager")
    for nats in (softmax.nats, softmax.nats_of_all_bands, graph):
        nats_R = nats(hidden_RE, target_R)
        gradients = torch.autograd.grad((nats_R * torch.linspace(1, 2, 40)).sum(), inputs)
        found.append([nats_R.detach(), *gradients])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[2], found[0], rtol=1e-12, atol=1e-12)
