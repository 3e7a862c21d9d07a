"""The audit: zero if nothing leaks; leaks are counted and located; and what trains a choice."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rtx.analysis.causality import (
    LOGITS,
    Audit,
    Group,
    audit_model,
    audit_outputs,
)
from rtx.analysis.choice_gradients import choice_gradients
from rtx.attention.indexer import Indexer
from rtx.attention.positional import Full
from rtx.errors import RunFailed
from rtx.evaluation.protocol import sees_future
from rtx.settings.names import SELECTIONS
from rtx.settings.schema import all_fields, flat, to_dict
from tests.helpers.tiny_models import (
    KINDS,
    SHALLOW,
    VOCABULARY,
    Kind,
    covering,
    each_kind,
    gradients,
    tiny_config,
    tiny_model,
    tokens,
    without,
)

LENGTH = 44
PREFIXES = (1, 6, 31, 43)
IDS = tokens(length=LENGTH)

HASHED: Kind = {"base": "lsh", "hash_rounds": 2, "hash_buckets": 4}
XL: Kind = {"base": "recurrent", "positions": "xl", "routing_heads": 0, "routing_layers": 0}
CAUSAL = [kind for kind in KINDS if kind["selection"] != "topk"] + [HASHED | {"lsh": "causal"}]
CAUSAL += [
    XL if base == "recurrent" else {"base": base} for base in all_fields()["model.base"].values
]
CAUSAL += [
    HASHED | {"lsh": "reformer", "routing_heads": 4, "routing_layers": 2}
]  # no head is left that hashes
SEE_THE_FUTURE = [
    kind
    for kind in KINDS
    if kind["selection"] == "topk"
    and kind.get("base", "local") == "local"
    and kind["positions"] not in ("learned", "axial")
]
SEE_THE_FUTURE += [HASHED | {"base": base, "lsh": "reformer"} for base in ("lsh", "local+lsh")]


def values_of(kind: Kind) -> dict[str, Any]:
    """Return the configuration of a model by its dotted keys."""
    return flat(to_dict(tiny_config(**kind)))


def largest(audit: Audit) -> float:
    assert audit.repeat == 0
    return max(float(change_P.max()) for change_P in audit.changes.values())


FEW = covering(CAUSAL)


@each_kind(FEW)
def test_the_future_moves_nothing(kind: Kind) -> None:
    check_causal(kind)


@each_kind(without(FEW, CAUSAL))
def test_the_future_moves_nothing_in_the_other_kinds(kind: Kind) -> None:
    check_causal(kind)


def check_causal(kind: Kind) -> None:
    kind = SHALLOW | kind
    audit = audit_model(tiny_model(length=LENGTH, **kind), IDS, PREFIXES)
    assert largest(audit) <= 1e-12 and not audit.sees_future
    assert not sees_future(values_of(kind), "parallel"), "and that is what protocols say"


@each_kind(covering(SEE_THE_FUTURE))
def test_top_w_and_published_hashing_see_the_future_unless_they_stream(kind: Kind) -> None:
    kind = SHALLOW | kind
    model = tiny_model(length=LENGTH, **kind)
    audit = audit_model(model, IDS, PREFIXES)
    assert (
        audit.changes[LOGITS].max() > 1e-3 and (audit.changes[LOGITS] > 1e-9).double().mean() > 0.1
    )
    assert {name for _, name in audit.origins} == {"lsh" if "lsh" in kind else "routed"}
    assert largest(audit_model(model, IDS, (6, 31), streaming=True)) <= 1e-12
    assert [sees_future(values_of(kind), mode) for mode in ("parallel", "streaming")] == [
        True,
        False,
    ]


class Peeking(Full):
    def forward(
        self, q_BHND: Tensor, k_BHND: Any, v_BHND: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        return v_BHND.mean(dim=2, keepdim=True).expand_as(v_BHND), v_BHND.new_zeros(())


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_leak_is_located_where_it_arises(layer: int) -> None:
    leaking = tiny_model(length=LENGTH, base="local+full")
    leaking.blocks[layer].attention.groups["full"].pattern = Peeking()  # type: ignore[union-attr,index]
    audit = audit_model(leaking, IDS, PREFIXES)
    assert audit.origins == [(layer, "full")] and (audit.changes[LOGITS] > 0).all()


def test_moves_above_the_tolerance_are_counted() -> None:
    def ahead(ids_BN: Tensor, prefix: int) -> dict[Group, Tensor]:
        return {LOGITS: nn.functional.one_hot(ids_BN.roll(-3, dims=1), VOCABULARY).double()}

    moved = audit_outputs(ahead, IDS, VOCABULARY, (1, 5, 40)).changes[LOGITS] > 0
    assert (int(moved.sum()), moved.numel()) == (14, 92)

    def slightly(ids_BN: Tensor, prefix: int) -> dict[Group, Tensor]:
        return {LOGITS: 1 + 1e-6 * ids_BN[:, -1:, None].double().expand(-1, LENGTH, 3)}

    audits = [audit_outputs(slightly, IDS, VOCABULARY, PREFIXES, tolerance=x) for x in (1e-9, 1e-4)]
    assert [audit.sees_future for audit in audits] == [True, False]


def test_what_a_module_draws_is_no_move_and_what_it_remembers_is_told() -> None:
    before = torch.random.get_rng_state()
    audit = audit_outputs(
        lambda ids_BN, _: {LOGITS: torch.rand(*ids_BN.shape, 3)}, IDS, VOCABULARY, PREFIXES
    )
    assert audit.repeat == 0 and not audit.sees_future
    assert torch.equal(before, torch.random.get_rng_state())
    calls = iter(range(1, 99))
    audit = audit_outputs(
        lambda *_: {LOGITS: torch.full((2, LENGTH, 3), float(next(calls)))}, IDS, 11, PREFIXES
    )
    assert audit.repeat > 0.1
    with pytest.raises(RunFailed, match="NaN or infinity"):
        audit_outputs(
            lambda *_: {LOGITS: torch.full((2, LENGTH, 3), torch.nan)}, IDS, VOCABULARY, PREFIXES
        )


@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_choice_that_should_train_gets_a_gradient_and_nothing_changes(selection: str) -> None:
    asked = tiny_model(selection=selection, base="local+full")
    before = {name: x.clone() for name, x in asked.state_dict().items()}
    drawn = torch.random.get_rng_state()
    first, second = choice_gradients(asked, tokens())
    assert (first["layer"], second["layer"], first["heads"], second["missing"]) == (
        1,
        2,
        "routed",
        False,
    )
    is_drawn = selection.endswith("random")
    assert (
        (first["gradient"] is None) == is_drawn == (first["trained_by"] == "nothing: it is drawn")
    )
    assert not asked.training and all(p.grad is None for p in asked.parameters())
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert all(torch.equal(x, before[name]) for name, x in asked.state_dict().items())
    if (
        selection == "exact"
    ):  # the rows of queries of one local, one full and two routing heads of four units
        rows = gradients(asked.train(), tokens())["blocks.2.attention.qkv.weight"][8:16]
        assert second["gradient"] == pytest.approx(float(rows.norm()))


def test_a_gradient_that_is_missing_or_not_finite_is_flagged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = tiny_model(selection="exact")
    with torch.no_grad():
        broken.output_VS[0, 0] = torch.nan
    assert all(
        row["missing"] and row["gradient"] is None for row in choice_gradients(broken, tokens())
    )
    idle = tiny_model(selection="exact")
    block: Any = idle.blocks[2]
    block.attention.groups["routed"].pattern.register_parameter("idle", nn.Parameter(torch.ones(3)))
    assert [row["missing"] for row in choice_gradients(idle, tokens())] == [False, True]
    frozen = tiny_model(selection="causal")
    frozen.blocks[2].attention.groups["routed"].pattern.centroids.decay = 1.0  # type: ignore[union-attr,index]
    assert [row["missing"] for row in choice_gradients(frozen, tokens())] == [False, True]
    (hashed,) = choice_gradients(
        tiny_model(layers=1, routing_layers=0, base="lsh", hash_buckets=4), tokens()
    )
    assert (hashed["heads"], hashed["missing"], hashed["trained_by"][:11]) == (
        "lsh",
        False,
        "its queries",
    )
    monkeypatch.setattr(Indexer, "loss", Full.loss)
    found = choice_gradients(tiny_model(selection="indexer"), tokens())
    assert all(row["missing"] and row["gradient"] == 0 for row in found)
