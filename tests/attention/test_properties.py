"""Every pattern against the oracle on shapes that hypothesis draws: outputs and every gradient, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import routing_cases
import test_fixed
import test_full
import test_local
import test_lsh
import test_random
import test_span
import test_strided
from hypothesis import HealthCheck, given, settings
from oracle_cases import Case, Leaves, assert_same, leaves
from padding_cases import padding
from routing_cases import How
from torch import Tensor

import rtx.attention.chunked
import rtx.attention.weights

CASES = st.builds(
    Case,
    B=st.integers(1, 2),
    H=st.integers(1, 3),
    N=st.integers(1, 30),
    D=st.sampled_from((2, 4, 6)),
    C=st.integers(1, 5),
    W=st.integers(1, 33),
    distances=st.sampled_from((0, 1, 2, 7, 40)),
    attend_self=st.booleans(),
    rotary=st.booleans(),
    scaled=st.booleans(),
    seed=st.integers(0, 1 << 20),
)


class Pair(NamedTuple):
    """A fast path, what the oracle says, and the inputs of a case."""

    fast: Callable[[Case, Leaves], Tensor]
    truth: Callable[[Case, Leaves], Tensor]
    inputs: Callable[[Case], Leaves] = leaves


def routed(**how: object) -> Pair:
    """Routing of a kind, with padding where the case's seed is even."""

    def make(case: Case) -> How:
        return How(**how, masked=case.seed % 2 == 0)  # type: ignore[arg-type]

    return Pair(
        lambda case, x: routing_cases.fast(case, x, make(case)),
        lambda case, x: routing_cases.truth(case, x, make(case)),
    )


PATTERNS = {
    "full": Pair(test_full.fast, test_full.truth),
    "full, padded": Pair(lambda c, x: test_full.fast(c, x, padding(c)), lambda c, x: test_full.truth(c, x, padding(c))),
    "local": Pair(test_local.fast, test_local.truth),
    "local, padded": Pair(
        lambda c, x: test_local.fast(c, x, padding(c)), lambda c, x: test_local.truth(c, x, padding(c))
    ),
    "strided": Pair(test_strided.fast, test_strided.truth),
    "fixed": Pair(test_fixed.fast, test_fixed.truth),
    "span": Pair(test_span.fast, test_span.truth, test_span.with_spans),
    "random": Pair(lambda c, x: test_random.fast(c, x, c.N), lambda c, x: test_random.truth(c, x, c.N)),
    "lsh, one round": Pair(lambda c, x: test_lsh.fast(c, x, 1), lambda c, x: test_lsh.truth(c, x, 1)),
    "lsh, two rounds": Pair(lambda c, x: test_lsh.fast(c, x, 2), lambda c, x: test_lsh.truth(c, x, 2)),
    "lsh, published": Pair(
        lambda c, x: test_lsh.fast(c, x, 2, "reformer"), lambda c, x: test_lsh.truth(c, x, 2, "reformer")
    ),
}
for selection in ("topk", "causal", "nearest"):
    for keys in ("shared", "separate", "projected"):
        PATTERNS[f"{selection}, {keys}"] = routed(selection=selection, keys=keys)


@pytest.mark.parametrize("tiled", [False, True], ids=["", "tiled"])
@pytest.mark.parametrize("name", list(PATTERNS))
def test_the_oracle_agrees(name: str, tiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = PATTERNS[name]
    if tiled:  # small tiles even of small blocks, with and without Shaw's terms
        monkeypatch.setattr(rtx.attention.weights, "worked_in_tiles", lambda q, k, dropout: True)
        monkeypatch.setattr(rtx.attention.chunked, "MIN_ROWS", 2)
        monkeypatch.setattr(rtx.attention.chunked, "MAX_SCORES_CPU", 64)

    # The same draws at every run: a failure is found again, and by everybody.
    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(CASES)
    def agree(case: Case) -> None:
        assert_same(lambda x: pattern.fast(case, x), lambda x: pattern.truth(case, x), pattern.inputs(case))

    agree()
