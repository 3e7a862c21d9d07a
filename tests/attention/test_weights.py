"""Softmax attention inside blocks: masks, dropout, and Shaw's terms."""

from __future__ import annotations

import pytest
import torch
from oracle_cases import PLAIN, leaves, qkv, tables

from rtx.attention.full import full
from rtx.attention.local import local
from rtx.attention.weights import Distances, attend, softmax_weights


def test_weights_are_those_of_attend() -> None:
    x = leaves(PLAIN._replace(distances=5))
    distance_QK = torch.arange(13)[:, None] - torch.arange(13)[None]
    mask_QK = (distance_QK >= 0) & (distance_QK != 2)
    weights = softmax_weights(x["q"], x["k"], 0.5, mask_QK)
    assert (weights[..., ~mask_QK] == 0).all()
    torch.testing.assert_close(weights @ x["v"], attend(x["q"], x["k"], x["v"], 0.5, mask_QK=mask_QK))
    relative = tables(x)
    assert relative is not None
    weights = softmax_weights(x["q"], x["k"], 0.5, None, relative, distance_QK)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_distances_are_clipped_on_both_sides() -> None:
    relative = Distances(torch.zeros(4, 2), torch.zeros(4, 2))
    assert relative.clip(torch.tensor([-3, 0, 2, 3, 4, 900])).tolist() == [0, 0, 2, 3, 3, 3]


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
