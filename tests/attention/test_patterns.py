"""What every pattern keeps: the oracle's outputs and gradients, streams, no future, no padding,
edges, all types; and what torch's engine gives the compiled kernel gives, too, forward and
backward, on any number of threads. The example of docs/attention.md keeps the same, and the one of
docs/api.md runs.
"""

import contextlib
import functools
import itertools
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.nn.attention.flex_attention import BlockMask

import rtx
from rtx.attention import (
    ROUTING_CLASSES,
    Centroids,
    ContiguousPattern,
    Local,
    Pattern,
    PositionLists,
    PositionPattern,
    Random,
    RelativeTables,
    oracle,
    pieces,
)
from rtx.attention.engine import blocks as torch_blocks
from rtx.attention.engine import compiler as compiling
from rtx.attention.engine import flex, native
from rtx.attention.members import products
from rtx.attention.pattern import Cache
from rtx.attention.reads import IndexReads, QueriesKeys, RangeReads, Reads
from rtx.training.hardware import has_compiler
from tests.helpers.cases import (
    CASES,
    EDGES,
    KINDS,
    MIXED,
    SEES_FUTURE,
    Case,
    check,
    drawn,
    gradients,
    make,
    run,
    stream,
    tensors,
)

few = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def check_in_pieces(kind: str, case: Case) -> None:
    """Check a pattern whose scores and masks are computed in several pieces and blocks."""
    limits = (
        (pieces, "MAX_SCORES", 1000),
        (torch_blocks, "MAX_SCORES_CPU", 200),
    )
    limits += (torch_blocks, "MIN_BLOCKS", 1), (torch_blocks, "MAX_MASK", 200)
    with contextlib.ExitStack() as stack:
        for limit in limits:
            stack.enter_context(mock.patch.object(*limit))
        check(make(kind, case), case)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_the_oracles_and_streams_give_the_same(kind: str) -> None:
    for case in (*MIXED, *EDGES):
        check_in_pieces(kind, case)


@pytest.mark.parametrize("kind", KINDS)
@given(case=CASES)
@few
def test_any_options_give_what_the_oracle_gives(kind: str, case: Case) -> None:
    check_in_pieces(kind, case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attend_self", [True, False])
@torch.no_grad()
def test_the_future_moves_nothing_but_where_the_pattern_says_so(
    kind: str, attend_self: bool
) -> None:
    pattern, here = drawn(
        kind, Case(N=40, C=4, W=6, seed=3, attend_self=attend_self, distances=5, rotary=True)
    )
    assert pattern.strictly_causal == (kind not in SEES_FUTURE)
    own = {name: here[name] for name in "qkv" if here[name] is not None}
    before = {prefix: run(pattern, here, streaming=prefix) for prefix in (True, False)}
    moved = {True: 0.0, False: 0.0}
    for first, prefix in itertools.product((1, 20), moved):
        changed = {
            n: torch.cat([x[:, :, :first], torch.randn_like(x[:, :, first:])], dim=2)
            for n, x in own.items()
        }
        after = run(pattern, here | changed, streaming=prefix)
        move = (after - before[prefix])[:, :, :first].abs().max()
        moved[prefix] = max(moved[prefix], float(move))
    # Blocks of other sizes may add up in another order.
    assert moved[True] < 1e-12 and (
        moved[False] > 1e-3 if kind in SEES_FUTURE else moved[False] < 1e-12
    )


CASE = Case(B=4, H=2, N=19, D=4, C=3, W=6, seed=5)
REAL_BN = torch.rand(4, 19, generator=torch.Generator().manual_seed(1)) < 0.7
REAL_BN[2:] = torch.stack([torch.zeros(19, dtype=torch.bool), REAL_BN[0]])


@pytest.mark.parametrize("kind", KINDS)
def test_real_positions_get_what_they_would_without_padding(kind: str) -> None:
    check_padding(kind, replace(CASE, distances=4, rotary=True), memory=0)


WITH_MEMORY = [kind for kind in KINDS if isinstance(make(kind, CASE), ContiguousPattern)]
"""Kinds whose pattern accepts a memory."""


@pytest.mark.parametrize("kind", WITH_MEMORY)
def test_padding_may_be_in_a_memory(kind: str) -> None:
    check_padding(kind, CASE, memory=5)


def check_padding(kind: str, case: Case, memory: int) -> None:
    pattern, here = drawn(kind, case)
    own = {name: here[name].detach() for name in "qkv" if here[name] is not None}
    padding_B1N1 = ~REAL_BN[:, None, :, None]
    dirty = here | {
        name: x.masked_fill(padding_B1N1, torch.nan).requires_grad_() for name, x in own.items()
    }
    out = run(
        pattern, dirty, real_BN=REAL_BN, check_finite=True, **({"memory": memory} if memory else {})
    )
    expected = torch.zeros_like(out)
    for b, real_N in enumerate(REAL_BN):
        alone = here | {name: here[name][b : b + 1, :, real_N] for name in own}
        found = run(pattern, alone, memory=int(real_N[:memory].sum()))
        expected[b, :, real_N[memory:]] = found[0]
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    mine = gradients(pattern, dirty, out)
    its = gradients(pattern, here, expected)
    torch.testing.assert_close(mine, its, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("attend_self", [True, False])
@pytest.mark.parametrize("kind", ["indexer", "indexer-dense", "nearest-separate"])
@mock.patch.object(pieces, "MAX_SCORES", 300)
def test_padding_counts_in_no_loss_however_it_is_cut(kind: str, attend_self: bool) -> None:
    pattern, here = drawn(kind, replace(CASE, attend_self=attend_self))
    pattern.train().commitment = 0.3  # type: ignore[assignment]
    qkv = [here[name] for name in "qkv"]
    short = [
        pattern(*(x[b : b + 1, :, real_N] for x in qkv))[1] for b, real_N in enumerate(REAL_BN)
    ]
    mean = (torch.stack(short) * REAL_BN.sum(1)).sum() / REAL_BN.sum()
    assert mean > 0
    torch.testing.assert_close(pattern(*qkv, real_BN=REAL_BN)[1], mean, rtol=1e-9, atol=0)


class Cooled(Local):
    """A user's pattern that changes its inputs, and has a loss of nothing but means."""

    def forward(
        self, q_BHND: torch.Tensor, *given: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(q_BHND * 0.5, *given, **more)

    def loss(self, qk: QueriesKeys, parts: list[Reads]) -> torch.Tensor:
        return qk.q_BHND.square().mean()


def test_a_forward_pass_of_ones_own_is_run_once_and_padding_alone_has_no_loss() -> None:
    pattern = Cooled(window=4)
    q, k, v = torch.randn(3, 2, 2, 9, 4)
    real_BN = torch.tensor([[True] * 6 + [False] * 3, [False] * 9])
    out, loss = pattern(q, k, v, real_BN=real_BN)
    expected, mean = pattern(q[:1, :, :6], k[:1, :, :6], v[:1, :, :6])
    torch.testing.assert_close((out[:1, :, :6], loss), (expected, mean))
    assert not out[1:].any() and not out[:, :, 6:].any()


def test_the_indexers_loss_is_a_mean_in_half_precision_too() -> None:
    pattern, here = drawn("indexer", Case(B=1100, N=32, W=2), torch.float32)
    losses = [
        pattern.train().to(t)(*(here[x].to(t) for x in "qkv"))[1].float()
        for t in (torch.float32, torch.float16)
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0)


@pytest.mark.parametrize("shape", [(2, 5, 4), (5, 4)])
@pytest.mark.parametrize("merge", ["mean", "lse"])
@torch.no_grad()
def test_streams_of_clusters_read_each_heads_own_tables(merge: str, shape: tuple[int, ...]) -> None:
    pattern, here = drawn("causal-shared", Case(merge=merge))
    here["relative"] = RelativeTables(torch.randn(shape).double(), None, torch.randn(2, 5).double())
    expected = run(partial(oracle.attend_by_rule, pattern), here)
    torch.testing.assert_close(run(pattern, here), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(stream(pattern, here, 6), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("empty", ["B", "H", "N"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_gives_nothing_out_with_a_gradient(kind: str, empty: str) -> None:
    pattern, here = drawn(kind, Case(**{empty: 0}))  # type: ignore[arg-type]
    out = run(pattern.train(), here)
    assert out.shape == stream(pattern, here, 0).shape == here["v"].shape
    out.sum().backward()
    assert all(here[name].grad is not None for name in "qkv" if here[name] is not None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_float_type_gives_its_own(kind: str, dtype: torch.dtype) -> None:
    case = Case(N=33, seed=2)
    if kind.startswith(
        (
            "exact",
            "block",
            "compressed",
            "indexer",
            "probed",
            "topk",
            "causal",
            "nearest",
            "lsh",
            "reformer",
        )
    ):
        case = replace(case, W=40)  # of choices among equals by rounding nothing is promised
    pattern, wide = drawn(kind, case)
    narrow = {n: x.to(dtype) if torch.is_tensor(x) else x for n, x in wide.items()}
    rounded = {n: x.double() if torch.is_tensor(x) else x for n, x in narrow.items()}
    out = run(pattern.to(dtype), narrow)
    assert out.dtype == stream(pattern, narrow, 27).dtype == dtype
    if not kind.startswith(("causal", "nearest", "lsh", "reformer", "topk", "block", "compressed")):
        expected = run(pattern.double(), rounded)
        assert float((out.double() - expected).abs().max()) < (
            3e-2 if dtype == torch.bfloat16 else 5e-3
        )


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_refused_or_right(kind: str) -> None:
    case = Case(N=6, W=3, distances=0)
    pattern, here = drawn(kind, case)

    def first(v: torch.Tensor) -> torch.Tensor:
        out = run(pattern, {**here, "v": v})
        return torch.autograd.grad(out.square().sum(), here["q"], create_graph=True)[0].sum()

    try:
        second = torch.autograd.grad(first(here["v"]), here["v"])[0]
    except RuntimeError:
        return
    step = 1e-6 * torch.randn_like(here["v"])
    ahead, behind = (first((here["v"] + each).detach().requires_grad_()) for each in (step, -step))
    assert float((ahead - behind).detach()) / 2 == pytest.approx(
        float((second * step).sum()), rel=1e-3, abs=1e-9
    )


@pytest.mark.parametrize("kind", ["local", "topk-shared", "exact"])
def test_dropout_is_drawn_from_torchs_generator_and_keeps_the_mean(kind: str) -> None:
    case = Case(B=1, N=24, W=8)
    pattern, here = drawn(kind, case, dropout=0.5)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        out = run(pattern.train(), here)
        draws.append((out.detach(), gradients(pattern, here, out)["q"]))
    assert torch.equal(draws[0][0], draws[1][0]) and torch.equal(draws[0][1], draws[1][1])
    assert not torch.equal(draws[0][0], draws[2][0])
    with torch.no_grad():
        many = {
            name: x.repeat(3000, 1, 1, 1) if torch.is_tensor(x) else x for name, x in here.items()
        }
        mean = run(pattern, many).mean(0, keepdim=True)  # every sequence draws its own
        assert float((mean - run(pattern.eval(), here)).abs().mean()) < 0.05


@pytest.mark.parametrize("kind", ["local", "full", "topk-shared", "causal-separate", "exact"])
def test_the_backward_pass_drops_the_same_weights_when_it_computes_them_again(kind: str) -> None:
    pattern, here = drawn(kind, Case(B=1, N=24, W=8), dropout=0.5)
    out = run(pattern.train(), here)
    weight = torch.randn_like(out)
    loss = (out * weight).sum()
    (gradient,) = torch.autograd.grad(loss, here["v"])
    # The outputs are linear in v if the backward pass has the mask of the forward pass, so that the
    # gradient times v sums to the loss.
    assert float((gradient * here["v"]).sum().detach()) == pytest.approx(float(loss.detach()))


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")


@needs_compiler
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "span"])
@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_agrees_with_torchs_engine(kind: str, seed: int) -> None:
    merge = "lse" if seed == 1 else "mean"
    case = Case(
        N=(70, 70, 150, 1100)[seed],
        W=9,
        D=6,
        seed=seed,
        attend_self=bool(seed % 2),
        rotary=seed == 2,
        merge=merge,
    )
    pattern, here = drawn(kind, case, torch.float32)
    found = []
    for backend in ("torch", "native"):
        pattern.backend = backend
        out = run(pattern, here, streaming=seed == 0)
        found.append([out, *gradients(pattern, here, out).values()])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@needs_compiler
@pytest.mark.parametrize("N", [64, 1500])
@pytest.mark.parametrize("kind", ["causal-shared", "topk-separate", "causal-projected", "random"])
def test_the_kernels_softmax_over_all_clusters_is_the_oracles(kind: str, N: int) -> None:
    case = Case(B=1, H=2, N=N, D=16, C=4, W=N // 4, seed=N, merge="lse")
    pattern, here = drawn(kind, case, torch.float32, backend="native")
    out = run(pattern, here)
    found = [out, *gradients(pattern, here, out).values()]
    wide = {
        name: x.detach().double().requires_grad_() if torch.is_tensor(x) else x
        for name, x in here.items()
    }
    out = run(partial(oracle.attend_by_rule, pattern.double()), wide)
    expected = [out, *gradients(pattern, wide, out).values()]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=2e-5)


@needs_compiler
@pytest.mark.parametrize("selection", ["topk", "causal", "nearest"])
@pytest.mark.parametrize(
    "N, W, C", [(1, 1, 1), (50, 7, 5), (200, 9, 21), (70, 80, 9), (900, 150, 2)]
)
def test_the_kernel_selects_what_torch_selects(selection: str, N: int, W: int, C: int) -> None:
    generator = torch.Generator().manual_seed(N)
    # Small whole numbers: many are equal.
    centroid = torch.randint(-2, 3, (3, C, 6), generator=generator).float()
    x = torch.randint(-2, 3, (2, 3, N, 6), generator=generator).float()
    threshold = torch.randint(-2, 3, (3, C), generator=generator).float()
    x[0, 0, ::11] = math.nan
    x[0, 0, 1::11, 0] = 1e30
    # Both zeros are equal.
    centroid[0, 0] = -0.0
    x[1, 0, ::7] = -0.0
    for update in ("members", "nearest"):
        found = []
        for name in ("torch", "native"):
            store = Centroids(
                3, C, 6, window=W, length=N, decay=0.9, update=update, threshold_rate=0.1
            )
            store.centroid_HCD.copy_(centroid)
            store.threshold_HC.copy_(4 * threshold)
            pattern = ROUTING_CLASSES[selection](store, backend=name)
            (part,) = pattern.observe(QueriesKeys(x, x, x, x), streaming=False)
            assert isinstance(part, RangeReads)
            found.append([*part.query, *store.statistics])
            score = products(centroid, x)
            moments = torch.stack([score.sum((0, 3)), score.square().sum((0, 3))])
            seen = store.statistics.role_sums_2_3_HC[0, 1:].float()
            if selection == "causal":
                torch.testing.assert_close(seen, moments, rtol=1e-5, atol=1e-5, equal_nan=True)
            else:
                assert not seen.any()
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


@needs_compiler
def test_the_kernel_gives_zeros_where_nobody_reads() -> None:
    pattern = Random(2, 1, window=2, length=4000, seed=1, backend="native")
    _, here = drawn("full", Case(N=50))
    given = here | {"k": None} | {name: here[name].float() for name in "qv"}
    junk = [torch.full_like(here["v"], 7.0, dtype=torch.float32) for _ in range(9)]
    del junk
    out = run(pattern, given)
    assert not out.any()


@needs_compiler
def test_threads_change_no_bit() -> None:
    case = Case(N=300, W=40, D=16)
    pattern, here = drawn("causal-shared", case, torch.float32, backend="native")
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            out = run(pattern, here)
            found.append([out, *gradients(pattern, here, out).values()])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_compiler
def test_what_the_kernel_cannot_do_is_refused_by_name() -> None:
    for case, dtype in ((Case(distances=3), torch.float32), (Case(), torch.float64)):
        with pytest.raises(ValueError, match=re.escape("backend='native' cannot run this")):
            run(*drawn("local", case, dtype, backend="native"))
    pattern, here = drawn("local", Case(), torch.float32, backend="native")
    with pytest.raises(RuntimeError, match="first derivatives alone"):
        torch.autograd.grad(run(pattern, here).sum(), here["q"], create_graph=True)


@pytest.mark.parametrize("compiler", ["", "#!/bin/sh\necho no openmp here >&2; exit 1\n"])
def test_without_a_compiler_that_can_there_is_no_kernel_and_one_line(
    tmp_path: Path,
    compiler: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if compiler:
        (tmp_path / "c++").write_text(compiler)
        (tmp_path / "c++").chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    for name in ("PATH", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    # As in a process that has neither looked for the kernels nor printed a line yet.
    for function in ("load_once", "print_once"):
        uncached = getattr(compiling, function).__wrapped__
        monkeypatch.setattr(compiling, function, functools.cache(uncached))
    q = torch.randn(1, 2, 1100, 4)
    outputs = [Local(window=4, backend=name)(q, q, q)[0] for name in ("auto", "torch")]
    assert torch.equal(*outputs)
    assert native.library() is None
    *before, line = capfd.readouterr().err.splitlines()
    assert len(before) == (1 if compiler else 0)
    assert ("no openmp here" if compiler else "no C++ compiler") in line


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    "kind", ["full", "local", "fixed", "random", "causal-shared", "topk-separate", "strided"]
)
@torch.no_grad()
def test_flex_gives_the_same_forward_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "BLOCK", 16)
    case = Case(N=40, W=7, D=16)
    pattern, here = drawn(kind, case, torch.float32)
    expected = run(pattern, here)
    pattern.backend = "flex"
    monkeypatch.setattr(flex, "block_mask", partial(checked_mask, flex.block_mask))
    torch.testing.assert_close(run(pattern, here), expected, rtol=1e-4, atol=1e-5)


def checked_mask(block_mask: Callable[[RangeReads], BlockMask], part: RangeReads) -> BlockMask:
    """Return the mask, once its blocks, which a CPU does not look at, hold all pairs for queries
    and for keys.
    """
    mask = block_mask(part)
    key_M = torch.arange(len(part.key.row_M))
    read_PM = (key_M >= part.start_P[:, None]) & (key_M < part.stop_P[:, None])
    pairs = read_PM.nonzero() // flex.BLOCK
    found = []
    for count, index in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.q_num_blocks, mask.q_indices),
    ):
        assert count is not None and index is not None
        found.append(
            {(row, x) for row, n in enumerate(count[0, 0]) for x in index[0, 0, row, :n].tolist()}
        )
    assert found[0] == {(x, y) for y, x in found[1]} >= set(map(tuple, pairs.tolist()))
    return mask


DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str) -> list[str]:
    """Return the Python of a page of docs/."""
    return re.findall(
        r"^```python\n(.*?)^```$", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL
    )


def example_with(*methods: str) -> Any:
    """Return the class of the page with some of the methods that it adds, without the name for
    commands.
    """
    texts = [
        text
        for text in blocks("attention.md")
        if "class Dilated" in text or text.startswith("    ")
    ]
    end = "\n\n\ndef make("
    added = [text for text in texts[1:] if any(f"def {name}(" in text for name in methods)]
    assert len(texts) == 3 and len(added) == len(methods) and end in texts[0]
    text = texts[0].replace(end, "\n".join(["", *added]) + end)
    names: dict[str, Any] = {"__name__": "dilated"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rtx, "register_pattern", lambda name, make: None)
        exec(compile(text, "dilated.py", "exec"), names)
    return names["Dilated"]


@pytest.fixture(scope="module")
def dilated() -> Any:
    """The class of the page with all that it adds."""
    return example_with("position_lists", "cache_size")


@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize(
    "methods", [(), ("position_lists",), ("cache_size",), ("position_lists", "cache_size")]
)
def test_the_pattern_is_the_oracles_and_streams_with_each_step_of_the_page(
    methods: Any, case: Case
) -> None:
    pattern = example_with(*methods)(window=case.W, stride=case.C).eval()
    check(pattern, case)
    cache = pattern.start()
    kinds = {type(part) for part in pattern.reads(inputs_of(pattern, case), False)}
    assert kinds == {RangeReads if "position_lists" in methods else IndexReads}
    assert cache.ring == (case.W * case.C if "cache_size" in methods else None)


def inputs_of(pattern: Pattern, case: Case) -> QueriesKeys:
    here = tensors(pattern, case)
    return pattern.inputs(here["q"], here["k"], None)


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_compiler)])
@pytest.mark.parametrize("attend_self", [True, False])
def test_where_pairs_are_all_that_a_pattern_says_a_position_may_read_nothing(
    backend: str, attend_self: bool
) -> None:
    class Earlier(PositionPattern):
        def sees(self, head: int, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return (j < i) & (i - j < 4 + head) & (j % 3 > 0)

    for N in (0, 1, 2, 12):
        case = Case(N=N, seed=N)
        pattern = Earlier(attend_self=attend_self).eval()
        here = tensors(pattern, case)
        expected = run(partial(oracle.attend_by_rule, pattern), here)
        assert not expected[:, :, :2].any()
        if backend == "torch" and N:
            check(pattern, case)
        pattern.backend = backend
        here = {name: x.float() if torch.is_tensor(x) else x for name, x in here.items()}
        torch.testing.assert_close(run(pattern, here), expected.float(), rtol=1e-5, atol=1e-6)


def test_the_page_says_how_to_hold_it_against_the_oracle(dilated: Any) -> None:
    (text,) = [text for text in blocks("attention.md") if "oracle.attend_by_rule" in text]
    with mock.patch.dict(sys.modules, {"dilated": SimpleNamespace(Dilated=dilated)}):
        exec(compile(text, "attention.md", "exec"), {})


@pytest.mark.parametrize("attend_self", [True, False])
def test_a_pattern_says_by_one_function_since_when_it_reads(attend_self: bool) -> None:
    class Back(ContiguousPattern):
        def since(self, i: torch.Tensor) -> torch.Tensor:
            return i // 5 * 5 - 3

    check(Back(attend_self=attend_self).eval(), Case(N=20, distances=7))


@pytest.mark.parametrize("kind", ["full", "local"])
@torch.no_grad()
def test_a_memory_is_read_as_earlier_positions_are(kind: str) -> None:
    pattern, here = drawn(kind, Case(N=20, W=9))
    torch.testing.assert_close(
        run(pattern, here, memory=8), run(pattern, here)[:, :, 8:], rtol=1e-12, atol=1e-12
    )


def test_it_reads_every_third_of_the_last(dilated: Any) -> None:
    i = torch.tensor([[4], [19]])
    j = torch.arange(20)
    seen_2N = dilated(window=4, stride=3).sees(0, i, j) & (i >= j)
    assert [seen_N.nonzero()[:, 0].tolist() for seen_N in seen_2N] == [[1, 4], [10, 13, 16, 19]]


@pytest.mark.parametrize("wrong", ["sees", "since_N", "until_N", "cache_size"])
def test_a_pattern_that_contradicts_itself_is_caught(dilated: Any, wrong: str) -> None:
    class Wrong(dilated):
        def sees(self, head: int, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return (
                i - j < self.window * self.stride if wrong == "sees" else super().sees(head, i, j)
            )

        def position_lists(self, position_N: torch.Tensor, heads: int) -> list[PositionLists]:
            (lists,) = super().position_lists(position_N, heads)
            if wrong in lists._fields:  # a key too few; the next key, too
                lists = lists._replace(**{wrong: getattr(lists, wrong) + self.stride})
            return [lists]

        def start(self, relative: RelativeTables | None = None) -> Cache:
            cache = super().start(relative)
            cache.ring -= self.stride * (wrong == "cache_size")  # forgets a key too early
            return cache

    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check(Wrong(window=3, stride=3).eval(), Case(N=20))


def test_the_example_of_the_attention_alone_runs() -> None:
    (text,) = [text for text in blocks("api.md") if "rtx.attention" in text]
    exec(compile(text, "api.md", "exec"), {})
