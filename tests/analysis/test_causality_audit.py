"""The audit itself: zero where nothing leaks, and what leaks is found, counted and located."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rtx.analysis.causality import Audit, audit_model, audit_outputs, other_future, prefix_lengths, relative_change
from rtx.attention.pattern import Pattern
from rtx.config import SELECTIONS, all_fields
from rtx.model.transformer import Transformer
from tests.model.tiny_models import VOCABULARY, tiny_model, tokens

LENGTH = 44
PREFIXES = (1, 2, 5, 31, 32, 33, 43)
BASES = all_fields()["model.base"].metadata["parts"]


def model(base: str = "local", **options: Any) -> Transformer:
    """A float64 model of three layers, the upper two of which route."""
    return tiny_model(length=LENGTH, base=base, window=8, stride=8, summary=2, **options)


def ids() -> Tensor:
    return tokens(length=LENGTH)


def largest(audit: Audit) -> float:
    """The largest change of anything."""
    assert audit.repeat == 0
    return max(moves.largest for moves in (audit.logits, *audit.groups.values()))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("base", "selection"),
    [(base, "causal") for base in BASES] + [("local+full", name) for name in SELECTIONS if name != "topk"],
)
def test_strictly_causal_patterns_move_nothing(base: str, selection: str, streaming: bool) -> None:
    audit = audit_model(model(base, selection=selection), ids(), PREFIXES, streaming=streaming)
    assert largest(audit) <= 1e-12 and not audit.sees_future
    assert len(audit.groups) == 3 * len(base.split("+")) + 2


def test_top_w_moves_and_only_it_and_not_where_the_prefix_decides() -> None:
    audit = audit_model(model("local+full", selection="topk"), ids(), PREFIXES)
    assert audit.logits.largest > 1e-3 and audit.logits.moved > 0.1 * audit.logits.past
    assert audit.origins == [(1, "routed"), (2, "routed")]
    assert max(moves.largest for group, moves in audit.groups.items() if group[1] != "routed") <= 1e-12
    assert largest(audit_model(model(selection="topk"), ids(), PREFIXES, streaming=True)) <= 1e-12


def test_published_hash_chunks_move() -> None:
    audit = audit_model(model("lsh", lsh="reformer", selection="random"), ids(), PREFIXES)
    assert {name for _, name in audit.origins} == {"lsh"}
    assert not audit_model(model("lsh", lsh="reformer"), ids(), PREFIXES, streaming=True).sees_future


class Peeking(Pattern):
    """Heads that return the mean value of the whole sequence."""

    def forward(self, q_BHND: Tensor, k_BHND: Any, v_BHND: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return v_BHND.mean(dim=2, keepdim=True).expand_as(v_BHND), v_BHND.new_zeros(())


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_leak_is_located_where_it_arises(layer: int) -> None:
    leaking = model("local+full")
    leaking.blocks[layer].attention.groups["full"] = Peeking()  # type: ignore[union-attr,index]
    audit = audit_model(leaking, ids(), PREFIXES)
    assert audit.origins == [(layer, "full")]
    assert audit.logits.moved == audit.logits.past
    assert not leaking.blocks[layer].attention._forward_pre_hooks  # type: ignore[union-attr]


class Ahead(nn.Module):
    """Position i reads the ids up to i + `steps`."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, ids_BN: Tensor) -> Tensor:
        one_hot_BNV = nn.functional.one_hot(ids_BN.roll(-self.steps, dims=1), VOCABULARY).double()
        return one_hot_BNV.cumsum(dim=1) if not self.steps else one_hot_BNV


def test_what_moved_is_counted() -> None:
    audit = audit_outputs(Ahead(3), ids(), VOCABULARY, (1, 5, 40))
    moves = audit.logits
    assert (moves.moved, moves.past, moves.largest) == (14, 92, 1) and audit.sees_future
    assert not audit_outputs(Ahead(0), ids(), VOCABULARY, PREFIXES).sees_future


def test_small_moves_count_above_the_tolerance_alone() -> None:
    def outputs(ids_BN: Tensor) -> Tensor:
        return 1 + 1e-6 * ids_BN[:, -1:, None].double().expand(-1, LENGTH, 3)

    audits = [audit_outputs(outputs, ids(), VOCABULARY, PREFIXES, tolerance=x) for x in (1e-9, 1e-4)]
    assert [audit.sees_future for audit in audits] == [True, False]
    assert audits[1].logits.largest == audits[0].logits.largest > 1e-7


def test_what_a_module_draws_is_no_move_and_what_it_remembers_is_told() -> None:
    before = torch.random.get_rng_state()
    audit = audit_outputs(lambda ids_BN: torch.rand(*ids_BN.shape, 3), ids(), VOCABULARY, PREFIXES)
    assert audit.repeat == 0 and not audit.sees_future
    assert torch.equal(before, torch.random.get_rng_state())
    calls: list[float] = []

    def counting(ids_BN: Tensor) -> Tensor:
        calls.append(1.0)
        return torch.full((*ids_BN.shape, 3), float(len(calls)))

    assert audit_outputs(counting, ids(), VOCABULARY, PREFIXES).repeat > 0.1


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (torch.zeros(2, LENGTH), r"logits \[2, 44, vocabulary\], not \[2, 44\]"),
        ({}, "not a dict"),
        (torch.full((2, LENGTH, 3), float("nan")), "NaN or infinity"),
    ],
)
def test_outputs_that_are_no_logits(out: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        audit_outputs(lambda _: out, ids(), VOCABULARY, PREFIXES)


@pytest.mark.parametrize("length", [2, 3, 7, 44, 1000])
@pytest.mark.parametrize("count", [1, 2, 3, 24, 60])
def test_prefix_lengths(length: int, count: int) -> None:
    lengths = prefix_lengths(length, count)
    assert lengths == sorted(set(lengths)) and len(lengths) <= count
    assert lengths[0] == 1 and lengths[-1] == (length - 1 if count > 1 else 1)
    if length == 1000 and count == 60:
        assert {1, 2, 31, 32, 33, 127, 128, 129, 511, 512, 513, 999} <= set(lengths)


def test_every_unit_of_the_other_future_is_another() -> None:
    for prefix in PREFIXES:
        other_BN = other_future(ids(), prefix, VOCABULARY, seed=3)
        assert torch.equal(other_BN[:, :prefix], ids()[:, :prefix])
        assert (other_BN[:, prefix:] != ids()[:, prefix:]).all()
        assert other_BN.min() >= 0 and other_BN.max() < VOCABULARY


def test_relative_change() -> None:
    before = torch.tensor([[1.0, -4.0], [0.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    after = torch.tensor([[1.0, -3.0], [0.0, 0.0], [0.0, 5.0], [-2.0, 0.0]])
    assert relative_change(before, after).tolist() == [0.25, 0.0, 1.0, 2.0]


@pytest.mark.skipif(
    importlib.util.find_spec("routing_transformer") is None,
    reason="the peer routing_transformer is not installed (pip install -e '.[peers]')",
)
@pytest.mark.filterwarnings("ignore")
def test_the_peer_sees_the_future() -> None:
    peer = importlib.import_module("routing_transformer")
    torch.manual_seed(0)
    module = peer.RoutingTransformerLM(
        num_tokens=VOCABULARY, dim=16, depth=2, max_seq_len=64, heads=2, dim_head=8, window_size=16, causal=True
    )
    module.double().eval()
    ids_BN = torch.randint(VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(0))
    audit = audit_outputs(lambda x: module(x)[0], ids_BN, VOCABULARY, (1, 31, 32, 33, 63))
    assert audit.repeat == 0
    assert audit.logits.moved > 0.5 * audit.logits.past and audit.logits.largest > 1e-2
