"""Muon with AdamW: which weights each updates, that they do what torch's do, and what is saved."""

import copy

import pytest
import torch
from torch import Tensor

from rtx.model.transformer import Transformer
from rtx.settings.schema import OptimizerConfig
from rtx.training.muon import MuonWithAdamW
from rtx.training.optimizers import (
    build_optimizer,
    check_moments,
    hidden_matrices,
    parameter_groups,
    set_learning_rate,
)
from tests.helpers.tiny_models import tiny_model

CONFIG = OptimizerConfig(name="muon", lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.98)


def model_with_gradients() -> Transformer:
    model = tiny_model(positions="shaw", embedding=6)
    set_gradients(model, 0)
    return model


def set_gradients(model: Transformer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


def take_steps(model: Transformer, optimizer: MuonWithAdamW, seeds: range) -> None:
    for seed in seeds:
        set_gradients(model, seed)
        set_learning_rate(optimizer, 0.01 / (1 + seed))
        optimizer.step()


def built(model: Transformer) -> MuonWithAdamW:
    optimizer = build_optimizer(model, CONFIG)
    assert isinstance(optimizer, MuonWithAdamW)
    return optimizer


def test_muon_has_the_matrices_of_the_blocks_and_adamw_all_else() -> None:
    model = model_with_gradients()
    matrices, decaying, exempt = parameter_groups(model, "muon")
    kinds = ("attention.qkv", "attention.out", "feed_forward.inner", "feed_forward.outer")
    blocks = range(len(model.blocks))
    assert [*matrices] == [f"blocks.{block}.{kind}.weight" for block in blocks for kind in kinds]
    assert {*decaying} == {
        "embedding.project_in.weight",
        "project_out.weight",
        "output_VS",
    }
    assert len(matrices) + len(decaying) + len(exempt) == len([*model.parameters()])


def test_steps_are_those_of_torchs_muon_and_adamw() -> None:
    """A step of Muon by its formula: momentum, Newton-Schulz, the scale of AdamW's updates."""
    ours = model_with_gradients()
    theirs = copy.deepcopy(ours)
    set_gradients(theirs, 0)
    take_steps(ours, built(ours), range(3))

    matrices = hidden_matrices(theirs)
    exempt = parameter_groups(theirs, "muon")[2]
    muon = torch.optim.Muon([*matrices.values()], weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [
            {"params": [weight], "weight_decay": 0.0 if name in exempt else 0.1}
            for name, weight in theirs.named_parameters()
            if name not in matrices
        ],
        betas=(0.9, 0.98),
    )
    for seed in range(3):
        set_gradients(theirs, seed)
        for optimizer in (muon, adamw):
            set_learning_rate(optimizer, 0.01 / (1 + seed))
            optimizer.step()
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight, theirs.get_parameter(name), rtol=1e-9, atol=1e-9)


def test_a_saved_state_goes_on_to_the_same_bits() -> None:
    straight = model_with_gradients()
    take_steps(straight, built(straight), range(4))

    stopped = model_with_gradients()
    optimizer = built(stopped)
    take_steps(stopped, optimizer, range(2))
    resumed = model_with_gradients()
    resumed.load_state_dict(stopped.state_dict())
    other = built(resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    check_moments(other)
    take_steps(resumed, other, range(2, 4))
    for name, weight in straight.named_parameters():
        assert torch.equal(weight, resumed.get_parameter(name)), name


@pytest.mark.parametrize("damage", [lambda moment: moment[:1], Tensor.float])
def test_a_momentum_of_another_shape_or_type_is_refused(damage: object) -> None:
    model = model_with_gradients()
    optimizer = built(model)
    optimizer.step()
    state = optimizer.state[next(iter(hidden_matrices(model).values()))]
    state["momentum_buffer"] = damage(state["momentum_buffer"])  # type: ignore[operator]
    with pytest.raises(ValueError, match="momentum_buffer is not like its weight"):
        check_moments(optimizer)
