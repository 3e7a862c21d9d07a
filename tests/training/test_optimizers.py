"""Learning rates as a function of the step, and what the optimizers do to a parameter."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from rtx.config import Config, OptimizerConfig, TrainerConfig
from rtx.training.module import build_optimizer, learning_rate, set_learning_rate


def config(schedule: str, warmup: int, steps: int = 100) -> Config:
    return Config(
        optimizer=OptimizerConfig(lr=0.4, schedule=schedule, warmup=warmup), trainer=TrainerConfig(steps=steps)
    )


def test_the_warm_up_is_linear_and_what_follows_is_what_its_name_says() -> None:
    for schedule in ("rsqrt", "cosine", "constant"):
        rates = [learning_rate(config(schedule, 8), step) for step in range(1, 9)]
        assert rates == pytest.approx([0.4 * step / 8 for step in range(1, 9)], rel=1e-15)
    assert learning_rate(config("rsqrt", 4), 64) == pytest.approx(0.4 * math.sqrt(4 / 64))
    assert learning_rate(config("constant", 4), 64) == 0.4 == learning_rate(config("constant", 0), 1)
    cosine = [learning_rate(config("cosine", 20), step) for step in (60, 100, 1000)]
    assert cosine == pytest.approx([0.4 * 0.55, 0.04, 0.04])
    assert learning_rate(config("cosine", 0), 1) == pytest.approx(0.4, rel=1e-3)


class Parts(nn.Module):
    """One parameter of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2)
        self.table_VS = nn.Parameter(torch.ones(5, 2))
        self.output_VS = nn.Parameter(torch.ones(5, 2))


def test_only_matrices_decay() -> None:
    model = Parts()
    decaying, exempt = build_optimizer(model, OptimizerConfig(name="adamw", weight_decay=0.1)).param_groups
    assert (decaying["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    assert {id(p) for p in decaying["params"]} == {id(model.linear.weight), id(model.output_VS)}
    assert len(exempt["params"]) == 4


def stepped(name: str, start: torch.Tensor, gradients: list[torch.Tensor], rates: list[float], **more: float):
    """Return a matrix after steps with given gradients."""
    model = nn.Linear(start.shape[1], start.shape[0], bias=False, dtype=start.dtype)
    with torch.no_grad():
        model.weight.copy_(start)
    settings = dataclasses.replace(OptimizerConfig(name=name, beta1=0.9, beta2=0.98), **more)
    optimizer = build_optimizer(model, settings)
    for gradient, rate in zip(gradients, rates, strict=True):
        set_learning_rate(optimizer, rate)
        model.weight.grad = gradient.clone()
        optimizer.step()
    return model.weight.detach()


def some_gradients(count: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [scale * torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-7])
def test_adafactor_is_shazeer_and_stern_at_any_size_of_gradient(scale: float) -> None:
    x = start = 0.05 * torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    gradients, rates = some_gradients(4, scale), [0.0025, 0.005, 0.0075, 0.01]
    row, column = torch.zeros(4, 1, dtype=torch.float64), torch.zeros(1, 6, dtype=torch.float64)
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        decay = 1 - t**-0.8
        row = decay * row + (1 - decay) * (gradient**2).mean(1, keepdim=True)
        column = decay * column + (1 - decay) * (gradient**2).mean(0, keepdim=True)
        update = gradient / (row * column / row.mean()).sqrt()
        update = update / max(1.0, update.square().mean().sqrt().item())
        x = x - rate * max(1e-3, x.square().mean().sqrt().item()) * update
    torch.testing.assert_close(stepped("adafactor", start, gradients, rates), x, rtol=1e-9, atol=1e-12)
