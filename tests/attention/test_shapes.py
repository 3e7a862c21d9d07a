"""Shapes at the edge, all float types, and what backends and gradients share."""

from __future__ import annotations

import pytest
import torch
from cases import KINDS, Case, gradients, leaves, make, run, tensors

from rtx.attention.engine import MIN_NATIVE, native_refusal
from rtx.attention.softmax import Terms


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("empty", [{"B": 0}, {"N": 0}])
def test_nothing_in_gives_nothing_out_with_a_gradient(kind: str, empty: dict) -> None:
    case = Case(**empty)
    pattern = make(kind, case.with_(N=max(1, case.N)))
    here = tensors(pattern, case)
    out = run(pattern.train(), here)
    assert out.shape == here["v"].shape
    out.sum().backward()
    assert here["v"].grad is not None


@pytest.mark.parametrize("kind", ["full", "local", "strided", "fixed", "exact", "random"])
def test_no_heads(kind: str) -> None:
    case = Case(H=0)
    pattern = make(kind, case)
    assert run(pattern, tensors(pattern, case)).shape == (2, 0, case.N, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [{"N": 1}, {"N": 2, "W": 40}, {"N": 3, "C": 5}, {"N": 9, "W": 1}])
def test_windows_and_clusters_beyond_the_sequence(kind: str, size: dict) -> None:
    case = Case(**size)
    pattern = make(kind, case)
    here = tensors(pattern, case)
    out = run(pattern, here)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(out, leaves(pattern, here)).values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_float_type_gives_its_own(kind: str, dtype: torch.dtype) -> None:
    case = Case(N=33, seed=2)
    pattern = make(kind, case)
    if kind.startswith(("exact", "block", "compressed", "indexer", "topk", "causal", "nearest", "lsh", "reformer")):
        case = case.with_(W=40)  # of choices among equals by rounding nothing is promised
    pattern = make(kind, case)
    wide = tensors(pattern, case)
    narrow = {n: x.to(dtype) if torch.is_tensor(x) else x for n, x in wide.items()}
    rounded = {n: x.double() if torch.is_tensor(x) else x for n, x in narrow.items()}
    out = run(pattern.to(dtype), narrow)
    assert out.dtype == dtype
    if not kind.startswith(("causal", "nearest", "lsh", "reformer", "topk", "block", "compressed")):
        expected = run(pattern.double(), rounded)
        assert float((out.double() - expected).abs().max()) < (3e-2 if dtype == torch.bfloat16 else 5e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_refused_or_right(kind: str) -> None:
    case = Case(N=6, W=3, distances=0)
    pattern = make(kind, case)
    here = tensors(pattern, case)

    def first(v: torch.Tensor) -> torch.Tensor:
        out = run(pattern, {**here, "v": v})
        return torch.autograd.grad(out.square().sum(), here["q"], create_graph=True)[0].sum()

    try:
        second = torch.autograd.grad(first(here["v"]), here["v"])[0]
    except RuntimeError:
        return
    step = 1e-6 * torch.randn_like(here["v"])
    with torch.enable_grad():
        ahead = first((here["v"] + step).detach().requires_grad_())
        behind = first((here["v"] - step).detach().requires_grad_())
    assert float((ahead - behind).detach()) / 2 == pytest.approx(float((second * step).sum()), rel=1e-3, abs=1e-9)


def test_dropout_is_drawn_from_torchs_generator_and_keeps_the_mean() -> None:
    case = Case(B=1, N=24, W=8)
    for kind in ("local", "topk-shared", "exact"):
        pattern = make(kind, case, dropout=0.5).train()
        here = tensors(pattern, case)
        draws = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            out = run(pattern, here)
            draws.append((out.detach(), gradients(out, leaves(pattern, here))["q"]))
        assert torch.equal(draws[0][0], draws[1][0]) and torch.equal(draws[0][1], draws[1][1])
        assert not torch.equal(draws[0][0], draws[2][0])
        with torch.no_grad():
            many = {
                **here,
                **{name: x.repeat(3000, 1, 1, 1) for name, x in here.items() if isinstance(x, torch.Tensor)},
            }
            mean = run(pattern, many).mean(0, keepdim=True)  # every sequence draws its own
            assert float((mean - run(pattern.eval(), here)).abs().mean()) < 0.05


def test_auto_waits_for_no_compiler_below_its_length() -> None:
    assert MIN_NATIVE == 1024
    q = torch.zeros(4, 2)
    assert native_refusal(q, Terms(1.0)) is None
    assert native_refusal(q.double(), Terms(1.0)) and native_refusal(q, Terms(1.0, dropout=0.1))
