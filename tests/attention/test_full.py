"""Full attention against the oracle: shapes, streaming, the future, and queries worked through in parts."""

from __future__ import annotations

import pytest
import torch
from oracle_cases import EDGES, PLAIN, Case, Leaves, assert_same, cases, leaves, qkv, tables
from padding_cases import padding

from rtx.attention.full import FullState, full
from rtx.attention.weights import Distances


def truth(case: Case, inputs: Leaves, mask_BN: torch.Tensor | None = None) -> torch.Tensor:
    return fast(case, inputs, mask_BN, backend="reference")


def fast(case: Case, inputs: Leaves, mask_BN: torch.Tensor | None = None, backend: str = "torch") -> torch.Tensor:
    options = {"scale": case.scale, "relative": tables(inputs), "mask_BN": mask_BN, "backend": backend}
    return full(*qkv(inputs), **options)


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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", cases(10))
def test_an_encoder_reads_both_ways(case: Case, masked: bool) -> None:
    case = case._replace(distances=0)
    mask_BN = padding(case) if masked else None
    assert_same(
        lambda x: full(*qkv(x), causal=False, mask_BN=mask_BN),
        lambda x: full(*qkv(x), causal=False, mask_BN=mask_BN, backend="reference"),
        leaves(case),
    )


def test_refusals() -> None:
    q = torch.randn(1, 2, 6, 4)
    with pytest.raises(ValueError, match=r"v_BHND has the shape \(1, 2, 5, 4\): must be \(1, 2, 6, 4\)"):
        full(q, q, q[:, :, :5])
    with pytest.raises(ValueError, match=r"k_BHND is of torch\.float64: must be of torch\.float32"):
        full(q, q.double(), q)
    with pytest.raises(ValueError, match=r"mask_BN is of torch\.int64: must be of torch\.bool"):
        full(q, q, q, mask_BN=torch.ones(1, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="they need causal=True"):
        full(q, q, q, causal=False, relative=Distances(torch.randn(3, 4), torch.randn(3, 4)))
    assert full(q[:, :, :0], q[:, :, :0], q[:, :, :0]).shape == (1, 2, 0, 4)
