"""Full attention against the oracle: shapes, streaming, the future, and queries worked through in parts."""

from __future__ import annotations

import pytest
import torch
from oracle_cases import EDGES, Case, Leaves, assert_same, cases, leaves, oracle, qkv, tables

from rtx.attention import reference
from rtx.attention.full import FullState, full


def truth(case: Case, inputs: Leaves) -> torch.Tensor:
    return oracle(*qkv(inputs), lambda b, h: reference.full_sets, case.scale, tables(inputs))


def fast(case: Case, inputs: Leaves) -> torch.Tensor:
    return full(*qkv(inputs), scale=case.scale, relative=tables(inputs))


@pytest.mark.parametrize("case", cases())
def test_oracle(case: Case) -> None:
    assert_same(lambda x: fast(case, x), lambda x: truth(case, x), leaves(case))


def test_queries_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = EDGES[8]
    monkeypatch.setitem(full.__globals__, "MAX_SCORES", 7 * case.B * case.H * case.N)
    assert_same(lambda x: fast(case, x), lambda x: truth(case, x), leaves(case))


@pytest.mark.parametrize("case", cases(5))
def test_streaming(case: Case) -> None:
    inputs = leaves(case)
    state = FullState(case.scale, tables(inputs))
    q, k, v = qkv(inputs)
    steps = [state.step(q[:, :, i], k[:, :, i], v[:, :, i], i) for i in range(case.N)]
    torch.testing.assert_close(torch.stack(steps, 2), fast(case, inputs), rtol=1e-10, atol=1e-12)


def test_default_scale() -> None:
    inputs = qkv(leaves(EDGES[0]))
    torch.testing.assert_close(full(*inputs), full(*inputs, scale=0.5))
