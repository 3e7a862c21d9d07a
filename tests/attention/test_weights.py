"""Softmax attention inside blocks: masks, dropout, and Shaw's terms."""

from __future__ import annotations

import pytest
import torch
from oracle_cases import PLAIN, leaves, qkv, tables

import rtx.attention.chunked
from rtx.attention.chunked import tiles
from rtx.attention.full import full
from rtx.attention.local import local
from rtx.attention.shaw import Band, Dense, Distances, Sorted, Tile
from rtx.attention.weights import attend

RULES = {
    "band": Band(6),
    "sorted": Sorted(torch.arange(6).expand(3, 6) + 6, torch.arange(12).expand(3, 12)),
}


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("count", [1, 2, 5, 6, 9])
@pytest.mark.parametrize("rows", [slice(0, 6), slice(2, 5), slice(5, 6)], ids=str)
def test_rules_agree_with_distances_written_down(name: str, count: int, rows: slice) -> None:
    distance_QK = torch.arange(6)[:, None] + 6 - torch.arange(12)[None]
    seen_QK = (distance_QK >= 0) & (distance_QK < 6)
    part = Tile(slice(1, 3), rows, slice(rows.start + 1, rows.stop + 6))
    seen_QK = seen_QK[part.rows, part.columns]
    dense, rule = Dense(distance_QK.expand(3, -1, -1)), RULES[name]
    rule = Sorted(rule.query_GQ, rule.key_GK) if isinstance(rule, Sorted) else rule
    logits = torch.randn(2, *seen_QK.shape, dtype=torch.float64)
    terms = torch.randn(2, len(seen_QK), count, dtype=torch.float64)
    added = [logits.clone(), logits.clone()]
    for way, x_GQK in zip((dense, rule), added, strict=True):
        way.add(x_GQK, terms, part)
    torch.testing.assert_close(*(x_GQK[:, seen_QK] for x_GQK in added), rtol=1e-12, atol=1e-12)
    weights = logits * seen_QK
    expected = dense.collect(weights, count, part)
    torch.testing.assert_close(rule.collect(weights, count, part), expected, rtol=1e-12, atol=1e-12)


def test_distances_are_clipped_on_both_sides() -> None:
    rows = Dense(torch.tensor([[[-3, 0, 2, 3, 4, 900]]])).rows(4, Tile(slice(0, 1), slice(0, 1), slice(0, 6)))
    assert rows.tolist() == [[[0, 0, 2, 3, 3, 3]]]


def test_chunks_join_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = {name: leaf.requires_grad_() for name, leaf in leaves(PLAIN._replace(N=24, B=2, H=3, distances=5)).items()}
    results = []
    for most, rows in ((1 << 20, 32), (1 << 20, 1), (100, 3), (1, 1)):
        monkeypatch.setattr(rtx.attention.chunked, "MAX_SCORES_CPU", most)
        monkeypatch.setattr(rtx.attention.chunked, "MIN_ROWS", rows)
        out = local(*qkv(x), window=4, relative=tables(x))
        results.append([out, *torch.autograd.grad(out.square().sum(), list(x.values()))])
    for result in results[1:]:
        for part, whole in zip(result, results[0], strict=True):
            torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-13)


def test_tiles_hold_every_pair_that_is_read_and_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx.attention.chunked, "MIN_ROWS", 2)
    distance_QK = torch.arange(16)[:, None] + 16 - torch.arange(32)[None]
    mask_QK = (distance_QK >= 0) & (distance_QK < 16)
    times_GQK = torch.zeros(5, 16, 32)
    for tile in tiles(mask_QK, 5):
        times_GQK[tile] += 1
    assert (times_GQK[:, mask_QK] == 1).all() and times_GQK.max() == 1
    assert times_GQK.mean() == (16 + 3) / 32


def test_one_padded_block_is_not_taken_for_all_blocks() -> None:
    q, k, v = torch.randn(3, 1, 1, 128, 16, dtype=torch.float64).unbind(0)
    mask_BN = torch.ones(1, 128, dtype=torch.bool)
    mask_BN[:, :40] = False
    options = {"window": 64, "relative": Distances(*torch.randn(2, 8, 16, dtype=torch.float64)), "mask_BN": mask_BN}
    torch.testing.assert_close(local(q, k, v, **options), local(q, k, v, backend="reference", **options))


def test_no_two_tiles_drop_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx.attention.chunked, "MAX_SCORES_CPU", 4096)
    ones = torch.ones(1, 2 * 4096, 32, 1)  # blocks of 32 by 32: as many tiles as fill the generator's seeds by 4096
    out = attend(torch.zeros_like(ones), ones, ones, 1.0, dropout=0.5)[0, :, -1, 0]
    assert not torch.equal(out[:4], out[4096:4100]) and out[:4].unique().numel() > 1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_mixed_precision_works_in_float32(dropout: float) -> None:
    x = {name: leaf.float().requires_grad_() for name, leaf in leaves(PLAIN._replace(N=24, distances=5)).items()}
    results = []
    for enabled in (False, True):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = local(*qkv(x), window=4, relative=tables(x), dropout=dropout)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(x.values()))])
    for mixed, plain in zip(*results, strict=True):
        assert torch.equal(mixed, plain)


def test_the_gradient_is_that_of_the_same_dropout() -> None:
    x = {name: leaf.requires_grad_() for name, leaf in leaves(PLAIN._replace(N=12, distances=5)).items()}

    def read(*inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        q, k, v, keys, values = inputs
        return local(q, k, v, window=4, relative=Distances(keys, values), dropout=0.4)

    assert torch.autograd.gradcheck(read, [x[name] for name in ("q", "k", "v", "rk", "rv")])


@pytest.mark.parametrize("distances", [0, 5])
def test_dropout_zeroes_or_scales_weights(distances: int) -> None:
    x = leaves(PLAIN._replace(distances=distances, N=400))
    # With a window of 1 the only weight is 1: it is dropped, or divided by what is kept.
    calm = local(*qkv(x), window=1, relative=tables(x))
    wild = local(*qkv(x), window=1, relative=tables(x), dropout=0.75)
    kept_N = (wild != 0).any(-1)[0, 0]
    torch.testing.assert_close(wild[0, 0, kept_N], 4 * calm[0, 0, kept_N])
    assert 50 < kept_N.sum() < 150


@pytest.mark.parametrize("distances", [0, 5])
def test_dropout_of_full_attention(distances: int) -> None:
    x = leaves(PLAIN._replace(distances=distances))
    calm = full(*qkv(x), relative=tables(x))
    assert not torch.equal(calm, full(*qkv(x), relative=tables(x), dropout=0.5))


@pytest.mark.parametrize("distances", [0, 5])
def test_large_logits_stay_finite(distances: int) -> None:
    x = leaves(PLAIN._replace(distances=distances))
    q = (1e4 * x["q"]).float().requires_grad_()
    out = local(q, q, x["v"].float(), window=5, relative=tables({n: t.float() for n, t in x.items()}))
    out.sum().backward()
    assert out.isfinite().all() and q.grad is not None and q.grad.isfinite().all()
