"""What a GPU computes, without a GPU: by our kernels in Triton's interpreter, and on the meta
device, whose tensors have shapes alone, so that whatever depends on numbers raises there.
"""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

# torch has no public name for modes that see each operation.
from torch.utils._python_dispatch import TorchDispatchMode

from rtx.attention import Full, Local, Pattern, Probed, Recurrent, Routing, Thresholds, engine, once
from rtx.attention.capacity import raise_capacities
from rtx.attention.centroids import Centroids, after_step
from rtx.attention.engine import blocks, by_triton, dense, flash, triton_selection, windows
from rtx.attention.engine.problem import Problem
from rtx.attention.engine.softmax import LogitTerms
from rtx.attention.reads import QueriesKeys
from rtx.model.compiling import compile_loss, compiler_options
from rtx.model.transformer import Transformer
from rtx.settings.compose import compose
from rtx.settings.names import SELECTIONS
from rtx.training.hardware import has_compiler
from tests.helpers.cases import Case, drawn, gradients, run

ROUTED = tuple(
    f"{how}-{keys}" for how in ("topk", "causal", "nearest") for keys in ("shared", "separate")
)
KINDS = (*ROUTED, "causal-projected", "random", "random-keys", "local", "full", "strided", "fixed")
KINDS += ("lsh", "reformer", "recurrent", "exact", "blocks", "indexer", "probed", "probed-best")


# The lists of all heads together are longer than a tile of a kernel, for either length.
SHORT_CASE = Case(N=12, D=16, C=3, W=5, seed=3, attend_self=False)
LONG_CASE = Case(N=70, D=16, C=4, W=9, seed=3, distances=5, merge="lse")


@pytest.fixture(autouse=True)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum each list with 3 programs instead of 16 where Triton's interpreter runs them.

    Its time grows with the number of programs.
    """
    if not torch.cuda.is_available():
        monkeypatch.setattr(triton_selection, "PARTS_OF_SUM", 3)


@pytest.mark.parametrize("case", [SHORT_CASE, LONG_CASE], ids=["short", "long"])
@pytest.mark.parametrize("kind", KINDS)
def test_our_kernels_give_what_torchs_engine_gives_and_centroids_gather_the_same(
    kind: str, case: Case
) -> None:
    found = []
    gathered = []
    for backend in ("torch", "triton"):
        pattern, here = drawn(kind, case, torch.float32, backend=backend)
        out = run(pattern.train(), here)
        found.append([out, *gradients(pattern, here, out).values()])
        gathered.append(
            pattern.centroids.statistics if isinstance(pattern, Routing | Probed) else ()
        )
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert float((ours - theirs).detach().norm()) <= 2e-6 * float(theirs.detach().norm()) + 1e-9
    torch.testing.assert_close(gathered[1], gathered[0], rtol=1e-5, atol=1e-5)


def test_members_without_room_are_counted_in_training_and_found_all_the_same_in_evaluation() -> (
    None
):
    case = Case(N=20, D=16, C=3, W=5, seed=2)
    pattern, here = drawn("causal-shared", case, torch.float32)
    assert isinstance(pattern, Thresholds)
    pattern.centroids.threshold_HC.fill_(-100.0)  # every position joins every cluster
    expected = run(pattern, here)
    pattern.backend = "triton"
    torch.testing.assert_close(run(pattern, here), expected, rtol=1e-5, atol=1e-5)
    with mock.patch.object(pattern, "capacity_factor", 1):
        run(pattern.train(), here)
        lost = case.B * case.H * case.N * (case.C - 1)
        assert int(pattern.lost_members) == lost
        (line,) = raise_capacities(pattern)
        assert f"{lost:,} members" in line and pattern.capacity_factor == 2
        assert raise_capacities(pattern) == []


def test_queries_without_room_are_counted_in_training_and_probe_all_the_same_in_evaluation() -> (
    None
):
    case = Case(B=1, N=20, D=16, C=5, W=4, seed=2)
    pattern, here = drawn("probed", case, torch.float32)
    assert isinstance(pattern, Probed)
    pattern.centroids.seed_with_next = False
    given = pattern.inputs(here["q"], here["k"], None)
    entries = len(pattern.reads(given, False)[1].start_P)  # type: ignore[union-attr]
    expected = run(pattern, here)
    pattern.backend = "triton"
    with mock.patch.object(
        Probed, "capacity", lambda self, heads, length: 50 * self.capacity_factor
    ):
        pattern.capacity_factor = 1
        torch.testing.assert_close(run(pattern, here), expected, rtol=1e-5, atol=1e-5)
        run(pattern.train(), here)
        assert int(pattern.lost_members) == entries - 50
        (line,) = raise_capacities(pattern)
        assert f"{entries - 50:,} members" in line and pattern.capacity_factor == 2
        assert raise_capacities(pattern) == []


@pytest.mark.parametrize("merge", ["mean", "lse"])
@pytest.mark.parametrize(
    "kind", ["local", "full", "random", "causal-shared", "topk-separate", "nearest-shared"]
)
def test_static_windows_give_what_blocks_give(kind: str, merge: str) -> None:
    pattern, here = drawn(kind, Case(N=300, W=9, D=6, merge=merge, distances=4))
    results = []
    for attend in (blocks.attend, windows.attend):
        given = pattern.inputs(here["q"], here["k"], None)
        (part,) = pattern.reads(given, streaming=False)
        terms = pattern.terms(6, here["relative"])._replace(heads=2)
        problem = Problem(given.q_BHND, given.k_BHND, here["v"], part, terms, merge == "lse")
        out, _ = attend(problem)
        grads = torch.autograd.grad(out.square().sum(), [here["q"], here["v"]])
        results.append([out, *grads])
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


def meta_problem(pattern: Pattern, N: int, D: int, dtype: torch.dtype, **terms: Any) -> Problem:
    """Return what a pattern asks of an engine on a GPU."""
    x_BHND = torch.empty(1, 2, N, D, device="meta", dtype=dtype)
    (part,) = pattern.reads(QueriesKeys(x_BHND, x_BHND, x_BHND, x_BHND), streaming=False)
    return Problem(x_BHND, x_BHND, x_BHND, part, LogitTerms(1.0, **terms), by_member=False)


@pytest.mark.parametrize(
    ("pattern", "dtype", "D", "terms", "taken"),
    [
        (Full(), torch.bfloat16, 64, {}, dense),
        (Full(), torch.float32, 64, {"dropout": 0.1}, dense),
        (Full(), torch.float64, 64, {}, windows),
        (Full(attend_self=False), torch.bfloat16, 64, {}, by_triton),
        (Local(window=16), torch.bfloat16, 64, {}, by_triton),
        (Local(window=16), torch.bfloat16, 64, {"dropout": 0.1}, by_triton),
        (Local(window=16), torch.float32, 64, {}, by_triton),
        (Local(window=16), torch.bfloat16, 256, {}, flash),
        (Local(window=16), torch.bfloat16, 8, {"dropout": 0.1}, windows),
        (Local(window=16), torch.float32, 256, {}, windows),
        (Recurrent(length=64, memory=64), torch.bfloat16, 64, {}, dense),
    ],
)
def test_auto_takes_the_first_engine_that_can(
    pattern: Pattern, dtype: torch.dtype, D: int, terms: dict[str, Any], taken: Any
) -> None:
    with mock.patch.object(by_triton.packed_attention, "HAS_COMPILER", True):
        problem = meta_problem(pattern, 64, D, dtype, **terms)
        assert engine.choose(problem, "auto") is taken
        assert taken.attend(problem)[0].shape == (128, D)


def test_windows_of_whole_sequences_are_those_that_the_oracle_reads() -> None:
    patterns = (
        Full(),
        Local(window=5),
        Recurrent(length=12, memory=4),
        Recurrent(length=12, memory=7, same_length=True),
    )
    for pattern in patterns:
        x_BHND = torch.randn(2, 1, 16, 4)
        memory = getattr(pattern, "memory", 0)
        given = QueriesKeys(x_BHND, x_BHND, x_BHND, x_BHND, memory)
        (part,) = pattern.reads(given, streaming=False)
        window = part.window  # type: ignore[union-attr]
        assert window is not None and window.memory == memory
        place_N = torch.arange(16)
        seen_NN = (place_N[:, None] >= place_N) & (place_N > place_N[:, None] - window.keys)
        rule_NN = pattern.rule(given, 0, False)[0]
        assert torch.equal(rule_NN[memory:], seen_NN[memory:])


@pytest.mark.parametrize("backend", ["torch", "triton", "native"])
def test_lists_of_a_pass_in_inference_mode_serve_training(backend: str) -> None:
    if backend == "native" and not has_compiler():
        pytest.skip("no C++ compiler on this machine")
    pattern = Local(window=4, backend=backend, dropout=0.1 if backend == "torch" else 0.0)
    x_BHND = torch.randn(1, 2, 23, 16)
    with torch.inference_mode():
        pattern(x_BHND, x_BHND, x_BHND)
    pattern(x_BHND.requires_grad_(), x_BHND, x_BHND)[0].sum().backward()
    assert x_BHND.grad is not None and x_BHND.grad.any()


def on_meta(model: Transformer) -> Transformer:
    """Give every tensor of a model its shape alone; shared ones stay shared."""
    made: dict[int, Tensor] = {}

    def bare(x: Tensor | None) -> Any:
        if x is None:
            return None
        if id(x) not in made:
            empty = torch.empty_like(x, device="meta")
            made[id(x)] = nn.Parameter(empty) if isinstance(x, nn.Parameter) else empty
        return made[id(x)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name in held:
                held[name] = bare(held[name])
        if isinstance(module, Centroids):
            module.reset_statistics()
    return model.train()


def meta_step(words: str, compiled: bool = False, dtype: torch.dtype | None = None) -> None:
    """Run a loss, its gradients and the centroids' move where nothing can look at a number."""
    config = compose(words.split())
    model = on_meta(Transformer(config, 256))
    if dtype is not None:
        model = on_meta(model.to(dtype))
    tokens_BN = torch.zeros(2, config.data.length, dtype=torch.int64, device="meta")
    function: Any = model.loss
    if compiled:
        once.cached_lists.clear()
        torch.compiler.reset()
        # Where a graph is made of it, the loss by units has no gradient on the meta device.
        function = compile_loss(model, model.forward)
    with mock.patch.object(
        torch, "compile", partial(torch.compile, fullgraph=True, backend="aot_eager")
    ):
        out, auxiliary = function(tokens_BN)
        (out.mean() + auxiliary).backward()
    after_step(model)
    assert model.embedding.start_S.grad is not None


BASES = ("full", "local", "strided", "fixed", "fixed_block", "lsh", "adaptive_span")
MODELS = (
    *(
        "rt10",
        "rt12",
        "rt12-cifar10",
        "rt22",
        "rt24",
        "rt24-imagenet64",
        "reformer",
        "recall",
        "adaptive_span",
    ),
    *("compressive_transformer", "compressive_transformer-enwik8", "transformer_xl-enwik8"),
    *("sparse_transformer", "sparse_transformer-cifar10", "sparse_transformer-imagenet64"),
    *("adaptive_input", "transformer_xl", "transformer_xl-base"),
)
ADAPTIVE = ("adaptive_input", "transformer_xl", "transformer_xl-base")
"""Those with an adaptive softmax, whose bands are made as small as the vocabulary here."""
SHORT = "model.layers=1 routing.layers=1"


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_no_selection_waits_for_a_number(selection: str, backend: str) -> None:
    meta_step(f"{SHORT} routing={selection} hardware.attention={backend}")


@pytest.mark.parametrize("base", BASES)
def test_no_pattern_waits_for_a_number(base: str) -> None:
    meta_step(f"model.layers=1 routing.layers=0 routing.heads=0 model.base={base}")


@pytest.mark.parametrize(
    "more", ["routing.update=nearest", "routing.commitment=0.1", "routing.keys=projected"]
)
def test_no_option_of_routing_waits_for_a_number(more: str) -> None:
    meta_step(f"{SHORT} routing=causal routing.key_shift=0 {more}")


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_best_of_probed_keys_wait_for_no_number(backend: str) -> None:
    meta_step(
        f"{SHORT} routing=probed routing.window=32 routing.candidates=64"
        f" hardware.attention={backend}"
    )


@pytest.mark.parametrize("model", MODELS)
def test_no_preset_waits_for_a_number(model: str) -> None:
    layers = SHORT if model.startswith(("rt", "recall")) else "model.layers=1"
    meta_step(f"model={model} {layers}{small_bands(model)}")


def small_bands(model: str) -> str:
    """Return overrides for bands within 256 words."""
    return " model.cutoffs=64x128" if model in ADAPTIVE else ""


ONE_LAYER = (
    *(
        "rt10",
        "rt24-imagenet64",
        "compressive_transformer",
        "transformer_xl",
        "transformer_xl-base",
    ),
    "sparse_transformer-imagenet64",
)
"""Another preset has two layers of their kind in one graph; what they have of their own is in the
first, or in none.
"""


@pytest.mark.parametrize("model", [model for model in MODELS if model not in ("rt12", "rt22")])
def test_the_loss_of_every_preset_is_one_graph(model: str) -> None:
    layers = 1 if model in ONE_LAYER else 2
    words = f"model={model} model.layers={layers}{small_bands(model)}"
    if model.startswith("rt"):
        words += f" routing.layers={layers}"
    if model.startswith(("reformer", "sparse_transformer", "adaptive_span")):
        # They drop within what is recomputed: a graph then keeps the state of the device's
        # generator, and the meta device has none.
        words += " model.dropout=0 model.attention_dropout=0 model.ffn_dropout=0"
    meta_step(words, compiled=True)


@pytest.mark.parametrize(
    "words", [*(f"routing={selection}" for selection in SELECTIONS), "routing.heads=0"]
)
def test_a_loss_is_one_graph(words: str) -> None:
    # Local and routing heads of one layer.
    meta_step(f"{SHORT} {words}", compiled=True)


def test_the_mark_of_a_constant_is_the_one_of_torchs_decorator() -> None:
    def marked() -> None: ...

    torch.compiler.assume_constant_result(marked)
    assert vars(marked) == vars(flash.has_flash)


def test_a_loss_is_one_graph_where_torchs_flash_kernel_serves_local_heads() -> None:
    words = "model.layers=2 routing=causal hardware.attention=torch"
    meta_step(words, compiled=True, dtype=torch.bfloat16)


def test_a_loss_in_bfloat16_is_one_graph() -> None:
    meta_step("model.layers=2 routing=causal", compiled=True, dtype=torch.bfloat16)


def test_patterns_stay_in_the_graph_of_a_model_that_moves_to_a_gpu_after_it_is_compiled() -> None:
    config = compose(["model.layers=2"])
    tokens_BN = torch.zeros(1, config.data.length, dtype=torch.int64)
    for move, stays in ((on_meta, True), (Transformer.train, False)):
        model = Transformer(config, 256)
        with mock.patch.object(torch, "compile", lambda loss: loss):
            loss = compile_loss(model, model.loss)
            loss(tokens_BN.to(next(move(model).parameters()).device))
        patterns = [module for module in model.modules() if isinstance(module, Pattern)]
        assert patterns and all(("forward" not in vars(pattern)) == stays for pattern in patterns)


# Operations of one more layer, forward and backward, without those that only view or allocate.
LAUNCHES = {"routing=causal": 170, "routing=topk": 130, "routing.heads=0": 55}
FREE = {
    "view",
    "transpose",
    "permute",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "expand",
    "t",
    "detach",
    "alias",
}
FREE |= {
    "split",
    "split_with_sizes",
    "unbind",
    "as_strided",
    "_unsafe_view",
    "_reshape_alias",
    "is_same_size",
}
FREE |= {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "promote_types"}


class Counted(TorchDispatchMode):
    """Counts the operations inside that start work."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function._schema.name.partition("::")[2] not in FREE
        return function(*args, **(kwargs or {}))


def operations(words: str) -> int:
    """Return how many operations a loss and its gradients start."""
    config = compose(words.split())
    model = on_meta(Transformer(config, 256))
    tokens_BN = torch.zeros(2, config.data.length, dtype=torch.int64, device="meta")
    model.loss(tokens_BN)  # makes lists that shapes alone decide
    with Counted() as counted:
        nats_BN, auxiliary = model.loss(tokens_BN)
        (nats_BN.mean() + auxiliary).backward()
    return counted.count


@pytest.mark.parametrize(("words", "most"), LAUNCHES.items())
def test_a_layer_starts_a_bounded_number_of_operations(words: str, most: int) -> None:
    routed = " routing.layers={0}" if words != "routing.heads=0" else ""
    counts = [
        operations(f"{words} data.length=1024 model.layers={n}" + routed.format(n)) for n in (2, 3)
    ]
    assert 20 < counts[1] - counts[0] <= most


@pytest.mark.parametrize("model", ["rt12", "rt22"])
def test_the_loss_of_a_preset_is_one_graph(model: str) -> None:
    # One layer; test_the_loss_of_every_preset_is_one_graph, which is exhaustive, has more.
    meta_step(f"model={model} {SHORT}", compiled=True)


@pytest.mark.parametrize(
    "words",
    [
        "routing=causal",
        "routing=topk",
        "routing=causal model.recompute=true model.attention_dropout=0.2",
    ],
)
def test_a_graph_computes_what_an_eager_step_does(words: str) -> None:
    # A layer with a local head and a routing head.
    small = (
        "model.layers=1 model.heads=2 model.hidden=32 model.ffn_hidden=32 model.window=16"
        " routing.layers=1 routing.heads=1 routing.clusters=3 routing.window=12 data.length=48"
    )
    config = compose(f"{small} {words} hardware.attention=triton".split())
    torch.manual_seed(0)
    model = Transformer(config, 256).train()
    tokens_BN = torch.randint(0, 256, (2, 48))
    torch.compiler.reset()
    results = []
    for loss in (model.loss, torch.compile(model.loss, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        torch.manual_seed(1)
        with compiler_options():
            nats_BN, auxiliary = loss(tokens_BN)  # type: ignore[operator]
            (nats_BN.mean() + auxiliary).backward()
        results.append(
            [nats_BN.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        )
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)
