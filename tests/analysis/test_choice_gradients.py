"""Where the gradient of a choice comes from; and one that gets none is flagged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rtx.analysis.choice_gradients import choice_gradients
from rtx.attention.choices import Indexer
from rtx.attention.pattern import Pattern
from rtx.config import SELECTIONS
from tests.model.tiny_models import gradients, tiny_model, tokens


@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_choice_that_should_train_gets_a_gradient_and_nothing_changes(selection: str) -> None:
    model = tiny_model(selection=selection, base="local+full")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    found = choice_gradients(model, tokens())
    assert [(row["layer"], row["heads"], row["missing"]) for row in found] == [
        (1, "routed", False),
        (2, "routed", False),
    ]
    assert all((row["gradient"] is None) == selection.endswith("random") for row in found)
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_norm_is_that_of_the_rows_that_make_queries_and_keys() -> None:
    model = tiny_model(selection="exact", base="local+full")
    told = {row["layer"]: row["gradient"] for row in choice_gradients(model, tokens())}
    # Queries, then keys, then values of one local, one full and two routing heads of four units.
    rows = list(range(8, 16)) + list(range(24, 32))
    assert told[2] == pytest.approx(
        float(gradients(model.train(), tokens())["blocks.2.attention.qkv.weight"][rows].norm())
    )


def test_a_gradient_that_is_missing_or_not_finite_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(selection="exact")
    with torch.no_grad():
        model.output_VS[0, 0] = torch.nan
    assert all(row["missing"] and row["gradient"] is None for row in choice_gradients(model, tokens()))
    monkeypatch.setattr(Indexer, "loss", Pattern.loss)
    found = choice_gradients(tiny_model(selection="indexer"), tokens())
    assert all(row["missing"] and row["gradient"] == 0 for row in found)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"selection": "topk"}, "its queries, by the attention; centroids by k-means (update=members)"),
        ({"selection": "causal", "routing_keys": "separate", "routing_commitment": 0.1}, "commitment to centroids"),
        ({"selection": "blocks", "routing_compressed": True}, "branch"),
        ({"selection": "indexer"}, "the divergence of its scores to the attention"),
        ({"selection": "random"}, "nothing: it is drawn"),
    ],
)
def test_what_trains_a_choice_is_said(changed: dict[str, Any], said: str) -> None:
    assert said in choice_gradients(tiny_model(**changed), tokens())[0]["trained_by"]
