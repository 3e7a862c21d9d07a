"""Bad input to every public function: a ValueError that names the argument, what was given, and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from public_calls import FUNCTIONS, Arguments, arguments, call, masks, takes

from rtx.attention import (
    Centroids,
    CrossRoutingHeads,
    FixedHeads,
    FullHeads,
    LshHeads,
    RandomHeads,
    RoutingHeads,
    SpanHeads,
    StridedHeads,
    rotations,
)
from rtx.attention.local import LocalHeads
from rtx.attention.weights import Distances


class Bad(NamedTuple):
    """One kind of bad input: the argument it is in, what to give there (callables turn the valid value), the words."""

    kind: str
    argument: str
    give: Any
    said: str


def tables(distances: int = 3, keys: int = 4, values: int = 4) -> Distances:
    return Distances(torch.zeros(distances, keys), torch.zeros(distances, values))


def tensors(argument: str) -> list[Bad]:
    """What can be wrong with keys or values."""
    # Keys of another sequence may have any length: it is then the values that do not fit.
    shorter = "v_BHMD has the shape (2, 3, 1" if argument.endswith("MD") else f"{argument} has the shape (2, 3, 8, 4)"
    return [
        Bad("shorter", argument, lambda x: x[:, :, :-1], shorter),
        Bad("fewer heads", argument, lambda x: x[:, :2], f"{argument} has the shape (2, 2, "),
        Bad("one sequence", argument, lambda x: x[:1], f"{argument} has the shape (1, 3, "),
        Bad("no dimensions", argument, lambda x: x.sum(), f"{argument} has the shape (): must be"),
        Bad("another type", argument, torch.Tensor.double, f"{argument} is of torch.float64: must be of torch.float32"),
        Bad("elsewhere", argument, lambda x: x.to("meta"), f"{argument} is on meta: must be on cpu"),
        Bad("a list", argument, torch.Tensor.tolist, f"{argument} is a list: must be a torch.Tensor"),
    ]


def counts(*arguments: str) -> list[Bad]:
    """What can be wrong with a count."""
    bad = []
    for argument in arguments:
        bad += [
            Bad("zero", argument, 0, f"{argument}=0: must be at least 1"),
            Bad("negative", argument, -3, f"{argument}=-3: must be at least 1"),
            Bad("a fraction", argument, 2.5, f"{argument}=2.5: must be a whole number, at least 1"),
            Bad("a truth", argument, True, f"{argument}=True: must be a whole number, at least 1"),
        ]
    return bad


QUERIES = [
    Bad("three dimensions", "q_BHND", lambda x: x[0], "q_BHND is (3, 9, 4) of torch.float32: must be [B, H, N, D]"),
    Bad("whole numbers", "q_BHND", torch.Tensor.long, "q_BHND is (2, 3, 9, 4) of torch.int64: must be [B, H, N, D]"),
    Bad("a list", "q_BHND", torch.Tensor.tolist, "q_BHND is a list: must be a torch.Tensor"),
    Bad("vectors of size 0", "q_BHND", lambda x: x[..., :0], "q_BHND is (2, 3, 9, 0) of torch.float32: must be"),
]
MASKS = [
    bad
    for mask, shape, short in (("mask_BN", (2, 9), (2, 8)), ("context_mask_BM", (2, 11), (2, 10)))
    for bad in (
        Bad("shorter", mask, torch.ones(short, dtype=torch.bool), f"{mask} has the shape {short}: must be {shape}"),
        Bad("numbers", mask, torch.ones(shape), f"{mask} is of torch.float32: must be of torch.bool"),
        Bad(
            "elsewhere", mask, torch.ones(shape, dtype=torch.bool, device="meta"), f"{mask} is on meta: must be on cpu"
        ),
    )
]
OPTIONS = [
    Bad("NaN", "scale", float("nan"), "scale=nan: must be finite and above 0"),
    Bad("infinite", "scale", float("inf"), "scale=inf: must be finite and above 0"),
    Bad("zero", "scale", 0.0, "scale=0.0: must be finite and above 0"),
    Bad("negative", "scale", -1.0, "scale=-1.0: must be finite and above 0"),
    Bad("nothing", "dropout", None, "dropout=None: must be a number, at least 0 and less than 1"),
    Bad("everything", "dropout", 1.0, "dropout=1.0: must be at least 0 and less than 1"),
    Bad("negative", "dropout", -0.1, "dropout=-0.1: must be at least 0 and less than 1"),
    Bad("keys of size 5", "relative", tables(keys=5), "relative.keys_MD has the shape (3, 5): must be (3, 4)"),
    Bad("values of size 5", "relative", tables(values=5), "relative.values_MD has the shape (3, 5): must be (3, 4)"),
    Bad("a plain pair", "relative", tuple(tables()), "relative is a tuple: must be None or rtx.attention.Distances"),
    Bad("no distances", "relative", tables(distances=0), "relative.keys_MD has the shape (0, 4): must be (1, 4)"),
    Bad("lists", "relative", Distances([0.0], [0.0]), "relative.keys_MD is a list: must be a torch.Tensor"),  # type: ignore[arg-type]
    Bad("no keys", "relative", Distances(None, None), "relative.keys_MD is a NoneType: must be a torch"),  # type: ignore[arg-type]
    Bad("no values", "relative", tables()._replace(values_MD=None), "relative.values_MD is a NoneType: must be a"),  # type: ignore[arg-type]
    Bad("nothing", "seed", None, "seed=None: must be a whole number, from -2^63 to 2^64 - 1"),
    Bad("a word", "seed", "a", "seed='a': must be a whole number, from -2^63 to 2^64 - 1"),
    Bad("too large", "seed", 1 << 70, f"seed={1 << 70}: must be a whole number, from -2^63 to 2^64 - 1"),
    Bad(
        "of 3 dimensions",
        "rotate",
        lambda q: lambda x: x[0],
        "rotate returns the shape (3, 9, 4): must return (2, 3, 9, 4)",
    ),
    Bad("of size 2", "rotate", lambda q: lambda x: x[..., :2], "rotate returns the shape (2, 3, 9, 2): must return"),
    Bad("a list", "rotate", lambda q: lambda x: [x], "what rotate returns is a list: must be a torch.Tensor"),
    Bad("elsewhere", "relative", Distances(*(x.to("meta") for x in tables())), "relative.keys_MD is on meta"),
    Bad("text", "scale", "0.5", "scale='0.5': must be a number"),
    Bad("text", "dropout", "0.5", "dropout='0.5': must be a number, at least 0 and less than 1"),
    Bad("unknown", "selection", "best", "selection='best': must be one of causal, topk, nearest"),
    Bad("unknown", "variant", "linear", "variant='linear': must be one of causal, reformer"),
    Bad("over the block", "summary", 5, "summary=5: must be from 1 to block=4"),
    *counts("window", "context_window", "stride", "block", "summary", "ramp", "clusters"),
]
STORES = [
    Bad("a list", "centroid_HCD", torch.Tensor.tolist, "centroid_HCD is a list: must be a torch.Tensor"),
    Bad("a list", "rotation_HTDF", torch.Tensor.tolist, "rotation_HTDF is a list: must be a torch.Tensor"),
    Bad("of two heads", "centroid_HCD", lambda x: x[:2], "centroid_HCD has the shape (2, "),
    Bad("none", "centroid_HCD", lambda x: x[:, :0], "centroid_HCD has the shape (3, 0, 4): must be (3, 1, 4)"),
    Bad("of size 3", "centroid_HCD", lambda x: x[..., :3], "centroid_HCD has the shape (3, "),
    Bad("flat", "centroid_HCD", lambda x: x[0], "centroid_HCD has the shape ("),
    Bad("whole numbers", "centroid_HCD", torch.Tensor.long, "centroid_HCD is of torch.int64: must be of a float type"),
    Bad("elsewhere", "centroid_HCD", lambda x: x.to("meta"), "centroid_HCD is on meta: must be on cpu"),
    Bad("of fewer clusters", "threshold_HC", torch.zeros(3, 2), "threshold_HC has the shape (3, 2): must be (3, 3)"),
    Bad("of fewer clusters", "key_threshold_HC", torch.zeros(3, 2), "key_threshold_HC has the shape (3, 2): must be"),
    Bad("one for all heads", "projection_HDD", torch.eye(4), "projection_HDD has the shape (4, 4): must be (3, 4, 4)"),
    Bad("a list", "span_H", [1.0, 2.0, 3.0], "span_H is a list: must be a torch.Tensor"),
    Bad("of two heads", "span_H", torch.zeros(2), "span_H has the shape (2,): must be (3,)"),
    Bad("elsewhere", "span_H", torch.zeros(3, device="meta"), "span_H is on meta: must be on cpu"),
    Bad("of two heads", "rotation_HTDF", lambda x: x[:2], "rotation_HTDF has the shape (2, 2, 4, 2): must be (3, "),
    Bad("no rounds", "rotation_HTDF", lambda x: x[:, :0], "rotation_HTDF has the shape (3, 0, 4, 2): must be (3, "),
    Bad("no buckets", "rotation_HTDF", lambda x: x[..., :0], "rotation_HTDF has the shape (3, 2, 4, 0): must be (3, "),
    Bad("elsewhere", "rotation_HTDF", lambda x: x.to("meta"), "rotation_HTDF is on meta: must be on cpu"),
]
KINDS = [
    *QUERIES,
    *(bad for argument in ("k_BHND", "v_BHND", "k_BHMD", "v_BHMD") for bad in tensors(argument)),
    *MASKS,
    *OPTIONS,
    *STORES,
]
CELLS = [(name, bad) for name in FUNCTIONS for bad in KINDS if takes(name, bad.argument)]


@pytest.mark.parametrize(("name", "bad"), CELLS, ids=[f"{name}: {bad.argument} {bad.kind}" for name, bad in CELLS])
def test_refused_with_a_sentence(name: str, bad: Bad) -> None:
    given = arguments(name)
    valid = given.get(bad.argument)
    if callable(bad.give) and valid is None:  # queries stand for keys
        valid = given["q_BHND"]
    value = bad.give(valid) if callable(bad.give) else bad.give
    with pytest.raises(ValueError, match=re.escape(bad.said)):
        call(name, given, **{bad.argument: value})


@pytest.mark.parametrize("name", ["full", "local", "strided", "fixed", "adaptive_span"])
def test_keys_that_nothing_stands_for(name: str) -> None:
    for backend in ("auto", "reference", "flex"):
        with pytest.raises(ValueError, match=re.escape("k_BHND=None: this pattern needs keys of their own")):
            call(name, arguments(name), k_BHND=None, backend=backend)


FLOATS = ("q_BHND", "k_BHND", "v_BHND", "k_BHMD", "v_BHMD", "centroid_HCD", "span_H", "rotation_HTDF", "projection_HDD")


def spoil(x: torch.Tensor, index: tuple[int, ...], value: float) -> torch.Tensor:
    """Return a copy with one value changed."""
    spoilt = x.clone()
    spoilt[index] = value
    return spoilt


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_check_finite_names_the_argument_the_count_and_the_first(name: str, value: float) -> None:
    given = arguments(name)
    assert call(name, given, check_finite=True).isfinite().all()
    for argument in FLOATS:
        if given.get(argument) is None:
            continue
        x = given[argument]
        last = tuple(size - 1 for size in x.shape)
        middle = tuple(size // 2 for size in x.shape)
        spoilt = spoil(spoil(x, last, value), middle, value)
        said = f"{argument} holds NaN or infinity (2 in all, the first at {middle}): check_finite=True allows neither"
        with pytest.raises(ValueError, match=re.escape(said)):
            call(name, given, **{argument: spoilt}, check_finite=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_check_finite_leaves_padding_alone(name: str) -> None:
    given = arguments(name)
    real = masks(name, given, lambda mask: mask & (torch.arange(mask.shape[1]) % 3 != 1))
    clean = call(name, given, **real)
    spoilt: Arguments = {n: x for n, x in given.items() if n in FLOATS[:5] and x is not None}
    for argument, x in spoilt.items():
        mask = real.get("context_mask_BM", real["mask_BN"]) if "M" in argument else real["mask_BN"]
        spoilt[argument] = x.masked_fill(~mask[:, None, :, None], float("nan"))
    assert torch.equal(call(name, given, **spoilt, **real, check_finite=True), clean)
    with pytest.raises(ValueError, match=re.escape("q_BHND holds NaN or infinity (72 in all, ")):
        call(name, given, **spoilt, check_finite=True)


def test_check_finite_reads_tables_and_lets_thresholds_be_infinite() -> None:
    given = arguments("routing, causal")
    never = torch.full((3, 3), float("inf"))
    assert (call("routing, causal", given, threshold_HC=never, check_finite=True) == 0).all()
    with pytest.raises(ValueError, match=re.escape("threshold_HC holds NaN or infinity (9 in all, ")):
        call("routing, causal", given, threshold_HC=never - never, check_finite=True)
    bad = Distances(torch.zeros(3, 4), torch.full((3, 4), float("nan")))
    with pytest.raises(ValueError, match=re.escape("relative.values_MD holds NaN or infinity (12 in all, ")):
        call("local", arguments("local"), relative=bad, check_finite=True)


def store(keys: str = "shared", heads: int = 3) -> Centroids:
    return Centroids(heads, 2, 4, window=4, length=9, decay=0.9, keys=keys)


MODULES: dict[str, tuple[Callable[[], Any], str]] = {
    "local": (lambda: LocalHeads(window=0), "window=0: must be at least 1"),
    "strided": (lambda: StridedHeads(stride=0), "stride=0: must be at least 1"),
    "fixed": (lambda: FixedHeads(block=3, summary=4), "summary=4: must be from 1 to block=3"),
    "span": (lambda: SpanHeads(2, window=4, ramp=0), "ramp=0: must be at least 1"),
    "lsh": (lambda: LshHeads(2, 4, window=4, rounds=1, buckets=3, seed=0), "buckets=3: must be even"),
    "lsh rounds": (lambda: LshHeads(2, 4, window=4, rounds=0, buckets=2, seed=0), "rounds=0: must be at least 1"),
    "lsh variant": (
        lambda: LshHeads(2, 4, window=4, rounds=1, buckets=2, seed=0, variant="x"),
        "variant='x': must be one of causal, reformer",
    ),
    "local truth": (lambda: LocalHeads(window=True), "window=True: must be a whole number, at least 1"),
    "local dropout": (lambda: LocalHeads(window=2, dropout="x"), "dropout='x': must be a number"),  # type: ignore[arg-type]
    "full dropout": (lambda: FullHeads(dropout=2.0), "dropout=2.0: must be at least 0 and less than 1"),
    "strided scale": (lambda: StridedHeads(stride=2, scale=-1.0), "scale=-1.0: must be finite and above 0"),
    "fixed scale": (lambda: FixedHeads(block=2, summary=1, scale=0.0), "scale=0.0: must be finite and above 0"),
    "span heads": (lambda: SpanHeads(-1, window=4), "heads=-1: must be at least 1"),
    "span dropout": (lambda: SpanHeads(1, window=4, dropout=1.0), "dropout=1.0: must be at least 0 and less than 1"),
    "lsh heads": (lambda: LshHeads(0, 4, window=4, rounds=1, buckets=2, seed=0), "heads=0: must be at least 1"),
    "lsh scale": (
        lambda: LshHeads(2, 4, window=4, rounds=1, buckets=2, seed=0, scale=-1.0),
        "scale=-1.0: must be finite and above 0",
    ),
    "rotations": (lambda: rotations(-1, 1, 4, 2, seed=0), "heads=-1: must be at least 1"),
    "rotations seed": (lambda: rotations(1, 1, 4, 2, seed=None), "seed=None: must be a whole number"),  # type: ignore[arg-type]
    "rotations word": (lambda: rotations(1, 1, 4, 2, seed="a"), "seed='a': must be a whole number"),  # type: ignore[arg-type]
    "rotations far": (lambda: rotations(1, 1, 4, 2, seed=1 << 70), f"seed={1 << 70}: must be a whole number"),
    "cross": (
        lambda: CrossRoutingHeads(store("separate"), context_window=0),
        "context_window=0: must be at least 1",
    ),
    "cross dropout": (
        lambda: CrossRoutingHeads(store("separate"), dropout=None),  # type: ignore[arg-type]
        "dropout=None: must be a number",
    ),
    "random heads": (lambda: RandomHeads(-1, 2, window=4, length=9, seed=0), "heads=-1: must be at least 0"),
    "random seed": (
        lambda: RandomHeads(1, 2, window=4, length=9, seed=1.5),  # type: ignore[arg-type]
        "seed=1.5: must be a whole number, from -2^63 to 2^64 - 1",
    ),
    "random": (lambda: RandomHeads(2, 0, window=4, length=9, seed=0, scale=1.0), "clusters=0: must be at least 1"),
    "routing": (lambda: RoutingHeads(store(), selection="x", scale=1.0), "selection='x': must be one of"),
    "routing scale": (
        lambda: RoutingHeads(store(), selection="topk", scale=-1.0),
        "scale=-1.0: must be finite and above 0",
    ),
    "routing scale as text": (
        lambda: RoutingHeads(store(), selection="topk", scale="0.5"),  # type: ignore[arg-type]
        "scale='0.5': must be a number",
    ),
    "routing commitment as text": (
        lambda: RoutingHeads(store(), selection="topk", scale=1.0, commitment="much"),  # type: ignore[arg-type]
        "commitment='much': must be a number, at least 0",
    ),
    "decay as text": (
        lambda: Centroids(2, 1, 4, window=1, length=9, decay="0.5"),  # type: ignore[arg-type]
        "decay='0.5': must be a number, from 0 to 1",
    ),
    "routing dropout": (
        lambda: RoutingHeads(store(), selection="topk", scale=1.0, dropout=1.0),
        "dropout=1.0: must be at least 0 and less than 1",
    ),
    "routing commitment": (
        lambda: RoutingHeads(store(), selection="topk", scale=1.0, commitment=-1.0),
        "commitment=-1.0: must be at least 0",
    ),
    "routing thresholds": (
        lambda: RoutingHeads(store(), selection="causal", scale=1.0),
        "selection=causal needs centroids with thresholds=True",
    ),
    "random scale": (
        lambda: RandomHeads(2, 1, window=4, length=9, seed=0, scale=0.0),
        "scale=0.0: must be finite and above 0",
    ),
    "random dropout": (
        lambda: RandomHeads(2, 1, window=4, length=9, seed=0, scale=1.0, dropout=-0.1),
        "dropout=-0.1: must be at least 0 and less than 1",
    ),
    "revival": (
        lambda: Centroids(2, 1, 4, window=1, length=9, decay=0.5, revive_after=-1),
        "revive_after=-1: must be at least 0",
    ),
    "half a revival": (
        lambda: Centroids(2, 1, 4, window=1, length=9, decay=0.5, revive_after=1.5),  # type: ignore[arg-type]
        "revive_after=1.5: must be a whole number, at least 0",
    ),
    "keys": (lambda: store("none"), "keys='none': must be one of shared, separate, projected"),
    "clusters": (lambda: Centroids(2, 0, 4, window=1, length=9, decay=0.9), "clusters=0: must be at least 1"),
    "decay": (lambda: Centroids(2, 1, 4, window=1, length=9, decay=1.5), "decay=1.5: must be from 0 to 1"),
    "update": (
        lambda: Centroids(2, 1, 4, window=1, length=9, decay=0.5, update="x"),
        "update='x': must be one of mean, sum",
    ),
}


@pytest.mark.parametrize("what", MODULES)
def test_modules_that_make_no_sense(what: str) -> None:
    make, said = MODULES[what]
    with pytest.raises(ValueError, match=re.escape(said)):
        make()


def test_heads_refuse_tensors_that_do_not_fit() -> None:
    q, k, v = torch.zeros(3, 2, 3, 9, 4)
    routed = RoutingHeads(store(), selection="topk", scale=1.0)
    apart = RoutingHeads(store("separate"), selection="topk", scale=1.0)
    chance = RandomHeads(3, 2, window=4, length=9, seed=0, scale=1.0)
    hashed = LshHeads(3, 4, window=4, rounds=1, buckets=2, seed=0)
    calls: dict[str, Callable[[], Any]] = {
        "v_BHND has the shape (2, 3, 8, 4): must be (2, 3, 9, 4)": lambda: routed(q, None, v[:, :, :8]),
        "v_BHND is of torch.float64: must be of torch.float32": lambda: chance(q, None, v.double()),
        "centroid_HCD has the shape (3, 2, 4): must be (2, 2, 4)": lambda: routed(q[:, :2], None, v[:, :2]),
        "k_BHND is given, but keys='shared'": lambda: routed(q, k, v),
        "k_BHND=None, but keys='separate'": lambda: apart(q, None, v),
        "q_BHND has 2 heads: must have 3": lambda: chance(q[:, :2], None, v[:, :2]),
        "k_BHND is given: must be None": lambda: hashed(q, k, v),
        "k_BHND=None: these heads need keys of their own": lambda: LocalHeads(window=2)(q, None, v),
    }
    for said, use in calls.items():
        with pytest.raises(ValueError, match=re.escape(said)):
            use()


def flat(x_BHND: torch.Tensor) -> torch.Tensor:
    """Forget the last dimension."""
    return x_BHND[..., 0]


def test_heads_and_streams_refuse_turned_vectors_of_another_shape() -> None:
    q, k, v = torch.zeros(3, 2, 3, 9, 4)
    said = re.escape("rotate returns the shape (2, 3, 9): must return (2, 3, 9, 4), what it was given")
    with pytest.raises(ValueError, match=said):
        LocalHeads(window=2)(q, k, v, rotate=flat)
    for heads in (
        LocalHeads(window=2),
        FixedHeads(block=2, summary=1),
        RoutingHeads(store("separate"), selection="topk"),
    ):
        with pytest.raises(ValueError, match=said):
            heads.eval().start().fill(q, k, v, flat)
        with pytest.raises(ValueError, match=re.escape("rotate returns the shape (2, 3, 1): must return (2, 3, 1, 4)")):
            heads.eval().start().step(q[:, :, 0], k[:, :, 0], v[:, :, 0], 0, flat)


@pytest.mark.parametrize("make", [RandomHeads, RoutingHeads])
def test_no_scale_is_that_of_the_size(make: Callable[..., Any]) -> None:
    size = 8
    q, v = torch.randn(2, 1, 2, 300, size, generator=torch.Generator().manual_seed(0))

    def heads(scale: float | None) -> Any:
        torch.manual_seed(0)
        if make is RandomHeads:
            return RandomHeads(2, 3, window=100, length=300, seed=0, scale=scale).eval()
        centroids = Centroids(2, 3, size, window=100, length=300, decay=0.9, thresholds=True)
        return RoutingHeads(centroids, selection="causal", scale=scale).eval()

    unset, given = heads(None), heads(size**-0.5)
    assert torch.equal(unset(q, None, v)[0], given(q, None, v)[0])
    states = unset.start(), given.start()
    for state in states:
        state.fill(q[:, :, :200], None, v[:, :, :200])
    steps = [state.step(q[:, :, 200], None, v[:, :, 200], 200) for state in states]
    assert torch.equal(*steps)


def test_streaming_top_w_is_for_evaluation() -> None:
    given = arguments("routing, topk")
    with pytest.raises(ValueError, match=re.escape("streaming=True with dropout=0.5: streaming top-w is")):
        call("routing, topk", given, streaming=True, dropout=0.5)
    centroids = Centroids(3, 3, 4, window=4, length=9, decay=0.9)
    heads = RoutingHeads(centroids, selection="topk", scale=1.0, dropout=0.5)
    with pytest.raises(ValueError, match=re.escape("streaming=True with dropout=0.5: streaming top-w is")):
        heads.train()(given["q_BHND"], None, given["v_BHND"], streaming=True)
    heads.eval()(given["q_BHND"], None, given["v_BHND"], streaming=True)
