"""The model: gradients, embeddings, dropout, recomputation, precision, torch.compile, its state."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rtx.attention.centroids import after_step, all_centroids, to_sphere
from rtx.attention.clusters import Routing
from rtx.attention.engine import blocks
from rtx.attention.members import normalise
from rtx.model.block import Block
from rtx.model.compiling import compile_loss
from rtx.model.transformer import Transformer
from rtx.training.hardware import has_compiler
from rtx.training.start import initialise_from_data
from tests.helpers.tiny_models import (
    BY_QUERY,
    COMMON,
    OTHERS,
    SELECTIONS,
    SHALLOW,
    Kind,
    covering,
    each_kind,
    gradients,
    tiny_config,
    tiny_model,
    tokens,
)


@each_kind(covering([*COMMON, *OTHERS]))
def test_every_parameter_gets_a_finite_gradient_and_bfloat16_comes_close(kind: Kind) -> None:
    model = tiny_model(**SHALLOW, **kind, embedding=6).train()
    found = gradients(model, tokens())
    assert set(found) == {name for name, _ in model.named_parameters()}
    for name, gradient in found.items():
        assert gradient.isfinite().all() and (gradient != 0).any(), name
    exact = float(model.loss(tokens())[0].mean().detach())
    with torch.autocast("cpu", torch.bfloat16):
        nats_BN, auxiliary = model.float().loss(tokens())
    assert nats_BN.dtype == torch.float32
    (nats_BN.mean() + auxiliary).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert float(nats_BN.mean().detach()) == pytest.approx(exact, rel=0.05)


def test_a_gradient_is_the_slope_of_the_loss() -> None:
    # Random heads: their memberships do not depend on the weights, so the loss is smooth.
    kind: Kind = {"selection": "random", "positions": "shaw", "embedding": 6, "ffn": "geglu"}
    model = tiny_model(**SHALLOW, **kind)
    found = gradients(model, tokens())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            direction = torch.randn_like(parameter)
            losses = []
            for step in (1e-5, -2e-5):
                parameter += step * direction
                losses.append(float(model.loss(tokens())[0].mean()))
            parameter += 1e-5 * direction
            slope = (losses[0] - losses[1]) / 2e-5
            assert slope == pytest.approx(
                float((found[name] * direction).sum()), rel=1e-4, abs=1e-7
            ), name


def test_the_start_of_training_knows_next_to_nothing() -> None:
    for tied in (False, True):
        torch.manual_seed(0)
        model = Transformer(tiny_config(length=64, hidden=64, tie_embeddings=tied), 256)
        with torch.no_grad():
            nats_BN, auxiliary = model.loss(tokens(2, 64, vocabulary=256))
        # Logits of variance 1/4 cost an eighth of a nat.
        assert (
            float(nats_BN.mean()) == pytest.approx(math.log(256) + 0.125, abs=0.05)
            and auxiliary == 0
        )
        assert (model.output_VS is model.embedding.table_VS) == tied
        table_VS = model.embedding.table_VS.detach()
        output_VS = model.output_VS.detach()
        assert float(table_VS.std()) == pytest.approx(0.5 / 8 if tied else 1, rel=0.05)
        assert float(output_VS.std()) == pytest.approx(0.5 / 8, rel=0.05)


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout", "ffn_dropout"])
def test_dropout_is_for_training(kind: str) -> None:
    wish: dict[str, Any] = {kind: 0.5}
    model = tiny_model(**wish)
    without = tiny_model()
    assert torch.equal(model.loss(tokens())[0], without.loss(tokens())[0])
    model.train()
    assert not torch.equal(model.loss(tokens())[0], model.loss(tokens())[0])


RECOMPUTED: list[Kind] = [
    *(
        {"selection": selection, "positions": "shaw", "routing_commitment": 0.1, "base": base}
        for selection, base in zip(SELECTIONS, ("fixed", "lsh", "adaptive_span"), strict=True)
    ),
    {"ffn_parts": 5},
    *covering(OTHERS),
]


@each_kind(RECOMPUTED)
def test_recomputation_changes_nothing(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    # Attention, too, computes in pieces, and again.
    monkeypatch.setattr(blocks, "MAX_SCORES_CPU", 400)
    found: list[dict[str, Tensor]] = []
    options: Kind = {"dropout": 0.2, "attention_dropout": 0.2, "ffn_dropout": 0.2}
    for recompute in (False, True):
        model = tiny_model(recompute=recompute, **SHALLOW, **kind, **options).train()
        torch.manual_seed(3)
        result = gradients(model, tokens())
        result |= {
            f"{i} {j}": x.clone()
            for i, c in enumerate(all_centroids(model))
            for j, x in enumerate(c.statistics)
        }
        after_step(model)
        result |= {"state " + name: x.clone() for name, x in model.state_dict().items()}
        found.append(result)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("training", [True, False])
def test_centroids_start_at_vectors_of_training_data_and_wait_for_them(training: bool) -> None:
    states = []
    for _ in range(2):
        model = tiny_model().train(training)
        seen = []
        routing = [module for module in model.modules() if isinstance(module, Routing)]
        before = {name: x.clone() for name, x in model.state_dict().items()}
        drawn = torch.get_rng_state()
        for heads in routing:
            heads.centroids.seed_with_next = True
        model.eval().loss(tokens(3))  # a validation batch
        assert all(torch.equal(x, model.state_dict()[name]) for name, x in before.items())
        for heads in routing:
            heads.register_forward_pre_hook(
                lambda heads, given: seen.append((heads.centroids, given[0]))  # noqa: B023
            )
        initialise_from_data(model.train(training), tokens(3, seed=1))
        assert torch.equal(drawn, torch.get_rng_state())
        assert all(module.training == training for module in model.modules())
        for centroids, q_BHND in seen:
            assert not centroids.seed_with_next and centroids.statistics.sequences == 0, (
                "what seeds is not observed"
            )
            q_HND = to_sphere(normalise(q_BHND)[0])
            assert (centroids.centroid_HCD[:, :, None] - q_HND[:, None]).norm(dim=-1).amin(
                -1
            ).max() < 1e-5
        assert len(seen) == 2
        states.append(model.state_dict())
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


@pytest.mark.parametrize("positions", ["axial", "learned", "none"])
def test_weights_at_the_start_by_depth(positions: str) -> None:
    sizes = {
        "length": 1024,
        "hidden": 128,
        "ffn_hidden": 256,
        "layers": 4,
        "positions": positions,
        "ffn": "relu",
    }
    torch.manual_seed(0)
    model = Transformer(tiny_config(**sizes, init="depth_scaled", axes="64x16"), 1000)
    for block in model.blocks:
        assert isinstance(block, Block)
        attention = block.attention
        ffn = block.feed_forward
        for linear, shrink in (
            (attention.qkv, 1),
            (ffn.inner, 1),
            (attention.out, 8),
            (ffn.outer, 8),
        ):
            variance = 0.125 / linear.in_features / shrink
            assert float(linear.weight.detach().var()) == pytest.approx(variance, rel=0.05)
    assert float(model.embedding.table_VS.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert float(model.embedding.start_S.detach().std()) == pytest.approx(0.01, rel=0.3)
    if model.embedding.positions is not None:
        assert float(model.embedding.positions(0, 1024).detach().std()) == pytest.approx(
            0.01, rel=0.1
        )
    assert (model.output_VS == 0).all()


@pytest.mark.parametrize("selection", ["causal", "random", *BY_QUERY])
def test_in_training_too_later_units_move_nothing_earlier(selection: str) -> None:
    model = tiny_model(length=44, selection=selection, **SHALLOW).train()
    before_BN = tokens(length=44)
    after_BN = torch.cat([before_BN[:, :31], tokens(length=44, seed=1)[:, 31:]], dim=1)
    before, after = (model(x)[0][:, :32] for x in (before_BN, after_BN))
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


@each_kind(
    [
        {},
        {"selection": "topk"},
        *(kind for kind in covering(OTHERS) if kind["selection"] != "random"),
    ]
)
def test_the_state_has_all_that_lasts(kind: Kind) -> None:
    model = tiny_model(seed=0, **SHALLOW, **kind)
    other = tiny_model(seed=1, **SHALLOW, **kind)
    for _ in range(3):  # the steps of the indexer's warm-up
        model.train().loss(tokens())
        after_step(model.eval())
    other.load_state_dict(model.state_dict())
    assert torch.equal(model.loss(tokens())[0], other.loss(tokens())[0])


@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method.*:DeprecationWarning"
)  # torch's own, while it compiles
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch asks
@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_model_has_the_same_loss_and_gradients(recompute: bool) -> None:
    kind = {"selection": "causal", "layers": 2, "routing_layers": 1, "recompute": recompute}
    plain, compiled = (tiny_model(**kind).train() for _ in range(2))
    compiled.loss = compile_loss(compiled, compiled.loss)  # type: ignore[method-assign]
    torch.testing.assert_close(
        gradients(compiled, tokens()), gradients(plain, tokens()), rtol=1e-9, atol=1e-12
    )
