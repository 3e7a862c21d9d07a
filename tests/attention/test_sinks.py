"""Learned sinks: by the oracle, in streams, by every engine, and what they are for."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings

from rtx import attention
from rtx.attention import Pattern, oracle
from tests.attention.test_patterns import needs_compiler
from tests.helpers.cases import (
    CASES,
    CLUSTERED,
    KINDS,
    MIXED,
    Case,
    check,
    gradients,
    make,
    run,
    tensors,
)

quick = settings(max_examples=6, deadline=None)


def with_sinks(kind: str, case: Case, queries: int = 1, dtype=torch.float64) -> Pattern:
    """Return a pattern with random sinks.

    Groups of `queries` query heads share a key-value head and choose together; 1: no groups.
    """
    pattern = make(kind, case)
    pattern.group_queries(queries, together=True)
    pattern.add_sinks(case.H * queries)
    assert pattern.sink_H is not None
    with torch.no_grad():
        pattern.sink_H.normal_()
    return pattern.to(dtype)


FEW = (replace(MIXED[0], N=8), replace(MIXED[1], H=2, N=11))
IN_GROUPS = (*CLUSTERED, "exact", "compressed", "probed")


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_gradients_and_streams_are_the_oracles(kind: str) -> None:
    for case in FEW:
        check(with_sinks(kind, case), case)


@pytest.mark.parametrize("kind", IN_GROUPS)
def test_heads_that_choose_together_have_sinks_for_each(kind: str) -> None:
    for case in FEW:
        check(with_sinks(kind, case, queries=2), case)


@pytest.mark.parametrize("kind", KINDS)
@given(case=CASES)
@quick
def test_heads_of_any_options_have_sinks(kind: str, case: Case) -> None:
    check(with_sinks(kind, case), case)


@pytest.mark.parametrize("kind", IN_GROUPS)
@given(case=CASES)
@quick
def test_heads_of_any_options_that_choose_together_have_sinks(kind: str, case: Case) -> None:
    check(with_sinks(kind, case, queries=2), case)


@pytest.mark.parametrize("kind", ["full", "topk-shared", "probed", "lsh"])
def test_a_large_sink_takes_all_and_a_small_one_nothing(kind: str) -> None:
    case = Case()
    pattern = with_sinks(kind, case)
    here = tensors(pattern, case)
    plain = run(make(kind, case), here)
    assert pattern.sink_H is not None
    with torch.no_grad():
        pattern.sink_H.fill_(-100.0)
        torch.testing.assert_close(run(pattern, here), plain, rtol=1e-12, atol=1e-12)
        pattern.sink_H.fill_(100.0)
        assert run(pattern, here).abs().max() < 1e-12


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_compiler)])
@pytest.mark.parametrize("kind", ["local", "fixed", "causal-separate", "exact", "lsh", "probed"])
@pytest.mark.parametrize("merge", ["mean", "lse"])
@torch.no_grad()
def test_every_engine_has_them(kind: str, backend: str, merge: str) -> None:
    case = Case(N=40, D=16, W=9, merge=merge)
    pattern = with_sinks(kind, case, dtype=torch.float32)
    pattern.backend = backend
    here = tensors(pattern, case, torch.float32)
    out = run(pattern, here)
    pattern.backend = "torch"
    expected = run(pattern.double(), tensors(pattern, case)).float()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_a_list_that_is_made_once_serves_patterns_with_sinks() -> None:
    pattern = attention.Local(window=3)
    assert pattern.form() is not None
    pattern.add_sinks(2)
    assert pattern.form() is not None
    assert [*dict(pattern.named_parameters())] == ["sink_H"]
    assert "sink_H" not in attention.Local(window=3).state_dict()


@pytest.mark.parametrize("kind", ["local", "causal-separate", "topk-shared", "exact", "lsh"])
def test_sinks_learn_from_all_documents(kind: str) -> None:
    case = Case(N=15)
    pattern = with_sinks(kind, case)
    here = tensors(pattern, case)
    documents = attention.Documents(torch.tensor([[0] * 6 + [6] * 9, [0] + [1] * 14]))
    ours = run(pattern, here, documents=documents)
    theirs = run(partial(oracle.attend_by_rule, pattern), here, documents=documents)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    found = gradients(pattern, here, ours)
    assert found["sink_H"].all()
    torch.testing.assert_close(found, gradients(pattern, here, theirs), rtol=1e-8, atol=1e-8)


def test_sinks_get_gradients_where_nobody_reads() -> None:
    case = replace(Case(), N=1, attend_self=False)
    pattern = with_sinks("exact", case)
    here = tensors(pattern, case)
    found = gradients(pattern, here, run(pattern, here))
    assert all(gradient.isfinite().all() for gradient in found.values())
