"""The same function by every backend, and a sentence for what a backend asked for by name cannot do."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import pytest
import torch
from public_calls import FUNCTIONS, STRICTLY_CAUSAL, arguments, call, masks, takes
from torch import Tensor

from rtx.attention import Centroids, CrossRoutingHeads, LshHeads, RandomHeads, RoutingHeads, backends
from rtx.attention.backends import BACKENDS, KERNELS
from rtx.attention.clusters import attend_members
from rtx.attention.fixed import FixedHeads
from rtx.attention.full import FullHeads
from rtx.attention.heads import Heads
from rtx.attention.local import LocalHeads
from rtx.attention.span import SpanHeads
from rtx.attention.strided import StridedHeads
from rtx.attention.weights import Distances
from rtx.compiler import has_compiler

BY_POSITION = ("full", "local", "strided", "fixed")
IN_CLUSTERS = (
    "random",
    "random, keys",
    "routing, topk",
    "routing, causal",
    "routing, nearest",
    "routing, projected",
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unknown_backends(name: str) -> None:
    with pytest.raises(ValueError, match="backend='cuda': must be one of auto, reference, torch, triton, flex"):
        call(name, arguments(name), backend="cuda")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_auto_is_torch_on_a_cpu(name: str) -> None:
    given = arguments(name)
    assert torch.equal(call(name, given), call(name, given, backend="torch"))
    assert torch.equal(call(name, given), call(name, given, backend="auto"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_reference_drops_nothing(name: str) -> None:
    said = "backend='reference' cannot run this (dropout=0.5: the oracle drops no weights); backends that can: torch"
    with pytest.raises(ValueError, match=re.escape(said)):
        call(name, arguments(name), dropout=0.5, backend="reference")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["q_BHND", "k_BHND", "v_BHND"])
@pytest.mark.parametrize("name", STRICTLY_CAUSAL)
def test_by_the_reference_what_is_not_finite_never_reaches_the_past(name: str, where: str, value: float) -> None:
    given = arguments(name)
    if given.get(where) is None:
        return
    clean = call(name, given, backend="reference")
    for position in (0, 4, 8):
        spoilt = given[where].clone()
        spoilt[0, :, position, 1] = value
        out = call(name, given, **{where: spoilt}, backend="reference")
        assert torch.equal(out[0, :, :position], clean[0, :, :position])
        assert torch.equal(out[1], clean[1])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_by_the_reference_padding_may_hold_anything(name: str) -> None:
    given = arguments(name)
    real = masks(name, given, lambda mask: mask & (torch.arange(mask.shape[1]) % 3 != 1))
    clean = call(name, given, **real, backend="reference")
    for argument in ("q_BHND", "k_BHND", "v_BHND", "k_BHMD", "v_BHMD"):
        if given.get(argument) is not None:
            mask = real.get("context_mask_BM", real["mask_BN"]) if "M" in argument else real["mask_BN"]
            spoilt = given[argument].masked_fill(~mask[:, None, :, None], float("nan"))
            given[argument] = spoilt.requires_grad_()
    out = call(name, given, **real, backend="reference")
    assert torch.equal(out, clean)
    out.square().sum().backward()
    graded = [x.grad for x in given.values() if isinstance(x, Tensor) and x.grad is not None]
    assert graded and all(gradient.isfinite().all() for gradient in graded)


def test_the_reference_knows_no_autocast() -> None:
    given = arguments("routing, topk")
    clean = call("routing, topk", given, backend="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(call("routing, topk", given, backend="reference"), clean)


COMPILED = [
    pytest.mark.skipif(not has_compiler(), reason="FlexAttention needs a C++ compiler on a CPU"),
    # Torch's own, while it compiles.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]


FLEX: dict[str, dict[str, Any]] = {"full": {"causal": False}, "local": {}, "strided": {}, "fixed": {}}


@pytest.mark.parametrize("name", [pytest.param(name, marks=COMPILED) for name in FLEX])
def test_flex(name: str) -> None:
    given = arguments(name, N=37, D=8)
    changes = [FLEX[name]]
    if name == "local":  # another number does not compile anew
        real_B1 = torch.tensor([[True], [False]])
        real = masks(name, given, lambda mask: mask & (torch.arange(37) % 5 != 2) & real_B1)
        changes = [real, {**real, "window": 37}]
    for change in changes:
        out = call(name, given, **change, backend="flex")
        torch.testing.assert_close(out, call(name, given, **change, backend="reference"), rtol=1e-5, atol=1e-5)
    empty = {argument: x[:0] for argument, x in given.items() if argument.endswith("_BHND")}
    assert call(name, given, **empty, backend="flex").shape == (0, 3, 37, 8)


FLEX_REFUSALS = [
    ({"dropout": 0.5}, "dropout=0.5: FlexAttention has none); backends that can: torch"),
    ({"relative": Distances(torch.zeros(2, 4), torch.zeros(2, 4))}, "relative: FlexAttention adds nothing to keys"),
    (
        {"q_BHND": torch.zeros(2, 3, 9, 4, requires_grad=True)},
        "q_BHND requires a gradient: FlexAttention has no backward",
    ),
    ({"v_BHND": torch.zeros(2, 3, 9, 4, requires_grad=True)}, "pass on a CPU); backends that can: reference, torch"),
]


@pytest.mark.parametrize(("change", "said"), FLEX_REFUSALS)
@pytest.mark.parametrize("name", BY_POSITION)
def test_what_flex_refuses(name: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        call(name, arguments(name), **change, backend="flex")
    with pytest.raises(
        ValueError, match=r"q_BHND is of torch\.float64: FlexAttention takes float16, bfloat16 or float32"
    ):
        call(name, arguments(name, dtype=torch.float64), backend="flex")


def test_flex_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"FlexAttention is compiled, and there is no C\+\+ compiler"):
        call("local", arguments("local"), backend="flex")


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in BY_POSITION])
def test_flex_is_for_patterns_that_choose_by_position(name: str) -> None:
    said = (
        f"({name.split(',')[0]}: FlexAttention is for full, local, strided, fixed alone); backends that can: reference"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        call(name, arguments(name), backend="flex")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_triton_is_missing_or_for_clusters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "missing_for_triton", lambda: "triton")
    what = {"routing, separate": "k_BHND without projection_HDD", "routing, encoder": "causal=False"}
    what["routing, separate causal"] = what["routing, separate"]
    said = f"{what.get(name, name.split(',')[0])}: the Triton kernels are for causal attention inside clusters that "
    said = "triton is not installed); backends that can: reference, torch" if name in IN_CLUSTERS else said
    with pytest.raises(ValueError, match=re.escape(said)):
        call(name, arguments(name), backend="triton")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Kernels that do as the fast path does, count their calls, and refuse what is of float64."""
    module = types.ModuleType(KERNELS)

    def attend(*tensors: Any, **options: Any) -> Tensor:
        module.calls += 1  # type: ignore[attr-defined]
        return attend_members(*tensors, **options)

    def refuse(q: Tensor, k: Tensor, v: Tensor, *, dropout: float, relative: Distances | None) -> str | None:
        return f"q_BHND is of {q.dtype}: no" if q.dtype == torch.float64 else None

    module.calls, module.attend_members_triton, module.triton_refusal = 0, attend, refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, KERNELS, module)
    monkeypatch.setattr(backends, "missing_for_triton", lambda: "")
    return module


@pytest.mark.parametrize("name", IN_CLUSTERS)
def test_triton_takes_over_inside_clusters(name: str, kernels: types.ModuleType) -> None:
    given = arguments(name)
    assert torch.equal(call(name, given, backend="triton"), call(name, given))
    assert kernels.calls == 1
    with pytest.raises(ValueError, match=r"\(q_BHND is of torch.float64: no\); backends that can: reference, torch"):
        call(name, arguments(name, dtype=torch.float64), backend="triton")
    if takes(name, "streaming") and name == "routing, topk":
        with pytest.raises(ValueError, match=r"streaming=True: the Triton kernels are for"):
            call(name, given, backend="triton", streaming=True)


def store(keys: str = "shared") -> Centroids:
    torch.manual_seed(0)
    return Centroids(3, 2, 4, window=4, length=9, decay=0.9, keys=keys, thresholds=True)


HEADS: dict[str, Any] = {
    "full": FullHeads,
    "local": lambda **o: LocalHeads(window=4, **o),
    "strided": lambda **o: StridedHeads(stride=3, **o),
    "fixed": lambda **o: FixedHeads(block=4, summary=2, **o),
    "span": lambda **o: SpanHeads(3, window=5, ramp=2, **o),
    "lsh": lambda **o: LshHeads(3, 4, window=4, rounds=2, buckets=4, seed=0, **o),
    "random": lambda **o: RandomHeads(3, 2, window=4, length=9, seed=0, scale=0.5, **o),
    "causal": lambda **o: RoutingHeads(store(), selection="causal", scale=0.5, **o),
    "topk, separate": lambda **o: RoutingHeads(store("separate"), selection="topk", scale=0.5, **o),
    "nearest, projected": lambda **o: RoutingHeads(store("projected"), selection="nearest", scale=0.5, **o),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_heads_take_a_backend(name: str, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "missing_for_triton", lambda: "triton")
    q, k, v = torch.randn(3, 2, 3, 9, 4, generator=torch.Generator().manual_seed(0))
    keys = None if name in ("lsh", "random", "causal") else k
    results = []
    for backend in ("auto", "reference"):
        heads: Heads = HEADS[name](backend=backend)
        results.append((*heads(q, keys, v, streaming=streaming), *heads.buffers()))
        if name == "topk, separate":
            assert isinstance(heads, RoutingHeads)
            results[-1] += tuple(total.float() for total in heads.centroids.sums())
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="cannot run this"):
        HEADS[name](backend="triton")(q, keys, v)
    with pytest.raises(ValueError, match="backend='gpu': must be one of"):
        HEADS[name](backend="gpu")


def test_heads_of_cross_attention_take_a_backend() -> None:
    x = arguments("cross_routing")
    results = [
        CrossRoutingHeads(store("separate"), backend=b)(x["q_BHND"], x["k_BHMD"], x["v_BHMD"]) for b in BACKENDS[:3]
    ]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(results[2], results[0])
