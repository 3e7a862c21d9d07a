"""Strided attention against the oracle: shapes, padding masks, streaming, exactly the multiples of the stride."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from oracle_cases import PLAIN, Case, Leaves, assert_same, cases, leaves, qkv, tables
from padding_cases import padding

from rtx.attention.full import full
from rtx.attention.strided import StridedHeads, StridedState, strided
from rtx.attention.weights import attend
from rtx.model.positions import Rotary


def truth(case: Case, inputs: Leaves, mask_BN: torch.Tensor | None = None) -> torch.Tensor:
    return fast(case, inputs, mask_BN, backend="reference")


def fast(case: Case, inputs: Leaves, mask_BN: torch.Tensor | None = None, backend: str = "torch") -> torch.Tensor:
    options = {"scale": case.scale, "relative": tables(inputs), "mask_BN": mask_BN, "backend": backend}
    return strided(*qkv(inputs), stride=case.W, **options)


@pytest.mark.parametrize("case", cases(20))
def test_oracle(case: Case) -> None:
    assert_same(lambda x: fast(case, x), lambda x: truth(case, x), leaves(case))


@pytest.mark.parametrize("case", cases(20))
def test_padding(case: Case) -> None:
    mask_BN = padding(case)
    assert_same(lambda x: fast(case, x, mask_BN), lambda x: truth(case, x, mask_BN), leaves(case))


def test_what_stands_in_padding_is_never_read() -> None:
    case = PLAIN._replace(B=2, N=17)
    inputs, mask_BN = leaves(case), padding(case)
    spoilt = {n: x.masked_fill(~mask_BN[:, None, :, None], float("nan")).requires_grad_() for n, x in inputs.items()}
    out = fast(case, spoilt, mask_BN)
    assert torch.equal(out, fast(case, inputs, mask_BN))
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in spoilt.values() if x.grad is not None)


@pytest.mark.parametrize("case", cases(8))
def test_streaming(case: Case) -> None:
    inputs = leaves(case)
    state = StridedState(case.W, case.scale, tables(inputs))
    q, k, v = qkv(inputs)
    steps = [state.step(q[:, :, i], k[:, :, i], v[:, :, i], i) for i in range(case.N)]
    torch.testing.assert_close(torch.stack(steps, 2), fast(case, inputs), rtol=1e-10, atol=1e-12)


def test_a_step_reads_a_key_for_each_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(q: torch.Tensor, k: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        read.append(k.shape[2])
        return attend(q, k, *rest, **options)

    monkeypatch.setitem(StridedState.step.__globals__, "attend", counted)
    state, x = StridedState(7), torch.randn(2, 3, 4)
    for position in range(40):
        state.step(x, x, x, position)
    assert read == [position // 7 + 1 for position in range(40)]


@pytest.mark.parametrize("stride", [1, 3, 8, 20, 30])
def test_exactly_the_multiples_of_the_stride(stride: int) -> None:
    q = torch.zeros(1, 1, 20, 20, dtype=torch.float64)
    weights = strided(q, q, torch.eye(20, dtype=torch.float64)[None, None], stride=stride)[0, 0]
    i, j = torch.arange(20)[:, None], torch.arange(20)[None]
    assert torch.equal(weights > 0, (j <= i) & ((i - j) % stride == 0))


def test_a_stride_of_one_is_full_attention() -> None:
    x = leaves(PLAIN._replace(distances=4, B=2))
    torch.testing.assert_close(strided(*qkv(x), stride=1, relative=tables(x)), full(*qkv(x), relative=tables(x)))


@pytest.mark.parametrize("changed", [1, 2, 5, 6, 7, 31, 44])
def test_the_future_moves_nothing(changed: int) -> None:
    case = PLAIN._replace(N=45, W=6, distances=9)
    inputs, other = leaves(case), leaves(case._replace(seed=99))
    moved = {n: torch.cat([inputs[n][:, :, :changed], other[n][:, :, changed:]], 2) for n in "qkv"}
    before, after = fast(case, inputs), fast(case, {**inputs, **moved})
    torch.testing.assert_close(after[:, :, :changed], before[:, :, :changed], rtol=1e-12, atol=1e-14)
    assert not torch.equal(after, before)


def test_heads_turn_queries_and_keys() -> None:
    inputs = leaves(PLAIN._replace(B=2, H=3))
    rotary, heads = Rotary(4), StridedHeads(stride=5, dropout=0.5).eval()
    q, k, v = qkv(inputs)
    out, loss = heads(q, k, v, rotate=rotary)
    torch.testing.assert_close(out, strided(rotary(q), rotary(k), v, stride=5))
    assert loss == 0
    state = heads.start()
    steps = [state.step(q[:, :, i], k[:, :, i], v[:, :, i], i, partial(rotary, first=i)) for i in range(q.shape[2])]
    torch.testing.assert_close(torch.stack(steps, 2), out)
    assert not torch.equal(heads.train()(q, k, v)[0], strided(q, k, v, stride=5)), "dropout while training"


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_precisions(kind: torch.dtype) -> None:
    x = leaves(PLAIN._replace(N=40))
    rough = strided(*(t.to(kind) for t in qkv(x)), stride=5)
    assert rough.dtype == kind
    torch.testing.assert_close(rough.double(), strided(*qkv(x), stride=5), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("shape", [(0, 2, 9, 4), (2, 2, 0, 4)])
def test_nothing_to_attend(shape: tuple[int, ...]) -> None:
    q = torch.zeros(shape, requires_grad=True)
    strided(q, q, q, stride=3).sum().backward()
    assert strided(q, q, q, stride=3).shape == shape


def test_a_stride_must_be_positive() -> None:
    q = torch.zeros(1, 1, 3, 2)
    with pytest.raises(ValueError, match="stride=0: must be at least 1"):
        strided(q, q, q, stride=0)
