"""Local attention against the oracle: shapes, exactly W keys, streaming with a bounded state."""

from __future__ import annotations

import pytest
import torch
from oracle_cases import PLAIN, Case, Leaves, assert_same, cases, leaves, qkv, tables
from padding_cases import padding

from rtx.attention.full import full
from rtx.attention.local import LocalState, local


def truth(case: Case, inputs: Leaves, mask_BN: torch.Tensor | None = None) -> torch.Tensor:
    return fast(case, inputs, mask_BN, backend="reference")


def fast(case: Case, inputs: Leaves, mask_BN: torch.Tensor | None = None, backend: str = "torch") -> torch.Tensor:
    options = {"scale": case.scale, "relative": tables(inputs), "mask_BN": mask_BN, "backend": backend}
    return local(*qkv(inputs), window=case.W, **options)


@pytest.mark.parametrize("case", cases(20))
def test_oracle(case: Case) -> None:
    assert_same(lambda x: fast(case, x), lambda x: truth(case, x), leaves(case))


@pytest.mark.parametrize("case", cases(5))
def test_streaming(case: Case) -> None:
    inputs = leaves(case)
    state = LocalState(case.W, case.scale, tables(inputs))
    q, k, v = qkv(inputs)
    steps = [state.step(q[:, :, i], k[:, :, i], v[:, :, i], i) for i in range(case.N)]
    torch.testing.assert_close(torch.stack(steps, 2), fast(case, inputs), rtol=1e-10, atol=1e-12)
    assert state.keys_BHWD is not None and state.keys_BHWD.shape[2] <= case.W


@pytest.mark.parametrize("window", [1, 3, 8, 20, 30])
def test_exactly_the_last_window_keys(window: int) -> None:
    q = torch.zeros(1, 1, 20, 20, dtype=torch.float64)
    weights = local(q, q, torch.eye(20, dtype=torch.float64)[None, None], window=window)[0, 0]
    i, j = torch.arange(20)[:, None], torch.arange(20)[None]
    assert torch.equal(weights > 0, (j <= i) & (j > i - window))


def test_a_window_over_the_whole_sequence_is_full_attention() -> None:
    x = leaves(PLAIN._replace(distances=4, B=2))
    whole = full(*qkv(x), relative=tables(x))
    torch.testing.assert_close(local(*qkv(x), window=13, relative=tables(x)), whole)


def test_memory_is_linear_in_length() -> None:
    # Scores of all pairs would need 32 TiB.
    q = torch.zeros(1, 1, 1 << 21, 1)
    assert local(q, q, q, window=16).shape == q.shape


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


def test_refusals() -> None:
    q = torch.randn(1, 2, 6, 4)
    with pytest.raises(ValueError, match="window=0: must be at least 1"):
        local(q, q, q, window=0)
    with pytest.raises(ValueError, match=r"mask_BN has the shape \(1, 5\): must be \(1, 6\)"):
        local(q, q, q, window=2, mask_BN=torch.ones(1, 5, dtype=torch.bool))
    assert local(q[:0], q[:0], q[:0], window=2).shape == (0, 2, 6, 4)
