"""Query heads that share keys and values: by the oracle, by copies of the keys, and in streams."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings

from rtx import attention
from rtx.attention import Pattern, oracle
from rtx.attention.documents import Documents
from rtx.attention.positional import RowCache
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

CHOSEN = ("exact", "blocks", "compressed", "blocks_random", "indexer", "indexer-dense")
quick = settings(max_examples=6, deadline=None)
BY_CONTENT = (*CLUSTERED, *CHOSEN, "probed", "probed-best")
FEW = (replace(MIXED[0], N=8), replace(MIXED[1], H=2, N=11))


def grouped(kind: str, case: Case, queries: int, together: bool) -> tuple[Pattern, Case]:
    """Return a pattern with `case.H` key-value heads, and the case of the heads that choose.

    Its H is their number: key-value heads choose if `together`, else query heads.
    """
    if not together:
        case = replace(case, H=case.H * queries)
    pattern = make(kind, case)
    pattern.group_queries(queries, together=together)
    return pattern, case


def check_copied_keys(kind: str, case: Case) -> None:
    """Compare heads that choose by themselves with the oracle, and with copies of their keys."""
    pattern, case = grouped(kind, case, queries=2, together=False)
    check(pattern, case)
    here = tensors(pattern, case)
    out = run(pattern, here)
    plain = make(kind, case)
    keys = None
    if here["k"] is not None:
        keys = here["k"].repeat_interleave(2, dim=1)
    copies = {**here, "k": keys, "v": here["v"].repeat_interleave(2, dim=1)}
    expected = run(plain, copies)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    ours = gradients(pattern, here, out)
    theirs = gradients(plain, here, expected)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_choose_by_themselves_are_those_of_the_oracle_and_of_copied_keys(
    kind: str,
) -> None:
    for case in FEW:
        check_copied_keys(kind, case)


@pytest.mark.parametrize("kind", BY_CONTENT)
def test_heads_that_choose_together_are_those_of_the_oracle(kind: str) -> None:
    for case in FEW:
        check(*grouped(kind, case, queries=3, together=True))


@pytest.mark.parametrize("kind", KINDS)
@given(case=CASES)
@quick
def test_heads_of_any_options_that_choose_by_themselves(kind: str, case: Case) -> None:
    check_copied_keys(kind, case)


@pytest.mark.parametrize("kind", BY_CONTENT)
@given(case=CASES)
@quick
def test_heads_of_any_options_that_choose_together(kind: str, case: Case) -> None:
    check(*grouped(kind, case, queries=3, together=True))


@pytest.mark.parametrize("kind", ["causal-separate", "exact", "topk-shared", "probed"])
@torch.no_grad()
def test_heads_that_choose_together_read_the_same_keys(kind: str) -> None:
    """With unit vectors as values an output is the weight of each key."""
    pattern, case = grouped(kind, Case(N=12, H=2), queries=3, together=True)
    here = tensors(pattern, case)
    here["v"] = torch.eye(12, dtype=torch.float64).expand(case.B, case.H, -1, -1)
    read = run(pattern, here) > 0
    by_group = read.unflatten(1, (case.H, 3))
    assert torch.equal(by_group, by_group[:, :, :1].expand_as(by_group))
    assert not torch.equal(by_group[:, 0], by_group[:, 1]), "groups choose apart"


@pytest.mark.parametrize(
    ("kind", "together"),
    [
        *((kind, False) for kind in ("full", "local", "strided", "exact", "blocks", "probed")),
        *((kind, True) for kind in ("exact", "blocks", "probed")),
    ],
)
@torch.no_grad()
def test_a_stream_stores_keys_and_values_once_for_a_group(kind: str, together: bool) -> None:
    key_value_heads = 2
    made = Case(B=1, N=12, H=key_value_heads)
    pattern, case = grouped(kind, made, queries=4, together=together)
    here = tensors(pattern, case)
    cache = pattern.start()
    assert isinstance(cache, RowCache)
    cache.prefill(pattern.inputs(here["q"], here["k"], None), here["v"])
    assert cache.key_BGSD is not None and cache.value_BGSD is not None
    assert cache.key_BGSD.shape[1] == cache.value_BGSD.shape[1] == key_value_heads


def test_tensors_of_other_numbers_of_heads_are_refused() -> None:
    pattern = attention.Local(window=3)
    with pytest.raises(ValueError, match="queries=0: must be at least 1"):
        pattern.group_queries(0)
    pattern.group_queries(2)
    three = torch.zeros(1, 3, 4, 2)
    with pytest.raises(ValueError, match="q_BHND has 3 heads: must have a multiple of 2"):
        pattern(three, three, three)
    four = torch.zeros(1, 4, 4, 2)
    with pytest.raises(ValueError, match=r"k_BHND has the shape \(1, 4, 4, 2\): must be"):
        pattern(four, four, four)


@pytest.mark.parametrize(
    "kind", ["full", "fixed", "causal-separate", "topk-shared", "exact", "probed"]
)
@pytest.mark.parametrize("together", [True, False])
@torch.no_grad()
def test_documents_are_sequences_by_themselves(kind: str, together: bool) -> None:
    pattern, case = grouped(kind, Case(), queries=2, together=together and kind in BY_CONTENT)
    here = tensors(pattern, case)
    is_start_BN = torch.zeros(case.B, case.N, dtype=torch.bool)
    is_start_BN[0, [5, 9]] = True
    is_start_BN[1, 3] = True
    documents = Documents.that_start(is_start_BN)
    found = run(pattern, here, documents=documents)
    expected = run(partial(oracle.attend_by_rule, pattern), here, documents=documents)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
