"""The plan's counts of work and memory against real counts, and what `auto` chooses."""

import dataclasses
import gc
import itertools

import pytest
import torch
from torch import Tensor

# torch has no public name for a count of a model's memory on any device.
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from rtx.analysis import footprint as plan
from rtx.analysis import head_memory, micro_batch
from rtx.analysis.cost import cost
from rtx.attention import (
    Fixed,
    FixedSummary,
    Full,
    Local,
    PositionPattern,
    Recurrent,
    Strided,
)
from rtx.attention.clusters import Routing
from rtx.attention.engine import blocks, packed_attention
from rtx.attention.indexer import Indexer
from rtx.attention.pairs import triangle
from rtx.attention.routing_thresholds import CAPACITY_FACTOR
from rtx.data.catalog import vocabulary_size
from rtx.model import heads
from rtx.model.heads import make_pattern
from rtx.model.transformer import Transformer
from rtx.settings.compose import compose
from rtx.settings.derived import ROUTED, clusters
from rtx.settings.presets import options
from rtx.settings.rules import resolve
from rtx.settings.schema import Config, DataConfig, ModelConfig, RoutingConfig, with_values
from tests.helpers.cases import Dilated

SHRUNK = (
    *(
        "data=enwik8",
        "data.length=512",
        "model=rt12",
        "model.layers=2",
        "model.hidden=128",
        "model.heads=4",
    ),
    *("model.ffn_hidden=256", "model.window=64", "routing.layers=1", "routing.heads=2"),
    *("routing.window=64", "trainer.batch_size=2", "hardware=cpu"),
)
NO_DROPOUT = ("model.dropout=0", "model.attention_dropout=0", "model.ffn_dropout=0")
LOCAL = ("routing.heads=0", "routing.layers=0")
TOPK = ("routing=topk", "routing.layers=2", "routing.heads=4")
MODERN = ("model.norm=pre", "model.positions=rotary", *NO_DROPOUT)
PLAIN = ("model.positions=rotary", *NO_DROPOUT)
ROUGHLY = [
    (*LOCAL, "model.recompute=true"),
    (*LOCAL, "model.base=local+strided", "model.stride=16", *PLAIN),
    (*LOCAL, "model.base=adaptive_span", *PLAIN),
    (*LOCAL, "model.base=lsh", "model.positions=none"),
    ("routing=blocks", "routing.layers=2", "routing.heads=4", "routing.compressed=true", *PLAIN),
]
"""What less usual patterns keep is known roughly."""
CASES = [
    (*LOCAL, "model.positions=none", "model.norm=pre", "model.ffn=relu"),
    (*LOCAL, "model.norm=pre", "model.ffn=gelu", *PLAIN),
    (*LOCAL, "model.norm_kind=rmsnorm", "model.ffn=swiglu", *MODERN),
    (*LOCAL, "model.norm_kind=rmsnorm", "model.qk_norm=true", "model.kv_heads=1", *MODERN),
    ("routing=causal", "model.kv_heads=2", "model.qk_norm=true", *MODERN),
    LOCAL,
    (*LOCAL, "trainer.batch_size=1"),
    (*LOCAL, "model.base=full", *PLAIN),
    (*LOCAL, "model.recompute=true", *PLAIN),
    (*LOCAL, "model.ffn_parts=4"),
    (*LOCAL, "hardware.precision=bf16"),
    (*LOCAL, *PLAIN, "hardware.attention=native"),
    TOPK,
    (*TOPK, *PLAIN),
    (*TOPK, *PLAIN, "hardware.attention=native"),
    (*TOPK, "hardware.precision=bf16", "model.positions=rotary"),
    ("routing=random", "routing.layers=2"),
    ("routing=causal", "routing.layers=2", "routing.heads=4"),
    ("routing=nearest", "routing.layers=2", *PLAIN),
    ("routing=exact", "routing.layers=2", "routing.heads=4", *PLAIN),
    ("routing=exact", "routing.layers=2", *PLAIN, "hardware.attention=native"),
    ("routing=indexer", "routing.layers=2", "routing.heads=4", "routing.warmup=1", *PLAIN),
    *(
        ("model.recompute=true", f"routing={how}", "routing.layers=2", *PLAIN)
        for how in ("causal", "exact", "indexer")
    ),
    (
        "model.recompute=true",
        "routing=causal",
        "routing.layers=2",
        "routing.keys=separate",
        "model.positions=shaw",
    ),
    *ROUGHLY,
]


def test_a_part_in_which_nobody_reads_is_planned() -> None:
    config = compose([*SHRUNK, *LOCAL, "model.base=fixed", "model.stride=512"])
    assert plan.saved(config, 2) < 1.2 * plan.saved(
        compose([*SHRUNK, *LOCAL, "model.base=full"]), 2
    )


@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_what_is_kept_is_what_stays_behind(overrides: tuple[str, ...]) -> None:
    low, high = (0.7, 1.4) if overrides in ROUGHLY else (0.93, 1.07)
    # oneDNN's products keep the same, but torch's tracker knows no tensors in its layout.
    config = compose([*SHRUNK, *overrides, "hardware.products=torch"])
    batch = config.trainer.batch_size
    narrowed = 2 * cost(config, 256).parameters if config.hardware.precision == "bf16" else 0
    planned = (
        plan.saved(config, batch)
        + plan.logits_bytes(config, batch * config.data.length, 256)[0]
        + narrowed
    )
    assert low < planned / kept_for_backward(config) < high


class Gapped(PositionPattern):
    """Defined by pairs of positions alone, so its heads read by an index."""

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        return (i - j) % 64 == 0


@pytest.mark.parametrize("sequences", [1, 2])
def test_an_index_of_base_heads_saves_scores_while_its_own_heads_have_few(
    sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*SHRUNK, *LOCAL, *PLAIN, "hardware.products=torch", f"trainer.batch_size={sequences}")
    config = compose(words)
    scores = sequences * config.model.heads * config.data.length**2
    assert (scores <= blocks.MAX_SCORES_CPU) == (sequences == 1), "both cases are tested"
    for module in (heads, head_memory):
        monkeypatch.setattr(module, "make_pattern", lambda *_: Gapped())
    monkeypatch.setattr(head_memory, "saved_by_key", {})
    logits, _ = plan.logits_bytes(config, sequences * config.data.length, 256)
    planned = plan.saved(config, sequences) + logits
    assert 0.9 < planned / kept_for_backward(config) < 1.1


def kept_for_backward(config: Config) -> int:
    """Return the bytes that a forward pass saves for the backward pass, and for telemetry."""
    torch.manual_seed(0)
    model = Transformer(config, 256).train()
    tracker = MemTracker()
    tracker.track_external(model)
    tokens_BN = torch.randint(0, 256, (config.trainer.batch_size, config.data.length))
    with (
        tracker,
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.hardware.precision == "bf16"),
    ):
        nats_BN, _ = model.loss(tokens_BN)
        assert nats_BN.requires_grad
        gc.collect()
        return tracker.get_tracker_snapshot()[torch.device("cpu")]["Activation"]


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for a GPU that has what our kernels need."""
    monkeypatch.setattr(packed_attention, "HAS_TRITON", True)
    monkeypatch.setattr(packed_attention, "HAS_COMPILER", True)
    monkeypatch.setattr(head_memory, "saved_by_key", {})


ON_GPU = (
    "hardware=gpu",
    "hardware.precision=bf16-true",
    "hardware.loss=torch",
    "model.recompute=false",
)
GPU_CASES = [
    LOCAL,
    (*LOCAL, *PLAIN),
    (*LOCAL, *PLAIN, "hardware.precision=fp32"),
    TOPK,
    (*TOPK, *PLAIN),
    (*TOPK, *PLAIN, "hardware.attention=torch"),
    ("routing=causal", "routing.layers=2", "routing.heads=4"),
    ("routing=causal", "routing.layers=2", "routing.heads=4", "routing.keys=separate", *PLAIN),
    ("routing=causal", "routing.layers=2", "model.recompute=true"),
    ("routing=nearest", "routing.layers=2", *PLAIN),
    ("routing=random", "routing.layers=2"),
    ("routing=exact", "routing.layers=2", "routing.heads=4", *PLAIN),
    (*LOCAL, "model.base=adaptive_span", *PLAIN),
    (*LOCAL, "model.base=local+strided", "model.stride=16", *PLAIN),
    (*LOCAL, "model.base=fixed", "model.stride=32", *PLAIN),
    (*LOCAL, "model.base=lsh", "model.positions=none"),
]


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize("overrides", GPU_CASES)
def test_what_is_kept_on_a_gpu_is_what_its_engines_save(overrides: tuple[str, ...]) -> None:
    config = compose([*SHRUNK, *ON_GPU, *overrides])
    batch = config.trainer.batch_size
    planned = (
        plan.saved(config, batch) + plan.logits_bytes(config, batch * config.data.length, 256)[0]
    )
    assert 0.93 < planned / saved_without_numbers(config) < 1.07


def saved_without_numbers(config: Config) -> int:
    """Return the bytes that a forward pass saves on a GPU, by tensors that have shapes alone."""
    dtype = torch.bfloat16 if config.hardware.precision == "bf16-true" else torch.float32
    model = Transformer(config, 256).to(device="meta", dtype=dtype).train()
    tokens_BN = torch.zeros(
        config.trainer.batch_size, config.data.length, dtype=torch.int64, device="meta"
    )
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        nats_BN, _ = model.loss(tokens_BN)
    assert nats_BN.requires_grad
    for module in model.modules():  # for telemetry
        if isinstance(module, Routing) and module.last_members:
            saved += [members.row_M for members in module.last_members[0]]
    weights = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    sizes = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in saved}
    return sum(size for storage, size in sizes.items() if storage not in weights)


@pytest.mark.usefixtures("with_triton")
def test_on_a_gpu_full_attention_keeps_what_a_window_keeps() -> None:
    # Without numbers, torch takes no kernel for full attention that a GPU would take.
    full, local = (
        compose([*SHRUNK, *ON_GPU, *LOCAL, *PLAIN, f"model.base={base}"])
        for base in ("full", "local")
    )
    assert plan.saved(full, 2) == plan.saved(local, 2)


@pytest.mark.usefixtures("with_triton")
def test_tables_by_distance_are_there_in_the_backward_pass_on_a_gpu() -> None:
    shaw = (*SHRUNK, *ON_GPU, *TOPK, "model.positions=shaw")
    less, more = (compose([*shaw, f"model.max_distance={most}"]) for most in (300, 400))
    works = [head_memory.attention_bytes(config, 0, 2)[1] for config in (less, more)]
    N = less.data.length
    members = clusters(less) * less.routing.window
    tables = 2 * 4 * (N + members) * 100 * 2  # of keys and of values, 4 heads, in bfloat16
    assert works[1] - works[0] == pytest.approx(tables / N)


@pytest.mark.usefixtures("with_triton")
def test_lists_of_thresholds_have_their_room_on_a_gpu() -> None:
    causal, topk = (
        compose(
            [
                *SHRUNK,
                *ON_GPU,
                *PLAIN,
                f"routing={how}",
                "routing.keys=shared",
                "routing.key_shift=0",
            ]
        )
        for how in ("causal", "topk")
    )
    members = clusters(topk) * topk.routing.window
    heads = 2
    size = 32
    lists = 6 * 4 + 4  # six numbers in int32, and a log-sum
    more = (CAPACITY_FACTOR - 1) * members * heads * (lists + 2 * size)
    assert 2 * more == pytest.approx(plan.saved(causal, 2) - plan.saved(topk, 2), rel=0.01)


GIB = 2**30
DATA = {"tiny": "stdlib", "rt10": "wikitext103", "rt22": "pg19", "reformer": "imagenet64"}
DATA |= dict.fromkeys(("rt12", "rt24", "adaptive_span", "sparse_transformer"), "enwik8")
DATA |= dict.fromkeys(("transformer_xl", "transformer_xl-base", "adaptive_input"), "wikitext103")
DATA |= {"compressive_transformer": "pg19", "modern": "stdlib", "encoder": "masked"}
"""The data set of every preset that does not name it."""
SMALL = (
    *(
        "data=enwik8",
        "model=rt12",
        "data.length=1024",
        "model.layers=4",
        "routing.layers=4",
        "model.hidden=256",
    ),
    *("model.ffn_hidden=768", "trainer.batch_size=12", "hardware=gpu"),
)


@pytest.mark.parametrize("preset", options("model"))
def test_every_preset_starts_on_a_gpu_of_16_gib(preset: str) -> None:
    config = compose(
        [f"data={DATA.get(preset) or preset.rpartition('-')[2]}", f"model={preset}", "hardware=gpu"]
    )
    known = vocabulary_size(config.data)
    total = cost(config, known)
    choices = [
        micro_batch.choose_micro_batch(config, known, size * GIB, total=total)
        for size in (16, 24, 80)
    ]
    for size, choice in zip((16, 24, 80), choices, strict=True):
        assert choice.fits and choice.peak <= micro_batch.FILLED * size * GIB
        assert config.trainer.batch_size % choice.micro_batch_size == 0
    for less, more in itertools.pairwise(choices):
        assert more.recompute <= less.recompute  # a larger device takes no dearer way
        assert more.recompute < less.recompute or more.micro_batch_size >= less.micro_batch_size


@pytest.mark.parametrize(
    "words",
    [
        "",
        "model.positions=xl model.base=recurrent routing.heads=0 routing.layers=0",
        "model.embedding=adaptive model.cutoffs=16x64",
    ],
)
def test_hardware_micro_batch_and_recomputation_change_no_cost(words: str) -> None:
    """So a run computes its cost once, before these are chosen."""
    config = compose([*SMALL, *words.split()])
    others = {"hardware.devices": 4, "hardware.attention": "torch", "hardware.precision": "bf16"}
    elsewhere = micro_batch.with_choice(with_values(config, others), 1, True)
    assert cost(elsewhere, 256) == cost(config, 256)


def test_the_largest_that_fits_is_taken_and_blocks_are_recomputed_last() -> None:
    config = compose(SMALL)

    def room(size: int) -> float:
        tried = micro_batch.with_choice(config, size, False)
        return sum(plan.footprint(tried, cost(tried, 256), size, 256).values()) / micro_batch.FILLED

    for size in (12, 4, 1):
        assert micro_batch.choose_micro_batch(config, 256, 1.001 * room(size))[:2] == (size, False)
        assert micro_batch.choose_micro_batch(config, 256, 0.999 * room(size))[:2] != (size, False)
    tight = micro_batch.choose_micro_batch(config, 256, 0.999 * room(1))
    assert tight.recompute and tight.fits
    nothing = micro_batch.choose_micro_batch(config, 256, 1e6)
    assert nothing[:2] == (1, True) and not nothing.fits
    assert micro_batch.choose_micro_batch(config, 256, 80 * GIB, world=3).micro_batch_size == 4, (
        "devices share the batch"
    )
    asked = compose([*SMALL, "trainer.micro_batch_size=6", "model.recompute=false"])
    assert micro_batch.fit_to_device(asked, 256, 80 * GIB) == (asked, "")
    same, line = micro_batch.fit_to_device(asked, 256, 1e6)
    assert same == asked and line.startswith("warning: may not fit: ")
    assert micro_batch.choose_micro_batch(
        compose([*SMALL, "trainer.micro_batch_size=6"]), 256, 1e6
    )[:2] == (6, True)
    assert micro_batch.choose_micro_batch(compose([*SMALL, "model.recompute=true"]), 256, 80 * GIB)[
        :2
    ] == (12, True)


LITTLE = resolve(
    Config(
        data=DataConfig(length=32),
        routing=RoutingConfig(heads=1, layers=1, window=8),
        model=ModelConfig(layers=2, heads=2, hidden=16, window=4, ffn_hidden=24),
    )
)


def test_parameters_and_dense_operations_are_those_that_torch_counts() -> None:
    assert cost(LITTLE, 11).parameters == Transformer(LITTLE, 11).count_parameters()
    local = resolve(dataclasses.replace(LITTLE, routing=RoutingConfig(heads=0, layers=0, window=8)))
    model = Transformer(local, 11).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.loss(torch.zeros(1, 32, dtype=torch.int64))
    counts = counter.get_flop_counts()["Global"]
    dense = sum(flops for operator, flops in counts.items() if "mm" in str(operator))
    assert cost(local, 11).dense == dense


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (7, 3, 2), (8, 8, 1), (7, 20, 5), (30, 4, 3), (31, 5, 5)]
)
def test_pairs_by_position_are_those_of_the_rules(sizes: tuple[int, int, int]) -> None:
    n, stride, summary = sizes
    at_N = torch.arange(n)[:, None]
    for pattern in (
        Full(),
        Local(window=stride),
        Strided(stride=stride),
        Fixed(block=stride, summary=summary),
        FixedSummary(block=stride, summary=summary),
        Dilated(window=summary, stride=stride),
    ):
        sees_NN = pattern.sees(0, at_N, at_N.T) & (at_N >= at_N.T)
        assert pattern.pairs_of_head(n) == int(sees_NN.sum())
    segment = Recurrent(length=n, memory=stride)
    assert segment.pairs_of_head(n) == n * stride + triangle(n)


@pytest.mark.parametrize("selection", ["exact", "indexer", "blocks", "blocks_random"])
@pytest.mark.parametrize(("window", "block"), [(8, 8), (9, 4), (31, 5), (32, 3)])
def test_pairs_of_chosen_keys_are_those_of_the_rules(
    selection: str, window: int, block: int
) -> None:
    routing = RoutingConfig(
        selection=selection, keys="separate", heads=1, layers=1, window=window, block=block
    )
    config = resolve(dataclasses.replace(LITTLE, routing=routing))
    pattern = make_pattern(ROUTED, 1, config, 1)
    q, k = torch.randn(2, 1, 1, 32, 8, generator=torch.Generator().manual_seed(0))
    choice = pattern.choice_operations(32, 8)
    assert pattern.pairs_of_head(32) == int(
        pattern.rule(pattern.inputs(q, k, None), 0, False).sum()
    )
    blocks = 2 * 8 * sum(i // block for i in range(32))
    usual = {"exact": 2 * 8 * triangle(32), "blocks": blocks, "blocks_random": 0}
    assert choice == usual.get(selection, choice)
    if isinstance(pattern, Indexer):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            given = pattern.inputs(q, k, None)
            _ = pattern.choice_queries(given), pattern.choice_keys(given)
        assert choice == counter.get_total_flops() + 2 * pattern.query_HDE.shape[-1] * triangle(32)


def test_routing_costs_less_than_full_attention_and_recomputation_a_pass_more() -> None:
    config, again = (
        compose(["data=enwik8", "model=rt24", f"model.recompute={x}"]) for x in ("false", "true")
    )
    total = cost(config, 256)
    assert total.attention + total.selection < total.full_attention / 4
    assert total.step(again) - total.step(config) == config.trainer.batch_size * (
        total.dense + total.attention
    )


def test_hashing_heads_cost_their_rounds() -> None:
    model = dataclasses.replace(LITTLE.model, base="lsh", hash_rounds=3, hash_buckets=8)
    hashing = dataclasses.replace(
        LITTLE, model=model, routing=RoutingConfig(heads=0, layers=0, window=8)
    )
    pattern = make_pattern("lsh", 1, resolve(hashing), 0)
    # 8 buckets of 4 positions: all pairs of a bucket are inside the window of 4.
    assert pattern.pairs_of_head(32) == 3 * 8 * triangle(4)
    assert pattern.choice_operations(32, 8) == 3 * 2 * 8 * 4 * 32
