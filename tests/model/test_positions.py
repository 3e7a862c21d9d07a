"""Position terms: rotary angles, learned vectors, and Shaw's tables by true distance."""

from __future__ import annotations

import pytest
import torch
from tiny_models import POSITIONS, tiny_model, tokens

from rtx.model.positions import LearnedPositions, Rotary


def test_a_rotated_dot_product_depends_on_the_distance_alone() -> None:
    rotary = Rotary(8)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    products = [(rotary(q, first=i + 5) * rotary(k, first=i)).sum() for i in (0, 1, 1000, 100_000)]
    torch.testing.assert_close(torch.stack(products), products[0].expand(4), rtol=1e-9, atol=1e-9)
    assert not torch.isclose(products[0], (rotary(q, first=6) * rotary(k)).sum())


def test_rotation_keeps_norms_and_position_0() -> None:
    x = torch.randn(2, 3, 9, 6)
    turned = Rotary(6)(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    torch.testing.assert_close(Rotary(6)(x[:, :, 4:], first=4).norm(), x[:, :, 4:].norm())


def test_a_rotation_in_parts_is_the_rotation() -> None:
    x = torch.randn(1, 1, 9, 6, dtype=torch.float64)
    parts = [Rotary(6)(x[:, :, i : i + 1], first=i) for i in range(9)]
    assert torch.equal(torch.cat(parts, 2), Rotary(6)(x))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_angles_are_exact_whatever_the_precision_around_them(kind: torch.dtype) -> None:
    x = torch.ones(1, 1, 1, 64)
    expected = Rotary(64).double()(x.double(), first=8191)
    torch.testing.assert_close(Rotary(64).to(kind)(x, first=8191), expected.float(), rtol=1e-6, atol=1e-6)


def test_learned_positions_end() -> None:
    positions = LearnedPositions((10,), 4)
    assert positions.length == 10
    assert torch.equal(positions(7, 3), positions.tables[0][7:])
    with pytest.raises(ValueError, match=r"position 10: learned positions cover 0 to 9 \(data.length\)"):
        positions(7, 4)


def test_axial_positions_add_up_one_vector_for_each_axis() -> None:
    positions = LearnedPositions((2, 4, 3), 5)
    rows, columns, colours = positions.tables
    expected = torch.stack([rows[r] + columns[c] + colours[d] for r in range(2) for c in range(4) for d in range(3)])
    torch.testing.assert_close(positions(0, 24), expected)
    torch.testing.assert_close(torch.cat([positions(i, 1) for i in range(24)]), expected)
    positions(0, 24).sum().backward()
    assert [int(table.grad[0, 0]) for table in positions.tables] == [12, 6, 8]  # type: ignore[index]


def test_axial_positions_are_as_large_as_learned_ones_and_end() -> None:
    torch.manual_seed(0)
    positions = LearnedPositions((16, 16, 3), 400)
    assert positions.length == 768
    assert abs(float(positions(0, 768).detach().std()) - 0.02) < 0.001
    with pytest.raises(ValueError, match=r"position 768: learned positions cover 0 to 767 \(data.length\)"):
        positions(768, 1)


@pytest.mark.parametrize("positions", POSITIONS)
def test_positions_matter(positions: str) -> None:
    # Without position terms and with full attention, a permutation of the past changes nothing at the last position.
    model = tiny_model(positions=positions, base="full", routing_layers=0, layers=1)
    swapped = tokens().clone()
    swapped[:, [15, 21]] = swapped[:, [21, 15]]
    with torch.no_grad():
        nats, other = (model.loss(x)[0][:, -1] for x in (tokens(), swapped))
    assert torch.allclose(nats, other, rtol=1e-12) == (positions == "none")


def test_distances_beyond_the_largest_are_one() -> None:
    model = tiny_model(positions="shaw", max_distance=9)
    assert model.blocks[1].attention.shaw["routed"].keys_MD.shape == (10, 4)  # type: ignore[union-attr]
    assert model.blocks[0].attention.shaw["local"].values_MD.shape == (10, 4)  # type: ignore[union-attr]
