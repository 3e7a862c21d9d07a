"""Bad input gets a ValueError that names the argument, what was given, and what is allowed."""

import itertools
import multiprocessing
import re
import sys
from dataclasses import replace
from functools import partial
from multiprocessing.queues import SimpleQueue
from typing import Any

import pytest
import torch

from rtx.attention import (
    Blocks,
    Centroids,
    Exact,
    Fixed,
    Full,
    Indexer,
    Local,
    Lsh,
    Random,
    RelativeTables,
    Strided,
)
from rtx.attention.adaptive_span import AdaptiveSpan
from tests.helpers.cases import CLUSTERED, KINDS, Case, drawn, make, run, tensors

CASE = Case(B=2, H=3, N=9, D=4)
TABLES = RelativeTables(torch.zeros(3, 4), torch.zeros(3, 4))
GIVEN: list[tuple[str, Any, str]] = [
    ("q", lambda x: x[0], "q_BHND is (3, 9, 4) of torch.float64: must be [B, H, N, D]"),
    ("q", torch.Tensor.long, "q_BHND is (2, 3, 9, 4) of torch.int64: must be [B, H, N, D]"),
    ("q", torch.Tensor.tolist, "q_BHND is a list: must be a torch.Tensor"),
    ("q", lambda x: x[..., :0], "q_BHND is (2, 3, 9, 0) of torch.float64: must be"),
    ("k", lambda x: x[:, :, :-1], "k_BHND has the shape (2, 3, 8, 4): must be (2, 3, 9, 4)"),
    ("k", torch.Tensor.float, "k_BHND is of torch.float32: must be of torch.float64"),
    ("k", lambda x: x.to("meta"), "k_BHND is on meta: must be on cpu"),
    ("k", lambda x: None, "k_BHND=None: this pattern needs keys"),
    ("v", lambda x: x[:1], "v_BHND has the shape (1, 3, 9, 4): must be (2, 3, 9, 4)"),
    ("v", lambda x: x.sum(), "v_BHND has the shape (): must be"),
    ("v", torch.Tensor.tolist, "v_BHND is a list: must be a torch.Tensor"),
    (
        "relative",
        lambda x: tuple(TABLES),
        "relative is a tuple: must be None or rtx.attention.RelativeTables",
    ),
    (
        "relative",
        lambda x: RelativeTables(torch.zeros(3, 5), TABLES[1]),
        "relative.keys_MD has the shape (3, 5): must be",
    ),
    (
        "relative",
        lambda x: RelativeTables(TABLES[0], torch.zeros(2, 4)),
        "relative.values_MD has the shape (2, 4): must be",
    ),
    (
        "relative",
        lambda x: RelativeTables(torch.zeros(0, 4), TABLES[1]),
        "relative.keys_MD has the shape (0, 4): must be",
    ),
    (
        "rotate",
        lambda x: lambda q, first=0: q[0],
        "what rotate returns has the shape (3, 9, 4): must be (2, 3, 9, 4)",
    ),
    (
        "rotate",
        lambda x: lambda q, first=0: [q],
        "what rotate returns is a list: must be a torch.Tensor",
    ),
    ("memory", lambda x: 10, "memory=10: must be "),
    ("memory", lambda x: "3", "memory='3': must be a whole number"),
    (
        "real_BN",
        lambda x: torch.ones(2, 8, dtype=torch.bool),
        "real_BN has the shape (2, 8): must be (2, 9)",
    ),
    ("real_BN", lambda x: torch.ones(2, 9), "real_BN is of torch.float32: must be of torch.bool"),
    ("real_BN", lambda x: [True], "real_BN is a list: must be a torch.Tensor"),
]


def some_of_each() -> list[Any]:
    """Return each kind with every third fault, and so each fault with every third kind."""
    return [
        pytest.param(kind, *fault, id=f"{kind}-{fault[2]}")
        for (row, kind), (column, fault) in itertools.product(enumerate(KINDS), enumerate(GIVEN))
        if (row + column) % 3 == 0
    ]


@pytest.mark.parametrize(("kind", "argument", "give", "said"), some_of_each())
def test_tensors_that_do_not_go_together(kind: str, argument: str, give: Any, said: str) -> None:
    pattern, here = drawn(kind, CASE)
    more: dict[str, Any] = {}
    if argument in ("real_BN", "memory"):
        more[argument] = give(None)
    elif argument == "k" and here["k"] is None:
        here["k"] = here["q"]
        said = "k_BHND is given: must be None"
    else:
        here[argument] = give(here[argument])
    with pytest.raises(ValueError, match=re.escape(said)):
        run(pattern, here, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_refused_where_a_check_is_asked_for(kind: str) -> None:
    for name in ("q", "k", "v"):
        pattern, here = drawn(kind, CASE)
        if here[name] is not None:
            here[name] = here[name].detach().clone()
            here[name][1, 2, 3, 0] = float("inf")
            with pytest.raises(
                ValueError,
                match=rf"{name}_BHND holds NaN or infinity \(1 in all, the first at \(1, 2",
            ):
                run(pattern, here, check_finite=True)


def counts(*names: str) -> list[tuple[str, Any, str]]:
    wrong = (
        (0, "=0: must be at least 1"),
        (2.5, "=2.5: must be a whole number"),
        (True, "=True: must be a whole"),
    )
    return [(name, value, name + said) for name in names for value, said in wrong]


FIXED = partial(Fixed, block=4, summary=2)
BLOCKS = partial(Blocks, 2, 4, window=8)
RANDOM = partial(Random, heads=2, clusters=3, window=4, length=9, seed=0)
LSH = partial(Lsh, heads=2, size=4, window=4, rounds=1, buckets=4, seed=0)
CENTROIDS = partial(Centroids, 2, 3, 4, window=8, length=24, decay=0.9)
OPTIONS: list[Any] = [
    (Full, "scale", 0.0, "scale=0.0: must be finite and above 0"),
    (Full, "scale", float("nan"), "scale=nan: must be finite and above 0"),
    (Full, "scale", "0.5", "scale='0.5': must be a number"),
    (Full, "dropout", 1.0, "dropout=1.0: must be at least 0 and less than 1"),
    (Full, "dropout", None, "dropout=None: must be a number"),
    (Full, "backend", "cuda", "backend='cuda': must be one of auto, torch, native, triton, flex"),
    *((Local, *bad) for bad in counts("window")),
    *((Strided, *bad) for bad in counts("stride")),
    *((FIXED, *bad) for bad in counts("block")),
    *((FIXED, "summary", bad, f"summary={bad}: must be") for bad in (0, 2.5, True)),
    (FIXED, "summary", 5, "summary=5: must be from 1 to block=4"),
    *((RANDOM, *bad) for bad in counts("clusters", "window", "length")),
    (RANDOM, "merge", "sum", "merge='sum': must be one of mean, lse"),
    (RANDOM, "seed", 1 << 70, f"seed={1 << 70}: must be from -2^63"),
    *((Exact, *bad) for bad in counts("window")),
    (BLOCKS, "block", 9, "block=9: must be from 1 to window=8"),
    (partial(Blocks, 2, window=8), "size", "x", "size='x': must be a whole number"),
    (
        partial(AdaptiveSpan, 2, window=8),
        "cost",
        float("nan"),
        "cost=nan: must be finite and at least 0",
    ),
    (partial(Indexer, 2, 4, window=8), "warmup", -1, "warmup=-1: must be at least 0"),
    (LSH, "heads", -1, "heads=-1: must be at least 0"),
    (LSH, "buckets", 3, "buckets=3: must be even"),
    (LSH, "variant", "linear", "variant='linear': must be one of causal, reformer"),
    (CENTROIDS, "keys", "other", "keys='other': must be one of shared, separate, projected"),
    (CENTROIDS, "update", "mean", "update='mean': must be one of members, nearest, sum"),
    (CENTROIDS, "decay", 1.5, "decay=1.5: must be from 0 to 1"),
    (CENTROIDS, "threshold_rate", -1.0, "threshold_rate=-1.0: must be finite and at least 0"),
    (CENTROIDS, "window", 0, "window=0: must be at least 1"),
]


@pytest.mark.parametrize(("of", "argument", "value", "said"), OPTIONS)
def test_options_out_of_range(of: Any, argument: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        of(**{argument: value})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if make(kind, CASE).heads])
def test_another_number_of_heads_is_named(kind: str) -> None:
    pattern = make(kind, CASE)
    with pytest.raises(ValueError, match="q_BHND has"):
        run(pattern, tensors(pattern, replace(CASE, H=2)))


def test_what_a_backend_or_a_pattern_cannot_do_is_refused() -> None:
    pattern = make(CLUSTERED[0], CASE, backend="flex")
    with pytest.raises(ValueError, match=r"backend='flex' cannot run this \(it has no dropout"):
        run(pattern, tensors(pattern, replace(CASE, distances=3)))


def put_refusal_without_triton(answers: SimpleQueue[str | None]) -> None:
    """Import the kernels as on a machine without Triton, and put the reason why they refuse."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("rtx", "triton"):
            del sys.modules[name]
    sys.modules["triton"] = None  # type: ignore[assignment]
    from rtx.attention.engine import packed_attention
    from rtx.attention.engine.softmax import LogitTerms

    x = torch.zeros(1, 1, 4, 16)
    answers.put(packed_attention.refusal(x, x, LogitTerms(1.0)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_imports_without_triton() -> None:
    # Forked, the process need not import torch anew, which takes seconds.
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=put_refusal_without_triton, args=(answers,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert answers.get() == "Triton is not installed"


@pytest.mark.parametrize(
    ("former", "name"), [("spreads", "position_lists"), ("keeps", "cache_size")]
)
def test_a_pattern_with_a_former_name_of_a_method_is_refused(former: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"Mine.{former} is never called: rename it to {name}"):
        type("Mine", (Local,), {former: None})
