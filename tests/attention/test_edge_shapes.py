"""Shapes and types at the edge, every public function against the oracle: outputs, and every gradient in float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle_cases import assert_same, plain_rotate
from public_calls import FUNCTIONS, Arguments, arguments, call, masks, takes
from torch import Tensor

from rtx.attention import (
    Centroids,
    Distances,
    FixedHeads,
    FullHeads,
    LocalHeads,
    LshHeads,
    RandomHeads,
    RoutingHeads,
    SpanHeads,
    StridedHeads,
    update_centroids,
)
from rtx.attention.heads import Heads
from rtx.model.positions import Rotary

SHAPES: dict[str, dict[str, Any]] = {
    "one position": {"N": 1},
    "two positions": {"N": 2},
    "N below the window": {"N": 3},
    "a prime N": {"N": 31, "H": 2},
    "heads that do not split among sub-blocks": {"H": 5},
    "one head of size 2": {"H": 1, "D": 2},
}
SIZES: dict[str, dict[str, Any]] = {
    "counts of 1": dict.fromkeys(("window", "context_window", "stride", "block", "summary", "ramp", "clusters"), 1),
    "counts far over N": {"window": 99, "context_window": 98, "stride": 97, "block": 96, "ramp": 95, "clusters": 94},
}
FLOATS = ("q_BHND", "k_BHND", "v_BHND", "k_BHMD", "v_BHMD")


def changed(name: str, sizes: dict[str, Any]) -> Arguments:
    """Return those of the sizes that the function takes."""
    return {argument: size for argument, size in sizes.items() if takes(name, argument)}


def compare(name: str, given: Arguments, **changes: Any) -> None:
    """Compare the fast path with the oracle."""
    inputs = {argument: given[argument] for argument in FLOATS if given.get(argument) is not None}
    fast, truth = (
        lambda x, b=backend: call(name, given | x, **changes, backend=b) for backend in ("torch", "reference")
    )
    assert_same(fast, truth, inputs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_shapes(name: str, shape: str) -> None:
    compare(name, arguments(name, **SHAPES[shape], dtype=torch.float64))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_sizes(name: str, sizes: str) -> None:
    compare(name, arguments(name, dtype=torch.float64), **changed(name, SIZES[sizes]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_window_over_n_is_n(name: str) -> None:
    given = arguments(name)
    whole = changed(name, {"window": 9, "context_window": 11})
    far = changed(name, {"window": 1_000, "context_window": 1_000})
    if whole and "reformer" not in name:  # whose window is a size of chunks
        torch.testing.assert_close(call(name, given, **far), call(name, given, **whole), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("clusters", [1, 40])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if takes(name, "centroid_HCD")])
def test_one_cluster_and_more_clusters_than_positions(name: str, clusters: int) -> None:
    given = arguments(name, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    given["centroid_HCD"] = torch.randn(3, clusters, 4, generator=generator, dtype=torch.float64)
    for threshold in ("threshold_HC", "key_threshold_HC"):
        if threshold in given:
            given[threshold] = 0.3 * torch.randn(3, clusters, generator=generator, dtype=torch.float64)
    compare(name, given)


@pytest.mark.parametrize("size", [{"B": 0}, {"N": 0}, {"H": 0}, {"B": 0, "N": 0}])
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_to_attend(name: str, backend: str, size: dict[str, Any]) -> None:
    given = arguments(name, **size) if "H" not in size else without_heads(arguments(name))
    x_BHND = given["q_BHND"]
    for real in ({}, masks(name, given, lambda mask: mask)):
        assert call(name, given, **real, backend=backend, check_finite=True).shape == x_BHND.shape


def unread(name: str) -> list[Arguments]:
    """Return calls in which nothing is read: of no size, of padding alone, with clusters that nobody joins."""
    given = arguments(name)
    found = [arguments(name, B=0), arguments(name, N=0), without_heads(given)]
    found += [each | masks(name, each, lambda mask: mask) for each in found]
    found.append(given | masks(name, given, torch.zeros_like))
    if given.get("selection") == "causal":
        never = dict.fromkeys(("threshold_HC", "key_threshold_HC"), torch.full((3, 3), float("inf")))
        found.append(given | never)
    if name in ("routing, topk", "routing, separate", "lsh, reformer"):
        found += [each | {"streaming": True} for each in found]
    if takes(name, "relative") and name != "routing, encoder":
        found += [each | {"relative": Distances(torch.ones(3, 4), torch.ones(3, 4))} for each in found]
    return found


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_where_nothing_is_read(name: str, backend: str) -> None:
    for given in unread(name):
        inputs = {argument: given[argument] for argument in FLOATS if given.get(argument) is not None}
        for argument, x in inputs.items():  # each of them alone
            alone = x.clone().requires_grad_()
            call(name, given | {argument: alone}, backend=backend).sum().backward()
            assert alone.grad is not None and (alone.grad == 0).all(), argument
        others = [x.requires_grad_() for x in (given.get("span_H"), *(given.get("relative") or ())) if x is not None]
        if others:
            call(name, given, backend=backend).sum().backward()
            assert all((x.grad == 0).all() for x in others if x.grad is not None)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_of_no_size(name: str, backend: str) -> None:
    given = arguments(name)
    values = next(argument for argument in given if argument.startswith("v_"))
    assert call(name, given, **{values: given[values][..., :0]}, backend=backend).shape == (2, 3, 9, 0)


def routing_heads(selection: str, keys: str) -> RoutingHeads:
    thresholds = selection == "causal"
    store = Centroids(3, 2, 4, window=4, length=9, decay=0.5, thresholds=thresholds, keys=keys)
    return RoutingHeads(store, selection=selection, scale=0.5, commitment=0.1)


HEADS: dict[str, Callable[[], Heads]] = {
    "full": FullHeads,
    "local": lambda: LocalHeads(window=4),
    "strided": lambda: StridedHeads(stride=3),
    "fixed": lambda: FixedHeads(block=4, summary=2),
    "span": lambda: SpanHeads(3, window=5),
    "lsh": lambda: LshHeads(3, 4, window=4, rounds=2, buckets=4, seed=0),
    "random": lambda: RandomHeads(3, 2, window=4, length=9, seed=0, scale=0.5),
}
for routed in itertools.product(("causal", "topk", "nearest"), ("shared", "separate", "projected")):
    HEADS[", ".join(routed)] = functools.partial(routing_heads, *routed)


def inputs_for(name: str, B: int, N: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return queries, keys (None where queries stand for them) and values."""
    generator = torch.Generator().manual_seed(3)
    q_BHND, k_BHND, v_BHND = torch.randn(3, B, 3, N, 4, generator=generator)
    return q_BHND, None if name in ("lsh", "random") or name.endswith("shared") else k_BHND, v_BHND


@pytest.mark.parametrize(("B", "N"), [(0, 9), (2, 0), (0, 0)])
@pytest.mark.parametrize("name", HEADS)
def test_heads_learn_nothing_from_nothing(name: str, B: int, N: int) -> None:
    heads = HEADS[name]().train()
    before = {key: x.clone() for key, x in heads.state_dict().items()}
    out_BHND, loss = heads(*inputs_for(name, B, N))
    update_centroids(heads)
    assert out_BHND.shape == (B, 3, N, 4) and loss.isfinite()
    assert all(torch.equal(x, before[key]) for key, x in heads.state_dict().items())


@pytest.mark.parametrize("rotary", [None, Rotary(4)], ids=["", "rotary"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_read_no_padding(name: str, rotary: Rotary | None) -> None:
    heads = HEADS[name]().double().eval()
    q, k, v = (None if x is None else x.double() for x in inputs_for(name, 2, 9))
    assert q is not None and v is not None
    mask_BN = (torch.arange(9) < torch.tensor([[6], [9]])) & (torch.arange(9) != torch.tensor([[-1], [4]]))
    spoilt = [None if x is None else x.masked_fill(~mask_BN[:, None, :, None], float("nan")) for x in (q, k, v)]
    out, _ = heads(*spoilt, mask_BN=mask_BN, rotate=rotary)
    assert (out.masked_select(~mask_BN[:, None, :, None]) == 0).all() and out.isfinite().all()
    alone = [None if x is None else x[:1, :, :6] for x in (q, k, v)]
    torch.testing.assert_close(out[:1, :, :6], heads(*alone, rotate=rotary)[0], rtol=1e-10, atol=1e-12)
    heads.backend = "reference"  # type: ignore[assignment]
    slow, _ = heads(*spoilt, mask_BN=mask_BN, rotate=None if rotary is None else plain_rotate)
    torch.testing.assert_close(out, slow, rtol=1e-9, atol=1e-10)


def test_full_heads_of_an_encoder() -> None:
    heads = FullHeads(causal=False, dropout=0.5).eval()
    q, k, v = inputs_for("full", 2, 9)
    mask_BN = torch.arange(9) < torch.tensor([[6], [9]])
    out, loss = heads(q, k, v, mask_BN=mask_BN)
    assert k is not None and loss == 0
    assert torch.equal(out, FUNCTIONS["full"](q, k, v, causal=False, mask_BN=mask_BN))
    assert not torch.equal(out, FullHeads()(q, k, v, mask_BN=mask_BN)[0])
    said = "causal=False: a stream has no later positions to read"
    with pytest.raises(ValueError, match=said):
        heads(q, k, v, streaming=True)
    with pytest.raises(ValueError, match=said):
        heads.start()


@pytest.mark.parametrize("name", HEADS)
def test_a_prompt_of_nothing_is_no_prompt(name: str) -> None:
    heads = HEADS[name]().eval()
    q, k, v = inputs_for(name, 2, 3)
    filled, fresh = heads.start(), heads.start()
    filled.fill(q[:, :, :0], None if k is None else k[:, :, :0], v[:, :, :0])
    for i in range(3):
        at = q[:, :, i], None if k is None else k[:, :, i], v[:, :, i], i
        assert torch.equal(filled.step(*at), fresh.step(*at))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_under_autocast(name: str) -> None:
    given = arguments(name, N=31)
    expected = call(name, given, backend="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(name, given)
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", HEADS)
def test_float32_streams_under_autocast(name: str) -> None:
    heads = HEADS[name]().eval()
    q, k, v = inputs_for(name, 2, 9)
    expected = heads(q, k, v, streaming=True)[0]
    state = heads.start()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        steps = [state.step(q[:, :, i], None if k is None else k[:, :, i], v[:, :, i], i) for i in range(9)]
    torch.testing.assert_close(torch.stack(steps, 2).float(), expected, rtol=0.05, atol=0.05)


def without_heads(given: Arguments) -> Arguments:
    """Return the arguments with no head."""
    first = {"centroid_HCD", "threshold_HC", "key_threshold_HC", "projection_HDD", "span_H", "rotation_HTDF"}
    cut = lambda argument, x: x[:0] if argument in first else x[:, :0]  # noqa: E731
    return {argument: cut(argument, x) if isinstance(x, Tensor) else x for argument, x in given.items()}


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_padding_alone_gives_zero(name: str, backend: str) -> None:
    given = arguments(name)
    last_B1 = torch.tensor([[True], [False]])
    real = masks(name, given, lambda mask: mask & last_B1)
    out = call(name, given, **real, backend=backend)
    assert (out[1] == 0).all() and out[0].isfinite().all() and (out[0] != 0).any()
    assert (call(name, given, **masks(name, given, torch.zeros_like), backend=backend) == 0).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_padding_of_some_rows_against_the_oracle(name: str) -> None:
    given = arguments(name, B=3, dtype=torch.float64)
    row_B1 = torch.tensor([[True], [False], [True]])
    real = masks(name, given, lambda mask: mask & row_B1 & (torch.arange(mask.shape[1]) % 4 != 1))
    compare(name, given, **real)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_types(name: str, kind: torch.dtype) -> None:
    given = arguments(name, dtype=kind)
    # The oracle reads the same rounded numbers, so that the choices by content are the same.
    exact = {argument: x.double() if isinstance(x, Tensor) else x for argument, x in given.items()}
    expected = call(name, exact, backend="reference")
    tolerance = {torch.float16: 5e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-10}[kind]
    for backend in ("torch", "reference"):
        inputs = {argument: x.requires_grad_() for argument, x in given.items() if argument in FLOATS and x is not None}
        out = call(name, given, backend=backend)
        assert out.dtype == kind
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        out.float().sum().backward()
        assert all(x.grad is None or (x.grad.dtype == kind and x.grad.isfinite().all()) for x in inputs.values())


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if takes(name, "v_BHND")])
def test_values_of_another_size(name: str) -> None:
    given = arguments(name, dtype=torch.float64)
    given["v_BHND"] = torch.randn(2, 3, 9, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert call(name, given).shape == (2, 3, 9, 7)
    compare(name, given)
