"""Documents packed into one sequence get what they would get as sequences by themselves."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from rtx.attention import Documents, Local, oracle
from tests.helpers.cases import CASES, KINDS, MIXED, Case, drawn, gradients, make, run, tensors

few = settings(
    max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def packed(case: Case) -> Documents:
    """Return random documents in the sequences of a case; a quarter of the positions start one."""
    generator = torch.Generator().manual_seed(case.seed)
    return Documents.that_start(torch.rand(case.B, case.N, generator=generator) < 1 / 4)


def apart(function: Any, here: dict[str, Any], documents: Documents, **more: Any) -> Tensor:
    """Return the outputs of every document, each run by itself."""
    out = torch.zeros_like(here["v"])
    for b, first_N in enumerate(documents.first_BN):
        for first in first_N.unique():
            at_N = first_N == first
            alone = dict(here)
            for name in "qkv":
                if here[name] is not None:
                    alone[name] = here[name][b : b + 1, :, at_N]
            out[b, :, at_N] = run(function, alone, **more)[0]
    return out


def check_apart(kind: str, case: Case) -> None:
    """Compare packed documents with the same documents run one by one, and with the oracle."""
    pattern = make(kind, case)
    here = tensors(pattern, case)
    documents = packed(case)
    found = [run(pattern, here, documents=documents, streaming=x) for x in (False, True)]
    for streaming, ours in zip((False, True), found, strict=True):
        # A strictly causal pattern gives the same in both modes: its gradients are compared once.
        if streaming and pattern.strictly_causal:
            close(*found)
            continue
        theirs = apart(pattern, here, documents, streaming=streaming)
        close(ours, theirs)
        close(gradients(pattern, here, ours), gradients(pattern, here, theirs))
    its = run(partial(oracle.attend_by_rule, pattern), here, documents=documents)
    close(found[0], its)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_get_what_they_would_get_apart(kind: str) -> None:
    for case in (replace(MIXED[0], N=11), replace(MIXED[1], N=13)):
        check_apart(kind, case)


@pytest.mark.parametrize("kind", KINDS)
@given(case=CASES)
@few
def test_documents_of_any_options_get_what_they_would_get_apart(kind: str, case: Case) -> None:
    check_apart(kind, case)


@pytest.mark.parametrize("kind", KINDS)
def test_two_documents_of_a_window_move_nothing_of_each_other(kind: str) -> None:
    pattern, here = drawn(kind, Case(B=1, N=24, C=4, W=6, seed=3))
    documents = Documents(torch.tensor([[0] * 11 + [11] * 13]))
    before = run(pattern, here, documents=documents)
    changed = dict(here)
    for name in "qkv":
        if here[name] is not None:
            changed[name] = torch.cat([torch.randn(1, 2, 11, 4).double(), here[name][:, :, 11:]], 2)
    after = run(pattern, changed, documents=documents)
    # Blocks of other sizes may add up in another order.
    torch.testing.assert_close(before[:, :, 11:], after[:, :, 11:], rtol=0, atol=1e-12)
    assert float((before[:, :, :11] - after[:, :, :11]).abs().max().detach()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_one_document_a_sequence_is_no_documents(kind: str) -> None:
    case = Case(seed=4, rotary=True)
    pattern, here = drawn(kind, case)
    whole = Documents(torch.zeros(case.B, case.N, dtype=torch.int32))
    close(run(pattern, here, documents=whole), run(pattern, here))


@pytest.mark.parametrize("kind", KINDS)
def test_documents_may_have_padding(kind: str) -> None:
    case = Case(seed=5)
    pattern, here = drawn(kind, case)
    documents = packed(case)
    real_BN = torch.rand(case.B, case.N, generator=torch.Generator().manual_seed(2)) < 0.7
    out = run(pattern, here, documents=documents, real_BN=real_BN)
    for b, first_N in enumerate(documents.first_BN):
        for first in first_N.unique():
            at_N = (first_N == first) & real_BN[b]
            alone = dict(here)
            for name in "qkv":
                if here[name] is not None:
                    alone[name] = here[name][b : b + 1, :, at_N]
            close(out[b, :, at_N], run(pattern, alone)[0])
    assert not out[~real_BN[:, None].expand(out.shape[:3])].any()


def test_bad_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="first_BN must have at each position"):
        Documents(torch.tensor([[0, 1, 0]]))
    with pytest.raises(ValueError, match="first_BN must have at each position"):
        Documents(torch.tensor([[1, 1, 1]]))
    q, k, v = torch.randn(3, 1, 1, 4, 8).unbind(0)
    with pytest.raises(
        ValueError, match=r"documents.first_BN has the shape \(1, 3\): must be \(1, 4\)"
    ):
        Local(window=2)(q, k, v, documents=Documents(torch.tensor([[0, 0, 2]])))
    with pytest.raises(ValueError, match="documents is a Tensor: must be None or rtx"):
        Local(window=2)(q, k, v, documents=torch.zeros(1, 4))
    with pytest.raises(ValueError, match="memory=1: must be 0 with documents"):
        Local(window=2)(q, k, v, documents=Documents(torch.zeros(1, 4)), memory=1)
