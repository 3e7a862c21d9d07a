"""The plan's counts against counting for real."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import rtx.analysis.cost
import rtx.attention.weights
from rtx.analysis.cost import cost, fixed_pairs, memory, pairs, selection, strided_pairs, triangle, window_pairs
from rtx.attention import reference
from rtx.attention.shaw import Sorted
from rtx.checks import resolve
from rtx.compose import compose
from rtx.config import Config, DataConfig, ModelConfig, RoutingConfig
from rtx.model.transformer import Transformer

SMALL = resolve(
    Config(
        data=DataConfig(length=32),
        routing=RoutingConfig(heads=1, layers=1, window=8),
        model=ModelConfig(layers=2, heads=2, hidden=16, window=4, ffn_hidden=24),
    )
)


def test_parameters_are_those_of_the_model() -> None:
    assert cost(SMALL, 11).parameters == Transformer(SMALL, 11).count_parameters()


def test_dense_operations_are_those_that_torch_counts() -> None:
    local = resolve(dataclasses.replace(SMALL, routing=RoutingConfig(heads=0, layers=0, window=8)))
    model = Transformer(local, 11).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.loss(torch.zeros(1, 32, dtype=torch.int64))
    counts = counter.get_flop_counts()["Global"]
    dense = sum(flops for operator, flops in counts.items() if "mm" in str(operator))
    assert cost(local, 11).dense == dense


@pytest.mark.parametrize(("n", "window"), [(1, 1), (7, 3), (7, 7), (7, 20), (30, 4)])
def test_pairs_are_those_of_a_loop(n: int, window: int) -> None:
    assert window_pairs(n, window) == sum(1 for i in range(n) for j in range(n) if i - window < j <= i)
    assert triangle(n) == sum(1 for i in range(n) for j in range(n) if j <= i)


@pytest.mark.parametrize(
    ("n", "stride", "summary"), [(1, 1, 1), (7, 3, 2), (8, 8, 1), (7, 20, 5), (30, 4, 3), (31, 5, 5)]
)
def test_sparse_pairs_are_those_of_the_rules(n: int, stride: int, summary: int) -> None:
    assert strided_pairs(n, stride) == sum(len(reference.strided_sets(i, stride)[0]) for i in range(n))
    assert fixed_pairs(n, stride, summary) == sum(len(reference.fixed_sets(i, stride, summary, 1)[0]) for i in range(n))


def test_routing_costs_less_than_full_attention_and_more_clusters_cost_more_selection() -> None:
    config = compose(["data=enwik8", "model=rt24"])
    total = cost(config, 256)
    assert total.attention + total.selection < total.full_attention / 4
    more = cost(compose(["data=enwik8", "model=rt24", "routing.clusters=64"]), 256)
    assert more.selection == 2 * total.selection
    assert cost(compose(["data=enwik8", "model=rt24", "routing=random"]), 256).selection == 0


SHRUNK = (
    *("data=enwik8", "data.length=256", "model=rt12", "model.layers=2", "model.hidden=64", "model.heads=4"),
    *("model.ffn_hidden=128", "model.window=32", "model.max_distance=32", "routing.layers=1", "routing.heads=2"),
    *("routing.window=32", "routing.clusters=8", "trainer.batch_size=2", "hardware=cpu"),
)
NO_DROPOUT = ("model.dropout=0", "model.attention_dropout=0", "model.ffn_dropout=0")
LOCAL = ("routing.heads=0", "routing.layers=0")


@pytest.mark.parametrize(
    "overrides",
    [
        (*LOCAL, "model.positions=none", "model.norm=pre", "model.ffn=relu", *NO_DROPOUT),
        (*LOCAL, "model.positions=rotary"),
        LOCAL,
        (*LOCAL, "model.base=full"),
        (*LOCAL, "model.base=full", "model.positions=rotary", *NO_DROPOUT),
        (*LOCAL, "model.base=local+strided", "model.stride=16", "model.positions=none"),
        (*LOCAL, "model.base=fixed", "model.stride=16", "model.summary=4", "model.positions=none"),
        (*LOCAL, "model.base=lsh", "model.positions=none"),
        ("routing=topk", "routing.layers=2", "routing.heads=4"),
        ("routing=topk", "routing.layers=2", "routing.heads=4", "model.positions=rotary", *NO_DROPOUT),
        ("routing=topk", "routing.layers=2", "routing.heads=4", "routing.clusters=32", "model.positions=none"),
        ("routing=topk", "routing.layers=2", "routing.keys=separate", "routing.clusters=16"),
        ("routing=nearest", "routing.layers=2", "model.positions=none"),
        ("routing=random", "hardware.precision=bf16"),
    ],
)
def test_activations_are_those_that_autograd_keeps(overrides: tuple[str, ...], monkeypatch) -> None:
    # What torch's kernel keeps; where attention is worked out in tiles, its outputs are not kept.
    for room in (rtx.attention.weights, rtx.analysis.cost):
        monkeypatch.setattr(room, "trusted", lambda: False)
    config = compose([*SHRUNK, *overrides])
    planned = memory(config, cost(config, 256), 2, 256)
    kept = kept_for_backward(config, batch=2)
    assert 0.7 < (planned["activations"] + planned["logits"]) / kept < 1.4


TINY = ("data.length=256", "model=tiny", "hardware=cpu")
PATTERNS = {
    "causal": ("routing=causal",),
    "topk": ("routing=topk",),
    "local": LOCAL,
    "full": (*LOCAL, "model.base=full"),
}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_activations_of_a_small_model_on_this_machine(pattern: str, dropout: float) -> None:
    config = compose([*TINY, *PATTERNS[pattern], f"model.attention_dropout={dropout}"])
    planned = memory(config, cost(config, 256), 2, 256)
    kept = kept_for_backward(config, batch=2)
    assert 0.7 < (planned["activations"] + planned["logits"]) / kept < 1.4


def kept_for_backward(config: Config, batch: int) -> int:
    """Return the bytes that a training forward pass leaves for the backward pass, each piece of memory counted once.

    Besides what autograd saves these are the pairs that Shaw's rules list.
    """
    torch.manual_seed(0)
    model = Transformer(config, 256).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}
    rules: list[Sorted] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    class Noted(Sorted):
        def __init__(self, *rows: torch.Tensor) -> None:
            super().__init__(*rows)
            rules.append(self)

    tokens_BN = torch.randint(0, 256, (batch, config.data.length))
    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        patch.setattr("rtx.attention.clusters.Sorted", Noted)
        patch.setattr("rtx.attention.separate.Sorted", Noted, raising=False)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.hardware.precision == "bf16"):
            loss = model.loss(tokens_BN)
    listed = [tensor.nbytes for rule in rules for pair in rule.listed.values() for tensor in pair]
    assert loss and (not rules or listed)
    return sum(storage.nbytes() for storage in kept.values()) + sum(listed)


def test_recomputation_trades_memory_for_operations() -> None:
    plain, again = (compose(["data=enwik8", "model=rt24", f"model.recompute={switch}"]) for switch in ("false", "true"))
    kept, dropped = (memory(config, cost(config, 256), 1, 256)["activations"] for config in (plain, again))
    assert dropped < kept / 5
    assert cost(again, 256).step(again) > cost(plain, 256).step(plain)


def test_hashing_heads_cost_their_rounds() -> None:
    model = dataclasses.replace(SMALL.model, base="lsh", hash_rounds=3, hash_buckets=8)
    hashing = dataclasses.replace(SMALL, model=model, routing=RoutingConfig(heads=0, layers=0, window=8))
    # 8 buckets of 4 positions: all pairs of a bucket are inside the window of 4.
    assert pairs("lsh", hashing) == 3 * 8 * triangle(4)
    assert selection("lsh", hashing) == 3 * 2 * 8 * 4 * 32
    assert pairs("adaptive_span", hashing) == window_pairs(32, 4)
