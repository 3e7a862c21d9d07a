"""Layers by themselves, by their definitions: feed-forward layers, likelihood in parts, blocks, positions."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from tiny_models import POSITIONS, check_alike, tiny_config, tiny_model, tokens

from rtx.model import likelihood
from rtx.model.block import Block, FeedForward
from rtx.model.likelihood import token_nats
from rtx.model.positions import LearnedPositions, Rotary


def feed_forward(parts: int, ffn: str = "gelu", dropout: float = 0.0) -> FeedForward:
    torch.manual_seed(0)
    return FeedForward(dataclasses.replace(tiny_config().model, ffn=ffn, ffn_parts=parts, ffn_dropout=dropout)).double()


@pytest.mark.parametrize("ffn", ["gelu", "relu", "geglu"])
@pytest.mark.parametrize("parts", [1, 2, 3, 14, 4096])
def test_a_feed_forward_layer_in_any_number_of_parts_is_that_of_the_definition(ffn: str, parts: int) -> None:
    layer, x_BNE = feed_forward(parts, ffn), torch.randn(2, 7, 16, dtype=torch.float64).requires_grad_()
    inner = F.linear(x_BNE, layer.inner.weight, layer.inner.bias)
    if ffn == "geglu":
        wide = inner[..., :24] * F.gelu(inner[..., 24:], approximate="tanh")
    else:
        wide = inner.clamp(min=0) if ffn == "relu" else 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
    expected = F.linear(wide, layer.outer.weight, layer.outer.bias)
    check_alike(layer(x_BNE), expected, [x_BNE, *layer.parameters()], 1e-12)
    with torch.no_grad():
        torch.testing.assert_close(layer(x_BNE), expected, rtol=1e-12, atol=1e-12)


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
def test_nats_are_minus_the_logarithm_of_the_share_and_no_more_logits_are_held_than_allowed(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, generator = ((2, 7, 5), (11, 5), (11,)), torch.Generator().manual_seed(0)
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    hidden, weight, bias = leaves
    target_BN = torch.arange(14).view(2, 7) % 11
    expected = -(hidden @ weight.T + bias).softmax(-1).gather(-1, target_BN[..., None])[..., 0].log()
    sizes, linear = [], F.linear
    monkeypatch.setattr(likelihood.F, "linear", lambda *given: sizes.append(len(given[0]) * 11) or linear(*given))
    monkeypatch.setattr(likelihood, "MAX_LOGITS", rows * 11)
    check_alike(token_nats(hidden, weight, bias, target_BN), expected, leaves, 1e-12)
    assert max(sizes) <= rows * 11 and sum(sizes) == (1 if rows >= 14 else 2) * 14 * 11, "once more backward"


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_block_puts_its_norms_where_it_says(norm: str) -> None:
    block = tiny_model(norm=norm).blocks[0]
    assert isinstance(block, Block)
    x = torch.randn(2, 24, 16, dtype=torch.float64)
    first, second = block.attention_norm, block.feed_forward_norm
    with torch.no_grad():
        first.weight.normal_()
        second.weight.normal_()
    if norm == "pre":
        x1 = x + block.attention(first(x))[0]
        expected = x1 + block.feed_forward(second(x1))
    else:
        x1 = first(x + block.attention(x)[0])
        expected = second(x1 + block.feed_forward(x1))
    torch.testing.assert_close(block(x)[0], expected, rtol=1e-12, atol=1e-12)


def test_rotation_keeps_norms_and_position_0_and_products_depend_on_the_distance_alone() -> None:
    rotary = Rotary(8)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    products = [(rotary(q, first=i + 5) * rotary(k, first=i)).sum() for i in (0, 1, 1000, 100_000)]
    torch.testing.assert_close(torch.stack(products), products[0].expand(4), rtol=1e-9, atol=1e-9)
    assert not torch.isclose(products[0], (rotary(q, first=6) * rotary(k)).sum())
    assert torch.equal(rotary(q), q) and torch.isclose(rotary(q, first=4).norm(), q.norm())


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_angles_are_exact_whatever_the_precision_around_them(kind: torch.dtype) -> None:
    x = torch.ones(1, 1, 1, 64)
    expected = Rotary(64).double()(x.double(), first=8191)
    torch.testing.assert_close(Rotary(64).to(kind)(x, first=8191), expected.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axes", [(10,), (2, 4, 3)])
def test_learned_positions_add_up_one_vector_for_each_axis_and_end(axes: tuple[int, ...]) -> None:
    positions, N = LearnedPositions(axes, 5), math.prod(axes)
    places = itertools.product(*map(range, axes))
    expected = torch.stack([sum(table[i] for table, i in zip(positions.tables, at, strict=True)) for at in places])  # type: ignore[arg-type]
    assert positions.length == N
    torch.testing.assert_close(positions(0, N), expected)
    torch.testing.assert_close(torch.cat([positions(i, 1) for i in range(N)]), expected)
    with pytest.raises(ValueError, match=rf"position {N}: learned positions cover 0 to {N - 1} \(data.length\)"):
        positions(N - 3, 4)


@pytest.mark.parametrize("axes", [(768,), (16, 16, 3)])
def test_axial_positions_are_as_large_as_learned_ones(axes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    assert float(LearnedPositions(axes, 400)(0, 768).detach().std()) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("positions", POSITIONS)
def test_positions_matter(positions: str) -> None:
    # Without position terms and with full attention, a permutation of the past changes nothing at the last position.
    model = tiny_model(positions=positions, base="full", routing_layers=0, layers=1)
    swapped = tokens().clone()
    swapped[:, [15, 21]] = swapped[:, [21, 15]]
    with torch.no_grad():
        nats, other = (model.loss(x)[0][:, -1] for x in (tokens(), swapped))
    assert torch.allclose(nats, other, rtol=1e-12) == (positions == "none")
