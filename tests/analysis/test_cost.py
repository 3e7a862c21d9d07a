"""The plan's counts against counting for real."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rtx.analysis.cost import cost, fixed_pairs, head_cost, strided_pairs, triangle, window_pairs
from rtx.attention.choices import Indexer
from rtx.attention.patterns import Fixed, Full, Local, Strided
from rtx.checks import resolve
from rtx.compose import compose
from rtx.config import Config, DataConfig, ModelConfig, RoutingConfig
from rtx.model.multihead import ROUTED, make_pattern
from rtx.model.transformer import Transformer

SMALL = resolve(
    Config(
        data=DataConfig(length=32),
        routing=RoutingConfig(heads=1, layers=1, window=8),
        model=ModelConfig(layers=2, heads=2, hidden=16, window=4, ffn_hidden=24),
    )
)


def test_parameters_and_dense_operations_are_those_that_torch_counts() -> None:
    assert cost(SMALL, 11).parameters == Transformer(SMALL, 11).count_parameters()
    local = resolve(dataclasses.replace(SMALL, routing=RoutingConfig(heads=0, layers=0, window=8)))
    model = Transformer(local, 11).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.loss(torch.zeros(1, 32, dtype=torch.int64))
    counts = counter.get_flop_counts()["Global"]
    dense = sum(flops for operator, flops in counts.items() if "mm" in str(operator))
    assert cost(local, 11).dense == dense


@pytest.mark.parametrize(
    ("n", "stride", "summary"), [(1, 1, 1), (7, 3, 2), (8, 8, 1), (7, 20, 5), (30, 4, 3), (31, 5, 5)]
)
def test_pairs_by_position_are_those_of_the_rules(n: int, stride: int, summary: int) -> None:
    at_N = torch.arange(n)[:, None]
    for pattern, counted in (
        (Full(), triangle(n)),
        (Local(window=stride), window_pairs(n, stride)),
        (Strided(stride=stride), strided_pairs(n, stride)),
        (Fixed(block=stride, summary=summary), fixed_pairs(n, stride, summary)),
    ):
        assert counted == int((pattern.sees(0, at_N, at_N.T) & (at_N >= at_N.T)).sum())


@pytest.mark.parametrize("selection", ["exact", "indexer", "blocks", "blocks_random"])
@pytest.mark.parametrize(("window", "block"), [(8, 8), (9, 4), (31, 5), (32, 3)])
def test_pairs_of_chosen_keys_are_those_of_the_rules(selection: str, window: int, block: int) -> None:
    routing = RoutingConfig(selection=selection, keys="separate", heads=1, layers=1, window=window, block=block)
    config = resolve(dataclasses.replace(SMALL, routing=routing))
    pattern = make_pattern(ROUTED, 1, config, 1)
    q, k = torch.randn(2, 1, 1, 32, 8, generator=torch.Generator().manual_seed(0))
    read, choice = head_cost(ROUTED, config)
    assert read == int(pattern.rule(pattern.inputs(q, k, None), 0, False).sum())
    blocks = 2 * 8 * sum(i // block for i in range(32))
    usual = {"exact": 2 * 8 * triangle(32), "blocks": blocks, "blocks_random": 0}
    assert choice == usual.get(selection, choice)
    if isinstance(pattern, Indexer):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            given = pattern.inputs(q, k, None)
            _ = pattern.choice_queries(given), pattern.choice_keys(given)
        assert choice == counter.get_total_flops() + 2 * pattern.query_HDE.shape[-1] * triangle(32)


def test_routing_costs_less_than_full_attention_and_recomputation_a_pass_more() -> None:
    config, again = (compose(["data=enwik8", "model=rt24", f"model.recompute={x}"]) for x in ("false", "true"))
    total = cost(config, 256)
    assert total.attention + total.selection < total.full_attention / 4
    assert total.step(again) - total.step(config) == config.trainer.batch_size * (total.dense + total.attention)


def test_hashing_heads_cost_their_rounds() -> None:
    model = dataclasses.replace(SMALL.model, base="lsh", hash_rounds=3, hash_buckets=8)
    hashing = dataclasses.replace(SMALL, model=model, routing=RoutingConfig(heads=0, layers=0, window=8))
    # 8 buckets of 4 positions: all pairs of a bucket are inside the window of 4.
    assert head_cost("lsh", hashing) == (3 * 8 * triangle(4), 3 * 2 * 8 * 4 * 32)
