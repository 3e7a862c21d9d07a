"""One optimizer step, as Lightning runs it: forward, backward, clipping, optimizer, centroids."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rtx.attention.centroids import after_step
from rtx.config import Config
from rtx.model.transformer import compile_loss
from rtx.training.optimizers import build_optimizer, learning_rate, set_learning_rate
from rtx.training.sharding import shard, whole


class TrainingModule(pl.LightningModule):
    """The model with its optimizer. `step` counts finished optimizer steps; all else that lasts is in the checkpoint.

    Args:
        model: has `loss(tokens_BN) -> (nats_BN, auxiliary)`, or with answers what `score_windows` says.
        config: the resolved configuration.
        answers: positions `[A]` of each sequence whose units alone count; None: all of them.
    """

    at_A: Tensor | None

    def __init__(self, model: nn.Module, config: Config, answers: np.ndarray | None = None) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.step = 0
        self.rate = 0.0
        """Learning rate of the last step."""
        self.in_step = False
        """Whether micro-batches of an unfinished step have been seen."""
        self.nats_sum = 0.0
        self.right_sum = 0.0
        self.passes = 0
        """Sums of the mean nats and the share of right answers, and the number, of the forward passes since the last
        row; summed as float64."""
        self.step_losses: list[Tensor] = []
        self.step_right: list[Tensor] = []
        """Mean nats, and share of right answers, of the forward passes of this step, on the device."""
        self.unread: list[StepRecord] = []
        """What has not been read back from the device yet."""
        self.register_buffer("at_A", None if answers is None else torch.from_numpy(answers), persistent=False)
        self.loss: Callable[..., tuple[Tensor, ...]] = model.loss if answers is None else model.answers  # type: ignore[assignment]
        if config.hardware.compile:
            self.loss = compile_loss(model, self.loss)

    def configure_model(self) -> None:
        """Share the parameters out, where the strategy has processes to do so (hardware=fsdp); once, before a fit."""
        if self.device_mesh is not None:
            self.trainer.precision_plugin.convert_module(self)  # what is shared out keeps its type
            shard(self.model, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build the optimizer that the configuration names."""
        return build_optimizer(self.model, self.config.optimizer)

    def training_step(self, tokens_BN: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of a micro-batch: mean nats per unit that counts plus the auxiliary loss."""
        self.in_step = True
        if self.at_A is None:
            nats_BN, auxiliary = self.loss(tokens_BN)
        else:
            nats_BN, right_BA, auxiliary = self.loss(tokens_BN, self.at_A)
            self.step_right.append(right_BA.float().mean())
        mean = nats_BN.mean()
        self.step_losses.append(mean.detach())
        return mean + auxiliary

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Measure the norm of the whole gradient, and scale the gradient down to `trainer.clip`."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if self.config.trainer.clip:
            clip_grads_with_norm_(parameters, self.config.trainer.clip, norm)
        right = torch.stack(self.step_right) if self.step_right else None
        self.unread.append(StepRecord(self.step + 1, self.rate, torch.stack(self.step_losses), norm, right))
        self.step_losses, self.step_right = [], []

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Take one step at its learning rate, then move the centroids: once per optimizer step."""
        self.rate = learning_rate(self.config, self.step + 1)
        set_learning_rate(optimizer.optimizer, self.rate)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()  # nobody reads them any more; Lightning would keep them through the next forward pass
        after_step(self.model)
        self.step += 1
        self.in_step = False

    def read_back(self) -> StepRecord | None:
        """Wait for the device, fold the unread steps into the running sums, and return the last of them.

        Raises:
            NotFinite: the loss or the gradient of a step is NaN or infinite; the first such step.
        """
        last = None
        for record in self.unread:
            losses, norm = record.losses.double().cpu(), float(record.norm)
            if not (bool(torch.isfinite(losses).all()) and math.isfinite(norm)):
                raise NotFinite(record.step, record.rate, float(losses.mean()), norm)
            for loss in losses.tolist():
                self.nats_sum += loss
            if record.right is not None:
                self.right_sum += float(record.right.double().sum())
            self.passes += len(losses)
            last = record
        self.unread = []
        return last


class StepRecord:
    """A finished step whose numbers are still on the device."""

    def __init__(self, step: int, rate: float, losses: Tensor, norm: Tensor, right: Tensor | None = None) -> None:
        self.step, self.rate, self.losses, self.norm, self.right = step, rate, losses, norm, right


class NotFinite(Exception):
    """A step whose loss or gradient is not a number."""

    def __init__(self, step: int, rate: float, nats: float, norm: float) -> None:
        what = f"loss is {nats}" if not math.isfinite(nats) else f"norm of the gradient is {norm}"
        super().__init__(f"step {step}: the {what} at learning rate {rate:g}")
