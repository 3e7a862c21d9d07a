"""The adaptive span against the oracle: outputs, every gradient and that of the span; reach, streaming, padding."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from oracle_cases import PLAIN, Case, Leaves, assert_same, cases, leaves, qkv, tables

from rtx.attention import span as module
from rtx.attention.local import local
from rtx.attention.span import SpanHeads, adaptive_span, hold
from rtx.model.positions import Rotary

RAMPS = (1, 2, 5, 32)


def with_spans(case: Case) -> Leaves:
    """Return the case's inputs, and a span inside the window for each head."""
    generator = torch.Generator().manual_seed(50 + case.seed)
    return {**leaves(case), "z": case.W * torch.rand(case.H, generator=generator, dtype=torch.float64)}


def ramp_of(case: Case) -> int:
    return RAMPS[case.seed % len(RAMPS)]


def fast(case: Case, inputs: Leaves, mask_BN: torch.Tensor | None = None, backend: str = "torch") -> torch.Tensor:
    options = {"scale": case.scale, "relative": tables(inputs), "mask_BN": mask_BN, "backend": backend}
    return adaptive_span(*qkv(inputs), inputs["z"], window=case.W, ramp=ramp_of(case), **options)


def truth(case: Case, inputs: Leaves, mask_BN: torch.Tensor | None = None) -> torch.Tensor:
    return fast(case, inputs, mask_BN, backend="reference")


@pytest.mark.parametrize("block", [1, 3, 512])
@pytest.mark.parametrize("case", cases(20))
def test_oracle(case: Case, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    assert_same(lambda x: fast(case, x), lambda x: truth(case, x), with_spans(case))


@pytest.mark.parametrize("ramp", RAMPS)
def test_the_slope_of_the_output_along_the_span(ramp: int) -> None:
    x = leaves(PLAIN._replace(N=30, H=2, W=20))
    read = lambda z: adaptive_span(*qkv(x), z, window=20, ramp=ramp)  # noqa: E731
    span_H = torch.tensor([3.4, 11.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(read, (span_H,), eps=1e-6, atol=1e-8)


def test_the_reach_ends_where_the_weight_is_zero() -> None:
    q = torch.zeros(1, 2, 40, 40, dtype=torch.float64)
    v = torch.eye(40, dtype=torch.float64).expand(1, 2, 40, 40)
    weights = adaptive_span(q, q, v, torch.tensor([3.0, 30.0]), window=12, ramp=4)[0]
    x = torch.arange(40)[:, None] - torch.arange(40)
    assert torch.equal(weights[0] > 0, (x >= 0) & (x < 7))
    assert torch.equal(weights[1] > 0, (x >= 0) & (x < 12))
    row = weights[0, 39].flip(0)[:8]
    torch.testing.assert_close(row / row[0], torch.tensor([1, 1, 1, 1, 0.75, 0.5, 0.25, 0], dtype=torch.float64))


def test_a_span_of_the_window_is_local_attention() -> None:
    x = leaves(PLAIN._replace(N=50, H=2, B=2, distances=9))
    soft = adaptive_span(*qkv(x), torch.full((2,), 11.0), window=11, ramp=4, relative=tables(x))
    torch.testing.assert_close(soft, local(*qkv(x), window=11, relative=tables(x)))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_large_logits_and_endless_spans(backend: str) -> None:
    q, k, v = (x.detach() for x in qkv(leaves(PLAIN)))
    endless = torch.full((PLAIN.H,), float("inf"))
    options = {"window": 5, "ramp": 3, "backend": backend}
    out = adaptive_span(1e4 * q, 1e4 * k, v, endless, **options)
    torch.testing.assert_close(out, local(1e4 * q, 1e4 * k, v, window=5), rtol=1e-9, atol=1e-9)


def test_spans_of_another_type_lose_no_digits() -> None:
    q, k, v = (x.detach() for x in qkv(leaves(PLAIN)))
    span_H = torch.tensor([1.3] * PLAIN.H)
    fast, truth = (adaptive_span(q, k, v, span_H, window=7, ramp=3, backend=b) for b in ("torch", "reference"))
    torch.testing.assert_close(fast, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", [case for case in cases(20) if case.B == 2])
def test_padding_is_not_read_and_gets_zero(case: Case) -> None:
    inputs = with_spans(case)
    mask_BN = torch.ones(case.B, case.N, dtype=torch.bool)
    mask_BN[0, case.N // 2 :] = False
    mask_BN[1] = torch.rand(case.N, generator=torch.Generator().manual_seed(3)) < 0.6
    bad = {n: x.masked_fill(~mask_BN[:, None, :, None], float("nan")) if n in "qkv" else x for n, x in inputs.items()}
    out = fast(case, bad, mask_BN)
    assert (out.masked_select(~mask_BN[:, None, :, None]) == 0).all() and out.isfinite().all()
    half = {n: x[:1, :, : case.N // 2] if n in "qkv" else x for n, x in inputs.items()}
    if case.N > 1:
        torch.testing.assert_close(out[:1, :, : case.N // 2], fast(case, half), rtol=1e-10, atol=1e-12)
    moved = {n: x.where(mask_BN[:, None, :, None], 7.0) if n in "qkv" else x for n, x in inputs.items()}
    assert torch.equal(out, fast(case, moved, mask_BN))
    copies = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    fast(case, copies, mask_BN).square().sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in copies.values())


def test_all_real_is_no_mask_and_nothing_is_nothing() -> None:
    inputs = with_spans(PLAIN._replace(N=30))
    everything = torch.ones(1, 30, dtype=torch.bool)
    torch.testing.assert_close(fast(PLAIN, inputs, everything), fast(PLAIN, inputs))
    empty = torch.zeros(0, 1, 5, 4)
    assert adaptive_span(empty, empty, empty, torch.zeros(1), window=3).shape == empty.shape


def test_changing_the_future_moves_nothing() -> None:
    case = PLAIN._replace(N=45, W=12, distances=9)
    inputs, other = with_spans(case), leaves(case._replace(seed=99))
    before = fast(case, inputs)
    for prefix in (1, 2, 11, 12, 13, 31, 44):
        changed = {n: torch.cat([inputs[n][:, :, :prefix], 3 * other[n][:, :, prefix:]], dim=2) for n in "qkv"}
        after = fast(case, {**inputs, **changed})
        torch.testing.assert_close(after[:, :, :prefix], before[:, :, :prefix], rtol=1e-12, atol=1e-14)
        assert not torch.equal(after, before)


def heads_of(case: Case, shares: list[float], cost: float = 0.0) -> SpanHeads:
    heads = SpanHeads(case.H, window=case.W, ramp=ramp_of(case), cost=cost, scale=case.scale).double()
    with torch.no_grad():
        heads.share_H.copy_(torch.tensor(shares))
    return heads


@pytest.mark.parametrize("case", cases(8))
def test_streaming(case: Case) -> None:
    inputs = leaves(case)
    heads = heads_of(case, [0.4, 0.9, 0.1][: case.H])
    rotary = Rotary(case.D) if case.rotary else None
    state = heads.start(tables(inputs))
    q, k, v = qkv(inputs)
    with torch.no_grad():
        steps = []
        for i in range(case.N):
            rotate = None if rotary is None else partial(rotary, first=i)
            steps.append(state.step(q[:, :, i], k[:, :, i], v[:, :, i], i, rotate))
        whole, _ = heads(q, k, v, rotate=rotary, relative=tables(inputs))
    torch.testing.assert_close(torch.stack(steps, 2), whole, rtol=1e-10, atol=1e-12)
    assert state.keys_BHWD is not None and state.keys_BHWD.shape[2] <= case.W


def test_the_cost_is_the_weighted_mean_span_in_training_only() -> None:
    case = PLAIN._replace(H=2, W=10)
    heads, x = heads_of(case, [0.2, 0.6], cost=0.5), leaves(case)
    assert heads(*qkv(x))[1].item() == pytest.approx(0.5 * 4)
    assert heads.eval()(*qkv(x))[1] == 0
    assert SpanHeads(3, window=10).spans().tolist() == [0, 0, 0]


def test_a_span_outside_its_range_comes_back() -> None:
    x = torch.tensor([-0.1, -0.1, 0.5, 1.2, 1.2, 0.0], requires_grad=True)
    held = hold(x, 1.0)
    assert held.tolist() == [0, 0, 0.5, 1, 1, 0]
    held.backward(torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0]))
    assert x.grad is not None and x.grad.tolist() == [0, -1, 1, 1, 0, 1]


def test_memory_is_linear_in_length() -> None:
    # Scores of all pairs would need 4 TiB.
    q = torch.zeros(1, 1, 1 << 20, 1)
    assert adaptive_span(q, q, q, torch.zeros(1), window=1 << 20, ramp=16).shape == q.shape


def test_half_precision() -> None:
    x = with_spans(PLAIN._replace(N=40, W=12, D=8))
    q, k, v = (part.bfloat16() for part in qkv(x))
    out = adaptive_span(q, k, v, x["z"].float(), window=12, ramp=4)
    expected = adaptive_span(q.double(), k.double(), v.double(), x["z"], window=12, ramp=4)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("options", "said"), [({"window": 0}, "window=0"), ({"window": 3, "ramp": 0}, "ramp=0"), ({"window": 3}, "span_H")]
)
def test_what_is_refused(options: dict[str, int], said: str) -> None:
    q = torch.zeros(1, 1, 5, 4)
    with pytest.raises(ValueError, match=said):
        adaptive_span(q, q, q, torch.zeros(2 if said == "span_H" else 1), **options)  # type: ignore[arg-type]
