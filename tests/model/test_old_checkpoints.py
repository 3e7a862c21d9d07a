"""Checkpoints of older versions load, although their tensors have other names and another order."""

from typing import Any

import pytest
import torch

from rtx.model.transformer import Transformer
from rtx.settings.schema import OptimizerConfig
from rtx.training.checkpoint import load_weights, renumbered, with_current_names
from rtx.training.optimizers import build_optimizer, decaying_and_exempt
from tests.helpers.tiny_models import VOCABULARY, tiny_config, tiny_model

ATTENTION = "blocks.0.attention."
GROUPS = f"{ATTENTION}groups."

MIXED: dict[str, Any] = {
    "layers": 1,
    "routing_layers": 1,
    "base": "adaptive_span",
    "positions": "shaw",
    "selection": "indexer",
    "routing_key_conv": 2,
}
MIXED_NAMES = {
    f"{GROUPS}adaptive_span.share_H": f"{GROUPS}adaptive_span.pattern.share_H",
    f"{GROUPS}routed.query_HDE": f"{GROUPS}routed.pattern.query_HDE",
    f"{GROUPS}routed.key_HDE": f"{GROUPS}routed.pattern.key_HDE",
    f"{GROUPS}routed.steps": f"{GROUPS}routed.pattern.steps",
    f"{ATTENTION}qkv.weight": f"{ATTENTION}qkv.weight",
    f"{ATTENTION}out.weight": f"{ATTENTION}out.weight",
    f"{ATTENTION}shaw.adaptive_span.keys_MD": f"{GROUPS}adaptive_span.tables.keys_MD",
    f"{ATTENTION}shaw.adaptive_span.values_MD": f"{GROUPS}adaptive_span.tables.values_MD",
    f"{ATTENTION}shaw.routed.keys_MD": f"{GROUPS}routed.tables.keys_MD",
    f"{ATTENTION}shaw.routed.values_MD": f"{GROUPS}routed.tables.values_MD",
    f"{ATTENTION}mix.routed.taps_HDK": f"{GROUPS}routed.key_mix.taps_HDK",
}
XL: dict[str, Any] = {
    "length": 6,
    "layers": 1,
    "base": "recurrent",
    "positions": "xl",
    "memory": 4,
    "routing_heads": 0,
    "routing_layers": 0,
}
XL_NAMES = {
    f"{ATTENTION}qkv.weight": f"{ATTENTION}qkv.weight",
    f"{ATTENTION}out.weight": f"{ATTENTION}out.weight",
    f"{ATTENTION}xl.content_HD": f"{GROUPS}recurrent.tables.content_HD",
    f"{ATTENTION}xl.place_HD": f"{GROUPS}recurrent.tables.place_HD",
    f"{ATTENTION}xl.project.weight": f"{GROUPS}recurrent.tables.project.weight",
}
KINDS = pytest.mark.parametrize("kind, names", [(MIXED, MIXED_NAMES), (XL, XL_NAMES)])


def old_tensors(model: Transformer, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model as older versions saved them."""
    tensors = model.state_dict()
    before = [name for name in tensors if name.startswith(("output", "embedding"))]
    after = [name for name in tensors if name not in before and not name.startswith(ATTENTION)]
    old_names = {name: name for name in before} | names | {name: name for name in after}
    assert sorted(old_names.values()) == sorted(tensors)
    return {old: tensors[name] for old, name in old_names.items()}


@KINDS
def test_tensors_with_older_names_are_loaded(kind: dict[str, Any], names: dict[str, str]) -> None:
    saved = tiny_model(seed=1, **kind)
    model = tiny_model(seed=2, **kind)
    load_weights(model, {"model": old_tensors(saved, names)})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name]), name


@pytest.mark.parametrize(
    "kind",
    [{"embedding": 6}, {"embedding": "adaptive", "cutoffs": "3x7", "tie_embeddings": False}],
)
def test_matrices_at_both_ends_are_loaded_by_their_older_names(kind: dict[str, Any]) -> None:
    saved, model = (Transformer(tiny_config(**kind), VOCABULARY) for _ in range(2))
    old = {}
    for name, tensor in saved.state_dict().items():
        old_name = name.replace("project_in", "widen").replace("project_out", "narrow")
        old_name = old_name.replace("other_bands", "clusters")
        old[old_name] = tensor
    assert old.keys() != model.state_dict().keys()
    load_weights(model, {"model": old})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name]), name


@KINDS
def test_moments_in_the_older_order_are_those_of_their_weights(
    kind: dict[str, Any], names: dict[str, str]
) -> None:
    model = tiny_model(**kind)
    optimizer = build_optimizer(model, OptimizerConfig())
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    groups = decaying_and_exempt(model)
    numbers = {name: number for number, name in enumerate([*groups[0], *groups[1]])}
    state = optimizer.state_dict()["state"]

    saved = with_current_names(old_tensors(model, names), model.state_dict())
    old_order = [name for group in groups for name in saved if name in group]
    old_state = {place: state[numbers[name]] for place, name in enumerate(old_order)}
    new_state = renumbered(old_state, saved, groups)

    assert (old_order == [*numbers]) == (kind is XL), "the order of both kinds is tested"
    assert new_state.keys() == state.keys()
    for number, moments in state.items():
        assert new_state[number] is moments
