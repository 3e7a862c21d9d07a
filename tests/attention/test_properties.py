"""Every pattern against the oracle on shapes that hypothesis draws: outputs and every gradient, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import routing_cases
import test_cross
import test_fixed
import test_local
import test_lsh
import test_span
import test_strided
from hypothesis import HealthCheck, given, settings
from oracle_cases import Case, Leaves, assert_same, leaves, plain_rotate, qkv, tables
from padding_cases import padding
from routing_cases import How
from torch import Tensor

import rtx.attention.chunked
import rtx.attention.weights
from rtx.attention import RandomHeads, cross_routing, full
from rtx.model.positions import Rotary

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


class Draw(NamedTuple):
    """A case with what further options some patterns have; each pattern reads those that it takes."""

    case: Case
    masked: bool
    """With padding, in both sequences where there are two."""
    causal: bool
    """False: full attention as in an encoder, which has no distances."""
    keys: str
    """What stands for the keys of routing heads; but for "shared", random heads have keys of their own."""
    slots: bool
    """Shaw's terms by slot rank."""
    rounds: int
    length: int
    """Positions of the other sequence of cross-attention."""
    context: int | None
    """Keys of a cluster there."""

    @property
    def mask(self) -> Tensor | None:
        """The padding mask `[B, N]`."""
        return padding(self.case) if self.masked else None


DRAWS = st.builds(
    Draw,
    case=CASES,
    masked=st.booleans(),
    causal=st.booleans(),
    keys=st.sampled_from(("shared", "separate", "projected")),
    slots=st.booleans(),
    rounds=st.integers(1, 2),
    length=st.integers(1, 30),
    context=st.sampled_from((None, 1, 4, 40)),
)
Read = Callable[[Draw, Leaves, str], Tensor]
"""A pattern by a backend."""


def read_full(draw: Draw, x: Leaves, backend: str) -> Tensor:
    """Full attention, in half of the draws over later positions, too."""
    options: dict[str, Any] = {"scale": draw.case.scale, "mask_BN": draw.mask, "backend": backend}
    return full(*qkv(x), causal=draw.causal, relative=tables(x) if draw.causal else None, **options)


def read_random(draw: Draw, x: Leaves, backend: str) -> Tensor:
    """Random heads, with keys of their own or without."""
    case = draw.case
    options: dict[str, Any] = {"scale": case.scale, "attend_self": case.attend_self, "slot_distance": draw.slots}
    heads = RandomHeads(case.H, case.C, window=case.W, length=case.N, seed=case.seed, backend=backend, **options)
    rotate = plain_rotate if backend == "reference" else Rotary(case.D)
    given: dict[str, Any] = {"relative": tables(x), "mask_BN": draw.mask, "rotate": rotate if case.rotary else None}
    return heads(x["q"], None if draw.keys == "shared" else x["k"], x["v"], **given)[0]


def read_across(draw: Draw, x: Leaves, backend: str) -> Tensor:
    """Routing between two sequences."""
    case = draw.case
    masks = test_cross.masks(case, draw.length) if draw.masked else (None, None)
    options: dict[str, Any] = {"mask_BN": masks[0], "context_mask_BM": masks[1], "scale": case.scale}
    options |= {"window": case.W, "context_window": draw.context, "backend": backend}
    return cross_routing(x["q"], x["k"], x["v"], routing_cases.centroids(case), **options)


def plain(read: Callable[..., Tensor]) -> Read:
    """Patterns that take a mask and nothing else that a case does not hold."""
    return lambda draw, x, backend: read(draw.case, x, draw.mask, backend)


def hashed(variant: str) -> Read:
    """Hashing by a variant; "prefix" is the published one streaming."""
    return lambda draw, x, backend: test_lsh.fast(draw.case, x, draw.rounds, variant, draw.mask, backend)


def routed(keys: str = "", **how: Any) -> Read:
    """Routing of a kind; without distances where nothing is earlier or later."""

    def read(draw: Draw, x: Leaves, backend: str) -> Tensor:
        kind = How(keys=keys or draw.keys, slots=draw.slots, masked=draw.masked, **how)
        x = x if kind.causal else {name: x[name] for name in "qkv"}
        return routing_cases.fast(draw.case, x, kind, backend)

    return read


PATTERNS: dict[str, Read] = {
    "full": read_full,
    "local": plain(test_local.fast),
    "strided": plain(test_strided.fast),
    "fixed": plain(test_fixed.fast),
    "span": plain(test_span.fast),
    "random": read_random,
    "lsh": hashed("causal"),
    "lsh, published": hashed("reformer"),
    "lsh, published, streaming": hashed("prefix"),
    "cross": read_across,
    "topk, encoder": routed(selection="topk", causal=False),
    "topk, streaming": routed(selection="topk", streaming=True),
}
for selection in ("topk", "causal", "nearest"):
    for keys in ("shared", "separate", "projected"):
        PATTERNS[f"{selection}, {keys}"] = routed(keys, selection=selection)


def inputs_of(name: str, draw: Draw) -> Leaves:
    """Return what a pattern reads, all of which gets gradients."""
    if name == "cross":
        return test_cross.inputs_of(draw.case, draw.length)
    return test_span.with_spans(draw.case) if name == "span" else leaves(draw.case)


@pytest.mark.parametrize("tiled", [False, True], ids=["", "tiled"])
@pytest.mark.parametrize("name", list(PATTERNS))
def test_the_oracle_agrees(name: str, tiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read = PATTERNS[name]
    if tiled:  # small tiles even of small blocks, with and without Shaw's terms
        monkeypatch.setattr(rtx.attention.weights, "worked_in_tiles", lambda q, k, dropout: True)
        monkeypatch.setattr(rtx.attention.chunked, "MIN_ROWS", 2)
        monkeypatch.setattr(rtx.attention.chunked, "MAX_SCORES_CPU", 64)

    # The same draws at every run: a failure is found again, and by everybody.
    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(DRAWS)
    def agree(draw: Draw) -> None:
        fast, truth = (lambda x, b=backend: read(draw, x, b) for backend in ("torch", "reference"))
        assert_same(fast, truth, inputs_of(name, draw))

    agree()
