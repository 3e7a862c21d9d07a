"""An encoder predicts hidden tokens from both sides, and never sees them."""

import pytest
import torch
from torch import Tensor

from rtx.model.transformer import Transformer, are_among
from rtx.training.start import initialise_from_data
from tests.helpers.tiny_models import VOCABULARY, Kind, each_kind, tiny_model, tokens

AT_BA = torch.tensor([[3, 20, 11], [7, -1, -1]])
"""Positions of hidden tokens; the second sequence has one."""
HIDDEN_BN = are_among(AT_BA, 24)
KINDS: list[Kind] = [
    *(
        {"selection": selection, "routing_keys": keys, "positions": positions, "base": base}
        for selection, keys, positions, base in (
            ("topk", "separate", "rotary", "local"),
            ("topk", "shared", "learned", "full"),
            ("causal", "separate", "none", "local+full"),
            ("nearest", "projected", "rotary", "strided"),
            ("random", "separate", "axial", "local"),
            ("exact", "separate", "rotary", "lsh"),
            ("blocks", "separate", "rotary", "fixed"),
            ("indexer", "separate", "learned", "adaptive_span"),
            ("probed", "separate", "rotary", "fixed_block+fixed_summary"),
        )
    ),
    {"selection": "topk", "routing_keys": "tied", "routing_key_shift": 1, "routing_key_conv": 2},
]


def encoder(kind: Kind) -> Transformer:
    """Return a tiny encoder in float64."""
    return tiny_model(**kind, causal=False)


def hidden_vectors(model: Transformer, tokens_BN: Tensor) -> Tensor:
    """Return the last vectors at the positions of hidden tokens."""
    out_BNS, _ = model(tokens_BN, hidden_BN=HIDDEN_BN)
    return out_BNS[HIDDEN_BN]


@each_kind(KINDS)
@torch.no_grad()
def test_predictions_follow_from_all_tokens_but_the_hidden_ones(kind: Kind) -> None:
    model = encoder(kind).eval()
    before = hidden_vectors(model, tokens())
    other_BN = (tokens() + 1) % VOCABULARY
    without = torch.where(HIDDEN_BN, other_BN, tokens())
    assert torch.equal(hidden_vectors(model, without), before)
    nats_BA, right_BA, _ = model.answers(tokens(), AT_BA)
    moved_BA, _, _ = model.answers(without, AT_BA)
    assert nats_BA.shape == right_BA.shape == AT_BA.shape
    assert not nats_BA[AT_BA < 0].any() and not right_BA[AT_BA < 0].any()
    assert not torch.equal(nats_BA, moved_BA)  # other targets, predicted by the same logits
    visible_N = (~HIDDEN_BN).all(0).nonzero()[:, 0]
    sides = {"before": visible_N[visible_N < 3], "after": visible_N[visible_N > 20]}
    for position_J in sides.values():
        changed = tokens()
        changed[:, position_J] = other_BN[:, position_J]
        assert not torch.equal(hidden_vectors(model, changed), before)


@each_kind(KINDS)
def test_every_parameter_gets_a_finite_gradient(kind: Kind) -> None:
    model = encoder(kind).train()
    nats_BA, _, auxiliary = model.answers(tokens(), AT_BA)
    (nats_BA.sum() + auxiliary).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_centroids_may_start_at_the_data() -> None:
    model = encoder(KINDS[0])
    initialise_from_data(model, tokens())
    assert all(
        not module.seed_with_next for module in model.modules() if hasattr(module, "seed_with_next")
    )


def test_an_encoder_has_no_loss_of_all_tokens() -> None:
    with pytest.raises(AssertionError, match="an encoder would see the tokens that it predicts"):
        encoder(KINDS[0]).loss(tokens())
