"""Optimizers, and the learning rate as a pure function of the step (so that no scheduler has a state to lose)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rtx.config import Config, OptimizerConfig
from rtx.training.sharding import is_part, local, shared_as, whole


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of optimizer step `step`; the first step is 1.

    Linear warm-up to `optimizer.lr` over `optimizer.warmup` steps, then peak * sqrt(warmup / step) (rsqrt, as the
    paper), a cosine that ends at a tenth of the peak at `trainer.steps`, or the peak throughout (constant).
    """
    assert step >= 1
    peak, warmup, schedule = config.optimizer.lr, config.optimizer.warmup, config.optimizer.schedule
    if step < warmup:
        return peak * step / warmup
    if schedule == "rsqrt":
        return peak * math.sqrt(warmup / step)
    if schedule == "cosine":
        share = min(1.0, (step - warmup) / max(1, config.trainer.steps - warmup))
        return peak * (0.1 + 0.45 * (1.0 + math.cos(math.pi * share)))
    return peak


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer that `config` names; its learning rate must be set before each step.

    The weights of linear layers decay, and `output_VS` where it is not the embedding table; all else does not.
    Adafactor is torch's own, with no first moment, as Shazeer and Stern (2018), but that the step size is
    min(lr, 1 / sqrt(step)) and that the mean square of the gradient has a floor of 1e-18 instead of 1e-30 added to each
    entry: torch's default of 1e-7 would hide the small gradients of large models, and 1e-30 squared is 0 in float32.
    """
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    decaying, exempt = [], []
    for name, parameter in model.named_parameters():
        is_matrix = id(parameter) in linear or name.rpartition(".")[2] == "output_VS"
        (decaying if is_matrix else exempt).append(parameter)
    groups = [{"params": decaying, "weight_decay": config.weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if config.name == "adafactor":
        shared = any(is_part(parameter) for parameter in model.parameters())
        adafactor = SharedAdafactor if shared else torch.optim.Adafactor
        return adafactor(groups, lr=config.lr, beta2_decay=-0.8, eps=(1e-18, 1e-3), d=1.0)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
    return kind(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


class SharedAdafactor(torch.optim.Adafactor):
    """Adafactor over parameters that are shared out: its means run over whole matrices, so each is gathered in turn.

    Every process takes the whole step and keeps its part. The state, sums over rows and columns, is whole everywhere.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                stand_in = nn.Parameter(whole(parameter))
                stand_in.grad = whole(parameter.grad)
                for_one = torch.optim.Adafactor([{"params": [stand_in], **options}])
                for_one.state[stand_in] = self.state[parameter]
                for_one.step()
                self.state[parameter] = for_one.state[stand_in]
                local(parameter).copy_(local(shared_as(stand_in.detach(), parameter)))
        return loss


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
