"""Equal vectors are equal in every choice by content, however the products that score them round.

Passes, streams, other batches, the kernel and the oracle then read the same of what comes several
times. The vectors are no whole numbers: products of those are exact, so that they have no rounding
to tell equals apart.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention import Centroids, Exact, Pattern, Probed, Routing, members, oracle, pieces
from rtx.attention.engine import native
from rtx.attention.ties import best, best_places
from rtx.training.hardware import has_compiler
from tests.helpers.cases import CLUSTERED, KINDS, Case, drawn, make, run, stream

BY_CONTENT = ("exact", "indexer", "blocks", "compressed", "blocks_random", "probed", "probed-best")
CHOOSING = tuple(kind for kind in KINDS if kind in (*BY_CONTENT, *CLUSTERED))
DTYPES = {torch.float32: 1e-4, torch.float64: 1e-10}
CASES = [
    Case(B=2, H=2, N=20, D=64, C=4, W=4, seed=1),
    Case(B=1, H=3, N=25, D=16, C=3, W=7, seed=2, attend_self=False),
    Case(B=3, H=1, N=40, D=64, C=5, W=12, seed=3),
    Case(B=2, H=2, N=29, D=6, C=2, W=5, seed=4, merge="lse"),
]
FEW = [CASES[0], CASES[3]]
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")


def units(case: Case, count: int, dtype: torch.dtype, number: int) -> Tensor:
    """Return vectors `[B, H, N, D]` of `count` different ones, the same units in the same places
    for every number.
    """
    generator = torch.Generator().manual_seed(case.seed)
    unit_BN = torch.randint(count, (case.B, case.N), generator=generator)
    table_HUD = torch.randn(
        case.H, count, case.D, generator=generator.manual_seed(case.seed + number)
    )
    return table_HUD[:, unit_BN].transpose(0, 1).to(dtype).contiguous()


def repeated(
    kind: str, case: Case, dtype: torch.dtype, shift: bool = False
) -> tuple[Pattern, dict[str, Any]]:
    """Return a pattern, and tensors whose queries and keys come again and again; with `shift` keys
    look back.
    """
    pattern, here = drawn(kind, case, dtype)
    count = 2 + case.seed
    q = units(case, count, dtype, 1)
    k = units(case, count, dtype, 2)
    if shift:
        k = F.pad(k, (0, 0, 1, 0))[:, :, :-1]
    here["q"] = q
    here["k"] = k if pattern.has_keys else None
    here["v"] = here["v"].detach()
    return pattern, here


def cut(here: dict[str, Any], where: Any) -> dict[str, Any]:
    """Return the tensors of some sequences or positions."""
    return here | {name: here[name][where] for name in "qkv" if here[name] is not None}


def check_reads(pattern: Pattern, here: dict[str, Any], tolerance: float) -> None:
    """Compare a pass with the oracle, with streams behind some prompts, and with other batches and
    lengths.
    """
    close: Callable[..., None] = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    N = here["v"].shape[2]
    whole = run(pattern, here, streaming=True)
    close(whole, run(partial(oracle.attend_by_rule, pattern), here, streaming=True))
    parallel = run(pattern, here)
    if pattern.strictly_causal:
        close(parallel, whole)
    else:
        close(parallel, run(partial(oracle.attend_by_rule, pattern), here))
    for prompt in (0, N // 2):
        close(stream(pattern, here, prompt), whole)
    for b in range(len(whole)):
        close(run(pattern, cut(here, slice(b, b + 1)), streaming=True), whole[b : b + 1])
    close(
        run(pattern, cut(here, (slice(None), slice(None), slice(0, N - 3))), streaming=True),
        whole[:, :, : N - 3],
    )
    with mock.patch.object(pieces, "MAX_SCORES", 100):
        close(run(pattern, here, streaming=True), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CHOOSING)
@pytest.mark.parametrize("number", range(4))
@torch.no_grad()
def test_vectors_that_return_are_read_alike_by_pass_stream_batch_and_oracle(
    number: int, kind: str, dtype: torch.dtype
) -> None:
    shift = number % 2 == 1
    check_reads(*repeated(kind, CASES[number], dtype, shift), DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("selection", ["nearest", "causal"])
@pytest.mark.parametrize("keys", ["shared", "separate"])
@torch.no_grad()
def test_of_equal_centroids_the_first_takes_and_a_score_reaches_its_own_threshold(
    selection: str, keys: str, dtype: torch.dtype
) -> None:
    """Centroids that start at the data are equal where units are, and thresholds may be scores of
    units.
    """
    for case in FEW:
        pattern, here = repeated(f"{selection}-{keys}", case, dtype)
        assert isinstance(pattern, Routing)
        store = pattern.centroids
        given = pattern.inputs(here["q"], here["k"], None)
        store.seed_from(pattern.clustered(given))
        store.centroid_HCD[:, -1] = store.centroid_HCD[:, 0]
        for threshold_HC, x_BHND in zip(
            (store.threshold_HC, store.key_threshold_HC), pattern.clustered(given), strict=False
        ):
            if threshold_HC is not None:
                score_HC = (store.centroid_HCD * x_BHND[0, :, :1].float()).sum(-1)
                threshold_HC.copy_(score_HC)
        check_reads(pattern, here, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["probed", "probed-best"])
@torch.no_grad()
def test_of_equal_centroids_of_keys_the_first_takes_and_is_probed_first(
    kind: str, dtype: torch.dtype
) -> None:
    for case in FEW:
        pattern, here = repeated(kind, case, dtype)
        assert isinstance(pattern, Probed)
        store = pattern.centroids
        store.seed_from([pattern.inputs(here["q"], here["k"], None).rotated_k_BHND])
        store.centroid_HCD[:, -1] = store.centroid_HCD[:, 0]
        check_reads(pattern, here, DTYPES[dtype])


def test_equal_keys_are_read_alike_step_by_step() -> None:
    generator = torch.Generator().manual_seed(1)
    unit_N = torch.randint(4, (20,), generator=generator)
    q, k = (torch.randn(1, 1, 4, 64, generator=generator)[:, :, unit_N] for _ in range(2))
    v = torch.randn(1, 1, 20, 64, generator=generator)
    pattern = Exact(window=4)
    out, _ = pattern(q, k, v)
    cache = pattern.start()
    for n in range(20):
        q1, k1, v1 = (x[:, :, n : n + 1] for x in (q, k, v))
        step = cache.decode(pattern.inputs(q1, k1, None, n), v1, n)
        torch.testing.assert_close(step, out[:, :, n : n + 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["exact", "indexer", "blocks"])
@torch.no_grad()
def test_narrow_types_choose_as_their_numbers_do_when_they_are_widened(
    kind: str, dtype: torch.dtype
) -> None:
    for case in CASES:
        pattern, here = repeated(kind, case, dtype)
        wide = {name: x.float() if torch.is_tensor(x) else x for name, x in here.items()}
        stream_out = stream(pattern, here, case.N // 2).float()
        torch.testing.assert_close(stream_out, run(pattern, here).float(), rtol=2e-2, atol=2e-2)
        if kind == "exact":  # the others round what they choose by
            torch.testing.assert_close(run(pattern.float(), wide), stream_out, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["exact", "indexer", "blocks"])
@torch.no_grad()
def test_autocast_changes_no_choice(kind: str) -> None:
    for case in CASES:
        pattern, here = repeated(kind, case, torch.bfloat16)
        given = pattern.inputs(here["q"], here["k"], None)
        queries = pattern.choice_queries(given)  # type: ignore[operator]
        keys = pattern.choice_keys(given)  # type: ignore[operator]
        found = []
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                places = pattern.chosen_keys(queries, keys, slice(0, case.N), case.N)  # type: ignore[operator]
                found.append(places.sort(dim=-1).values)
        assert torch.equal(*found)


@pytest.mark.parametrize("seed", range(6))
def test_gradients_are_those_of_what_the_oracle_reads(seed: int) -> None:
    for kind in ("exact", "blocks", "causal-separate"):
        pattern, here = repeated(kind, CASES[seed % 4], torch.float64)
        leaves = [here[name].requires_grad_() for name in "qkv"]
        outs = run(pattern, here), run(partial(oracle.attend_by_rule, pattern), here)
        found = [torch.autograd.grad(out.square().sum(), leaves) for out in outs]
        torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)


def fixed(margin: float) -> Callable[[Tensor], Tensor]:
    return lambda places: torch.full(places.shape, margin)


def test_of_the_best_scores_nan_is_the_first_and_equals_are_the_earlier() -> None:
    score = torch.tensor([[1, math.nan, 3, 2], [2, 3, 2, 2], [-math.inf, 1, -math.inf, 0]])
    assert best_places(score, 2, fixed(0.0)).sort().values.tolist() == [[1, 2], [0, 1], [1, 3]]


@pytest.mark.parametrize(
    ("score", "count", "kept"),
    [
        ([1.0, 1.1, 1.2, 0.5], 1, [0]),  # all of 1.0 to 1.2 equal the best
        ([1.0, 1.1, 1.5, 0.5], 2, [0, 2]),  # 1.5 is better, and takes one of two places
        ([1.0, 1.5, 1.7, 0.5], 2, [1, 2]),  # 1.0 is worse than the equals of 1.5
        ([0.5, 1.0, 1.1, 1.1], 3, [1, 2, 3]),
        ([1.1, 0.9, 1.0, 1.3], 3, [0, 1, 3]),
        ([math.nan, 1.0, 1.1, 1.05], 2, [0, 1]),
        ([-math.inf, 0.2, -math.inf, 0.1], 1, [1]),
    ],
)
def test_scores_within_a_margin_of_the_last_taken_are_equal(
    score: list[float], count: int, kept: list[int]
) -> None:
    places = best_places(torch.tensor([score, score[:]]), count, fixed(0.21))
    assert places.sort().values.tolist() == [kept, kept]
    if not any(
        math.isnan(one) for one in score
    ):  # to choices NaN is the best, to the oracle's clusters the worst
        assert sorted(best(score, [0.21] * 4, count)) == kept


@needs_compiler
@pytest.mark.parametrize("kind", CHOOSING)
@torch.no_grad()
def test_the_kernel_reads_what_torchs_engine_reads_of_vectors_that_return(kind: str) -> None:
    for case in CASES:
        pattern, here = repeated(kind, case, torch.float32)
        found = []
        for backend in ("torch", "native"):
            pattern.backend = backend
            found.append(run(pattern, here))
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-5)


@needs_compiler
@pytest.mark.parametrize("choice", ["topk", "causal", "nearest"])
@pytest.mark.parametrize("noise", [0.0, 1e-7])
@pytest.mark.parametrize(
    "N, W, C, count", [(50, 7, 5, 3), (700, 9, 21, 20), (900, 150, 3, 2), (1500, 16, 4, 200)]
)
def test_the_kernel_selects_the_earlier_of_equals(
    choice: str, noise: float, N: int, W: int, C: int, count: int
) -> None:
    """Also of vectors that differ by rounding, which are equal to every score, and more than a list
    has room for.
    """
    draw = torch.Generator().manual_seed(N)
    unit_N = torch.randint(count, (N,), generator=draw)
    x_BHND = torch.randn(2, 2, count, 32, generator=draw)[:, :, unit_N]
    x_BHND = x_BHND * (1 + noise * torch.randn(x_BHND.shape, generator=draw))
    store = Centroids(2, C, 32, window=W, length=N, decay=0.9, threshold_rate=0.1)
    store.centroid_HCD[:, 0] = x_BHND[0, :, 0]
    store.centroid_HCD[:, -1] = store.centroid_HCD[:, 0]
    store.threshold_HC.copy_((store.centroid_HCD * x_BHND[0, :, :1]).sum(-1))
    given = store.centroid_HCD, x_BHND, store.threshold_HC if choice == "causal" else None
    window = 0 if choice == "nearest" else W
    chosen = [
        function(*given, window=window, nearest=True)
        for function in (native.select, members.select_by_torch)
    ]
    for ours, theirs in zip(*(each[:3] for each in chosen), strict=True):
        assert torch.equal(ours, theirs)


def test_drawn_blocks_are_those_of_the_hash_whatever_the_keys_are() -> None:
    case = CASES[0]
    pattern = make("blocks_random", case)
    wide = [torch.randn(case.B, case.H, case.N, case.D).double() for _ in range(3)]
    masks = [pattern.rule(pattern.inputs(q, q, None), 0, False) for q in (wide[0], 1e12 * wide[0])]
    assert torch.equal(*masks)
    torch.testing.assert_close(
        pattern(*wide)[0], oracle.attend_by_rule(pattern, wide[0], wide[1], wide[2])
    )
